"""Checks of the section `oracle`."""

from collections.abc import Iterator

from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def environment(resolved: Resolved) -> Iterator[Check]:
    yield Check(
        "oracle.name",
        resolved.config.oracle.name == "environment" and not resolved.config.sampling.environment,
        "name the environment in sampling.environment",
    )


def reads_answers(resolved: Resolved) -> Iterator[Check]:
    """Check that the algorithm reads the oracle's answers. A built-in oracle such as `recorded` passes
    this check, since it is not asked."""
    oracle, setting = resolved.config.oracle.name, resolved.objective.setting_for.get("answers")
    yield Check(
        f"algorithm.{setting or 'name'}",
        not resolved.objective.reads_answers and oracle not in BUILTIN,
        f"nothing would read the answers of {oracle}; "
        f"{f'set algorithm.{setting}, or ' if setting else ''}learn from prompts.responses with oracle.name "
        "recorded, which costs nothing (evaluation.oracle may still name another)",
    )
