"""A causal language model of transformers as the engine and the learner see it: a backbone that makes hidden states, and a head.

Supported is a model whose logits are its output embeddings applied to the last hidden states of its backbone, nothing more; a model that
scales or caps its logits is refused when it is loaded. Weights are read from safetensors only, and no code that comes with a model is run.
"""

import copy
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from oat.errors import ModelError, did_you_mean
from oat.files import located, seen, start
from oat.models.attention import NAME, Layout, Packed, pack, pack_groups
from oat.models.linear import Linear, quicken

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
_HEAD_TOLERANCE, _HALF_TOLERANCE = 1e-4, 5e-2
_LARGEST_HEAD = 10**8
"""Bytes, as the format has it."""
_NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask of four axes keeps transformers from making one of its own; a layout does not look at it."""


_OUTLINED: ContextVar[bool] = ContextVar("outlined", default=False)


class CausalLM:
    """A transformers module with the few operations that this code needs of it.

    Attributes:
        module: the `...ForCausalLM` module itself; whoever trains it owns its mode and its gradients.
        adapter: PEFT's handle of the LoRA layers within the module (`oat.models.lora`), or None.
        is_base: the module is seen as it is without its adapter.
        takes_layouts: its attention is ours (`oat.models.attention`), so that sequences need no padding.
    """

    def __init__(self, module: Any, *, adapter: Any = None, is_base: bool = False, takes_layouts: bool = False):
        self.module, self.adapter, self.is_base, self.takes_layouts = module, adapter, is_base, takes_layouts

    def base(self) -> "CausalLM":
        """The same module with the adapter off: what the adapter started from, without a second copy."""
        return CausalLM(self.module, adapter=self.adapter, is_base=True, takes_layouts=self.takes_layouts)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that its generation config says end a text."""
        eos = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def vocab_rows(self) -> int:
        """Columns of the logits; often more than the tokenizer has tokens."""
        return len(self.module.get_output_embeddings().weight)

    @property
    def model_type(self) -> str:
        return self.module.config.model_type

    @property
    def context_length(self) -> int | None:
        """Most tokens of a sequence; None when the model states no limit.

        The least of the positions it has, of its sliding window or attention chunk (within which it equals full attention, the only one
        done here), and of the length at which its position encoding would change for tokens that are already cached ("longrope").
        """
        config = self.module.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        limits = [getattr(config, "max_position_embeddings", None)]
        if layer_types is None or "sliding_attention" in layer_types:
            limits.append(getattr(config, "sliding_window", None))
        if layer_types is not None and "chunked_attention" in layer_types:
            limits.append(config.attention_chunk_size)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
        return min((limit for limit in limits if limit is not None), default=None)

    def hidden(self, input_ids: Tensor, *, positions: Tensor | None = None, layout: Layout | None = None) -> Tensor:
        """Last hidden states of the backbone; the gradient flows, in training as in evaluation mode.

        Args:
            input_ids: (R, L).
            positions: (R, L) position of each token; None: 0 to L - 1.
            layout: who sees whom, where the model `takes_layouts`; None: each row itself, causally.
        Returns:
            (R, L, D).
        """
        asked: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        if layout is not None:
            asked |= {"layout": layout, "attention_mask": _NO_MASK.to(input_ids.device)}
        with self.as_seen():
            return self.module.base_model(input_ids=input_ids, use_cache=False, **asked).last_hidden_state

    def hidden_of(self, sequences: Sequence[np.ndarray], prefixes: Sequence[int] | None = None) -> tuple[Tensor, list[np.ndarray]]:
        """Sequences of any lengths in one pass, end to end without padding; or padded on the right, where the model takes no layouts.

        Args:
            prefixes: tokens of each sequence that others may begin with too, and which are then computed once; less than all. None: no sharing.
        Returns:
            Last hidden states (T, D), and where those of each sequence lie among them.
        """
        if not self.takes_layouts:
            width = max(len(ids) for ids in sequences)
            ids_1T, _, spans = pack(sequences, self.device, width=width)
            return self.hidden(ids_1T.view(-1, width)).flatten(0, 1), [np.arange(span.start, span.stop) for span in spans]
        ids_1T, positions_1T, spans, places = pack_groups(sequences, prefixes or [0] * len(sequences), self.device)
        return self.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))[0], places

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over `vocab_rows` ids, (..., D) to (..., V), in the model's own precision."""
        with self.as_seen():
            return self.module.get_output_embeddings()(hidden)

    def linear_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (V, D) and bias (V,) of the head; None where the head is more than a linear layer, such as one with an adapter."""
        head = self.module.get_output_embeddings()
        return (head.weight, head.bias) if type(head) in (torch.nn.Linear, Linear) else None

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and every buffer that is part of the model's state, by name; a tied parameter once, under its first name."""
        state = self.module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in state}
        return {**dict(self.module.named_parameters()), **buffers}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that learning may change, by name: the adapter's where there is one, otherwise all."""
        return {name: parameter for name, parameter in self.module.named_parameters() if self.adapter is None or is_adapter(name)}

    def checkpoint_gradients(self) -> None:
        """In training mode, keep each layer's input only and compute the layer again in the backward pass.

        Raises:
            ModelError: the model cannot.
        """
        enable = getattr(self.module, "activation_checkpointing_enable", None) or self.module.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False, "preserve_rng_state": False})
        except ValueError as error:
            raise ModelError(f"a `{self.model_type}` has no gradient checkpointing; set learner.gradient_checkpointing to false") from error

    @contextmanager
    def as_seen(self) -> Iterator[None]:
        """With `is_base`, the adapter's layers are off; no flag of any gradient moves, as it would with PEFT's own switch."""
        layers = [module for module in self.module.modules() if hasattr(module, "_disable_adapters")] if self.is_base else []
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    """Whether a tensor of a model belongs to its LoRA adapter."""
    return "lora_" in name


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local directory or of a hub model.

    Args:
        path: a directory, or `org/name`.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    where = _locate(path)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except _LIBRARY_ERRORS as error:
        raise _refusal("tokenizer", path, error) from error


def load_lm(path: str, *, dtype: str = "float32", device: torch.device | str = "cpu") -> CausalLM:
    """The causal language model of a local directory or of a hub model, in evaluation mode, without dropout.

    Args:
        path: a directory with `config.json` and safetensors files, or `org/name`.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ModelError: there is none, it cannot be read, tensors are missing or of another shape, or its logits are not its head applied to its
            hidden states.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"no dtype `{dtype}` for a model: {did_you_mean(dtype, _DTYPES)}")
    config = load_config(path)
    try:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{path} is a `{config.model_type}`, which is no causal language model; give one that generates text")
        _remove_noise(config)
        can_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
        if _OUTLINED.get():
            return _outline(path, config, _DTYPES[dtype], device, can_sdpa=can_sdpa)
        if os.path.isdir(seen(path)):
            described(path)
        module = _from_files(located(path), path, config, dtype=_DTYPES[dtype], attn_implementation="sdpa" if can_sdpa else "eager")
    except ModelError:
        raise
    except _LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error
    quicken(module)
    lm = CausalLM(module.eval().to(device))
    _check_head(lm, path)
    if can_sdpa:
        _give_layouts(lm)
    return lm


@contextmanager
def outlines() -> Iterator[None]:
    """Within it `load_lm` makes a model of its configuration alone, and every tensor has a shape but no memory: nothing can be learned of values.

    Modules stay on the device and in the precision they are made in, since torch cannot move such tensors.
    """
    token, move = _OUTLINED.set(True), torch.nn.Module.to
    torch.nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.nn.Module.to = move  # type: ignore[method-assign]
        _OUTLINED.reset(token)


def is_outlined() -> bool:
    """Whether this runs within `outlines`."""
    return _OUTLINED.get()


def save_lm(lm: CausalLM, tokenizer: Any, directory: str) -> None:
    """Write model and tokenizer as transformers does: config, safetensors, tokenizer files; `load_lm` and `AutoModelForCausalLM` read them."""
    save_module(lm.module, tokenizer, directory)


def save_module(module: Any, tokenizer: Any, directory: str) -> None:
    with _without_bars():
        module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within it transformers draws no progress bars of its own."""
    before = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _locate(path: str) -> str:
    where = located(path)
    if os.path.isdir(where) or (not os.path.exists(where) and _HUB_ID.fullmatch(path)):
        return where
    if os.path.exists(where):
        raise ModelError(f"{path} is a file; give the directory that holds the model's config.json")
    raise ModelError(f"{_nowhere(path)}, and it is no hub id; give a local directory, or a hub id as `org/name`")


def _nowhere(path: str) -> str:
    return f"there is no directory {path}" + ("" if os.path.isabs(path) else f" in {start()}, from where relative paths are taken")


def _refusal(what: str, path: str, error: BaseException) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    if os.path.isdir(seen(path)):
        files = "config.json and safetensors files" if what == "model" else "tokenizer.json"
        return ModelError(
            f"the directory {path} holds no {what} that can be read ({reason}); give one with {files}, as `save_pretrained` writes them"
        )
    return ModelError(
        f"{_nowhere(path)}, and the {what} of that name cannot be had from the hub; give a local directory, or download it where there is a "
        f"network (`hf download {path}`), set HF_HOME to the folder it went to, and HF_HUB_OFFLINE=1 to read from there only (the hub: {reason})"
    )


def _remove_noise(config: Any) -> None:
    """No dropout, and no jitter of routers: training mode computes as evaluation mode does."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)


def load_module(path: str, config: Any, mapping: Mapping[Any, Any], dtype: str) -> Any:
    """A module of transformers from a local directory or the hub, in evaluation mode, without dropout.

    Args:
        config: what `load_config` gives.
        mapping: from the types of configurations to classes, the config's among them.
        dtype: as `load_lm`.

    Raises:
        ModelError: as `load_lm`.
    """
    _remove_noise(config)
    try:
        if os.path.isdir(seen(path)):
            described(path)
        attention = "sdpa" if getattr(mapping[type(config)], "_supports_sdpa", False) else "eager"
        module = _from_files(located(path), path, config, mapping, dtype=_DTYPES[dtype], attn_implementation=attention)
    except ModelError:
        raise
    except _LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error
    quicken(module)
    return module.eval()


def load_config(path: str) -> Any:
    """The configuration of the model in a local directory or on the hub.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    where = _locate(path)
    if os.path.isdir(where) and not os.path.isfile(os.path.join(where, "config.json")):
        raise ModelError(f"the directory {path} has no config.json, so it holds no model; give a directory written by `save_pretrained`")
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except _LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error


def _from_files(where: str | None, path: str, config: Any, mapping: Mapping[Any, Any] = MODEL_FOR_CAUSAL_LM_MAPPING, **options: Any) -> Any:
    """The module with its weights, all of which the files have.

    Args:
        where: None: the weights are among the options.

    Raises:
        ModelError: some are missing, or of another shape.
    """
    kind, verbosity = mapping[type(config)], logging.get_verbosity()
    asked = {"config": config, "use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    logging.set_verbosity_error()  # what it would report on several lines is raised here
    try:
        with _without_bars():
            module, info = kind.from_pretrained(where, **asked, **options)
    finally:
        logging.set_verbosity(verbosity)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"the weights of {path} lack {len(missing)} tensors, for example `{missing[0]}`; give a checkpoint of the whole model")
    for name, held, expected in sorted(info["mismatched_keys"]):
        shapes = f"`{name}` has the shape {tuple(held)} in the files of {path}, and {tuple(expected)} by its config.json"
        raise ModelError(f"{shapes}; put back the config.json that belongs to the weights")
    return module


def described(path: str) -> dict[str, Tensor]:
    """What the safetensors files of a directory hold, as tensors without memory; only the heads of the files are read.

    Raises:
        ModelError: there are none, or one is damaged.
    """
    folder = seen(path)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    file, found = single, dict[str, Tensor]()
    try:
        has_index = index.exists() and not single.exists()
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())) if has_index else [single.name]
        for file in (folder / name for name in names):
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                head = json.loads(stream.read(min(size, _LARGEST_HEAD)))
            head.pop("__metadata__", None)
            end = 8 + size + max((tensor["data_offsets"][1] for tensor in head.values()), default=0)
            if file.stat().st_size != end:
                raise ValueError(f"it has {file.stat().st_size} bytes, and its head says {end}")
            found |= {key: torch.empty(tensor["shape"], device="meta") for key, tensor in head.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"the weights of {path} cannot be read ({file.name}: {reason}); give safetensors files as `save_pretrained` writes them"
        ) from error
    return found


def _outline(path: str, config: Any, dtype: torch.dtype, device: torch.device | str, *, can_sdpa: bool) -> CausalLM:
    """A model without weights; that its code lets our attention in is believed. The names and shapes of tensors in files that lie here are held
    against it where Accelerate is installed, which transformers needs for that; nothing is fetched."""
    if os.path.isdir(seen(path)):
        with unset_fake_temporarily():
            held = described(path)
            if importlib.util.find_spec("accelerate"):
                _from_files(None, path, copy.deepcopy(config), dtype=dtype, device_map="meta", state_dict=held)
    kind = "sdpa" if can_sdpa else "eager"
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kind, trust_remote_code=False)
    with suppress(OSError):  # without the file it is what the model's own configuration says
        module.generation_config = GenerationConfig.from_pretrained(located(path))
    lm = CausalLM(module.eval(), takes_layouts=can_sdpa)
    _check_outlined_head(lm, path)
    if can_sdpa:
        module.set_attn_implementation(NAME)
    quicken(module)
    return lm


@torch.no_grad()
def _check_head(lm: CausalLM, path: str) -> None:
    """The logits that we compute are the model's own."""
    _check_has_head(lm, path)
    ids = torch.arange(min(8, lm.vocab_rows), device=lm.device)[None]
    try:
        difference = (lm.head(lm.hidden(ids)) - lm.module(input_ids=ids).logits).abs().max().item()
    except _LIBRARY_ERRORS as error:
        raise ModelError(f"a `{lm.model_type}` cannot be followed ({error}); give a plain causal language model") from error
    _refuse_other_logits(lm, path, difference)


@torch.no_grad()
def _check_outlined_head(lm: CausalLM, path: str) -> None:
    """The same without weights: the backbone gives hidden states of ours, and the head is a small one."""
    _check_has_head(lm, path)
    head, ids = lm.module.get_output_embeddings(), torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    with unset_fake_temporarily():
        hidden = torch.linspace(-4, 4, 2 * head.in_features).view(1, 2, -1)
        small = torch.nn.Linear(head.in_features, 3, bias=False)
        torch.nn.init.ones_(small.weight)

        def ours(module: Any, given: Any, made: Any) -> Any:
            made.last_hidden_state = hidden
            return made

        hook = lm.module.base_model.register_forward_hook(ours)
        lm.module.set_output_embeddings(small)
        try:
            difference = (lm.module(input_ids=ids, use_cache=False).logits - small(hidden)).abs().max().item()
        except _LIBRARY_ERRORS:  # whether it can be followed is seen with its weights
            return
        finally:
            hook.remove()
            lm.module.set_output_embeddings(head)
    _refuse_other_logits(lm, path, difference)


def _check_has_head(lm: CausalLM, path: str) -> None:
    if lm.module.get_output_embeddings() is None:
        raise ModelError(f"{path} is a `{lm.model_type}` without output embeddings; give a model that generates text")


def _refuse_other_logits(lm: CausalLM, path: str, difference: float) -> None:
    if not difference <= _HEAD_TOLERANCE:
        raise ModelError(
            f"the logits of a `{lm.model_type}` are not its head applied to its last hidden states (they differ by {difference:.3g}): it scales "
            f"or caps them, or its weights are not finite; give another model than {path}"
        )


@torch.no_grad()
def _give_layouts(lm: CausalLM) -> None:
    """Our own attention, if the model's code lets it in and two sequences then do not see each other; otherwise the one it has."""
    sequences = [np.arange(count) % lm.vocab_rows for count in (5, 3)]
    ids_1T, positions_1T, spans = pack(sequences, lm.device)
    plain = torch.cat([lm.hidden(torch.from_numpy(ids)[None].to(lm.device))[0] for ids in sequences])
    lm.module.set_attn_implementation(NAME)
    try:
        difference = (lm.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))[0] - plain).abs().max() / plain.abs().max().clamp(min=1e-6)
        lm.takes_layouts = bool(difference <= (_HEAD_TOLERANCE if plain.dtype == torch.float32 else _HALF_TOLERANCE))
    except (*_LIBRARY_ERRORS, ModelError):
        lm.takes_layouts = False
    if not lm.takes_layouts:
        lm.module.set_attn_implementation("sdpa")
