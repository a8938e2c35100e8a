"""Checks of the section `algorithm`."""

import math
from collections.abc import Iterator

from oat.explore.settings import ensemble_of, model_labels_of
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def sizes(resolved: Resolved) -> Iterator[Check]:
    """Check the sizes of a step:

    * It has at least one prompt, one epoch and one mini-batch.
    * It has at most as many mini-batches as units. For a user's algorithm this is not checked, since its
      number of units is not known.
    * If the algorithm learns from comparisons and there is no explorer, every prompt has two responses.
    """
    config, step = resolved.config, resolved.step
    recorded = len(config.prompts.responses)
    is_compared = resolved.requires.feedback == "compare"
    rows = recorded or resolved.widened.responses
    is_ours = ":" not in config.algorithm.name
    units = resolved.widened.questions * (1 if is_compared else rows) if is_ours else math.inf
    for name in ("prompts", "epochs", "minibatches"):
        yield Check(f"algorithm.{name}", config.algorithm.options.get(name, 1) < 1, "it must be at least 1")
    yield Check(
        "algorithm.minibatches",
        step.minibatches > units,
        f"a step has at most {units} {'pairs' if is_compared else 'rows'}; lower it, or raise "
        "algorithm.prompts",
    )
    left_out = sorted(resolved.plan.samples.keys() - resolved.widened.samples.keys())
    yield Check(
        "explorer.name",
        not recorded and left_out,
        f"{config.algorithm.name} learns from responses of {', '.join(left_out)}, and this explorer samples "
        "none; remove the section explorer, or take another algorithm",
    )
    samples = "algorithm.name" if step.samples is None else "algorithm.samples"
    yield Check(
        "prompts.responses" if recorded else samples,
        is_compared and config.explorer.name == "none" and rows != 2,
        f"a comparison without an explorer is of 2 responses a prompt, not {rows}; give 2, or choose an "
        "explorer",
    )


def something_learns(resolved: Resolved) -> Iterator[Check]:
    """Check that a run whose policy does not learn has an ensemble that does."""
    ensemble = ensemble_of(resolved.explorer)
    yield Check(
        "algorithm.name",
        not resolved.objective.learns and not (ensemble is not None and ensemble.learn),
        "its policy does not learn, and this run has no ensemble that does; set explorer: {name: ensemble}",
    )


def soft_labels(resolved: Resolved) -> Iterator[Check]:
    """Check that the loss weighs both winners of a pair if the ensemble gives soft labels."""
    labels = model_labels_of(resolved.explorer)
    yield Check(
        "explorer.model_labels.labels",
        labels is not None and labels.labels == "soft" and not resolved.objective.weighs_winners,
        f"{resolved.config.algorithm.name} takes one winner of a pair; give hard or sampled",
    )


def frozen_policy(resolved: Resolved) -> Iterator[Check]:
    """Check that an evaluation samples only from a policy that the algorithm trains. An algorithm for reward
    models trains no policy."""
    objective = resolved.objective
    held_out = objective.setting_for.get("held_out")
    yield Check(
        "algorithm.name",
        "policy" not in objective.wants and resolved.config.answering is not None,
        "its policy does not learn, so an evaluation of what it samples says nothing; remove "
        "evaluation.path, and name held-out pairs in evaluation.pairs"
        + (f", or set algorithm.{held_out}" if held_out else ""),
    )
