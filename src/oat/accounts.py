"""What a run's ledger says to people: who was asked, what it cost, whether the file is sound; and its answers as data for others.

    preference    {"prompt", "chosen", "rejected"}, lists of messages: a pair for each comparison that has a winner, and for each question with scores
                  its highest against its lowest, where they differ
    scored        {"prompt", "completion", "score"}: a row for each candidate with a score

Both are layouts that TRL's trainers read.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from oat import schema
from oat.errors import ConfigError, LedgerError
from oat.files import write_atomically
from oat.store import Asked, Store, text_name
from oat.types import Answer

Layout = Literal["preference", "scored"]


@dataclass(frozen=True)
class Account:
    """What was asked of one oracle for one purpose: numbers of questions, but for `queries` (priced items), `cost` and `seconds`.

    Attributes:
        pending: those without an answer yet.
        taken: those that steps learned from, or evaluations read.
        tied, abstained, failed, unpaid: with such a mark on any of their values.
        cached: those of which at least one value was known from an earlier answer.
        again: how often one was asked once more after a kill.
    """

    purpose: str
    oracle: str
    asked: int
    answered: int
    pending: int
    taken: int
    tied: int
    abstained: int
    failed: int
    unpaid: int
    cached: int
    again: int
    queries: int
    tokens: int
    cost: float
    seconds: float


@dataclass(frozen=True)
class Agreement:
    """How often two oracles judged alike what both were asked.

    Attributes:
        judged: comparisons that both decided, and pairs of responses to one prompt that both scored, differently from each other.
        agreed: those with the same winner.
    """

    first: str
    second: str
    judged: int
    agreed: int


_COLUMNS = tuple(f.name for f in fields(Account))


def accounts_table(run_dir: Path) -> str:
    """A line for each purpose and oracle, and one for each two oracles that were asked about the same.

    Raises:
        LedgerError: the directory has no ledger, or it cannot be opened.
    """
    with closing(_ledger(run_dir)) as store:
        rows, alike = [list(_COLUMNS), *(_cells(account) for account in accounts(store))], agreements(store)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(_justified(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows
    ]
    return "\n".join(lines + [f"{a.first} and {a.second} agree on {a.agreed:,} of {a.judged:,} pairs" for a in alike])


def problems(run_dir: Path) -> list[str]:
    """What is wrong with a run's ledger, in sentences.

    Raises:
        LedgerError: as for `accounts_table`.
    """
    with closing(_ledger(run_dir)) as store:
        return contradictions(store)


def accounts(store: Store) -> list[Account]:
    """What was asked of whom and what came back, by purpose and oracle."""
    marked = ", ".join(f"""COALESCE(SUM(a.marks LIKE '%"{mark}"%'), 0)""" for mark in ("tie", "abstain", "failed", "unpaid"))
    numbers = "COUNT(*), COUNT(a.question), COUNT(*) - COUNT(a.question), COUNT(t.question)"
    sql = f"""SELECT q.purpose, q.oracle, {numbers}, {marked}, SUM(q.cached LIKE '%"%'), SUM(q.again),
        COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0), COALESCE(SUM(a.seconds), 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        GROUP BY q.purpose, q.oracle ORDER BY q.purpose DESC, q.oracle"""
    return [Account(*row) for row in store.db.execute(sql)]


def agreements(store: Store) -> list[Agreement]:
    """For each two oracles that were asked about the same responses to the same prompt; of what one was asked twice, the first."""
    once = "(SELECT MIN(id) AS id, oracle, kind, prompt, candidates FROM questions GROUP BY oracle, kind, prompt, candidates)"
    sql = f"""SELECT f.oracle, s.oracle, f.kind, a.vals, a.marks, b.vals, b.marks
        FROM {once} f JOIN {once} s ON (s.kind, s.prompt, s.candidates) = (f.kind, f.prompt, f.candidates) AND f.oracle < s.oracle
        JOIN answers a ON a.question = f.id JOIN answers b ON b.question = s.id"""
    found: dict[tuple[str, str], list[bool]] = {}
    for first, second, kind, *answers in store.db.execute(sql):
        found.setdefault((first, second), []).extend(_alike(kind, *map(json.loads, answers)))
    return [Agreement(*oracles, len(alike), sum(alike)) for oracles, alike in sorted(found.items()) if alike]


def contradictions(store: Store) -> list[str]:
    """What is wrong with the file, in sentences; empty for a sound ledger."""
    found = [f"SQLite says: {line}" for (line,) in store.db.execute("PRAGMA integrity_check") if line != "ok"]
    found += [
        f"table {table}, row {row}: points to a row of {to} that is not there" for table, row, to, _ in store.db.execute("PRAGMA foreign_key_check")
    ]
    for name, data in store.db.execute("SELECT hash, data FROM blobs"):
        if hashlib.sha256(data).hexdigest() != name:
            found.append(f"blob {name[:12]}: its content has another hash")
    for name, text in store.db.execute("SELECT hash, text FROM texts"):
        if text_name(text) != name:
            found.append(f"text {name[:12]}: its content has another hash")
    for sql, what in schema.CONTRADICTIONS.items():
        found += [f"{what}: {' '.join(map(str, row))}" for row in store.db.execute(sql)]
    return found


def export_answers(run_dir: Path, out: Path, layout: str, purpose: str = "train") -> int:
    """Write the answers of a purpose as a data set, JSONL or Parquet by the file's name; returns its number of rows.

    Raises:
        ConfigError: an unknown layout or ending, or pyarrow is missing.
        LedgerError: as for `accounts_table`.
    """
    if layout not in get_args(Layout):
        raise ConfigError(f"no layout {layout!r}; give one of {', '.join(get_args(Layout))}")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out}: give a name that ends in .jsonl or .parquet")
    make = _preferences if layout == "preference" else _scored
    with closing(_ledger(run_dir)) as store:
        rows = [row for asked in store.answered() if asked.question.key.purpose == purpose for row in make(asked, *store.answer(asked))]
    if out.suffix == ".jsonl":
        write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        _write_parquet(rows, out)
    return len(rows)


def _ledger(run_dir: Path) -> Store:
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        raise LedgerError(f"{run_dir}: has no ledger.sqlite; give the directory that `oat train` named")
    return Store(path, read_only=True)


def _alike(kind: str, values: list[float], marks: list[str], others: list[float], their_marks: list[str]) -> list[bool]:
    """For each pair that both answers decide, whether they decide alike."""
    sound = [place for place, both in enumerate(zip(marks, their_marks, strict=True)) if both == ("ok", "ok")]
    if kind == "compare":
        pairs = [(values[place] - 0.5, others[place] - 0.5) for place in sound]
    else:
        pairs = [(values[i] - values[j], others[i] - others[j]) for i, j in combinations(sound, 2)]
    return [(mine > 0) == (theirs > 0) for mine, theirs in pairs if mine and theirs]


def _cells(account: Account) -> list[str]:
    values = [getattr(account, column) for column in _COLUMNS]
    return [value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" for value in values]


def _justified(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if _COLUMNS[column] in ("purpose", "oracle") else cell.rjust(width)


def _preferences(asked: Asked, answer: Answer, label: int | None) -> Iterator[dict[str, Any]]:
    texts = asked.question.candidates
    if asked.question.kind == "compare":
        if label is not None:
            yield {"prompt": _prompt(asked), "chosen": _reply(texts[label]), "rejected": _reply(texts[1 - label])}
        return
    sound = [(value, number) for number, (value, mark) in enumerate(zip(answer.values, answer.marks, strict=True)) if mark == "ok"]
    if sound and max(sound)[0] > min(sound)[0]:
        (_, best), (_, worst) = max(sound), min(sound)
        yield {"prompt": _prompt(asked), "chosen": _reply(texts[best]), "rejected": _reply(texts[worst])}


def _scored(asked: Asked, answer: Answer, label: int | None) -> Iterator[dict[str, Any]]:
    if asked.question.kind == "score":
        for text, value, mark in zip(asked.question.candidates, answer.values, answer.marks, strict=True):
            if mark == "ok":
                yield {"prompt": _prompt(asked), "completion": _reply(text), "score": value}


def _prompt(asked: Asked) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in asked.question.messages]


def _reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _write_parquet(rows: list[dict[str, Any]], out: Path) -> None:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{out}: writing Parquet needs the library pyarrow ({error}); pip install 'oat-align[data]'") from error
    new = out.with_name(f".new-{out.name}")
    parquet.write_table(arrow.Table.from_pylist(rows), new)
    new.replace(out)
