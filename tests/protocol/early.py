"""A loss of pairs, as a user would write it, that ends an update once its mini-batches are learned well."""

from collections.abc import Mapping
from dataclasses import dataclass

from oat.algorithms.direct import DPO, DPOConfig


@dataclass(frozen=True)
class EnoughConfig(DPOConfig):
    enough: float = 0.6
    """An update ends before the optimiser step whose mini-batch has a smaller loss."""


class Enough(DPO):
    name = "enough"
    Config = EnoughConfig
    config: EnoughConfig

    def ends_passes(self, values: Mapping[str, float]) -> bool:
        return values["loss/total"] < self.config.enough
