"""Lines of `oat check` about amounts: the prompts, responses, queries and optimiser steps of one step, and of
all steps that are left."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from oat.assemble.run_inputs import RunInputs
from oat.config.settings import BufferConfig
from oat.errors import many
from oat.forecast.highest_cost import lines_of_costs, queries_of_a_response
from oat.loop import Run
from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved
from oat.types import Plan, Price

Lines = Iterator[tuple[str, str]]
"""Lines of the table that `oat check` prints, as pairs (name, text). A line with the name "" continues the
line above it."""


def step_lines(resolved: Resolved, run: Run, dearest: Price) -> Lines:
    """Yield the lines about one step: its prompts, responses, questions, queries and optimiser steps. With
    `sampling.refill_rounds`, one line has the largest numbers that all rounds together may reach.

    Args:
        dearest: the highest price of a question of training, as `dearest_question` returns it.
    """
    config = resolved.config
    plan = run.plans(0)
    recorded = bool(config.prompts.responses)
    samples = _samples(resolved, run)
    responses = plan.prompts * samples
    queries = plan.questions * dearest.queries
    one = _unit_sampled(resolved)
    turns = "of turns " if one == "episode" else ""
    of = "recorded" if recorded else f"{turns}of at most {config.sampling.max_new_tokens} tokens"
    asked = f"{many(plan.questions, 'question')}, {_queries(queries)}"
    yield (
        "a step",
        f"{many(plan.prompts, 'prompt')} x {samples} = {many(responses, one)} {of}; {asked}",
    )
    yield from _branch_lines(plan)
    if (rounds := resolved.most_rounds) > 1:
        yield (
            "",
            f"up to {many(rounds - 1, 'further round')} in place of questions that teach nothing: in all at "
            f"most {many(rounds * plan.prompts, 'prompt')}, {many(rounds * responses, one)}, "
            f"{many(rounds * plan.questions, 'question')}, {_queries(rounds * queries)}",
        )
    epochs, minibatches = resolved.step.epochs, resolved.step.minibatches
    is_pair = resolved.requires.feedback == "compare"
    units, unit = (plan.questions, "pair") if is_pair else (responses, one)
    size, tokens = config.learner.micro_batch_size, run.learner.micro_batch_tokens
    most = " and ".join(
        [*([many(size, "row")] if size else []), *([many(tokens, "token")] if tokens else [])]
    )
    bound = config.learner.max_updates
    bounded = (
        f", of which {bound} {'is' if bound == 1 else 'are'} done"
        if bound is not None and bound < epochs * minibatches
        else ""
    )
    each = (
        f"{many(epochs, 'epoch')} x {many(minibatches, 'mini-batch')} = "
        f"{many(epochs * minibatches, 'optimiser step')}{bounded}"
        f"{'' if resolved.step.target_kl is None else ', or fewer (algorithm.target_kl)'}"
    )
    if not resolved.objective.learns:
        yield "", "the policy does not learn"
        return
    yield "", f"{each}, each of {many(math.ceil(units / minibatches), unit)}, in passes of at most {most}"
    if (buffer := config.learner.buffer) is not None:
        yield "a buffer", _buffered(resolved, buffer)


def _branch_lines(plan: Plan) -> Lines:
    if (b := plan.branching) is None:
        return
    total = plan.prompts * (plan.most_candidates - plan.responses)
    yield (
        "",
        f"further {many(b.branches, 'branch')} from the beginning of each step of a response but the first, "
        f"of at most {b.most_steps}: at most {many(total, 'branch')}, which are scored like responses",
    )


@dataclass(frozen=True)
class Begun:
    """The steps that a run has done. For a fork that is still to be made: the steps that the original run had
    done at the checkpoint with which the fork begins.

    Attributes:
        steps: number of steps that are done.
        queries: number of queries that these steps have spent.
        prompts: number of prompts that were taken; None if no step is done.
    """

    steps: int
    queries: int
    prompts: int | None = None


def run_lines(resolved: Resolved, run: Run, run_inputs: RunInputs, dearest: Price, begun: Begun) -> Lines:
    """Yield the lines about the costs of the run, and about all steps that are left.

    Args:
        dearest: the highest price of a question of training, as `dearest_question` returns it.
        begun: the steps that are done.
    """
    last, questions = run.stop.last, resolved.most_rounds * run.plans(0).questions
    left = None if last is None else max(0, last - begun.steps)
    for costs in lines_of_costs(resolved, run_inputs, dearest, questions, left):
        yield "cost", costs
    queries = questions * dearest.queries
    yield (
        "the run",
        _over(resolved, run, run_inputs, begun)
        or (
            _until_spent(resolved, queries, begun)
            if last is None
            else _all_steps(resolved, run, run_inputs, queries, begun, last)
        ),
    )


def _over(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun) -> str:
    """Return, in words, why no step is left to do. Return "" if a step is left, or if no step has been done
    yet."""
    most, spent = resolved.config.stop.max_queries, begun.queries
    if not begun.steps:
        return ""
    if (over := run.stop.steps_done(begun.steps)) is not None:
        return f"{over}, and nothing is left to do; {spent} queries are spent"
    if _prompts_left(resolved, run, run_inputs, begun) <= 0:
        return (
            f"all prompts are used up (prompts.epochs) after step {begun.steps}, and nothing is left to do; "
            f"{spent} queries are spent"
        )
    if most is None or spent < most:
        return ""
    return (
        f"{spent} queries are spent (stop.max_queries {most}) after step {begun.steps}, and nothing is left "
        "to do"
    )


def _limits(resolved: Resolved) -> str:
    """Return, in words, the budgets and hours that may end the run."""
    stop = resolved.config.stop
    limits = {
        "max_queries": stop.max_queries,
        "max_tokens": stop.max_tokens,
        "max_cost": stop.max_cost,
        "max_hours": stop.max_hours,
    }
    return " or ".join(f"stop.{name} {limit:g}" for name, limit in limits.items() if limit is not None)


def _until_spent(resolved: Resolved, queries: int, begun: Begun) -> str:
    """Describe in words the remaining steps, for a run that only a budget or a clock ends.

    Args:
        queries: the largest number of queries that a step may make.
    """
    most = resolved.config.stop.max_queries
    after = f" after step {begun.steps}" if begun.steps else ""
    steps = ""
    if most and queries:
        least = math.ceil(max(0, most - begun.queries) / queries)
        steps = f", after {many(least, 'more step' if begun.steps else 'step')} at least"
    spent = f"; {begun.queries} queries are spent" if begun.steps else ""
    return f"steps{after} until {_limits(resolved)}{steps}{spent}"


def _all_steps(
    resolved: Resolved, run: Run, run_inputs: RunInputs, queries: int, begun: Begun, last: int
) -> str:
    """Describe in words the steps that a run still has to do. The run's number of steps is known.

    Args:
        queries: the largest number of queries that a step may make.
        last: number of steps of the run.
    """
    most, rounds = resolved.config.stop.max_queries, resolved.most_rounds
    a_step, size = run.plans(0).prompts, run_inputs.prompts.size
    steps = max(0, last - begun.steps)
    budget = math.inf if most is None else max(0, most - begun.queries)
    prompts_left = _prompts_left(resolved, run, run_inputs, begun)
    prompts, most_prompts = (int(min(times * steps * a_step, prompts_left)) for times in (1, rounds))
    times = (
        f"of {size}"
        if prompts < size or prompts < most_prompts
        else _each(prompts, size, is_exact=begun.steps * a_step % size == 0)
    )
    beside = f" beside {begun.queries} that are spent" if begun.steps else ""
    samples = _samples(resolved, run)
    dearest = min(steps * queries, math.ceil(most_prompts / a_step) * queries // rounds)
    taken = (
        f"{_span(prompts, most_prompts, 'prompt')} ({times}), "
        f"{_span(prompts * samples, most_prompts * samples, _unit_sampled(resolved))}, "
        f"{_queries(int(min(dearest, budget)))}{beside}"
    )
    updates = resolved.optimiser_steps(last) - resolved.optimiser_steps(min(begun.steps, last))
    until = _limits(resolved)
    after = f" after step {begun.steps}" if begun.steps else ""
    bounded = "at most " if _may_end_early(resolved, run, run_inputs, begun, steps) else ""
    fewer = bounded if resolved.step.target_kl is None else "at most "
    return (
        f"{bounded}{many(steps, 'step')}{after}: {taken}, {fewer}{many(updates, 'optimiser step')}"
        f"{f'; or until {until}' if until else ''}"
    )


def _prompts_left(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun) -> float:
    """Return the number of prompts that the run has not taken yet; infinite without `prompts.epochs`. With
    `sampling.refill_rounds`, only a checkpoint tells how many prompts the steps so far have taken."""
    epochs, taken = resolved.config.prompts.epochs, begun.steps * run.plans(0).prompts
    if epochs is None:
        return math.inf
    if resolved.most_rounds > 1 and begun.prompts is not None:
        taken = begun.prompts
    return max(0, epochs * run_inputs.prompts.size - taken)


def _may_end_early(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun, steps: int) -> bool:
    """Return True if further rounds (`sampling.refill_rounds`) may use up the prompts before the run has done
    `steps` more steps."""
    most = resolved.most_rounds * steps * run.plans(0).prompts
    return resolved.most_rounds > 1 and most > _prompts_left(resolved, run, run_inputs, begun)


def _span(least: int, most: int, what: str) -> str:
    return many(most, what) if least == most else f"{least} to {many(most, what)}"


def evaluation_lines(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun) -> Lines:
    """Yield the lines about evaluations: when they are due, and how many responses and queries each one
    has."""
    e, last = resolved.config.evaluation, run.stop.last
    done = begun.steps
    if e is None:
        return
    is_rarer = bool(e.every_queries or e.every_hours)
    when = (
        f"{'' if done else 'before the first step, '}every "
        f"{many(e.every, 'step')}{' at most' if is_rarer else ''}, and at the end"
    )
    count = (
        None
        if last is None
        else max(0, (done == 0) + last // e.every - done // e.every + (last % e.every > 0 and last > done))
    )
    left = 0 if last is None else max(0, last - done)
    most = "at most " if _may_end_early(resolved, run, run_inputs, begun, left) else ""
    times = f": {most}{many(count, 'time')}" if count else ""
    if run_inputs.pairs is not None:
        yield (
            "evaluation",
            (
                f"{when}{times}; {many(run_inputs.pairs.size, 'pair')} that are never learned, and nobody is "
                "asked"
            ),
        )
    if run_inputs.held_out is None:
        return
    responses = run_inputs.held_out.size * (e.samples + e.greedy + bool(e.best_of))
    kinds = (
        (e.samples, f"{e.samples} sampled"),
        (e.greedy, "1 greedy"),
        (e.best_of, f"the best of {e.best_of}"),
    )
    parts = " + ".join(text for is_there, text in kinds if is_there)
    prompts = many(run_inputs.held_out.size, "prompt")
    plan, is_pair = run.plans(0), resolved.requires.feedback == "compare"
    questions = resolved.most_rounds * plan.questions
    online = questions * (2 if is_pair else plan.responses) if e.online else 0
    learned = f", and the step's own {online}" if online else ""
    sampled = many(responses, _unit_sampled(resolved))
    yield "evaluation", f"{when}{times}; each {prompts} x ({parts}) = {sampled}{learned}"
    for purpose, (address, oracle) in run_inputs.evaluation_oracles.items():
        is_free = resolved.evaluation_oracles[purpose].name in BUILTIN
        one = 0 if is_free else queries_of_a_response(oracle, address, purpose, run_inputs.held_out)
        priced = one * (responses + online)
        total = priced * (count or 0) - (0 if done else one * online)
        yield (
            "",
            f"{_queries(priced)} each"
            + (f", {total} in all" if count and priced else "")
            + f", of {address}",
        )


def _each(prompts: int, size: int, *, is_exact: bool) -> str:
    """Describe in words how often each prompt is taken.

    Args:
        prompts: number of prompts that are taken.
        size: number of prompts of an epoch.
        is_exact: True if the first of these prompts begins an epoch.
    """
    times, more = divmod(prompts, size) if is_exact else (round(prompts / size), 0)
    often = "once" if times == 1 else f"{times:,} times"
    return f"each {'' if is_exact else 'about '}{often}" + (f", {more} of them once more" if more else "")


def _buffered(resolved: Resolved, buffer: BufferConfig) -> str:
    """Describe in words what a step learns from with a replay buffer: at most how many questions, in at most
    how many optimiser steps."""
    questions = resolved.widened.questions
    takes = math.ceil(buffer.questions / questions)
    fullest = min(takes, buffer.clear_every or takes)
    cleared = f", cleared every {many(buffer.clear_every, 'step')}" if buffer.clear_every else ""
    steps = many(resolved.optimiser_steps(fullest) - resolved.optimiser_steps(fullest - 1), "optimiser step")
    return (
        f"the newest {many(min(buffer.questions, fullest * questions), 'question')}{cleared}: up to "
        f"{steps} a step"
    )


def _unit_sampled(resolved: Resolved) -> str:
    """Return what one sample of the run is called."""
    return "response" if resolved.config.sampling.environment is None else "episode"


def _samples(resolved: Resolved, run: Run) -> int:
    """Return the number of responses per prompt, without branches."""
    return len(resolved.config.prompts.responses) or run.plans(0).responses


def _queries(count: int) -> str:
    return f"at most {'1 query' if count == 1 else f'{count} queries'}" if count else "no queries"
