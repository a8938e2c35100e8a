"""The models without weights that one command needs (`outline.py`).

Every resolved configuration has them, and a configuration may be refused without a model. So the code that
makes models is imported when the first one is made.

Commands of one process share the outlines of local directories, since an outline follows from a model's files
alone, and costs a sixth of the processor time of a start. It is made anew when a file of the directory has
changed, and when it came with a warning, which every command gives.
"""

import copy
import os
from typing import TYPE_CHECKING

from oat import errors
from oat.config.settings import ModelConfig
from oat.files import absolute

if TYPE_CHECKING:
    import torch

    from oat.models.causal_lm import CausalLM


Signature = tuple[tuple[str, int, int, int, int], ...]
"""The files of a directory: the name, inode, size and times of each."""
_MOST = 8
"""Largest number of outlines that a process keeps."""
_kept: dict[tuple[str, str, bool], tuple[Signature, "CausalLM"]] = {}


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

        assert torch.device(device).type == "meta", "an outline has no other device"
        key = (path, dtype, needs_head)
        if key not in self._made:
            self._made[key] = _outline(path, dtype, needs_head)
        return copy.deepcopy(self._made[key])


def _outline(path: str, dtype: str, needs_head: bool) -> "CausalLM":
    """Return an outline that this process has kept, or make it."""
    from oat.models.outline import outline

    key = (str(absolute(path).absolute()), dtype, needs_head)
    before = _signature(path)
    signature, kept = _kept.get(key, (None, None))
    if kept is not None and signature == before:
        return kept
    warned = errors.warned()
    lm = outline(path, dtype, needs_head=needs_head)
    _kept.pop(key, None)
    if before is not None and errors.warned() == warned:
        _kept[key] = (before, lm)
        while len(_kept) > _MOST:
            del _kept[next(iter(_kept))]
    return lm


def _signature(path: str) -> Signature | None:
    """Return what changes when a file of a directory is changed; None for a model that is not in one."""
    try:
        with os.scandir(absolute(path)) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return None
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found))
