"""Rows of `oat check` about amounts: the prompts, responses, queries and optimiser steps of one step, and of
all steps that are left."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from oat.assemble.run_inputs import RunInputs
from oat.forecast.highest_cost import cost_rows, queries_of_a_response
from oat.forecast.rows import Row
from oat.loop import Run
from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved
from oat.types import Price

Rows = Iterator[Row | str]
"""What `oat check` tells: rows of its table, and sentences that stand below the table."""


def step_rows(resolved: Resolved, run: Run, dearest: Price) -> Rows:
    """Yield the rows about one step: its prompts, responses, questions, queries and optimiser steps. With
    `sampling.refill_rounds`, they have the largest numbers that all rounds together may reach.

    Args:
        dearest: the highest price of a question of training, as `dearest_question` returns it.
    """
    config, plan, rounds = resolved.config, run.plans(0), resolved.most_rounds
    samples, unit = _samples(resolved, run), _unit_sampled(resolved)
    responses, most = plan.prompts * samples, ", most" if rounds > 1 else ""
    sampled = "prompts.responses" if config.prompts.responses else "algorithm.samples"
    if rounds > 1:
        yield Row("rounds a step, most", rounds, "rounds", "sampling.refill_rounds")
    yield Row(f"prompts a step{most}", rounds * plan.prompts, "prompts", "algorithm.prompts")
    yield Row("responses a prompt", samples, unit, sampled)
    yield Row(f"responses a step{most}", rounds * responses, unit, sampled)
    if not config.prompts.responses:
        a_turn = "tokens a turn" if unit == "episodes" else "tokens"
        yield Row("longest response", config.sampling.max_new_tokens, a_turn, "sampling.max_new_tokens")
    if (b := plan.branching) is not None:
        branches = plan.prompts * (plan.most_candidates - plan.responses)
        yield Row("branches a step of a response", b.branches, "branches", "algorithm.vine.branches")
        yield Row("steps of a response, most", b.most_steps, "steps", "algorithm.vine.most_steps")
        yield Row("branches a step, most", branches, "branches", "algorithm.vine.branches")
    yield Row(f"questions a step{most}", rounds * plan.questions, "questions", "algorithm.prompts")
    yield Row("queries a step, most", rounds * plan.questions * dearest.queries, "queries", "oracle.name")
    yield from _update_rows(resolved, run, responses, unit)


def _update_rows(resolved: Resolved, run: Run, responses: int, unit: str) -> Rows:
    """Yield the rows about the optimiser steps of a step.

    Args:
        responses: number of responses of a round, in units of this name.
    """
    config, step, bound = resolved.config, resolved.step, resolved.config.learner.max_updates
    planned = step.epochs * step.minibatches
    if not resolved.objective.learns:
        yield Row("optimiser steps a step", 0, "steps", "algorithm.name")
        return
    yield Row("epochs a step", step.epochs, "epochs", "algorithm.epochs")
    yield Row("mini-batches an epoch", step.minibatches, "mini-batches", "algorithm.minibatches")
    why = "algorithm.epochs" if bound is None or bound >= planned else "learner.max_updates"
    is_most, why = (True, "algorithm.target_kl") if step.target_kl is not None else (False, why)
    done = planned if bound is None else min(bound, planned)
    yield Row(f"optimiser steps a step{', most' if is_most else ''}", done, "steps", why)
    if resolved.requires.feedback == "compare":
        responses, unit = run.plans(0).questions, "pairs"
    size = math.ceil(responses / step.minibatches)
    yield Row(f"{unit} an optimiser step", size, unit, "algorithm.minibatches")
    if config.learner.micro_batch_size:
        yield Row("rows a pass, most", config.learner.micro_batch_size, "rows", "learner.micro_batch_size")
    if tokens := run.learner.micro_batch_tokens:
        yield Row("tokens a pass, most", tokens, "tokens", "learner.micro_batch_tokens")
    if (buffer := config.learner.buffer) is not None:
        asked = resolved.widened.questions
        takes = math.ceil(buffer.questions / asked)
        fullest = min(takes, buffer.clear_every or takes)
        held = min(buffer.questions, fullest * asked)
        steps = resolved.optimiser_steps(fullest) - resolved.optimiser_steps(fullest - 1)
        yield Row("questions in the buffer, most", held, "questions", "learner.buffer.questions")
        yield Row("optimiser steps with a full buffer, most", steps, "steps", "learner.buffer.questions")
        if buffer.clear_every:
            yield Row(
                "steps until the buffer is cleared", buffer.clear_every, "steps", "learner.buffer.clear_every"
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


def run_rows(resolved: Resolved, run: Run, run_inputs: RunInputs, dearest: Price, begun: Begun) -> Rows:
    """Yield the rows about the costs of the run, and about all steps that are left.

    Args:
        dearest: the highest price of a question of training, as `dearest_question` returns it.
        begun: the steps that are done.
    """
    last, questions = run.stop.last, resolved.most_rounds * run.plans(0).questions
    left = None if last is None else max(0, last - begun.steps)
    yield from cost_rows(resolved, run_inputs, dearest, questions, left)
    if begun.steps:
        yield Row("steps done", begun.steps, "steps", "run_dir")
        yield Row("queries spent", begun.queries, "queries", "oracle.name")
    stop = resolved.config.stop
    for name, unit in (("queries", "queries"), ("tokens", "tokens"), ("cost", "money"), ("hours", "hours")):
        if (limit := getattr(stop, f"max_{name}")) is not None:
            yield Row(f"{unit} of the run, limit", limit, unit, f"stop.max_{name}")
    if over := _over(resolved, run, run_inputs, begun):
        yield Row("steps left", 0, "steps", "stop")
        yield f"{over}, and nothing is left to do"
    elif last is not None:
        yield from _all_steps(resolved, run, run_inputs, questions * dearest.queries, begun, last)
    elif stop.max_queries and dearest.queries:
        least = math.ceil(max(0, stop.max_queries - begun.queries) / (questions * dearest.queries))
        yield Row("steps left, least", least, "steps", "stop.max_queries")


def _over(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun) -> str:
    """Return, in words, why no step is left to do. Return "" if a step is left, or if no step has been done
    yet."""
    most, spent = resolved.config.stop.max_queries, begun.queries
    if not begun.steps:
        return ""
    if (over := run.stop.steps_done(begun.steps)) is not None:
        return over
    if _prompts_left(resolved, run, run_inputs, begun) <= 0:
        return f"all prompts are used up (prompts.epochs) after step {begun.steps}"
    if most is None or spent < most:
        return ""
    return f"{spent} queries are spent (stop.max_queries {most}) after step {begun.steps}"


def _all_steps(
    resolved: Resolved, run: Run, run_inputs: RunInputs, queries: int, begun: Begun, last: int
) -> Rows:
    """Yield rows about the steps that a run still has to do. The run's number of steps is known.

    Args:
        queries: the largest number of queries that a step may make.
        last: number of steps of the run.
    """
    most, rounds = resolved.config.stop.max_queries, resolved.most_rounds
    a_step, size = run.plans(0).prompts, run_inputs.prompts.size
    steps = max(0, last - begun.steps)
    budget = math.inf if most is None else max(0, most - begun.queries)
    left = _prompts_left(resolved, run, run_inputs, begun)
    prompts, most_prompts = (int(min(times * steps * a_step, left)) for times in (1, rounds))
    samples, unit = _samples(resolved, run), _unit_sampled(resolved)
    dearest = min(steps * queries, math.ceil(most_prompts / a_step) * queries // rounds)
    updates = resolved.optimiser_steps(last) - resolved.optimiser_steps(min(begun.steps, last))
    bounded = ", most" if _may_end_early(resolved, run, run_inputs, begun, steps) else ""
    why = "prompts.epochs" if resolved.config.stop.max_steps is None else "stop.max_steps"
    yield Row(f"steps left{bounded}", steps, "steps", why)
    spans = [("", prompts)] if prompts == most_prompts else [(", least", prompts), (", most", most_prompts)]
    for end, count in spans:
        yield Row(f"prompts left{end}", count, "prompts", why)
        yield Row(f"times each prompt is taken{end}", count / size, "times", "prompts.path")
        yield Row(f"responses left{end}", count * samples, unit, why)
    yield Row("queries left, most", int(min(dearest, budget)), "queries", "oracle.name")
    is_most = bounded or resolved.step.target_kl is not None
    yield Row(f"optimiser steps left{', most' if is_most else ''}", updates, "steps", why)


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


def evaluations_left(resolved: Resolved, last: int | None, done: int) -> int | None:
    """Return how many evaluations the run still makes; None if its number of steps is not known.

    Args:
        last: number of steps of the run; None: no limit.
        done: number of steps that are done.
    """
    e = resolved.config.evaluation
    if e is None:
        return 0
    if last is None:
        return None
    return max(0, (done == 0) + last // e.every - done // e.every + (last % e.every > 0 and last > done))


def evaluation_rows(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: Begun) -> Rows:
    """Yield the rows about evaluations: when they are due, and how many responses and queries each one
    has."""
    e, last, done = resolved.config.evaluation, run.stop.last, begun.steps
    if e is None:
        return
    is_rarer = bool(e.every_queries or e.every_hours)
    yield Row(
        f"steps between evaluations{', least' if is_rarer else ''}", e.every, "steps", "evaluation.every"
    )
    count = evaluations_left(resolved, last, done)
    if count:
        early = _may_end_early(resolved, run, run_inputs, begun, max(0, (last or 0) - done))
        is_most = early or is_rarer
        name = f"evaluations left{', most' if is_most else ''}"
        yield Row(name, count, "evaluations", "evaluation.every")
    if run_inputs.pairs is not None:
        yield Row("held-out pairs", run_inputs.pairs.size, "pairs", "evaluation.pairs")
    if run_inputs.held_out is None:
        return
    unit = _unit_sampled(resolved)
    for field, responses in (("samples", e.samples), ("greedy", int(e.greedy)), ("best_of", e.best_of)):
        if responses:
            name = {"best_of": "responses the best of which counts"}.get(field, f"{field} a held-out prompt")
            yield Row(name, responses, unit, f"evaluation.{field}")
    responses = run_inputs.held_out.size * (e.samples + e.greedy + bool(e.best_of))
    plan, is_pair = run.plans(0), resolved.requires.feedback == "compare"
    questions = resolved.most_rounds * plan.questions
    online = questions * (2 if is_pair else plan.responses) if e.online else 0
    yield Row("responses an evaluation", responses, unit, "evaluation.path")
    if online:
        yield Row("responses of the step an evaluation", online, unit, "evaluation.online")
    for purpose, (address, oracle) in run_inputs.evaluation_oracles.items():
        is_free = resolved.evaluation_oracles[purpose].name in BUILTIN
        one = 0 if is_free else queries_of_a_response(oracle, address, purpose, run_inputs.held_out)
        priced, of = one * (responses + online), " of gold" if purpose == "gold" else ""
        setting = "evaluation.gold" if purpose == "gold" else "evaluation.oracle"
        yield Row(f"oracle{of or ' of evaluations'}", address, "", setting)
        yield Row(f"queries{of} an evaluation, most", priced, "queries", setting)
        if count and priced:
            total = priced * count - (0 if done else one * online)
            yield Row(f"queries{of} in all evaluations, most", total, "queries", setting)


def _unit_sampled(resolved: Resolved) -> str:
    """Return what the samples of the run are called."""
    return "responses" if resolved.config.sampling.environment is None else "episodes"


def _samples(resolved: Resolved, run: Run) -> int:
    """Return the number of responses per prompt, without branches."""
    return len(resolved.config.prompts.responses) or run.plans(0).responses
