"""The check of an objective's methods `losses` and `metrics`, on one batch in one forward pass."""

from collections.abc import Mapping
from typing import Any, get_args

import torch

from oat.algorithms.base import Objective
from oat.errors import ContractError, OatError
from oat.learner.batching import view_of
from oat.learner.models import Model
from oat.learner.reduction import Reduction
from oat.metrics import Metrics
from oat.testing.part import Part
from oat.types import Batch, Loss, Per

_AXIS_OF = {"pair": "U", "step": ""} | dict.fromkeys(
    ("token", "sequence", "sequence_sum", "prompt", "constant"), "K"
)


class Mathematics(Part):
    """The check of `losses` and `metrics` on one batch.

    Args:
        name: name of the algorithm, for messages.
        objective: an objective on which `prepare` was never called.
        models: models by name, with all models that the objective trains.
    """

    def __init__(self, name: str, objective: Objective, models: Mapping[str, Model], batch: Batch):
        super().__init__(name)
        self.objective = objective
        self.models = models
        self.batch = batch
        self.view = view_of(batch)
        view = self.view
        self.sizes = {"K": (len(view.row_of_K),), "N": (view.num_rows,), "U": (view.num_units,), "": ()}

    def check(self) -> None:
        """Check shapes, axes, names and gradients of all losses and metrics."""
        leaves = self.leaves()
        outputs = {
            model: {name: leaf * 1.0 for name, leaf in given.items()} for model, given in leaves.items()
        }
        columns = {name: values.clone() for name, values in self.batch.columns.items()}
        losses = self.ask("losses", outputs)
        metrics = self.ask("metrics", outputs)
        for name, values in columns.items():
            self.unchanged(f"the column {name}", values, self.batch.columns[name])
        for model, given in leaves.items():
            for name, leaf in given.items():
                self.unchanged(f"{name} of the {model}", leaf, outputs[model][name])
        self.losses(losses)
        self.metrics(metrics)
        self.total(losses).backward()
        self.reached(leaves)

    def leaves(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the outputs that `wants` names, by trained model and name. Each output is a leaf tensor that
        requires a gradient."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for model, wants in self.objective.wants.items():
            given = self.call("wants", self.models[model].outputs, self.batch.rows, self.batch.columns, wants)
            found[model] = {name: values.detach().requires_grad_() for name, values in given.items()}
        return found

    def ask(self, method: str, outputs: Mapping[str, Mapping[str, torch.Tensor]]) -> Any:
        """Return the result of `losses` or `metrics`.

        Raises:
            ContractError: the method raised an exception, such as when it reads an attribute that `prepare`
                sets.
        """
        try:
            return self.call(method, getattr(self.objective, method), outputs, self.view)
        except ContractError as error:
            cause = error.__cause__
            if isinstance(cause, AttributeError) and cause.obj is self.objective:
                raise ContractError(
                    f"{self.name}: {method} reads self.{cause.name}, which is not there before `prepare`; "
                    "that may run in another process, so put it into a column of the batch"
                ) from cause
            raise

    def unchanged(self, what: str, before: torch.Tensor, now: torch.Tensor) -> None:
        is_same = torch.equal(before.nan_to_num(), now.nan_to_num())
        self.require(is_same, f"{what} was changed in place; make a new tensor")

    def losses(self, losses: Any) -> None:
        """Check the names, axes and reductions of all losses."""
        is_dict = isinstance(losses, dict) and len(losses) > 0
        self.require(is_dict, f"losses returned {str(losses)[:60]}; return a dict of Loss by metric name")
        check_names(self, "losses reports", dict.fromkeys(losses, 0.0))
        for name, loss in losses.items():
            self.loss(name, loss)

    def loss(self, name: str, loss: Any) -> None:
        kind = type(loss).__name__
        hint = "return oat.types.Loss(terms, per=...), the learner reduces"
        self.require(isinstance(loss, Loss), f"the loss {name} is {kind}; {hint}")
        known = ", ".join(get_args(Per))
        is_known = loss.per in get_args(Per)
        self.require(is_known, f"the loss {name} is per {loss.per!r}; it is one of {known}")
        axis = _AXIS_OF[loss.per]
        size = self.sizes[axis]
        shape = tuple(loss.terms.shape)
        meant = f"({axis},) = {size}" if axis else "()"
        self.require(
            shape == size,
            f"the terms of {name} have shape {shape}; per {loss.per!r} they are {meant}, not reduced (N = "
            f"{self.sizes['N'][0]})",
        )
        is_whole = loss.per != "constant" or loss.constant is not None
        hint = "set Loss.constant, the length to divide by"
        self.require(is_whole, f'the loss {name} is per "constant"; {hint}')

    def metrics(self, metrics: Mapping[str, tuple[torch.Tensor, str]]) -> None:
        """Check the names, shapes and reductions of all metrics."""
        check_names(self, "metrics reports", dict.fromkeys(metrics, 0.0))
        for name, (values, how) in metrics.items():
            is_known = how in ("K", "N", "U", "max", "min")
            hint = "it is a mean over K, N or U, or max, min"
            self.require(is_known, f"the metric {name} is joined by {how!r}; {hint}")
            (most,) = self.sizes[how if how in self.sizes else "K"]
            fits = values.ndim == 1 and len(values) <= most
            hint = f"give one value for each of its axis {how}, at most {most} here"
            self.require(fits, f"the metric {name} has shape {tuple(values.shape)}; {hint}")

    def total(self, losses: Mapping[str, Loss]) -> torch.Tensor:
        """Return the total loss of the batch, shape (). Check that it depends on the models and is finite."""
        reduction = Reduction(self.batch)
        groups = torch.from_numpy(self.batch.group_of_N)
        parts = [loss.coef * reduction(loss, self.view, groups, first=True) for loss in losses.values()]
        total = torch.stack(parts).sum()
        self.require(
            total.requires_grad,
            "no loss depends on what the models gave; compute it from `outputs`, without detach() or no_grad",
        )
        hint = "look for log(0), 0/0, or exp of much, also where a mask will be 0"
        self.require(torch.isfinite(total), f"the loss is {float(total.detach())}; {hint}")
        return total

    def reached(self, leaves: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Check that every trained model has a gradient, and that the gradient is finite and not 0."""
        for model, given in leaves.items():
            gradients = {
                name: leaf.grad
                for name, leaf in given.items()
                if leaf.grad is not None and bool((leaf.grad != 0).any())
            }
            names = ", ".join(sorted(given))
            hint = f"no loss depends on its {names}, or each is flat there; use `outputs`"
            self.require(gradients, f"no gradient reaches the {model}: {hint}")
            for name, gradient in gradients.items():
                hint = "look for log(0), 0/0, or exp of much"
                is_finite = torch.isfinite(gradient).all()
                self.require(is_finite, f"the gradient of {name} of the {model} is not finite; {hint}")


def check_names(part: Part, what: str, metrics: Mapping[str, float]) -> None:
    """Check that every metric's name is in the list of `oat.metrics` or begins with `user/`."""
    try:
        Metrics().add(metrics)
    except OatError as error:
        raise ContractError(f"{part.name}: {what} a name that no list knows: {error}") from error
