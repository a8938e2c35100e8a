"""The algorithms with the sign of their loss flipped: learning tests must fail with them."""

from dataclasses import replace

from oat.algorithms.base import Outputs, View
from oat.algorithms.direct import DPO
from oat.algorithms.group import GRPO
from oat.types import Loss


class FlippedDPO(DPO):
    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {name: replace(loss, coef=-loss.coef) for name, loss in super().losses(outputs, view).items()}


class FlippedGRPO(GRPO):
    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {name: replace(loss, coef=-loss.coef) for name, loss in super().losses(outputs, view).items()}
