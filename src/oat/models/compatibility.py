"""Checks that our code computes what a model of transformers computes: the model's logits are its head
applied to its last hidden states, and our attention can replace the model's."""

import json

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.modeling_outputs import MoeModelOutputWithPast

from oat.errors import ModelError
from oat.models.attention import NAME, Packed, pack
from oat.models.causal_lm import NO_MASK, CausalLM
from oat.models.outline_errors import reason_of

LIBRARY_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that transformers, or a library that it calls, may raise for a model."""
_HEAD_TOLERANCE = 1e-4
_HALF_TOLERANCE = 5e-2


_takes_layouts: dict[str, bool] = {}
"""Whether models take our attention, by `computation_of`. It is a property of their code, so a process finds
it once."""


def computation_of(lm: CausalLM) -> str:
    """Return a text that is equal for two models that compute alike, but for the values of their weights."""
    config = {name: value for name, value in lm.module.config.to_dict().items() if name != "_name_or_path"}
    classes = {f"{type(part).__module__}.{type(part).__qualname__}" for part in lm.module.modules()}
    dtypes = {str(parameter.dtype) for parameter in lm.module.parameters()}
    found = [config, sorted(classes), sorted(dtypes), str(lm.device), lm.adapter is None, lm.takes_layouts]
    return json.dumps(found, default=str, sort_keys=True)


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """The output of a backbone. The fields of other backbones' outputs are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@torch.no_grad()
def check_head(lm: CausalLM, path: str) -> None:
    """Check that the logits computed by our code equal those of the model's own code, within a tolerance.

    Raises:
        ModelError: the logits differ, the model has no head, or its code fails.
    """
    _check_has_head(lm, path)
    ids = torch.arange(min(8, lm.vocab_rows), device=lm.device)[None]
    try:
        difference = (lm.head(lm.hidden(ids)) - lm.module(input_ids=ids).logits).abs().max().item()
    except LIBRARY_ERRORS as error:
        raise ModelError(
            f"a `{lm.model_type}` cannot be followed ({error}); give a plain causal language model"
        ) from error
    _refuse_other_logits(lm, path, difference)


@torch.no_grad()
def check_outlined_head(lm: CausalLM, path: str) -> None:
    """Check, for a model without weights, that its logits are its head applied to its last hidden states. For
    the check, known hidden states replace the backbone's output, and a small known head replaces the model's
    head. If the model's code fails with these replacements, `check_head` decides when the weights are loaded;
    `lm.unknown` then says so.

    Args:
        lm: an outline on the device `meta`.

    Raises:
        ModelError: the logits differ, or the model has no head.
    """
    _check_has_head(lm, path)
    head = lm.module.get_output_embeddings()
    ids = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    mask = NO_MASK.to(lm.device)  # to make a mask, transformers would read values, which `meta` does not have
    hidden = torch.linspace(-4, 4, 2 * head.in_features).view(1, 2, -1)
    # Without a draw: an outline is kept, so the first run of a process would draw, and the next would not.
    small = torch.nn.utils.skip_init(torch.nn.Linear, head.in_features, 3, bias=False)
    torch.nn.init.ones_(small.weight)

    backbone = lm.module.base_model
    backbone.forward = lambda *args, **kwargs: _Output(last_hidden_state=hidden)
    lm.module.set_output_embeddings(small)
    try:
        logits = lm.module(input_ids=ids, attention_mask=mask, use_cache=False).logits
        difference = (logits - small(hidden)).abs().max().item()
    except LIBRARY_ERRORS as error:
        lm.unknown = reason_of(error)
        return
    finally:
        del backbone.forward
        lm.module.set_output_embeddings(head)
    _refuse_other_logits(lm, path, difference)


def _check_has_head(lm: CausalLM, path: str) -> None:
    if lm.module.get_output_embeddings() is None:
        raise ModelError(
            f"{path} is a `{lm.model_type}` without output embeddings; give a model that generates text"
        )


def _refuse_other_logits(lm: CausalLM, path: str, difference: float) -> None:
    if not difference <= _HEAD_TOLERANCE:
        raise ModelError(
            f"the logits of a `{lm.model_type}` are not its head applied to its last hidden states (they "
            f"differ by {difference:.3g}): it scales or caps them, or its weights are not finite; give "
            f"another model than {path}"
        )


@torch.no_grad()
def give_layouts(lm: CausalLM) -> None:
    """Replace the model's attention by ours if two conditions hold: the model's code accepts our attention,
    and two sequences packed in one row have nearly the hidden states that each has alone. Otherwise the model
    keeps transformers' "sdpa"."""
    computation = computation_of(lm)
    if (found := _takes_layouts.get(computation)) is None:
        found, is_telling = _tried_layouts(lm)
        if is_telling:
            _takes_layouts[computation] = found
    lm.takes_layouts = found
    lm.module.set_attn_implementation(NAME if found else "sdpa")


def _tried_layouts(lm: CausalLM) -> tuple[bool, bool]:
    """Try our attention on a model that has transformers' "sdpa".

    Returns:
        True if the hidden states of packed sequences are those of each alone; and True if they would differ
        if the sequences saw each other. With weights of 0 they would not.
    """
    sequences = [np.arange(count) % lm.vocab_rows for count in (5, 3)]
    ids_1T, positions_1T, spans = pack(sequences, lm.device)
    plain = torch.cat([lm.hidden(torch.from_numpy(ids)[None].to(lm.device))[0] for ids in sequences])
    together = lm.hidden(ids_1T)[0]
    lm.module.set_attn_implementation(NAME)
    tolerance = _HEAD_TOLERANCE if plain.dtype == torch.float32 else _HALF_TOLERANCE
    scale = plain.abs().max().clamp(min=1e-6)
    is_telling = bool((together - plain).abs().max() / scale > 10 * tolerance)
    try:
        packed = lm.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))[0]
        return bool((packed - plain).abs().max() / scale <= tolerance), is_telling
    except (*LIBRARY_ERRORS, ModelError):
        return False, is_telling
