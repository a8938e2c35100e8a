"""Values of sampling: its settings, requests to engines, and trajectories.

Conversations and prompts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        fields: further fields of the message in the data (`name`, `tool_calls`, `reasoning_content`,
            `weight`), without those that are null. Chat templates and reward functions get them.
    """

    role: str
    content: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def plain(self) -> dict[str, Any]:
        """The message as one dict. Chat templates and reward functions get this form."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Message":
        """Return the message with this `plain` form."""
        return cls(
            plain["role"],
            plain["content"],
            {name: value for name, value in plain.items() if name not in ("role", "content")},
        )

    @property
    def parts(self) -> tuple[Any, ...]:
        """The stored form of the message: the arguments of `Message`, without `fields` if they are empty."""
        return (self.role, self.content, self.fields) if self.fields else (self.role, self.content)


@dataclass(frozen=True)
class Opening:
    """The beginning of a response that its prompt has written already.

    Attributes:
        text: this beginning, such as "<think>\\nOkay, "; "" if the prompt has written none.
        tags: the tags in `text` that it opens and does not close, such as `<think>` or `[THINK]`.
    """

    text: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt as taken by a run. A record that is taken twice gives two prompts.

    Attributes:
        row: line of the record in its file, from 1.
        occurrence: number of prompts that came before this one, in the run or in an evaluation.
        messages: the raw conversation, which oracles see.
        reference: the reference answer or response, if the data has one.
        columns: every further column of the record, by name.
        is_chat: True if the record has messages instead of a text; reward functions then get messages too.
    """

    row: int
    occurrence: int
    messages: tuple[Message, ...]
    reference: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False


FinishReason = Literal["stop", "length", "aborted"]
KEPT_LIMIT = 1024
"""Largest number of ids in a recorded kept set (`KeptSets`)."""
_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Logits are divided by `temperature` (0 is greedy). Then top-k, top-p and min-p
    apply in this order, each to the tokens that are left.

    Attributes:
        max_new_tokens: largest number of tokens in a response.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens whose probability is at least `min_p` times that of the most probable token; 0
            keeps all.
        stop: strings that end a response when they appear in it; their tokens stay among its ids.
        keep_sets: record the kept set of every token. If sampling truncates, importance ratios need these
            sets.
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
        """True if top-k, top-p or min-p may exclude ids."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def changes_logits(self) -> bool:
        """True if tokens are drawn from another distribution than the model's."""
        return self.truncates or self.temperature != 1.0

    def most_kept(self, num_tokens: int) -> int:
        """Return the largest number of ids that a recorded kept set can have; 0 if kept sets are not
        recorded.

        Args:
            num_tokens: size of the tokenizer's vocabulary.
        """
        return min(self.top_k or KEPT_LIMIT, KEPT_LIMIT, num_tokens) if self.keep_sets else 0

    def faults(self) -> list[str]:
        """Return the names of the fields whose values are out of range."""
        is_sound = {
            "max_new_tokens": self.max_new_tokens >= 0,
            "temperature": 0.0 <= self.temperature < math.inf,
            "top_k": self.top_k >= 0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "stop": all(self.stop),
        }
        return [name for name, sound in is_sound.items() if not sound]

    def trajectory(
        self,
        slot: str,
        segments: "tuple[Segment, ...]",
        finish_reason: FinishReason,
        text: str,
        reward: float | None = None,
        features: np.ndarray | None = None,
    ) -> "Trajectory":
        """Make a trajectory from segments that were sampled with these settings."""
        return Trajectory(slot, segments, finish_reason, text, self.temperature, reward, features)


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The kept sets of T tokens. Token t has the set `ids[offsets[t]:offsets[t + 1]]`."""

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, eq=False)
class Request:
    """A request to an engine for one response.

    Attributes:
        ids: int32 ids of the prompt, at least one, as a flat array.
        key: 64-bit key of the random numbers for this response, from `Seeds.key`.
        keeps: True if a later request with this key may go on with these ids and the response, as the next
            turn of an episode. The engine may then keep their keys and values (`Engine.release`).
        begun: number of ids at the end of `ids` that are the beginning of the response. A stop string may
            begin within them.
    """

    ids: np.ndarray
    sampling: Sampling
    key: int
    keeps: bool = False
    begun: int = 0


@dataclass(frozen=True, eq=False)
class Completion:
    """The response of an engine to `requests[index]`.

    Attributes:
        ids: (T,) int32, including the stop id or the tokens of the stop string that ended the response.
        raw_logps, sampled_logps: (T,) float32 nats.
        kept: the kept sets if the settings record them and truncate; otherwise None.
        version: version of the weights that produced all tokens.
        features: (D,) float32, made of the hidden states from which the tokens were drawn, if the engine
            keeps features; otherwise None.
    """

    index: int
    ids: np.ndarray
    raw_logps: np.ndarray
    sampled_logps: np.ndarray
    kept: KeptSets | None
    finish_reason: FinishReason
    version: int
    features: np.ndarray | None = None


@dataclass(frozen=True)
class Work:
    """The work that a box has done since its method `work` was first called.

    Attributes:
        seconds: the time that the work took.
        least_s: least number of seconds that this machine needs for the work (`oat.hardware.roofline`).
        keys: number of KV-cache keys that decoding computed with, in each layer.
        padded_keys: number of these keys that belong to no token.
        broken_calls: number of the model's calls whose tool failed by a fault of its own.
    """

    seconds: float = 0.0
    least_s: float = 0.0
    keys: int = 0
    padded_keys: int = 0
    broken_calls: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.seconds + other.seconds,
            self.least_s + other.least_s,
            self.keys + other.keys,
            self.padded_keys + other.padded_keys,
            self.broken_calls + other.broken_calls,
        )

    def since(self, before: "Work") -> "Work":
        """Return the work that was done after the measurement `before`."""
        return Work(
            self.seconds - before.seconds,
            self.least_s - before.least_s,
            self.keys - before.keys,
            self.padded_keys - before.padded_keys,
            self.broken_calls - before.broken_calls,
        )


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens by one author. A segment of the context has ids only.

    Attributes:
        ids: (T,) int32.
        mask: (T,) bool, True for tokens that may be trained.
        versions: (T,) int32, version of the weights that produced each token.
        raw_logps, sampled_logps: (T,) float32 nats, recorded at sampling.
        text_ends: (T,) int32. Entry t is the number of characters of this response's text that are complete
            after token t; "text" means what `Trajectory.text` is of an episode's last response. Recorded only
            in a run whose oracle gives rewards of steps at offsets in characters; otherwise None.
        reward: the environment's reward of this response; None without an environment.
    """

    author: Literal["context", "model"]
    ids: np.ndarray
    mask: np.ndarray | None = None
    versions: np.ndarray | None = None
    raw_logps: np.ndarray | None = None
    sampled_logps: np.ndarray | None = None
    kept: KeptSets | None = None
    text_ends: np.ndarray | None = None
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled or recorded sequence, never padded. The learner trains on exactly these ids.

    Attributes:
        slot: the slot whose weights produced the model's segments; "recorded" if they come from the data.
        segments: the first one is the prompt.
        text: the decoded response for oracles and people, cut before a stop string.
        temperature: temperature of the sampled distribution.
        reward: the environment's reward of the episode, which is the sum of the rewards of its responses
            (`Segment.reward`), or a recorded reward; None if there is neither.
        features: `Completion.features`. The ledger does not record them.
    """

    slot: str
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    text: str
    temperature: float = 1.0
    reward: float | None = None
    features: np.ndarray | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        return np.concatenate([segment.ids for segment in self.segments])

    @property
    def completion(self) -> np.ndarray:
        """The ids after the prompt, which is the first segment; (T,) int32."""
        return (
            self.segments[1].ids
            if len(self.segments) == 2
            else self.ids[len(self.segments[0].ids) :]
            if self.segments
            else _NOTHING
        )

    @property
    def branched_at(self) -> int:
        """Number of tokens of the response that are those of another response of the group, from which this
        one branches (`Plan.branching`); they may not be trained. 0 if this trajectory is no branch."""
        mask = self.segments[1].mask if len(self.segments) == 2 else None
        return 0 if mask is None else int(np.logical_and.accumulate(~mask).sum())

    @cached_property
    def trained(self) -> np.ndarray:
        """(T,) bool: True for the tokens that are trained. The first token is never trained, since no token
        precedes it from which it could be predicted."""
        masks = [s.mask if s.mask is not None else np.zeros(len(s.ids), dtype=bool) for s in self.segments]
        trained = np.concatenate(masks)
        trained[:1] = False
        return trained

    @cached_property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return int(np.count_nonzero(self.trained))

    def recorded(self, name: Literal["raw_logps", "sampled_logps", "versions"]) -> np.ndarray:
        """Return the recorded values of the trained tokens, (K,). Tokens of a segment without such values get
        0."""
        parts = []
        start = 0
        for segment in self.segments:
            stop = start + len(segment.ids)
            if segment.mask is not None:
                values = getattr(segment, name)
                trained = self.trained[start:stop]
                parts.append(values[trained] if values is not None else np.zeros(trained.sum(), np.float32))
            start = stop
        if not parts:
            return np.zeros(0, np.float32)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt with its trajectories. They stay together from the actor to the loss."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
