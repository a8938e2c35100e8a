"""LoRA (arXiv:2106.09685) through PEFT: small trainable matrices beside frozen weights, W x + (alpha / rank) B A x.

The layers go into the model's own module, so that a model with an adapter is a `CausalLM` like any other; its reference is the same module with the
adapter off. B starts as zero, A as PEFT draws it, from the given seed. No dropout, no biases.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oat.errors import ConfigError, ModelError
from oat.lm import CausalLM, is_adapter, load_lm
from oat.settings import ModelConfig


def load_model(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> CausalLM:
    """The model of a configuration, with its adapter if it has one.

    Args:
        seed: of the adapter's start; none is needed where its weights are loaded afterwards.

    Raises:
        ConfigError, ModelError: as `load_lm` and `add_adapter`.
    """
    lm = load_lm(config.path, dtype=config.dtype, device=device)
    if config.lora is None:
        return lm
    return add_adapter(lm, rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets, seed=seed)


def add_adapter(lm: CausalLM, *, rank: int, alpha: float, targets: str | tuple[str, ...], seed: int) -> CausalLM:
    """The model with an adapter, in the same module, whose own weights are frozen from here on.

    Args:
        alpha: the adapter's output is scaled by alpha / rank.
        targets: "all-linear" (every linear layer but the head), or the last parts of layers' names, such as `q_proj` or `lm_head`.
        seed: 64-bit, of the start of A.

    Raises:
        ConfigError: PEFT is not installed, or a target names no layer that can be adapted.
        ModelError: a target is an embedding that is tied to the head.
    """
    peft = _peft()
    names = targets if isinstance(targets, str) else list(targets)
    _check_targets(lm, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapter = peft.LoraModel(lm.module, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), "default")
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"model.lora.targets is {names!r}: {reason}; name linear layers of a {lm.model_type}") from error
    return CausalLM(lm.module, adapter=adapter, takes_layouts=lm.takes_layouts)


def share_base(lm: CausalLM, other: CausalLM) -> None:
    """Let a model with an adapter use the frozen weights of another of the same start, instead of its own copy."""
    base = dict(other.module.named_parameters())
    for name, parameter in lm.module.named_parameters():
        if not is_adapter(name):
            parameter.data = base[name].data


def merged(lm: CausalLM) -> CausalLM:
    """The model with its adapter added into its weights, a plain model of transformers; the given one is used up."""
    return lm if lm.adapter is None else CausalLM(lm.adapter.merge_and_unload())


def save_adapter(lm: CausalLM, base: str, out: Path) -> None:
    """Write an adapter as PEFT does: `PeftModel.from_pretrained` puts it on the model `base`."""
    out.mkdir(parents=True, exist_ok=True)
    config = lm.adapter.peft_config["default"]
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    config.save_pretrained(out)
    names = {name: f"base_model.model.{name.replace('.default.', '.')}" for name in lm.trainable()}
    tensors = {names[name]: tensor.detach().contiguous() for name, tensor in lm.trainable().items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs PEFT ({error}): pip install 'oat-align[lora]'") from None
    return peft


def _check_targets(lm: CausalLM, names: str | list[str]) -> None:
    """Each target names a layer, and none names an embedding that is also the head: its change could not be merged into either."""
    if isinstance(names, str):
        return
    modules = dict(lm.module.named_modules())
    tied = lm.module.get_input_embeddings().weight is lm.module.get_output_embeddings().weight
    for target in names:
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            layers = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear)})
            raise ConfigError(f"model.lora.targets: a {lm.model_type} has no layer {target!r}; its linear layers: {', '.join(layers)}")
        if tied and any(module in (lm.module.get_input_embeddings(), lm.module.get_output_embeddings()) for module in found):
            raise ModelError(f"model.lora.targets: {target!r} is tied to the model's other embedding, so an adapter cannot be merged; leave it out")
