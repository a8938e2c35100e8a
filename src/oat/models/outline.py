"""Models without weights: made of their configuration alone, every tensor has a shape and no memory.

`Outlines` makes one module for each path and precision that a command names, on torch's device `meta`, and
hands out copies of it. A copy on `meta` has the shapes of the model. A copy of fake tensors also knows the
device that the model would be on, so within a `FakeTensorMode` a run can be made with it, and its memory
counted; nothing can be learned of values.
"""

import copy
import importlib.util
import os
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, GenerationConfig

from oat.config.settings import ModelConfig
from oat.files import located, seen
from oat.models.attention import NAME
from oat.models.causal_lm import CausalLM
from oat.models.compatibility import check_outlined_head
from oat.models.linear import use_fast_matmul
from oat.models.loading import DTYPES, causal_config, module_from_files, refusing
from oat.models.lora import load_model
from oat.models.weight_files import described


class Outlines:
    """The models without weights of one command; each is made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], CausalLM] = {}

    def on_meta(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        field: str = "model.adapter",
    ) -> CausalLM:
        """The model that `load_model` loads, on the device `meta` instead of the given one.

        Raises:
            ConfigError, ModelError: as `load_model`, of all that is seen without weights.
        """
        with _disable_current_modes():
            return load_model(config, seed, "meta", field=field, load=self._copied)

    def fake(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        field: str = "model.adapter",
    ) -> CausalLM:
        """The model that `load_model` loads, of fake tensors on the given device; within a `FakeTensorMode`.

        Raises:
            ConfigError, ModelError: as `on_meta`.
        """
        return _faked(self.on_meta(config, seed, field=field), torch.device(device))

    def _copied(self, path: str, *, dtype: str, device: torch.device | str) -> CausalLM:
        assert torch.device(device).type == "meta", "an outline has no other device"
        if (path, dtype) not in self._made:
            self._made[path, dtype] = _outline(path, dtype)
        return copy.deepcopy(self._made[path, dtype])


def _outline(path: str, dtype: str) -> CausalLM:
    """The model of a directory, or of the hub, on the device `meta`.

    The names and shapes of tensors in files that lie here are held against it where Accelerate is installed,
    which transformers needs for that; nothing is fetched. That the model's code lets our attention in is
    believed.
    """
    config, attention = causal_config(path, dtype)
    with refusing("model", path):
        held = described(path) if os.path.isdir(seen(path)) else None
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": attention}
        if held is not None and importlib.util.find_spec("accelerate"):
            module = module_from_files(None, path, config, device_map="meta", state_dict=held, **options)
        else:
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        with suppress(OSError):  # without the file it is what the model's own configuration says
            module.generation_config = GenerationConfig.from_pretrained(located(path))
        lm = CausalLM(module.eval(), takes_layouts=attention == "sdpa")
        check_outlined_head(lm, path)
        if lm.takes_layouts:
            module.set_attn_implementation(NAME)
        use_fast_matmul(module)
    return lm


def _faked(lm: CausalLM, device: torch.device) -> CausalLM:
    """The same model of fake tensors; tensors that modules have in common stay one."""
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
