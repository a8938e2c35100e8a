"""The models without weights that one command needs (`outline.py`).

Every resolved configuration has them, and a configuration may be refused without a model. So the code that
makes models is imported when the first one is made.
"""

import copy
from typing import TYPE_CHECKING

from oat.config.settings import ModelConfig

if TYPE_CHECKING:
    import torch

    from oat.models.causal_lm import CausalLM


class Outlines:
    """The models without weights that one command needs. Each is made at the first request for it."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, bool], "CausalLM"] = {}

    def on_meta(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: "torch.device | str" = "cpu",
        *,
        field: str = "model.adapter",
        needs_head: bool = True,
    ) -> "CausalLM":
        """Make the model that `load_model` would load, without weights, on the device `meta`; `device` is
        ignored.

        Raises:
            ConfigError, ModelError: an error of `load_model` that is found without reading weights.
        """
        from torch.utils._python_dispatch import _disable_current_modes

        from oat.models.lora import load_model

        with _disable_current_modes():
            return load_model(config, seed, "meta", field=field, needs_head=needs_head, load=self._copied)

    def fake(
        self,
        config: ModelConfig,
        seed: int = 0,
        device: "torch.device | str" = "cpu",
        *,
        field: str = "model.adapter",
        needs_head: bool = True,
    ) -> "CausalLM":
        """Make the model that `load_model` would load, with fake tensors on `device`. The caller must be
        within a `FakeTensorMode`.

        Raises:
            ConfigError, ModelError: an error of `on_meta`.
        """
        import torch

        from oat.models.outline import faked

        lm = self.on_meta(config, seed, field=field, needs_head=needs_head)
        return faked(lm, torch.device(device))

    def _copied(self, path: str, *, dtype: str, device: "torch.device | str", needs_head: bool) -> "CausalLM":
        import torch

        from oat.models.outline import outline

        assert torch.device(device).type == "meta", "an outline has no other device"
        key = (path, dtype, needs_head)
        if key not in self._made:
            self._made[key] = outline(path, dtype, needs_head=needs_head)
        return copy.deepcopy(self._made[key])
