"""Files that stand beside a model's configuration and weights, and that other programs would read too.

A loader reads config.json, the ids that end a text in generation_config.json, and safetensors files. What
else could change the model is refused, if nobody can tell which model is meant. Otherwise a warning says that
it is not used.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from oat.errors import ModelError, TemplateError, warn
from oat.files import absolute, located, parse_json, start
from oat.lazy import lazily

if TYPE_CHECKING:
    from oat.text import changed_texts, encoding
else:
    changed_texts, encoding = lazily("oat.text.changed_texts"), lazily("oat.text.encoding")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADAPTER = "adapter_config.json"
_READ = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights that are not read."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAIN = "default"
"""The name of the chat template that is used, if a tokenizer has several."""
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
    "stop_strings": None,
}
"""Fields of generation_config.json that change which token is the most probable one, or where a text ends,
and the values with which they change nothing."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of a file that stands for another one in a clone without Git LFS."""


def refuse_config(config: Any, path: str) -> None:
    """Refuse a configuration that makes transformers read other files than these loaders, or make a module
    with other parameters than the configuration's own. Warn of code that is not run.

    Args:
        config: the configuration of the model at `path`.

    Raises:
        ModelError: the weights are quantised, there are no layers, or other files or fused layers are named.
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
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(f"the config.json of {path} says num_hidden_layers: {layers}; give 1 or more")
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
    if adapter is not None and os.path.realpath(absolute(adapter)) == os.path.realpath(absolute(path)):
        return
    if has_left_over_adapter(path):
        warn(
            f"{path} holds a whole model, and an adapter beside it ({ADAPTER}), which is not used, since it "
            "may be merged into the weights already; move it away, or, if it is to be used, give the folder "
            "as model.adapter too"
        )


def pointer_in(path: str) -> str | None:
    """Return the name of a file in a directory that is a pointer of Git LFS in place of the weights, the
    tokenizer or the configuration; None: there is none."""
    folder = absolute(path)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if name.endswith((".safetensors", ".json")):
            with suppress(OSError), open(folder / name, "rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    return name
    return None


def has_left_over_adapter(path: str) -> bool:
    """Return True if a directory, or a hub model in the local cache, has a whole model and an adapter."""
    return _find(path, ADAPTER) is not None and any(_find(path, name) is not None for name in _READ)


def locate(path: str) -> str:
    """Return the name by which a model is opened: a directory, or a hub id.

    Raises:
        ModelError: the path is neither, or the directory has something that is no file.
    """
    where = located(path)
    if os.path.isdir(where):
        _refuse_pipes(where)
        return where
    if not os.path.exists(where) and _HUB_ID.fullmatch(path):
        return where
    if os.path.exists(where):
        raise ModelError(f"{path} is a file; give the directory that holds the model's config.json")
    raise ModelError(
        f"{nowhere(path)}, and it is no hub id; give a local directory, or a hub id as `org/name`"
    )


def _refuse_pipes(folder: str) -> None:
    """Refuse a folder with a pipe, a socket or a device, of which a read might never end."""
    with suppress(OSError):  # who opens its files says so
        for file in Path(folder).iterdir():
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise ModelError(f"{file} is a pipe, a socket or a device; put the file in its place")


def nowhere(path: str) -> str:
    """Say that there is no directory of this name."""
    return f"there is no directory {path}" + (
        "" if os.path.isabs(path) else f" in {start()}, from where relative paths are taken"
    )


def is_adapter_directory(path: str) -> bool:
    """Return True if a directory has an adapter and no weights of a whole model."""
    folder = absolute(path)
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
            "would apply, and which is not used here: a response is drawn from the model's own probabilities "
            "(sampling.stop has the strings that end it)"
        )


def refuse_named_files(path: str, name: str, field: str, own: str) -> None:
    """Refuse a file of JSON whose field makes transformers read another file than these loaders' own.

    Args:
        path: a directory, or a hub model in the local cache.
        name: the file.
        field: its field, a list of names of files, of which transformers takes one by its version.
        own: the name of the file that is read without the field.

    Raises:
        ModelError: the field names another file.
    """
    named = _field(path, name, field) or []
    others = [each for each in named if each != own] if isinstance(named, list) else [named]
    if others:
        raise ModelError(
            f"the {name} of {path} names {others[0]!r} ({field}), which transformers may read in place of "
            f"{own}; save the model with `save_pretrained`, or remove the field"
        )


def say_other_templates(path: str, tokenizer: Any) -> None:
    """Warn of chat templates that are not used, beside the one that is: templates with names of their own,
    and those of other files.

    Args:
        path: the directory or hub model from which the tokenizer was loaded.
    """
    given = tokenizer.chat_template
    by_name = dict(given) if isinstance(given, Mapping) else {_MAIN: given}
    used = by_name.pop(_MAIN, None)
    if not isinstance(used, str):  # whoever wants one is told
        return
    others = [f"`{name}`" for name in by_name]
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _field(path, name, "chat_template")
        named = found if isinstance(found, list) else [{"name": _MAIN, "template": found}]
        for each in named:
            text, called = (each.get("template"), each.get("name")) if isinstance(each, dict) else (None, "")
            if isinstance(text, str) and text.strip() not in (used.strip(), _text(by_name.get(called))):
                others.append(f"one in {name}" if called == _MAIN else f"`{called}` in {name}")
    if others:
        place = "chat_template.jinja" if _find(path, "chat_template.jinja") else "tokenizer_config.json"
        warn(
            f"{path} has a chat template in {place}, which is used, and others, which are not: "
            f"{', '.join(others)}; to use one of those, write it to a .jinja file, and set render.template "
            "to that file"
        )


def say_other_ends(path: str, tokenizer: Any) -> None:
    """Warn of a special_tokens_map.json that gives a tokenizer another begin-of-text or end-of-text than the
    files beside it. Transformers takes that of special_tokens_map.json, which may be left over.

    Args:
        path: the directory or hub model from which the tokenizer was loaded.
    """
    wrong = []
    for name in ("bos_token", "eos_token"):
        used, file = getattr(tokenizer, name), _TOKENIZER_CONFIG
        other = _content(_field(path, file, name))
        ends = [id for id in ends_of(path) if 0 <= id < len(tokenizer)]
        if other is None and name == "eos_token" and ends and tokenizer.eos_token_id not in ends:
            other, file = tokenizer.convert_ids_to_tokens(ends[0]), "config.json or generation_config.json"
        if other not in (None, used) and _content(_field(path, "special_tokens_map.json", name)) == used:
            wrong.append(f"{used!r} as the {name}, and {file} gives {other!r}")
    if wrong:
        warn(
            f"the special_tokens_map.json of {path} gives {'; and '.join(wrong)}; the former is used; remove "
            "what is wrong"
        )


def ends_of(path: str) -> list[int]:
    """Return the ids that end a text by the generation_config.json of a model, or else by its config.json."""
    for file in ("generation_config.json", "config.json"):
        found = _field(path, file, "eos_token_id")
        if found is not None:
            return [id for id in (found if isinstance(found, list) else [found]) if isinstance(id, int)]
    return []


def _content(token: Any) -> Any:
    """Return the text of a token in a file of a tokenizer, which may be a dict."""
    return token.get("content") if isinstance(token, dict) else token


def without_dropout(path: str, tokenizer: Any) -> None:
    """Switch off the dropout of a tokenizer's merges (BPE-dropout, arXiv:1910.13267), which is left over from
    its training. With it, a text has other ids at each call. Warn if there was one."""
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if getattr(model, "dropout", None):
        warn(
            f"the tokenizer.json of {path} encodes texts at random (dropout {model.dropout:g}); this is "
            "switched off, so that a text has the same ids each time"
        )
        model.dropout = None


def has_dropout(path: str) -> bool:
    """Return True if `without_dropout` switches off something in a directory or hub model."""
    model = _field(path, "tokenizer.json", "model")
    return isinstance(model, dict) and bool(model.get("dropout"))


def other_ids(tokenizer: Any) -> list[tuple[str, list[int], list[int]]]:
    """Return the sample texts that a tokenizer encodes to other ids than the tokenizer.json from which it was
    loaded: the text, the ids, and those of the file. Some classes of transformers that tokenizer_config.json
    may name read only the vocabulary of that file."""
    file = _find(tokenizer.name_or_path, "tokenizer.json")
    if file is None:
        return []
    own, encoder = Tokenizer.from_file(str(file)), encoding.Encoder(tokenizer)
    own.no_truncation()
    own.no_padding()
    if getattr(own.model, "dropout", None):
        own.model.dropout = None
    found = []
    for text in (*changed_texts.PROBES, "12345 + 7?"):
        with suppress(TemplateError):  # who changes texts is named elsewhere
            ids = encoder.ids(text, adds=False, splits=False)[0]
            theirs = own.encode(text, add_special_tokens=False).ids
            found += [(text, ids, theirs)] if ids != theirs else []
    return found


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _field(path: str, name: str, field: str) -> Any:
    """Return a field of a file of JSON; None: there is none, or the file is damaged (its loader says so)."""
    file = _find(path, name)
    with suppress(OSError, ValueError, AttributeError):
        return file and parse_json(file.read_text(encoding="utf-8")).get(field)
    return None


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
    if os.path.isdir(absolute(path)):
        file = absolute(path) / name
        return file if os.path.isfile(file) else None  # also where a folder on the way cannot be read
    from huggingface_hub import try_to_load_from_cache  # here, since it imports an HTTP client

    found: Any = None
    with suppress(ValueError):  # of a path that cannot be a hub model; loading it says so
        found = try_to_load_from_cache(path, name)
    return Path(found) if isinstance(found, str) else None
