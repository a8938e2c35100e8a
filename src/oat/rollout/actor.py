"""The actor turns prompts into groups of trajectories. It uses a renderer, an engine and, for episodes of
several turns, an environment.

Branches: further responses that go on from within a sampled response, at the ends of its steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oat.engines.base import Engine
from oat.environments.base import Turn
from oat.environments.batched import BatchedEnvironment
from oat.errors import OatError, WeightsError, warn
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.rollout.features import Features
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import (
    ENSEMBLE,
    Branching,
    Completion,
    FinishReason,
    Group,
    KeptSets,
    Prompt,
    Request,
    Sampling,
    Segment,
    Trajectory,
    Work,
)


@dataclass(frozen=True, eq=False)
class State:
    """A place from which branches are sampled.

    Attributes:
        group: index of the group.
        sample: index, in the group, of the first response that passes through the state.
        size: number of tokens of this response before the state; at least 1.
    """

    group: int
    sample: int
    size: int


def states_of(groups: Sequence[Group], branching: Branching, renderer: Renderer) -> list[State]:
    """Return the states from which branches are sampled, group after group, in the order of responses and of
    tokens. A state that several responses of a group share is returned once."""
    found = []
    for number, group in enumerate(groups):
        known: set[bytes] = set()
        for sample, row in enumerate(group.trajectories):
            ids = row.completion
            for size in step_sizes(row, branching, renderer):
                if (start := ids[:size].tobytes()) not in known:
                    known.add(start)
                    found.append(State(number, sample, size))
    return found


def step_sizes(row: Trajectory, branching: Branching, renderer: Renderer) -> list[int]:
    """Return the number of tokens of a response before the beginning of each of its steps but the first,
    ascending.

    A step begins with the first token after the one that completes a delimiter. A token that has the end of a
    delimiter and more belongs to the step before. Steps beyond `most_steps` belong to the last one.
    """
    ends = delimiter_ends(row.text, branching.delimiter)
    if not ends:
        return []
    text_ends = renderer.text_ends(row.completion, row.segments[0].ids)
    sizes = dict.fromkeys((np.searchsorted(text_ends, ends) + 1).tolist())
    is_inner = [size for size in sizes if text_ends[size - 1] < len(row.text)]
    return is_inner[: branching.most_steps - 1]


def delimiter_ends(text: str, delimiter: str) -> list[int]:
    """Return the number of characters before each step of a text but the first, ascending. No step is blank:
    delimiters with nothing but white space before them belong to the step before or, at the beginning, to the
    first step."""
    ends: list[int] = []
    start = 0
    while (place := text.find(delimiter, start)) >= 0:
        is_blank = not text[start:place].strip()
        start = place + len(delimiter)
        if not is_blank:
            ends.append(start)
        elif ends:
            ends[-1] = start
    return [end for end in ends if text[end:].replace(delimiter, "").strip()]


def branch(parent: Trajectory, size: int, completion: Completion, renderer: Renderer) -> Trajectory:
    """Return the trajectory of a branch. Its response is the first `size` tokens of the parent's, which may
    not be trained, followed by the completion."""
    prompt, begun = parent.segments
    new = len(completion.ids)

    def joined(name: str, rest: np.ndarray) -> np.ndarray:
        return np.concatenate([getattr(begun, name)[:size], rest])

    ids = joined("ids", completion.ids)
    response = Segment(
        "model",
        ids,
        mask=np.arange(size + new) >= size,
        versions=joined("versions", np.full(new, completion.version, dtype=np.int32)),
        raw_logps=joined("raw_logps", completion.raw_logps),
        sampled_logps=joined("sampled_logps", completion.sampled_logps),
        kept=_joined_sets(begun.kept, size, completion.kept),
        text_ends=None if begun.text_ends is None else renderer.text_ends(ids, prompt.ids),
    )
    return replace(
        parent,
        segments=(prompt, response),
        finish_reason=completion.finish_reason,
        text=renderer.text(ids, prompt.ids),
    )


def _joined_sets(begun: KeptSets | None, size: int, rest: KeptSets | None) -> KeptSets | None:
    if begun is None or rest is None:
        return None
    cut = begun.offsets[size]
    return KeptSets(
        np.concatenate([begun.ids[:cut], rest.ids]),
        np.concatenate([begun.offsets[: size + 1], cut + rest.offsets[1:]]),
    )


@dataclass
class _Episode:
    """A trajectory that grows turn by turn.

    Attributes:
        row: the number of the prompt's record.
        state: the environment's state; None without an environment, and if the environment was late.
        key: 64-bit address of the episode's random numbers.
        ids: (L,) int32, the token ids so far: L tokens, prompt and responses.
        text: the last response.
    """

    row: int
    slot: str
    key: int
    ids: np.ndarray
    segments: list[Segment]
    state: Mapping[str, Any] | None = None
    reward: float | None = None
    text: str = ""
    finish_reason: FinishReason = "aborted"
    features: np.ndarray | None = None

    def context(self, ids: np.ndarray) -> None:
        """Append a segment of context.

        Args:
            ids: (L,) int32, the sequence so far, followed by the new context.
        """
        self.segments.append(Segment("context", ids[len(self.ids) :]))
        self.ids = ids

    def respond(self, completion: Completion, text: str, text_ends: np.ndarray | None) -> None:
        size = len(completion.ids)
        response = Segment(
            "model",
            completion.ids,
            mask=np.ones(size, dtype=bool),
            versions=np.full(size, completion.version, dtype=np.int32),
            raw_logps=completion.raw_logps,
            sampled_logps=completion.sampled_logps,
            kept=completion.kept,
            text_ends=text_ends,
        )
        self.segments.append(response)
        self.ids = np.concatenate([self.ids, completion.ids])
        self.text, self.finish_reason = text, completion.finish_reason
        self.features = completion.features

    def answer(self, turn: Turn) -> None:
        """Record the environment's answer to the last response."""
        self.state, self.reward = turn.state, (self.reward or 0.0) + turn.reward
        self.segments[-1] = replace(self.segments[-1], reward=float(turn.reward))

    def abort(self) -> None:
        """End the episode without a reward, since the environment was late."""
        self.reward, self.finish_reason = None, "aborted"

    def fill(self) -> None:
        """End the episode after its last response, since the context has no room for a further one."""
        self.finish_reason = "length"


class Actor:
    """An actor that samples responses from an engine, and scores them for explorers.

    Args:
        sampling: the settings of sampling in training.
        environment: answers the responses within an episode; None: an episode is one response.
        context: largest number of tokens of an episode. An episode ends if the environment's message leaves
            no room for another token. None: no limit.
        scorer: scores samples under the ensemble; None if nothing needs these scores.
        features: the backbone of features; None if nothing needs them.
        versions: the version of each slot's weights. A response of other weights is refused. None: nothing is
            refused.
        records_text_ends: True: record `Segment.text_ends` in training, because the oracle gives rewards of
            steps at offsets in characters.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        sampling: Sampling,
        seeds: Seeds,
        *,
        environment: BatchedEnvironment | None = None,
        context: int | None = None,
        scorer: EnsembleScorer | None = None,
        features: Features | None = None,
        records_text_ends: bool = False,
        versions: Mapping[str, int] | None = None,
    ):
        self.renderer = renderer
        self.engine = engine
        self.sampling = sampling
        self.seeds = seeds
        self.environment, self.context = environment, context
        self.scorer, self.features = scorer, features
        self.records_text_ends = records_text_ends
        self.versions = versions
        self._has_warned = False

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: Mapping[str, int],
        address: Sequence[str | int],
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Return one group for each prompt. A group's trajectories are in the order of the slots in
        `samples`.

        Args:
            samples: number of responses for each prompt, by slot.
            address: words and numbers from which the random numbers are derived, such as purpose, step and
                round.
            sampling: the settings of sampling; None: those of training.

        Raises:
            EpisodeError: the environment failed.
        """
        contexts = [self.renderer.prompt(prompt.messages) for prompt in prompts]
        groups: list[list[Trajectory]] = [[] for _ in prompts]
        for slot, count in samples.items():
            owners = [number for number in range(len(prompts)) for _ in range(count)]
            episodes = []
            places = []
            for owner, sample in zip(owners, list(range(count)) * len(prompts), strict=True):
                place = (*address, slot, prompts[owner].occurrence, sample)
                episode = _Episode(
                    prompts[owner].row,
                    slot,
                    self.seeds.key(*place),
                    contexts[owner],
                    [Segment("context", contexts[owner])],
                )
                episodes.append(episode)
                places.append(place)
            self._begin(episodes, [prompts[owner] for owner in owners], places)
            has_ends = self.records_text_ends and sampling is None
            self._play(episodes, slot, sampling or self.sampling, has_ends)
            for owner, episode in zip(owners, episodes, strict=True):
                groups[owner].append(self._trajectory(episode, sampling or self.sampling))
        return [
            Group(prompt, tuple(trajectories)) for prompt, trajectories in zip(prompts, groups, strict=True)
        ]

    def branch(
        self, groups: Sequence[Group], branching: Branching, address: Sequence[str | int]
    ) -> list[Group]:
        """Return sampled groups with their branches, which follow the responses in each group.

        A branch has the settings of training, and at most as many tokens, together with its beginning, as any
        response.

        Args:
            groups: groups whose responses have one turn, and come from the slot `sampler`.
            address: that of `sample`.
        """
        states = states_of(groups, branching, self.renderer)
        parents = [groups[state.group].trajectories[state.sample] for state in states]
        shorter = {
            size: replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - size)
            for size in {state.size for state in states}
        }
        requests: list[Request] = []
        for state, parent in zip(states, parents, strict=True):
            occurrence = groups[state.group].prompt.occurrence
            place = (*address, "branch", parent.slot, occurrence, state.sample, state.size)
            start = parent.ids[: len(parent.segments[0].ids) + state.size]
            requests += [
                Request(start, shorter[state.size], self.seeds.key(*place, number), begun=state.size)
                for number in range(branching.branches)
            ]
        made: dict[int, Trajectory] = {}
        for completion in self._generated(requests, "sampler") if requests else ():
            number = completion.index // branching.branches
            made[completion.index] = branch(parents[number], states[number].size, completion, self.renderer)
        found = [list(group.trajectories) for group in groups]
        for index in range(len(requests)):
            found[states[index // branching.branches].group].append(made[index])
        return [replace(group, trajectories=tuple(rows)) for group, rows in zip(groups, found, strict=True)]

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Return the scores that an explorer needs, by name: for each name one float32 array per group.

        Args:
            needs: slots, "ensemble", or "features".

        Returns:
            * For a slot, (G,): the sum of the raw log-probabilities of a sample's trained tokens, in nats.
              For "sampler" these are the recorded log-probabilities.
            * For "ensemble", (M, G): the reward of each sample by each member.
            * If "ensemble" is needed, also "features", (G, D): the feature of each sample, of D numbers, from
              which the ensemble computes the rewards. "features" alone needs no ensemble.
        """
        scores: dict[str, list[np.ndarray]] = {}
        for name in needs:
            if name == ENSEMBLE:
                assert self.scorer is not None, (
                    "assemble/run.py gives the actor a scorer where the explorer needs the ensemble"
                )
                scores[name], scores["features"] = self.scorer.score(groups)
            elif name == "features":
                assert self.features is not None, "assemble/run.py gives the actor the features"
                if ENSEMBLE not in needs:
                    scores[name] = self.features.of(groups)
            else:
                scores[name] = self._logps(groups, name)
        return scores

    def work(self) -> Work:
        """Return the work of the engine's `generate`, counted from the first call of this method, and of the
        environment."""
        return self.engine.work() + (Work() if self.environment is None else self.environment.work())

    def _logps(self, groups: Sequence[Group], slot: str) -> list[np.ndarray]:
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        if slot == "sampler":
            logps = [row.recorded("raw_logps") for row in rows]
        else:
            found = self.engine.logps([row.ids for row in rows], slot)
            logps = [values[row.trained[1:]] for values, row in zip(found, rows, strict=True)]
        sums = np.array([values.sum() for values in logps], dtype=np.float32)
        return np.split(sums, np.cumsum([len(group.trajectories) for group in groups])[:-1])

    def _play(self, episodes: Sequence[_Episode], slot: str, sampling: Sampling, has_ends: bool) -> None:
        """Play all episodes until they have ended. In each turn, sample a response for every episode that
        goes on; the environment then answers the response or ends the episode. Without an environment there
        is one turn. The engine keeps what it has computed of an episode from turn to turn. If `has_ends`,
        record the `text_ends` of each response."""
        playing, has_turns = list(episodes), self.environment is not None
        try:
            while playing:
                requests = [Request(episode.ids, sampling, episode.key, has_turns) for episode in playing]
                texts: dict[tuple[int, bytes], str] = {}  # short responses are often equal
                for completion in self._generated(requests, slot):
                    before = playing[completion.index].ids
                    name = int(before[-1]), completion.ids.tobytes()
                    if name not in texts:
                        texts[name] = self.renderer.text(completion.ids, before)
                    ends = self.renderer.text_ends(completion.ids, before) if has_ends else None
                    playing[completion.index].respond(completion, texts[name], ends)
                playing = self._going_on(playing)
        finally:
            if has_turns:
                self.engine.release(slot, [episode.key for episode in episodes])

    def _generated(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        """Yield the engine's completions. Each must have the version that the slot's weights have.

        Raises:
            WeightsError: a completion has another version.
        """
        asked = None if self.versions is None else self.versions[slot]
        for completion in self.engine.generate(requests, slot):
            if asked is not None and completion.version != asked:
                raise WeightsError(
                    f"slot {slot}: a response came from version {completion.version} of the weights, and "
                    f"version {asked} was asked; nothing is learned from it"
                )
            yield completion

    def _begin(
        self,
        episodes: Sequence[_Episode],
        prompts: Sequence[Prompt],
        places: Sequence[Sequence[str | int]],
    ) -> None:
        if self.environment is not None:
            generators = [self.seeds.at("environment", *place) for place in places]
            states = self.environment.reset(prompts, generators)
            for episode, state in zip(episodes, states, strict=True):
                episode.state = state

    def _going_on(self, episodes: Sequence[_Episode]) -> list[_Episode]:
        """Have the environment answer the last response of each episode. Return the episodes that go on,
        with its message at their end. An episode whose context has no room for the message and one more token
        ends, without the message."""
        if self.environment is None:
            return []
        states = [(episode, episode.state) for episode in episodes if episode.state is not None]
        turns = self.environment.step(
            [state for _, state in states],
            [episode.text for episode, _ in states],
            [episode.row for episode, _ in states],
        )
        answers = {id(episode): turn for (episode, _), turn in zip(states, turns, strict=True)}
        going_on = []
        for episode in episodes:
            turn = answers.get(id(episode))
            if turn is None:
                episode.abort()
                continue
            episode.answer(turn)
            if turn.message is None:
                continue
            try:
                ids = self.renderer.extend(episode.ids, turn.message)
            except OatError as error:
                what = f"returned a message that cannot be rendered ({error})"
                raise self.environment.failed(what, [episode.row]) from error
            if self.context is not None and len(ids) >= self.context:
                episode.fill()
                self._warn_of_full(episode, len(ids), self.context, self.environment.name)
                continue
            episode.context(ids)
            going_on.append(episode)
        return going_on

    def _warn_of_full(self, episode: _Episode, size: int, context: int, environment: str) -> None:
        """Warn, once in a run, of an episode that ends because it would have `size` tokens with the
        environment's message."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{environment} goes on in an episode from record {episode.row}, which has "
                f"{len(episode.ids)} tokens, and {size} with its message; the model's context holds "
                f"{context}, and a response needs at least one. Such an episode ends with the response "
                "before the message, and has the finish reason `length` (response/truncated_frac counts it; "
                "this is said once). To avoid it, let the environment end earlier or say less, or lower "
                "sampling.max_new_tokens"
            )

    def _trajectory(self, episode: _Episode, sampling: Sampling) -> Trajectory:
        return sampling.trajectory(
            episode.slot,
            tuple(episode.segments),
            episode.finish_reason,
            episode.text,
            episode.reward,
            episode.features,
        )
