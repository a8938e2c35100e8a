"""The check of an algorithm. It runs the algorithm on made-up feedback, with tiny models and the real
learner, and finds breaches of the protocol `Objective`.

The real learner is needed to find two faults. One is a gradient that depends on the split of rows into
forward passes: the check compares two splits. The other is an incomplete `state`: the check continues from a
saved state. The check ends with its first finding, because later findings mostly follow from the first.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from oat import wire
from oat.algorithms.base import Objective
from oat.errors import ContractError
from oat.learner.batching import fault_of
from oat.learner.learner import Learner
from oat.learner.optimiser import OptimiserSettings
from oat.plugins.loading import load_symbol
from oat.seeds import Seeds
from oat.testing.made_up import MODELS, Answered, made_up_feedback, tiny_model
from oat.testing.mathematics import Mathematics, check_names
from oat.testing.part import Part
from oat.types import Batch, Feedback, Plan, Requires

_TOLERANCE = 1e-3
"""Two gradients count as equal if the norm of their difference, divided by the norm of the first gradient, is
at most this number."""
_SIZES = {"prompts": 6, "samples": 4, "max_length": 8}
_OF_A_STEP = ("answers/", "response/", "reward/", "sft/accepted", "sft/solved", "pairs/empty", "pairs/halved")


def check_algorithm(algorithm: Any, *, plan: Plan | None = None, **options: Any) -> None:
    """Run an algorithm on made-up feedback, and check it against the protocol `Objective`.

    The check finds these faults:

    * A column or a loss has a wrong shape or axis.
    * A trained model gets no gradient, or its gradient depends on the split of rows into forward passes.
    * A loss or a gradient is not finite.
    * The name of a metric is not in the list of `oat.metrics` and does not begin with `user/`.
    * A method changes its arguments.
    * `is_usable` or `ends_passes` returns something other than True or False, or does not depend on its
      argument and the settings alone.
    * Two calls with the same feedback and seed give different results.
    * `losses` or `metrics` read a value that `prepare` stored in the objective instead of in the batch.
    * A method fails for feedback without a usable answer.
    * `prepare` makes no rows of answered questions although `learns` is True, or makes rows although it is
      False.
    * If `reuses` is True: `prepare` makes no rows of older feedback, or older feedback changes metrics that
      describe the step's own answers.
    * `load_state` does not restore the state that `state` returned.

    The check cannot tell if the loss is the intended one.

    Args:
        algorithm: a class, or its name as in a configuration.
        plan: the plan of a step, for an objective without a method `plan`, such as the ensemble's; None means
            the objective's own plan.
        options: fields of the algorithm's `Config`. If `prompts`, `samples` or `max_length` is not given, the
            check uses at most 6, 4 or 8.

    Raises:
        ContractError: a fault was found.
    """
    cls = load_symbol(algorithm) if isinstance(algorithm, str) else algorithm
    check = _Check(cls, options, plan)
    check.members()
    check.plans()
    usual = check.feedback(1, "all")
    mixed = check.feedback(1, "some")
    hopeless = check.feedback(1, "none")
    for feedback in (usual, mixed, hopeless):
        check.usable(feedback)
        batch = check.prepared(feedback)
        if batch.size:
            check.losses(batch)
            check.gradients(feedback)
        check.rows(batch, feedback, is_answered=feedback is usual)
    check.older(usual)
    check.rules(usual)
    check.apart()
    check.state()


class _Check(Part):
    """The check of one algorithm. Each method makes its own objective, learner and models."""

    def __init__(self, cls: Any, options: Mapping[str, Any], plan: Plan | None):
        super().__init__(cls.__qualname__)
        self.cls = cls
        self.own_plan = plan
        self.options = dict(options)

    def fresh(self) -> Objective:
        settings = self.call("Config", lambda: self.cls.Config(**self.options))
        made: Objective = self.call("__init__", self.cls, settings)
        made.recorded_is_old = True
        return made

    def members(self) -> None:
        """Check the class, its settings, and its attributes `name`, `requires` and `wants`."""
        is_one = Objective in getattr(self.cls, "__mro__", ()) and is_dataclass(
            getattr(self.cls, "Config", None)
        )
        self.require(
            is_one,
            "is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass `Config` in it",
        )
        self.settings(fields(self.cls.Config))
        objective = self.fresh()
        name = getattr(objective, "name", None)
        is_named = isinstance(name, str) and name
        self.require(is_named, f"name is {name!r}; give it one, for messages and random numbers")
        self.needs(getattr(objective, "requires", None), getattr(objective, "wants", None))

    def settings(self, known: tuple[Field[Any], ...]) -> None:
        """Set the options that make a step small, unless the user gave them. Check that every other field
        without a default was given."""
        for field in known:
            is_small = isinstance(field.default, int) and field.default <= _SIZES.get(field.name, 0)
            if field.name in _SIZES and not is_small:
                self.options.setdefault(field.name, _SIZES[field.name])
        needed = [
            f.name
            for f in known
            if f.init and f.default is f.default_factory is MISSING and f.name not in self.options
        ]
        given = ", ".join(f"{name}=..." for name in needed)
        self.require(
            not needed,
            f"its Config has no default for {' and '.join(needed)}; give them: check_algorithm({self.name}, "
            f"{given})",
        )

    def needs(self, requires: Any, wants: Any) -> None:
        """Check the attributes `requires` and `wants` of an objective."""
        is_one = isinstance(requires, Requires)
        hint = "give what it needs of a run as oat.types.Requires"
        self.require(is_one, f"requires is {requires!r}; {hint}")
        self.require(
            requires.feedback in ("compare", "score"),
            f"requires.feedback is {requires.feedback!r}; learn from 'compare' or 'score'",
        )
        trained = set(wants) if isinstance(wants, Mapping) else set()
        hint = 'say what `losses` reads of each trained model, as {"policy": {"raw"}}'
        self.require(trained, f"wants is {wants!r}; {hint}")
        unknown = ", ".join(sorted(requires.models - {*MODELS}))
        self.require(not unknown, f"requires.models names {unknown}; a run has {', '.join(MODELS)}")
        self.require(
            trained <= requires.models,
            f"wants {trained}, and requires.models is {set(requires.models)}; name every trained model there",
        )

    def plans(self) -> None:
        """Check that `plan` returns valid plans, and equal plans in two calls for one step."""
        if self.own_plan is not None:
            return
        objective = self.fresh()
        for step in (0, 1, 1_000):
            one, two = (self.call("plan", objective.plan, step) for _ in range(2))
            self.require(
                isinstance(one, Plan) and one == two,
                f"plan({step}) is {one} and then {two}; return a Plan, a function of the step",
            )
            counts = [one.prompts, one.questions, *one.samples.values()]
            is_whole = all(isinstance(count, int) and count > 0 for count in counts) and len(counts) > 2
            hint = "prompts, samples and questions are whole numbers above 0"
            self.require(is_whole, f"plan({step}) is {one}; {hint}")
            enough = sum(one.samples.values()) > 1 or objective.requires.feedback == "score"
            self.require(enough, f"plan({step}) is {one}; a comparison needs 2 samples a prompt, or more")
            unnamed = set(one.samples) - objective.requires.slots
            self.require(
                not unnamed,
                f"plan({step}) samples from {unnamed}, and requires.slots is "
                f"{set(objective.requires.slots)}; name them there",
            )

    def feedback(self, step: int, answered: Answered) -> Feedback:
        objective = self.fresh()
        plan = self.own_plan or objective.plan(step)
        return made_up_feedback(objective.requires.feedback, plan, step, answered)

    def learner(self, objective: Objective, micro_batch_size: int | None = None) -> Learner:
        models = {name: tiny_model(name) for name in sorted(objective.requires.models)}
        settings = {name: OptimiserSettings(1e-3) for name in objective.wants}
        return Learner(models, settings, micro_batch_size=micro_batch_size, seeds=Seeds(0))

    def prepared(self, feedback: Feedback) -> Batch:
        """Return the batch that `prepare` makes of feedback. Check that the batch is valid, that a second
        call makes an equal batch, and that `prepare` does not change the feedback."""
        before = wire.encode(feedback)
        batches = []
        for _ in range(2):
            objective = self.fresh()
            batches.append(self.prepare(objective, self.learner(objective), feedback))
            self.require(
                wire.encode(feedback) == before,
                "prepare changed the feedback that it was given; work on copies",
            )
        self.batch(batches[0])
        self.require(
            wire.encode(batches[0]) == wire.encode(batches[1]),
            "prepare made two different batches of the same feedback and seed; draw numbers from `generator` "
            "only",
        )
        return batches[0]

    def prepare(self, objective: Objective, learner: Learner, feedback: Feedback) -> Batch:
        batch = self.call("prepare", objective.prepare, feedback, learner.forward, np.random.default_rng(3))
        hint = "return a Batch, without rows where there is nothing to learn"
        self.require(isinstance(batch, Batch), f"prepare returned {type(batch).__name__}; {hint}")
        return cast(Batch, batch)

    def batch(self, batch: Batch) -> None:
        """Check that the rows, units, groups and columns of a batch agree, and that the names of its metrics
        are valid."""
        fault = fault_of(batch)
        self.require(fault is None, fault or "")
        check_names(self, "prepare reports", batch.metrics)

    def rows(self, batch: Batch, feedback: Feedback, *, is_answered: bool) -> None:
        """Check that a batch has rows if all questions were answered, and none if the objective does not
        learn."""
        learns = self.fresh().learns
        self.require(
            learns or not batch.size,
            f"learns is False, and prepare made {batch.size} rows; make none, or leave `learns` out",
        )
        self.require(
            batch.size > 0 or not learns or not is_answered,
            f"prepare made no rows of {len(feedback.items)} answered questions; check it with options under "
            "which it learns from them",
        )

    def usable(self, feedback: Feedback) -> None:
        """Check that `is_usable` returns a bool for each item, the same in two calls, and that it does not
        change the item."""
        for item in feedback.items:
            before = wire.encode(item)
            one, two = (self.call("is_usable", self.fresh().is_usable, item) for _ in range(2))
            self.require(
                isinstance(one, bool | np.bool_) and one == two,
                f"is_usable returned {one!r} and then {two!r} for one item; return a bool, a function of the "
                "item and the settings",
            )
            self.require(
                wire.encode(item) == before, "is_usable changed the item that it was given; work on a copy"
            )

    def older(self, usual: Feedback) -> None:
        """If the objective learns from older feedback, check that older feedback adds rows and does not
        change the metrics of the step's own answers."""
        if not self.fresh().reuses:
            return
        alone = self.prepared(usual)
        filled = self.prepared(replace(usual, older=self.feedback(usual.step - 1, "all").items))
        what = f"made {filled.size} rows with older answers and {alone.size} without"
        self.require(
            filled.size > alone.size,
            f"reuses is true, and prepare {what}; take its rows from `feedback.learned`",
        )
        moved = [
            name
            for name, value in alone.metrics.items()
            if name.startswith(_OF_A_STEP) and filled.metrics.get(name) != value
        ]
        self.require(
            not moved,
            f"with older answers prepare reports other {', '.join(moved)}; those are of the step's own: "
            "`feedback.items`",
        )

    def losses(self, batch: Batch) -> None:
        """Check shapes, axes, names and gradients of all losses and metrics, in one forward pass."""
        objective = self.fresh()
        Mathematics(self.name, objective, self.learner(objective).models, batch).check()

    def gradients(self, feedback: Feedback) -> None:
        """Check that the gradient of the first optimiser step is not 0, and that it is equal in two cases:
        one forward pass for all rows, and one forward pass per unit."""
        whole, cut = (self.gradient(feedback, size) for size in (None, 1))
        difference, norm = float((whole - cut).norm()), float(whole.norm())
        self.require(norm > 0, "an update has a gradient of 0; see what masks and weights the batch has")
        self.require(
            difference <= _TOLERANCE * norm,
            f"the gradient differs by {difference / norm:.1%} when each unit has a forward pass of its own; "
            "a term may depend on its own unit alone, and means over rows are the learner's: leave terms "
            "unreduced, and put what is known of the whole batch into columns in `prepare`",
        )

    def gradient(self, feedback: Feedback, micro_batch_size: int | None) -> torch.Tensor:
        """Return the gradient of the first optimiser step: one flat vector for all trained models."""
        objective = self.fresh()
        learner, found = self.learner(objective, micro_batch_size), []

        def keep(optimiser: torch.optim.Optimizer, *_: object) -> None:
            parameters = [p for group in optimiser.param_groups for p in group["params"]]
            found.append([p.grad.flatten().clone() for p in parameters if p.grad is not None])

        for part in learner.trained.values():
            part.optimiser.register_step_pre_hook(keep)
        self.update(objective, learner, self.prepare(objective, learner, feedback))
        self.require(
            found,
            "an update makes no optimiser step, since ends_passes returns True before the first; check it "
            "with options under which an update learns",
        )
        return torch.cat([gradient for gradients in found[: len(learner.trained)] for gradient in gradients])

    def update(self, objective: Objective, learner: Learner, batch: Batch) -> dict[str, float]:
        """Learn from a batch, and return the metrics of the update without the metrics of speed."""
        report = self.call("an update", learner.update, objective, batch)
        return {name: value for name, value in report.items() if not name.startswith("roofline/")}

    def after_two_steps(self) -> Objective:
        objective = self.fresh()
        for step in (1, 2):
            learner = self.learner(objective)
            self.update(objective, learner, self.prepare(objective, learner, self.feedback(step, "all")))
        return objective

    def rules(self, feedback: Feedback) -> None:
        """Check that `is_usable` and `ends_passes` do not depend on what the objective has learned. Check
        that `ends_passes` returns a bool, for values that were measured, for smaller and larger ones, and for
        losses alone, since metrics may be absent."""
        fresh, learned = self.fresh(), self.after_two_steps()
        for item in feedback.items:
            self.require(
                fresh.is_usable(item) == learned.is_usable(item),
                "is_usable says something else of an item after two steps; let it depend on the item and the "
                "settings alone",
            )
        if not fresh.learns:
            return
        prepared = self.fresh()
        learner = self.learner(prepared)
        measured = learner.measure(prepared, self.prepare(prepared, learner, feedback))
        alone = {name: value for name, value in measured.items() if name.startswith("loss/")}
        scaled = [{name: factor * value for name, value in measured.items()} for factor in (0.0, 1e9)]
        for values in (measured, *scaled, alone):
            found = [
                self.call("ends_passes", objective.ends_passes, MappingProxyType(values))
                for objective in (fresh, fresh, learned)
            ]
            self.require(
                isinstance(found[0], bool | np.bool_) and found == [found[0]] * 3,
                f"ends_passes returned {found[0]!r}, {found[1]!r} and then {found[2]!r} for the same values; "
                "return a bool, a function of the values and the settings",
            )

    def apart(self) -> None:
        """Check that `losses` and `metrics` read only the batch. For this, a new objective learns from a
        batch that another objective has prepared."""
        one, other = self.after_two_steps(), self.fresh()
        batch = self.prepare(one, self.learner(one), self.feedback(3, "all"))
        own, others = (self.update(objective, self.learner(objective), batch) for objective in (one, other))
        moved = [name for name in own | others if wire.encode(own.get(name)) != wire.encode(others.get(name))]
        self.require(
            not moved,
            f"{', '.join(moved)}: losses or metrics read what `prepare` left in the objective, and `prepare` "
            "may run in another process; put it into a column of the batch",
        )

    def state(self) -> None:
        """Load the state of an objective into a new one, and check that both then make equal next steps."""
        one, two = self.after_two_steps(), self.fresh()
        saved = one.state
        hint = "return a flat dict of tensors and JSON values by name"
        self.require(isinstance(saved, dict), f"state is {type(saved).__name__}; {hint}")
        tensors = {name: value.clone() for name, value in saved.items() if isinstance(value, torch.Tensor)}
        try:
            plain = json.loads(
                json.dumps({name: value for name, value in saved.items() if name not in tensors})
            )
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"{self.name}: state holds what JSON cannot ({error}); keep tensors, numbers, strings, lists "
                "and dicts"
            ) from error
        self.call("load_state", two.load_state, {**plain, **tensors})
        same = wire.encode(two.state) == wire.encode({**saved, **plain})
        self.require(
            same, f"load_state does not bring back the state: {sorted(saved)} was saved; load each name of it"
        )
        usual = self.feedback(3, "all")
        results = [self.after(objective, usual) for objective in (one, two)]
        self.require(
            results[0] == results[1],
            "after load_state it makes other batches or losses than the one whose state that was; put all "
            "that it keeps between steps into `state`",
        )

    def after(self, objective: Objective, feedback: Feedback) -> tuple[Any, ...]:
        """Make one step with an objective. Return the encoded batch, the metrics of the update, and the
        objective's plan for the next step. The plan is None if the user gave the check a plan."""
        learner = self.learner(objective)
        batch = self.prepare(objective, learner, feedback)
        report = self.update(objective, learner, batch)
        plan = None if self.own_plan else objective.plan(feedback.step + 1)
        return wire.encode(batch), report, plan
