"""The table of names: settings of TRL, OpenRLHF and verl, and names that are in common use.

The rows are in the files `*.csv` beside this module, with `|` between the columns:

* group: the classes or commands that have the field, separated by spaces; `GRPOConfig:cispo` is for one of
  our algorithms alone, and `older:pairs` for one of their families. `older`: names that the library had
  before. In `values.csv` it is a setting of ours, and the field is a value that it would have elsewhere;
* field: its name there, with dots if it is in sections;
* settings: our settings, separated by spaces. None: the name means nothing here. `oat.Trainer(x)` is the
  argument x of `oat.Trainer`;
* conversion: how a value becomes ours. `=`: it is the same, for every setting of the row. `whole`: so is a
  whole number. `A -> x.y=B & x.z=C; D -> -; * -> =` names values: A sets two settings, D needs none, and any
  other is the same (`whole`: any other whole number; `list`: any other list; `.jinja`: a path with
  this end). On the right, `*` is the value itself, `*-1` one less (or, if that is below 0, a value that the
  user has to choose), `*/s` a number of optimiser steps in steps of the run (`512/s`: this number of them),
  `...` a value that the user has to choose, and `-` a setting that is left out whatever other names say.
  `x.y?=B` gives way to what another name says, or the user by our name. Empty: it has to be worked out, as
  the remark says;
* remark: one sentence on what differs, or why there is no such setting;
* told: the values for which what differs must be known to use ours, so that it stands beside it in a list of
  several names: `*` any, `~` one that our setting has not, `!A` all but A, `A; B` these. Empty: none.

Only this module reads the files, and only when somebody asks.
"""

import csv
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oat.config import part_names
from oat.config.peers.adapters import SECTION
from oat.plugins.registry import ALGORITHMS

HERE = Path(__file__).parent
FILES = {
    "trl": "TRL",
    "trl_training": "TRL",
    "trl_older": "TRL",
    "openrlhf": "OpenRLHF",
    "verl": "verl",
    "peft": "peft",
    "common": "",
}
"""The files of names, in the order in which they are searched, each with the name of its library; "": names
that belong to no single library."""
UNNAMED = ("whole", "list", ".jinja", "*")
"""Left sides of conversions that stand for values without a name, in the order in which they are tried."""
_JINJA = re.compile(r"[^\n{}]*\.jinja2?")
"""Pattern of the path of a template; the text of one has braces."""
LEFT_OUT = object()
"""Value of a setting that is not written."""
_ADAPTERS = ("lora", "lora_config", "peft", "adapter")
"""Names of sections that have the fields of an adapter."""
_KIN = {"pairs": ("DPO", "dpo"), "sft": ("SFT", "sft"), "reward": ("Reward", "rm"), "group": ("GRPO", "ppo")}
"""For each family of our algorithms, how the groups of the peers' classes and commands for it begin."""


_HELD_OUT = {
    "pairs": ("evaluation.pairs",),
    "reward": ("evaluation.pairs",),
    "sft": ("evaluation.path", "evaluation.oracle"),
}
"""For each family of our algorithms that learns from recorded responses, what an evaluation needs in place of
`evaluation.path` alone."""


@dataclass(frozen=True)
class Row:
    """One name of a peer. The columns are described at the head of this file.

    Attributes:
        peer: name of the library, or "".
    """

    peer: str
    groups: tuple[str, ...]
    field: str
    settings: tuple[str, ...]
    conversion: str
    remark: str
    told: str = ""

    def is_told(self, value: Any, ours: Mapping[str, Any]) -> bool:
        """Return True if a list of several names says what differs for a value, which became our settings."""
        if self.told in ("*", "~"):
            return self.told == "*" or value not in ours.values()
        if self.told.startswith("!"):
            return not _is_value(self.told[1:], value)
        return any(_is_value(each, value) for each in self.told.split("; ") if each)

    def named(self) -> list[Any]:
        """Return the values that the conversion names."""
        known = [entry.split(" -> ")[0] for entry in self.conversion.split("; ") if " -> " in entry]
        return [_value(key) for key in known if key not in UNNAMED]

    def takes_any(self) -> bool:
        """Return True if a value that the conversion does not name may become ours too."""
        keys = {entry.split(" -> ")[0] for entry in self.conversion.split("; ")}
        return self.conversion in ("=", "whole") or not keys.isdisjoint(UNNAMED)

    def copies(self) -> bool:
        """Return True if a value that the conversion does not name has a part in our settings, or if that has
        to be worked out."""
        parts = [entry.split(" -> ")[-1] for entry in self.conversion.split("; ")]
        return self.conversion in ("", "whole") or any(part == "=" or "=*" in part for part in parts)

    def converted(self, value: Any, algorithm: str | None = None) -> dict[str, Any] | None:
        """Return our settings for a value of the peer's. Empty: the value needs no setting. None: the value
        has to be worked out, or has no counterpart. A setting with the value `...` must be set too, and its
        value is the user's to choose."""
        claimed = self.claimed(value, algorithm)
        return claimed and {name: ours for name, (ours, _) in claimed.items() if ours is not LEFT_OUT}

    def claimed(
        self, value: Any, algorithm: str | None = None, optimiser_steps: int | None = 1
    ) -> dict[str, tuple[Any, bool]] | None:
        """Return, as `converted` does, the settings about which a value decides: our value, and True if it
        gives way to what another name says. `LEFT_OUT`: the setting is not written.

        Args:
            value: the peer's value.
            algorithm: name of the run's algorithm.
            optimiser_steps: number of optimiser steps in a step of the run; None: not known.
        """
        found = self._pairs(value, optimiser_steps)
        if found is None:
            return None
        if found.get("evaluation.path") is ... and "evaluation.samples" not in found:
            of = _HELD_OUT.get(family_of(algorithm) or "", ("evaluation.path",))
            found = {name: found[name] for name in found if name != "evaluation.path"} | dict.fromkeys(
                of, ...
            )
        return {
            setting.rstrip("?"): (ours, ours is ... or setting.endswith("?"))
            for setting, ours in found.items()
        }

    def _pairs(self, value: Any, optimiser_steps: int | None) -> dict[str, Any] | None:
        """Return our settings for a value, each followed by `?` if it gives way."""
        if self.conversion in ("=", "whole"):
            return self._same(value, self.conversion)
        known = dict(entry.split(" -> ") for entry in self.conversion.split("; ") if entry)
        key = next((key for key in known if key not in UNNAMED and _is_value(key, value)), None)
        others = [key for key in UNNAMED if key in known]
        key = key or next(
            (key for key in others if self._same(value, key) is not None), others[-1] if others else None
        )
        if key is None or known[key] == "=":
            return None if key is None else self._same(value, key)
        if key in UNNAMED and "=*" in known[key] and self._same(value, key) is None:
            return None
        pairs = [pair.split("=", 1) for pair in known[key].split(" & ")] if known[key] != "-" else []
        found = {setting: _ours(text, value, optimiser_steps) for setting, text in pairs}
        worked_out = [found[setting] for setting, text in pairs if text == "*-1" or text.endswith("/s")]
        return None if None in worked_out else found

    def _same(self, value: Any, key: str) -> dict[str, Any] | None:
        if key == "whole":
            number = _number(value)
            if number is None or number < 1 or not number.is_integer():
                return None
            value = int(number)
        if key == "list" and not isinstance(value, list | tuple):
            return None
        if key == ".jinja" and not (isinstance(value, str) and _JINJA.fullmatch(value)):
            return None
        return None if isinstance(value, Mapping) else dict.fromkeys(self.settings, value)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows of names, in the order in which they are searched."""
    return tuple(row for file, peer in FILES.items() for row in _read(file, peer))


@functools.cache
def values() -> dict[tuple[str, str], Row]:
    """Return the rows about values that a setting of ours would have elsewhere, by setting and value."""
    return {(row.groups[0], row.field): row for row in _read("values", "")}


def find(path: Sequence[str], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a name; empty: no table has it.

    A name in sections is sought as a whole, and then without its outer sections, so `args.beta` is `beta`.
    What stands in a section for an adapter, such as `lora`, is sought as a field of `peft_config`. A last
    part alone, such as `ppo_mini_batch_size`, is found if only one answer is possible.

    Args:
        path: the name, with the sections around it. If the first of them is the name of a peer, only its rows
            are sought, and those of names in common use; then a last part needs no `_`.
        algorithm: name of the run's algorithm, which decides among several rows with the name; None: not
            known.

    Returns:
        More than one row if the name has several meanings among which nothing decides.
    """
    by_field, by_last = _indexes()
    parts = [part.replace("-", "_") for part in path]
    if parts[0] in FILES.values():
        return _of_peer(parts[0], parts[1:], algorithm)
    for start in range(len(parts)):
        found = by_field.get(".".join(parts[start:]))
        if not found and parts[start] in _ADAPTERS:
            found = by_field.get(".".join((SECTION, *parts[start + 1 :])))
        if found:
            return _fitting(found, algorithm)
    found = by_last.get(parts[-1], ()) if "_" in parts[-1] else ()
    own = [row for peer in FILES.values() for row in _fitting(_of(found, peer), algorithm)]
    return tuple(own[:1]) if len({(row.settings, row.conversion) for row in own}) == 1 else ()


def _of(found: Iterable[Row], peer: str) -> tuple[Row, ...]:
    return tuple(row for row in found if row.peer == peer)


def _of_peer(peer: str, parts: Sequence[str], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a name that one peer has; if it has none, those of a name in common use."""
    by_field, by_last = _indexes()
    names = [".".join(parts[start:]) for start in range(len(parts))]
    found = next((own for name in names if (own := _of(by_field.get(name, ()), peer))), ())
    found = found or tuple(replace(row, field=parts[-1]) for row in _of(by_last.get(parts[-1], ()), peer))
    found = found or next((own for name in names if (own := _of(by_field.get(name, ()), ""))), ())
    return _fitting(found, algorithm)


def is_listed(path: Sequence[str]) -> bool:
    """Return True if a table has a name with all of its sections."""
    return ".".join(path).replace("-", "_") in _indexes()[0]


def peer_of(names: Iterable[str]) -> str:
    """Return the library that has more than TRL of the names that not both have; "": none has."""
    by_field, by_last = _indexes()
    given = {name.replace("-", "_") for name in names}
    peers = {name: {row.peer for row in (*by_field.get(name, ()), *by_last.get(name, ()))} for name in given}
    mine = sum("TRL" in each for each in peers.values())
    theirs = [
        (sum(peer in each for each in peers.values()), peer)
        for peer in ("OpenRLHF", "verl")
        if any(each == {peer} for each in peers.values())
    ]
    most, peer = max(theirs, default=(0, ""))
    return peer if most > mine else ""


def is_peers(setting: str) -> bool:
    """Return True if a field of our section `algorithm` is none of ours, and a table has it: verl's."""
    section, _, name = setting.partition(".")
    return (
        section == "algorithm"
        and name != "name"
        and not part_names.readers_of(name)
        and is_listed(setting.split("."))
    )


def names() -> Iterable[str]:
    """Return the names that stand in no section."""
    return [field for field in _indexes()[0] if "." not in field]


def algorithm_of(groups: Iterable[str]) -> str | None:
    """Return the algorithm that a class of a peer's has by default, by the names of the class and its bases;
    None: the tables do not have it."""
    rows_of = [row for name in groups if (row := values().get(("algorithm.name", name)))]
    return rows_of[0].converted(rows_of[0].field)["algorithm.name"] if rows_of else None  # type: ignore[index]


def family_of(algorithm: str | None) -> str | None:
    """Return the family of one of our algorithms, by its name; None: it is not one of ours. The names of GRPO
    are the right ones for algorithms with a KL in their loss ("group"), those of DPO for the others
    ("pairs")."""
    if algorithm is None or algorithm not in ALGORITHMS:
        return None
    has_kl = "kl_coef" in part_names.fields_of_parts("algorithm", algorithm)
    return {"sft": "sft", "reward_model": "reward"}.get(algorithm, "group" if has_kl else "pairs")


def readers_of(setting: str) -> tuple[str, ...]:
    """Return our algorithms that read a setting of the section `algorithm`; empty: it is no such setting."""
    section, _, field = setting.partition(".")
    return part_names.readers_of(field) if section == "algorithm" else ()


def is_read(setting: str, algorithm: str | None) -> bool:
    """Return False if a setting belongs to other algorithms. Of a user's own algorithm that is not known."""
    readers = readers_of(setting)
    return not readers or algorithm not in ALGORITHMS or algorithm in readers


def _fitting(found: tuple[Row, ...], algorithm: str | None) -> tuple[Row, ...]:
    """Return those of the rows with one field that the first peer has and that belong to the algorithm. If
    none belong to it, or it is not known, return all rows of the peer with different answers."""
    found = tuple(row for row in found if row.peer == found[0].peer)
    ends = (f":{algorithm}", f":{family_of(algorithm)}")
    own = [tuple(row for row in found if any(each.endswith(end) for each in row.groups)) for end in ends]
    found = own[0] or own[1] or tuple(row for row in found if ":" not in row.groups[0])
    kin = _KIN.get(family_of(algorithm) or "", ())
    fitting = [row for row in found if any(group.startswith(kin) for group in row.groups)] if kin else []
    return tuple({row.settings: row for row in reversed(fitting or found)}.values())[::-1]


@functools.cache
def _indexes() -> tuple[dict[str, tuple[Row, ...]], dict[str, tuple[Row, ...]]]:
    """Return the rows by field, and those of fields in sections by the last part."""
    by_field: dict[str, tuple[Row, ...]] = {}
    by_last: dict[str, tuple[Row, ...]] = {}
    for row in rows():
        by_field[row.field] = (*by_field.get(row.field, ()), row)
        if "." in row.field:
            last = row.field.rpartition(".")[2]
            by_last[last] = (*by_last.get(last, ()), row)
    return by_field, by_last


def _read(file: str, peer: str) -> list[Row]:
    with (HERE / f"{file}.csv").open(encoding="utf-8", newline="") as lines:
        return [
            Row(
                peer,
                tuple(row["group"].split()),
                row["field"],
                tuple(row["settings"].split() if "(" not in row["settings"] else [row["settings"]]),
                row["conversion"],
                row["remark"],
                row.get("told") or "",
            )
            for row in csv.DictReader(lines, delimiter="|", quoting=csv.QUOTE_NONE, restkey="more")
        ]


def _is_value(key: str, value: Any) -> bool:
    """Return True if a value, or the only value in a list, is the one that a key of a conversion names."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    known = _value(key)
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def _ours(text: str, value: Any, optimiser_steps: int | None) -> Any:
    """Return our value for a value of the peer's; None: it is not a number, or ours cannot be worked out."""
    if text.endswith("/s"):
        number = _number(value if text == "*/s" else text[:-2])
        return math.ceil(number / optimiser_steps) if number and optimiser_steps else None
    if text == "*-1":
        number = _number(value)
        return None if number is None else round(number - 1, 12) if number >= 1 else ...
    return {"*": value, "...": ..., "-": LEFT_OUT}.get(text, _value(text))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _value(text: str) -> Any:
    """Read a value in a conversion: JSON, a list of words, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text[1:-1].split(", ") if text.startswith("[") else text
