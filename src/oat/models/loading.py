"""Models and tokenizers of local directories and of the hub, through transformers; no code that comes with a
model is run, and weights are read from safetensors only."""

import copy
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging

from oat.errors import ModelError, did_you_mean
from oat.files import located, seen, start
from oat.models.attention import NAME
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import LIBRARY_ERRORS, check_head, check_outlined_head, give_layouts
from oat.models.linear import use_fast_matmul
from oat.models.weight_files import described

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OUTLINED: ContextVar[bool] = ContextVar("outlined", default=False)


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
    except LIBRARY_ERRORS as error:
        raise _refusal("tokenizer", path, error) from error


def load_lm(path: str, *, dtype: str = "float32", device: torch.device | str = "cpu") -> CausalLM:
    """The causal language model of a local directory or of a hub model, in evaluation mode, without dropout.

    Args:
        path: a directory with `config.json` and safetensors files, or `org/name`.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ModelError: there is none, it cannot be read, tensors are missing or of another shape, or its logits
            are not its head applied to its hidden states.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"no dtype `{dtype}` for a model: {did_you_mean(dtype, _DTYPES)}")
    config = load_config(path)
    try:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{path} is a `{config.model_type}`, which is no causal language model; give one that "
                "generates text"
            )
        _remove_noise(config)
        can_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
        if _OUTLINED.get():
            return _outline(path, config, _DTYPES[dtype], device, can_sdpa=can_sdpa)
        if os.path.isdir(seen(path)):
            described(path)
        module = _from_files(
            located(path),
            path,
            config,
            dtype=_DTYPES[dtype],
            attn_implementation="sdpa" if can_sdpa else "eager",
        )
    except ModelError:
        raise
    except LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error
    use_fast_matmul(module)
    lm = CausalLM(module.eval().to(device))
    check_head(lm, path)
    if can_sdpa:
        give_layouts(lm)
    return lm


@contextmanager
def outlines() -> Iterator[None]:
    """Within it `load_lm` makes a model of its configuration alone, and every tensor has a shape but no
    memory: nothing can be learned of values.

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
    """Write model and tokenizer as transformers does: config, safetensors, tokenizer files; `load_lm` and
    `AutoModelForCausalLM` read them."""
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
    raise ModelError(
        f"{_nowhere(path)}, and it is no hub id; give a local directory, or a hub id as `org/name`"
    )


def _nowhere(path: str) -> str:
    return f"there is no directory {path}" + (
        "" if os.path.isabs(path) else f" in {start()}, from where relative paths are taken"
    )


def _refusal(what: str, path: str, error: BaseException) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    if os.path.isdir(seen(path)):
        files = "config.json and safetensors files" if what == "model" else "tokenizer.json"
        return ModelError(
            f"the directory {path} holds no {what} that can be read ({reason}); give one with {files}, as "
            "`save_pretrained` writes them"
        )
    return ModelError(
        f"{_nowhere(path)}, and the {what} of that name cannot be had from the hub; give a local "
        "directory, or download it where there is a "
        f"network (`hf download {path}`), set HF_HOME to the folder it went to, and HF_HUB_OFFLINE=1 to "
        f"read from there only (the hub: {reason})"
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
        module = _from_files(
            located(path), path, config, mapping, dtype=_DTYPES[dtype], attn_implementation=attention
        )
    except ModelError:
        raise
    except LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error
    use_fast_matmul(module)
    return module.eval()


def load_config(path: str) -> Any:
    """The configuration of the model in a local directory or on the hub.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    where = _locate(path)
    if os.path.isdir(where) and not os.path.isfile(os.path.join(where, "config.json")):
        raise ModelError(
            f"the directory {path} has no config.json, so it holds no model; give a directory written by "
            "`save_pretrained`"
        )
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except LIBRARY_ERRORS as error:
        raise _refusal("model", path, error) from error


def _from_files(
    where: str | None,
    path: str,
    config: Any,
    mapping: Mapping[Any, Any] = MODEL_FOR_CAUSAL_LM_MAPPING,
    **options: Any,
) -> Any:
    """The module with its weights, all of which the files have.

    Args:
        where: None: the weights are among the options.

    Raises:
        ModelError: some are missing, or of another shape.
    """
    kind, verbosity = mapping[type(config)], logging.get_verbosity()
    asked = {
        "config": config,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    logging.set_verbosity_error()  # what it would report on several lines is raised here
    try:
        with _without_bars():
            module, info = kind.from_pretrained(where, **asked, **options)
    finally:
        logging.set_verbosity(verbosity)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(
            f"the weights of {path} lack {len(missing)} tensors, for example `{missing[0]}`; give a "
            "checkpoint of the whole model"
        )
    for name, held, expected in sorted(info["mismatched_keys"]):
        shapes = (
            f"`{name}` has the shape {tuple(held)} in the files of {path}, and {tuple(expected)} by its "
            "config.json"
        )
        raise ModelError(f"{shapes}; put back the config.json that belongs to the weights")
    return module


def _outline(
    path: str, config: Any, dtype: torch.dtype, device: torch.device | str, *, can_sdpa: bool
) -> CausalLM:
    """A model without weights; that its code lets our attention in is believed. The names and shapes of
    tensors in files that lie here are held against it where Accelerate is installed, which transformers needs
    for that; nothing is fetched."""
    if os.path.isdir(seen(path)):
        with unset_fake_temporarily():
            held = described(path)
            if importlib.util.find_spec("accelerate"):
                _from_files(
                    None, path, copy.deepcopy(config), dtype=dtype, device_map="meta", state_dict=held
                )
    kind = "sdpa" if can_sdpa else "eager"
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=kind, trust_remote_code=False
        )
    with suppress(OSError):  # without the file it is what the model's own configuration says
        module.generation_config = GenerationConfig.from_pretrained(located(path))
    lm = CausalLM(module.eval(), takes_layouts=can_sdpa)
    check_outlined_head(lm, path)
    if can_sdpa:
        module.set_attn_implementation(NAME)
    use_fast_matmul(module)
    return lm
