"""The values that travel between the boxes, and the notation of the whole project.

Axes, used as suffixes of names and in docstrings:

    B   prompts of a batch              N   sequences (rows); B * G when every prompt has G samples
    G   samples of a prompt             U   units: rows that are never separated (the two rows of a pair)
    T   tokens of one sequence          K   trained tokens of the rows at hand, flat, in row order
    V   vocabulary                      M   members of an ensemble

`policy` is being learned, `sampler` produced the tokens, `reference` is frozen. Log-probabilities are float32 nats; `recorded` ones were kept
at sampling, `old` ones are the policy's at `prepare`. `raw` means temperature 1 and the whole vocabulary; `sampled` means the distribution
that was really drawn from, after temperature, top-k, top-p and min-p.

Values are frozen and made of numbers, strings, tuples, dicts and numpy arrays, so that each survives `oat.wire`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "aborted"]
Kind = Literal["compare", "score"]
Mark = Literal["ok", "tie", "abstain", "failed", "unpaid"]
Per = Literal["token", "sequence", "sequence_sum", "prompt", "constant", "pair", "step"]

UNASKED = "none"
"""The oracle of questions that are not asked: they cost nothing and have no winner."""
ENSEMBLE = "ensemble"
"""The oracle of questions that the ensemble answers itself; they never teach it."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        fields: what the data say of it beside role and text (`name`, `tool_calls`, `reasoning_content`, `weight`), none of it null; templates and
            reward functions get it.
    """

    role: str
    content: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def plain(self) -> dict[str, Any]:
        """As data, templates and reward functions have it."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Message":
        """The message that has this `plain` form."""
        return cls(plain["role"], plain["content"], {name: value for name, value in plain.items() if name not in ("role", "content")})

    @property
    def parts(self) -> tuple[Any, ...]:
        """As it is stored: what `Message` takes, without fields where it has none."""
        return (self.role, self.content, self.fields) if self.fields else (self.role, self.content)


@dataclass(frozen=True)
class Prompt:
    """One prompt as taken by a run.

    Attributes:
        row: line of the record in its file, from 1.
        occurrence: how many prompts the run had taken before this one; the same record taken twice has two occurrences.
        messages: the raw conversation; what oracles see.
        reference: the reference answer or response, if the data has one.
        columns: every further column of the record, by name.
        is_chat: the data give messages, and so reward functions get messages too.
    """

    row: int
    occurrence: int
    messages: tuple[Message, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: divide by `temperature` (0 is greedy), then top-k, top-p and min-p, each over what the one before it left.

    Attributes:
        max_new_tokens: most tokens of a response.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
        stop: strings that end a response when they appear in it; their tokens stay.
        keep_sets: record the kept set of every token (needed for ratios under truncation).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    keep_sets: bool = False

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


KEPT_LIMIT = 1024
"""Most ids of a recorded kept set."""


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The tokens that could be drawn, for each of T tokens: `ids[offsets[t]:offsets[t + 1]]`."""

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, eq=False)
class Request:
    """One response wanted from an engine.

    Attributes:
        ids: (L,) int32 prompt ids, at least one.
        key: 64-bit address of its random numbers, from `Seeds.key`.
    """

    ids: np.ndarray
    sampling: Sampling
    key: int


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine returns for `requests[index]`.

    Attributes:
        ids: (T,) int32; a stop id or the tokens of a stop string are kept.
        raw_logps, sampled_logps: (T,) float32.
        kept: the kept sets when they were asked for and the sampling truncates.
        version: the weights' version that produced every token.
    """

    index: int
    ids: np.ndarray
    raw_logps: np.ndarray
    sampled_logps: np.ndarray
    kept: KeptSets | None
    finish_reason: FinishReason
    version: int


@dataclass(frozen=True)
class Work:
    """What a box has computed so far.

    Attributes:
        seconds: that it took.
        least_s: seconds that the machine needs for it at least (`oat.hardware.roofline`).
        keys: cached keys that decoding computed with, a layer.
        padded_keys: those among them that belong to no token.
    """

    seconds: float = 0.0
    least_s: float = 0.0
    keys: int = 0
    padded_keys: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.seconds + other.seconds, self.least_s + other.least_s, self.keys + other.keys, self.padded_keys + other.padded_keys)

    def since(self, before: "Work") -> "Work":
        """What came after a moment."""
        return Work(self.seconds - before.seconds, self.least_s - before.least_s, self.keys - before.keys, self.padded_keys - before.padded_keys)


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens by one author. A `context` segment has ids only.

    Attributes:
        mask: (T,) bool, which tokens may be trained.
        versions: (T,) int32, the weights' version of each token.
    """

    author: Literal["context", "model"]
    ids: np.ndarray
    mask: np.ndarray | None = None
    versions: np.ndarray | None = None
    raw_logps: np.ndarray | None = None
    sampled_logps: np.ndarray | None = None
    kept: KeptSets | None = None


_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled (or recorded) sequence, never padded; what the learner trains on, id by id.

    Attributes:
        slot: whose weights produced the model segments.
        text: the decoded response for oracles and people, cut before a stop string.
        temperature: of the sampled distribution.
        reward: known without asking: of the episode in an environment, or recorded with the data.
    """

    slot: str
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    text: str
    temperature: float = 1.0
    reward: float | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        return np.concatenate([segment.ids for segment in self.segments])

    @property
    def completion(self) -> np.ndarray:
        """(T,) int32: the ids behind the prompt, which is the first segment."""
        return self.segments[1].ids if len(self.segments) == 2 else self.ids[len(self.segments[0].ids) :] if self.segments else _NOTHING

    @cached_property
    def trained(self) -> np.ndarray:
        """(T,) bool: model tokens that may be trained. The first token has no predecessor and never is."""
        masks = [s.mask if s.mask is not None else np.zeros(len(s.ids), dtype=bool) for s in self.segments]
        trained = np.concatenate(masks)
        trained[:1] = False
        return trained

    def recorded(self, name: Literal["raw_logps", "sampled_logps", "versions"]) -> np.ndarray:
        """The recorded values of the trained tokens, (K,)."""
        parts = []
        for segment in self.segments:
            values = getattr(segment, name)
            parts.append(values if values is not None else np.zeros(len(segment.ids), dtype=np.float32))
        return np.concatenate(parts)[self.trained]


@dataclass(frozen=True, eq=False)
class Group:
    """The samples of one prompt; they stay together from the actor to the loss."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, order=True)
class Key:
    """The address of a question in a run's ledger: one a group, so (purpose, step, round, occurrence) is enough for training;
    `index` numbers several questions about one prompt in an evaluation."""

    purpose: str
    step: int
    round: int
    occurrence: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.purpose}/{self.step}/{self.round}/{self.occurrence}/{self.index}"


@dataclass(frozen=True)
class Question:
    """One question, about one group.

    `compare`: two candidates, the answer is the probability that the first wins. `score`: any number of candidates, one value each.

    Attributes:
        candidates: the texts asked about.
        picks: for each candidate, its place among the group's trajectories.
        oracle: the address; empty until the router fills it, "none" for a question that is not asked, whose items are masked.
        known: one value a candidate known beforehand, for the oracles that ask nobody; empty where there is none.
        features: one row a candidate, (candidates, D) float32, for the ensemble's learning.
        is_chat: as in `Prompt`.
        ids: for each candidate the ids that follow its prompt, (T,) int32; empty in a question that comes back from the ledger.
    """

    key: Key
    kind: Kind
    messages: tuple[Message, ...]
    candidates: tuple[str, ...]
    picks: tuple[int, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    oracle: str = ""
    known: tuple[float, ...] = ()
    features: np.ndarray | None = field(default=None, compare=False)
    is_chat: bool = False
    ids: tuple[np.ndarray, ...] = field(default=(), compare=False)

    @property
    def size(self) -> int:
        """Values of its answer."""
        return 1 if self.kind == "compare" else len(self.candidates)

    @classmethod
    def about(cls, group: "Group", key: Key, kind: Kind, picks: tuple[int, ...], oracle: str = "") -> "Question":
        """The question about some of a group's samples."""
        prompt, asked = group.prompt, [group.trajectories[pick] for pick in picks]
        known = tuple(trajectory.reward for trajectory in asked if trajectory.reward is not None)
        content = (prompt.messages, tuple(t.text for t in asked), picks, prompt.reference, dict(prompt.columns), oracle, known)
        return cls(key, kind, *content, is_chat=prompt.is_chat, ids=tuple(t.completion for t in asked))


@dataclass(frozen=True)
class Price:
    """What answers take: priced items (one a scored candidate, one a compared pair), tokens, and money in the oracle's own currency."""

    queries: int = 0
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.queries + other.queries, self.tokens + other.tokens, self.cost + other.cost)


@dataclass(frozen=True)
class Spent:
    """What a run had spent when a step had taken its answers.

    Attributes:
        price: of what was taken, and the most that what waits may still take.
        refused: the price of the cheapest question, taken then or waiting, that the budget did not allow; None when all were paid.
        open: questions that are paid for and that no step has taken.
    """

    price: Price = field(default_factory=Price)
    refused: Price | None = None
    open: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        values: one p (compare) or one score a candidate (score); a value whose mark is not "ok" is not used.
        marks: one a value; "tie" has no winner, "abstain" and "failed" have no value; "unpaid", which no oracle says, was never asked, since the
            budget was spent.
        queries: priced items it took: one a scored candidate, one a compared pair.
        cost: money, in the oracle's own currency.
        by: the oracle that answered.
        seconds: from submission to answer.
        scores: compare: those of the two candidates, where the answer was made of scores, None for one that has none; otherwise empty.
    """

    key: Key
    values: tuple[float, ...]
    marks: tuple[Mark, ...]
    queries: int
    cost: float = 0.0
    by: str = ""
    seconds: float = 0.0
    tokens: int = 0
    scores: tuple[float | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Item:
    """A question whose answer is final, with the group it is about.

    Attributes:
        label: compare: which candidate won, 0 or 1, drawn once by the ledger; None when there is no winner. score: always None.
    """

    group: Group
    question: Question
    answer: Answer
    label: int | None


@dataclass(frozen=True, eq=False)
class Feedback:
    """What a step learns from, in the order the ledger recorded.

    Attributes:
        step: the step that takes it; also the version of the policy's weights before this step's update.
        queries: priced items of the answers that this step and those before it took.
        expired: answers that came too late for this step to learn from.
        older: what earlier steps took and this one learns from again, oldest first; metrics are of `items` alone.
        cost: of the same answers as `queries`, in the oracle's own currency.
    """

    step: int
    items: tuple[Item, ...]
    queries: int
    expired: int = 0
    older: tuple[Item, ...] = ()
    cost: float = 0.0

    @property
    def learned(self) -> tuple[Item, ...]:
        return (*self.older, *self.items)


@dataclass(frozen=True)
class Plan:
    """What one step collects.

    Attributes:
        prompts: prompts a round.
        samples: responses a prompt, by the slot that produces them, for example {"sampler": 8}.
        questions: questions the step trains on.
    """

    prompts: int
    samples: dict[str, int]
    questions: int


@dataclass(frozen=True)
class Requires:
    """What an objective needs from the house.

    Attributes:
        feedback: the kind of answers, or "none".
        slots: engine slots it samples from.
        models: learner models it reads or trains.
        ratio_based: its loss divides by the probability of sampling, so it needs the sampled distribution exactly.
    """

    feedback: Literal["compare", "score", "none"]
    slots: frozenset[str] = frozenset({"sampler"})
    models: frozenset[str] = frozenset({"policy"})
    ratio_based: bool = False


@dataclass(frozen=True)
class Receipt:
    """What an engine holds after a load, read back from the tensors it generates with.

    Attributes:
        version: the version it now calls this slot.
        checksums: CRC-32 of the bytes of every tensor, by name.
    """

    slot: str
    version: int
    checksums: dict[str, int]


@dataclass(frozen=True, eq=False)
class Batch:
    """What `prepare` hands to the learner: the rows of one step and their columns.

    Attributes:
        rows: N trajectories, whose trained tokens, in row order, are the K axis; none where the models read features only.
        unit_of_N: (N,) from 0 upward; rows of one unit stay in one forward pass, in their order.
        group_of_N: (N,) from 0 upward.
        columns: by name; the last letter of a name is its axis.
        epochs: passes over the rows.
        minibatches: optimiser steps a pass.
        metrics: numbers about the batch, by metric name.
        shuffle: whether each pass takes the units in a new order; otherwise as they stand.
    """

    rows: tuple[Trajectory, ...]
    unit_of_N: np.ndarray
    group_of_N: np.ndarray
    columns: dict[str, "torch.Tensor"] = field(default_factory=dict)
    epochs: int = 1
    minibatches: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    shuffle: bool = True

    @property
    def size(self) -> int:
        """N."""
        return len(self.unit_of_N)


@dataclass(frozen=True, eq=False)
class Loss:
    """Unreduced terms of one part of an objective; the learner masks, weights and reduces them (see `learner/reduction.py`).

    Attributes:
        terms: (K,) for token, sequence, sequence_sum, prompt and constant; (U,) for pair; () for step.
        per: the reduction.
        coef: multiplies the reduced value.
        constant: the length that `per="constant"` divides by.
    """

    terms: "torch.Tensor"
    per: Per
    coef: float = 1.0
    constant: float | None = None
