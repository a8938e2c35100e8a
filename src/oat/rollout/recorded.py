"""The actor of recorded data, whose responses come from the records.

If `prompts.responses` is set, training uses this actor. An evaluation uses it for held-out pairs; for
held-out prompts, an evaluation uses the actor that samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oat.data.fit import Fit, RecordedSequence
from oat.data.formats import scores_of
from oat.types import Group, Prompt, Sampling, Segment, Trajectory, Work


class RecordedActor:
    """An actor that makes trajectories of recorded responses. The trajectories have no version and no
    log-probabilities.

    The assistant's tokens after the prompt are trained. In a text without a prompt, all tokens except the
    first are trained.

    Args:
        fit: decides which records are short enough, and how longer records are cut.
        columns: the columns of the responses, in the format that `formats.Layout` gives them.
        score_key: the column of the responses' scores, as `formats.scores_of` reads it.
    """

    def __init__(self, fit: Fit, columns: Sequence[str], score_key: str | None = None):
        self.fit = fit
        self.columns = tuple(columns)
        self.score_key = score_key

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

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        assert not needs, "build/cross_checks refuses an explorer that needs scores of recorded responses"
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
        "length", and the text is the part of the last turn that is left."""
        bounds = np.flatnonzero(np.diff(row.mask)) + 1
        segments = []
        for part, trained in zip(np.split(row.ids, bounds), np.split(row.mask, bounds), strict=True):
            segments.append(Segment("model", part, mask=trained) if trained[0] else Segment("context", part))
        if row.cut == "response":
            left = (
                next(segment.ids for segment in reversed(segments) if segment.author == "model")
                if prompt.messages
                else row.ids
            )
            return Trajectory("recorded", tuple(segments), "length", self.fit.renderer.text(left))
        return Trajectory(
            "recorded", tuple(segments), "stop", value if isinstance(value, str) else value[-1]["content"]
        )
