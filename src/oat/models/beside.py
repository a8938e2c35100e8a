"""Files that stand beside a model's configuration and weights, and that other programs would read too.

A loader reads config.json, the ids that end a text in generation_config.json, and safetensors files. What
else could change the model is refused, if nobody can tell which model is meant. Otherwise a warning says that
it is not used.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from oat.errors import ModelError, warn
from oat.files import parse_json, seen

ADAPTER = "adapter_config.json"
_READ = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights that are not read."""
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}
"""Fields of generation_config.json that change which token is the most probable one, and the values with
which they change nothing."""


def refuse_config(config: Any, path: str) -> None:
    """Refuse a configuration that makes transformers read other files than these loaders, or make a module
    with other parameters than the configuration's own. Warn of code that is not run.

    Args:
        config: the configuration of the model at `path`.

    Raises:
        ModelError: the weights are quantised, or other files or fused layers are named.
    """
    quantised: Any = None
    for part in (config, config.get_text_config()):
        quantised = quantised or getattr(part, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ModelError(
            f"the weights of {path} are quantised (quantization_config in config.json: {method}); give the "
            "model with unquantised weights; model.quantize packs the frozen ones itself"
        )
    named = getattr(config, "transformers_weights", None)
    if named is not None and named not in _READ:
        raise ModelError(
            f"the config.json of {path} names {named!r} as its weights (transformers_weights), and only "
            f"{' and '.join(_READ)} are read; give a folder as `save_pretrained` writes it"
        )
    if getattr(config, "fusion_config", None):
        raise ModelError(
            f"the config.json of {path} fuses layers (fusion_config), so they would have other parameters; "
            "remove the field"
        )
    code = getattr(config, "auto_map", None)
    if code:
        warn(
            f"the config.json of {path} names code of its own (auto_map), which is not run; the `"
            f"{config.model_type}` of transformers is used"
        )


def say_left_over_adapter(path: str, adapter: str | None = None) -> None:
    """Warn of an adapter in the folder of a whole model. It is not used, since nobody can tell whether the
    weights have it merged into them.

    Args:
        path: a directory, or a hub model.
        adapter: the directory of the adapter that is used; None: none is.
    """
    if adapter is not None and os.path.realpath(seen(adapter)) == os.path.realpath(seen(path)):
        return
    if has_left_over_adapter(path):
        warn(
            f"{path} holds a whole model, and an adapter beside it ({ADAPTER}), which is not used, since it "
            "may be merged into the weights already; move it away, or, if it is to be used, give the folder "
            "as model.adapter too"
        )


def has_left_over_adapter(path: str) -> bool:
    """Return True if a directory, or a hub model in the local cache, has a whole model and an adapter."""
    return _find(path, ADAPTER) is not None and any(_find(path, name) is not None for name in _READ)


def is_adapter_directory(path: str) -> bool:
    """Return True if a directory has an adapter and no weights of a whole model."""
    folder = seen(path)
    return os.path.isfile(folder / ADAPTER) and not any(
        os.path.isfile(folder / name) for name in (*_READ, *_PICKLED)
    )


def say_unused_settings(path: str) -> None:
    """Warn of settings in generation_config.json with which transformers' `generate` would give other greedy
    answers than this engine.

    Raises:
        ModelError: the file cannot be read as JSON.
    """
    file = _find(path, "generation_config.json")
    if file is None:
        return
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        given = {name: found[name] for name in _NEUTRAL if name in found}
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"the generation_config.json of {path} cannot be read ({error}); repair it, or remove it: then "
            "config.json says which ids end a text"
        ) from error
    unused = sorted(name for name, value in given.items() if value not in (None, _NEUTRAL[name]))
    if unused:
        warn(
            f"the generation_config.json of {path} sets {', '.join(unused)}, which transformers' `generate` "
            "would apply, and which is not used here: a response is drawn from the model's own probabilities"
        )


def say_other_template(path: str) -> None:
    """Warn of a chat template in tokenizer_config.json that chat_template.jinja replaces, if they differ."""
    file, config = _find(path, "chat_template.jinja"), _find(path, "tokenizer_config.json")
    if file is None or config is None:
        return
    with suppress(OSError, ValueError, AttributeError):  # a damaged file is reported when it is loaded
        other = parse_json(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(other, str) and other.strip() != file.read_text(encoding="utf-8").strip():
            warn(
                f"{path} has a chat template in chat_template.jinja, which is used, and another one in "
                "tokenizer_config.json, which is not"
            )


def say_unused_tensors(path: str, names: list[str], kind: str) -> None:
    """Warn of tensors in the files that the model does not have.

    Args:
        names: names of these tensors; may be empty.
        kind: the type of the model.
    """
    if names:
        warn(
            f"the weights of {path} have {len(names)} tensors that a `{kind}` of its config.json does not "
            f"have, for example `{sorted(names)[0]}`; they are not used"
        )


def _find(path: str, name: str) -> Path | None:
    """Return a file of a directory, or of a hub model in the local cache; None: it is not there."""
    if os.path.isdir(seen(path)):
        file = seen(path) / name
        return file if os.path.isfile(file) else None  # also where a folder on the way cannot be read
    found: Any = None
    with suppress(ValueError):  # of a path that cannot be a hub model; loading it says so
        found = try_to_load_from_cache(path, name)
    return Path(found) if isinstance(found, str) else None
