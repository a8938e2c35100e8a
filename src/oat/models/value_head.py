"""The head of a value model, read from a checkpoint: one row of weights that turns a hidden state into a
number. It is the `score` of transformers' sequence classifiers, or a tensor of another name.

A head is a matrix beside the backbone and the output embeddings. If there are several, `value_head_prefix` in
the checkpoint's config.json names the head's module; without it the module is `score`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import unset_fake_temporarily

from oat.errors import ModelError, warn
from oat.models.causal_lm import CausalLM
from oat.models.weight_files import cached_files, tensors_of

_DEFAULT = "score"


def read_value_head(path: str, lm: CausalLM) -> torch.Tensor | None:
    """Return the weight of the head in a model's files, (1, D) in float32. Return None if the files have no
    head, as those of a language model, or if `lm` has no weights.

    Args:
        path: a directory, or a hub model that was loaded before.
        lm: the backbone that was loaded from `path`. It may have an adapter, and its head may be dropped.

    Raises:
        ModelError: see `check_value_head`.
    """
    return check_value_head(path, lm) if lm.has_weights else None


def check_value_head(path: str, lm: CausalLM) -> torch.Tensor | None:
    """Return the weight of the head in a model's files as `read_value_head` does, also for a backbone without
    weights.

    Raises:
        ModelError: the head has several labels, another width than the backbone, a bias, or numbers that are
            not finite; config.json names a head that is not there; it cannot be told which of several
            matrices it is; or a sequence-classification model has none.
    """
    held = tensors_of(cached_files(path))
    embeddings = lm.module.get_output_embeddings()
    shape_of_embeddings = (lm.vocab_rows, embeddings.in_features)
    known = {name.replace(".base_layer.", ".") for name in lm.module.state_dict()}
    inner = f"{lm.module.base_model_prefix}."
    heads = {
        name.removesuffix(".weight"): shape
        for name, (_, shape) in held.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and not {name, inner + name} & known
        and shape != shape_of_embeddings
    }
    config = lm.module.config
    if not heads:
        kinds = [kind for kind in config.architectures or () if kind.endswith("ForSequenceClassification")]
        if held and kinds:
            raise ModelError(
                f"its config.json says {kinds[0]}, and its files have no head; give the whole checkpoint"
            )
        return None
    named = getattr(config, "value_head_prefix", None)
    if named and named not in heads:
        raise ModelError(
            f"its config.json names the head `{named}` (value_head_prefix), and its files have "
            f"{', '.join(sorted(heads))}; name one of these"
        )
    name = named or (_DEFAULT if _DEFAULT in heads else next(iter(heads)) if len(heads) == 1 else None)
    if name is None:
        raise ModelError(
            f"its files have {len(heads)} heads ({', '.join(sorted(heads))}); name the one that gives the "
            "value as `value_head_prefix` in its config.json"
        )
    if len(heads) > 1:
        others = ", ".join(sorted(heads.keys() - {name}))
        warn(f"{path} has several heads: `{name}` gives the value, and {others} is not used")
    labels, width = heads[name]
    if labels != 1:
        raise ModelError(
            f"its head `{name}` has {labels} labels, and a critic gives one value; give a checkpoint with "
            "one label"
        )
    if width != embeddings.in_features:
        raise ModelError(
            f"its head `{name}` reads {width} numbers, and its hidden states have "
            f"{embeddings.in_features}; give the files that belong together"
        )
    return _weight(held, name)


def _weight(held: Mapping[str, tuple[Path, tuple[int, ...]]], name: str) -> torch.Tensor:
    """Return the weight of the head of this name, and refuse its values."""
    # a run is checked where new tensors have no memory; these have values
    with unset_fake_temporarily(), torch.device("cpu"):
        weight, bias = _read(held, f"{name}.weight"), _read(held, f"{name}.bias")
        assert weight is not None, "its shape is known"
        has_bias, is_finite = bias is not None and bool(bias.any()), bool(weight.isfinite().all())
    if has_bias:
        raise ModelError(
            f"its head `{name}` has a bias, and the heads of oat and of transformers' sequence classifiers "
            "have none; give another checkpoint"
        )
    if not is_finite:
        raise ModelError(f"its head `{name}` has numbers that are not finite; give another checkpoint")
    return weight


def _read(held: Mapping[str, tuple[Path, tuple[int, ...]]], name: str) -> torch.Tensor | None:
    if name not in held:
        return None
    with safe_open(held[name][0], "pt") as file:
        return file.get_tensor(name).float()
