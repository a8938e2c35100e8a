"""The learner: models, optimisers, and the update.

One update makes `Batch.epochs` passes over an objective's batch. A pass is cut into mini-batches, and each
mini-batch is one optimiser step:

1. The gradients of the mini-batch's micro-batches are accumulated. The denominators of the losses are
   computed beforehand, from the complete mini-batch (`reduction.py`).
2. The gradient of each model is clipped.
3. If all numbers are finite, and the objective does not end the update here (`Objective.ends_passes`), the
   optimisers change the weights.

Nonfinite numbers: NaN and infinity are found before the optimiser changes a weight. The batch that caused
them can be written to a file.

The columns of the batch, the outputs of the models, the parts of the loss and the norms of the gradients are
checked. A check of the loss alone would not be enough: the clamp of a ratio, or a saturated sigmoid, turns an
infinite log-probability into a harmless number. Values that a mask excludes are not checked. If such a value
makes a gradient nonfinite, the check of the norms finds it.

The learner counts the optimiser steps that it leaves out. The count is part of a checkpoint.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oat import wire
from oat.algorithms.base import Objective, Outputs, View, ends_update
from oat.errors import CheckpointError, ContractError, NonFiniteError, warn
from oat.hardware.roofline import Stopwatch
from oat.learner.batching import columns_on, fault_of, micro_batches, plan_of, select_rows, view_of
from oat.learner.models import Model, device_of, refuse_other_frozen, refuse_other_tensors
from oat.learner.moving_reference import Following
from oat.learner.optimiser import (
    MOMENTS,
    OptimiserSettings,
    build_optimiser,
    clip_gradient,
    refuse_other_moments,
)
from oat.learner.ranks import ALONE, Ranks
from oat.learner.reduction import Reduction
from oat.learner.shards import whole
from oat.models.causal_lm import checkpointing
from oat.models.frozen import frozen_checksum
from oat.seeds import Seeds
from oat.types import ENSEMBLE, Batch, Trajectory


def nonfinite_inputs(outputs: Outputs, view: View) -> list[str]:
    """Find the columns of the batch, and the outputs of the models, that have a nonfinite value. Values that
    a mask excludes are ignored.

    Returns:
        A phrase for each, for example "old_logps_K = nan at 1 of 17 places".
    """
    counted = {
        axis: view.columns[name] > 0
        for axis, name in (("K", "mask_K"), ("U", "mask_U"))
        if name in view.columns
    }
    found = []
    for name, values in view.columns.items():
        if name[-1] in counted and not name.startswith("mask_"):
            values = values[counted[name[-1]]]
        found += _nonfinite(name, values)
    for model, given in outputs.items():
        for name, values in given.items():
            if "K" in counted and values.shape == counted["K"].shape:
                values = values[counted["K"]]
            found += _nonfinite(f"{name} of the {model}", values.detach())
    return found


def nonfinite_results(values: Mapping[str, float], norms: Mapping[str, float]) -> list[str]:
    """Return a phrase for each part of the loss, and for each model's gradient norm, that is not finite.

    Args:
        values: metrics of the optimiser step; only those under `loss/` are checked.
        norms: norm of the gradient, by model.
    """
    numbers = {name: value for name, value in values.items() if name.startswith("loss/")}
    numbers |= {f"the gradient norm of the {model}": norm for model, norm in norms.items()}
    return [f"{name} = {value}" for name, value in numbers.items() if not math.isfinite(value)]


def keep_batch(folder: Path, update: int, batch: Batch) -> Path:
    """Write the batch of an optimiser step to a file, and return the file's path. `oat.wire.decode` reads the
    file's bytes."""
    folder.mkdir(exist_ok=True)
    file = folder / f"update_{update:08d}.batch"
    file.write_bytes(wire.encode(batch))
    return file


def _nonfinite(name: str, values: torch.Tensor) -> list[str]:
    bad = values[~torch.isfinite(values)]
    return [f"{name} = {float(bad[0])} at {len(bad)} of {values.numel()} places"] if len(bad) else []


_OF_THE_FIRST = ("logps/recorded_gap", "logps/recorded_gap_max")
"""Metrics that compare the policy before the update with the sampler. Only the first optimiser step of an
update computes with these weights."""

_FILES_OF = {
    "policy": ("model.path",),
    "reference": ("model.path", "model.reference"),
    "critic": ("model.path", "model.critic"),
    "reward": ("model.path",),
    ENSEMBLE: ("explorer.ensemble.start",),
}
"""For each model, the settings that name the files of its frozen weights."""


@dataclass(frozen=True)
class Trained:
    """A model with its optimiser."""

    model: Model
    optimiser: torch.optim.Adam
    settings: OptimiserSettings


class Learner:
    """The owner of the models and their optimisers.

    Args:
        models: the models of the run, by name: "policy", "reference", "critic", "reward", "ensemble".
        optimisers: settings of optimisers, by the model that is trained; the other models are frozen.
        micro_batch_size: largest number of rows in one forward pass; a single unit may have more. None: no
            limit.
        micro_batch_tokens: largest number of tokens in one forward pass; a single unit may have more. A
            prompt that rows share counts for each of them. None: no limit.
        gradient_checkpointing: True: trained models compute each layer again in the backward pass.
        max_updates: largest number of optimiser steps in an update that trains the policy or the reward
            model; None: no limit.
        critic_only_steps: number of the first updates in which only the critic learns, of an objective that
            trains a critic. The other models compute without gradient, and keep their weights and moments.
        max_skips: largest number of consecutive optimiser steps that are left out because a number is not
            finite. The next such step ends the run.
        following: the rule by which the reference follows the policy; None: the reference is frozen.
        keep: folder to which the batch that stops the run is written; None: it is not written.
        ranks: the processes that learn together.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        optimisers: Mapping[str, OptimiserSettings],
        *,
        micro_batch_size: int | None,
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: bool = False,
        max_updates: int | None = None,
        critic_only_steps: int = 0,
        max_skips: int = 0,
        following: Following | None = None,
        keep: Path | None = None,
        seeds: Seeds,
        ranks: Ranks = ALONE,
    ):
        self.models, self.seeds, self.ranks = dict(models), seeds, ranks
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.max_updates = max_updates
        self.critic_only_steps = critic_only_steps
        self.max_skips = max_skips
        self.following = following
        self.keep = keep
        self.stopwatch = Stopwatch(
            [model.work_counter for model in self.models.values() if model.work_counter is not None]
        )
        self.updates = 0
        self.steps = dict.fromkeys(optimisers, 0)
        self.left_out = dict.fromkeys(optimisers, 0)
        self.critic_updates = 0
        self.skipped = self.skipped_in_row = 0
        self.trained: dict[str, Trained] = {}
        for model in self.models.values():
            model.module.requires_grad_(False)
        for name, settings in optimisers.items():
            parameters = self.models[name].trainable().values()
            for parameter in parameters:
                parameter.requires_grad_(True)
            self.trained[name] = Trained(self.models[name], build_optimiser(parameters, settings), settings)
        if following is not None:
            following.check(self.models["policy"], self.models["reference"])

    @torch.no_grad()
    def forward(self, model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        """Return the wanted outputs of a model for rows, without gradient. An output is (K,), one value for
        each trained token; a reward model's is (N,). It is on the CPU."""
        units = np.arange(len(rows))
        cuts = self._cuts(Batch(tuple(rows), units, units))
        with self.stopwatch:
            parts = [self.models[model].outputs([rows[row] for row in cut], {}, wants) for cut in cuts]
        return {want: torch.cat([part[want] for part in parts]).cpu() for want in wants}

    def update(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Learn from a batch. If the batch has no rows, no trained weight changes. A reference that follows
        the policy is updated after a fixed number of updates of the policy; updates without rows count too.

        Returns:
            The batch's own metrics; those of its optimiser steps, most of them as means; the totals so far
            "optim/steps", "optim/skipped" and, if it is not 0, "optim/left_out"; "reference/updates" if a
            reference follows the policy; and "roofline/update", measured over all passes since the last
            update.

        Raises:
            ContractError: rows, units, groups and columns do not agree, the losses carry no gradient, or
                `ends_passes` returned no bool.
            NonFiniteError: NaN or infinity was found (`learner/learner.py`) in more than `max_skips`
                optimiser steps in a row. None of these steps changed a weight.
        """
        fault = fault_of(batch)
        if fault is not None:
            raise ContractError(f"the batch of {objective.name}: {fault} (docs/extending.md)")
        generator = self.seeds.at("shuffle", objective.name, self.updates)
        self.updates += 1
        most = self.max_updates if _main(objective.wants) in objective.wants else None
        reports: list[dict[str, float]] = []
        if batch.size:
            limits = {"size": self.micro_batch_size, "tokens": self.micro_batch_tokens}
            plan = self.ranks.agreed(lambda: plan_of(batch, generator, most=most, **limits))
            with self.stopwatch:
                for number, (rows, cuts) in enumerate(plan):
                    values, goes_on = self._step(objective, select_rows(batch, rows), cuts)
                    reports.append(values)
                    if not goes_on:
                        self._end_passes(objective, len(plan) - number)
                        break
        if "critic" in objective.wants and self.critic_only_steps:
            self.critic_updates += 1
        reached = self.stopwatch.end()
        moved = {}
        if self.following is not None and "policy" in objective.wants:
            self.following.step(self.models["policy"], self.models["reference"])
            moved = {"reference/updates": float(self.following.updates)}
        main = _main(self.steps)
        counts = {"optim/steps": float(self.steps.get(main, 0)), "optim/skipped": float(self.skipped)}
        if self.left_out.get(main):
            counts["optim/left_out"] = float(self.left_out[main])
        share = {} if reached is None else {"roofline/update": reached}
        return {**batch.metrics, **_joined(reports), **counts, **share, **moved}

    @torch.no_grad()
    def measure(self, objective: Objective, batch: Batch) -> dict[str, float]:
        """Return the losses and metrics of an objective over a complete batch under the present weights. No
        weight changes."""
        report = _Report()
        cuts = self._cuts(batch)
        for outputs, view, losses in self._passes(objective, batch, cuts):
            report.add(losses, objective.metrics(outputs, view), view)
        return report.values()

    def _cuts(self, batch: Batch) -> list[np.ndarray]:
        """Return the row indices of each micro-batch of a batch."""
        size, tokens = self.micro_batch_size, self.micro_batch_tokens
        return self.ranks.agreed(lambda: [*micro_batches(batch, size, tokens)])

    def version(self, model: str) -> int:
        """Return the number of updates that the reference has had, if `model` is "reference" and the
        reference follows the policy. Return 0 in all other cases, even for a policy that was updated."""
        return self.following.updates if self.following is not None and model == "reference" else 0

    def sizes(self, model: str) -> list[tuple[str, int]]:
        """Return the names of the weights of a model, in the order of `named_tensors`, and their bytes."""
        return [(name, tensor.nbytes) for name, tensor in self.models[model].tensors().items()]

    def named_tensors(
        self, model: str, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a model with their names, in the form that engines load, one after another.
        They are not copied; of a shard, the whole tensor is made.

        Args:
            names: of those that are wanted; None: all.
        """
        for name, tensor in self.models[model].tensors().items():
            if names is None or name in names:
                yield name, whole(tensor.detach())

    def trainable(self, model: str) -> list[str]:
        """Return the names of those weights of a model that learning changes."""
        return list(self.models[model].trainable())

    def _end_passes(self, objective: Objective, count: int) -> None:
        """Count optimiser steps that an objective has left out, so that schedules skip them too."""
        for name in self._learning(objective):
            self.left_out[name] += count

    def _learning(self, objective: Objective) -> list[str]:
        """Return the names of the models that the objective's present update changes."""
        is_alone = "critic" in objective.wants and self.critic_updates < self.critic_only_steps
        return [name for name in objective.wants if name == "critic" or not is_alone]

    def _step(
        self, objective: Objective, step: Batch, cuts: Sequence[np.ndarray]
    ) -> tuple[dict[str, float], bool]:
        """Make an optimiser step, unless a number is not finite or the objective ends its passes before it.

        Args:
            cuts: the rows of each micro-batch.

        Returns:
            The metrics of its mini-batch, and False if the passes end.
        """
        trained = {name: self.trained[name] for name in self._learning(objective)}
        learning_rates = self._schedule(trained)
        for part in trained.values():
            part.optimiser.zero_grad(set_to_none=True)
        report, nonfinite = _Report(), []
        with self.learning(objective):
            for outputs, view, losses in self._passes(objective, step, cuts):
                total = losses[_total_name(objective)]
                if not total.requires_grad:
                    raise ContractError(
                        f"the losses of {objective.name} carry no gradient: compute them from `outputs`, "
                        "with gradients left on"
                    )
                total.backward()
                nonfinite += nonfinite_inputs(outputs, view)
                report.add(losses, objective.metrics(outputs, view), view)
        values = report.values()
        norms = {name: self._clip(part) for name, part in trained.items()}
        nonfinite += nonfinite_results(values, norms)
        if nonfinite := [what for each in self.ranks.joined(nonfinite) for what in each]:
            return self._leave_out(objective, step, nonfinite), True
        if self.ranks.agreed(lambda: ends_update(objective, values)):
            self._forget_gradients(objective)
            return values, False
        self.skipped_in_row = 0
        for name, part in trained.items():
            part.optimiser.step()
            part.optimiser.zero_grad(set_to_none=True)
            self.steps[name] += 1
        for name, norm in norms.items():
            prefix = "optim/" if name == _main(trained) else f"optim/{name}_"
            values |= {f"{prefix}grad_norm": norm, f"{prefix}learning_rate": learning_rates[name]}
        return values, True

    def _passes(
        self, objective: Objective, step: Batch, cuts: Sequence[np.ndarray]
    ) -> Iterator[tuple[Outputs, View, dict[str, torch.Tensor]]]:
        """Yield three values for each micro-batch: the outputs of each model; the view of the micro-batch;
        and, by name, what the micro-batch adds to each part of the loss and to the total loss. All are on the
        device of the objective's main model."""
        reduction, learning = Reduction(step), self._learning(objective)
        device = device_of(self.trained[_first(objective)].model)
        for number, rows in enumerate(cuts):
            micro = select_rows(step, rows)
            view, groups = view_of(micro, device), torch.from_numpy(step.group_of_N[rows]).to(device)
            outputs = {}
            for name, wants in objective.wants.items():
                model = self.trained[name].model
                with torch.set_grad_enabled(torch.is_grad_enabled() and name in learning):
                    found = model.outputs(micro.rows, columns_on(device_of(model), micro.columns), wants)
                outputs[name] = {want: values.to(device) for want, values in found.items()}
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                losses = objective.losses(outputs, view)
            reduced = {
                name: reduction(loss, view, groups, first=number == 0) for name, loss in losses.items()
            }
            total = torch.stack([losses[name].coef * value for name, value in reduced.items()]).sum()
            yield outputs, view, {**reduced, _total_name(objective): total}

    @contextmanager
    def learning(self, objective: Objective) -> Iterator[None]:
        """Turn gradients on within the body, even if user code has turned them off. With
        `gradient_checkpointing`, also let the models that the objective trains checkpoint."""
        trained = self._learning(objective) if self.gradient_checkpointing else []
        with checkpointing(self.trained[name].model.module for name in trained), torch.enable_grad():
            yield

    def _schedule(self, trained: Mapping[str, Trained]) -> dict[str, float]:
        rates = {}
        for name, part in trained.items():
            rates[name] = part.settings.rate(self.steps[name] + self.left_out[name])
            for group in part.optimiser.param_groups:
                group["lr"] = rates[name]
        return rates

    def _clip(self, part: Trained) -> float:
        parameters = [p for group in part.optimiser.param_groups for p in group["params"]]
        return clip_gradient(parameters, part.settings.max_grad_norm)

    def _leave_out(self, objective: Objective, step: Batch, nonfinite: Sequence[str]) -> dict[str, float]:
        """Leave out an optimiser step with nonfinite numbers: change no weight, warn, and count the step. If
        the `max_skips` steps before this one were left out too, raise NonFiniteError instead.

        Returns:
            An empty dict, since the step has no metrics.
        """
        self._forget_gradients(objective)
        what = (
            f"update {self.updates} of {objective.name}: {'; '.join(nonfinite[:5])}; no weight was moved by "
            "it"
        )
        if self.skipped_in_row >= self.max_skips:
            kept = (
                ""
                if self.keep is None
                else f" The batch is in {keep_batch(self.keep, self.updates, step)} (docs/learner.md)."
            )
            again = f", after {self.max_skips} in a row that were left out" if self.max_skips else ""
            instead = "" if self.max_skips else ", or set learner.on_nonfinite: skip"
            lower = (
                "Begin a new run with a lower explorer.ensemble.learning_rate"
                if objective.name == ENSEMBLE
                else "See the rewards in samples.jsonl; lower learner.learning_rate"
            )
            raise NonFiniteError(f"{what}{again}.{kept} {lower}{instead}")
        self.skipped, self.skipped_in_row = self.skipped + 1, self.skipped_in_row + 1
        warn(f"{what}, and it is left out (learner.on_nonfinite: skip)")
        return {}

    def _forget_gradients(self, objective: Objective) -> None:
        for name in self._learning(objective):
            self.trained[name].optimiser.zero_grad(set_to_none=True)

    @cached_property
    def frozen(self) -> dict[str, int]:
        """For each model, a checksum of the weights that learning never changes."""
        moving = [parameter for name in self._moving for parameter in self.models[name].trainable().values()]
        return {name: frozen_checksum(model.module, moving) for name, model in self.models.items()}

    @property
    def _moving(self) -> list[str]:
        """The names of the models that change: the trained ones, and a reference that follows the policy."""
        return [*self.trained, *(["reference"] if self.following is not None else [])]

    @property
    def state(self) -> dict[str, Any]:
        """The state from which learning continues: `plain_state` and `state_tensors`."""
        return {**self.plain_state, **dict(self.state_tensors())}

    @property
    def plain_state(self) -> dict[str, Any]:
        """The part of the state that is no tensors: counters, and checksums of frozen weights."""
        state: dict[str, Any] = {"updates": self.updates, "steps": dict(self.steps), "frozen": self.frozen}
        state |= {"skipped": self.skipped, "skipped_in_row": self.skipped_in_row}
        state["without_moments"] = {
            model: sorted(
                name
                for name, parameter in part.model.trainable().items()
                if parameter not in part.optimiser.state
            )
            for model, part in self.trained.items()
        }
        if any(self.left_out.values()):
            state["left_out"] = dict(self.left_out)
        if self.critic_only_steps:
            state["critic_updates"] = self.critic_updates
        if self.following is not None:
            state["following"] = self.following.state
        return state

    def state_tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the state, one after another: weights, named "model/weights/name", and moments
        of Adam, named "model/moments/key/name". They are not copied.

        Args:
            names: of those that are wanted; None: all.

        Raises:
            CheckpointError: moments belong to no weight of their model.
        """
        for name, tensor in self._state_tensors():
            if names is None or name in names:
                yield name, tensor

    def _state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for model in self._moving:
            for name, parameter in self.models[model].trainable().items():
                yield f"{model}/weights/{name}", parameter.detach()
        for model, part in self.trained.items():
            moments, parameters = part.optimiser.state, part.model.trainable()
            if lost := len(moments.keys() - {*parameters.values()}):
                raise CheckpointError(
                    f"{lost} of {len(moments)} tensors of the {model} that have learned are no weights of it "
                    "any more, so their moments of Adam would be lost; a model may not replace its parameters"
                )
            for name, parameter in parameters.items():
                for key, value in moments.get(parameter, {}).items():
                    yield f"{model}/moments/{key}/{name}", value

    @torch.no_grad()
    def load_weights(self, model: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite, in place, those weights of a model that learning changes."""
        for name, parameter in self.models[model].trainable().items():
            parameter.copy_(tensors[name])

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            CheckpointError: the frozen weights differ from those with which the state was made, or the names
                of the others do, or moments are missing.
        """
        weights = {model: _below(state, f"{model}/weights/") for model in self._moving}
        for model, tensors in weights.items():
            refuse_other_tensors(model, tensors, self.models[model].trainable())
        changed = sorted(
            name for name, value in self.frozen.items() if state["frozen"].get(name, value) != value
        )
        refuse_other_frozen(changed, {name: self.models.get(name) for name in changed}, _FILES_OF)
        self.updates, self.steps = state["updates"], dict(state["steps"])
        self.skipped, self.skipped_in_row = state["skipped"], state["skipped_in_row"]
        self.critic_updates = state.get("critic_updates", 0)
        self.left_out = {**dict.fromkeys(self.steps, 0), **state.get("left_out", {})}
        if self.following is not None:
            self.following.load_state(state["following"])
        for model, tensors in weights.items():
            self.load_weights(model, tensors)
        for model, part in self.trained.items():
            part.optimiser.state.clear()
            moments, parameters = _below(state, f"{model}/moments/"), part.model.trainable()
            without = state.get("without_moments", {}).get(model)
            if without is not None or self.steps[model]:
                refuse_other_moments(model, moments, parameters, without)
            for name, parameter in parameters.items():
                if f"step/{name}" in moments:
                    part.optimiser.state[parameter] = {  # Adam keeps its count of steps on the CPU
                        key: moments[f"{key}/{name}"].to(
                            "cpu" if key == "step" else parameter.device, copy=True
                        )
                        for key in MOMENTS
                    }


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _main(names: Collection[str]) -> str:
    """Return the name of the main model: "policy" if it is among the names, else "reward". A metric such as
    `optim/grad_norm` is the main model's. The names of other models' metrics contain the model's name."""
    return "policy" if "policy" in names else "reward"


def _first(objective: Objective) -> str:
    """Return the name of the model on whose device the losses of an objective are computed."""
    main = _main(objective.wants)
    return main if main in objective.wants else next(iter(objective.wants))


def _total_name(objective: Objective) -> str:
    return "loss/total" if _main(objective.wants) in objective.wants else f"loss/{objective.name}_total"


class _Report:
    """The metrics of one optimiser step. A loss is the sum over the micro-batches. Any other metric is a
    mean, a maximum or a minimum over tokens, rows or units."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}
        self.sums: dict[str, tuple[float, int]] = {}
        self.extremes: dict[str, float] = {}

    def add(
        self, losses: Mapping[str, torch.Tensor], metrics: Mapping[str, tuple[torch.Tensor, str]], view: View
    ) -> None:
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + float(value.detach())
        for name, (values, how) in metrics.items():
            values = values.detach()
            if not len(values):
                continue
            if how in ("max", "min"):
                pick = max if how == "max" else min
                found = float(values.max() if how == "max" else values.min())
                self.extremes[name] = pick(self.extremes.get(name, found), found)
            else:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = (total + float(values.sum()), count + len(values))

    def values(self) -> dict[str, float]:
        return {
            **self.losses,
            **self.extremes,
            **{name: total / count for name, (total, count) in self.sums.items()},
        }


def _joined(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of several optimiser steps. Take the first value of a metric in `_OF_THE_FIRST`, the
    last learning rate, the largest of the maxima, the smallest of the minima, and the mean of any other
    metric."""
    joined: dict[str, float] = {}
    for name in sorted({name for report in reports for name in report}):
        values = [report[name] for report in reports if name in report]
        if name in _OF_THE_FIRST:
            joined[name] = values[0]
        elif name.endswith("learning_rate"):
            joined[name] = values[-1]
        elif name.endswith(("_max", "_min")):
            joined[name] = max(values) if name.endswith("_max") else min(values)
        else:
            joined[name] = sum(values) / len(values)
    return joined
