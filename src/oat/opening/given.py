"""Conversion of settings that are Python objects into plain values. Functions and classes become names.
Models and records become paths of files.

A run with such settings can be continued by the same lines of Python that began it. So models and records are
written into the run's directory, and functions and classes are recognised by their names.
"""

import filecmp
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import torch

from oat.assemble.fingerprints import GIVEN
from oat.config.arguments import faults
from oat.config.settings import DEFAULT_PARTS, Config
from oat.data.formats import checked
from oat.data.sources import is_named, unboxed
from oat.errors import ConfigError, DataError, OatError, is_signal
from oat.files import absolute, remove, saying_what_is_free
from oat.models.frozen import EVERY, frozen_in
from oat.models.identity import hold_same
from oat.opening.directory import claim
from oat.rundir.mark import is_begun

Tree = dict[str, Any]
"""A configuration as nested dicts. Their values may still be objects."""

_DEEPEST = 50
"""Largest number of sections and lists within each other in an argument."""
_PLAIN = (str, int, float, bool, type(None), date)
_FILES = (
    ("model", "path", "model"),
    ("prompts", "path", "prompts.jsonl"),
    ("evaluation", "path", "evaluation.jsonl"),
    ("evaluation", "pairs", "pairs.jsonl"),
)
"""The settings whose Python object is written to a file: section, field, and name of the file."""


class Given:
    """The Python objects of one configuration.

    Args:
        run_dir: the run directory, as the user gave it.
        tokenizer: the tokenizer of a model that is given as an object.

    Attributes:
        named: functions, classes and oracles, by the names that stand for them in the configuration.
    """

    def __init__(self, run_dir: Path, tokenizer: Any):
        self.named: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._run_dir = run_dir
        self._tokenizer = tokenizer

    def take_files(self, tree: Tree) -> None:
        """Replace objects in the tree by the paths to which `write` will write them. The objects are a model,
        and lists or other collections of records.

        Raises:
            ConfigError, DataError: an object cannot become a file.
        """
        for section, field, file in _FILES:
            if isinstance(tree.get(section), Mapping):
                self._take_file(tree[section], field, file)

    def plain(self, value: Any, place: tuple[str, ...] = ()) -> Any:
        """Return a value as a configuration file could have it. Functions, classes and oracles become names,
        paths become text, and numbers of numpy and torch become plain numbers.

        Args:
            place: the path of the value in the tree: section and fields.

        Raises:
            ConfigError: two different objects have the same name, a value is within itself or too deep, or
                it raises when it is read.
        """
        if len(place) > _DEEPEST:
            raise ConfigError(
                f"oat.Trainer({place[0]}=...): `{'.'.join(place[:4])}` has more than {_DEEPEST} sections and "
                "lists within each other, or is within itself; give plain values"
            )
        try:
            return self._plain(value, place)
        except OatError:
            raise
        except BaseException as error:  # a user's object may raise anything
            if is_signal(error):
                raise
            raise ConfigError(
                f"oat.Trainer({place[0]}=...): `{'.'.join(place[:4])}` cannot be read, since it raises "
                f"{type(error).__name__}; give a plain value, a function or a class"
            ) from error

    def _plain(self, value: Any, place: tuple[str, ...]) -> Any:
        """Do the work of `plain`."""
        if isinstance(value, Mapping):
            return {str(key): self.plain(item, (*place, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, (*place, str(row))) for row, item in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
            return value.item()
        if isinstance(value, _PLAIN):
            return value
        name = name_of(value)
        if self.named.setdefault(name, value) is not value:
            raise ConfigError(
                f"oat.Trainer({place[0]}=...): two different objects are called {name}; rename one, since "
                "a run knows them by name"
            )
        return f"python:{name}"

    def write(self, *, is_checked: bool) -> None:
        """Write model and records to the run's directory. If the directory has a run, compare them with the
        model and records of this run instead. If an earlier start has left files and no run, replace the
        files.

        Args:
            is_checked: see `_write_records`.

        Raises:
            ConfigError: the given model or records differ from those with which the run was begun, or the
                directory has files and no run.
            DataError: a record cannot be written, or is refused.
        """
        directory = absolute(self._run_dir)
        if self._files:
            claim(directory)
        has_run = is_begun(directory)
        for file, given in list(self._files.items()):
            place = directory / GIVEN / file
            new = place.with_name(f".new-{file}")
            remove(new)
            new.parent.mkdir(exist_ok=True)
            try:
                self._write_one(file, given, new, is_checked=is_checked)
            except BaseException:
                remove(new)
                raise
            del self._files[file]  # an iterator can be read once
            if not has_run or not place.exists():
                remove(place)
                new.rename(place)
                continue
            is_same = _same(place, new)
            remove(new)
            if not is_same:
                what = "another model" if file == "model" else "other records"
                raise ConfigError(
                    f"{place}: the run in {self._run_dir} was begun with {what}; give the same again, or "
                    "another run_dir"
                )

    def _take_file(self, section: Tree, field: str, file: str) -> None:
        path = section.get(field)
        if path is None or isinstance(path, str | Path):
            return
        if isinstance(path, list | tuple) and all(_is_source(entry) for entry in path):
            _check_sources(path, f"oat.Trainer({Path(file).stem}=...)")
            return
        if file == "model" and hasattr(path, "peft_config"):
            raise ConfigError(
                f"oat.Trainer(model=...): a {type(path).__name__} has adapters of PEFT in it, which are "
                'not trained; give the base model with model={"path": base, "lora": {"rank": 8}}, which '
                "trains a new one, or model.merge_and_unload()"
            )
        if file == "model" and self._tokenizer is None:
            raise ConfigError(
                "oat.Trainer(model=...): a model that is given as an object needs its tokenizer; pass "
                "tokenizer=..."
            )
        if file == "model":
            _keep_frozen(path, section)
        self._files[file] = _of_split(path, section) if isinstance(path, Mapping) else path
        section[field] = str(self._run_dir / GIVEN / file)

    def _write_one(self, file: str, given: Any, new: Path, *, is_checked: bool) -> None:
        if file == "model":
            with saying_what_is_free(new):
                given.save_pretrained(new)
                self._tokenizer.save_pretrained(new)
        else:
            _write_records(given, new, f"oat.Trainer({Path(file).stem}=...)", is_checked=is_checked)


def _keep_frozen(model: Any, section: Tree) -> None:
    """Set `model.frozen` to the parameters of a given model that need no gradient.

    Raises:
        ConfigError: some of them need none, and an adapter is to be trained beside all of them.
    """
    frozen = frozen_in(model) if isinstance(model, torch.nn.Module) else ()
    if not frozen:
        return
    if section.get("lora") is None and section.get("adapter") is None:
        section["frozen"] = [*section.get("frozen", ()), *frozen]
    elif frozen != (EVERY,):
        raise ConfigError(
            "oat.Trainer(model=...): some parameters of the model have requires_grad=False, and an adapter "
            "changes what its layers compute, whichever they are; give a model with model.requires_grad_"
            "(True), and name the layers to adapt in model.lora.targets, or leave model.lora out"
        )


def check_arguments(needed: Mapping[str, Any], algorithm: Any, sections: Mapping[str, Any]) -> None:
    """Refuse arguments of `oat.Trainer` that no configuration has, such as those of TRL's trainers.

    Args:
        needed: the arguments that must be given; `...` is one that is missing.
        algorithm: as in `tree_of`.
        sections: every other section and field.

    Raises:
        ConfigError: an argument is missing or unknown, or has an object of another library's. Unknown ones
            are answered together, as the fields of a file are.
    """
    known = [f.name for f in fields(Config)]
    unknown = {argument: value for argument, value in sections.items() if argument not in (*known, "router")}
    others = {name: value for name, value in sections.items() if name not in unknown}
    lines = faults({**needed, "algorithm": algorithm, **others}, unknown, known)
    copied = "\n".join(line for each in lines for line in each.splitlines() if " -> " not in line)
    missing = [
        argument
        for argument, value in needed.items()
        if value is ... and f"\n  {argument}=" not in copied  # the lines to copy have it
    ]
    if lines or missing:
        asked = f"oat.Trainer: give {', '.join(f'{argument}=...' for argument in missing)} (docs/python.md)"
        raise ConfigError("\n".join([*lines, asked] if missing else lines))


def tree_of(model: Any, oracle: Any, prompts: Any, algorithm: Any, sections: Mapping[str, Any]) -> Tree:
    """Return the tree of a configuration.

    Args:
        model, oracle, prompts, algorithm: each a section, or only the value of the section's main field
            (`path` or `name`).
        sections: every other section and field.
    """
    tree = {
        "model": _section(model, "path"),
        "prompts": _section(prompts, "path"),
        "oracle": _mixed(_section(oracle, "name")),
        "algorithm": _section(algorithm, "name"),
        **{name: dict(value) if isinstance(value, Mapping) else value for name, value in sections.items()},
    }
    for section in ("engine", "explorer"):
        if section in tree:
            tree[section] = {"name": DEFAULT_PARTS[section], **_section(tree[section], "name")}
    if not tree.setdefault("stop", {}):
        tree["prompts"].setdefault("epochs", 1)
    if isinstance(tree.get("evaluation"), dict):
        evaluation = tree["evaluation"]
        evaluation |= {
            name: _mixed(_section(evaluation[name], "name"))
            for name in ("oracle", "gold")
            if evaluation.get(name)
        }
    return tree


def merged(before: Any, changes: Any) -> Any:
    """Return a section with some fields changed. If the changes name another part than the section does,
    they replace the whole section. If the changes set a `path`, the old `split` or `frozen` is dropped."""
    if not (isinstance(before, Mapping) and isinstance(changes, Mapping)) or changes.get(
        "name", before.get("name")
    ) != before.get("name"):
        return changes
    return {
        **{
            name: value
            for name, value in before.items()
            if name not in ("split", "frozen") or "path" not in changes
        },
        **changes,
    }


def name_of(given: Any) -> str:
    """Return the name of a function or a class. For any other object, return the name of its class."""
    return str(getattr(given, "__name__", type(given).__name__)).strip("<>")


def places(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every section and field of a tree."""
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from places(value, (*above, name))


def _section(given: Any, field: str) -> Tree:
    """Return a section as a dict. If `given` is not a section, for example a function or a dict of records by
    split, it becomes the value of the section's main field `field`."""
    is_section = isinstance(given, Mapping) and (field in given or field == "name")
    return dict(given) if is_section else {field: given}


def _mixed(section: Tree) -> Tree:
    """If `name` in an oracle's section is a list of oracles, return the section of a mixture of these
    oracles. Otherwise return the section unchanged."""
    if not isinstance(section.get("name"), list | tuple):
        return section
    sources = [_section(each, "name") for each in section["name"]]
    for source in sources:
        if "name" in source and not isinstance(source["name"], str):
            source.setdefault("label", name_of(source["name"]))
    return {**section, "name": "mixture", "sources": sources}


def _is_source(entry: Any) -> bool:
    return isinstance(entry, str | Path) or (
        isinstance(entry, Mapping) and isinstance(entry.get("path"), str | Path)
    )


def _of_split(path: Mapping[str, Any], section: Tree) -> Any:
    split = section.pop("split", None) or "train"
    if split not in path:
        raise DataError(
            f"oat.Trainer: there is no split {split!r} among {', '.join(map(str, path))}; give `split`"
        )
    return path[split]


def _check_sources(path: Iterable[Any], where: str) -> None:
    """Refuse a list of sources if one of its texts names no source. Such a text may be a prompt, and prompts
    must be given as records.

    Raises:
        DataError: a text names neither a file nor a dataset nor a function.
    """
    unknown = next((entry for entry in path if isinstance(entry, str) and not is_named(entry)), None)
    if unknown is not None:
        raise DataError(
            f"{where}: expected names of files or datasets, or records, got the text {unknown[:80]!r}; "
            "give prompts as records, "
            f'{{"prompt": {json.dumps(unknown[:80], ensure_ascii=False)}}}'
        )


def _write_records(given: Any, out: Path, where: str, *, is_checked: bool) -> None:
    """Write records as JSON lines.

    Args:
        is_checked: True: a record that no run can read is refused, and the message names the user's argument.
            False: the record is written, and the reader of the file will count it as malformed.

    Raises:
        DataError: a record cannot be written, or is refused.
    """
    records = given() if callable(given) else given
    if hasattr(records, "with_format"):  # a dataset that may give tensors
        records = records.with_format(None)
    # a data frame, in which NaN is a missing value
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


def _same(first: Path, second: Path) -> bool:
    if first.is_dir():
        return hold_same(str(first), str(second))
    return filecmp.cmp(first, second, shallow=False)
