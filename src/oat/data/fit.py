"""Whether a record has room, and how one is cut that has none. The first pass counts by it and the actor
learns what it returns, so the two agree.

What has to have room is a prompt, of recorded data together with its longest response. `too_long` says what
becomes of recorded data without room:

| too_long | what is learned |
| --- | --- |
| leave_out | nothing beyond `max_tokens`; beyond the model's context alone the record is an error |
| cut_prompt_start | the responses whole, behind the prompt's last tokens |
| cut_response_end | the prompt whole, and the first tokens of each response that has no room |

The last tokens of a prompt are the same for each of its responses: as many as the longest one leaves room
for. A response whose end is cut has no end of its turn.

A cut counts tokens as they are rendered. So a prompt that is cut begins where it may: without the tokens that
open a text, the system message, or the mark of a turn. Both cuts go by the smaller of `max_tokens` and the
context. A record for which the cut makes no room is left out: the prompt would lose its last token, or a
response the last token that is learned. A text without a prompt has only an end to cut.
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
class Row:
    """A prompt with a recorded response.

    Attributes:
        ids, mask: (T,) int32 and (T,) bool, as `Renderer.recorded` returns them, or what the cut leaves.
        cut: what of it was cut.
    """

    ids: np.ndarray
    mask: np.ndarray
    cut: Literal["nothing", "prompt", "response"] = "nothing"


@dataclass(frozen=True)
class Fit:
    """Whether prompts can be rendered, and have room.

    Attributes:
        max_tokens: longest prompt that is kept; None keeps all.
        room: most tokens that the model's context leaves for one; None knows of no context.
        too_long: what becomes of recorded data without room; of prompts that are sampled from nothing is cut.
    """

    renderer: Renderer
    max_tokens: int | None = None
    room: int | None = None
    too_long: TooLong = "leave_out"

    @property
    def most(self) -> int | None:
        """Tokens of the longest record that is kept; None keeps all."""
        limits = (self.max_tokens,) if self.too_long == "leave_out" else (self.max_tokens, self.room)
        return min((limit for limit in limits if limit is not None), default=None)

    def keeps(self, size: int) -> bool:
        """Whether a record of so many tokens, as it is learned, is not left out."""
        return self.most is None or size <= self.most

    def measure(self, prompt: Prompt, layout: Layout, where: str) -> tuple[int, bool]:
        """The tokens of the prompt, of recorded data with its longest response as it is learned; and whether
        anything is cut.

        Raises:
            DataError: one of them cannot be rendered.
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
        rows = self.rows(prompt, layout.responses, where)
        return max((len(row.ids) for row in rows), default=size), any(row.cut != "nothing" for row in rows)

    def rows(self, prompt: Prompt, names: Sequence[str], where: str) -> list[Row]:
        """The prompt with each response that these columns have, as it is learned. Those of a record without
        room, even cut, are whole.

        Raises:
            DataError: one of them cannot be rendered.
        """
        whole = [self._row(prompt, name, where) for name in names]
        longest = max((len(row.ids) for row in whole), default=0)
        if self.too_long == "leave_out" or self.most is None or longest <= self.most:
            return whole
        if self.too_long == "cut_response_end":
            cut = [
                row
                if len(row.ids) <= self.most
                else Row(row.ids[: self.most], row.mask[: self.most], "response")
                for row in whole
            ]
            return cut if all(row.mask.any() for row in cut) else whole
        over = longest - self.most
        has_room = over < len(self.renderer.prompt(prompt.messages)) if prompt.messages else False
        return [Row(row.ids[over:], row.mask[over:], "prompt") for row in whole] if has_room else whole

    def _row(self, prompt: Prompt, name: str, where: str) -> Row:
        try:
            return Row(*self.renderer.recorded(prompt.messages, prompt.columns[name]))
        except TemplateError as error:
            raise DataError(f"{where}: field {name!r}: the response cannot be rendered: {error}") from error
