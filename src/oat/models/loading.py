"""Models and tokenizers of local directories and of the hub, through transformers; no code that comes with a
model is run, and weights are read from safetensors only."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
)
from transformers.utils import logging

from oat.errors import ModelError, did_you_mean
from oat.files import located, seen, start
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import LIBRARY_ERRORS, check_head, give_layouts
from oat.models.linear import use_fast_matmul
from oat.models.weight_files import described

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local directory or of a hub model.

    Args:
        path: a directory, or `org/name`.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    where = _locate(path)
    with refusing("tokenizer", path):
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)


def load_lm(path: str, *, dtype: str = "float32", device: torch.device | str = "cpu") -> CausalLM:
    """The causal language model of a local directory or of a hub model, in evaluation mode, without dropout.

    Args:
        path: a directory with `config.json` and safetensors files, or `org/name`.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ModelError: there is none, it cannot be read, tensors are missing or of another shape, or its logits
            are not its head applied to its hidden states.
    """
    config, attention = causal_config(path, dtype)
    with refusing("model", path):
        if os.path.isdir(seen(path)):
            described(path)
        module = module_from_files(
            located(path), path, config, dtype=DTYPES[dtype], attn_implementation=attention
        )
    use_fast_matmul(module)
    lm = CausalLM(module.eval().to(device))
    check_head(lm, path)
    if attention == "sdpa":
        give_layouts(lm)
    return lm


def causal_config(path: str, dtype: str) -> tuple[Any, str]:
    """The configuration of a causal language model, without dropout, and which attention of transformers it
    is loaded with: "sdpa" where its code has that, or "eager".

    Raises:
        ModelError: there is none, it is of another kind of model, or `dtype` is none.
    """
    if dtype not in DTYPES:
        raise ModelError(f"no dtype `{dtype}` for a model: {did_you_mean(dtype, DTYPES)}")
    config = load_config(path)
    with refusing("model", path):
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{path} is a `{config.model_type}`, which is no causal language model; give one that "
                "generates text"
            )
        _remove_noise(config)
        has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    return config, "sdpa" if has_sdpa else "eager"


@contextmanager
def refusing(what: str, path: str) -> Iterator[None]:
    """Within it, errors of transformers, and of what it calls, become a `ModelError`.

    Args:
        what: is read: "model" or "tokenizer".
        path: where it is read from, or the name of a hub model.
    """
    try:
        yield
    except ModelError:
        raise
    except LIBRARY_ERRORS as error:
        raise _refusal(what, path, error) from error


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
    with refusing("model", path):
        if os.path.isdir(seen(path)):
            described(path)
        attention = "sdpa" if getattr(mapping[type(config)], "_supports_sdpa", False) else "eager"
        module = module_from_files(
            located(path), path, config, mapping, dtype=DTYPES[dtype], attn_implementation=attention
        )
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
    with refusing("model", path):
        return AutoConfig.from_pretrained(where, trust_remote_code=False)


def module_from_files(
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
