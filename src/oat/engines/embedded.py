"""The engine `torch` as a run knows it: what it can do, the memory that it takes, and how it is made.

A configuration may be refused before there is an engine. So the engine's own modules, and transformers with
them, are imported when the engine is made or measured.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from oat.engines.kind import Capabilities, Load, Traits
from oat.engines.shapes import PASS_TOKENS, filled_up, fixed_rows
from oat.engines.torch_config import TorchEngineConfig, torch_checks
from oat.errors import ModelError
from oat.types import Sampling

if TYPE_CHECKING:
    from oat.engines.decoding import Decode, Pooling
    from oat.engines.split import SplitEngine
    from oat.engines.torch import TorchEngine
    from oat.models.causal_lm import CausalLM
    from oat.models.sources import ModelSource

_FLOAT, _DOUBLE = 4, 8
"""Bytes of a number."""


class Embedded:
    """The kind `torch`; see `oat.engines.kind.EngineKind`."""

    Config = TorchEngineConfig
    checks = staticmethod(torch_checks)

    @staticmethod
    def traits(config: TorchEngineConfig) -> Traits:
        is_learners_precision = config.dtype == "float32"
        capabilities = Capabilities(
            addressed_draws=True,
            batch_invariant=config.deterministic,
            features=True,
            kept_sets=True,
            lora=True,
            own_threads=True,
            raw_logps=True,
            readable_weights=True,
            recorded_is_old=is_learners_precision,
            sampled_logps=True,
            shares_weights=is_learners_precision,
            stop_strings=True,
        )
        return Traits(capabilities, "pages", config.dtype, config.threads, TorchMemory(config))

    @staticmethod
    def make(
        config: TorchEngineConfig,
        sources: Mapping[str, "ModelSource"],
        *,
        num_tokens: int,
        stop_ids: Collection[int],
        decode: "Decode",
        threads: int | None,
        pooling: "Pooling | None",
    ) -> "TorchEngine | SplitEngine":
        """Make the engine; see `oat.engines.kind.EngineKind`."""
        from oat.engines.split import APART, SplitEngine
        from oat.engines.torch import TorchEngine
        from oat.models.sources import lms_of

        slots = lms_of(sources)
        if config.dtype != "float32":
            for lm in slots.values():
                refuse_other_dtype(lm, config.dtype)

        def single(names: Collection[str]) -> TorchEngine:
            return TorchEngine(
                {name: slots[name] for name in names},
                num_tokens=num_tokens,
                stop_ids=stop_ids,
                decode=decode,
                max_rows=config.max_rows,
                cache_gb=config.cache_gb,
                deterministic=config.deterministic,
                threads=threads,
                pooling=pooling,
            )

        if not config.own_reference:
            return single(slots)
        return SplitEngine(single(slots.keys() - {APART}), single([APART]))


def refuse_other_dtype(lm: "CausalLM", dtype: str) -> None:
    """Refuse a model that keeps a tensor in another precision than the engine's.

    Raises:
        ModelError: it does.
    """
    import torch

    from oat.models.causal_lm import is_adapter

    for name, tensor in lm.tensors().items():
        # an adapter without weights stays in the precision it is made in
        is_unmoved = not lm.has_weights and is_adapter(name)
        if tensor.is_floating_point() and tensor.dtype != getattr(torch, dtype) and not is_unmoved:
            raise ModelError(
                f"a `{lm.model_type}` keeps `{name}` in float32 when it is loaded in {dtype}; leave "
                "engine.dtype at float32"
            )


class TorchMemory:
    """The memory of the engine `torch`; see `oat.engines.kind.EngineMemory`."""

    cache_setting = "engine.cache_gb"
    smaller: Mapping[str, Any] = {"max_rows": 16}

    def __init__(self, config: TorchEngineConfig):
        self._config = config
        self.least_rows = fixed_rows(config.max_rows) if config.deterministic else 0

    def cache_bytes(self, page_bytes: int, load: Load) -> int:
        """Return the bytes of the KV cache when every row has its largest length, limited by `cache_gb`. If
        the samples of a prompt share pages, the full pages of the prompt count once."""
        from oat.engines.paged_cache import PAGE
        from oat.engines.torch import GB

        rows = self._rows(load)
        whole = -(-(load.prompt + load.response) // PAGE)
        shared = load.prompt // PAGE if load.samples > 1 and not self._config.deterministic else 0
        pages = rows * (whole - shared) + -(-rows // load.samples) * shared
        return min(int(self._config.cache_gb * GB), pages * page_bytes)

    def work_bytes(self, a_token: int, vocabulary: int, load: Load, sampling: Sampling) -> int:
        """Return the bytes of a pass over prompts, which has at most `PASS_TOKENS` tokens, or of the draw:
        all rows' logits in float32, their cumulative sums in float64, and what truncation makes of them."""
        rows = self._rows(load)
        prompts = -(-rows // load.samples)
        tokens = min(prompts * load.prompt, max(PASS_TOKENS, load.prompt))
        a_logit = _FLOAT + _DOUBLE
        if sampling.changes_logits:
            a_logit += _FLOAT
        if sampling.truncates:
            a_logit += 2 * _FLOAT
        if sampling.top_p < 1 and sampling.top_k == 0:  # the ranked logits, their ids, and four sums
            a_logit += _FLOAT + 4 * _DOUBLE
        return max(a_token * tokens, a_logit * filled_up(rows) * vocabulary)

    def refuse_long(self, tokens: int, page_bytes: int, *, of_episode: bool = False) -> None:
        """Refuse a sequence that is too long for the cache; see `oat.engines.kind.EngineMemory`.

        Raises:
            EngineError: the cache is too small.
        """
        from oat.engines.torch import GB, refuse_small_cache

        pages = int(self._config.cache_gb * GB / page_bytes)
        refuse_small_cache(tokens, pages, page_bytes, self.least_rows or None, of_episode=of_episode)

    def _rows(self, load: Load) -> int:
        """Return the number of rows that are decoded at once."""
        return self.least_rows or min(load.prompts * load.samples, self._config.max_rows)
