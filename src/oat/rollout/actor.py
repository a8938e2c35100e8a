"""The actor: renderer and engine, and the environment where there is one. Prompts in, groups of trajectories
out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oat.data.fit import Fit, Row
from oat.data.formats import scores_of
from oat.engines.base import Engine
from oat.environments.base import Environment
from oat.errors import EpisodeError
from oat.plugins.calls import guarded
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import (
    ENSEMBLE,
    Completion,
    FinishReason,
    Group,
    Prompt,
    Request,
    Sampling,
    Segment,
    Trajectory,
    Work,
)


@dataclass
class _Episode:
    """A trajectory that grows turn by turn, from the prompt of a record."""

    row: int
    slot: str
    key: int
    ids: np.ndarray
    segments: list[Segment]
    state: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    text: str = ""
    finish_reason: FinishReason = "aborted"

    def context(self, ids: np.ndarray) -> None:
        """Take the whole sequence so far; what is new in it is context."""
        self.segments.append(Segment("context", ids[len(self.ids) :]))
        self.ids = ids

    def respond(self, completion: Completion, text: str) -> None:
        size = len(completion.ids)
        response = Segment(
            "model",
            completion.ids,
            mask=np.ones(size, dtype=bool),
            versions=np.full(size, completion.version, dtype=np.int32),
            raw_logps=completion.raw_logps,
            sampled_logps=completion.sampled_logps,
            kept=completion.kept,
        )
        self.segments.append(response)
        self.ids = np.concatenate([self.ids, completion.ids])
        self.text, self.finish_reason = text, completion.finish_reason


class Actor:
    """Samples and scores.

    Args:
        sampling: how training responses are drawn.
        environment: answers the responses within an episode; None: one response is the episode.
        scorer: scores samples under the ensemble.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        sampling: Sampling,
        seeds: Seeds,
        *,
        environment: Environment | None = None,
        scorer: EnsembleScorer | None = None,
    ):
        self.renderer = renderer
        self.engine = engine
        self.sampling = sampling
        self.seeds = seeds
        self.environment, self.scorer = environment, scorer

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """One group a prompt; its trajectories stand slot by slot, in the order of `samples`.

        Args:
            samples: responses a prompt, by slot.
            address: purpose, step and round of the random numbers.
            sampling: other than in training.

        Raises:
            EpisodeError: the environment failed.
        """
        contexts = [self.renderer.prompt(prompt.messages) for prompt in prompts]
        groups: list[list[Trajectory]] = [[] for _ in prompts]
        for slot, count in samples.items():
            owners = [number for number in range(len(prompts)) for _ in range(count)]
            episodes = []
            for owner, sample in zip(owners, list(range(count)) * len(prompts), strict=True):
                place = (*address, slot, prompts[owner].occurrence, sample)
                episode = _Episode(
                    prompts[owner].row,
                    slot,
                    self.seeds.key(*place),
                    contexts[owner],
                    [Segment("context", contexts[owner])],
                )
                if self.environment is not None:
                    with _played(self.environment, episode):
                        episode.state = self.environment.reset(
                            prompts[owner], self.seeds.at("environment", *place)
                        )
                episodes.append(episode)
            self._play(episodes, slot, sampling or self.sampling)
            for owner, episode in zip(owners, episodes, strict=True):
                groups[owner].append(self._trajectory(episode, sampling or self.sampling))
        return [
            Group(prompt, tuple(trajectories)) for prompt, trajectories in zip(prompts, groups, strict=True)
        ]

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """What an explorer needs to know of the groups.

        Returns:
            For a slot, (G,) summed raw log-probabilities a group ("sampler": those recorded at sampling); for
            "ensemble", (M, G) rewards a group, and beside them "features", (G, D) a group. float32.
        """
        scores: dict[str, list[np.ndarray]] = {}
        for name in needs:
            if name == ENSEMBLE:
                assert self.scorer is not None, (
                    "build/run.py gives the actor a scorer where the explorer needs the ensemble"
                )
                scores[name], scores["features"] = self.scorer.score(groups)
            else:
                scores[name] = self._logps(groups, name)
        return scores

    def work(self) -> Work:
        """What the engine has computed to sample, since this was first called."""
        return self.engine.work()

    def _logps(self, groups: Sequence[Group], slot: str) -> list[np.ndarray]:
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        if slot == "sampler":
            logps = [row.recorded("raw_logps") for row in rows]
        else:
            found = self.engine.logps([row.ids for row in rows], slot)
            logps = [values[row.trained[1:]] for values, row in zip(found, rows, strict=True)]
        sums = np.array([values.sum() for values in logps], dtype=np.float32)
        return np.split(sums, np.cumsum([len(group.trajectories) for group in groups])[:-1])

    def _play(self, episodes: Sequence[_Episode], slot: str, sampling: Sampling) -> None:
        """One response for every open episode, turn after turn, until the environment has ended all of
        them."""
        playing = list(episodes)
        while playing:
            requests = [Request(episode.ids, sampling, episode.key) for episode in playing]
            for completion in self.engine.generate(requests, slot):
                playing[completion.index].respond(completion, self.renderer.text(completion.ids))
            playing = [episode for episode in playing if self._goes_on(episode)]

    def _goes_on(self, episode: _Episode) -> bool:
        if self.environment is None:
            return False
        with _played(self.environment, episode):
            turn = self.environment.step(episode.state, episode.text)
            episode.state, episode.reward = turn.state, (episode.reward or 0.0) + turn.reward
        if turn.message is not None:
            episode.context(self.renderer.extend(episode.ids, turn.message))
        return turn.message is not None

    def _trajectory(self, episode: _Episode, sampling: Sampling) -> Trajectory:
        return Trajectory(
            episode.slot,
            tuple(episode.segments),
            episode.finish_reason,
            episode.text,
            sampling.temperature,
            episode.reward,
        )


@contextmanager
def _played(environment: Environment, episode: _Episode) -> Iterator[None]:
    """Whatever an environment raises within it is an error that names it and the record."""
    name = f"the environment {type(environment).__name__}"

    def refuse(what: str) -> EpisodeError:
        return EpisodeError(
            f"{name} {what}, in an episode from record {episode.row}; repair it, and run the same command "
            "again"
        )

    with guarded(name, refuse):
        yield


class RecordedActor:
    """The actor of offline data: responses that stand in the records become trajectories, without a version
    or log-probabilities.

    Args:
        fit: that decided which records have room, and how those are cut that have none.
        columns: of the responses, as `formats.Layout` leaves them: the assistant's tokens behind the prompt
            are trained; of a text without a prompt all but the first.
        score_key: column of their scores, as `formats.scores_of` reads it.
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
        """One group a prompt, with its recorded responses in the order of the columns."""
        return [Group(prompt, self._responses(prompt)) for prompt in prompts]

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        assert not needs, "build/cross_checks.py refuses an explorer that needs scores of recorded responses"
        return {}

    def work(self) -> Work:
        return Work()

    def _responses(self, prompt: Prompt) -> tuple[Trajectory, ...]:
        where = f"record {prompt.row}"
        scores = scores_of(prompt.columns, self.columns, self.score_key, where)
        found = zip(self.columns, self.fit.rows(prompt, self.columns, where), scores, strict=True)
        return tuple(
            replace(self._response(prompt, prompt.columns[name], row), reward=score)
            for name, row, score in found
        )

    def _response(self, prompt: Prompt, value: str | list[dict[str, str]], row: Row) -> Trajectory:
        """A response whose end was cut is one that did not end, and its text is what is left of its last
        turn."""
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
