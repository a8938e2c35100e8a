"""Checks that a run's ledger has the answers that the run has learned from. With a missing, older or cut
ledger, the run would pay for these answers again. So such a ledger is refused.

A **take** is a row of the ledger's table `takes`. It records the answers that one step or one evaluation
took. For each purpose, a checkpoint stores four facts:
* the number of takes before its step;
* the step of the last of these takes;
* the price of all answers taken until then;
* a checksum of the answers in the last of these takes.

Records that the ledger gets later do not change these facts. So the ledger may have more takes than the
checkpoint, for example after a kill or after a roll back.

Row n of `metrics.jsonl` is written after the n-th step took its answers. So the last row reveals a ledger
that lacks takes after the newest checkpoint.

The check finds a ledger that is missing, that lacks its end (an older copy, a lost or cut `-wal`), or that
belongs to another run. It does not find rows that were changed inside the ledger (`ledger/audit.py` looks for
these), nor the loss of answers that no step had taken.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from oat.errors import LedgerError, warn
from oat.files import parse_json, read_only_address
from oat.ledger.reader import Reader
from oat.rundir.checkpoint_files import newest_state, place_of
from oat.rundir.rows import is_step

HELD = "ledger"
"""The key of the facts about the ledger in a checkpoint's state. The other keys are names of parts."""

_NUMBERS = ("queries", "tokens", "cost")
_TAIL = 2**20
"""Number of bytes at the end of `metrics.jsonl` that are searched for the last row."""


class LedgerRequirements:
    """Computes facts about a run's ledger, such as its number of takes. Every checkpoint stores them."""

    def __init__(self, store: Reader):
        self.store = store

    def before(self, step: int, *, evaluated: bool) -> dict[str, Any]:
        """Return the facts about the takes before step `step`, for a checkpoint.

        Args:
            evaluated: True if the evaluation after `step` steps is over. Then its takes are included.

        Returns:
            A dict with the key `HELD`. Its value has, by purpose: `takes` (their number), `last` (the step of
            the last take), `queries`, `tokens` and `cost` (the price of all answers until then), and `sha256`
            (of the last take).

        Raises:
            LedgerError: the ledger's file was moved, removed or replaced.
        """
        self.store.standing.refuse_lost(LedgerError)
        sql = (
            "SELECT purpose, COUNT(*), MAX(step) FROM takes "
            "WHERE step < ? OR (step = ? AND purpose != 'train' AND ?) GROUP BY purpose"
        )
        db, held = self.store.db, {}
        with self.store.lock:
            for purpose, count, last in self.store.rows(sql, (step, step, evaluated)):
                take = _take(db, _NUMBERS, purpose, last)
                assert take is not None, "it has just been counted"
                held[purpose] = {"takes": count, "last": last, **take, "sha256": _sum(db, purpose, last)}
        return {HELD: held}


class _Claim(NamedTuple):
    """A statement of a checkpoint, or of a row of metrics, that the ledger has a certain take.

    Attributes:
        by: the checkpoint or the row, in words for messages.
        held: facts about the take, as `LedgerRequirements.before` returns them for a purpose. `last`, the
            take's step, is always there; other facts may be missing.
    """

    by: str
    purpose: str
    held: Mapping[str, Any]

    @property
    def said(self) -> str:
        return f"{self.by} was written when {_taker(self.purpose, self.held['last'])} had taken its answers"


def refuse_lost(run_dir: Path, step: int | None = None) -> None:
    """Refuse a ledger that lacks answers which the run has taken. The ledger's file is not changed.

    Args:
        step: the step of the checkpoint from which the run continues. None: the checkpoint that
            `checkpoints/latest` names or, if its state is damaged, the newest undamaged one before it; the
            last row of metrics is then checked too.

    Raises:
        LedgerError: the ledger cannot be read, or it lacks answers that were taken according to the
            checkpoint or the row.
    """
    if found := lacking(run_dir, step):
        raise LedgerError(
            f"{run_dir / 'ledger.sqlite'}: {found[0]}. What is lost would be asked and paid again: put "
            "back the ledger that the run wrote, with the files -wal and -shm beside it; or turn the run "
            "back to a checkpoint that this ledger reaches (checkpoints/latest), and take the rows behind "
            "that out of metrics.jsonl; or begin anew in another run_dir"
        )


def lacking(run_dir: Path, step: int | None = None) -> list[str]:
    """Compare a run's ledger with the takes that it must have according to the newest checkpoint and the last
    row of metrics. Return a sentence for each difference; empty if there is none.

    Args:
        step: see `refuse_lost`.
    """
    # claims are read before the ledger, since a run that is still going on may add to both in between
    claims = [*_of_checkpoint(run_dir, step), *(_of_last_row(run_dir) if step is None else ())]
    path = run_dir / "ledger.sqlite"
    if claims and not path.exists():
        return [f"it is missing, and {claims[0].said}"]
    if not claims:
        return []
    try:
        with closing(sqlite3.connect(read_only_address(path, at_a_glance=True), uri=True)) as db:
            return [sentence for claim in claims if (sentence := _lack(db, claim))]
    except (sqlite3.DatabaseError, ValueError) as error:
        return [f"what it holds cannot be read ({type(error).__name__}: {error})"]


def _lack(db: sqlite3.Connection, claim: _Claim) -> str | None:
    """Return a sentence that says what the ledger lacks to meet a claim; None if it meets the claim."""
    purpose = claim.purpose
    held = claim.held
    last = claim.held["last"]
    takes = "SELECT COUNT(*) FILTER (WHERE step <= ?), MAX(step) FROM takes WHERE purpose = ?"
    is_blank = db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    count, newest = (0, None) if is_blank else db.execute(takes, (last, purpose)).fetchone()
    if newest is None:
        return f"{claim.said}, and the ledger has none of that kind"
    if newest < last:
        return f"{claim.said}, and the ledger ends with those of {_taker(purpose, newest)}"
    names = [name for name in _NUMBERS if name in held]
    take = _take(db, names, purpose, last)
    if take is None or count < held.get("takes", 0):
        return f"{claim.said}, and the ledger lacks some that were taken by then"
    for name in names:
        if take[name] < held[name] - 1e-9 * abs(held[name]):  # more than another order of the sum changes
            return (
                f"{claim.said} and {held[name]:,g} {name} were spent, and the ledger counts {take[name]:,g}"
            )
    if "sha256" in held and _sum(db, purpose, last) != held["sha256"]:
        return f"{claim.said}, and those in the ledger are others; it is another run's"
    return None


def _taker(purpose: str, step: int) -> str:
    return f"step {step + 1}" if purpose == "train" else f"the evaluation after {step} steps ({purpose})"


def _take(db: sqlite3.Connection, names: Sequence[str], purpose: str, step: int) -> dict[str, Any] | None:
    """Return sums that the take of a step records, by name; None if the step has no take. A sum, such as
    "queries", covers this take and all earlier ones.

    Args:
        names: names of the sums.
    """
    sql = f"SELECT {', '.join(['step', *names])} FROM takes WHERE (purpose, step) = (?, ?)"
    row = db.execute(sql, (purpose, step)).fetchone()
    return dict(zip(names, row[1:], strict=True)) if row else None


def _sum(db: sqlite3.Connection, purpose: str, step: int) -> str:
    """Return the SHA-256 of the questions and answers of a take, in the take's order. Ids of database
    rows and clock times are left out."""
    sql = """SELECT t.position, q.step, q.round, q.occurrence, q.number,
            q.kind, q.oracle, q.prompt, q.candidates, a.vals, a.marks, a.label
        FROM taken t JOIN questions q ON q.id = t.question JOIN answers a ON a.question = q.id
        WHERE (t.purpose, t.step) = (?, ?) ORDER BY t.position"""
    digest = hashlib.sha256()
    for row in db.execute(sql, (purpose, step)):
        digest.update(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _of_checkpoint(run_dir: Path, step: int | None) -> Iterator[_Claim]:
    """Yield the claims that a checkpoint makes about the ledger, those about training first."""
    found = newest_state(run_dir / "checkpoints", step)
    if found is None:
        return
    name, state = found
    by, number = f"the checkpoint {name}", place_of(name)[0]
    if HELD in state:
        yield from (
            _Claim(by, purpose, held)
            for purpose, held in sorted(state[HELD].items(), key=lambda item: item[0] != "train")
        )
    elif number > 0:
        warn(
            f"{run_dir / 'checkpoints' / name}: an earlier version of oat wrote it, without what its "
            "ledger must hold; only the queries of its row are held against the ledger"
        )
        yield from _of_row(by, number, {**state.get("metrics", {}), **state.get("row", {})})  # `loop.ROW`


def _of_last_row(run_dir: Path) -> Iterator[_Claim]:
    """Yield the claims that the last complete row of `metrics.jsonl` makes about the ledger; none if there is
    no such row."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return
    for line in reversed(lines):
        try:
            row = parse_json(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if is_step(step):
            yield from _of_row(f"row {step} of metrics.jsonl", step, row)
            return


def _of_row(by: str, step: int, row: Mapping[str, Any]) -> Iterator[_Claim]:
    """Yield the takes that the ledger must have according to a row of metrics: the take of the step before
    the row and, if the row has the result of an evaluation, the take of this evaluation."""
    queries = row.get("oracle/queries")
    if step > 0:
        spent = {"queries": queries} if isinstance(queries, int | float) else {}
        yield _Claim(by, "train", {"last": step - 1, **spent})
    if {"eval/sampled", "eval/greedy", "eval/best"} & row.keys():
        yield _Claim(by, "eval", {"last": step})
