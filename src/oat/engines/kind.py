"""The protocol of a kind of engine: what a run asks about its engine before the engine is made, and how it is
made. Only the kind reads the settings of the section `engine`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from oat.types import Sampling
from oat.types.part import Check, RunFacts

if TYPE_CHECKING:
    from oat.engines.base import Engine
    from oat.engines.decoding import Decode, Pooling
    from oat.models.sources import ModelSource


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do under its settings. `resolve/cross_checks/engine.py` refuses a run that needs
    more, except where an attribute names another way.

    Attributes:
        addressed_draws: a token depends only on its request and the weights, up to rounding of the logits.
            Without it, earlier draws count too, and people are told that a continued run samples other
            responses.
        batch_invariant: tokens and log-probabilities of a request are bitwise equal in any batch. Without it,
            people are told that a run depends on its number of actors.
        features: completions have pooled hidden states (`Completion.features`).
        kept_sets: completions have the kept sets that a request asks for.
        lora: it computes with adapters.
        own_threads: its number of threads is not that of the whole process. Without it, it cannot be in the
            process of the learner.
        raw_logps: completions have raw log-probabilities.
        readable_weights: `Engine.tensors` gives the tensors that the engine computes with. Without it, new
            weights are proven by a probe (`learner.weights_proof`).
        recorded_is_old: it computes as a learner in float32 does. Recorded log-probabilities of the policy's
            present weights are then also the old ones. Without it, `prepare` computes the old ones.
        sampled_logps: completions have log-probabilities of the sampled distribution.
        shares_weights: a slot may compute with a model of the process (`ModelSource.lm`), such as the
            learner's own. Without it, the engine makes models of its own.
        stop_strings: a response may end at a string.
        slots: the slots that it serves; None: any.
    """

    addressed_draws: bool
    batch_invariant: bool
    features: bool
    kept_sets: bool
    lora: bool
    own_threads: bool
    raw_logps: bool
    readable_weights: bool
    recorded_is_old: bool
    sampled_logps: bool
    shares_weights: bool
    stop_strings: bool
    slots: frozenset[str] | None = None


@dataclass(frozen=True)
class Load:
    """The prompts and responses that an engine gets in one call.

    Attributes:
        prompts: number of prompts.
        samples: number of responses of each prompt.
        prompt, response: number of tokens of each prompt, and of each response.
    """

    prompts: int
    samples: int
    prompt: int
    response: int


class EngineMemory(Protocol):
    """The memory that an engine takes under its settings.

    Attributes:
        least_rows: number of rows that every step computes, however few are asked for.
        cache_setting: the setting that limits the cache, such as `engine.cache_gb`; messages name it.
        smaller: settings under which the engine takes less memory.
    """

    least_rows: int
    cache_setting: str
    smaller: Mapping[str, Any]

    def cache_bytes(self, page_bytes: int, load: Load) -> int:
        """Return the bytes of the KV cache when every row has its largest length.

        Args:
            page_bytes: bytes of the keys and values of `PAGE` tokens.
        """

    def work_bytes(self, a_token: int, vocabulary: int, load: Load, sampling: Sampling) -> int:
        """Return the bytes of the work that takes most memory beside the cache: a pass over prompts, or the
        draw of a token for each row.

        Args:
            a_token: bytes that a pass without gradients has at once for each token.
            vocabulary: number of logits of a token.
        """

    def refuse_long(self, tokens: int, page_bytes: int, *, of_episode: bool = False) -> None:
        """Refuse a sequence that is too long for the cache.

        Args:
            tokens: number of tokens of the sequence.
            page_bytes: bytes of the keys and values of `PAGE` tokens.
            of_episode: True if the sequence is a conversation with an environment that fills the context.

        Raises:
            EngineError: the cache is too small.
        """


@dataclass(frozen=True)
class Traits:
    """What a run knows of its engine before the engine is made.

    Attributes:
        way: how the engine computes, in a word or two: for one of a library also the library's minor version.
            A run that goes on with another way is refused.
        dtype: precision in which the engine computes.
        threads: number of threads that its settings name; None: they leave it open.
    """

    capabilities: Capabilities
    way: str
    dtype: Literal["float32", "bfloat16"]
    threads: int | None
    memory: EngineMemory


class EngineKind(Protocol):
    """A kind of engine, under its name in `plugins/registry.py`."""

    Config: type[Any]

    @staticmethod
    def checks(config: Any, run: RunFacts) -> Iterable[Check]:
        """See `oat.types.part`."""

    @staticmethod
    def traits(config: Any) -> Traits: ...

    @staticmethod
    def make(
        config: Any,
        sources: Mapping[str, "ModelSource"],
        *,
        num_tokens: int,
        stop_ids: Collection[int],
        decode: "Decode",
        threads: int | None,
        pooling: "Pooling | None",
    ) -> "Engine":
        """Make the engine.

        Args:
            sources: the source of each slot's model. Slots with the same source share its weights.
            num_tokens: size of the tokenizer's vocabulary; ids of `num_tokens` and above are never sampled.
            stop_ids: ids that end a response.
            decode: turns ids, which follow the ids of the second argument, into text; stop strings are
                searched for in this text.
            threads: number of threads of the computation; None: the number does not change.
            pooling: the features that completions have; None: none.

        Raises:
            ConfigError, EngineError, ModelError: a model cannot be made, or does not suit the engine.
        """
