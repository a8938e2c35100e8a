"""LoRA (arXiv:2106.09685) through PEFT: small trainable matrices beside frozen weights.

    W x + (alpha / rank) B A x

PEFT puts the layers into the model's own module, so a model with an adapter is a `CausalLM` like any other.
If the reference is the base model, it is the same module with the adapter off. In a new adapter, B is
zero, and PEFT draws A from a seed. An adapter has neither dropout nor biases.

To begin with an existing adapter, the setting `model.adapter` names the adapter's directory, and `model.path`
names its base model. Tokenizer and context length come from the base model. When such a configuration is
resolved, `model.lora` is set from the adapter's own description. So other code reads rank, scale and layers
from `model.lora`, for new and existing adapters.
"""

import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oat.config.settings import ModelConfig
from oat.errors import ConfigError, ModelError, warn
from oat.files import absolute, located
from oat.models.adapter_files import WEIGHTS, described_adapter
from oat.models.beside import say_left_over_adapter
from oat.models.causal_lm import CausalLM, is_adapter
from oat.models.frozen import freeze
from oat.models.loading import load_lm, load_tokenizer, without_bars
from oat.models.nf4 import dequantize, functional_of_bitsandbytes, quantize


class LoadPlain(Protocol):
    """A function that loads a model without an adapter: `load_lm`, or the method of `Outlines` that makes a
    model without weights."""

    def __call__(
        self, path: str, *, dtype: str, device: torch.device | str, needs_head: bool
    ) -> CausalLM: ...


class LoadModel(Protocol):
    """A function that loads the model of a configuration: `load_model`, or a method of `Outlines` that makes
    a model without weights."""

    def __call__(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        field: str = "model.adapter",
        needs_head: bool = True,
    ) -> CausalLM: ...


def load_model(
    config: ModelConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    field: str = "model.adapter",
    needs_head: bool = True,
    load: LoadPlain = load_lm,
) -> CausalLM:
    """Load the model of a configuration, with its adapter if it has one.

    Args:
        seed: seed of the adapter's initial weights; without effect if weights are loaded afterwards.
        field: name of the setting that names the adapter's directory, for messages.
        needs_head: see `load_lm`.
        load: loads the model without its adapter.

    Raises:
        ConfigError, ModelError: an error of `load`, `freeze`, `quantize` or `add_adapter`; or the adapter's
            weights cannot be read, or their names or shapes do not fit the model and `config.lora`.
    """
    say_left_over_adapter(config.path, config.adapter)
    is_outline = torch.device(device).type == "meta"
    place = device if config.quantize is None or is_outline else "cpu"
    lm = load(config.path, dtype=config.dtype, device=place, needs_head=needs_head)
    if config.frozen:
        freeze(lm, config.frozen)
    if config.quantize is not None:
        quantize(lm, device)
    if config.lora is None:
        return lm
    lm = add_adapter(
        lm, rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets, seed=seed
    )
    if config.adapter is not None:
        _say_other_base(config.adapter, config.path, field)
        _say_other_tokenizer(config.adapter, config.path, field)
        _load_adapter(lm, config.adapter, field)
    return lm


def _say_other_base(adapter: str, path: str, field: str) -> None:
    """Warn if an adapter says that it was trained beside a model of another name."""
    base = described_adapter(adapter)[1]
    if (
        base
        and Path(base).name != Path(path).name
        and absolute(adapter).resolve() != absolute(path).resolve()
    ):
        warn(
            f"{field} is {adapter!r}, which says that it was trained beside {base}, and it is used beside "
            f"{path}; if that is another model, its answers are useless"
        )


def _say_other_tokenizer(adapter: str, path: str, field: str) -> None:
    """Warn if an adapter's directory has a tokenizer that differs from the model's, which alone is used."""
    if not any((absolute(adapter) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return
    try:
        ours, theirs = load_tokenizer(path), load_tokenizer(adapter)
    except ModelError:  # who reads texts with the model's says so; a reference's base needs none
        return
    others = ["vocabulary"] if ours.get_vocab() != theirs.get_vocab() else []
    others += ["chat template"] if ours.chat_template != theirs.chat_template else []
    if others:
        warn(
            f"{field} is {adapter!r}, whose tokenizer has another {' and another '.join(others)} than that "
            f"of {path}, which is used; if the adapter was trained with its own, give a folder of the model "
            "with the adapter's tokenizer"
        )


def _load_adapter(lm: CausalLM, path: str, field: str) -> None:
    """Load the weights of a model's adapter from a directory.

    Raises:
        ModelError: the weights cannot be read; their names or shapes are not those of the adapter in `lm`; or
            the file has weights of the model too, with other values than the model's.
    """
    expected = {_stored_name(name): parameter for name, parameter in lm.trainable().items()}
    try:
        held = load_file(absolute(path) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{field} is {path!r}: its weights cannot be read ({WEIGHTS}: {error}); give safetensors as PEFT "
            "writes them"
        ) from error
    if (absolute(path) / "adapter_model.bin").is_file():
        warn(f"{field} is {path!r}: it holds {WEIGHTS}, which is read, and adapter_model.bin, which is not")
    own = _of_model(lm, held)
    wrong = sorted(
        name
        for name in (expected.keys() | held.keys()) - own.keys()
        if _shape(expected, name) != _shape(held, name)
    )
    if wrong:
        raise ModelError(
            f"{field} is {path!r}: it is of another model than this {lm.model_type}: {len(wrong)} tensors do "
            f"not correspond, for example `{wrong[0]}` ({_shape(held, wrong[0])} there, "
            f"{_shape(expected, wrong[0])} here); give the model that it was trained beside"
        )
    for name, parameter in own.items():
        if not _is_equal(held[name], parameter, lm.has_weights):
            raise ModelError(
                f"{field} is {path!r}: it has weights of the model itself too, and `{name}` "
                f"({_shape(held, name)}) is not that of the model here ({_shape(own, name)}), as after "
                "training it or `resize_token_embeddings`; merge the adapter with PEFT into the model that "
                "it was trained beside, and give the merged model"
            )
    if lm.has_weights:
        with torch.no_grad():
            for name, parameter in expected.items():
                parameter.copy_(held[name])


def _of_model(lm: CausalLM, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the model itself that an adapter's file has too, by their names there. PEFT
    writes embeddings if they are adapted or were resized."""
    named = lm.module.named_parameters(remove_duplicate=False)
    own = {_plain_name(_stored_name(name)): tensor for name, tensor in named if not is_adapter(name)}
    return {name: own[_plain_name(name)] for name in sorted(held) if _plain_name(name) in own}


def _is_equal(held: torch.Tensor, own: torch.Tensor, has_weights: bool) -> bool:
    """Return True if two weights are equal in the precision of one of them. Without values, compare their
    shapes."""
    if held.shape != own.shape or not has_weights:
        return held.shape == own.shape
    own = own.detach().cpu()
    return torch.equal(held.to(own.dtype), own) or torch.equal(held, own.to(held.dtype))


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _stored_name(name: str) -> str:
    """Return the name that PEFT gives, in files, to the adapter's tensor `name`."""
    return f"base_model.model.{_without_name(name)}"


def _without_name(name: str) -> str:
    """Return the name of a tensor without the adapter's own name, which layers of embeddings have at the
    end."""
    return re.sub(r"\.default(?=\.|$)", "", name)


def add_adapter(
    lm: CausalLM, *, rank: int, alpha: float, targets: str | tuple[str, ...], seed: int
) -> CausalLM:
    """Add an adapter to a model, in the same module. This freezes the module's own weights.

    Args:
        rank: width of the adapter's matrices.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: "all-linear" for every linear layer except the head; or names of layers by their last part,
            such as `q_proj` or `lm_head`.
        seed: 64-bit seed of the initial A.

    Raises:
        ConfigError: PEFT is not installed, or a target names no layer that can be adapted.
        ModelError: a target is the embedding or the head, and the two are tied.
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
    adapted = CausalLM(lm.module, adapter=adapter, takes_layouts=lm.takes_layouts, root=lm.root)
    adapted.unknown, adapted.is_in_files = lm.unknown, lm.is_in_files
    return adapted


def share_base(lm: CausalLM, other: CausalLM) -> None:
    """Replace the frozen weights of the model `lm`, which has an adapter, by those of the model `other`,
    without a copy. Both must have the same base model; their adapters may differ."""
    base = {_plain_name(name): parameter for name, parameter in other.module.named_parameters()}
    for name, parameter in lm.module.named_parameters():
        if not is_adapter(name):
            parameter.data = base[_plain_name(name)].data


def _plain_name(name: str) -> str:
    """Return the name that a frozen weight has without PEFT's wrapper."""
    return name.replace(".base_layer.", ".")


def merged(lm: CausalLM) -> CausalLM:
    """Merge the adapter into the weights, and return a model without an adapter. Do not use the given model
    afterwards.

    Quantised weights are unpacked first. The unquantised weights of the model's files are not used, since the
    adapter was trained beside the quantised weights.
    """
    dequantize(lm)
    return lm if lm.adapter is None else CausalLM(lm.adapter.merge_and_unload())


def save_adapter(lm: CausalLM, base: str, out: Path) -> None:
    """Write a model's adapter in PEFT's format.

    Args:
        base: path or hub id of the base model, which is written into the adapter's configuration.
        out: the directory to write.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = lm.adapter.peft_config["default"]
    config.base_model_name_or_path = base
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(out)
    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter_tensors(lm).items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})


def adapter_tensors(lm: CausalLM) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's adapter by the names that they have in PEFT's files."""
    return {_stored_name(name): tensor for name, tensor in lm.trainable().items()}


def read_by_peft(base: str, folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """Load an adapter with PEFT and transformers alone. Return the module, and the adapter's tensors by the
    names that they have in PEFT's files.

    Args:
        base: path or hub id of the base model.
        folder: the directory of the adapter.
    """
    with without_bars(), warnings.catch_warnings():
        # PEFT reads a property that transformers calls deprecated, and users can do nothing about it
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        module = AutoModelForCausalLM.from_pretrained(located(base), dtype=dtype)
        adapted = _peft().PeftModel.from_pretrained(module, str(folder))
    named = {_without_name(name): tensor for name, tensor in adapted.named_parameters()}
    return adapted, {name: tensor for name, tensor in named.items() if is_adapter(name)}


def _peft() -> Any:
    # PEFT imports bitsandbytes if installed; our import comes first and keeps bitsandbytes from fetching code
    with suppress(ConfigError):
        functional_of_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs PEFT ({error}): pip install 'oat-align[lora]'") from None
    return peft


def _check_targets(lm: CausalLM, names: str | list[str]) -> None:
    """Check that each target in a list names a layer; a pattern (a string) is not checked. If embedding
    and head are tied, also check that no target names one of them, since an adapter of tied weights could not
    be merged.

    Raises:
        ConfigError: a target names no layer.
        ModelError: a target names a tied embedding or head.
    """
    if isinstance(names, str):
        return
    modules = dict(lm.module.named_modules())
    embeddings = (lm.module.get_input_embeddings(), lm.module.get_output_embeddings())
    is_tied = embeddings[0].weight is embeddings[1].weight
    for target in names:
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear)]
            layers = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"model.lora.targets: a {lm.model_type} has no layer {target!r}; its linear layers: "
                f"{', '.join(layers)}"
            )
        if is_tied and any(module in embeddings for module in found):
            raise ModelError(
                f"model.lora.targets: {target!r} is tied to the model's other embedding, so an adapter "
                "cannot be merged; leave it out"
            )
