"""Whether a run may be continued or forked with other settings. Each field says when it may change
(`config/fields.py`)."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from oat.config.fields import CHANGES, UNSAID, Change, Said, said_at, settings_below
from oat.config.load import Origins, convert, dump
from oat.config.parts import filled, settings_of, with_settings
from oat.config.settings import Component, Config, Part
from oat.config.stored import load_stored, with_given
from oat.errors import ConfigError
from oat.files import absolute, start
from oat.plugins.loading import same_by_file
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoint_files import names_in, place_of, pointed

_MOST_SHOWN = 64
"""Largest number of letters of a value that a list of differences shows."""


def as_begun(resolved: Resolved) -> Resolved:
    """Return the configuration with the values that the run in its directory fixed when it began. If the
    directory has no run, return the configuration unchanged.

    Raises:
        ConfigError: the directory has a run, and settings that must stay the same differ from the run's.
    """
    file = Path(resolved.config.run_dir) / "config.yaml"
    if not file.exists():
        return resolved
    return as_stored(resolved, resolve_stored(file, resolved), file, is_fork=False)


def resolve_stored(file: Path, resolved: Resolved) -> Resolved:
    """Resolve the configuration of a run. From `resolved` are parts that have the same settings there, and
    `tracking`, which may always change."""
    stored = with_settings(*load_stored(file), like=resolved.config)
    return resolve(replace(stored, tracking=resolved.config.tracking), {})


def as_stored(resolved: Resolved, stored: Resolved, file: Path, *, is_fork: bool) -> Resolved:
    """Return the configuration with which a run is continued or forked. If `resolved` leaves a field open
    that a run fixes when it is created (`Said.open`), the field gets the value that the run fixed.

    Args:
        resolved: the configuration that the user gives now.
        stored: the run's own configuration, resolved.
        file: the file of the run's directory from which `stored` was read.
        is_fork: True if `resolved` is the configuration of a fork of the run; False if the run is continued.

    Raises:
        ConfigError: the two configurations differ in settings that must stay the same. The message lists the
            differences.
    """
    config, before = known_by_file(resolved.config, file), stored.config
    run_dir = str(file.parent) if is_fork else config.run_dir
    if not (is_fork and absolute(before.run_dir).resolve() == file.parent):
        for name in (stored.config.run_dir, os.path.relpath(file.parent, start())):
            before, config = (with_given(each, name, run_dir) for each in (before, config))
    is_measured = config.learner.micro_batch_tokens == "auto"
    config = _with_fixed(config, before)
    differences = _differences(before, config, is_measured=is_measured)
    refused = _refused_in_forks(differences, before, config)
    if is_fork and refused:
        raise ConfigError(
            f"a fork of {file.parent} cannot change these; begin a run of its own, or undo:"
            f"{_listed((each, '') for each in refused)}"
        )
    if differences and not is_fork:
        lines = _listed((each, _reason(each.field, before, config, resolved.origins)) for each in differences)
        way = "begin a run of its own" if refused else _way_to_fork(file.parent)
        raise ConfigError(
            f"{file.parent} holds a run of another configuration; give another run_dir ({way}), or "
            f"undo:{lines}"
        )
    return replace(resolved, config=config)


def _way_to_fork(run_dir: Path) -> str:
    """Return how a run is forked from its newest checkpoint, and which other steps have one."""
    names = names_in(run_dir / "checkpoints")
    newest, _ = pointed(run_dir / "checkpoints")
    if not newest:
        return "begin a run of its own: this one has no checkpoint to fork yet"
    step = place_of(newest[-1])[0]
    others = ", ".join(str(each) for each in sorted({place_of(name)[0] for name in names} - {step}))
    way = f'fork it with --from {run_dir}@{step}, from Python source="{run_dir}@{step}"'
    return f"{way}{f'; or from step {others}' if others else ''}"


def known_by_file(config: Config, file: Path) -> Config:
    """Return the configuration with functions and classes named as in the run's own configuration file.

    The file of a run that was begun from Python has settings such as `python:score`. If such a setting is
    `rewards.py:score` in `config`, it is `python:score` in the result (`plugins.same_by_file`).

    Args:
        file: the run's own configuration file.
    """
    own = dump(config)
    tree = same_by_file(dump(load_stored(file)[0]), own)
    return config if tree == own else with_settings(convert(Config, tree, (), {}), {}, like=config)


def with_chosen(config: Config, chosen: Mapping[tuple[str, str], Any]) -> Config:
    """Return the configuration with the values that were chosen or measured while the run was made.

    Args:
        chosen: the values by (section, field).
    """
    for (section, name), value in chosen.items():
        config = _with(config, section, name, value)
    return config


def _with_fixed(config: Config, stored: Config) -> Config:
    """Return the configuration. Each field that it leaves open (`Said.open`) gets the value in `stored`."""
    for setting in settings_below(config):
        is_open = setting.said.open is not UNSAID and setting.value == setting.said.open
        if is_open and len(setting.path) == 2:
            section, name = setting.path
            config = _with(config, section, name, getattr(_settings(stored, section), name))
    return config


def _settings(config: Config, section: str) -> Any:
    part = getattr(config, section)
    return settings_of(config, section) if isinstance(part, Component) else part


def _with(config: Config, section: str, name: str, value: Any) -> Config:
    part = getattr(config, section)
    if isinstance(part, Part) and not hasattr(part.settings, name):
        return config
    changed: Any = filled(part, {name: value}) if isinstance(part, Part) else replace(part, **{name: value})
    sections: dict[str, Any] = {section: changed}
    return replace(config, **sections)


class _Difference(NamedTuple):
    """A field with its value in the run and its value now, as plain data."""

    field: str
    before: Any
    now: Any


def _differences(stored: Config, now: Config, *, is_measured: bool) -> list[_Difference]:
    """Return each field that differs although it must stay the same when a run is continued.

    Args:
        is_measured: True if `learner.micro_batch_tokens` was measured within `compute.memory_gb`. Then
            `compute.memory_gb` must stay the same too.
    """
    return [
        each
        for each in _differing(dump(stored), dump(now))
        if (is_measured and each.field == "compute.memory_gb") or _may_change(each, stored, now) != "always"
    ]


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[_Difference]:
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differing(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(_Difference(f"{prefix}{name}", old, new))
    return found


def _by_setting(difference: _Difference) -> list[_Difference]:
    """Return the differences of single settings. If one side lacks a whole section, they are those that the
    section sets on the other side."""
    field, *values = difference
    sides = [{} if value is None else value for value in values]
    if not all(isinstance(side, dict) for side in sides):
        return [difference]
    before, now = sides
    return _differing(before, now, f"{field}.") or [difference]


def _listed(differences: Iterable[tuple[_Difference, str]]) -> str:
    """Return a line for each setting that differs, with the values below each other. After the settings of a
    difference, there is the text beside it."""
    found: list[tuple[_Difference, str]] = []
    for difference, text in differences:
        *others, last = _by_setting(difference)
        found += [*((each, "") for each in others), (last, text)]
    width = max(len(each.field) for each, _ in found) + 1
    return "".join(
        f"\n  {f'{each.field}:':{width}} {' -> '.join(_shortened(each.before, each.now))}{text}"
        for each, text in found
    )


def _shortened(before: Any, now: Any) -> tuple[str, str]:
    """Return two values as JSON. Of a long value there is only the part where the two begin to differ."""
    texts = json.dumps(before), json.dumps(now)
    letters = enumerate(zip(*texts, strict=False))
    same = next((place for place, (a, b) in letters if a != b), min(map(len, texts)))
    begin = max(0, same - _MOST_SHOWN // 4) if max(map(len, texts)) > _MOST_SHOWN else 0

    def part(text: str) -> str:
        start = min(begin, max(0, len(text) - _MOST_SHOWN))
        end = start + _MOST_SHOWN
        return f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}"

    return part(texts[0]), part(texts[1])


def _refused_in_forks(differences: Iterable[_Difference], stored: Config, now: Config) -> list[_Difference]:
    """Return the differences that a fork may not have. One is fixed by what the run does: with
    `prompts.epochs`, a checkpoint counts prompts in steps of `algorithm.prompts`."""
    fixed = ["algorithm.prompts"] if stored.prompts.epochs else []
    return [each for each in differences if each.field in fixed or _may_change(each, stored, now) == "never"]


def _may_change(difference: _Difference, stored: Config, now: Config) -> Change:
    """Return when the setting that differs may change; of a whole section, the least of its fields."""
    names = difference.field.split(".")
    sides = [said_at(side, names, Said(may_change="never")).may_change for side in (stored, now)]
    found: Change = min(sides, key=CHANGES.index)
    return found


def _reason(field: str, stored: Config, now: Config, origins: Origins) -> str:
    """Return why `learner.schedule_steps`, the critic's, or `model.frozen` differs from its stored value, and
    what to do.

    Of `schedule_steps`, return "" if the schedule itself differs too, or the user set the number of steps.
    Return "" for every other field.
    """
    if field == "model.frozen" and not stored.model.frozen:
        return (
            " (the run trains every tensor, also if it was begun with a model object that has "
            "requires_grad=False: earlier versions of oat did not respect it)"
        )
    if field not in ("learner.schedule_steps", "learner.critic_schedule_steps"):
        return ""
    name = field.removeprefix("learner.")
    schedule, of_now = (_schedule_of(config, name) for config in (stored, now))
    if ("learner", name) in origins or schedule != of_now:
        return ""
    return (
        f" (it follows from stop.max_steps, where a {schedule} schedule ends by default, and a run keeps "
        "the schedule it began with: pass "
        f"--{field} {getattr(stored.learner, name)} to go on with that one; a run that may be made longer "
        f"sets {field} at its start)"
    )


def _schedule_of(config: Config, steps: str) -> str:
    """Return the schedule whose length the field `steps` of the learner is."""
    own = config.learner.critic_schedule if steps == "critic_schedule_steps" else None
    return own or config.learner.schedule
