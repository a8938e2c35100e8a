"""Loading of models and tokenizers from local directories and the hub, through transformers. Code that comes
with a model is not run, and weights are read from safetensors only."""

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
    modeling_utils,
)
from transformers.utils import logging

from oat.errors import ModelError, did_you_mean
from oat.files import absolute, located
from oat.models.beside import (
    locate,
    nowhere,
    pointer_in,
    refuse_config,
    refuse_named_files,
    say_left_over_adapter,
    say_other_ends,
    say_other_templates,
    say_unused_settings,
    say_unused_tensors,
    without_dropout,
)
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import LIBRARY_ERRORS, check_head, give_layouts
from oat.models.linear import use_fast_matmul
from oat.models.weight_files import are_equal, described, refuse_two_sources

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMBERED = re.compile(r"\.\d+\.")


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a local directory or of a hub model. The same text always gets the same ids: the
    dropout of merges is switched off.

    Args:
        path: a directory, or `org/name`.

    Raises:
        ModelError: there is no tokenizer, it cannot be read, or `refuse_named_files` refuses it.
    """
    where = locate(path)
    with refusing("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        refuse_named_files(path, "tokenizer_config.json", "fast_tokenizer_files", "tokenizer.json")
        say_other_templates(path, tokenizer)
        say_other_ends(path, tokenizer)
        without_dropout(path, tokenizer)
        return tokenizer


def load_lm(
    path: str, *, dtype: str = "float32", device: torch.device | str = "cpu", needs_head: bool = True
) -> CausalLM:
    """Load the causal language model of a local directory or of the hub, in evaluation mode, without dropout.

    Args:
        path: a directory with `config.json` and safetensors files, or `org/name`.
        dtype: "float32", "bfloat16" or "float16".
        needs_head: False: the files may lack the output embeddings, as those of a sequence-classification
            model do. The head's weights are then of no use.

    Raises:
        ModelError: the model is missing, cannot be read, or is no causal language model; there is no such
            `dtype`; tensors are missing or have shapes that contradict `config.json`; or the logits are not
            the head applied to the last hidden states.
    """
    config, attention = causal_config(path, dtype)
    with refusing("model", path):
        if os.path.isdir(absolute(path)):
            described(path)
        module = module_from_files(
            located(path),
            path,
            config,
            needs_head=needs_head,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
        )
    use_fast_matmul(module)
    lm = CausalLM(module.eval().to(device))
    check_head(lm, path)
    if attention == "sdpa":
        give_layouts(lm)
    return lm


def causal_config(path: str, dtype: str) -> tuple[Any, str]:
    """Load the configuration of a causal language model, without dropout.

    Returns:
        The configuration; and the attention of transformers with which to load the model: "sdpa" if the
        model's code supports it, else "eager".

    Raises:
        ModelError: the configuration is missing or cannot be read, the model is of another kind, or there is
            no such `dtype`.
    """
    if dtype not in DTYPES:
        raise ModelError(f"no dtype `{dtype}` for a model: {did_you_mean(dtype, DTYPES)}")
    config = load_config(path)
    with refusing("model", path):
        say_unused_settings(path)
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
    """Turn errors of transformers, and of the libraries that it calls, into a `ModelError`.

    Args:
        what: "model" or "tokenizer": the kind of thing that the body loads.
        path: the directory that the body loads from, or the name of a hub model.
    """
    try:
        yield
    except (ModelError, *LIBRARY_ERRORS) as error:
        if name := pointer_in(path):
            raise ModelError(
                f"the {name} of {path} is a pointer of Git LFS, not the file itself; fetch it with `git lfs "
                "pull`"
            ) from error
        if isinstance(error, ModelError):
            raise
        raise _refusal(what, path, error) from error


def save_lm(lm: CausalLM, tokenizer: Any, directory: str) -> None:
    """Write model and tokenizer in the format of transformers: config, safetensors, tokenizer files.
    `load_lm` and `AutoModelForCausalLM` read this format."""
    save_module(lm.module, tokenizer, directory)


def save_module(module: Any, tokenizer: Any, directory: str) -> None:
    """Write any model of transformers, and its tokenizer, in the format of transformers."""
    with without_bars():
        module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars in the body."""
    before = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


@contextmanager
def _without_adapters() -> Iterator[None]:
    """Keep transformers from looking for an adapter beside a model in the body. No argument of all versions
    that are supported does so."""
    before = modeling_utils.maybe_load_adapters
    modeling_utils.maybe_load_adapters = lambda path, _, **options: (None, path, options)
    try:
        yield
    finally:
        modeling_utils.maybe_load_adapters = before


def _refusal(what: str, path: str, error: BaseException) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    if os.path.isdir(absolute(path)):
        files = "config.json and safetensors files" if what == "model" else "tokenizer.json"
        return ModelError(
            f"the directory {path} holds no {what} that can be read ({reason}); give one with {files}, as "
            "`save_pretrained` writes them"
        )
    return ModelError(
        f"{nowhere(path)}, and the {what} of that name cannot be had from the hub; give a local directory, "
        f"or download it where there is a network (`hf download {path}`), set HF_HOME to the folder it went "
        f"to, and HF_HUB_OFFLINE=1 to read from there only (the hub: {reason})"
    )


def _remove_noise(config: Any) -> None:
    """Set dropout to 0, so that a layer in training mode (`checkpointing`) computes the same as in evaluation
    mode.

    The jitter of routers stays. It acts only in routers that are in training mode, and none ever is. The
    field `router_jitter_noise` of PhiMoE is a threshold in evaluation mode too.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)


def load_module(path: str, config: Any, mapping: Mapping[Any, Any], dtype: str) -> Any:
    """Load a module of transformers from a local directory or the hub, in evaluation mode, without dropout.

    Args:
        config: the model's configuration, from `load_config`.
        mapping: maps types of configurations to classes of modules; it must contain the type of `config`.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ModelError: the weights are missing or cannot be read, or tensors are missing or have shapes that
            contradict `config`.
    """
    _remove_noise(config)
    say_left_over_adapter(path)
    with refusing("model", path):
        if os.path.isdir(absolute(path)):
            described(path)
        attention = "sdpa" if getattr(mapping[type(config)], "_supports_sdpa", False) else "eager"
        module = module_from_files(
            located(path), path, config, mapping, dtype=DTYPES[dtype], attn_implementation=attention
        )
    use_fast_matmul(module)
    return module.eval()


def _names_of_head(module: Any) -> set[str]:
    """Return the names of the tensors in a module's output embeddings."""
    head = module.get_output_embeddings()
    names = [name for name, part in module.named_modules() if part is head]
    return {f"{name}.{tensor}" for name in names for tensor in ("weight", "bias")}


def load_config(path: str) -> Any:
    """Load the configuration of the model in a local directory or on the hub.

    Raises:
        ModelError: there is no configuration, it cannot be read, or `refuse_config` refuses it.
    """
    where = locate(path)
    if os.path.isdir(where) and not os.path.isfile(os.path.join(where, "config.json")):
        is_run = os.path.isfile(os.path.join(where, "config.yaml"))
        way = f"write the model of this run with `oat export {path} OUT`, and give OUT" if is_run else ""
        raise ModelError(
            f"the directory {path} has no config.json, so it holds no model; "
            + (way or "give a directory written by `save_pretrained`")
        )
    with refusing("model", path):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        refuse_named_files(path, "config.json", "configuration_files", "config.json")
        refuse_config(config, path)
    return config


def module_from_files(
    where: str | None,
    path: str,
    config: Any,
    mapping: Mapping[Any, Any] = MODEL_FOR_CAUSAL_LM_MAPPING,
    *,
    needs_head: bool = True,
    **options: Any,
) -> Any:
    """Make a module with its weights, which must include every tensor of the module.

    Args:
        where: the directory or hub model to load from; None: `options` contains the weights.
        path: the name of the model in messages.
        config: the model's configuration.
        mapping: maps types of configurations to classes of modules; it must contain the type of `config`.
        needs_head: False: the weights may lack the output embeddings.
        options: further arguments of `from_pretrained`.

    An adapter in the same folder is not loaded.

    Raises:
        ModelError: tensors are missing, or have shapes that contradict `config`; two tensors of the files
            fill the same place; or tensors that `config` ties have different values.
    """
    cls = mapping[type(config)]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would also log what is raised below
    try:
        # what is missing is drawn
        with without_bars(), _without_adapters(), torch.random.fork_rng(devices=[]):
            module, info = cls.from_pretrained(
                where,
                config=config,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted({*info["missing_keys"]} - (set() if needs_head else _names_of_head(module)))
    if missing:
        raise ModelError(
            f"the weights of {path} lack {len(missing)} tensors, for example `{missing[0]}`; give a "
            "checkpoint of the whole model"
        )
    for name, held, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"`{name}` has the shape {tuple(held)} in the files of {path}, and {tuple(expected)} by its "
            "config.json; put back the config.json that belongs to the weights"
        )
    refuse_two_sources(module, path)
    _refuse_untied(module, path)
    has_head = needs_head and module.base_model is not module
    say_unused_tensors(path, _unused(info, has_head=has_head), config.model_type)
    return module


def _refuse_untied(module: Any, path: str) -> None:
    """Refuse a module whose configuration ties two tensors that have different values in the files.
    Transformers leaves them untied; the module would have a parameter more than its configuration says. The
    tensors of an outline have no values; those of the files are compared.

    Raises:
        ModelError: two tensors differ.
    """
    declared = module.get_expanded_tied_weights_keys()
    for one, other in declared.items():
        first, second = module.get_parameter_or_buffer(one), module.get_parameter_or_buffer(other)
        if first is second:
            continue
        if first.is_meta and are_equal(path, one, other):
            module.tie_weights()
            continue
        raise ModelError(
            f"the config.json of {path} ties `{one}` to `{other}` (tie_word_embeddings), and its weights "
            "have two different tensors; set tie_word_embeddings to false there, or give the files that "
            "belong together"
        )


def _unused(info: Any, *, has_head: bool) -> list[str]:
    """Return the names of the tensors that the files have and the module lacks. For a backbone whose head is
    not used, return only those of numbered layers: the others may be a head, for which nobody asked."""
    names = [str(name) for name in info["unexpected_keys"]]
    return [name for name in names if has_head or _NUMBERED.search(name)]
