"""LoRA (arXiv:2106.09685) through PEFT: small trainable matrices beside frozen weights, W x + (alpha / rank)
B A x.

The layers go into the model's own module, so that a model with an adapter is a `CausalLM` like any other; its
reference is the same module with the adapter off. B starts as zero, A as PEFT draws it, from the given seed.
No dropout, no biases.

An existing adapter is named by a field of its own, `model.adapter`: as `model.path` it would leave open
whether it is trained on or merged, and tokenizer and context are the base's. What the adapter says of itself
becomes `model.lora` when the configuration is resolved, so nothing else knows where an adapter came from.
"""

import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oat.config.settings import LoraConfig, ModelConfig
from oat.errors import ConfigError, ModelError
from oat.files import parse_json, seen
from oat.models.causal_lm import CausalLM, is_adapter
from oat.models.loading import load_lm
from oat.models.nf4 import functional_of_bitsandbytes, pack, unpack

_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OTHER_KINDS = (
    *(
        "use_dora",
        "use_rslora",
        "use_qalora",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
    ),
    *(
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "exclude_modules",
        "alora_invocation_tokens",
        "arrow_config",
    ),
)
"""Of PEFT's fields those that, where they are set, make another adapter than the one that is computed
here."""


class LoadPlain(Protocol):
    """Loads a model without an adapter: `load_lm`, or an outline's way of making one."""

    def __call__(self, path: str, *, dtype: str, device: torch.device | str) -> CausalLM: ...


class LoadModel(Protocol):
    """Loads the model of a configuration: `load_model`, or `Outlines.fake`, which makes one without
    weights."""

    def __call__(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        field: str = "model.adapter",
    ) -> CausalLM: ...


def load_model(
    config: ModelConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    field: str = "model.adapter",
    load: LoadPlain = load_lm,
) -> CausalLM:
    """The model of a configuration, with its adapter if it has one.

    Args:
        seed: of the adapter's start; none is needed where its weights are loaded afterwards.
        field: what named the adapter's directory.
        load: loads the model without its adapter.

    Raises:
        ConfigError, ModelError: as `load_lm` and `add_adapter`.
    """
    is_outline = torch.device(device).type == "meta"
    if config.quantize is None or is_outline:
        lm = load(config.path, dtype=config.dtype, device=device)
    else:
        lm = load(config.path, dtype=config.dtype, device="cpu")
    if config.quantize is not None:
        pack(lm, device)
    if config.lora is None:
        return lm
    lm = add_adapter(
        lm, rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets, seed=seed
    )
    if config.adapter is not None:
        _take_up(lm, config.adapter, field)
    return lm


def is_adapter_directory(path: str) -> bool:
    return os.path.isfile(seen(path) / _CONFIG) and not os.path.isfile(seen(path) / "config.json")


def described_adapter(path: str) -> tuple[LoraConfig, str]:
    """What an adapter's directory says of it, and the name of the model that it was trained beside.

    Raises:
        ModelError: there is none, or it is of a kind that is not read here.
    """
    try:
        found = parse_json((seen(path) / _CONFIG).read_text(encoding="utf-8"))
        rank, alpha, targets, kind = (
            found[name] for name in ("r", "lora_alpha", "target_modules", "peft_type")
        )
        targets = (
            targets
            if targets == "all-linear"
            else tuple(sorted(targets))
            if isinstance(targets, list)
            else None
        )
        others = [name for name in _OTHER_KINDS if found.get(name)]
        start, bias = found.get("init_lora_weights", True), found.get("bias", "none")
        config = LoraConfig(rank=int(rank), alpha=float(alpha), targets=targets or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} holds no adapter that can be read ({type(error).__name__}: {error}); give a "
            f"directory with {_CONFIG} and {WEIGHTS}, as PEFT's "
            "`save_pretrained` and `oat export --adapter` write them"
        ) from error
    others += [] if kind == "LORA" else ["peft_type"]
    others += [] if bias == "none" else ["bias"]
    others += [] if isinstance(start, bool) or start == "gaussian" else ["init_lora_weights"]
    others += [] if targets else ["target_modules"]
    if others:
        said = ", ".join(f"{name} {found[name]!r}" for name in others)
        raise ModelError(
            f"the adapter in {path} is none of plain LoRA ({_CONFIG}: {said[:200]}); merge it with PEFT, "
            "and give the merged model"
        )
    return config, str(found.get("base_model_name_or_path") or "")


def _take_up(lm: CausalLM, path: str, field: str) -> None:
    """Give an adapter the weights that a directory has of it.

    Raises:
        ModelError: they cannot be read, or are of another model or another adapter.
    """
    expected = {_stored_name(name): parameter for name, parameter in lm.trainable().items()}
    try:
        held = load_file(seen(path) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{field} is {path!r}: its weights cannot be read ({WEIGHTS}: {error}); give safetensors as "
            "PEFT writes them"
        ) from error
    wrong = sorted(
        name for name in expected.keys() | held.keys() if _shape(expected, name) != _shape(held, name)
    )
    if wrong:
        raise ModelError(
            f"{field} is {path!r}: it is of another model than this {lm.model_type}: {len(wrong)} tensors "
            "do not correspond, for example "
            f"`{wrong[0]}` ({_shape(held, wrong[0])} there, {_shape(expected, wrong[0])} here); give the "
            "model that it was trained beside"
        )
    if lm.has_weights:
        with torch.no_grad():
            for name, parameter in expected.items():
                parameter.copy_(held[name])


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _stored_name(name: str) -> str:
    """As PEFT names an adapter's tensor in files."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def add_adapter(
    lm: CausalLM, *, rank: int, alpha: float, targets: str | tuple[str, ...], seed: int
) -> CausalLM:
    """The model with an adapter, in the same module, whose own weights are frozen from here on.

    Args:
        alpha: the adapter's output is scaled by alpha / rank.
        targets: "all-linear" (every linear layer but the head), or the last parts of layers' names, such as
        `q_proj` or `lm_head`.
        seed: 64-bit, of the start of A.

    Raises:
        ConfigError: PEFT is not installed, or a target names no layer that can be adapted.
        ModelError: a target is an embedding that is tied to the head.
    """
    peft = _peft()
    names = targets if isinstance(targets, str) else list(targets)
    _check_targets(lm, names)
    place = nullcontext() if lm.has_weights else torch.device("meta")
    with torch.random.fork_rng(devices=[]), place:
        torch.manual_seed(seed)
        try:
            adapter = peft.LoraModel(
                lm.module, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), "default"
            )
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model.lora.targets is {names!r}: {reason}; name linear layers of a {lm.model_type}"
            ) from error
    return CausalLM(lm.module, adapter=adapter, takes_layouts=lm.takes_layouts)


def share_base(lm: CausalLM, other: CausalLM) -> None:
    """Let a model with an adapter use the frozen weights of another of the same start, instead of its own
    copy; their adapters may differ."""
    base = {_plain_name(name): parameter for name, parameter in other.module.named_parameters()}
    for name, parameter in lm.module.named_parameters():
        if not is_adapter(name):
            parameter.data = base[_plain_name(name)].data


def _plain_name(name: str) -> str:
    """Of a frozen weight, without what PEFT has put around it."""
    return name.replace(".base_layer.", ".")


def merged(lm: CausalLM) -> CausalLM:
    """The model with its adapter added into its weights, a plain model of transformers; the given one is used
    up. Packed weights are unpacked for good: it is the model that learned, not the one that was packed."""
    unpack(lm)
    return lm if lm.adapter is None else CausalLM(lm.adapter.merge_and_unload())


def save_adapter(lm: CausalLM, base: str, out: Path) -> None:
    """Write an adapter as PEFT does: `PeftModel.from_pretrained` puts it on the model `base`."""
    out.mkdir(parents=True, exist_ok=True)
    config = lm.adapter.peft_config["default"]
    config.base_model_name_or_path = base
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(out)
    tensors = {_stored_name(name): tensor.detach().contiguous() for name, tensor in lm.trainable().items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})


def _peft() -> Any:
    with suppress(ConfigError):  # where it is installed PEFT imports it, and would let it fetch code
        functional_of_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs PEFT ({error}): pip install 'oat-align[lora]'") from None
    return peft


def _check_targets(lm: CausalLM, names: str | list[str]) -> None:
    """Each target names a layer, and none names an embedding that is also the head: its change could not be
    merged into either."""
    if isinstance(names, str):
        return
    modules = dict(lm.module.named_modules())
    tied = lm.module.get_input_embeddings().weight is lm.module.get_output_embeddings().weight
    for target in names:
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            layers = sorted(
                {
                    name.rpartition(".")[2]
                    for name, module in modules.items()
                    if isinstance(module, torch.nn.Linear)
                }
            )
            raise ConfigError(
                f"model.lora.targets: a {lm.model_type} has no layer {target!r}; its linear layers: "
                f"{', '.join(layers)}"
            )
        if tied and any(
            module in (lm.module.get_input_embeddings(), lm.module.get_output_embeddings())
            for module in found
        ):
            raise ModelError(
                f"model.lora.targets: {target!r} is tied to the model's other embedding, so an adapter "
                "cannot be merged; leave it out"
            )
