"""The versions of a ledger's oracles, and the steps at which they changed.

When a run is continued, an oracle may have another version than the one that answered before. The ledger
records this change as `change N` in the table `meta`. The record has the previous version and two numbers:
the first training step and the first evaluation that had no recorded take at that time. From this step and
this evaluation on, answers may come from the new version. So this record alone tells how many changes there
were before a row of metrics, also in a replay and after a kill.

If a ledger is cut back for a fork, the changes after the cut are deleted, and the earlier versions are
restored.
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


def load_versions(store: Store, versions: Mapping[str, str]) -> set[str]:
    """Record the versions of the oracles that will be asked. If an oracle has answered in another version
    before, also record this change and warn of it.

    Args:
        versions: the versions by address; "" for an oracle without a version.

    Returns:
        The addresses of the oracles that have changed.
    """
    with store:
        changed = _changed(store.db, versions)
        if changed:
            _put_change(store, changed)
            warn(
                f"oracle {' and '.join(changed)} has changed since this run last asked it (its file, or "
                "the version it declares): it is asked anew from here on, and what it says stands in one "
                "curve with what it said before, so rows from here on have oracle/changes; begin a run "
                "of its own, if that is not meant"
            )
        _put_versions(store, versions)
    return set(changed)


def changed_since(ledger: Path, versions: Mapping[str, str], step: int | None = None) -> set[str]:
    """Return the addresses of the oracles that have answered in another version than the one in `versions`.
    Return an empty set if the file does not exist or is not a ledger.

    Args:
        versions: the versions by address; "" for an oracle without a version.
        step: compare with the ledger's state before this step; None: with its present state.
    """
    if not ledger.exists():
        return set()
    try:
        log = ledger.with_name(f"{ledger.name}-wal")
        # if there is no log, the file is complete
        mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?{mode}", uri=True)) as db:
            return set(_changed(db, versions, step))
    except sqlite3.DatabaseError:
        return set()


def changes_of(store: Reader) -> list[dict[str, Any]]:
    """Return the recorded changes as dicts, oldest first.

    Each dict has three keys. `before` is the previous version of each changed oracle, by address. `train` is
    the first training step, and `eval` the first evaluation, whose take was not yet recorded at the change.
    """
    with store.lock:
        return list(_changes(store.db).values())


def changes(store: Reader, row: int, *, is_evaluated: bool) -> int:
    """Return how often the versions of oracles had changed before the answers of a row of metrics were taken.
    Oracles that change together count as one change.

    Args:
        row: the row's number, which is the number of training steps before it.
        is_evaluated: True if the row contains an evaluation. Then a change before the evaluation's answers
            counts too.
    """
    return sum(
        change["train"] < row or (is_evaluated and change["eval"] <= row) for change in changes_of(store)
    )


def cut(store: Store, step: int) -> None:
    """Undo the changes of versions that were recorded after the takes of all training steps before `step`:
    restore the earlier versions, and delete the records. The caller holds the transaction."""
    for name, change in reversed(_changes(store.db).items()):
        if change["train"] >= step:
            _put_versions(store, change["before"])
            store.db.execute("DELETE FROM meta WHERE name = ?", (name,))


def _changed(db: sqlite3.Connection, versions: Mapping[str, str], step: int | None = None) -> dict[str, str]:
    """Find the oracles that have answered in another version than the one in `versions`. Return their
    previous versions, by address. If an oracle's stored version is empty, the oracle counts as unchanged.

    Args:
        versions, step: as in `changed_since`.
    """
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
    """Return the recorded changes of oracles' versions, oldest first, by their names in the table `meta`."""
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
