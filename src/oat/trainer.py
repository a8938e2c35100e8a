"""`oat train` from Python: the same configuration and the same loop, with objects where a file has names."""

import filecmp
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from oat.build.about import about
from oat.build.fingerprints import GIVEN
from oat.build.fixed import as_begun
from oat.build.open_run import open_run
from oat.build.resolve import resolve
from oat.build.resolved import Resolved
from oat.build.targets import evaluated_as, resolve_tree
from oat.commands.eval import evaluate_once
from oat.commands.export import export_run
from oat.config.load import Origins
from oat.config.settings import DEFAULT_PARTS
from oat.control.interruption import Interruption
from oat.data.formats import checked
from oat.data.sources import is_named, unboxed
from oat.errors import ConfigError, ContractError, DataError, Interrupted, printable
from oat.files import saying_what_is_free, seen, seen_from, start
from oat.loop import Report, Run, train
from oat.plugins import loading as plugins
from oat.plugins.calls import restoring
from oat.reports.outcome import Outcome
from oat.reports.progress import opening, shown
from oat.rundir.reading import read_metrics

Callback = Callable[[int, dict[str, float]], bool | None]
"""Called with the number of a row and the row as it stands in `metrics.jsonl`; what returns True ends the run
there. Row 0 is that of the start: what an evaluation found before the first step. Row k is that of step k,
the k-th update. A run that goes on gives the rows that it makes."""

_PLAIN = (str, int, float, bool, type(None), date)


@dataclass(frozen=True)
class Result:
    """What `Trainer.train` came to; printed, it is the reason.

    Attributes:
        run_dir: where the run lies.
        reason: why it ended.
        is_finished: it came to its end; otherwise a callback ended it, and the same lines go on.
        is_idle: it had ended before, and nothing was left to do.
        step: steps that are done.
        metrics: its last row, as it stands in `metrics.jsonl`.
        learned_nothing: the likely cause, where no step taught it anything.
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
    """One run, in one directory. Constructing it checks what the settings alone decide, and loads nothing.

    What is given as a Python object is kept with the run (`given/` in its directory: a model, records), or
    named by its own name (`python:reward`: functions and classes), so the run is continued by the same lines.
    The given model stays as it is: a copy of it is trained.

    Args:
        model: a hub id, a directory, a model of transformers (then with `tokenizer`), or the section `model`
        of a configuration.
        oracle: one of ours by name, a reward or comparison function, an oracle, or the section. A list of
            these is the weighted sum of their scores (`mixture`).
        prompts: what the section's `path` names; an iterable of records or a function that returns one; or
            the section. Where neither `epochs` nor anything of `stop` is given, they are gone through once.
        algorithm: a name, a class, or the section.
        tokenizer: of a model that is given as an object.
        run_dir: by default `runs/` and the algorithm's name. It and every other relative path are seen from
            the working directory of this moment, whatever code of yours makes of that later.
        callbacks: called with every row, in order.
        source: "RUN@STEP" or "RUN": it begins where that run stood, as `oat train --from`; `fork` fills in
        the rest.
        accept_changed: what the run goes on with though it has changed since: "reward", whose lines are then
        asked anew (docs/ledger.md).
        quiet: print nothing; otherwise what `oat train` prints.
        sections: every other section and field of a configuration (`src/oat/config/settings.py`):
        `learner={"learning_rate": 1e-5}`, `seed=1`.

    Raises:
        ConfigError: as `oat check`: the field, what was expected, and what to do.
    """

    def __init__(
        self,
        *,
        model: Any,
        oracle: Any,
        prompts: Any,
        algorithm: Any = "grpo",
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
        callbacks: Iterable[Callback] = (),
        source: str | None = None,
        accept_changed: Iterable[str] = (),
        quiet: bool = False,
        **sections: Any,
    ):
        tree = {
            "model": _section(model, "path"),
            "prompts": _section(prompts, "path"),
            "oracle": _mixed(_section(oracle, "name")),
            "algorithm": _section(algorithm, "name"),
            **{
                name: dict(value) if isinstance(value, Mapping) else value for name, value in sections.items()
            },
        }
        for section in ("engine", "explorer"):
            if section in tree:
                tree[section] = {
                    "name": DEFAULT_PARTS[section],
                    **_section(tree[section], "name"),
                }
        if not tree.setdefault("stop", {}):
            tree["prompts"].setdefault("epochs", 1)
        if isinstance(tree.get("evaluation"), dict):
            tree["evaluation"] |= {
                name: _mixed(_section(judge, "name"))
                for name in ("oracle", "gold")
                if (judge := tree["evaluation"].get(name))
            }
        self._start = start()
        self._given: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._source = source
        self.callbacks = tuple(callbacks)
        self.quiet = quiet
        self.accept_changed = (accept_changed,) if isinstance(accept_changed, str) else tuple(accept_changed)
        name = tree["algorithm"].get("name")
        self.run_dir = Path(
            run_dir or Path("runs") / (name if isinstance(name, str) else getattr(name, "__name__", "run"))
        )
        for section, file in (
            ("model", "model"),
            ("prompts", "prompts.jsonl"),
            ("evaluation", "evaluation.jsonl"),
        ):
            self._take_file(tree.get(section), file)
        self._take_file(tree.get("evaluation"), "pairs.jsonl", "pairs")
        self._sections = tree
        plain = self._plain({"run_dir": str(self.run_dir), **tree}, ())
        self._origins: Origins = {
            (): "oat.Trainer",
            **{place: f"oat.Trainer({place[0]}=...)" for place in _places(plain)},
        }
        with plugins.naming(self._given):
            self.config = resolve_tree(plain, self._origins).config

    def train(self) -> Result:
        """Bring the run to its end, from its newest checkpoint.

        Raises:
            OatError: as `oat train`; its message says what to do.
            Interrupted: it was ended by a signal; where it stood is on disk, and the same lines go on.
        """
        told = Interruption()
        with seen_from(self._start), plugins.naming(self._given), told.heard():
            with told.at_once():
                self._write_given()
            return self._trained(told)

    def _trained(self, told: Interruption) -> Result:
        opened = open_run(self._resolved(), self._source, self.accept_changed, told)
        with opened as run, self._shown(run) as show:
            is_asked, outcome = False, Outcome(run, about(self.config))
            self._say(*opening(run, self.run_dir))

            def report(step: int, metrics: dict[str, float]) -> None:
                nonlocal is_asked
                show(step, metrics)
                outcome.note_step(step)
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
        """The configuration resolved for one life of the run: an objective has a state, and the life before
        has left its own behind."""
        return resolve(self.config, self._origins)

    def fork(self, run_dir: str | Path, step: int | None = None, **changes: Any) -> "Trainer":
        """A run that begins where this one stood, under settings that differ. Nothing of it is made before it
        is trained; afterwards the same lines continue it.

        Args:
            run_dir: of the fork.
            step: of a checkpoint of this run; None: the newest.
            changes: arguments of `Trainer`; of a section that is a dict, the fields that differ.
            docs/checkpoints.md says what a fork may change.

        Raises:
            ConfigError: as `Trainer`; or this run was begun with another model or other records.
        """
        with seen_from(self._start):
            if (seen(self.run_dir) / "config.yaml").exists():
                self._write_given()
            return self._changed(
                run_dir, changes, source=str(self.run_dir) + ("" if step is None else f"@{step}")
            )

    def evaluate(self, **fields: Any) -> dict[str, float]:
        """One evaluation of the newest checkpoint, or of the start model where the run has not begun, as by
        `oat eval`: its metrics, and the `step` of the weights. The run is not changed, and the evaluation has
        a budget of its own.

        Args:
            fields: of the section `evaluation`, beside those that this trainer has: `path=records`,
            `oracle=other`, `samples=8`.

        Raises:
            OatError: as `oat eval`.
        """
        with tempfile.TemporaryDirectory() as scratch, seen_from(self._start), plugins.naming(self._given):
            self._write_given()
            begun = as_begun(self._resolved())
            here = self._changed(Path(scratch) / "run", {"evaluation": fields}) if fields else self
            if about(here.config).evaluated is None:
                raise ConfigError(
                    "oat.Trainer.evaluate: nothing says which prompts; give evaluate(path=...), "
                    "pairs=..., or the section `evaluation`"
                )
            here._write_given()
            is_begun = (seen(self.run_dir) / "config.yaml").exists()
            with plugins.naming(here._given):
                return evaluate_once(
                    evaluated_as(begun, here._resolved()), self.run_dir if is_begun else None
                )

    def _changed(
        self, run_dir: str | Path, changes: Mapping[str, Any], source: str | None = None
    ) -> "Trainer":
        own = {
            "tokenizer": self._tokenizer,
            "callbacks": self.callbacks,
            "accept_changed": self.accept_changed,
            "quiet": self.quiet,
        }
        sections = {name: _merged(self._sections.get(name), value) for name, value in changes.items()}
        return Trainer(**{**own, **self._sections, **sections, "run_dir": run_dir, "source": source})

    def _call_back(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a callback wants the run to end; what one raises says which row it was given."""
        is_enough = False
        for callback in self.callbacks:
            name = f"the callback {_name_of(callback)}"
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
        return nullcontext(lambda step, metrics: None) if self.quiet else shown(run, self.run_dir)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a step, from row 0; empty before the first."""
        return read_metrics(self._start / self.run_dir / "metrics.jsonl")

    def save_model(self, out: str | Path, step: int | None = None) -> int:
        """Write the policy of a checkpoint, by default the newest, as a directory that transformers loads;
        returns its step.

        Raises:
            ConfigError, CheckpointError: as `oat.commands.export.export_run`.
        """
        with seen_from(self._start), plugins.naming(self._given):
            return export_run(seen(self.run_dir), seen(out), step)

    def _take_file(self, section: Any, file: str, field: str = "path") -> None:
        """A model or records that are given as objects will be files of the run."""
        path = section.get(field) if isinstance(section, Mapping) else None
        if path is None or isinstance(path, str | Path):
            return
        if isinstance(path, list | tuple) and all(_is_source(entry) for entry in path):
            _check_sources(path, f"oat.Trainer({Path(file).stem}=...)")
            return
        if file == "model" and hasattr(path, "peft_config"):
            raise ConfigError(
                f"oat.Trainer(model=...): a {type(path).__name__} has adapters of PEFT in it, which are "
                "not trained; give the base model with "
                'model={"path": base, "lora": {"rank": 8}}, which trains a new one, or '
                "model.merge_and_unload()"
            )
        if file == "model" and self._tokenizer is None:
            raise ConfigError(
                "oat.Trainer(model=...): a model that is given as an object needs its tokenizer; pass "
                "tokenizer=..."
            )
        self._files[file] = _of_split(path, section) if isinstance(path, Mapping) else path
        section[field] = str(self.run_dir / GIVEN / file)

    def _plain(self, value: Any, place: tuple[str, ...]) -> Any:
        """The tree as a file could have it; functions, classes and oracles by name."""
        if isinstance(value, Mapping):
            return {str(key): self._plain(item, (*place, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item, place) for item in value]
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
            return value.item()
        if isinstance(value, _PLAIN):
            return value
        name = _name_of(value)
        if self._given.setdefault(name, value) is not value:
            raise ConfigError(
                f"oat.Trainer({place[0]}=...): two different objects are called {name}; rename one, since "
                "a run knows them by name"
            )
        return f"python:{name}"

    def _write_one(self, file: str, given: Any, new: Path) -> None:
        if file == "model":
            with saying_what_is_free(new):
                given.save_pretrained(new)
                self._tokenizer.save_pretrained(new)
        else:
            _write_records(
                given,
                new,
                f"oat.Trainer({Path(file).stem}=...)",
                is_checked=about(self.config).stops_at_bad_records,
            )

    def _write_given(self) -> None:
        """Where a run exists, what was given must be what it began with; what an attempt left that never
        became a run is written anew."""
        is_begun = (seen(self.run_dir) / "config.yaml").exists()
        for file, given in list(self._files.items()):
            place = seen(self.run_dir) / GIVEN / file
            new = place.with_name(f".new-{file}")
            shutil.rmtree(new, ignore_errors=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._write_one(file, given, new)
            except BaseException:
                _remove(new)
                raise
            del self._files[file]  # an iterator can be read once
            if not is_begun or not place.exists():
                _remove(place)
                new.rename(place)
                continue
            is_same = _same(place, new)
            _remove(new)
            if not is_same:
                what = "another model" if file == "model" else "other records"
                raise ConfigError(
                    f"{place}: the run in {self.run_dir} was begun with {what}; give the same again, or "
                    "another run_dir"
                )


def _failed(name: str, what: str) -> ContractError:
    return ContractError(f"oat.Trainer: {name} {what}; mend it, and train again")


def _section(given: Any, field: str) -> dict[str, Any]:
    """A section as a dict; what is given alone is its main field, also records by split."""
    is_section = isinstance(given, Mapping) and (field in given or field == "name")
    return dict(given) if is_section else {field: given}


def _is_source(entry: Any) -> bool:
    return isinstance(entry, str | Path) or (
        isinstance(entry, Mapping) and isinstance(entry.get("path"), str | Path)
    )


def _of_split(path: Mapping[str, Any], section: dict[str, Any]) -> Any:
    split = section.pop("split", None) or "train"
    if split not in path:
        raise DataError(
            f"oat.Trainer: there is no split {split!r} among {', '.join(map(str, path))}; give `split`"
        )
    return path[split]


def _merged(before: Any, changes: Any) -> Any:
    """A section with some fields changed; one of another name is another part, and records of another path
    have splits of their own."""
    if not (isinstance(before, Mapping) and isinstance(changes, Mapping)) or changes.get(
        "name", before.get("name")
    ) != before.get("name"):
        return changes
    return {
        **{name: value for name, value in before.items() if name != "split" or "path" not in changes},
        **changes,
    }


def _mixed(section: dict[str, Any]) -> dict[str, Any]:
    """The section of an oracle; of a list of oracles that of their mixture."""
    if not isinstance(section["name"], list | tuple):
        return section
    sources = [_section(each, "name") for each in section["name"]]
    for source in sources:
        if not isinstance(source["name"], str):
            source.setdefault("label", _name_of(source["name"]))
    return {**section, "name": "mixture", "sources": sources}


def _name_of(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__)).strip("<>")


def _check_sources(path: Iterable[Any], where: str) -> None:
    """A list of texts is one of sources; who has prompts there gives them as records."""
    unknown = next((entry for entry in path if isinstance(entry, str) and not is_named(entry)), None)
    if unknown is not None:
        raise DataError(
            f"{where}: expected names of files or datasets, or records, got the text {unknown[:80]!r}; "
            "give prompts as records, "
            f'{{"prompt": {json.dumps(unknown[:80], ensure_ascii=False)}}}'
        )


def _write_records(given: Any, out: Path, where: str, *, is_checked: bool) -> None:
    """As JSON lines.

    Args:
        is_checked: what no run could read is refused here, where people know the record; otherwise it is left
        to whoever counts such records.
    """
    records = given() if callable(given) else given
    if hasattr(records, "with_format"):  # a dataset that may give tensors
        records = records.with_format(None)
    # a data frame, in which NaN is what is missing
    if hasattr(records, "to_dict") and hasattr(records, "columns"):
        records = records.astype(object).where(records.notna(), None).to_dict("records")
    with out.open("w", encoding="utf-8") as file:
        for row, record in enumerate(records, start=1):
            plain = unboxed(record)
            if is_checked:
                checked(plain, f"{where}: record {row}")
            try:
                file.write(json.dumps(plain, ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{where}: record {row}: it cannot be written as JSON ({error}); give dicts of plain "
                    "values"
                ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _same(first: Path, second: Path) -> bool:
    if not first.is_dir():
        return filecmp.cmp(first, second, shallow=False)
    names = [{path.name for path in folder.iterdir()} for folder in (first, second)]
    return names[0] == names[1] and not any(
        filecmp.cmpfiles(first, second, sorted(names[0]), shallow=False)[1:]
    )


def _places(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from _places(value, (*above, name))
