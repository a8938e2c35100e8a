"""The work of the engine `torch` that takes most memory beside its cache, for a model without weights."""

import numpy as np
import torch
from torch import Tensor

from oat.engines.shapes import filled_up, passes
from oat.functional.logprobs import token_logps
from oat.functional.sampling import inverse_cdf
from oat.models.causal_lm import CausalLM
from oat.types import Sampling


def imitate_step(lm: CausalLM, rows: int, prompts: int, length: int, sampling: Sampling) -> None:
    """Do a pass over prompts, and the draw of one token for each row.

    Args:
        rows: number of rows that are decoded at once.
        prompts: number of prompts of these rows.
        length: number of tokens of each prompt.
    """
    some = next(iter(passes(np.full(prompts, length))))
    with torch.no_grad():
        lm.hidden_of([np.zeros(length, dtype=np.int32)] * len(some))
        width = lm.module.get_output_embeddings().in_features
        dtype = next(lm.module.parameters()).dtype
        hidden = torch.zeros(filled_up(rows), width, device=lm.device, dtype=dtype)
        _draw(lm.head(hidden)[:rows].float(), sampling)


def _draw(logits_RV: Tensor, sampling: Sampling) -> None:
    """Use as much memory as the engine when it draws tokens. These logits have no values, so they cannot be
    truncated (top-k, top-p, min-p). Tensors of the sizes that truncation makes are made instead."""
    drawable_RV = logits_RV / 2 if sampling.changes_logits else logits_RV
    if sampling.truncates:
        some_RV = drawable_RV.clone()
        if sampling.top_p < 1 and sampling.top_k == 0:
            ranked = some_RV.sort(dim=-1, descending=True, stable=True)
            held = [
                ranked,
                exact_RV := ranked.values.double(),
                mass_RV := exact_RV.exp(),
                mass_RV.cumsum(-1),
                mass_RV - exact_RV,
            ]
            del ranked, exact_RV, mass_RV, held
        drawable_RV = torch.full_like(some_RV, 0).scatter(
            1, logits_RV.new_zeros(len(logits_RV), 1, dtype=torch.long), 0
        )
    token_logps(logits_RV, inverse_cdf(drawable_RV, logits_RV.new_zeros(len(logits_RV), dtype=torch.float64)))
