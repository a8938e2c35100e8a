"""What names of other libraries are called here, as text: one or two of them in sentences, more in a list."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oat.config.peers.batches import SIZES, step_of
from oat.config.peers.table import LEFT_OUT, Row, family_of, find, values
from oat.errors import shortened

PYTHON = "oat.Trainer"
"""Begins the places of arguments that were given from Python."""
_MOST_LEAVES = 20
"""Largest number of fields of an unknown section that a message translates."""
Leaf = tuple[tuple[str, ...], Any]
"""A field with the sections around it, and its value."""
Given = dict[str, Any]
"""Our settings and their values; `...` is a value that the user has to choose."""


@dataclass(frozen=True)
class Answer:
    """What one field is called here.

    Attributes:
        row: its row.
        others: rows of the field with other meanings, among which nothing decides.
        given: our settings, without those that another field decides; None: they have to be worked out.
        is_decided: True if other fields decide about all of its settings.
    """

    row: Row
    others: tuple[Row, ...]
    value: Any
    given: Given | None
    is_decided: bool = False


def rows_of(path: tuple[str, ...], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a field, but for rows that would only repeat its name."""
    own = ".".join(path).replace("-", "_")
    return tuple(row for row in find(path, algorithm) if row.settings != (own,))


def translated(place: str, leaves: Sequence[Leaf], algorithm: str | None, cls: str | None = None) -> str:
    """Return what fields are called here. What several fields say about one setting is worked out together.

    Args:
        place: where they were set, which decides how settings are written.
        leaves: fields that a table has.
        algorithm: name of the run's algorithm; None: not known.
        cls: name of the class of a peer's whose fields they are; None: of none.
    """
    algorithm, answers = _answers(leaves, algorithm)
    sizes = [answer for answer in answers if answer.row.peer == "TRL" and answer.row.field in SIZES]
    step = _step(answers, algorithm) if len(sizes) > 1 or cls else None
    if len(leaves) <= 2 and not step and not cls:
        return " ".join(text for answer in answers for text in _sentences(place, answer)).rstrip(".")
    ours: Given = {}
    texts: list[str] = []
    unused: list[str] = []
    named = values().get(("algorithm.name", cls or ""))
    if named and not any("algorithm.name" in (answer.given or {}) for answer in answers):
        ours |= _undecided(named.converted(cls) or {}, answers)
        texts.append(f"`{cls}` is {_written(place, ours)}")
    if step and sizes:
        ours |= step
        names = ", ".join(f"`{answer.row.field}`" for answer in sizes)
        texts.append(f"{names} {'are' if sizes[1:] else 'is'} {_written(place, step)} on one device")
    for answer in answers:
        given, name = answer.given, f"`{answer.row.field}`"
        if step and answer in sizes:
            continue
        if given or (given is None and answer.row.settings):
            ours |= given or {}
            ours_of = given or dict.fromkeys(answer.row.settings, ...)
            texts.append(f"{name} {'is' if given else 'belongs to'} {_written(place, ours_of)}")
        elif not answer.is_decided:
            unused.append(name)
    if unused:
        verbs = "mean nothing or need" if unused[1:] else "means nothing or needs"
        texts.append(f"{', '.join(unused)} {verbs} no setting")
    more = f"; and {len(texts) - _MOST_LEAVES} more" if texts[_MOST_LEAVES:] else ""
    python = f" (from Python: {arguments(ours)})" if ours and is_python(place) else ""
    return f"here {'; '.join(texts[:_MOST_LEAVES])}{more}{python}. docs/names.md says what differs"


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
    claimed = [rows[0].claimed(value, algorithm) for rows, value in found]
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
        answers.append(Answer(rows[0], rows[1:], value, given, is_decided))
    return algorithm, answers


def _undecided(ours: Given, answers: Sequence[Answer]) -> Given:
    """Return the settings that no field names."""
    named = {setting for answer in answers for setting in answer.given or {}}
    return {setting: value for setting, value in ours.items() if setting not in named}


def _step(answers: Sequence[Answer], algorithm: str | None) -> Given | None:
    known = algorithm if family_of(algorithm) else None
    given = {answer.row.field: answer.value for answer in answers if answer.row.peer == "TRL"}
    return step_of(given, known) if known else None


def _sentences(place: str, answer: Answer) -> Iterator[str]:
    if answer.is_decided:
        return
    yield _sentence(place, answer.row, answer.given, is_one=not answer.others)
    for row in answer.others:
        yield _sentence(place, row, row.converted(answer.value), is_one=False)


def _sentence(place: str, row: Row, ours: Given | None, *, is_one: bool) -> str:
    of = f"{row.peer}'s " if row.peer else ""
    name = f"{of}`{row.field}`" + ("" if is_one else f" ({', '.join(row.groups)})")
    given = dict.fromkeys(row.settings, ...) if ours is None else ours
    python = f" (from Python: {arguments(given)})" if given and is_python(place) else ""
    if not row.settings:
        return f"{name} means nothing here: {_begun_small(row.remark)}."
    if not given:
        return f"{name} needs no setting here. {row.remark}"
    is_ours = row.field in {setting.rpartition(".")[2] for setting in row.settings}
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
        return shortened(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    try:
        return shortened(json.dumps(value))
    except (TypeError, ValueError):
        return "..."


def arguments(ours: Mapping[str, Any]) -> str:
    """Return settings as arguments of `oat.Trainer`, each section once."""
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
    return ", ".join(f"{name}={_code(value)}" for name, value in tree.items())


def _code(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}": {_code(part)}' for name, part in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(shortened(value), ensure_ascii=False)
    return "..." if value is ... else shortened(repr(value))
