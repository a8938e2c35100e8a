"""Models without weights (outlines), made from their configuration: every tensor has a shape and no memory.

For each path and precision, `Outlines` (`outlines.py`) makes one module on torch's device `meta`, and returns
copies of it. There are two kinds of copies, both without values:

* On `meta`: the tensors have only shapes.
* Fake: the tensors also state the device that the model would be on. Within a `FakeTensorMode`, a run can be
  built with fake copies, to count its memory.
"""

import copy
import importlib.util
import os
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from oat.errors import ModelError
from oat.files import absolute, located
from oat.models.attention import NAME
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import LIBRARY_ERRORS, check_outlined_head
from oat.models.linear import use_fast_matmul
from oat.models.loading import DTYPES, causal_config, module_from_files, refusing
from oat.models.outline_errors import reason_of
from oat.models.weight_files import described


def outline(path: str, dtype: str, *, needs_head: bool) -> CausalLM:
    """Make the model of a local directory or of the hub on the device `meta`.

    Names and shapes of the tensors in local files are compared with the model's, if Accelerate is installed:
    transformers needs it for the comparison. Weights on the hub are not fetched. If the model's class
    supports transformers' "sdpa" attention, the outline computes with our attention (`models/attention.py`).
    A loaded model must also pass the test of `give_layouts`; an outline is not tested.
    """
    config, attention = causal_config(path, dtype)
    with refusing("model", path):
        held = described(path) if os.path.isdir(absolute(path)) else None
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": attention}
        module, failed = None, ""
        if held is not None and importlib.util.find_spec("accelerate"):
            of_files = {**options, "device_map": "meta", "state_dict": held}
            try:
                module = module_from_files(None, path, config, needs_head=needs_head, **of_files)
            except ModelError:
                raise
            except LIBRARY_ERRORS as error:  # the weights may need values when they are put together
                failed = reason_of(error)
        if module is None:
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        with suppress(OSError):  # without the file, the model's own configuration applies
            module.generation_config = GenerationConfig.from_pretrained(located(path))
        lm = CausalLM(module.eval(), takes_layouts=attention == "sdpa")
        check_outlined_head(lm, path)
        lm.unknown = lm.unknown or failed
        lm.is_in_files = held is not None and {each.dtype for each in held.values()} == {DTYPES[dtype]}
        if lm.takes_layouts:
            with suppress(*LIBRARY_ERRORS):  # then a loaded model keeps its own attention too
                module.set_attn_implementation(NAME)
        use_fast_matmul(module)
    return lm


def faked(lm: CausalLM, device: torch.device) -> CausalLM:
    """Return a copy of a model with fake tensors on `device` in place of its own. A tensor that modules share
    is shared in the copy too."""
    made: dict[int, Any] = {}
    for module in lm.module.modules():
        own = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *own):
            if tensor is not None and id(tensor) not in made:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                made[id(tensor)] = (
                    torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, torch.nn.Parameter)
                    else fake
                )
    return copy.deepcopy(lm, made)
