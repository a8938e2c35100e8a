"""Checks of policy gradients that a step and its groups are large enough: with one response, some settings
make every advantage 0, or have no effect."""

from collections.abc import Iterator

from oat.algorithms.policy_gradient_config import ADVANTAGES, PolicyGradientConfig
from oat.types.part import Check, RunFacts


def group_checks(config: PolicyGradientConfig, run: RunFacts) -> Iterator[Check]:
    """Yield the checks of settings that need several responses in a group, in a step, or several groups."""
    c, size = config, run.num_recorded or config.samples
    is_alone, is_single = size == 1, size * c.prompts == 1
    is_recorded = bool(run.num_recorded)
    more = "name further columns in prompts.responses" if is_recorded else "raise algorithm.samples"
    yield Check(
        "prompts.responses" if is_recorded else "algorithm.samples",
        is_alone and c.advantage in ADVANTAGES and c.compares_groups,
        f"with algorithm.advantage {c.advantage} a group needs at least 2 responses a prompt; "
        f"{'name further columns' if is_recorded else 'raise it'}, or set algorithm.advantage to none",
    )
    yield Check(
        "algorithm.advantage",
        is_single and c.advantage == "batch_mean" and c.credit == "response",
        "a step has one response, whose reward minus the step's mean is 0; raise algorithm.prompts, or set "
        "it to none",
    )
    yield Check(
        "algorithm.whiten_over",
        is_alone and c.whiten and c.whiten_over == "group" and not c.tokens_differ,
        "a group has one response, whose tokens have equal advantages, so that all are 0 after it; set it to "
        f"step, or {more}",
    )
    yield Check(
        "algorithm.whiten",
        is_single and c.whiten and not c.tokens_differ,
        "a step has one response, whose tokens have equal advantages, so that all are 0 after it; raise "
        "algorithm.prompts, or set it to false",
    )
    alone = "a score that is alone in its"
    yield Check(
        "algorithm.rewards.sources",
        is_alone and c.rewards.sources == "group",
        f"{alone} group is 0 after it; set it to batch or running, or {more}",
    )
    yield Check(
        "algorithm.rewards.sources",
        is_single and c.rewards.sources == "batch",
        f"{alone} step is 0 after it; set it to running, or raise algorithm.prompts",
    )
    what = "a group has one response, so that none has spread" if is_alone else "a step has one group"
    yield Check(
        "algorithm.rewards.flat_group_weight",
        c.rewards.flat_group_weight is not None and (is_alone or c.prompts == 1),
        f"{what}, and every weight is 1; {more if is_alone else 'raise algorithm.prompts'}, or remove it",
    )
