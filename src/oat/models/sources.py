"""The sources of models: what a process needs to make a model for itself.

An engine gets the source of each slot's model, and not a model, since it may compute with code and weights of
its own.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, initialization

from oat.config.settings import ModelConfig
from oat.errors import ModelError, did_you_mean
from oat.files import located
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import check_head, give_layouts
from oat.models.frozen import frozen_checksum
from oat.models.identity import Identity, differences, listed, model_identity
from oat.models.linear import use_fast_matmul
from oat.models.loading import DTYPES, causal_config, load_config, refusing
from oat.models.lora import LoadModel, load_model, share_base

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class ModelSource:
    """The source of a model. Who makes models of several sources makes one model of each.

    Attributes:
        model: the folder or hub id, precision, adapter and quantisation.
        device: the device of the model.
        seed: seed of an adapter's initial weights.
        identity: what the folder's configuration must be (`oat.models.identity`); {}: it is not compared.
        base: a source with the same frozen weights, which the two models share. A source without an adapter
            is then the model of `base` with its adapter off. None: no weights are shared.
        tensors: returns weights, one after another, by the names of `CausalLM.tensors`. None: all weights
            are those of the folder.
        frozen: checksum of the folder's weights that `tensors` lacks (`frozen_checksum`); None: it is not
            compared.
        is_whole: True: `tensors` has all weights, and the folder need only have a configuration. False: it
            has some, which replace those of the folder.
        lm: a model of this process, which was made of the source and changes with the learner. Only an
            engine with `Capabilities.shares_weights` gets it. None: no model is shared.
        field: the setting that names the adapter's directory, for messages.
        needs_head: see `oat.models.loading.load_lm`.
    """

    model: ModelConfig
    device: torch.device
    seed: int = 0
    identity: Identity = field(default_factory=dict)
    base: "ModelSource | None" = None
    tensors: Callable[[], NamedTensors] | None = None
    frozen: int | None = None
    is_whole: bool = False
    lm: CausalLM | None = None
    field: str = "model.adapter"
    needs_head: bool = True

    @property
    def path(self) -> str:
        """The folder or hub id."""
        return self.model.path


def lms_of(
    sources: Mapping[str, ModelSource],
    load: LoadModel = load_model,
    known: Mapping[ModelSource, CausalLM] | None = None,
) -> dict[str, CausalLM]:
    """Make the models of sources, in their order.

    Args:
        sources: the source of each model, by name. Names with the same source get one model.
        load: function that makes a model from its folder.
        known: models that are made already.

    Raises:
        ConfigError, ModelError: an error of `load`; a folder does not have the configuration of the source;
            or weights are missing, unknown, or of other shapes than the model's.
    """
    made = dict(known or {})

    def make(source: ModelSource) -> CausalLM:
        if source not in made:
            made[source] = source.lm or _made(source, make, load)
        return made[source]

    return {name: make(source) for name, source in sources.items()}


def _made(source: ModelSource, make: Callable[[ModelSource], CausalLM], load: LoadModel) -> CausalLM:
    _refuse_other(source)
    base = None if source.base is None else make(source.base)
    if base is not None and source.model.lora is None:
        return base.base()
    if source.tensors is not None and source.is_whole:
        lm = load_model(
            replace(source.model, adapter=None),
            source.seed,
            source.device,
            needs_head=source.needs_head,
            load=_empty_lm,
        )
        fill(lm, source.tensors(), source.path)
        check_head(lm, source.path)
        if lm.module.config._attn_implementation == "sdpa":
            give_layouts(lm)
    else:
        lm = load(source.model, source.seed, source.device, field=source.field, needs_head=source.needs_head)
        if source.frozen is not None and frozen_checksum(lm.module, lm.trainable().values()) != source.frozen:
            raise ModelError(
                f"{source.path} is not the model beside which the weights were trained; put its files back "
                "as they were"
            )
        if source.tensors is not None:
            fill(lm, source.tensors(), source.path, is_whole=False)
    if base is not None:
        share_base(lm, base)
    return lm


def _refuse_other(source: ModelSource) -> None:
    """Refuse a folder that does not have the configuration of a source.

    Raises:
        ModelError: it has not.
    """
    if not source.identity:
        return
    if lines := differences(source.identity, model_identity(load_config(source.path))):
        raise ModelError(
            f"{source.path} is not the model whose weights are to be loaded:{listed(lines)}\ngive the folder "
            "that belongs to them"
        )


def fill(lm: CausalLM, tensors: NamedTensors, path: str, *, is_whole: bool = True) -> None:
    """Copy weights into a model, one after another. After an error the model is of no use.

    Args:
        path: the model's folder, for messages.
        is_whole: False: the model keeps weights that do not come.

    Raises:
        ModelError: a tensor is unknown, has another shape than the model's, or does not come.
    """
    held, missing = lm.tensors(), set(lm.tensors())
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in held:
                raise ModelError(
                    f"{path}: `{name}` came, which the model does not have; {did_you_mean(name, held)}"
                )
            if tensor.shape != held[name].shape:
                raise ModelError(
                    f"{path}: `{name}` came with the shape {tuple(tensor.shape)}, and the model has "
                    f"{tuple(held[name].shape)}; give the folder that belongs to the weights"
                )
            held[name].copy_(tensor)
            missing.discard(name)
    if is_whole and missing:
        raise ModelError(
            f"{path}: {len(missing)} of {len(held)} tensors did not come, for example `{min(missing)}`; send "
            "every tensor of the model, a tied one once"
        )


def _empty_lm(path: str, *, dtype: str, device: torch.device | str, needs_head: bool) -> CausalLM:
    """Make a model whose weights have memory and no values yet. The folder need only have a configuration."""
    config, attention = causal_config(path, dtype)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": attention}
    with refusing("model", path), torch.device(device), _without_values():
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        module.tie_weights()
    with suppress(OSError):  # without the file, the model's own configuration applies
        module.generation_config = GenerationConfig.from_pretrained(located(path))
    use_fast_matmul(module)
    return CausalLM(module.eval())


def _without_values() -> Any:
    """A context in which transformers draws no initial weights."""
    return getattr(initialization, "no_init_weights", nullcontext)()
