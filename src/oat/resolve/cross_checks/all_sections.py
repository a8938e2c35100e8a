"""All checks between settings, in the order in which they are made."""

from collections.abc import Callable, Iterator

from oat.config.load import where
from oat.config.settings import Component
from oat.errors import ConfigError
from oat.resolve.cross_checks import (
    alarms,
    algorithm,
    checkpoint,
    compute,
    engine,
    evaluation,
    learner,
    model,
    oracle,
    render,
    sampling,
    stop,
    tracking,
    unread,
)
from oat.resolve.parts import setting
from oat.resolve.resolved import Resolved
from oat.types.part import Check

_ORDER: tuple[Callable[[Resolved], Iterator[Check]] | str, ...] = (
    "algorithm",
    algorithm.sizes,
    compute.gpus,
    compute.actors,
    model.precision,
    learner.memory,
    stop.ends,
    tracking.shown_metrics,
    oracle.environment,
    render.examples,
    oracle.reads_answers,
    evaluation.has_responses,
    sampling.suits_algorithm,
    sampling.suits_refill,
    sampling.suits_explorer,
    model.weights,
    engine.suits_run,
    engine.suits_proof,
    engine.suits_records,
    "engine",
    checkpoint.ranking,
    evaluation.oracles,
    evaluation.measures,
    algorithm.something_learns,
    algorithm.soft_labels,
    algorithm.frozen_policy,
    render.system,
    evaluation.pairs,
    "evaluation",
    learner.updates,
    learner.buffer,
    learner.critic,
    "learner",
)
"""Checks in the order in which they are made; the first mistake is reported. The name of a section stands for
the checks that parts make of this section. `check_settings` makes further checks after these."""


def check_settings(resolved: Resolved) -> None:
    """Refuse settings that contradict each other, and settings that nothing reads in this combination. Checks
    that do not refuse every run are left to `assemble/late_checks.py`.

    Raises:
        ConfigError: a setting is refused. The message names its place and its field, and says what to do.
    """
    others = [check for check in resolved.part_checks if check.field.split(".")[0] not in _ORDER]
    for check in [*(check for group in _ORDER for check in _checks(resolved, group)), *others]:
        if check.is_wrong and check.refuses == "always":
            raise ConfigError(message_of(resolved, check))
    unread.refuse_unread(resolved)
    alarms.refuse_silent(resolved)


def _checks(resolved: Resolved, group: Callable[[Resolved], Iterator[Check]] | str) -> Iterator[Check]:
    if not isinstance(group, str):
        yield from group(resolved)
        return
    for check in resolved.part_checks:
        if check.field.startswith(f"{group}."):
            yield check


def message_of(resolved: Resolved, check: Check) -> str:
    """Return the message of a check that is wrong: the place of its setting, the setting and its value, and
    what is wrong."""
    path = tuple(check.field.split("."))
    value = setting(resolved.config, path)
    value = value.name if isinstance(value, Component) else value
    return (
        f"{where(path, resolved.origins)}: {check.field} is "
        f"{'not set' if value is None else repr(value)}: {check.why}"
    )
