"""The trial of models whose outlines do not tell whether they will be refused.

`oat train` loads the weights and finds out. `oat check` does the same for such models alone, and forgets the
weights again. So both commands say the same.
"""

from collections.abc import Iterator
from typing import NamedTuple

from oat.assemble.outline import ModelOutline, outline_of
from oat.config.settings import ModelConfig
from oat.engines.cache_trial import page_bytes_of
from oat.hardware.memory import free_memory
from oat.models.beside import is_adapter_directory
from oat.models.causal_lm import CausalLM
from oat.models.lora import load_model
from oat.models.weight_files import cached_files
from oat.resolve.model_starts import critic_model, has_own_critic, has_own_reference
from oat.resolve.resolved import Resolved

_COPIES = 2
"""Copies of the weights for which there must be memory."""
_BYTES = 4


class _Tried(NamedTuple):
    """A model of a run.

    Attributes:
        field: the setting that names it.
        is_cached: True if the engine decodes it with its KV cache.
    """

    field: str
    model: ModelConfig
    outline: ModelOutline
    is_cached: bool


class Trial:
    """The models of a run that are tried.

    Attributes:
        untried: sentences for people about models that are not tried, since their weights are not on this
            machine or do not fit into its memory.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.untried: list[str] = []
        self._resolved = resolved
        self._cached: list[tuple[str, CausalLM]] = []

    def decode(self) -> None:
        """Decode with the models that the engine will decode, and forget them. A run does this after it has
        made its learner.

        Raises:
            ModelError: the engine's cache cannot be used.
        """
        while self._cached:
            field, lm = self._cached.pop(0)
            with self._resolved.error_context(field):
                page_bytes_of(lm)


def load_unknown(resolved: Resolved, policy: ModelOutline) -> Trial:
    """Load each model whose outline does not tell whether it will be refused, as the run would.

    Args:
        policy: the outline of the policy.

    Raises:
        ModelError: a model is refused, as `oat train` would refuse it.
    """
    trial = Trial(resolved)
    for field, model, outline, is_cached in _models(resolved, policy):
        if not outline.unknown:
            continue
        limit = free_memory("cpu")
        is_here = bool(cached_files(model.path))
        if not is_here or (limit is not None and _COPIES * _BYTES * outline.weights > limit):
            where = "are too large for this machine's memory" if is_here else "are not on this machine"
            trial.untried.append(
                f"{field}: only the weights tell whether it can be used ({outline.unknown}), and they {where}"
            )
            continue
        with resolved.error_context(field):
            lm = load_model(model, field=field, needs_head=is_cached or field != "model.critic")
        trial._cached += [(field, lm)] if is_cached else []
    return trial


def _models(resolved: Resolved, policy: ModelOutline) -> Iterator[_Tried]:
    config = resolved.config
    model, profile, load = config.model, config.compute.profile, resolved.outlines.on_meta
    yield _Tried("model.path", model, policy, True)
    start = model.reference if "reference" in resolved.models and has_own_reference(model) else None
    if start is not None and not is_adapter_directory(start):
        own = ModelConfig(start, dtype=model.reference_dtype or model.dtype)
        outline = outline_of(load(own, field="model.reference"), profile)
        yield _Tried("model.reference", own, outline, "reference" in resolved.slots)
    if "critic" in resolved.models and has_own_critic(model):
        own = critic_model(model)
        outline = outline_of(load(own, field="model.critic", needs_head=False), profile)
        yield _Tried("model.critic", own, outline, False)
