"""Functions that make the oracles of a run, and check that its budgets and deadlines can be kept with
them."""

from collections.abc import Mapping
from typing import Any

from oat.config.settings import Config, OracleConfig
from oat.errors import ConfigError
from oat.oracles.base import Oracle
from oat.oracles.builtin import BUILTIN, KnownOracle
from oat.oracles.make import build_oracle, name_source
from oat.oracles.preferences import Preferences
from oat.plugins.loading import load_symbol
from oat.resolve.environment import environment_part
from oat.resolve.parts import run_facts
from oat.resolve.resolved import Resolved
from oat.types import Kind
from oat.types.questions import Budget

Addressed = tuple[str, Oracle]
"""An oracle's address, which is its name in the ledger; and the oracle."""


def training_oracle(resolved: Resolved) -> tuple[Addressed, Oracle]:
    """Make the oracle that training asks.

    Returns:
        The oracle that is asked, with its address; and the oracle that the configuration names. They differ
        only if the algorithm learns from comparisons and the named oracle gives scores. The oracle that is
        asked then makes preferences of these scores.

    Raises:
        ConfigError: the oracle cannot be made, does not give the feedback that the algorithm learns from, or
            cannot be asked within the budget or the deadline.
    """
    config, kind = resolved.config, resolved.requires.feedback
    name = config.oracle.name
    oracle = _named(config, name, config.oracle.options, kind)
    _check_outage(config, name, oracle)
    if oracle.answers == "compare" and config.oracle.scale != OracleConfig.scale:
        raise ConfigError(
            f"oracle.scale is {config.oracle.scale}, and {name} compares by itself; nothing reads it, "
            "remove it"
        )
    address, asked = name, oracle
    if kind != oracle.answers:
        if kind == "score":
            raise ConfigError(
                f"oracle {name} compares pairs, and {config.algorithm.name} learns from scores; use a "
                "scoring oracle"
            )
        address, asked = f"{name}/preferences", Preferences(oracle, config.oracle.scale)
    if config.oracle.repeats > 1 and asked.reads_group:
        raise ConfigError(
            f"oracle.repeats is {config.oracle.repeats}, and {name} gets whole groups, so that no reward is "
            "used again; set oracle.whole_groups: false if the reward of a response depends on this response "
            "alone, or leave oracle.repeats out"
        )
    _check_price(resolved.budgets["train"], address, asked, "stop")
    resolved.objective.check_answers(asked.gives_steps is not None, asked.sources)
    return (address, asked), oracle


def by_field(training: Addressed, evaluating: Mapping[str, Addressed]) -> dict[str, Addressed]:
    """Return each oracle with its address, by the field that names it.

    Args:
        evaluating: the oracles of evaluations, by purpose.
    """
    fields = {"eval": "evaluation.oracle", "gold": "evaluation.gold"}
    return {"oracle": training, **{fields[purpose]: each for purpose, each in evaluating.items()}}


def evaluation_oracles(resolved: Resolved, trained: Oracle) -> dict[str, Addressed]:
    """Make the oracles that evaluations ask, by the purpose of the questions.

    The section of each of these oracles is compared with the first earlier section that has the same `name`;
    training's section comes before all others. If their options are equal, both get the same oracle. If their
    options differ, the later section gets an oracle of its own, with the address `NAME/PURPOSE`. If there is
    no earlier section with this name, the address is the name. If training compares episodes by the rewards
    of their environment, an evaluation gets an oracle of its own too, which scores.

    Args:
        trained: the oracle that the section `oracle` names.

    Raises:
        ConfigError: an oracle cannot be made, gives scores that mean nothing by themselves, or cannot be
            asked within the budget or the deadline.
    """
    config = resolved.config
    made: dict[str, tuple[Mapping[str, Any], Oracle]] = {config.oracle.name: (config.oracle.options, trained)}
    found = {}
    for purpose, section in resolved.evaluation_oracles.items():
        name = address = section.name
        field = "evaluation.gold" if purpose == "gold" else "evaluation.oracle"
        # rewards of an environment are scores, also where training compares two episodes by them
        is_compared = name == "environment" and trained.answers == "compare"
        if is_compared or (name in made and made[name][0] != section.options):
            address = f"{name}/{purpose}"
        if address not in made:
            with resolved.error_context(field):
                made[address] = (section.options, _named(config, name, section.options, "score"))
        oracle = made[address][1]
        _check_outage(config, name, oracle)
        with resolved.error_context(field):
            if oracle.is_relative:
                raise ConfigError(
                    f"the scores of {name} are relative to those that are asked about together "
                    "(`normalise: group` or `batch`), so that their mean is about 0 whatever the model does; "
                    f"name another {field}, such as the mixture with `normalise: none` or `fixed`"
                )
        limits = "evaluation.gold" if purpose == "gold" else "evaluation"
        _check_price(resolved.budgets[purpose], name, oracle, limits)
        found[purpose] = (address, oracle)
    return found


def _named(config: Config, name: str, options: Mapping[str, Any], kind: Kind) -> Oracle:
    if name not in BUILTIN:
        oracle = build_oracle(name, options, "cuda" if config.compute.profile == "gpu" else "cpu")
        oracle.tell(run_facts(config))
        return oracle
    known = KnownOracle(name, kind)
    environment = environment_part(config)
    if name == "environment" and environment is not None:
        name_source(known, load_symbol(environment.name), environment.name)
    return known


def _check_price(budget: Budget, name: str, oracle: Oracle, section: str) -> None:
    """Refuse a budget in tokens or money if the oracle states no prices. Refuse a budget in money if the
    oracle does not know what a token costs. If a budget in tokens or money is accepted, tell the oracle that
    a budget binds it."""
    if not oracle.names_price and (budget.tokens is not None or budget.cost is not None):
        field = f"{section}.max_tokens" if budget.tokens is not None else f"{section}.max_cost"
        raise ConfigError(
            f"{field} is set, and the oracle {name} does not say what a question costs; give it a method "
            "`price`, or remove it"
        )
    if not oracle.names_cost and budget.cost is not None:
        raise ConfigError(
            f"{section}.max_cost is set, and the oracle {name} does not know what a token costs; give it "
            "prices, or remove it"
        )
    if budget.tokens is not None or budget.cost is not None:
        oracle.bind()


def _check_outage(config: Config, name: str, oracle: Oracle) -> None:
    """Refuse an `oracle.deadline_s` that is not longer than the oracle's `max_outage_s`. In an outage,
    questions would otherwise fail before the outage is long enough to end the run."""
    outage_s, deadline_s = oracle.max_outage_s, config.oracle.deadline_s
    if outage_s is not None and deadline_s <= outage_s:
        raise ConfigError(
            f"oracle.deadline_s is {deadline_s:g}, and the oracle {name} has max_outage_s: {outage_s:g}, "
            "so questions would fail in an outage that is to end the run; set oracle.deadline_s above it, or "
            "a shorter max_outage_s"
        )
