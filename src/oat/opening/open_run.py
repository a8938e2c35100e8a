"""Functions that open a run in its directory. They begin a new run, continue the run in the directory, or
make a fork there."""

import datetime
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from oat.assemble.changes import refuse_removed, untold
from oat.assemble.engine_record import compare_engines
from oat.assemble.fingerprints import (
    CHANGEABLE,
    recorded,
    refuse_changed_oracles,
    versions_of,
    warn_of_other_prompts,
)
from oat.assemble.late_checks import check_with_inputs
from oat.assemble.run import build
from oat.assemble.run_directory import RunDirectory
from oat.assemble.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.config.stored import with_given, write_stored
from oat.control.interruption import Interruption
from oat.errors import ConfigError, DirectoryError, LearnerLostError, warn
from oat.files import absolute, seen_from
from oat.forecast.estimate import lengths_of
from oat.forecast.highest_cost import highest_price, refuse_small_budget
from oat.forecast.memory import refuse_short_cache, refuse_too_large
from oat.learner.limits import without_memory
from oat.ledger.versions import changed_since
from oat.loop import Run
from oat.models.loading import load_tokenizer
from oat.opening.directory import hindrances, locked, make_directory, unclaim, unmake
from oat.opening.fork import begin_fork, copy_state, find_origin, verify_origin
from oat.opening.needed_trajectories import refuse_lost_trajectories
from oat.resolve.fixed import as_stored, resolve_stored, with_chosen
from oat.resolve.oracles import shows_groups
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoint_files import saved
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import refuse_lost
from oat.rundir.mark import in_the_way, mark, refuse_foreign
from oat.rundir.provenance import Origin, entries, origin_of, recorded_inputs
from oat.runtime.worker_group import RestartState
from oat.text.chat_template import reads_date

T = TypeVar("T")


@contextmanager
def open_run(
    resolved: Resolved,
    source: str | None = None,
    accept_changed: Collection[str] = (),
    interruption: Interruption | None = None,
    life: RestartState | None = None,
) -> Iterator[Run]:
    """Open the run of a configuration: the run that its directory has, or else a new one. Until the context
    ends, the directory is locked for this process.

    Args:
        resolved: the configuration. The caller uses this object for no other run.
        source: "RUN@STEP" or "RUN": make a fork that begins with this checkpoint of RUN, by default the
            newest. If the directory already has this fork, continue it. None: no fork.
        accept_changed: names of inputs (`fingerprints.CHANGEABLE`) that may have changed since the run began.
        interruption: the request to end the run, which signals make. While the run is being opened, a signal
            ends the start at once.
        life: what this process keeps of the run, if it has opened it before.

    Raises:
        Interrupted: a signal came while the run was being opened. A `KeyboardInterrupt` of the caller, such
            as this one, gets a note that says which step is saved.
        ConfigError: another process works in the directory. Or the run in the directory differs from
            `resolved` in settings that must stay the same; the message then lists the differences.
        LedgerError: the run's ledger lacks answers that the run had taken by its newest checkpoint or by the
            last row of metrics, or trajectories that the run still reads.
        OatError: the model, tokenizer, template, data or a reward file is not the one with which the run
            began.
    """
    unknown = [name for name in accept_changed if name not in CHANGEABLE]
    if unknown:
        raise ConfigError(
            f"what may change and be accepted is {', '.join(CHANGEABLE)}, not {unknown[0]!r}; correct "
            "--accept-changed"
        )
    with seen_from():
        directory = absolute(resolved.config.run_dir)
        refuse_foreign(directory)
        made, is_new = make_directory(directory), not (directory / "lock").exists()
        with locked(directory) as standing, _noting_saved(directory):
            home = RunDirectory(directory, standing, interruption or Interruption(), life)
            try:
                with home.interruption.at_once():
                    refuse_foreign(directory)  # another program may have written since
                    is_earlier = mark(directory)
                    standing.sign()
                    run = _open(resolved, home, source, accept_changed, is_earlier=is_earlier)
            except BaseException:
                if standing.is_there:
                    unmake(made)
                    if is_new and directory.exists():
                        unclaim(directory)
                raise
            try:
                yield run
            finally:
                run.ledger.close()
                run.tracking.close()


@contextmanager
def _noting_saved(directory: Path) -> Iterator[None]:
    """Add a note to an interrupt within this context: which step of the run is saved."""
    try:
        yield
    except KeyboardInterrupt as end:
        end.add_note(saved(directory))
        raise


def opened_again(
    make: Callable[[], Resolved],
    work: Callable[[Run], T],
    source: str | None = None,
    accept_changed: Collection[str] = (),
    interruption: Interruption | None = None,
) -> T:
    """Open a run with `open_run`, and work on it. If the process that learns is lost, open the run again,
    from its newest checkpoint. This counts as one of the `compute.max_restarts` replacements.

    Args:
        make: function that makes the configuration. It is called for each opening.

    Returns:
        The result of `work`.
    """
    life = None
    while True:
        resolved = make()
        life = life or RestartState(resolved.config.compute.max_restarts)
        try:
            with open_run(resolved, source, accept_changed, interruption, life) as run:
                return work(run)
        except LearnerLostError as lost:
            life.restarts.use(lost, "the run begins again from its newest checkpoint")


def settled(resolved: Resolved, source: str | None = None) -> tuple[Resolved, Origin | None]:
    """Return the configuration that `oat train` would run, with the values that the run in the directory has
    fixed. Also return the origin of a fork that is still to be made, or None. Files that are made on the way
    are removed again.

    Args:
        source: see `open_run`.

    Raises:
        ConfigError, CheckpointError, LedgerError: see `open_run`.
    """
    directory = absolute(resolved.config.run_dir)
    refuse_foreign(directory)
    made, lock = make_directory(directory), directory / "lock"
    is_new = not lock.exists()
    try:
        with locked(directory), ExitStack() as left:
            if is_new:
                left.callback(lock.unlink)  # this process still holds the lock then
            found = find_origin(source, directory) if source is not None else None
            origin = None if (directory / "config.yaml").exists() else found
            resolved, _ = _settled(resolved, directory, origin)
            if origin is not None:
                verify_origin(origin)
                refuse_lost_trajectories(resolved.config, origin.run, origin.step)
            kept = asdict(resolved.config.checkpoint)
            Checkpoints(directory / "checkpoints", **kept).refuse_others()
            refuse_lost(directory)
            refuse_lost_trajectories(resolved.config, directory)
            return resolved, origin
    finally:
        unmake(made)


def refuse_changes(
    resolved: Resolved,
    run_inputs: RunInputs,
    ledger: Path,
    accept_changed: Collection[str],
    step: int | None = None,
) -> None:
    """Refuse prompts, oracles and an engine that have changed since the run's earlier processes. If held-out
    data have changed, only warn.

    Args:
        ledger: the ledger of the run. If a fork is still to be made, the ledger of the original run.
        step: the step at which a fork that is still to be made begins; None: no fork is to be made.

    Raises:
        DataError: the prompts have changed.
        ConfigError: a reward file, or a reward model, has changed, and the change is not accepted; or another
            engine drew the responses.
    """
    if step is None:  # a fork may have another engine
        own = recorded_inputs(entries(ledger.with_name("environment.json")))
        with resolved.error_context("engine.name"):
            run_inputs.news.extend(filter(None, [compare_engines(own, run_inputs.inputs)]))
    with resolved.error_context("prompts.path"):
        run_inputs.prompts.refuse_others((run_inputs.known or {}).get("prompts", []))
    warn_of_other_prompts(run_inputs.known, run_inputs.inputs)
    if "reward" not in accept_changed:
        changed = changed_since(ledger, versions_of(run_inputs.known, run_inputs.roles), step)
        refuse_changed_oracles(run_inputs.known, run_inputs.roles, changed, resolved.error_context)


@contextmanager
def outlined(resolved: Resolved, run_inputs: RunInputs) -> Iterator[Run]:
    """Make the run of a configuration from outlines of its models, in a temporary folder. Such a run cannot
    be started.

    Raises:
        OatError: see `build`.
    """
    compute = replace(resolved.config.compute, serialise=False)
    here = replace(resolved, config=replace(resolved.config, compute=compute))
    with tempfile.TemporaryDirectory() as scratch, without_memory():
        run = build(here, directory=Path(scratch), run_inputs=run_inputs, load=resolved.outlines.fake)
        try:
            yield run
        finally:
            run.ledger.close()


def _open(
    resolved: Resolved,
    home: RunDirectory,
    source: str | None,
    accept_changed: Collection[str],
    *,
    is_earlier: bool,
) -> Run:
    directory, file = home.directory, home.directory / "config.yaml"
    resolved.refuse_missing_sinks()
    if source is not None:
        begin_fork(source, directory)
    origin = origin_of(directory) if source is not None and not file.exists() else None
    resolved, stored = _settled(resolved, directory, origin)
    config = resolved.config
    if origin is not None:
        assert stored is not None, "the run that is forked has a configuration"
        refuse_lost(origin.run, origin.step)
        refuse_lost_trajectories(config, origin.run, origin.step)
        theirs = with_given(stored.config, stored.config.run_dir, str(origin.run))
        copy_state(directory, same_evaluation=theirs.evaluation == config.evaluation)
    checkpoints = Checkpoints(directory / "checkpoints", **asdict(config.checkpoint))
    checkpoints.refuse_others()
    refuse_lost(directory)
    refuse_lost_trajectories(config, directory)
    is_begun, known = bool(checkpoints.steps), recorded(directory)
    if is_begun and known is None:
        warn(
            f"{directory / 'environment.json'} does not say what the run's model, its text and its data "
            "were: it was removed, or the run was begun before oat wrote it; so nobody knows whether they "
            "have changed since; from here on they are held against what they are now"
        )
    whose = directory if origin is None else origin.run
    if is_earlier or entries(whose / "environment.json"):  # a run without either is of a version that marks
        for sentence in untold(whose, config):
            warn(sentence)
    run_inputs = gather_inputs(resolved, folder=directory, known=known)
    with ExitStack() as left:
        left.callback(run_inputs.close)
        lengths = lengths_of(run_inputs)
        refuse_short_cache(resolved, lengths, run_inputs.outline, is_begun=file.exists())
        refuse_too_large(resolved, lengths, run_inputs.outline)
        refuse_changes(resolved, run_inputs, directory / "ledger.sqlite", accept_changed)
        dearest = highest_price(resolved, run_inputs) if resolved.budgets["train"].is_limited else None
        if dearest is not None:
            refuse_small_budget(resolved, dearest, is_begun=file.exists())
        check_with_inputs(resolved, run_inputs, dearest, is_begun=file.exists() or origin is not None)
        run = build(resolved, directory=home, run_inputs=run_inputs)
        left.callback(run.ledger.close)
        refuse_weights(resolved, run_inputs, is_begun=is_begun)
        home.standing.refuse_lost(DirectoryError)
        write_stored(file, with_chosen(config, run.chosen))
        left.pop_all()
    return run


def _settled(resolved: Resolved, directory: Path, origin: Origin | None) -> tuple[Resolved, Resolved | None]:
    """Complete `resolved`. Return it, and the configuration of the run that is forked or continued; None if a
    new run begins.

    Fields that `resolved` leaves open get the values that the forked or continued run fixed when it was
    created. If the template reads the date and `render.date` is still open, it becomes today's date. Other
    open fields get the defaults of new runs (`_chosen`).

    Args:
        origin: the origin of a fork that is still to be made; None: no fork is to be made.
    """
    file = directory / "config.yaml"
    stored: Resolved | None = None
    try:
        if file.exists() or origin is not None:
            file = file if origin is None else origin.run / "config.yaml"
            refuse_removed(file.parent)
            stored = resolve_stored(file, resolved)
            resolved = as_stored(resolved, stored, file, is_fork=origin is not None)
        elif names := hindrances(directory):
            raise in_the_way(directory, names)
    except ConfigError:
        if origin is None:
            _refuse_mistakes(resolved)  # a mistake is reported before a difference from the run
        raise
    return _dated(_chosen(resolved)), stored


def _refuse_mistakes(resolved: Resolved) -> None:
    """Refuse a configuration that is wrong whatever the run's directory holds."""
    run_inputs = gather_inputs(resolved)
    refuse_short_cache(resolved, lengths_of(run_inputs), run_inputs.outline)
    with outlined(resolved, run_inputs):
        pass


def _chosen(resolved: Resolved) -> Resolved:
    """Return the configuration with the defaults of new runs in two fields that are open. Where a run's own
    configuration lacks them, an earlier version began the run (`Said.earlier`). `oracle.whole_groups` is open
    if no reward function reads it."""
    render, oracle = resolved.config.render, resolved.config.oracle
    if render.special_tokens is None:
        render = replace(render, special_tokens="keep")
    if not shows_groups(resolved.config):
        oracle = replace(oracle, whole_groups=None)
    elif oracle.whole_groups is None:
        oracle = replace(oracle, whole_groups=True)
    return replace(resolved, config=replace(resolved.config, render=render, oracle=oracle))


def _dated(resolved: Resolved) -> Resolved:
    """Return the configuration. If the template reads the date and `render.date` is open, set it to today's
    date."""
    config = resolved.config
    if config.render.template is None or config.render.date is not None:
        return resolved
    with resolved.error_context("model.path"):
        tokenizer = load_tokenizer(config.model.path)
    with resolved.error_context("render.template"):
        is_dated = reads_date(config.render.template, tokenizer)
    if not is_dated:
        return resolved
    render = replace(config.render, date=datetime.date.today())
    return replace(resolved, config=replace(config, render=render))
