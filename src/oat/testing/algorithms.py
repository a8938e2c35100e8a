"""What an algorithm has to keep: an objective is run on made-up feedback with real tiny models and the real
learner."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, cast, get_args

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oat import wire
from oat.algorithms.base import Objective
from oat.errors import ContractError, OatError
from oat.learner.batching import fault_of, view_of
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel, Model, RewardModel
from oat.learner.optim import OptimiserSettings
from oat.learner.reduction import Reduction
from oat.metrics import Metrics
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import Ensemble
from oat.plugins.loading import load_symbol
from oat.seeds import Seeds
from oat.testing.part import Part
from oat.testing.samples import END_ID, VOCABULARY, make_group
from oat.types import (
    Answer,
    Batch,
    Feedback,
    Group,
    Item,
    Key,
    Loss,
    Mark,
    Per,
    Plan,
    Question,
    Requires,
    Trajectory,
)

_FEATURES = 8
_TOLERANCE = 1e-3
"""Largest difference of two gradients, relative to their norm, that rounding may make."""
_MARKS: dict[str, tuple[Mark, ...]] = {
    "all": ("ok",),
    "some": ("ok", "tie", "abstain", "failed"),
    "none": ("failed",),
}
_SIZES = {"prompts": 6, "samples": 4, "max_length": 8}
_OF_A_STEP = ("answers/", "response/", "reward/", "sft/accepted", "sft/solved", "pairs/empty", "pairs/halved")
_MODELS = ("policy", "reference", "critic", "ensemble", "reward")
_AXIS_OF = {"pair": "U", "step": ""} | dict.fromkeys(
    ("token", "sequence", "sequence_sum", "prompt", "constant"), "K"
)


def check_algorithm(algorithm: Any, *, plan: Plan | None = None, **options: Any) -> None:
    """Run an algorithm on made-up feedback, with real tiny models and the real learner, and hold it against
    the protocol of `Objective`.

    Found are: columns and losses of a wrong shape or axis; a model that is to be trained and gets no
    gradient, or gets one that depends on what stands in the same forward pass; numbers that are not finite;
    metrics without a name of ours or `user/`; changes in what it was given; results that differ for the same
    feedback and seed; feedback without a usable answer that makes it fail; older feedback that it says it
    learns from again, and does not, or counts as a step's own; and a state that `load_state` does not bring
    back. Not looked at is whether the loss is the right one.

    Args:
        algorithm: a class as configurations name it, or that name.
        plan: of an objective that has none of its own, as the ensemble's.
        options: of its `Config`; by default a step has at most 6 prompts and 4 samples of each, and a
        `max_length` that is open is 8 tokens.

    Raises:
        ContractError: what was found, where, and what to do.
    """
    cls = load_symbol(algorithm) if isinstance(algorithm, str) else algorithm
    check = _Check(cls, options, plan)
    check.members()
    check.plans()
    usual, mixed, hopeless = (check.feedback(1, answered) for answered in ("all", "some", "none"))
    for feedback in (usual, mixed, hopeless):
        batch = check.prepared(feedback)
        if batch.size:
            check.losses(batch)
            check.gradients(feedback)
        learns = batch.size > 0 or feedback is not usual
        check.require(
            learns,
            (
                f"prepare made no rows of {len(usual.items)} answered questions; check it with options under "
                "which it learns from them"
            ),
        )
    check.older(usual)
    check.state()


class _Check(Part):
    """One algorithm. Whatever is made of it is made anew each time, as a run makes it."""

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
        """What the class says of itself."""
        is_one = Objective in getattr(self.cls, "__mro__", ()) and is_dataclass(
            getattr(self.cls, "Config", None)
        )
        self.require(
            is_one,
            (
                "is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass `Config` in "
                "it"
            ),
        )
        for field in fields(self.cls.Config):
            if field.name in _SIZES and not (
                isinstance(field.default, int) and field.default <= _SIZES[field.name]
            ):
                self.options.setdefault(field.name, _SIZES[field.name])
        needed = [
            f.name
            for f in fields(self.cls.Config)
            if f.init and f.default is f.default_factory is MISSING and f.name not in self.options
        ]
        given = ", ".join(f"{name}=..." for name in needed)
        self.require(
            not needed,
            (
                f"its Config has no default for {' and '.join(needed)}; give them: "
                f"check_algorithm({self.name}, {given})"
            ),
        )
        objective = self.fresh()
        name, requires, wants = (getattr(objective, member, None) for member in ("name", "requires", "wants"))
        self.require(
            isinstance(name, str) and name, f"name is {name!r}; give it one, for messages and random numbers"
        )
        self.require(
            isinstance(requires, Requires),
            f"requires is {requires!r}; give what it needs of a run as oat.types.Requires",
        )
        assert requires is not None
        self.require(
            requires.feedback in ("compare", "score"),
            f"requires.feedback is {requires.feedback!r}; learn from 'compare' or 'score'",
        )
        trained = set(wants) if isinstance(wants, Mapping) else set()
        self.require(
            trained,
            (
                f'wants is {wants!r}; say what `losses` reads of each trained model, as {{"policy": '
                f'{{"raw"}}}}'
            ),
        )
        unknown = requires.models - {*_MODELS}
        self.require(
            not unknown, f"requires.models names {', '.join(sorted(unknown))}; a run has {', '.join(_MODELS)}"
        )
        self.require(
            trained <= requires.models,
            (
                f"wants {trained}, and requires.models is {set(requires.models)}; name every trained model "
                "there"
            ),
        )

    def plans(self) -> None:
        """The plan of a step, which is a function of its number."""
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
            self.require(
                is_whole, f"plan({step}) is {one}; prompts, samples and questions are whole numbers above 0"
            )
            enough = sum(one.samples.values()) > 1 or objective.requires.feedback == "score"
            self.require(enough, f"plan({step}) is {one}; a comparison needs 2 samples a prompt, or more")
            unnamed = set(one.samples) - objective.requires.slots
            self.require(
                not unnamed,
                (
                    f"plan({step}) samples from {unnamed}, and requires.slots is "
                    f"{set(objective.requires.slots)}; name them there"
                ),
            )

    def feedback(self, step: int, answered: str) -> Feedback:
        """Made-up answers about made-up responses, whose recorded log-probabilities are a tiny policy's.

        Args:
            answered: "all"; "some": ties, abstentions and failures among them, and responses of older
            weights; "none": all failed.
        """
        objective, generator = self.fresh(), np.random.default_rng([step, len(answered)])
        plan = self.own_plan or objective.plan(step)
        policy = cast(LanguageModel, _model("policy"))
        items = []
        for number in range(plan.questions):
            version, text = (
                (step - 1, "same" if number == 1 else None) if answered == "some" else (step, None)
            )
            made = make_group(number, plan.samples, generator, version=version, text=text)
            group = replace(made, trajectories=tuple(_recorded(row, policy) for row in made.trajectories))
            marks = _MARKS[answered]
            items.append(
                _item(objective.requires.feedback, group, step, marks[number % len(marks)], generator)
            )
        return Feedback(step, tuple(items), queries=sum(item.answer.queries for item in items))

    def learner(self, objective: Objective, micro_batch_size: int | None = None) -> Learner:
        models = {name: _model(name) for name in sorted(objective.requires.models)}
        settings = {name: OptimiserSettings(1e-3) for name in objective.wants}
        return Learner(models, settings, micro_batch_size=micro_batch_size, seeds=Seeds(0))

    def prepared(self, feedback: Feedback) -> Batch:
        """The batch of feedback; the same twice."""
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
            (
                "prepare made two different batches of the same feedback and seed; draw numbers from "
                "`generator` only"
            ),
        )
        return batches[0]

    def prepare(self, objective: Objective, learner: Learner, feedback: Feedback) -> Batch:
        batch = self.call("prepare", objective.prepare, feedback, learner.forward, np.random.default_rng(3))
        is_batch = isinstance(batch, Batch)
        self.require(
            is_batch,
            (
                f"prepare returned {type(batch).__name__}; return a Batch, without rows where there is "
                "nothing to learn"
            ),
        )
        return cast(Batch, batch)

    def batch(self, batch: Batch) -> None:
        """Rows, units, groups and columns agree."""
        fault = fault_of(batch)
        self.require(fault is None, fault or "")
        self.named("prepare reports", batch.metrics)

    def older(self, usual: Feedback) -> None:
        """What is learned again makes rows, and moves no metric of the step's own answers."""
        if not self.fresh().reuses:
            return
        alone, filled = (
            self.prepared(usual),
            self.prepared(replace(usual, older=self.feedback(usual.step - 1, "all").items)),
        )
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
            (
                f"with older answers prepare reports other {', '.join(moved)}; those are of the step's own: "
                "`feedback.items`"
            ),
        )

    def losses(self, batch: Batch) -> None:
        """Shapes, axes, names and gradients of all losses and metrics, in one forward pass."""
        objective = self.fresh()
        view, models = view_of(batch), self.learner(objective).models
        leaves: dict[str, dict[str, torch.Tensor]] = {}
        for model, wants in objective.wants.items():
            given = self.call("wants", models[model].outputs, batch.rows, batch.columns, wants)
            leaves[model] = {name: values.detach().requires_grad_() for name, values in given.items()}
        outputs = {
            model: {name: leaf * 1.0 for name, leaf in given.items()} for model, given in leaves.items()
        }
        columns = {name: values.clone() for name, values in batch.columns.items()}
        losses = self.call("losses", objective.losses, outputs, view)
        metrics = self.call("metrics", objective.metrics, outputs, view)
        given_now = [(f"the column {name}", values, batch.columns[name]) for name, values in columns.items()]
        given_now += [
            (f"{name} of the {model}", leaf, outputs[model][name])
            for model, given in leaves.items()
            for name, leaf in given.items()
        ]
        for what, before, now in given_now:
            self.require(
                torch.equal(before.nan_to_num(), now.nan_to_num()),
                f"{what} was changed in place; make a new tensor",
            )
        self.require(
            isinstance(losses, dict) and len(losses) > 0,
            f"losses returned {str(losses)[:60]}; return a dict of Loss by metric name",
        )
        self.named("losses reports", dict.fromkeys(losses, 0.0))
        self.named("metrics reports", dict.fromkeys(metrics, 0.0))
        sizes = {"K": (len(view.row_of_K),), "N": (view.num_rows,), "U": (view.num_units,), "": ()}
        for name, loss in losses.items():
            self.loss(name, loss, sizes)
        for name, (values, how) in metrics.items():
            self.require(
                how in ("K", "N", "U", "max", "min"),
                f"the metric {name} is joined by {how!r}; it is a mean over K, N or U, or max, min",
            )
            most = sizes[how][0] if how in sizes else len(view.row_of_K)
            fits = values.ndim == 1 and len(values) <= most
            self.require(
                fits,
                (
                    f"the metric {name} has shape {tuple(values.shape)}; give one value for each of its axis "
                    f"{how}, at most {most} here"
                ),
            )
        reduction, groups = Reduction(batch), torch.from_numpy(batch.group_of_N)
        total = torch.stack(
            [loss.coef * reduction(loss, view, groups, first=True) for loss in losses.values()]
        ).sum()
        self.require(
            total.requires_grad,
            (
                "no loss depends on what the models gave; compute it from `outputs`, without detach() or "
                "no_grad"
            ),
        )
        self.require(
            torch.isfinite(total),
            (
                f"the loss is {float(total.detach())}; look for log(0), 0/0, or exp of much, also where a "
                "mask will be 0"
            ),
        )
        total.backward()
        self.reached(leaves)

    def loss(self, name: str, loss: Any, sizes: Mapping[str, tuple[int, ...]]) -> None:
        self.require(
            isinstance(loss, Loss),
            (
                f"the loss {name} is {type(loss).__name__}; return oat.types.Loss(terms, per=...), the "
                "learner reduces"
            ),
        )
        self.require(
            loss.per in get_args(Per),
            f"the loss {name} is per {loss.per!r}; it is one of {', '.join(get_args(Per))}",
        )
        axis = _AXIS_OF[loss.per]
        meant = f"({axis},) = {sizes[axis]}" if axis else "()"
        self.require(
            tuple(loss.terms.shape) == sizes[axis],
            (
                f"the terms of {name} have shape {tuple(loss.terms.shape)}; per {loss.per!r} they are "
                f"{meant}, not reduced (N = {sizes['N'][0]})"
            ),
        )
        is_whole = loss.per != "constant" or loss.constant is not None
        self.require(
            is_whole, f'the loss {name} is per "constant"; set Loss.constant, the length to divide by'
        )

    def reached(self, leaves: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Every trained model has a gradient, and a finite one."""
        for model, given in leaves.items():
            gradients = {
                name: leaf.grad
                for name, leaf in given.items()
                if leaf.grad is not None and bool((leaf.grad != 0).any())
            }
            names = ", ".join(sorted(given))
            self.require(
                gradients,
                (
                    f"no gradient reaches the {model}: no loss depends on its {names}, or each is flat "
                    "there; "
                    "use `outputs`"
                ),
            )
            for name, gradient in gradients.items():
                is_finite = torch.isfinite(gradient).all()
                self.require(
                    is_finite,
                    (
                        f"the gradient of {name} of the {model} is not finite; look for log(0), 0/0, or exp "
                        "of much"
                    ),
                )

    def gradients(self, feedback: Feedback) -> None:
        """The first optimiser step's gradient is the same whether all rows go through one pass or each unit
        through its own."""
        whole, cut = (self.gradient(feedback, size) for size in (None, 1))
        difference, norm = float((whole - cut).norm()), float(whole.norm())
        self.require(norm > 0, "an update has a gradient of 0; see what masks and weights the batch has")
        self.require(
            difference <= _TOLERANCE * norm,
            f"the gradient differs by {difference / norm:.1%} when each unit has a forward pass of its "
            "own; a term may depend on its own unit alone, "
            "and means over rows are the learner's: leave terms unreduced, and put what is known of the "
            "whole batch into columns in `prepare`",
        )

    def gradient(self, feedback: Feedback, micro_batch_size: int | None) -> torch.Tensor:
        """Of the first optimiser step, over all trained models, flat."""
        objective = self.fresh()
        learner, found = self.learner(objective, micro_batch_size), []

        def keep(optimiser: torch.optim.Optimizer, *_: object) -> None:
            found.append(
                [
                    p.grad.flatten().clone()
                    for group in optimiser.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            )

        for part in learner.trained.values():
            part.optimiser.register_step_pre_hook(keep)
        self.update(objective, learner, feedback)
        return torch.cat([gradient for gradients in found[: len(learner.trained)] for gradient in gradients])

    def update(
        self, objective: Objective, learner: Learner, feedback: Feedback
    ) -> tuple[Batch, dict[str, float]]:
        """The batch of a step, and what its update reports but for speed."""
        batch = self.prepare(objective, learner, feedback)
        report = self.call("an update", learner.update, objective, batch)
        return batch, {name: value for name, value in report.items() if not name.startswith("roofline/")}

    def state(self) -> None:
        """After some steps, an algorithm that takes up the saved state of another does as that one does."""
        one, two = self.fresh(), self.fresh()
        for step in (1, 2):
            self.update(one, self.learner(one), self.feedback(step, "all"))
        saved = one.state
        self.require(
            isinstance(saved, dict),
            f"state is {type(saved).__name__}; return a flat dict of tensors and JSON values by name",
        )
        tensors = {name: value.clone() for name, value in saved.items() if isinstance(value, torch.Tensor)}
        try:
            plain = json.loads(
                json.dumps({name: value for name, value in saved.items() if name not in tensors})
            )
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"{self.name}: state holds what JSON cannot ({error}); keep tensors, numbers, strings, "
                "lists and dicts"
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
            (
                "after load_state it makes other batches or losses than the one whose state that was; put "
                "all "
                "that it keeps between steps into `state`"
            ),
        )

    def after(self, objective: Objective, feedback: Feedback) -> tuple[Any, ...]:
        """What a step does, as values that can be compared."""
        batch, report = self.update(objective, self.learner(objective), feedback)
        plan = None if self.own_plan else objective.plan(feedback.step + 1)
        return wire.encode(batch), report, plan

    def named(self, what: str, metrics: Mapping[str, float]) -> None:
        try:
            Metrics().add(metrics)
        except OatError as error:
            raise ContractError(f"{self.name}: {what} a name that no list knows: {error}") from error


def _item(feedback: str, group: Group, step: int, mark: Mark, generator: np.random.Generator) -> Item:
    """A question about a group, and its answer."""
    key, size = Key("train", step, 0, group.prompt.occurrence), len(group.trajectories)
    if feedback == "compare":
        features = generator.normal(size=(2, _FEATURES)).astype(np.float32)
        question = replace(Question.about(group, key, "compare", (0, 1)), oracle="made-up", features=features)
        p = float(generator.random())
        return Item(
            group,
            question,
            Answer(key, (p,), (mark,), queries=1, by="made-up"),
            int(p < 0.5) if mark == "ok" else None,
        )
    question = replace(Question.about(group, key, "score", tuple(range(size))), oracle="made-up")
    marks: tuple[Mark, ...] = tuple(
        "ok" if mark == "tie" or (mark == "abstain" and place > 0) else mark for place in range(size)
    )
    values = tuple(float(value) for value in generator.normal(size=size))
    return Item(group, question, Answer(key, values, marks, queries=size, by="made-up"), None)


def _model(name: str) -> Model:
    """A tiny one with random weights, the same at every call."""
    if name == "ensemble":
        return Ensemble(
            features=_FEATURES, members=3, hidden=8, activation="relu", generator=np.random.default_rng(5)
        )
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_MODELS.index(name))
        lm = CausalLM(
            LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=END_ID, **shape)).eval()
        )
    if name == "reward":
        return RewardModel(lm, np.random.default_rng(5), trailing=np.zeros(0, np.int32))
    return (
        Critic(lm, np.random.default_rng(5)) if name == "critic" else LanguageModel(lm, num_tokens=VOCABULARY)
    )


@torch.no_grad()
def _recorded(row: Trajectory, policy: LanguageModel) -> Trajectory:
    """The trajectory with the log-probabilities of a model, as if that had sampled it."""
    logps = policy.outputs([row], {}, {"raw"})["raw"].numpy()
    return replace(
        row, segments=(row.segments[0], replace(row.segments[1], raw_logps=logps, sampled_logps=logps))
    )
