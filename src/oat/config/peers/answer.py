"""What one field of another library's is called here, in sentences."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oat.config.peers.copied import arguments, is_python, plain
from oat.config.peers.table import Row, values

DATASET = "train_dataset"
AS_DATASET = f"what you gave as {DATASET}"
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
        stranger: the run's algorithm, if it does not read what any of the rows names; "": it does.
        fault: what is wrong with the value's type; "": nothing.
        near: the value that the user may have meant; None: the value is not similar to one.
        rounded: how its number was rounded; "": it was not.
        lacks: what its peer does with it without another field; "": it reads it.
        raw: its value, which a message may not show.
        end: what becomes of it if others decide about all of its settings, as `claims.lost` has it.
        winner: the name of one of these.
    """

    row: Row
    others: tuple[Row, ...]
    value: Any
    given: Given | None
    is_decided: bool = False
    stranger: str = ""
    fault: str = ""
    near: str | None = None
    rounded: str = ""
    lacks: str = ""
    raw: Any = None
    end: str = ""
    winner: str = ""


def sentences(place: str, answer: Answer) -> Iterator[str]:
    if answer.is_decided:
        return
    if answer.near:
        near = _written(place, answer.row.converted(answer.near) or {})
        yield f"{_of(answer.row)} has no such value; did you mean `{answer.near}`, which is {near} here?"
        return
    if answer.fault:
        yield f"its value {answer.fault};"
    if answer.lacks:
        yield f"{answer.row.peer} {answer.lacks}. With that,"
    yield _sentence(place, answer.row, answer.given, answer)
    for row in answer.others:
        yield _sentence(place, row, row.converted(answer.value), answer)


def _sentence(place: str, row: Row, ours: Given | None, answer: Answer) -> str:
    """Return what one of the rows of an answer says."""
    name = _of(row) + ("" if not answer.others else f" ({', '.join(row.groups)})")
    given = dict.fromkeys(row.settings, ...) if ours is None else ours
    python = f" (from Python: {arguments(given)})" if given and is_python(place) else ""
    if python and row.field == DATASET:
        python = f" (from Python: prompts=..., with {AS_DATASET})"
    if not row.settings:
        return f"{name} means nothing here: {_begun_small(row.remark)}."
    if not given:
        return f"{name} needs no setting here. {row.remark}"
    is_ours = row.field in {setting.rpartition(".")[2] for setting in row.settings}
    if answer.stranger:
        unread = f"{answer.stranger} does not read it"
        return f"{name} is {_written(place, given)} here{python}, and {unread}. {row.remark}"
    is_known = given.keys() <= {*row.settings} and answer.value is not False  # false is no default
    if is_ours and not answer.lacks and is_known:
        return f"did you mean {' or '.join(f'`{setting}`' for setting in row.settings)}{python}? {row.remark}"
    return f"{name} is {_written(place, given)} here{python}. {row.remark}"


def _of(row: Row) -> str:
    return f"{row.peer}'s `{row.field}`" if row.peer else f"`{row.field}`"


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
            known.append(f"`--{setting} {plain(value)}`")
        else:
            known.append(f"`{setting}: {plain(value)}`")
    return " with ".join(" and ".join(texts) for texts in (known, open_ones) if texts)


def advice_on_value(path: tuple[str, ...], value: Any) -> str:
    """Return what a value of a setting is called here, if another library has it; otherwise ""."""
    row = values().get((".".join(path), value)) if isinstance(value, str) else None
    if row is None:
        return ""
    ours = row.converted(value)
    return f"write {_written('', ours)}. {row.remark.rstrip('.')}" if ours else _begun_small(row.remark)
