"""What names of other libraries are called here, as text: one of them in sentences, several in lines."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oat.config.peers.adapters import ADAPTER, scaled
from oat.config.peers.batches import BETAS, SIZES, betas, optimiser_steps, rounded, step_of, undivided
from oat.config.peers.rewards import REWARDS, oracle_of
from oat.config.peers.table import LEFT_OUT, Row, family_of, find, is_read, values
from oat.config.yaml_text import tree_to_yaml
from oat.errors import shortened

PYTHON = "oat.Trainer"
"""Begins the places of arguments that were given from Python."""
_MOST_LINES = 60
"""Largest number of fields that a message translates."""
_WIDEST = 36
"""Largest number of characters before an arrow that is aligned with the others."""
_COMPARES = re.compile(r"\b[Hh]ere\b|\b[Tt]here\b(?! (?:is|are|was|were)\b)")
_OF_DEFAULTS = re.compile(r"^[Tt]he default|\bby default\b")
_ONE_DEVICE = "on one device"
_DEFAULTS = "; what TRL does by default, and differs here: docs/names.md#trls-defaults"
Leaf = tuple[tuple[str, ...], Any]
"""A field with the sections around it, and its value."""
Given = dict[str, Any]
"""Our settings and their values; `...` is a value that the user has to choose."""
Together = dict[str, tuple[Given, str, str]]
"""Settings that several fields decide together, by each of these fields: the settings, for all fields but the
first none; a remark; and the name of the first field."""


@dataclass(frozen=True)
class Answer:
    """What one field is called here.

    Attributes:
        row: its row.
        others: rows of the field with other meanings, among which nothing decides.
        given: our settings, without those that another field decides; None: they have to be worked out.
        is_decided: True if other fields decide about all of its settings.
        rounded: how its number was rounded; "": it was not.
        stranger: the run's algorithm, if it does not read what any of the rows names; "": it does.
    """

    row: Row
    others: tuple[Row, ...]
    value: Any
    given: Given | None
    is_decided: bool = False
    stranger: str = ""
    rounded: str = ""


def rows_of(path: tuple[str, ...], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a field, but for rows that would only repeat its name."""
    own = ".".join(path).replace("-", "_")
    return tuple(row for row in find(path, algorithm) if row.settings != (own,))


def translated(place: str, leaves: Sequence[Leaf], algorithm: str | None, cls: str | None = None) -> str:
    """Return what fields are called here: one of them in sentences, several in lines, with what can be copied
    at the end. What several fields say about one setting is worked out together.

    Args:
        place: where they were set, which decides how settings are written.
        leaves: fields that a table has.
        algorithm: name of the run's algorithm; None: not known.
        cls: name of the class of a peer's whose fields they are; None: of none.
    """
    algorithm, answers = _answers(leaves, algorithm)
    together = _together(answers, algorithm, is_python=is_python(place))
    if len(answers) == 1 and not cls and not together.keys() & REWARDS:
        return " ".join(_sentences(place, answers[0])).rstrip(".")
    ours_of_class = _of_class(cls, answers)
    lines = [(f"{cls}", _entry(place, ours_of_class))] if ours_of_class else []
    lines += [_line(place, answer, together) for answer in answers]
    wide = min(max(len(name) for name, _ in lines), _WIDEST)
    texts = [f"\n  {name:{wide}} -> {text}" for name, text in lines[:_MOST_LINES]]
    more = f"\n  ... and {len(lines) - _MOST_LINES} more" if lines[_MOST_LINES:] else ""
    ours = _worked_out(answers, together, ours_of_class)
    if is_python(place) and algorithm and any(name.startswith("algorithm.") for name in ours):
        ours = {"algorithm.name": algorithm, **ours}  # an argument replaces the default `grpo`
    copy = _to_copy(place, ours, _open_names(answers, together, ours))
    end = f"\ndocs/names.md says more{_DEFAULTS if any(each.row.peer == 'TRL' for each in answers) else ''}"
    return f"here these names are:{''.join(texts)}{more}{copy}{end}"


def settings_of(leaves: Sequence[Leaf], algorithm: str) -> Given:
    """Return our settings for fields of a peer's, as far as they can be worked out; `...` is a value that the
    user has to choose. A field that no table has gives none."""
    chosen, answers = _answers([leaf for leaf in leaves if rows_of(leaf[0], algorithm)], algorithm)
    return _worked_out(answers, _together(answers, chosen, is_python=False), {})


def _together(answers: Sequence[Answer], algorithm: str | None, *, is_python: bool) -> Together:
    """Return the settings that several fields of TRL or peft decide together."""
    given = {answer.row.field: answer.value for answer in answers if answer.row.peer in ("TRL", "peft")}
    family = family_of(algorithm)
    step = step_of(given, algorithm) if family else None
    faults = {"algorithm.prompts": ...}, undivided(given, algorithm)
    groups = (
        (SIZES, faults if faults[1] else step and (step, _ONE_DEVICE)),
        (tuple(BETAS), (ours, "") if (ours := betas(given)) else None),
        (REWARDS, oracle_of(given, is_python=is_python)),
        (ADAPTER, scaled(given)),
    )
    found: Together = {}
    for names, decided in groups:
        first, *others = [name for name in given if name in names] or [""]
        if first and decided:
            found[first] = (*decided, first)
            found |= {name: ({}, "", first) for name in others}
    return found


def _of_class(cls: str | None, answers: Sequence[Answer]) -> Given:
    """Return our settings for the name of a class of a peer's, but for those that a field names."""
    named = values().get(("algorithm.name", cls or ""))
    if named is None or any("algorithm.name" in (answer.given or {}) for answer in answers):
        return {}
    said = {setting for answer in answers for setting in answer.given or {}}
    ours = named.converted(cls) or {}
    return {setting: value for setting, value in ours.items() if setting not in said}


def _worked_out(answers: Sequence[Answer], together: Together, begin: Given) -> Given:
    """Return all settings that fields give; a value that the user has to choose is `...`."""
    ours = dict(begin)
    for answer in answers:
        given = together[answer.row.field][0] if answer.row.field in together else answer.given or {}
        ours |= {} if answer.others or answer.stranger else given
    return ours


def _open_names(answers: Sequence[Answer], together: Together, ours: Given) -> list[str]:
    """Return the fields with a value whose settings have to be worked out by hand."""
    return [
        answer.row.field
        for answer in answers
        if answer.others or (answer.given is None and answer.value is not None)
        if answer.row.field not in together
        if answer.row.settings
        and not answer.stranger
        and answer.row.settings[0] not in ours
        and not is_python(answer.row.settings[0])
    ]


def _line(place: str, answer: Answer, together: Together) -> tuple[str, str]:
    """Return a field with its value, and what stands behind the arrow. The value of a field that gives no
    setting is left out, since it may be a secret."""
    row = answer.row
    given = answer.given
    if answer.others:
        meanings = (
            f"{', '.join(each.settings) or 'nothing'} in {each.groups[0]}" for each in (row, *answer.others)
        )
        return row.field, " or ".join(meanings)
    if row.field in together:
        given, remark, first = together[row.field]
        entry = _entry(place, given) if given else f"decided with {first}"
        return _named(place, row.field, answer.value), entry + (f"  ({remark})" if remark else "")
    if given:
        remark = f"{answer.stranger} does not read it" if answer.stranger else _differing(row.remark)
        remark = "; ".join(filter(None, (remark, answer.rounded)))
        return _named(place, row.field, answer.value), _entry(place, given) + (
            f"  ({remark})" if remark else ""
        )
    if answer.is_decided:
        return row.field, "said by the other names"
    if given is None and row.settings:
        return row.field, f"{', '.join(row.settings)}: {row.remark}"
    return row.field, f"no setting{': ' if given is None or not row.settings else ' needed: '}{row.remark}"


def _named(place: str, field: str, value: Any) -> str:
    if is_python(place):
        return f"{field}={_code(value)}"
    return f"--{field} {_plain(value)}" if place.startswith("--") else f"{field}: {_plain(value)}"


def _entry(place: str, ours: Mapping[str, Any]) -> str:
    """Return settings as they stand behind an arrow."""
    if is_python(place):
        return arguments(ours)
    if place.startswith("--"):
        return " ".join(
            f"--{name} {'...' if value is ... else _plain(value)}" for name, value in ours.items()
        )
    return ", ".join(f"{name}: {'...' if value is ... else _plain(value)}" for name, value in ours.items())


def _differing(remark: str) -> str:
    """Return the first clause of a remark that says how the meaning differs; "": none does."""
    clauses = re.split(r"; |\. ", remark.rstrip("."))
    return next((each for each in clauses if _COMPARES.search(each) and not _OF_DEFAULTS.search(each)), "")


def _to_copy(place: str, ours: Mapping[str, Any], open_names: Sequence[str]) -> str:
    """Return the settings with known values in a form that can be copied, and the names of the others."""
    known = {name: value for name, value in ours.items() if value is not ... and not is_python(name)}
    if not known:
        return ""
    left = [name for name in ours if name not in known]
    parts = [f"choose {', '.join(left)}"] if left else []
    parts += [f"work out {', '.join(open_names)}"] if open_names else []
    without = f" ({', and '.join(parts)} yourself)" if parts else ""
    if is_python(place):
        block = "".join(f"\n  {name}={_code(value, most=0)}," for name, value in tree_of(known).items())
    elif place.startswith("--"):
        block = "\n  " + " ".join(f"--{name} {shlex.quote(_plain(value))}" for name, value in known.items())
    else:
        block = "\n" + textwrap.indent(tree_to_yaml(tree_of(known)).rstrip("\n"), "  ")
    return f"\nwrite{without}:{block}"


def advice_on_value(path: tuple[str, ...], value: Any) -> str:
    """Return what a value of a setting is called here, if another library has it; otherwise ""."""
    row = values().get((".".join(path), value)) if isinstance(value, str) else None
    if row is None:
        return ""
    ours = row.converted(value)
    return f"write {_written('', ours)}. {row.remark.rstrip('.')}" if ours else _begun_small(row.remark)


def is_python(place: str) -> bool:
    return place.startswith(PYTHON)


def _answers(leaves: Sequence[Leaf], algorithm: str | None) -> tuple[str | None, list[Answer]]:
    """Return the algorithm that fields name, or that of the run, and the answer about each field. A setting
    that several fields name is that of a field which leaves it out, then of one that does not give way, and
    then of the one with the fewest settings."""
    found = [(rows_of(path, algorithm), value) for path, value in leaves]
    named = [(rows[0].converted(value, algorithm) or {}).get("algorithm.name") for rows, value in found]
    name = next((name for name in named if name), None)
    if name and (not family_of(algorithm) or family_of(name) == family_of(algorithm)):
        algorithm = name
        found = [(rows_of(path, algorithm), value) for path, value in leaves]
    steps = optimiser_steps({rows[0].field: value for rows, value in found if rows[0].peer == "TRL"})
    claimed = [rows[0].claimed(value, algorithm, steps) for rows, value in found]
    claims: dict[str, list[tuple[bool, bool, int, int]]] = {}
    for place, settings in enumerate(claimed):
        for setting, (ours, gives_way) in (settings or {}).items():
            claim = (ours is not LEFT_OUT, gives_way, len(settings or {}), -place)
            claims.setdefault(setting, []).append(claim)
    answers = []
    for place, (rows, value) in enumerate(found):
        settings = claimed[place]
        won = settings and {each: settings[each][0] for each in settings if -min(claims[each])[3] == place}
        given = won and {setting: ours for setting, ours in won.items() if ours is not LEFT_OUT}
        settings_of_row = list(rows[0].settings if settings is None else settings)
        is_said = bool(settings_of_row) and all(setting in claims for setting in settings_of_row)
        is_decided = not won and is_said
        meant = [tuple(given)] if len(rows) == 1 and given is not None else [row.settings for row in rows]
        are_read = any(all(is_read(setting, algorithm) for setting in each) for each in meant)
        stranger = "" if are_read else str(algorithm)
        how = rounded(value, steps) if given and "=*/s" in rows[0].conversion else ""
        answers.append(Answer(rows[0], rows[1:], value, given, is_decided, stranger, how))
    return algorithm, answers


def _sentences(place: str, answer: Answer) -> Iterator[str]:
    if answer.is_decided:
        return
    yield _sentence(place, answer.row, answer.given, answer)
    for row in answer.others:
        yield _sentence(place, row, row.converted(answer.value), answer)


def _sentence(place: str, row: Row, ours: Given | None, answer: Answer) -> str:
    """Return what one of the rows of an answer says."""
    of = f"{row.peer}'s " if row.peer else ""
    name = f"{of}`{row.field}`" + ("" if not answer.others else f" ({', '.join(row.groups)})")
    given = dict.fromkeys(row.settings, ...) if ours is None else ours
    python = f" (from Python: {arguments(given)})" if given and is_python(place) else ""
    if not row.settings:
        return f"{name} means nothing here: {_begun_small(row.remark)}."
    if not given:
        return f"{name} needs no setting here. {row.remark}"
    is_ours = row.field in {setting.rpartition(".")[2] for setting in row.settings}
    if answer.stranger:
        unread = f"{answer.stranger} does not read it"
        return f"{name} is {_written(place, given)} here{python}, and {unread}. {row.remark}"
    if is_ours and given.keys() <= {*row.settings}:
        return f"did you mean {' or '.join(f'`{setting}`' for setting in row.settings)}{python}? {row.remark}"
    return f"{name} is {_written(place, given)} here{python}. {row.remark}"


def _begun_small(remark: str) -> str:
    """Return a remark as it stands behind a colon."""
    is_name = any(letter.isupper() for letter in remark.split(" ")[0][1:])
    return (remark if is_name else f"{remark[:1].lower()}{remark[1:]}").rstrip(".")


def _written(place: str, ours: Mapping[str, Any]) -> str:
    """Return settings with their values, as a file or flags have them; `...` is a value that is not known."""
    known, open_ones = [], []
    for setting, value in ours.items():
        if value is ... or is_python(setting):
            open_ones.append(f"`{setting}`")
        elif place.startswith("--"):
            known.append(f"`--{setting} {_plain(value)}`")
        else:
            known.append(f"`{setting}: {_plain(value)}`")
    return " with ".join(" and ".join(texts) for texts in (known, open_ones) if texts)


def _plain(value: Any) -> str:
    """Return a value as YAML has it on one line."""
    if isinstance(value, str):
        return shortened(value) if value.isprintable() else shortened(json.dumps(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError):
        return "..."


def escaped(text: str) -> str:
    """Return a name or a place with escapes for line breaks and what else is not visible."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def arguments(ours: Mapping[str, Any]) -> str:
    """Return settings as arguments of `oat.Trainer`, each section once."""
    return ", ".join(f"{name}={_code(value)}" for name, value in tree_of(ours).items())


def tree_of(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in their sections. An argument of `oat.Trainer` alone stands beside the sections."""
    tree: dict[str, Any] = {}
    for setting, value in ours.items():
        if is_python(setting):
            tree[setting.partition("(")[2].rstrip(")")] = ...
            continue
        *sections, last = setting.split(".")
        inner = tree
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner.setdefault(last, value)
    return tree


def _code(value: Any, most: int = 80) -> str:
    """Return a value as Python. A text of more than `most` characters is cut; 0: none is."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f'"{escaped(name)}": {_code(part, most)}' for name, part in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(_code(part, most) for part in value)}]"
    text = json.dumps(value, ensure_ascii=not value.isprintable()) if isinstance(value, str) else repr(value)
    return "..." if value is ... else shortened(text, most) if most else text
