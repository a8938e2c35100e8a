"""`oat check`: a run that is made without weights and not begun, and what it would do.

Every box is made as `oat train` makes it, of tensors that have a shape and no memory, so whatever refuses
there refuses here, in the same words. Not seen without weights: numbers in them that are not finite, and a
model whose attention turns out to be none that this engine's cache can follow.
"""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from oat.build.defaults import derived
from oat.build.fingerprints import recorded
from oat.build.fork import Origin
from oat.build.highest_cost import dearest_question, lines_of_costs, refuse_small_budget
from oat.build.memory import lengths_of, memory_lines, refuse_short_cache, refuse_too_large
from oat.build.open_run import outlined, refuse_changes, settled
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.commands.show_tokens import token_lines
from oat.config.secrets import Hider
from oat.config.settings import BufferConfig, Config
from oat.files import bytes_free, seen
from oat.learner.learner import Learner
from oat.learner.limits import GB
from oat.learner.models import LanguageModel
from oat.loop import Run
from oat.models.nf4 import count
from oat.oracles.builtin import BUILTIN
from oat.oracles.preferences import Preferences
from oat.reports.terminal import many
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.reading import read_metrics
from oat.tracking.sinks import refuse_missing, sinks_of
from oat.types import Price

_MOMENTS = 2
"""Of AdamW, each as large as the weights that learn."""
_UNITS = ((GB, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


def check_run(
    resolved: Resolved,
    source: str | None = None,
    *,
    accept_changed: Collection[str] = (),
    with_tokens: bool = False,
    with_memory: bool = False,
) -> list[str]:
    """What a resolved configuration would run, in lines for people.

    Args:
        source: "RUN@STEP" or "RUN", of which it would be a fork.
        accept_changed: as for `open_run`.
        with_tokens: also an example of what is learned from, token by token.
        with_memory: also how much memory it needs; takes seconds.

    Raises:
        OatError: `oat train` would refuse it before its first step.
    """
    refuse_missing(resolved.config.tracking, resolved.origins)
    resolved, origin = settled(resolved, source)
    config = resolved.config
    directory, step = (seen(config.run_dir), None) if origin is None else (origin.run, origin.step)
    run_inputs = gather_inputs(resolved, known=recorded(directory, step))
    lengths = lengths_of(run_inputs)
    refuse_short_cache(resolved, lengths, run_inputs.outline)
    memory = refuse_too_large(resolved, lengths, run_inputs.outline)
    refuse_changes(resolved, run_inputs, directory / "ledger.sqlite", accept_changed, step)
    is_begun = origin is None and (directory / "config.yaml").exists()
    most = dearest_question(resolved, run_inputs)
    refuse_small_budget(resolved, most, is_begun=is_begun)
    refuse_weights(
        resolved,
        run_inputs,
        is_begun=bool(Checkpoints(directory / "checkpoints", every=1, keep_last=1).steps),
    )
    with outlined(resolved, run_inputs) as run:
        assert isinstance(run.learner, Learner), "nothing goes through the wire here"
        begun = _begun(config, origin)
        lines = [
            *_model(run.learner),
            *_data(run_inputs),
            *_step(resolved, run, run_inputs),
            *_rest(resolved, run, run_inputs, most, *begun),
        ]
        lines += [
            *_evaluations(resolved, run, run_inputs, begun[0]),
            *_checkpoints(config, run.learner, origin, run.stop.last),
        ]
        lines += [
            *_places(config, run.learner),
            *_defaults(resolved),
            *_sinks(config),
            ("memory", memory),
            *(("note", note) for note in run.notes),
        ]
    table = [f"  {name:<13}{text}" for name, text in lines]
    return [
        *table,
        *(token_lines(resolved, run_inputs) if with_tokens else []),
        *(memory_lines(resolved, lengths) if with_memory else []),
    ]


_Lines = Iterator[tuple[str, str]]


def _model(learner: Learner) -> _Lines:
    policy = learner.models["policy"]
    assert isinstance(policy, LanguageModel)
    lm = policy.lm
    parameters = sum(count(lm).values())
    learning = sum(parameter.numel() for parameter in lm.trainable().values())
    yield (
        "model",
        (
            f"a {lm.model_type} of {parameters / 1e6:.3g} million parameters, of which {learning / 1e6:.3g} "
            "million learn"
        ),
    )


def _data(run_inputs: RunInputs) -> _Lines:
    held_out = f"; {run_inputs.held_out.size} held out" if run_inputs.held_out else ""
    what = " with the longest response" if run_inputs.prompts.has_responses else ""
    yield (
        "prompts",
        f"{run_inputs.prompts.size}, at most {run_inputs.prompts.longest} tokens long{what}{held_out}",
    )


def _sinks(config: Config) -> _Lines:
    """Who else gets the rows, and what of a service's is named."""
    named = []
    for sink in sinks_of(config.tracking):
        about = [str(sink.options[name]) for name in ("mode", "tracking_uri") if sink.options.get(name)] + [
            "with texts"
        ] * sink.samples
        named.append(f"{sink.name} ({', '.join(about)})" if about else sink.name)
    if named:
        yield "sinks", Hider({}).text(", ".join(named))


def _begun(config: Config, origin: Origin | None) -> tuple[int, int]:
    """Steps that are done, here or where the fork begins, and queries that were spent by then."""
    own, stored = seen(config.run_dir), _stored(config)
    step, directory = (
        (stored, own) if stored is not None else (origin.step, origin.run) if origin else (0, None)
    )
    if directory is None or step == 0:
        return 0, 0
    spent = [
        row["oracle/queries"]
        for row in read_metrics(directory / "metrics.jsonl")
        if row["step"] <= step and "oracle/queries" in row
    ]
    return step, int(spent[-1]) if spent else 0


def _stored(config: Config) -> int | None:
    """The step of the checkpoint that the run in the directory goes on from."""
    return Checkpoints(seen(config.run_dir) / "checkpoints", every=1, keep_last=1).next_loaded


def _step(resolved: Resolved, run: Run, run_inputs: RunInputs) -> _Lines:
    """The arithmetic of a step."""
    config = resolved.config
    plan = run.plans(0)
    recorded = bool(config.prompts.responses)
    samples = _samples(config, run)
    responses, queries = plan.prompts * samples, plan.questions * _price(config, run_inputs, samples)
    of = "recorded" if recorded else f"of at most {config.sampling.max_new_tokens} tokens"
    asked = f"{many(plan.questions, 'question')}, {_queries(queries)}"
    yield (
        "a step",
        f"{many(plan.prompts, 'prompt')} x {samples} = {many(responses, 'response')} {of}; {asked}",
    )
    epochs, minibatches = resolved.step.epochs, resolved.step.minibatches
    is_pair = resolved.requires.feedback == "compare"
    units, unit = (plan.questions, "pair") if is_pair else (responses, "response")
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
    )
    yield "", f"{each}, each of {many(math.ceil(units / minibatches), unit)}, in passes of at most {most}"
    if (buffer := config.learner.buffer) is not None:
        yield "a buffer", _buffered(resolved, buffer)


def _rest(
    resolved: Resolved, run: Run, run_inputs: RunInputs, dearest: Price, begun: int, spent: int
) -> _Lines:
    """The arithmetic of all steps that are left.

    Args:
        dearest: question.
        begun: steps that are done.
        spent: queries of theirs.
    """
    config, last = resolved.config, run.stop.last
    stop = config.stop
    plan = run.plans(0)
    samples = _samples(config, run)
    queries = plan.questions * _price(config, run_inputs, samples)
    for costs in lines_of_costs(
        resolved, run_inputs, dearest, plan.questions, None if last is None else max(0, last - begun)
    ):
        yield "cost", costs
    limits = {
        "max_queries": stop.max_queries,
        "max_tokens": stop.max_tokens,
        "max_cost": stop.max_cost,
        "max_hours": stop.max_hours,
    }
    until = " or ".join(f"stop.{name} {limit:g}" for name, limit in limits.items() if limit is not None)
    left = math.inf if stop.max_queries is None else max(0, stop.max_queries - spent)
    after, beside = (f" after step {begun}", f" beside {spent} that are spent") if begun else ("", "")
    if begun and (over := run.stop.steps_done(begun)) is not None:
        yield "the run", f"{over}, and nothing is left to do; {spent} queries are spent"
        return
    if begun and left == 0:
        yield (
            "the run",
            (
                f"{spent} queries are spent (stop.max_queries {stop.max_queries}) after step {begun}, and "
                "nothing is left to do"
            ),
        )
        return
    if last is None:
        least = (
            many(math.ceil(left / queries), "more step" if begun else "step")
            if stop.max_queries and queries
            else ""
        )
        steps = f", after {least} at least" if least else ""
        yield (
            "the run",
            f"steps{after} until {until}{steps}" + (f"; {spent} queries are spent" if begun else ""),
        )
        return
    steps_left, size = max(0, last - begun), run_inputs.prompts.size
    prompts = min(
        steps_left * plan.prompts,
        max(0, size * config.prompts.epochs - begun * plan.prompts) if config.prompts.epochs else math.inf,
    )
    times = (
        f"of {size}"
        if prompts < size
        else _each(int(prompts), size, is_exact=begun * plan.prompts % size == 0)
    )
    asked = _queries(int(min(steps_left * queries, left))) + beside
    taken = f"{many(int(prompts), 'prompt')} ({times}), {many(int(prompts * samples), 'response')}, {asked}"
    updates = many(
        resolved.optimiser_steps(last) - resolved.optimiser_steps(min(begun, last)), "optimiser step"
    )
    yield (
        "the run",
        f"{many(steps_left, 'step')}{after}: {taken}, {updates}" + (f"; or until {until}" if until else ""),
    )


def _each(prompts: int, size: int, *, is_exact: bool) -> str:
    """How often each prompt comes where so many are taken of so many; it can be said exactly where the first
    one begins an epoch."""
    times, more = divmod(prompts, size) if is_exact else (round(prompts / size), 0)
    often = "once" if times == 1 else f"{times:,} times"
    return f"each {'' if is_exact else 'about '}{often}" + (f", {more} of them once more" if more else "")


def _buffered(resolved: Resolved, buffer: BufferConfig) -> str:
    """What a step learns from beside its own take, when it has the most."""
    questions = resolved.widened.questions
    takes = math.ceil(buffer.questions / questions)
    fullest = min(takes, buffer.clear_every or takes)
    cleared = f", cleared every {many(buffer.clear_every, 'step')}" if buffer.clear_every else ""
    steps = many(resolved.optimiser_steps(fullest) - resolved.optimiser_steps(fullest - 1), "optimiser step")
    return (
        f"the newest {many(min(buffer.questions, fullest * questions), 'question')}{cleared}: up to "
        f"{steps} a step"
    )


def _price(config: Config, run_inputs: RunInputs, samples: int) -> int:
    """The most queries that a question of training may cost."""
    if config.oracle.name in BUILTIN:
        return 0
    (oracle,) = run_inputs.asked.values()
    return samples if oracle.answers == "score" else 2 if isinstance(oracle, Preferences) else 1


def _samples(config: Config, run: Run) -> int:
    """Responses a prompt."""
    return len(config.prompts.responses) or sum(run.plans(0).samples.values())


def _queries(count: int) -> str:
    return f"at most {'1 query' if count == 1 else f'{count} queries'}" if count else "no queries"


def _size(count: int) -> str:
    """Bytes for people."""
    unit = next(unit for unit in _UNITS if count >= unit[0])
    return f"{count / unit[0]:.3g} {unit[1]}"


def _evaluations(resolved: Resolved, run: Run, run_inputs: RunInputs, begun: int) -> _Lines:
    e, last = resolved.config.evaluation, run.stop.last
    if e is None:
        return
    is_rarer = bool(e.every_queries or e.every_hours)
    when = (
        f"{'' if begun else 'before the first step, '}every "
        f"{many(e.every, 'step')}{' at most' if is_rarer else ''}, and at the end"
    )
    count = (
        None
        if last is None
        else max(0, (begun == 0) + last // e.every - begun // e.every + (last % e.every > 0 and last > begun))
    )
    times = f": {many(count, 'time')}" if count else ""
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
    responses = run_inputs.held_out.size * (e.samples + e.greedy)
    parts = " + ".join(
        [*([f"{e.samples} sampled"] if e.samples else []), *(["1 greedy"] if e.greedy else [])]
    )
    prompts = many(run_inputs.held_out.size, "prompt")
    plan, is_pair = run.plans(0), resolved.requires.feedback == "compare"
    online = plan.questions * (2 if is_pair else sum(plan.samples.values())) if e.online else 0
    learned = f", and the step's own {online}" if online else ""
    yield "evaluation", f"{when}{times}; each {prompts} x ({parts}) = {many(responses, 'response')}{learned}"
    for purpose, (address, _) in run_inputs.judges.items():
        priced = 0 if resolved.judges[purpose].name in BUILTIN else responses + online
        total = priced * (count or 0) - (online if priced and not begun else 0)
        yield (
            "",
            f"{_queries(priced)} each"
            + (f", {total} in all" if count and priced else "")
            + f", of {address}",
        )


def _checkpoints(config: Config, learner: Learner, origin: Origin | None, last: int | None) -> _Lines:
    """Args: last: steps of the run."""
    c = config.checkpoint
    sizes = {
        name: sum(parameter.nbytes for parameter in part.model.trainable().values())
        for name, part in learner.trained.items()
    }
    # the sampler's weights, the reference's
    copies = (config.learner.sync_every > 1) + (learner.following is not None)
    size = (1 + _MOMENTS) * sum(sizes.values()) + copies * sizes.get("policy", 0)
    directory = seen(config.run_dir)
    kept, free = (
        f"{c.keep_last + c.keep_best} stay, of {_size(size)} each",
        f"{_size(bytes_free(directory))} are free there",
    )
    yield "checkpoints", f"every {many(c.every, 'step')} and at the end; {kept}; {free}"
    stored = _stored(config)
    begins = f"begins as a fork of {origin.run} after step {origin.step}" if origin else "new"
    is_over = stored is not None and last is not None and stored >= last
    where = begins if stored is None else f"{'is over' if is_over else 'goes on'} after step {stored}"
    yield "run", f"{where}, in {Path(config.run_dir)}"


def _places(config: Config, learner: Learner) -> _Lines:
    """Where each box runs, and in which precision."""
    device = "a CUDA device" if config.compute.profile == "gpu" else "the CPU"
    options, c = config.engine.options, config.learner

    def threads(count: int | None) -> str:
        return (
            ""
            if config.compute.profile == "gpu"
            else f", {many(count, 'thread')}"
            if count
            else ", threads as measured at the start"
        )

    synced = f"new weights every {many(c.sync_every, 'step')}"
    yield (
        "engine",
        (
            f"{config.engine.name} on {device}, "
            f"{options['dtype']}{threads(options['threads'] or config.compute.threads)}; {synced}"
        ),
    )
    precision = f"{config.model.dtype}, products in {c.autocast}" if c.autocast else config.model.dtype
    frozen = [
        name
        for name in learner.models
        if name not in learner.trained and not (name == "reference" and learner.following)
    ]
    models = (
        "trains " + ", ".join(learner.trained) + (f", beside a frozen {', '.join(frozen)}" if frozen else "")
    )
    if update := config.model.reference_update:
        models += (
            f"; after every {many(update.every, 'step')} the reference takes {update.mix:g} of the policy"
        )
    yield "learner", f"on {device}, {precision}{threads(config.compute.threads)}; {models}"
    if config.explorer.name != "none":
        yield "explorer", f"{config.explorer.name}, in this process"
    yield "oracle", f"{config.oracle.name}, {_where_asked(config)}"


def _where_asked(config: Config) -> str:
    """In which place the oracle of training answers; of an address no user and no token."""
    options = config.oracle.options
    urls = (
        options.get("url") or os.environ.get("OAI_URL") if config.oracle.name in ("judge", "remote") else None
    )
    if urls:
        model = f"{options['model']} " if config.oracle.name == "judge" else ""
        return Hider(options).text(f"{model}at {urls if isinstance(urls, str) else ', '.join(urls)}")
    return "in this process" + (", asks nobody" if config.oracle.name in BUILTIN else "")


def _defaults(resolved: Resolved) -> _Lines:
    """What other settings have decided."""
    for number, line in enumerate(derived(resolved)):
        yield "" if number else "by default", line
