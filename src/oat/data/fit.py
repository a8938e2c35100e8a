"""The lengths of records, and the cuts that shorten records. The check of all data before a run
(`data/index.py`) and the actor both use this module, so they get the same tokens.

The length of a prompt that is sampled from is its number of tokens. The length of a record with responses is
the number of tokens of its prompt and its longest response together. If a record with responses is longer
than `prompts.max_tokens` or than the model's context, the setting `too_long` decides:

| too_long | the record |
| --- | --- |
| leave_out | is left out if it exceeds `max_tokens`; if it exceeds only the context, it is an error |
| cut_prompt_start | loses the first tokens of its prompt, the same number for all its responses |
| cut_response_end | loses the last tokens of each response that is too long, with those that end the turn |

Both cuts shorten a record to the smaller of `max_tokens` and the context. If a cut would remove all tokens of
the prompt, or all learned tokens of a response, the record is left out instead. In particular,
`cut_prompt_start` leaves out a long text that has no prompt.

Design:

* `leave_out` is the default, because a cut changes the record.
* Prompt and response have one common limit. A record within two separate limits could exceed the context.
* Tokens are cut after rendering. A cut prompt may begin in the middle of a turn, or lack its system message.
* A cut at the start does not keep a chat's opening tokens. No template says which of them it needs.
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
        ids: (T,) int32, without the tokens that were cut off.
        mask: (T,) bool, True for the learned tokens.
        cut: the part of the record from which tokens were cut off.
    """

    ids: np.ndarray
    mask: np.ndarray
    cut: Literal["nothing", "prompt", "response"] = "nothing"


@dataclass(frozen=True)
class Fit:
    """The limits on the length of records, and the cut of longer records. The head of this file defines the
    length.

    Attributes:
        max_tokens: largest length of a record; None sets no limit.
        room: largest length that fits into the model's context; None if the context is unknown.
        too_long: one of the settings in the table at the head of this file.
    """

    renderer: Renderer
    max_tokens: int | None = None
    room: int | None = None
    too_long: TooLong = "leave_out"

    @property
    def limit(self) -> int | None:
        """The largest length, in tokens, at which a record is kept. For a record that was cut, its length
        after the cut counts. None: every length is kept."""
        limits = (self.max_tokens,) if self.too_long == "leave_out" else (self.max_tokens, self.room)
        return min((limit for limit in limits if limit is not None), default=None)

    def keeps(self, size: int) -> bool:
        """Return True if a record of `size` tokens is kept. For a record that is cut, `size` is its number of
        tokens after the cut."""
        return self.limit is None or size <= self.limit

    def measure(self, prompt: Prompt, layout: Layout, where: str) -> tuple[int, bool]:
        """Return the length of a record in tokens, and True if tokens are cut off from the record. In this
        case the length is that after the cut.

        Raises:
            DataError: the prompt or a response cannot be rendered, or the record is a text without a prompt
                and the run has a chat template.
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
        """Return one sequence per column in `names`: the prompt followed by the response in that column.
        If one of them is too long, they are cut as `too_long` says (see the top of this file). If that cut
        would leave the record out, all are returned uncut.

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
