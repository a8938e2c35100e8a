"""An engine whose weights cannot be read back, as a user would add one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from oat.engines.base import Engine
from oat.engines.embedded import Embedded, TorchMemory
from oat.engines.kind import Traits
from oat.engines.torch import TorchEngine
from oat.engines.torch_config import TorchEngineConfig
from oat.models.sources import ModelSource, lms_of


class Unreadable(TorchEngine):
    def tensors(self, slot: str) -> dict[str, Tensor]:
        raise AssertionError("weights that cannot be read are read")


@dataclass(frozen=True)
class Options:
    """This engine has no settings, and so no `threads`."""


class Memory(TorchMemory):
    cache_setting = "engine.name"


class Kind:
    Config = Options
    forks = ()
    engine: type[TorchEngine] = Unreadable

    @staticmethod
    def checks(config: Options, run: Any) -> list[Any]:
        return []

    @staticmethod
    def traits(config: Options) -> Traits:
        found = Embedded.traits(TorchEngineConfig())
        can = replace(found.capabilities, readable_weights=False, shares_weights=False)
        return replace(found, capabilities=can, threads=None, memory=Memory(TorchEngineConfig()))

    @classmethod
    def make(
        cls, config: Options, sources: Mapping[str, ModelSource], *, stop_ids: Collection[int], **others: Any
    ) -> Engine:
        return cls.engine(lms_of(sources), stop_ids=stop_ids, **others)
