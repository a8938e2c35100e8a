"""Checks of samples: whether they suit the algorithm and the explorer."""

from collections.abc import Iterator

from oat.resolve.resolved import Resolved
from oat.types.part import Check


def suits_algorithm(resolved: Resolved) -> Iterator[Check]:
    """Check that an algorithm with importance ratios gets fresh samples, drawn with a known probability."""
    config, is_ratio_based = resolved.config, resolved.requires.ratio_based
    name, oracle = config.algorithm.name, config.oracle
    ratio = f"{name} divides by the probability of sampling"
    yield Check(
        "sampling.temperature",
        is_ratio_based and config.sampling.temperature == 0,
        f"{ratio}; set it above 0",
    )
    yield Check(
        "oracle.max_outstanding",
        is_ratio_based and oracle.max_outstanding,
        f"{name} needs answers about its newest samples; set it to 0",
    )
    yield Check(
        "oracle.max_wait_s",
        is_ratio_based and oracle.max_wait_s is not None and oracle.max_answer_age != 0,
        f"{name} needs answers about its newest samples, and late ones would be learned from at a later "
        "step; set oracle.max_answer_age to 0",
    )
    yield Check(
        "prompts.responses",
        is_ratio_based and bool(config.prompts.responses) and not resolved.objective.takes_recorded,
        f"{ratio}, which recorded responses lack; choose another algorithm",
    )


def suits_refill(resolved: Resolved) -> Iterator[Check]:
    """Check that a step which asks again in place of useless questions waits for all of its answers, and that
    the algorithm reads them."""
    config, field = resolved.config, "sampling.refill_rounds"
    refills = config.sampling.refill_rounds > 0
    why = "a step asks further questions when it has all answers to the earlier ones"
    yield Check(
        field,
        refills and config.oracle.max_outstanding,
        f"{why}; set oracle.max_outstanding to 0, or remove sampling.refill_rounds",
    )
    yield Check(
        field,
        refills and config.oracle.max_wait_s is not None,
        f"{why}; remove oracle.max_wait_s, or sampling.refill_rounds",
    )
    yield Check(
        field,
        refills and not resolved.objective.reads_answers,
        f"{config.algorithm.name} reads no answers, so every question is as good as another; remove it",
    )


def suits_explorer(resolved: Resolved) -> Iterator[Check]:
    """Check that an explorer gets the samples and scores that it needs. Without an explorer, check that the
    two responses of a pair can differ."""
    config, requires = resolved.config, resolved.requires
    sampling, is_recorded = config.sampling, bool(config.prompts.responses)
    planned, widened = resolved.plan.samples, resolved.widened.samples
    yield Check(
        "explorer.name",
        is_recorded and resolved.explorer.needs,
        f"it needs {', '.join(sorted(resolved.explorer.needs))}, without which recorded responses come; "
        "remove the explorer, or prompts.responses",
    )
    yield Check(
        "explorer.name",
        is_recorded and widened != planned,
        f"it wants {dict(widened)} responses a prompt instead of {dict(planned)}, and there are those of "
        "prompts.responses alone; let its widen leave samples as they are, or remove one of the two",
    )
    yield Check(
        "explorer.name",
        config.explorer.name != "none" and resolved.plan.branching is not None,
        "algorithm.advantage vine needs the scores of all responses and branches, and an explorer leaves "
        "some out; remove the explorer",
    )
    is_one_response = len(requires.slots) == 1 and (sampling.temperature == 0 or sampling.top_k == 1)
    yield Check(
        "sampling.temperature",
        requires.feedback == "compare"
        and not is_recorded
        and config.explorer.name == "none"
        and is_one_response,
        "both samples of a pair would be the same, and nothing could be learned; set a temperature above 0 "
        "and top_k other than 1",
    )
