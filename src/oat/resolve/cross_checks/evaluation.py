"""Checks of the section `evaluation`."""

from collections.abc import Iterator

from oat.evaluation.records import RECORD, TURNS
from oat.oracles.builtin import BUILTIN
from oat.oracles.extraction import load_extractor
from oat.resolve.oracles import evaluation_oracles_of
from oat.resolve.resolved import Resolved, evaluation_budgets
from oat.types import ENSEMBLE
from oat.types.part import Check


def has_responses(resolved: Resolved) -> Iterator[Check]:
    e = resolved.config.answering
    yield Check(
        "evaluation.samples",
        e and not e.samples and not e.greedy and not e.best_of,
        "no responses to evaluate; set it, or evaluation.greedy",
    )
    yield Check(
        "evaluation.best_of",
        e and e.best_of and ENSEMBLE not in resolved.explorer.needs,
        "the best response is that of the explorer's ensemble, and this run has none; remove it, or set "
        "explorer: {name: ensemble}",
    )


def oracles(resolved: Resolved) -> Iterator[Check]:
    """Check the oracles of evaluations. Each must be able to score new responses. An oracle that costs
    nothing must have no budget."""
    config = resolved.config
    field_of = {"eval": "evaluation.oracle", "gold": "evaluation.gold"}
    names = {field_of[purpose]: judge.name for purpose, judge in evaluation_oracles_of(config).items()}
    limited = {field_of[purpose]: budget.is_limited for purpose, budget in evaluation_budgets(config).items()}
    for field, name in names.items():
        yield Check(
            field,
            name == "recorded",
            "evaluation samples new responses, and the oracle recorded knows only recorded ones; name an "
            "oracle that can score them",
        )
    for field, name in names.items():
        yield Check(
            field,
            name == "environment" and not config.sampling.environment,
            "name it in sampling.environment",
        )
    for field, name in names.items():
        yield Check(
            field,
            name in BUILTIN and limited[field],
            f"{name} costs nothing; remove max_queries and the like",
        )


def measures(resolved: Resolved) -> Iterator[Check]:
    """Check that an evaluation has the samples and columns that its metrics and records need.

    Raises:
        ConfigError: `evaluation.answers` names no function.
    """
    config, e = resolved.config, resolved.config.answering
    if e is None:
        return
    if e.answers is not None:
        load_extractor(e.answers)
    few = f"evaluation.samples is {e.samples}, and no k may be more; lower it, or raise evaluation.samples"
    yield Check(
        "evaluation.online",
        e.online and bool(config.prompts.responses),
        "training draws no responses where they are recorded; remove it",
    )
    yield Check(
        "evaluation.kl",
        e.kl and not e.samples,
        "it is estimated from sampled responses; set evaluation.samples",
    )
    yield Check(
        "evaluation.kl",
        e.kl and e.slot == "reference",
        "the slot is the reference itself, so it would be 0; remove it",
    )
    yield Check("evaluation.pass_at", any(k > e.samples for k in e.pass_at), few)
    yield Check("evaluation.majority_at", any(k > e.samples for k in e.majority_at), few)
    yield Check(
        "evaluation.majority_at",
        e.majority_at and e.answers is None,
        "say what the answer in a response is; set evaluation.answers",
    )
    yield Check(
        "prompts.prompt_key",
        config.prompts.prompt_key in (RECORD if config.sampling.environment is None else (*RECORD, TURNS)),
        "records of an evaluation have a field of that name; rename the column",
    )


def pairs(resolved: Resolved) -> Iterator[Check]:
    """Check the data of an evaluation:

    * It has prompts or held-out pairs.
    * If it has held-out pairs, the algorithm's loss can be computed on recorded pairs.
    * If evaluations are due after a number of queries (`every_queries`), training makes queries.
    """
    config, requires = resolved.config, resolved.requires
    e, name = config.evaluation, config.algorithm.name
    if e is None:
        return
    others = sorted(requires.slots - {"sampler"})
    yield Check(
        "evaluation.path",
        e.path is None and e.pairs is None,
        "name prompts that the model answers, or recorded pairs in evaluation.pairs",
    )
    yield Check(
        "evaluation.pairs",
        e.pairs and requires.feedback != "compare",
        f"{name} learns from scores and not from pairs; remove it",
    )
    yield Check(
        "evaluation.pairs",
        e.pairs and requires.ratio_based,
        f"{name} divides by the probability of sampling; remove it",
    )
    yield Check(
        "evaluation.pairs",
        e.pairs and others,
        f"{name} learns from responses of {', '.join(others)}, which recorded ones are not; remove it",
    )
    yield Check(
        "evaluation.every_queries",
        e.every_queries is not None and config.oracle.name in BUILTIN,
        f"{config.oracle.name} costs no queries; set every, or every_hours",
    )
