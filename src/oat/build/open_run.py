"""The run's directory: a new run in it, or the one that stands there."""

import datetime
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from torch._subclasses.fake_tensor import FakeTensorMode

from oat.build.fingerprints import (
    CHANGEABLE,
    GIVEN,
    recorded,
    refuse_changed_oracles,
    versions_of,
    warn_of_other_prompts,
)
from oat.build.fork import Origin, begin_fork, copy_state, find_origin, origin_of, verify_origin
from oat.build.highest_cost import dearest_question, refuse_small_budget
from oat.build.memory import lengths_of, refuse_short_cache, refuse_too_large
from oat.build.resolve import resolve
from oat.build.resolved import Resolved
from oat.build.run import Home, build
from oat.build.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.config.load import Origins, convert, dump, load_config, to_yaml, with_given
from oat.config.settings import Component, Config
from oat.control.interruption import Interruption
from oat.errors import ConfigError, DirectoryError, warn
from oat.files import Standing, seen, seen_from, write_atomically
from oat.learner.limits import LiveBytes
from oat.ledger.store import Store
from oat.ledger.versions import changed_since
from oat.loop import Run
from oat.models.loading import load_tokenizer
from oat.plugins.loading import same_by_file
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import refuse_lost
from oat.text.templates import reads_date

FREE: tuple[str, ...] = (
    *("run_dir", "stop", "tracking", "checkpoint", "alarms", "compute.serialise"),
    *(
        "oracle.deadline_s",
        "oracle.max_wait_s",
        "learner.on_nonfinite",
        "learner.max_skips",
        "compute.memory_gb",
    ),
)
"""Fields, or whole sections, that may change when a run is continued; the memory only where nothing was
measured by it."""

FORKS = (
    *("model.reference_update.every", "model.reference_update.mix"),
    *(
        "seed",
        "sampling",
        "algorithm",
        "evaluation",
        "oracle.labels",
        "oracle.max_outstanding",
        "oracle.max_answer_age",
        "learner.learning_rate",
    ),
    *(
        "learner.critic_learning_rate",
        "learner.betas",
        "learner.weight_decay",
        "learner.max_grad_norm",
        "learner.schedule",
        "learner.warmup_steps",
    ),
    *(
        "learner.schedule_steps",
        "learner.micro_batch_size",
        "learner.gradient_checkpointing",
        "learner.logits_chunk",
        "learner.max_updates",
    ),
)
"""Those that may change in a fork, but for the algorithm's name. What a checkpoint or a ledger holds belongs
to the others, or they were measured."""

_WRITTEN = (
    "lock",
    "ledger.sqlite*",
    "checkpoints",
    "checkpoints/step_*",
    "evaluations",
    "sinks",
    "tensorboard",
    "wandb",
    "mlflow",
)
"""What is written to where it stands; other files are replaced."""

CHOSEN = {
    ("compute", "threads"): None,
    ("engine", "threads"): None,
    ("learner", "micro_batch_tokens"): "auto",
    ("render", "date"): None,
}
"""Fields that are fixed when a run is created, where they have this value; then they stay."""


@contextmanager
def open_run(
    resolved: Resolved,
    source: str | None = None,
    accept_changed: Collection[str] = (),
    interruption: Interruption | None = None,
) -> Iterator[Run]:
    """The run of a configuration: a new one, or the one that stands in its directory. Its directory is this
    process's until the end.

    Args:
        resolved: used for this run alone.
        source: "RUN@STEP" or "RUN": a new run begins where that one stood at its checkpoint, by default the
            newest. Where the directory has the fork already, it is continued.
        accept_changed: of `inputs.CHANGEABLE`, what the run goes on with though it has changed.
        interruption: how the run is asked to end; a signal that it hears ends the start at once.

    Raises:
        Interrupted: a signal came before the run was made.
        ConfigError: another process works in the directory, or it holds a run of another configuration; the
        message lists the differences.
        LedgerError: its ledger lacks what its newest checkpoint, or its last row, says that it holds.
        OatError: the model, its text, the data or a reward file is not what the run began with.
    """
    unknown = [name for name in accept_changed if name not in CHANGEABLE]
    if unknown:
        raise ConfigError(
            f"what may change and be accepted is {', '.join(CHANGEABLE)}, not {unknown[0]!r}; correct "
            "--accept-changed"
        )
    with seen_from():
        directory = seen(resolved.config.run_dir)
        made, is_new = _made(directory), not (directory / "lock").exists()
        with _locked(directory) as standing:
            home = Home(directory, standing, interruption or Interruption())
            try:
                with home.interruption.at_once():
                    run = _open(resolved, home, source, accept_changed)
            except BaseException:
                if standing.is_there:
                    _unmake(made)
                    if is_new:
                        (directory / "lock").unlink(missing_ok=True)
                raise
            try:
                yield run
            finally:
                run.ledger.close()
                run.tracking.close()


def _made(directory: Path) -> list[Path]:
    """Make the directory, unless it is there; returns it and those above it that were made. In one that is
    there, everything must be writable that a run writes to.

    Raises:
        ConfigError: names what this user may not write.
    """
    try:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory} is a file; give another --run_dir")
        made = [place for place in (directory, *directory.parents) if not place.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}: {error.filename}); give a --run_dir where you "
            "may write"
        ) from error
    for path in (directory, *(found for name in _WRITTEN for found in directory.glob(name))):
        if not os.access(path, os.W_OK | os.X_OK if path.is_dir() else os.W_OK):
            raise ConfigError(
                f"{path} cannot be written by this user, and a run in {directory} must; change its "
                "rights, or give another --run_dir"
            )
    return made


def _unmake(made: Sequence[Path]) -> None:
    """Remove directories that were made for a run that is none, unless somebody else has begun to use one."""
    for place in made[:1]:
        shutil.rmtree(place)
    with suppress(OSError):
        for place in made[1:]:
            place.rmdir()


_locks: set[TextIO] = set()
"""The open lock files of this process. A forked child, such as a worker of a reward function, closes its
copies: it may outlive the process."""


def _let_go() -> None:
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def _locked(directory: Path) -> Iterator[Standing]:
    """The directory is ours; the lock goes with the process, however it ends and whatever children it leaves.
    Gives what tells whether the directory is still the same: the lock, whose inode nothing else gets as long
    as it is open."""
    try:
        opened = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot hold a run ({error.strerror}: {error.filename}); give another --run_dir"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{directory} is in use by another process; wait for it, end it, or give another --run_dir"
            ) from None
        _locks.add(file)
        try:
            yield Standing(directory / "lock")
        finally:
            _locks.discard(file)


def _open(resolved: Resolved, home: Home, source: str | None, accept_changed: Collection[str]) -> Run:
    directory, file = home.directory, home.directory / "config.yaml"
    resolved.refuse_missing_sinks()
    if source is not None:
        begin_fork(source, directory)
    origin = origin_of(directory) if source is not None and not file.exists() else None
    resolved, stored = _settled(resolved, directory, origin)
    config = resolved.config
    if origin is not None:
        assert stored is not None, "the run that is forked has a configuration"
        theirs = with_given(stored.config, stored.config.run_dir, str(origin.run))
        copy_state(directory, same_judges=theirs.evaluation == config.evaluation)
    checkpoints = Checkpoints(directory / "checkpoints", **asdict(config.checkpoint))
    checkpoints.refuse_others()
    refuse_lost(directory)
    is_begun, known = bool(checkpoints.steps), recorded(directory)
    if is_begun and known is None:
        warn(
            f"{directory / 'environment.json'} does not say what the run's model, its text and its data "
            "were: it was removed, or the run was begun "
            "before oat wrote it; so nobody knows whether they have changed since; from here on they are "
            "held against what they are now"
        )
    run_inputs = gather_inputs(resolved, folder=directory, known=known)
    with ExitStack() as left:
        left.callback(run_inputs.close)
        refuse_short_cache(resolved, lengths_of(run_inputs), run_inputs.outline)
        refuse_too_large(resolved, lengths_of(run_inputs), run_inputs.outline)
        refuse_changes(resolved, run_inputs, directory / "ledger.sqlite", accept_changed)
        if resolved.budgets["train"].is_limited:
            refuse_small_budget(resolved, dearest_question(resolved, run_inputs), is_begun=file.exists())
        run = build(resolved, directory=home, run_inputs=run_inputs)
        left.callback(run.ledger.close)
        refuse_weights(resolved, run_inputs, is_begun=is_begun)
        for (section, name), value in run.chosen.items():
            config = _with(config, section, name, value)
        home.standing.refuse_lost(DirectoryError)
        write_atomically(file, to_yaml(config))
        left.pop_all()
    return run


def settled(resolved: Resolved, source: str | None = None) -> tuple[Resolved, Origin | None]:
    """The configuration that `oat train` would run, with what is fixed in the run that its directory holds;
    and where it begins as a fork, if it does. Everything is left as it is.

    Args:
        source: as for `open_run`.

    Raises:
        ConfigError, CheckpointError, LedgerError: as `open_run`.
    """
    directory = seen(resolved.config.run_dir)
    made, lock = _made(directory), directory / "lock"
    is_new = not lock.exists()
    try:
        with _locked(directory), ExitStack() as left:
            if is_new:
                left.callback(lock.unlink)  # while it is held, so that nobody else has it open and locked
            found = find_origin(source, directory) if source is not None else None
            origin = None if (directory / "config.yaml").exists() else found
            resolved, _ = _settled(resolved, directory, origin)
            if origin is not None:
                verify_origin(origin)
            kept = asdict(resolved.config.checkpoint)
            Checkpoints(directory / "checkpoints", **kept).refuse_others()
            refuse_lost(directory)
            return resolved, origin
    finally:
        _unmake(made)


def refuse_changes(
    resolved: Resolved,
    run_inputs: RunInputs,
    ledger: Path,
    accept_changed: Collection[str],
    step: int | None = None,
) -> None:
    """Hold data and oracles against what earlier processes of the run had. Held-out data are warned of.

    Args:
        ledger: of the run, or of the one that it will be a fork of, at
        step: which is None for the run itself.

    Raises:
        DataError: the prompts are others.
        ConfigError: a reward file, or a reward model, has changed, and that is not accepted.
    """
    with resolved.blame("prompts.path"):
        run_inputs.prompts.refuse_others((run_inputs.known or {}).get("prompts", []))
    warn_of_other_prompts(run_inputs.known, run_inputs.inputs)
    if "reward" not in accept_changed:
        changed = changed_since(ledger, versions_of(run_inputs.known, run_inputs.roles), step)
        refuse_changed_oracles(run_inputs.known, run_inputs.roles, changed, resolved.blame)


def as_begun(resolved: Resolved) -> Resolved:
    """The configuration with what was fixed when the run of its directory began; where there is none, as it
    is.

    Raises:
        ConfigError: the directory holds a run of another configuration.
    """
    file = Path(resolved.config.run_dir) / "config.yaml"
    if not file.exists():
        return resolved
    return _as_stored(resolved, resolve(load_config(file)[0], {}), file, is_fork=False)


def known_by_file(config: Config, file: Path) -> Config:
    """The configuration where functions and classes that a run was given from Python are named by their files
    (`plugins.same_by_file`).

    Args:
        file: the run's own configuration.
    """
    tree: Config = convert(Config, same_by_file(dump(load_config(file)[0]), dump(config)), (), {})
    return tree


@contextmanager
def outlined(resolved: Resolved, run_inputs: RunInputs) -> Iterator[Run]:
    """The run of a configuration made without weights, in a folder of its own; it is not to be begun.

    Raises:
        OatError: as `build`.
    """
    compute = replace(resolved.config.compute, serialise=False)
    here = replace(resolved, config=replace(resolved.config, compute=compute))
    with tempfile.TemporaryDirectory() as scratch, FakeTensorMode(allow_non_fake_inputs=True), LiveBytes():
        run = build(here, directory=Path(scratch), run_inputs=run_inputs, load=resolved.outlines.fake)
        try:
            yield run
        finally:
            run.ledger.close()


def _refuse_mistakes(resolved: Resolved) -> None:
    """What is wrong with a configuration whatever its directory holds."""
    run_inputs = gather_inputs(resolved)
    refuse_short_cache(resolved, lengths_of(run_inputs), run_inputs.outline)
    with outlined(resolved, run_inputs):
        pass


def _settled(resolved: Resolved, directory: Path, origin: Origin | None) -> tuple[Resolved, Resolved | None]:
    """The configuration with what was fixed when the run of this directory, or the one that it is a fork of,
    began, and with the day, where a template reads it; beside it the configuration of that run, if there is
    one, resolved for itself."""
    file = directory / "config.yaml"
    stored: Resolved | None = None
    try:
        if file.exists() or origin is not None:
            file = file if origin is None else origin.run / "config.yaml"
            stored = resolve(load_config(file)[0], {})
            resolved = _as_stored(resolved, stored, file, is_fork=origin is not None)
        elif not _is_unused(directory):
            raise ConfigError(f"{directory} is not empty and holds no run; give another --run_dir")
    except ConfigError:
        if origin is None:
            _refuse_mistakes(resolved)  # a difference may be one, and then undoing it is no help
        raise
    config = resolved.config
    if config.render.template is None or config.render.date is not None:
        return resolved, stored
    with resolved.blame("model.path"):
        tokenizer = load_tokenizer(config.model.path)
    with resolved.blame("render.template"):
        is_dated = reads_date(config.render.template, tokenizer)
    if is_dated:
        config = replace(config, render=replace(config.render, date=datetime.date.today()))
    return replace(resolved, config=config), stored


def _as_stored(resolved: Resolved, theirs: Resolved, file: Path, *, is_fork: bool) -> Resolved:
    """The configuration with what was fixed when the run began.

    Args:
        theirs: the configuration of that run, which stands in
        file: in its directory.

    Raises:
        ConfigError: it differs from the run's in what may not change.
    """
    config, stored = known_by_file(resolved.config, file), theirs.config
    if not is_fork:
        before = stored.run_dir
        stored, config = (with_given(each, before, config.run_dir) for each in (stored, config))
    free = [
        field for field in FREE if field != "compute.memory_gb" or config.learner.micro_batch_tokens != "auto"
    ]
    for (section, name), left_open in CHOSEN.items():
        if _setting(config, section, name) == left_open:
            config = _with(config, section, name, _setting(stored, section, name))
    differences = [
        line for line in _differences(dump(stored), dump(config)) if not _is_any(line.split(": ")[0], free)
    ]
    fixed = (
        "algorithm.name",
        "sampling.environment",
        *(["algorithm.prompts"] if stored.prompts.epochs else []),
    )
    refused = [
        line for line in differences if not _is_any(field := line.split(": ")[0], FORKS) or field in fixed
    ]
    if is_fork and refused:
        lines = "\n  ".join(refused)
        raise ConfigError(
            f"a fork of {file.parent} cannot change these; begin a run of its own, or undo:\n  {lines}"
        )
    if differences and not is_fork:
        lines = "\n  ".join(line + _reason(line, stored, config, resolved.origins) for line in differences)
        way = "begin a run of its own" if refused else f"fork it with --from {file.parent}@STEP"
        raise ConfigError(
            f"{file.parent} holds a run of another configuration; give another --run_dir ({way}), or "
            f"undo:\n  {lines}"
        )
    return replace(resolved, config=config)


def _setting(config: Config, section: str, name: str) -> Any:
    part = getattr(config, section)
    return part.options[name] if isinstance(part, Component) else getattr(part, name)


def _with(config: Config, section: str, name: str, value: Any) -> Config:
    part = getattr(config, section)
    changed: Any = (
        replace(part, options={**part.options, name: value})
        if isinstance(part, Component)
        else replace(part, **{name: value})
    )
    sections: dict[str, Any] = {section: changed}
    return replace(config, **sections)


def _is_unused(directory: Path) -> bool:
    """Whether a directory is empty, or holds only what a start leaves behind that failed or was killed before
    its first question."""
    left = {file.name for file in directory.iterdir()}
    if not left <= {
        "lock",
        GIVEN,
        ".new-config.yaml",
        *(f"ledger.sqlite{end}" for end in ("", "-journal", "-wal", "-shm")),
    }:
        return False
    if "ledger.sqlite" not in left:
        return True
    store = Store(directory / "ledger.sqlite")
    try:
        return store.is_empty()
    finally:
        store.close()


def _is_any(field: str, names: Iterable[str]) -> bool:
    """Whether a field is one of these, or in a section that is."""
    return any(f"{field}.".startswith(f"{name}.") for name in names)


def _reason(difference: str, stored: Config, now: Config, origins: Origins) -> str:
    """Why a field that was not set differs, and what to do."""
    schedule, steps = stored.learner.schedule, stored.learner.schedule_steps
    is_derived = ("learner", "schedule_steps") not in origins and schedule == now.learner.schedule
    if not (difference.startswith("learner.schedule_steps: ") and is_derived):
        return ""
    return (
        f" (it follows from stop.max_steps, where a {schedule} schedule ends by default, and a run keeps "
        "the schedule it began with: pass "
        f"--learner.schedule_steps {steps} to go on with that one; a run that may be made longer sets "
        "learner.schedule_steps at its start)"
    )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {json.dumps(old)} in the run, {json.dumps(new)} now")
    return lines
