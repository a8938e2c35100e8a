"""The language models of a run: their names, their precisions and their devices."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from oat.build.resolved import Resolved
from oat.config.settings import Config, ModelConfig
from oat.errors import ConfigError, ModelError
from oat.hardware.allocator import give_back_freed_memory
from oat.hardware.threads import LARGE
from oat.models.causal_lm import CausalLM, is_adapter
from oat.models.loading import load_tokenizer
from oat.models.lora import LoadModel, described_adapter, is_adapter_directory, load_model, share_base
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.text.vocabulary import check_vocabulary

HALF = {"bfloat16": torch.bfloat16}
"""Precisions in which the engine has weights of its own (`engine.dtype`)."""


def device_of(profile: str) -> torch.device:
    """The device of the models under a compute profile.

    Raises:
        ConfigError: torch finds no CUDA device.
    """
    if profile == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "compute.profile is 'gpu', and torch finds no CUDA device: use a machine with one and a build "
            "of torch for it, or set the field to cpu"
        )
    return torch.device("cuda" if profile == "gpu" else "cpu")


def device_notes(profile: str) -> tuple[str, ...]:
    """Sentences for people about the device."""
    if profile == "cpu" and torch.cuda.is_available():
        return (
            "this machine has a CUDA device, and nothing will run on it; a new run with compute.profile: gpu "
            "uses it",
        )
    return ()


def load_models(
    config: Config, needs: Collection[str], seeds: Seeds, load: LoadModel = load_model
) -> dict[str, CausalLM]:
    """The learner's models by name: the policy and, as far as they are needed, the reference and the
    backbones of critic and reward model. With an adapter they share the frozen weights, and the reference is
    the policy with the adapter off.

    Args:
        needs: names of the models that are needed beside the policy.
        load: loads each of them.

    Raises:
        ConfigError, ModelError: as `device_of` and `load_model`.
    """
    model, device = config.model, device_of(config.compute.profile)
    policy = load(model, seeds.key("init", "policy"), device)
    if sum(parameter.numel() for parameter in policy.module.parameters()) > LARGE:
        give_back_freed_memory()
    lms = {"policy": policy}
    if "reference" in needs:
        lms["reference"] = _reference(config, policy, seeds, load)
    for name in ("critic", "reward"):
        if name in needs:
            lms[name] = _another(config, name, policy, seeds, load)
    return lms


def load_policy(resolved: Resolved) -> CausalLM:
    """The policy's start, on the CPU."""
    return load_model(resolved.config.model)


def load_slots(
    resolved: Resolved, lms: Mapping[str, CausalLM], seeds: Seeds, load: LoadModel = load_model
) -> dict[str, CausalLM]:
    """The engine's models by slot. They share the learner's tensors wherever neither version nor precision
    can differ.

    Args:
        lms: the learner's models.
        load: loads those that cannot share.

    Raises:
        ModelError: a tensor stays in float32 when its model is loaded in `engine.dtype`.
    """
    config, dtype = resolved.config, resolved.engine.dtype
    policy = lms["policy"]
    is_late = config.learner.sync_every > 1
    if dtype not in HALF:
        slots = {
            "sampler": _another(config, "sampler", policy, seeds, load) if is_late else policy,
            "policy": policy,
        }
        return {**slots, **({"reference": lms["reference"]} if "reference" in lms else {})}
    own = replace(config, model=replace(config.model, dtype=dtype, reference_dtype=None))
    lms = load_models(own, resolved.slots & {"reference"}, seeds, load)
    slots = {"sampler": load(own.model, device=policy.device) if is_late else lms["policy"], **lms}
    for lm in slots.values():
        for name, tensor in lm.tensors().items():
            # an adapter without weights stays in the precision it is made in
            is_unmoved = not lm.has_weights and is_adapter(name)
            if tensor.is_floating_point() and tensor.dtype != HALF[dtype] and not is_unmoved:
                raise ModelError(
                    f"a `{lm.model_type}` keeps `{name}` in float32 when it is loaded in {dtype}; leave "
                    "engine.dtype at float32"
                )
    return slots


def slot_dtypes(dtype: str) -> dict[str, torch.dtype]:
    """The precision of weights that are not kept in the learner's, by slot.

    Args:
        dtype: `engine.dtype`.
    """
    return dict.fromkeys(("sampler", "policy", "reference"), HALF[dtype]) if dtype in HALF else {}


def check_tokenizer(lm: CausalLM, path: str, renderer: Renderer) -> None:
    """Refuse a tokenizer that is not the model's, as far as the numbers of ids can tell.

    Raises:
        ModelError: as `check_vocabulary`, or no id that the model ends a text with is a token.
    """
    check_vocabulary(renderer.tokenizer, lm.vocab_rows, f"the tokenizer of {path}")
    if lm.eos_ids and not any(id < renderer.num_tokens for id in lm.eos_ids):
        raise ModelError(
            f"its generation_config.json ends a text with id {lm.eos_ids[0]}, and its tokenizer has ids "
            f"below {renderer.num_tokens}; give the tokenizer that belongs to the model"
        )


def check_reference(reference: CausalLM, path: str, renderer: Renderer) -> None:
    """Refuse a reference that cannot read the ids that the policy writes. A reference without a tokenizer is
    believed.

    Raises:
        ModelError: it has fewer rows than the policy's tokenizer has tokens, or far more
            (`check_vocabulary`), or its tokenizer gives them other ids.
    """
    if renderer.num_tokens > reference.vocab_rows:
        raise ModelError(
            f"its embeddings have {reference.vocab_rows} rows, and the policy's tokenizer has "
            f"{renderer.num_tokens} tokens; give a model of the same family"
        )
    check_vocabulary(renderer.tokenizer, reference.vocab_rows, "the policy's tokenizer")
    try:
        theirs: dict[str, int] = load_tokenizer(path).get_vocab()
    except ModelError:
        return
    ours: dict[str, int] = renderer.tokenizer.get_vocab()
    others = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    if others:
        token = others[0]
        raise ModelError(
            f"its tokenizer gives {len(others)} of {len(ours)} tokens other ids than the policy's, for "
            f"example {token!r} {theirs[token]} instead of {ours[token]}; give a model of the same family"
        )


def _reference(config: Config, policy: CausalLM, seeds: Seeds, load: LoadModel) -> CausalLM:
    """The reference: the policy with its adapter off; another adapter beside the policy's weights, frozen or
    following; or a model of its own."""
    model = config.model
    if not has_own_reference(model):
        if model.reference is not None and is_adapter_directory(model.reference):
            adapter = replace(model, adapter=model.reference, lora=described_adapter(model.reference)[0])
            own_adapter = replace(config, model=adapter)
            return _another(own_adapter, "policy", policy, seeds, load, field="model.reference")
        is_start = model.reference is None and (
            model.adapter is not None or model.reference_update is not None
        )
        return _another(config, "policy", policy, seeds, load) if is_start else policy.base()
    device = torch.device(model.reference_device or policy.device)
    own = ModelConfig(model.reference or model.path, dtype=model.reference_dtype or model.dtype)
    if model.reference is not None and is_adapter_directory(model.reference):
        own = replace(
            own, path=model.path, adapter=model.reference, lora=described_adapter(model.reference)[0]
        )
    return load(own, device=device, field="model.reference")


def has_own_reference(model: ModelConfig) -> bool:
    """Return whether a reference has weights of its own, rather than sharing those that the policy's adapter
    leaves as they are."""
    return model.lora is None or not (
        model.reference in (None, model.path) or is_adapter_directory(model.reference or "")
    )


def _another(
    config: Config,
    name: str,
    policy: CausalLM,
    seeds: Seeds,
    load: LoadModel,
    *,
    field: str = "model.adapter",
) -> CausalLM:
    """A second copy of the policy's start; with an adapter of its own, beside the same frozen weights."""
    lm = load(config.model, seeds.key("init", name), policy.device, field=field)
    if config.model.lora is not None:
        share_base(lm, policy)
    return lm
