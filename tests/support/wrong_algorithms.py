"""Algorithms that break the protocol of `Objective`, each in one way."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oat.algorithms.base import Outputs, View
from oat.algorithms.direct import DPO
from oat.algorithms.group import GRPO, GRPOConfig
from oat.types import Batch, Loss, Plan, Requires


class Broken(GRPO):
    """GRPO; subclasses add a fault."""

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Any:
        return self.spoilt(super().prepare(feedback, forward, generator))

    def spoilt(self, batch: Batch) -> Any:
        return batch


class ShortColumn(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, columns={**batch.columns, "advantages_N": batch.columns["advantages_N"][1:]})


class WithoutAxis(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, columns={**batch.columns, "extra": torch.zeros(batch.size)})


class ListColumn(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, columns={**batch.columns, "extra_N": [0.0] * batch.size})


class LearnedColumn(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(
            batch, columns={**batch.columns, "extra_N": torch.zeros(batch.size, requires_grad=True)}
        )


class HalfUsable(GRPO):
    def is_usable(self, item: Any) -> Any:
        return float(super().is_usable(item))


class UsedUp(GRPO):
    """An algorithm that changes the items that it judges."""

    def is_usable(self, item: Any) -> bool:
        item.group.trajectories[0].segments[-1].ids[:] = 0
        return True


class Saturated(GRPO):
    """An algorithm that needs less once it has learned."""

    learned = False

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Batch:
        self.learned = True
        return super().prepare(feedback, forward, generator)

    def is_usable(self, item: Any) -> bool:
        return self.learned


class HalfEnded(GRPO):
    def ends_passes(self, values: Any) -> Any:
        return float(values["loss/total"] > 1e6)


class Impatient(GRPO):
    """An algorithm that ends every second update."""

    calls = 0

    def ends_passes(self, values: Any) -> bool:
        self.calls += 1
        return self.calls % 2 == 0


class Patient(GRPO):
    """An algorithm that ends updates only until it has learned."""

    learned = False

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Batch:
        self.learned = True
        return super().prepare(feedback, forward, generator)

    def ends_passes(self, values: Any) -> bool:
        return not self.learned


class Reliant(GRPO):
    """An algorithm that reads a metric which may be absent."""

    def ends_passes(self, values: Any) -> bool:
        return bool(values["policy/entropy"] > 1e6)


class EndedAtOnce(GRPO):
    def ends_passes(self, values: Any) -> bool:
        return True


class Renaming(GRPO):
    def ends_passes(self, values: Any) -> bool:
        values["user/mine"] = 0.0
        return False


class LeftOut(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, unit_of_N=2 * batch.unit_of_N)


class MissingRows(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, rows=batch.rows[1:])


class NoBatch(Broken):
    def spoilt(self, batch: Batch) -> Any:
        return batch if batch.size else None


class Shuffling(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, columns={**batch.columns, "advantages_N": torch.randn(batch.size)})


class Secretive(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return replace(batch, metrics={**batch.metrics, "reward/secret": 1.0})


class Unlearnt(Broken):
    def spoilt(self, batch: Batch) -> Batch:
        return Batch((), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class Sworn(DPO):
    learns = False


class InFeedback(Broken):
    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Any:
        for item in feedback.items:
            for trajectory in item.group.trajectories:
                trajectory.segments[1].sampled_logps[:] = 0.0
        return super().prepare(feedback, forward, generator)


class Hopeful(Broken):
    """Fails if no question was answered."""

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Any:
        best = max(
            value
            for item in feedback.items
            for value, mark in zip(item.answer.values, item.answer.marks, strict=True)
            if mark == "ok"
        )
        assert np.isfinite(best)
        return super().prepare(feedback, forward, generator)


class BrokenLoss(GRPO):
    def losses(self, outputs: Outputs, view: View) -> Any:
        return {
            name: replace(loss, terms=self.terms(loss.terms, outputs, view))
            for name, loss in super().losses(outputs, view).items()
        }

    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K


class ReducedAlready(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K.mean()


class OfRows(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return view.row_sum(terms_K)


class Detached(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K.detach()


class Flat(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K * 0.0


class Centred(BrokenLoss):
    """Each term depends on all other terms of the forward pass."""

    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K * (1.0 + outputs["policy"]["sampled"].mean())


class Whitened(GRPO):
    """Normalises over the rows of a forward pass, instead of in `prepare`."""

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        advantages_N = view["advantages_N"] / (view["advantages_N"].abs().mean() + 1e-6)
        return {"loss/policy": Loss(-advantages_N[view.row_of_K] * outputs["policy"]["sampled"], per="token")}


class NotFinite(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        return terms_K + torch.log(view["advantages_N"][view.row_of_K])


class InColumns(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        view["advantages_N"].mul_(2.0)
        return terms_K


class InOutputs(BrokenLoss):
    def terms(self, terms_K: torch.Tensor, outputs: Outputs, view: View) -> torch.Tensor:
        outputs["policy"]["entropy"].add_(1.0)
        return terms_K


class WrongAxis(GRPO):
    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {"loss/policy": Loss(view["advantages_N"] * outputs["policy"]["sampled"], per="token")}


class PerSample(GRPO):
    def losses(self, outputs: Outputs, view: View) -> Any:
        return {"loss/policy": Loss(outputs["policy"]["sampled"], per="sample")}


class WithoutConstant(GRPO):
    def losses(self, outputs: Outputs, view: View) -> Any:
        return {"loss/policy": Loss(outputs["policy"]["sampled"], per="constant")}


class Scalar(GRPO):
    def losses(self, outputs: Outputs, view: View) -> Any:
        return outputs["policy"]["sampled"].mean()


class Unnamed(GRPO):
    def losses(self, outputs: Outputs, view: View) -> Any:
        return {"loss/mine": Loss(outputs["policy"]["sampled"], per="token")}


class WantsMore(GRPO):
    wants = {"policy": {"value"}}  # noqa: RUF012

    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.wants = WantsMore.wants


class LongMetric(GRPO):
    def metrics(self, outputs: Outputs, view: View) -> Any:
        return {"user/ratio": (outputs["policy"]["sampled"], "N")}


class OddMetric(GRPO):
    def metrics(self, outputs: Outputs, view: View) -> Any:
        return {"user/ratio": (outputs["policy"]["sampled"], "mean")}


class OtherPlans(GRPO):
    calls = 0

    def plan(self, step: int) -> Plan:
        OtherPlans.calls += 1
        return replace(super().plan(step), prompts=OtherPlans.calls)


class OtherSlot(GRPO):
    def plan(self, step: int) -> Plan:
        return replace(super().plan(step), samples={"reference": 4})


class Lonely(DPO):
    def plan(self, step: int) -> Plan:
        return replace(super().plan(step), samples={"sampler": 1})


class Untrained(GRPO):
    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.requires = Requires("score", models=frozenset({"reference"}))


class Judged(GRPO):
    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.requires = Requires("score", models=frozenset({"policy", "judge"}))


class Scaled(GRPO):
    """Keeps the largest reward. Subclasses omit it when they save or load."""

    def __init__(self, config: GRPOConfig):
        super().__init__(config)
        self.largest = 1e-3

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Batch:
        self.largest = max(
            self.largest, *(abs(value) for item in feedback.items for value in item.answer.values)
        )
        batch = super().prepare(feedback, forward, generator)
        return (
            replace(batch, columns={name: values / self.largest for name, values in batch.columns.items()})
            if batch.size
            else batch
        )


class Saved(Scaled):
    @property
    def state(self) -> dict[str, Any]:
        return {"largest": self.largest}


class Loaded(Saved):
    def load_state(self, state: dict[str, Any]) -> None:
        self.largest = state["largest"]


class Left(GRPO):
    """The loss reads an attribute that `prepare` sets."""

    def prepare(self, feedback: Any, forward: Any, generator: np.random.Generator) -> Batch:
        self.largest = max(abs(value) for item in feedback.items for value in item.answer.values)
        return super().prepare(feedback, forward, generator)

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        losses = super().losses(outputs, view)
        return {name: replace(loss, coef=1 / self.largest) for name, loss in losses.items()}


class LeftBehind(Left):
    """The attribute that the loss reads also has a value before the first `prepare`."""

    largest = 1.0


class LeftInMetrics(Loaded):
    def metrics(self, outputs: Outputs, view: View) -> Any:
        return {"user/largest": (torch.full((view.num_rows,), self.largest), "N")}


class NoJSON(Loaded):
    @property
    def state(self) -> dict[str, Any]:
        return {"largest": self.largest, "seen": {1, 2}}
