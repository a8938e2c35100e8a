"""The actor of recorded data, whose responses come from the records.

If `prompts.responses` is set, training uses this actor. An evaluation uses it for held-out pairs; for
held-out prompts, an evaluation uses the actor that samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oat.data.fit import Fit, RecordedSequence
from oat.data.formats import scores_of
from oat.errors import DataError
from oat.text.decoding import moved_ends
from oat.text.openings import without_opening
from oat.types import Branching, Group, Message, Prompt, Sampling, Segment, Trajectory, Work


class RecordedActor:
    """An actor that makes trajectories of recorded responses. The trajectories have no version and no
    log-probabilities.

    The assistant's tokens after the prompt are trained. In a text without a prompt, all tokens except the
    first are trained.

    Args:
        fit: decides which records are short enough, and how longer records are cut.
        columns: the columns of the responses, in the format that `formats.Layout` gives them.
        score_key: the column of the responses' scores, as `formats.scores_of` reads it.
        records_text_ends: True: the response's last segment has `Segment.text_ends`, because the oracle gives
            rewards of steps at offsets in characters. If a template writes the response with other white
            space than the record, a step is complete with its last character that is no white space. A
            last message that is not learned (weight 0) gets no `text_ends`.
    """

    def __init__(
        self,
        fit: Fit,
        columns: Sequence[str],
        score_key: str | None = None,
        *,
        records_text_ends: bool = False,
    ):
        self.fit = fit
        self.columns = tuple(columns)
        self.score_key = score_key
        self.records_text_ends = records_text_ends

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Return one group for each prompt, with its recorded responses in the order of `columns`. Ignore
        `samples`, `address` and `sampling`."""
        return [Group(prompt, self._responses(prompt)) for prompt in prompts]

    def branch(
        self, groups: Sequence[Group], branching: Branching, address: Sequence[str | int]
    ) -> list[Group]:
        raise AssertionError("the algorithm refuses recorded responses if it branches")

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        assert not needs, "resolve/cross_checks refuses an explorer that needs scores of recorded responses"
        return {}

    def work(self) -> Work:
        return Work()

    def _responses(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        where = f"record {prompt.row}"
        scores = scores_of(prompt.columns, self.columns, self.score_key, where)
        found = zip(self.columns, self.fit.sequences(prompt, self.columns, where), scores, strict=True)
        return tuple(
            replace(self._response(prompt, prompt.columns[name], row), reward=score)
            for name, row, score in found
        )

    def _response(
        self, prompt: Prompt, value: str | list[dict[str, str]], row: RecordedSequence
    ) -> Trajectory:
        """Return the trajectory of a response. If the end of the response was cut, the finish reason is
        "length", and the text is the part of the last turn that is left. With a template, a text lacks
        what its prompt has written of it, as that of a sampled response does."""
        bounds = np.flatnonzero(np.diff(row.mask)) + 1
        segments = []
        for part, trained in zip(np.split(row.ids, bounds), np.split(row.mask, bounds), strict=True):
            segments.append(Segment("model", part, mask=trained) if trained[0] else Segment("context", part))
        learned = [segment.ids for segment in segments if segment.author == "model"]
        ids = learned[-1] if prompt.messages and learned else row.ids
        before = row.ids[: len(row.ids) - len(ids)]
        is_cut = row.cut == "response"
        if is_cut:
            start = 0 if prompt.messages else len(self.fit.renderer.prefix)
            text = self.fit.renderer.text(ids[start:], before)
        else:
            text = value if isinstance(value, str) else value[-1]["content"]
            if prompt.messages and self.fit.renderer.template is not None:
                earlier = [] if isinstance(value, str) else map(Message.of, value[:-1])
                opening = self.fit.renderer.opening([*prompt.messages, *earlier])
                text = without_opening(text, opening)
        if self.records_text_ends and segments[-1].author == "model":
            ends = self._text_ends(ids, before, text, prompt.row)[-len(segments[-1].ids) :]
            segments[-1] = replace(segments[-1], text_ends=ends)
        return Trajectory("recorded", tuple(segments), "length" if is_cut else "stop", text)

    def _text_ends(self, ids: np.ndarray, before: np.ndarray, text: str, row: int) -> np.ndarray:
        renderer = self.fit.renderer
        ends = moved_ends(renderer.text_ends(ids, before), renderer.text(ids, before), text)
        if ends is None:
            raise DataError(
                f"record {row}: the tokens of the response do not give its text back, and the oracle rewards "
                "steps that end at its characters; let the oracle give steps in tokens, or remove what the "
                "tokenizer or the template changes in the record"
            )
        return ends
