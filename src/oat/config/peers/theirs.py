"""What the peers say of their own fields: names, types and defaults of TRL, and the versions of all of them.

`trl_fields.json` beside this module has the fields of TRL's configurations; TRL's environment makes it
(`benchmarks/sides/trl_fields.py`). `TrainingArguments` in it has the fields that all of them inherit.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oat.config.peers.table import family_of

FILE = Path(__file__).parent / "trl_fields.json"
SHARED = "TrainingArguments"
CLASSES = {"GRPOConfig": "grpo", "DPOConfig": "dpo", "RewardConfig": "reward_model", "SFTConfig": "sft"}
"""TRL's configurations, each with our algorithm for it."""


@functools.cache
def trl_fields() -> dict[str, dict[str, Any]]:
    """Return the fields of TRL's classes by class and name, each with its `type` and `default`, and the
    `versions` of its packages."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def versions() -> dict[str, str]:
    """Return the version of each peer of which the tables speak."""
    return {"TRL": trl_fields()["versions"]["trl"], "OpenRLHF": "0.11.2", "verl": "0.9.1"}


def version_of(peer: str) -> str:
    """Return the name of a peer with its version, in two numbers: `TRL 1.16`."""
    return f"{peer} {'.'.join(versions()[peer].split('.')[:2])}"


def fields_of(cls: str) -> dict[str, dict[str, Any]]:
    """Return the fields of one of `CLASSES`, also those that it inherits."""
    return {**trl_fields()[SHARED], **trl_fields()[cls]}


def types_of(field: str) -> set[str]:
    """Return the types of a field in TRL's classes, such as `float` and `None`; empty: it has none."""
    found = [fields[field] for fields in trl_fields().values() if isinstance(fields.get(field), dict)]
    return {kind for what in found if "type" in what for kind in what["type"].split(" | ")}


def class_of(fields: Iterable[str], algorithm: str | None) -> str | None:
    """Return the one of `CLASSES` that fields belong to; None: they can belong to several, or to none.

    Args:
        fields: names that a user gave; those that are no fields of TRL say nothing.
        algorithm: name of the run's algorithm, which decides if it is known.
    """
    if family_of(algorithm):
        return next(cls for cls, ours in CLASSES.items() if family_of(ours) == family_of(algorithm))
    known = {field for cls in CLASSES for field in fields_of(cls)}
    given = known.intersection(fields)
    fitting = [cls for cls in CLASSES if given <= fields_of(cls).keys()]
    return fitting[0] if given and len(fitting) == 1 else None
