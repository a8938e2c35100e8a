"""The version of each oracle that a ledger has answers of, and from which rows on it is another one.

An oracle that has answered and comes back in another version is on record (`change N` in the table `meta`)
with the first step of training, and of evaluations, that had taken nothing by then: what those take, and
later ones, may be of the new version. So the mark of a row is a function of what is on record, in a replay
and after a kill too. A ledger that is cut back for a fork has the version of that time.
"""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from oat.errors import warn
from oat.ledger.reader import Reader
from oat.ledger.store import Store

_VERSION, _CHANGE = "version of ", "change "


def take_up(store: Store, versions: Mapping[str, str]) -> set[str]:
    """Remember the versions of the oracles that will be asked; returns those that had answered in another
    one, which is said and put on record: their curve has a kink that no learning made."""
    with store:
        changed = _changed(store.db, versions)
        if changed:
            _put_change(store, changed)
            warn(
                f"oracle {' and '.join(changed)} has changed since this run last asked it (its file, or "
                "the version it declares): it is asked anew "
                "from here on, and what it says stands in one curve with what it said before, so rows "
                "from here on have oracle/changes; begin a run "
                "of its own, if that is not meant"
            )
        _put_versions(store, versions)
    return set(changed)


def changed_since(ledger: Path, versions: Mapping[str, str], step: int | None = None) -> set[str]:
    """Those oracles that have answered in another version. None for a file that is no ledger, which whoever
    opens it says.

    Args:
        step: as the ledger was before that step; None: as it is.
    """
    if not ledger.exists():
        return set()
    try:
        log = ledger.with_name(f"{ledger.name}-wal")
        # without a log the file alone has everything
        mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?{mode}", uri=True)) as db:
            return set(_changed(db, versions, step))
    except sqlite3.DatabaseError:
        return set()


def changes_of(store: Reader) -> list[dict[str, Any]]:
    """All that is on record, the oldest first: by oracle the version `before`, and the first steps of
    training (`train`) and of evaluations (`eval`) that had taken nothing then."""
    return list(_changes(store.db).values())


def changes(store: Reader, row: int, *, is_evaluated: bool) -> int:
    """How many changes of an oracle came before what a row of metrics tells of."""
    return sum(
        change["train"] < row or (is_evaluated and change["eval"] <= row) for change in changes_of(store)
    )


def cut(store: Store, step: int) -> None:
    """Forget the changes that came when no step before this one was left to take; the caller holds the
    transaction."""
    for name, change in reversed(_changes(store.db).items()):
        if change["train"] >= step:
            _put_versions(store, change["before"])
            store.db.execute("DELETE FROM meta WHERE name = ?", (name,))


def _changed(db: sqlite3.Connection, versions: Mapping[str, str], step: int | None = None) -> dict[str, str]:
    """The oracles that have answered in another version, with that one; what has no version is believed to be
    the same."""
    answered = (
        "SELECT 1 FROM questions q JOIN answers a ON a.question = q.id WHERE q.oracle = ? AND (a.queries "
        "> 0 OR q.known <> '[]') LIMIT 1"
    )
    undone: dict[str, str] = {}
    for change in reversed(_changes(db).values()):
        undone |= change["before"] if step is not None and change["train"] >= step else {}
    changed = {}
    for name, version in sorted(versions.items()):
        (stored,) = db.execute("SELECT value FROM meta WHERE name = ?", (_VERSION + name,)).fetchone() or (
            "",
        )
        before = undone.get(name, stored)
        if before not in ("", version) and db.execute(answered, (name,)).fetchone():
            changed[name] = before
    return changed


def _changes(db: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    """By name in the table, the oldest first."""
    found = db.execute("SELECT name, value FROM meta WHERE name GLOB ?", (f"{_CHANGE}*",))
    return {
        name: json.loads(value)
        for name, value in sorted(found, key=lambda row: int(row[0].removeprefix(_CHANGE)))
    }


def _put_change(store: Store, before: Mapping[str, str]) -> None:
    first = "SELECT COALESCE(MAX(step) + 1, 0) FROM takes WHERE (purpose = 'train') = ?"
    train, evaluation = (
        store.db.execute(first, (is_training,)).fetchone()[0] for is_training in (True, False)
    )
    change = json.dumps({"before": before, "train": train, "eval": evaluation})
    store.db.execute("INSERT INTO meta VALUES (?, ?)", (f"{_CHANGE}{len(_changes(store.db)) + 1}", change))


def _put_versions(store: Store, versions: Mapping[str, str]) -> None:
    store.db.executemany(
        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
        [(_VERSION + name, version) for name, version in versions.items()],
    )
