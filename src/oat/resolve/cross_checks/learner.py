"""Checks of the section `learner`."""

from collections.abc import Iterator

from oat.resolve.resolved import Resolved
from oat.types.part import Check


def memory(resolved: Resolved) -> Iterator[Check]:
    yield Check(
        "learner.micro_batch_tokens",
        resolved.config.learner.micro_batch_tokens == "auto" and resolved.config.compute.memory_gb is None,
        "set compute.memory_gb, what the learner may take",
    )


def critic(resolved: Resolved) -> Iterator[Check]:
    last, alone = resolved.config.stop.max_steps, resolved.config.learner.critic_only_steps
    yield Check(
        "learner.critic_only_steps",
        "critic" in resolved.requires.models and last is not None and 0 < last <= alone,
        f"the run has {last} steps, so the policy would never learn; lower it, or raise stop.max_steps",
    )


def updates(resolved: Resolved) -> Iterator[Check]:
    """Check that an update which may end early has more than one optimiser step."""
    yield Check(
        "learner.max_updates",
        resolved.config.learner.max_updates == 1 and resolved.step.target_kl is not None,
        "an update is then one optimiser step, at which the KL is 0, so algorithm.target_kl can end none; "
        "raise it, or remove one of the two",
    )


def buffer(resolved: Resolved) -> Iterator[Check]:
    """Check that the algorithm may learn again from older samples, and that the buffer has room for the
    questions of a step."""
    given = resolved.config.learner.buffer
    name = resolved.config.algorithm.name
    is_ratio_based = resolved.requires.ratio_based
    others = sorted(resolved.requires.slots - {"sampler"})
    reason = (
        f"{name} divides by the probability of sampling, and would learn from what older weights sampled"
        if is_ratio_based
        else f"{name} sets samples of {', '.join(others)} against those of the policy as it is"
        if others
        else f"{name} does not say that it is sound on what older weights sampled (`reuses` of "
        "oat/algorithms/base.py)"
    )
    yield Check(
        "learner.buffer",
        given and (is_ratio_based or others or not resolved.objective.reuses),
        f"{reason}; remove it, algorithm.epochs is there",
    )
    questions = resolved.widened.questions
    yield Check(
        "learner.buffer",
        given and given.questions < questions,
        f"a step takes {questions} questions, of which some would never be learned; raise it to as many or "
        "more",
    )
