"""`oat train` from Python: the same configuration and the same loop, but Python objects may replace names."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oat.commands.eval import evaluate_once
from oat.commands.export import export_run
from oat.config.load import Origins
from oat.control.interruption import Interruption
from oat.control.stages import tell, telling
from oat.errors import ConfigError, ContractError, Interrupted, printable
from oat.files import absolute, seen_from, start
from oat.loop import Report, Run, train
from oat.opening.given import Given, check_arguments, merged, name_of, places, tree_of
from oat.opening.open_run import opened_again
from oat.plugins import loading as plugins
from oat.plugins.calls import restoring
from oat.reports.outcome import Outcome
from oat.reports.progress import opening, shown
from oat.resolve.about import about
from oat.resolve.fixed import as_begun
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.resolve.targets import evaluated_as, loaded_for, resolve_tree
from oat.rundir.rows import read_metrics

Callback = Callable[[int, dict[str, float]], bool | None]
"""A function that is called with the number of each new row, and the row as `metrics.jsonl` has it. If it
returns True, the run ends after this row.

Row 0 describes the start. If the run has evaluations, row 0 has the metrics of the evaluation before the
first step. Row k describes the k-th step.
"""


@dataclass(frozen=True)
class Result:
    """The result of `Trainer.train`. As text it is the reason why the run ended.

    Attributes:
        run_dir: the run's directory.
        reason: the reason why the run ended.
        is_finished: True if the run came to its end. False if a callback ended it; the same lines of Python
            then continue the run.
        is_idle: True if the run had ended before this call, so the call did nothing.
        step: number of steps that are done.
        metrics: the last row, as in `metrics.jsonl`.
        learned_nothing: if no step taught the policy anything, the likely cause; otherwise None.
    """

    run_dir: Path
    reason: str
    is_finished: bool
    is_idle: bool
    step: int
    metrics: dict[str, float]
    learned_nothing: str | None = None

    def __str__(self) -> str:
        return self.reason


class Trainer:
    """One run, in one directory. The constructor checks everything that the settings alone decide. It loads
    no model and no data.

    * A model or records given as Python objects are saved in the run's directory (`given/`). Functions and
      classes are stored by name (`python:reward`). So the same lines of Python continue the run.
    * The run trains a copy of a given model.

    `model`, `oracle` and `prompts` must be given.

    Args:
        model: a hub id, a directory, a model of transformers (then with `tokenizer`), or the section `model`
            of a configuration.
        oracle: the name of a built-in oracle, a reward or comparison function, an oracle of your own, or the
            section. A list of these is the weighted sum of their scores (`mixture`).
        prompts: a path as in the section, an iterable of records, a function that returns an iterable of
            records, or the section. If neither `epochs` nor a field of `stop` is set, the run uses each
            prompt once.
        algorithm: a name, a class, or the section.
        tokenizer: the tokenizer of a model that is given as an object.
        run_dir: directory of the run; None: `runs/` and the algorithm's name. All relative paths are resolved
            against the working directory at the time of this call.
        callbacks: a function that is called with every new row, or several, which are called in this order.
        source: "RUN@STEP" or "RUN": the run begins from that run's checkpoint, as with `oat train --from`.
            The method `fork` sets this argument together with the others.
        accept_changed: names of inputs that may have changed since the run began. Only "reward" is possible.
            Questions to a changed reward function are asked again (docs/ledger.md).
        quiet: True: print nothing; False: print the lines of `oat train`.
        sections: every other section and field of a configuration (`src/oat/config/settings.py`), such as
            `learner={"learning_rate": 1e-5}` or `seed=1`.

    Raises:
        ConfigError: `oat check` would refuse the configuration, or an argument is missing or unknown.
    """

    def __init__(
        self,
        *,
        model: Any = ...,
        oracle: Any = ...,
        prompts: Any = ...,
        algorithm: Any = "grpo",
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        callbacks: Callback | Iterable[Callback] = (),
        source: str | None = None,
        accept_changed: Iterable[str] = (),
        quiet: bool = False,
        **sections: Any,
    ):
        check_arguments({"model": model, "oracle": oracle, "prompts": prompts}, algorithm, sections)
        tree = tree_of(model, oracle, prompts, algorithm, sections)
        name = tree["algorithm"].get("name")
        own = name if isinstance(name, str) else getattr(name, "__name__", "run")
        self.run_dir = Path(run_dir or Path("runs") / own)
        self.callbacks = (callbacks,) if callable(callbacks) else tuple(callbacks)
        self.quiet = quiet
        self.accept_changed = (accept_changed,) if isinstance(accept_changed, str) else tuple(accept_changed)
        self._start = start()
        self._tokenizer = tokenizer
        self._source = source
        self._given = Given(self.run_dir, tokenizer)
        self._given.take_files(tree)
        self._sections = tree
        plain = self._given.plain({"run_dir": str(self.run_dir), **tree})
        self._origins: Origins = {
            (): "oat.Trainer",
            **{place: f"oat.Trainer({place[0]}=...)" for place in places(plain)},
        }
        with self._naming():
            self.config = resolve_tree(plain, self._origins).config

    def train(self) -> Result:
        """Train until the run ends, and return its result. A run with checkpoints continues from the newest
        one.

        Raises:
            OatError: the run failed, as it would with `oat train`. The message says what to do.
            Interrupted: a signal ended the run. Its state is on disk, and the same lines of Python continue
                the run.
        """
        told = Interruption()
        with seen_from(self._start), self._naming(), told.heard(), self._telling():
            tell(f"loading {loaded_for(self.config)}")
            with told.at_once():
                self._write_given()
            return opened_again(self._resolved, self._worked, self._source, self.accept_changed, told)

    def _worked(self, run: Run) -> Result:
        with self._shown(run) as show:
            is_asked, outcome = False, Outcome(run, about(self.config))
            self._say(*opening(run, self.run_dir))

            def report(step: int, metrics: dict[str, float]) -> None:
                nonlocal is_asked
                show(step, metrics)
                outcome.note_step(step, metrics)
                if self._call_back(step, metrics):
                    is_asked = True
                    run.interruption.ask()

            try:
                reason, is_finished = train(run, report), True
            except Interrupted:
                if not is_asked:
                    raise
                reason, is_finished = "a callback ended it", False
            cause = outcome.nothing_learned()
        if is_finished:
            self._say(*outcome.lines(reason, cause))
        last = (self.metrics or [{"step": 0}])[-1]
        return Result(self.run_dir, reason, is_finished, outcome.is_idle, int(last["step"]), last, cause)

    def _resolved(self) -> Resolved:
        """Resolve the configuration. The result contains objectives, which have a state. So each training and
        each evaluation needs a new result."""
        return resolve(self.config, self._origins)

    def fork(self, run_dir: str | Path, step: int | None = None, **changes: Any) -> "Trainer":
        """Return the trainer of a new run that begins from a checkpoint of this run, with changed settings.
        Its `train` makes the new run. Later the same lines of Python continue the new run.

        Args:
            run_dir: directory of the new run.
            step: step of a checkpoint of this run; None: the newest checkpoint.
            changes: arguments of `Trainer`. A section given as a dict needs only the fields that differ.
                docs/ledger.md ("Forks") says what a fork may change.

        Raises:
            ConfigError: as for `Trainer`, or the run in this trainer's directory was begun with another model
                or other records than this trainer has.
        """
        with seen_from(self._start):
            if (absolute(self.run_dir) / "config.yaml").exists():
                self._write_given()
            return self._changed(
                run_dir, changes, source=str(self.run_dir) + ("" if step is None else f"@{step}")
            )

    def evaluate(self, **fields: Any) -> dict[str, float]:
        """Evaluate the newest checkpoint, as `oat eval` does. If the run has not begun, evaluate the start
        model. The run is not changed, and the evaluation has a budget of its own.

        Args:
            fields: fields of the section `evaluation`, such as `path=records`, `oracle=other` or `samples=8`.
                They replace this trainer's fields of the same name.

        Returns:
            The metrics of the evaluation, and under `step` the step of the weights.

        Raises:
            OatError: the evaluation failed, as it would with `oat eval`. The message says what to do.
        """
        with tempfile.TemporaryDirectory() as scratch, seen_from(self._start), self._naming():
            self._write_given()
            begun = as_begun(self._resolved())
            here = self._changed(Path(scratch) / "run", {"evaluation": fields}) if fields else self
            if about(here.config).evaluated is None:
                raise ConfigError(
                    "oat.Trainer.evaluate: nothing says which prompts; give evaluate(path=...), "
                    "pairs=..., or the section `evaluation`"
                )
            here._write_given()
            is_begun = (absolute(self.run_dir) / "config.yaml").exists()
            with here._naming(), self._telling():
                return evaluate_once(
                    evaluated_as(begun, here._resolved()), self.run_dir if is_begun else None
                )

    def _naming(self) -> AbstractContextManager[None]:
        """A context in which a configuration finds by name the functions and classes that the user gave as
        objects."""
        return plugins.naming(self._given.named)

    def _telling(self) -> AbstractContextManager[None]:
        return telling("" if self.quiet else "oat.Trainer")

    def _write_given(self) -> None:
        self._given.write(is_checked=about(self.config).stops_at_bad_records)

    def _changed(
        self, run_dir: str | Path, changes: Mapping[str, Any], source: str | None = None
    ) -> "Trainer":
        own = {
            "tokenizer": self._tokenizer,
            "callbacks": self.callbacks,
            "accept_changed": self.accept_changed,
            "quiet": self.quiet,
        }
        sections = {name: merged(self._sections.get(name), value) for name, value in changes.items()}
        return Trainer(**{**own, **self._sections, **sections, "run_dir": run_dir, "source": source})

    def _call_back(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Call every callback. Return True if at least one of them ends the run. If a callback raises an
        error, the error gets a note with the name of the callback and the number of the row."""
        is_enough = False
        for callback in self.callbacks:
            name = f"the callback {name_of(callback)}"
            try:
                with restoring(name, partial(_failed, name)):
                    is_enough |= callback(step, {"step": step, **metrics}) is True
            except Exception as error:
                what = (
                    "which is before the first step and has what an evaluation found"
                    if step == 0
                    else f"that of step {step}"
                )
                error.add_note(f"oat.Trainer: {name} was given row {step}, {what}")
                raise
        return is_enough

    def _say(self, *lines: str) -> None:
        if not self.quiet:
            print(printable("\n".join(f"oat.Trainer: {line}" for line in lines)), flush=True)

    def _shown(self, run: Run) -> AbstractContextManager[Report]:
        return nullcontext(lambda step, metrics: None) if self.quiet else shown(run, about(self.config))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics written so far, from row 0."""
        return read_metrics(self._start / self.run_dir / "metrics.jsonl")

    def save_model(self, out: str | Path, step: int | None = None) -> int:
        """Write the policy of a checkpoint as a directory that transformers loads.

        Args:
            step: step of the checkpoint; None: the newest checkpoint.

        Returns:
            The step of the checkpoint.

        Raises:
            ConfigError, CheckpointError: as for `oat.commands.export.export_run`.
        """
        with seen_from(self._start), self._naming():
            return export_run(absolute(self.run_dir), absolute(out), step).step


def _failed(name: str, what: str) -> ContractError:
    return ContractError(f"oat.Trainer: {name} {what}; mend it, and train again")
