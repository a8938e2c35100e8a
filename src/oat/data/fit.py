"""The length of records: which have room, and how those without room are cut. The first pass over the data
counts with this module, and the actor learns the sequences that it returns, so the two agree.

A prompt needs room; recorded data need room for the prompt together with its longest response. `too_long`
says what becomes of recorded data without room:

| too_long | what is learned |
| --- | --- |
| leave_out | nothing beyond `max_tokens`; beyond the model's context alone the record is an error |
| cut_prompt_start | the responses whole, behind the prompt's last tokens |
| cut_response_end | the prompt whole, and the first tokens of each response that has no room |

All responses of a record stand behind the same last tokens of its prompt: as many as the longest response
leaves room for. A response whose end is cut has no end of its turn.

Tokens are counted and cut after rendering. A cut prompt therefore begins anywhere: without the tokens that
open a text, the system message, or the mark of a turn. Both cuts obey the smaller of `max_tokens` and the
context. A record is left out if the cut makes no room for it, because the prompt would lose its last token,
or a response its last learned token. A text without a prompt can only be cut at its end.

Leaving out is the default, because a cut changes the record, which a person should ask for. There is one
limit, on prompt and response together: with two limits, a record within both might still have no room. A cut
at the start does not keep a chat's opening tokens, because no template says which of them it needs.
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
        ids, mask: (T,) int32 and (T,) bool, as `Renderer.recorded` returns them, or as cut.
        cut: the part that was cut.
    """

    ids: np.ndarray
    mask: np.ndarray
    cut: Literal["nothing", "prompt", "response"] = "nothing"


@dataclass(frozen=True)
class Fit:
    """Limits on the length of prompts and recorded data, and what happens beyond them.

    Attributes:
        max_tokens: longest prompt that is kept; None keeps all.
        room: most tokens that the model's context leaves for a prompt; None if no context is known.
        too_long: what becomes of recorded data without room; prompts that are sampled from are never cut.
    """

    renderer: Renderer
    max_tokens: int | None = None
    room: int | None = None
    too_long: TooLong = "leave_out"

    @property
    def limit(self) -> int | None:
        """Tokens of the longest record that is kept; None keeps all."""
        limits = (self.max_tokens,) if self.too_long == "leave_out" else (self.max_tokens, self.room)
        return min((limit for limit in limits if limit is not None), default=None)

    def keeps(self, size: int) -> bool:
        """Return whether a record of this many tokens, counted after any cut, is kept."""
        return self.limit is None or size <= self.limit

    def measure(self, prompt: Prompt, layout: Layout, where: str) -> tuple[int, bool]:
        """Return the tokens of a prompt, or of recorded data with its longest response as it is learned; and
        whether anything is cut.

        Raises:
            DataError: the prompt or a response cannot be rendered.
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
        """Return the prompt with each of its responses, one a column, as they are learned. If not even a cut
        makes room, the sequences are whole.

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
