"""How long a run takes, measured: a few steps of the real run, in a temporary directory.

The steps are those of the loop: the engine samples real responses to the run's prompts, and the learner
learns from them. No oracle is asked, since its answers may cost: responses get random scores. If a step takes
long, steps with fewer prompts are measured, and their time is scaled to the number of prompts.

Settings that may be faster are tried in turns with the run's own, on the same prompts and responses.
"""

import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from oat.assemble.evaluation import held_out_pairs
from oat.assemble.run import build
from oat.assemble.run_inputs import RunInputs, gather_inputs
from oat.collector import Collector
from oat.control.stages import tell
from oat.errors import ConfigError, OatWarning
from oat.evaluation.evaluation import Evaluation
from oat.forecast.estimate import Lengths, estimate
from oat.forecast.faster import Trial
from oat.hardware.memory import free_memory
from oat.hardware.threads import candidates, on_threads
from oat.learner.learner import Learner
from oat.learner.limits import GB
from oat.loop import Row, Run, fill, learn, publish_weights, save, states, take
from oat.models.outline_errors import NotOutlinedError
from oat.oracles.base import Oracle
from oat.oracles.builtin import BUILTIN, KnownOracle
from oat.resolve.resolved import Resolved
from oat.rollout.actor import Actor
from oat.seeds import Seeds
from oat.types import Answer, Feedback, Kind, Mark, Plan, Prompt, Question

STEPS = 3
"""Steps that are measured, after one that warms up."""
_ENOUGH_S = 40.0
"""Seconds that the measured steps shall take together. Where whole steps take longer, theirs are smaller."""
_EVALUATION_S = 10.0
"""The same for an evaluation."""
_FEW = 16
"""Least number of responses that are measured: fewer fill no pass."""


class RandomOracle(KnownOracle):
    """An oracle that answers with random numbers, free of charge.

    Args:
        answers: the kind of its questions.
        reads_group: see `Oracle`.
    """

    def __init__(self, answers: Kind, *, reads_group: bool = False):
        super().__init__("random", answers)
        self.reads_group = reads_group

    def answer(self, question: Question) -> Answer:
        values = Seeds(0).at("random", str(question.key)).random(question.size).tolist()
        marks: list[Mark] = ["ok"] * question.size
        return Answer(question.key, tuple(values), tuple(marks), queries=0, by="random")


@dataclass(frozen=True)
class Times:
    """What was measured, in seconds.

    Attributes:
        start: from the configuration to the first step.
        steps: the parts of each measured step, "sampling", "learning" and "weights", scaled to whole steps.
        tokens: mean number of tokens of a response.
        measured: number of prompts of a measured step.
        prompts: number of prompts of a whole step.
        evaluations: an evaluation, as often as it was measured; empty if the run has none.
        checkpoint: how long the loop waits for a checkpoint.
        faster: by setting, how many times as fast a step is with it and with those before it.
    """

    start: float
    steps: list[dict[str, float]]
    tokens: float
    measured: int
    prompts: int
    evaluations: list[float]
    checkpoint: float
    faster: dict[str, float] = field(default_factory=dict)


def measure_times(resolved: Resolved, lengths: Lengths) -> Times:
    """Take a few steps of the run in a temporary directory, and measure them. Then try settings that may be
    faster. Nothing stays on disk, and no oracle is asked.

    Args:
        resolved: the configuration. It is used for no run afterwards.

    Raises:
        ConfigError: the boxes of the run are not in one process.
        OatError: a part cannot be made as configured.
    """
    if (runtime := resolved.config.compute.runtime) != "local":
        raise ConfigError(
            f"--time measures a run in one process, and compute.runtime is {runtime}; leave out --time, or "
            "add --compute.runtime local"
        )
    tell("measuring a few steps")
    counts = candidates(0)
    with ExitStack() as left:
        scratch = Path(left.enter_context(tempfile.TemporaryDirectory()))
        left.enter_context(on_threads(None))  # making a run sets the number of threads
        left.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", OatWarning)  # the check has given them
        begin = time.perf_counter()
        resolved = _alone(resolved)
        run_inputs = _unasked(gather_inputs(resolved, folder=scratch))
        run = build(resolved, directory=scratch, run_inputs=run_inputs)
        left.callback(run.ledger.close)
        left.callback(run.tracking.close)
        run.weights.restore(run.learner)
        start = time.perf_counter() - begin
        whole = run.plans(0)
        run, steps, feedback = _steps(run, whole, resolved.step.minibatches)
        measured = len(feedback.items)
        evaluations = _evaluations(resolved, run, run_inputs)
        after = feedback.step + 1
        checkpoint = seconds_of(lambda: save(run, after, states(run, after), is_last=False))
        run.checkpoints.wait()
        assert isinstance(run.learner, Learner), "nothing goes through the wire here"
        learned = run.buffer.fill(feedback)
        trial = Trial(resolved, run, run.learner, actor_of(run), learned, partial(_fits, lengths))
        parts = {name: statistics.mean(step[name] for step in steps) for name in steps[0]}
        faster = trial.faster(parts["sampling"], parts["learning"], parts["weights"], counts)
        rows = [row for item in feedback.items for row in item.group.trajectories]
        tokens = statistics.mean(float(row.trained.sum()) for row in rows)
        return Times(start, steps, tokens, measured, whole.prompts, evaluations, checkpoint, faster)


def _alone(resolved: Resolved) -> Resolved:
    """Return the configuration of a run that tells no sink, and that neither a budget nor its prompts end."""
    config = resolved.config
    most = config.stop.max_steps
    stop = replace(
        config.stop,
        max_queries=None,
        max_tokens=None,
        max_cost=None,
        max_hours=None,
        max_steps=None if most is None else max(most, 2 + STEPS),
    )
    return replace(
        resolved,
        config=replace(
            config,
            prompts=replace(config.prompts, epochs=None),
            stop=stop,
            compute=replace(config.compute, serialise=False),
            tracking=replace(config.tracking, sinks=(), tensorboard=False),
        ),
    )


def _unasked(run_inputs: RunInputs) -> RunInputs:
    """Return the inputs with oracles that answer with random numbers, in place of those that may cost."""

    def free(addressed: tuple[str, Oracle]) -> tuple[str, Oracle]:
        address, oracle = addressed
        if address in BUILTIN:
            return addressed
        return address, RandomOracle(oracle.answers, reads_group=oracle.reads_group)

    return replace(
        run_inputs,
        training_oracle=free(run_inputs.training_oracle),
        evaluation_oracles={name: free(each) for name, each in run_inputs.evaluation_oracles.items()},
        closing=[*run_inputs.closing, *(oracle.close for oracle in run_inputs.oracles.values())],
    )


def _steps(run: Run, whole: Plan, minibatches: int) -> tuple[Run, list[dict[str, float]], Feedback]:
    """Take a step that warms up, and `STEPS` more.

    Returns:
        The run with the plan of the measured steps; the seconds of the parts of each step, scaled to whole
        steps; and what the last step learned from.
    """
    a_prompt = max(1, whole.questions // whole.prompts)
    few = min(whole.prompts, max(-(-_FEW // max(1, whole.responses)), -(-minibatches // a_prompt)))
    run = _with_prompts(run, whole, few)
    first = sum(_step(run, Row(1))[0].values())
    run = _with_prompts(run, whole, max(few, int(few * _ENOUGH_S / (STEPS * first))))
    plan, found = run.plans(0), []
    for number in range(2, 2 + STEPS):
        parts, feedback = _step(run, Row(number))
        found.append(parts)
    grown = _growth(run, feedback, whole)
    scales = {"sampling": grown, "learning": whole.prompts / plan.prompts, "weights": 1.0}
    return run, [{name: scales[name] * value for name, value in parts.items()} for parts in found], feedback


def _with_prompts(run: Run, whole: Plan, prompts: int) -> Run:
    """Return the run with steps of at most this many prompts."""
    prompts = min(prompts, whole.prompts)
    plan = replace(whole, prompts=prompts, questions=max(1, whole.questions * prompts // whole.prompts))
    assert isinstance(run.collector, Collector), "nothing goes through the wire here"
    run.collector.plans = lambda step: plan
    return replace(run, plans=lambda step: plan)


def _step(run: Run, row: Row) -> tuple[dict[str, float], Feedback]:
    """Take the step of a row, and return the seconds of its parts, and what it learned from."""
    begin = time.perf_counter()
    fill(run, row.step)
    feedback = take(run, row.step)
    sampled = time.perf_counter() - begin
    parts = {
        "sampling": sampled,
        "learning": seconds_of(learn, run, row, feedback),
        "weights": seconds_of(partial(publish_weights, is_due=run.weights.due(row.step)), run, row),
    }
    return parts, feedback


def _growth(run: Run, feedback: Feedback, whole: Plan) -> float:
    """Return how many times as long a whole step samples as a measured one. More rows are decoded faster
    each, so the rows of the second half of the measured step are the measure of further ones."""
    plan = run.plans(0)
    more = whole.prompts / plan.prompts - 1
    actor = actor_of(run)
    if not more or plan.prompts == 1 or actor is None:
        return 1 + more
    prompts = [item.group.prompt for item in feedback.items]

    def sampled(some: Sequence[Prompt]) -> float:
        place = ("train", feedback.step, 0)
        return min(seconds_of(actor.sample, some, plan.samples, place) for _ in range(2))

    less, all = sampled(prompts[: len(prompts) // 2]), sampled(prompts)
    return 1 + more * min(1.0, max(0.0, 2 * (all - less) / all))


def actor_of(run: Run) -> Actor | None:
    """Return the actor that samples; None if responses are recorded."""
    assert isinstance(run.collector, Collector), "nothing goes through the wire here"
    return run.collector.actor if isinstance(run.collector.actor, Actor) else None


def _evaluations(resolved: Resolved, run: Run, run_inputs: RunInputs) -> list[float]:
    """Return the seconds of two evaluations; empty if the run has none."""
    found: list[list[float]] = []
    if run_inputs.pairs is not None:

        def measure(count: int) -> float:
            pairs = held_out_pairs(resolved, run_inputs, run.learner, run.seeds)
            assert pairs is not None, "there are pairs"
            pairs.prompts = _spread(pairs.prompts, count)
            pairs.measure()  # computes the reference, once in a run
            return seconds_of(pairs.measure)

        found.append(_scaled(measure, run_inputs.pairs.size, _FEW))
    if isinstance(evaluation := run.evaluation, Evaluation):
        prompts, numbers = evaluation.prompts, itertools.count()

        def evaluate(count: int) -> float:
            evaluation.prompts = _spread(prompts, count)
            return seconds_of(evaluation.run, next(numbers))

        responses = sum(mode.best_of or mode.samples for mode in evaluation.modes)
        found.append(_scaled(evaluate, len(prompts), -(-_FEW // responses)))
    return [sum(parts) for parts in zip(*found, strict=True)]


def _scaled(work: Callable[[int], float], size: int, few: int) -> list[float]:
    """Return the seconds of a work for `size` prompts, twice. If this takes long, measure fewer prompts, and
    add for each further prompt what one took beyond the first `few`.

    Args:
        work: does the work for a number of prompts, and returns its seconds.
    """
    few = min(few, size)
    first = work(few)
    count = max(few, min(size, int(few * _EVALUATION_S / first)))
    found = [work(count) for _ in range(2)]
    a_prompt = min(found) / count
    if count > few:
        a_prompt = min(a_prompt, max(0.0, (min(found) - first) / (count - few)))
    return [seconds + a_prompt * (size - count) for seconds in found]


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return this number of prompts, evenly spaced."""
    places = [place * len(prompts) // count for place in range(count)]
    return [replace(prompts[place], occurrence=number) for number, place in enumerate(places)]


def _fits(lengths: Lengths, resolved: Resolved) -> bool:
    """Return True if a run fits into memory, as far as an estimate tells."""
    given = resolved.config.compute.memory_gb
    limit = free_memory(resolved.config.compute.profile) if given is None else int(given * GB)
    with suppress(NotOutlinedError):
        return limit is None or estimate(resolved, lengths).peak <= limit
    return True


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Call a function, and return how long it took."""
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin
