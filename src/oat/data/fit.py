"""The length of records: which records fit, and how the others are cut. The first pass over the data counts
tokens with this module. The actor takes the tokens of recorded responses from it. So the two agree.

The length of a prompt that is sampled from is its number of tokens. The length of recorded data is that of
the prompt together with its longest response. `too_long` says what becomes of recorded data that are longer
than `prompts.max_tokens` or the model's context:

| too_long | what becomes of the record |
| --- | --- |
| leave_out | longer than `max_tokens`: it is left out; only longer than the context: an error |
| cut_prompt_start | the prompt loses its first tokens; the responses stay complete |
| cut_response_end | each response that is too long loses its last tokens; the prompt stays complete |

`cut_prompt_start` cuts the prompt once for all responses of a record, so that the longest response fits. A
response that `cut_response_end` has cut lacks the tokens that end its turn.

Tokens are counted and cut after rendering. A cut prompt can therefore begin anywhere, for example without the
tokens that open a text, without the system message, or in the middle of a turn. Both cuts shorten to the
smaller of `max_tokens` and the context. If a cut would remove all tokens of the prompt, or all learned tokens
of a response, the record is left out instead. A text without a prompt can only be cut at its end.

Leaving out is the default: a cut changes the record, so a person should ask for it. There is one limit, on
prompt and response together. With separate limits, a record within both might still be too long. A cut at the
start does not keep a chat's opening tokens, because no template says which of them it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from oat.data.formats import Layout
from oat.errors import DataError, TemplateError
from oat.text.renderer import Renderer
from oat.types import Prompt

TooLong = Literal["leave_out", "cut_prompt_start", "cut_response_end"]


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """The tokens of a prompt with one recorded response.

    Attributes:
        ids: (T,) int32, after any cut.
        mask: (T,) bool, True for the learned tokens.
        cut: the part from which tokens were cut off.
    """

    ids: np.ndarray
    mask: np.ndarray
    cut: Literal["nothing", "prompt", "response"] = "nothing"


@dataclass(frozen=True)
class Fit:
    """Limits on the length of prompts and recorded data, and what happens beyond them.

    Attributes:
        max_tokens: largest number of tokens of a prompt, with its longest response if responses are read;
            None sets no limit.
        room: largest number of tokens of such a prompt that fit into the model's context; None if no context
            is known.
        too_long: what becomes of longer recorded data. Prompts that are sampled from are never cut here.
    """

    renderer: Renderer
    max_tokens: int | None = None
    room: int | None = None
    too_long: TooLong = "leave_out"

    @property
    def limit(self) -> int | None:
        """The largest number of tokens of a record that is kept; None if every record is kept."""
        limits = (self.max_tokens,) if self.too_long == "leave_out" else (self.max_tokens, self.room)
        return min((limit for limit in limits if limit is not None), default=None)

    def keeps(self, size: int) -> bool:
        """Return whether a record of this many tokens, counted after any cut, is kept."""
        return self.limit is None or size <= self.limit

    def measure(self, prompt: Prompt, layout: Layout, where: str) -> tuple[int, bool]:
        """Return the number of tokens of a record, and whether anything of it is cut. If responses are read,
        the tokens are those of the prompt with its longest response, after any cut.

        Raises:
            DataError: the prompt or a response cannot be rendered, or the record is a text although a chat
                template is set.
        """
        if not prompt.messages and self.renderer.template is not None:
            raise DataError(
                f"{where}: field 'text': expected messages, since a chat template is set, got a text; "
                "remove `render.template`, or write messages"
            )
        try:
            size = len(self.renderer.prompt(prompt.messages)) if prompt.messages else 0
        except TemplateError as error:
            form = layout.format
            name = form.prompt or form.columns[0] if form else layout.prompt_key
            raise DataError(f"{where}: field {name!r}: the prompt cannot be rendered: {error}") from error
        rows = self.sequences(prompt, layout.responses, where)
        return max((len(row.ids) for row in rows), default=size), any(row.cut != "nothing" for row in rows)

    def sequences(self, prompt: Prompt, names: Sequence[str], where: str) -> list[RecordedSequence]:
        """Return the sequences that are learned: for each column in `names`, the prompt followed by the
        response in that column. They are cut as `too_long` says. If this cut cannot make all of them fit,
        they are returned uncut.

        Raises:
            DataError: the prompt or a response cannot be rendered.
        """
        whole = [self._row(prompt, name, where) for name in names]
        longest = max((len(row.ids) for row in whole), default=0)
        if self.too_long == "leave_out" or self.limit is None or longest <= self.limit:
            return whole
        if self.too_long == "cut_response_end":
            cut = [
                row
                if len(row.ids) <= self.limit
                else RecordedSequence(row.ids[: self.limit], row.mask[: self.limit], "response")
                for row in whole
            ]
            return cut if all(row.mask.any() for row in cut) else whole
        over = longest - self.limit
        has_room = over < len(self.renderer.prompt(prompt.messages)) if prompt.messages else False
        return (
            [RecordedSequence(row.ids[over:], row.mask[over:], "prompt") for row in whole]
            if has_room
            else whole
        )

    def _row(self, prompt: Prompt, name: str, where: str) -> RecordedSequence:
        try:
            return RecordedSequence(*self.renderer.recorded(prompt.messages, prompt.columns[name]))
        except TemplateError as error:
            raise DataError(f"{where}: field {name!r}: the response cannot be rendered: {error}") from error
