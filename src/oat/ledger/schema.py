"""The schema of a run's ledger: its tables, the migration of older files, and its canonical form.

A `Connection` opens the database, migrates it to the current schema version, and writes it in transactions.
Threads share one connection. A transaction holds the lock from its beginning to its end, and every read holds
it too. So no thread reads what another thread has not committed yet.

The functions below it convert questions and answers to rows of the tables, and rows to questions and answers.
Those that read rows raise ValueError, TypeError or LookupError if a row is damaged.
"""

import functools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self

from oat import wire
from oat.errors import LedgerError
from oat.files import DirectoryGuard, read_only_address, refuse_network, unwritten
from oat.ledger.intents import AWAITED, Intent, Known, cached_text, cached_values
from oat.ledger.trajectory_files import TrajectoryFiles, is_name
from oat.types import Answer, Key, Mark, Message, Question, Steps, StepUnit

VERSION = 9
LAST_WITH_BLOBS = 8
"""The last version that has the trajectories in a table `blobs (hash, data)`. Later they are files
(`ledger/trajectory_files.py`)."""
KEY = "q.purpose, q.step, q.round, q.occurrence, q.number"
"""The columns that identify a question, in the table `questions` under the alias `q`."""

PAIRS = "q.kind = 'compare' AND a.queries > 0"
"""Is 1 for a question with its answer, `q` and `a`, if an oracle was paid to compare a pair."""

TABLES = {
    "meta": "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "texts": "CREATE TABLE texts (hash TEXT PRIMARY KEY, text TEXT NOT NULL)",
    "rounds": """CREATE TABLE rounds (
    purpose TEXT, step INTEGER, round INTEGER,
    questions INTEGER NOT NULL, groups TEXT NOT NULL, kept INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (purpose, step, round))""",
    "kept_rounds": "CREATE INDEX kept_rounds ON rounds (groups) WHERE kept = 1",
    "questions": """CREATE TABLE questions (
    id INTEGER PRIMARY KEY,
    purpose TEXT, step INTEGER, round INTEGER, occurrence INTEGER, number INTEGER,
    position INTEGER NOT NULL, member INTEGER NOT NULL, kind TEXT NOT NULL, oracle TEXT NOT NULL,
    prompt TEXT NOT NULL, candidates TEXT NOT NULL, picks TEXT NOT NULL, known TEXT NOT NULL,
    features BLOB, ticket TEXT, again INTEGER NOT NULL DEFAULT 0, cached TEXT NOT NULL DEFAULT '[]',
    sent REAL, notes TEXT NOT NULL DEFAULT '{}',
    UNIQUE (purpose, step, round, occurrence, number))""",
    "waiting": """CREATE TABLE waiting (
    question INTEGER PRIMARY KEY REFERENCES questions,
    purpose TEXT NOT NULL, step INTEGER NOT NULL, round INTEGER NOT NULL, position INTEGER NOT NULL,
    answered INTEGER NOT NULL DEFAULT 0,
    queries INTEGER NOT NULL, tokens INTEGER NOT NULL, cost REAL NOT NULL)""",
    "waiting_in_order": (
        "CREATE INDEX waiting_in_order ON waiting (purpose, answered, step, round, position)"
    ),
    "answers": """CREATE TABLE answers (
    question INTEGER PRIMARY KEY REFERENCES questions,
    vals TEXT NOT NULL, marks TEXT NOT NULL, label INTEGER,
    queries INTEGER NOT NULL, cost REAL NOT NULL, answered_by TEXT NOT NULL, seconds REAL NOT NULL,
    tokens INTEGER NOT NULL DEFAULT 0, scores TEXT NOT NULL DEFAULT '[]',
    steps TEXT NOT NULL DEFAULT '[]', sources TEXT NOT NULL DEFAULT '{}')""",
    "purses": """CREATE TABLE purses (
    purpose TEXT PRIMARY KEY, again INTEGER NOT NULL DEFAULT 0,
    queries INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0,
    taken_queries INTEGER NOT NULL DEFAULT 0, taken_tokens INTEGER NOT NULL DEFAULT 0,
    taken_cost REAL NOT NULL DEFAULT 0)""",
    "takes": """CREATE TABLE takes (
    purpose TEXT, step INTEGER,
    queries INTEGER NOT NULL, tokens INTEGER NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0, refused TEXT,
    pairs INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (purpose, step))""",
    "taken": """CREATE TABLE taken (
    purpose TEXT, step INTEGER, position INTEGER, question INTEGER UNIQUE REFERENCES questions,
    PRIMARY KEY (purpose, step, position))""",
    "cache": """CREATE TABLE cache (
    purpose TEXT, oracle TEXT, item TEXT, number INTEGER,
    value REAL NOT NULL, mark TEXT NOT NULL, step INTEGER NOT NULL, scores TEXT NOT NULL DEFAULT '[]',
    steps TEXT NOT NULL DEFAULT '[]', sources TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (purpose, oracle, item, number)) WITHOUT ROWID""",
    "waves": """CREATE TABLE waves (
    purpose TEXT, number INTEGER, first INTEGER NOT NULL, last INTEGER NOT NULL,
    queries INTEGER, tokens INTEGER, cost REAL,
    PRIMARY KEY (purpose, number))""",
}
"""The statements that make each table and index, in the order in which they run.

* `waiting` has every question that no step has taken, with its highest price. A step reads this table instead
  of all questions, so steps do not become slower as a run grows. Its column `answered` is 0 if the question
  has no answer, 1 if it has one, 2 if its answer has values marked `unpaid`, and -1 if its answer still
  awaits values from equal questions.
* `rounds` names in `groups` the file with a round's trajectories, and says in `kept` whether they are still
  kept. The name is the SHA-256 of the file.
* `purses` has two running sums for each purpose: the price of all answers, and the price of the answers that
  steps took.
* The columns `steps` and `sources` have `Answer.steps`, as `rows.steps_text` writes them, and
  `Answer.sources`. A row of `cache` has those of one value.
* `taken` has the questions of each step. A step does not learn from a question at a position below 0: the
  question was too old, the step failed, or dynamic sampling threw the question away.
* `takes` has running sums over the steps of a purpose: prices, and in `pairs` the number of compared pairs
  that were paid (`PAIRS`).
* `waves` has the first and the last question id of each wave, and the price of all answers before the wave.
  If the wave did not wait for these answers, the price is NULL.
"""

RECOUNTS = (
    """INSERT OR IGNORE INTO waiting
        SELECT q.id, q.purpose, q.step, q.round, q.position,
            CASE WHEN a.question IS NULL THEN 0 WHEN a.marks LIKE '%"awaited"%' THEN -1
                WHEN a.marks LIKE '%"unpaid"%' THEN 2 ELSE 1 END,
            CASE WHEN a.question IS NULL THEN json_array_length(q.candidates) ELSE a.queries END,
            COALESCE(a.tokens, 0), COALESCE(a.cost, 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        WHERE t.question IS NULL""",
    """INSERT INTO purses
        SELECT q.purpose, SUM(q.again),
            COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0),
            COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.queries END), 0),
            COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.tokens END), 0),
            COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.cost END), 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        GROUP BY q.purpose""",
)
"""The statements that fill `waiting` and `purses` from the other tables. Existing rows of
`waiting` stay as they are. In a new row, the price of an unanswered question is its number of candidates,
in queries, without tokens and money."""

MIGRATIONS = {
    2: ("ALTER TABLE questions ADD COLUMN again INTEGER NOT NULL DEFAULT 0",),
    3: (
        "ALTER TABLE rounds ADD COLUMN kept INTEGER NOT NULL DEFAULT 1",
        "ALTER TABLE questions ADD COLUMN cached TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE questions ADD COLUMN sent REAL",
        "ALTER TABLE answers ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE takes ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE takes ADD COLUMN cost REAL NOT NULL DEFAULT 0",
        "ALTER TABLE takes ADD COLUMN refused TEXT",
        """UPDATE takes SET cost = s.cost
            FROM (
                SELECT k.purpose, k.step,
                    SUM(TOTAL(a.cost)) OVER (PARTITION BY k.purpose ORDER BY k.step) AS cost
                FROM takes k LEFT JOIN taken t ON (t.purpose, t.step) = (k.purpose, k.step)
                LEFT JOIN answers a ON a.question = t.question
                GROUP BY k.purpose, k.step) s
            WHERE (takes.purpose, takes.step) = (s.purpose, s.step)""",
        *(TABLES[name] for name in ("kept_rounds", "waiting", "waiting_in_order", "purses")),
        """CREATE TABLE cache (
            purpose TEXT, oracle TEXT, item TEXT, number INTEGER,
            value REAL NOT NULL, mark TEXT NOT NULL, step INTEGER NOT NULL,
            PRIMARY KEY (purpose, oracle, item, number)) WITHOUT ROWID""",
        *RECOUNTS,
    ),
    4: tuple(
        f"ALTER TABLE {table} ADD COLUMN scores TEXT NOT NULL DEFAULT '[]'" for table in ("answers", "cache")
    ),
    5: (TABLES["waves"],),
    6: tuple(
        f"ALTER TABLE {table} ADD COLUMN {column}"
        for table in ("answers", "cache")
        for column in ("steps TEXT NOT NULL DEFAULT '[]'", "sources TEXT NOT NULL DEFAULT '{}'")
    ),
    7: (
        "ALTER TABLE questions ADD COLUMN notes TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE takes ADD COLUMN pairs INTEGER NOT NULL DEFAULT 0",
        f"""UPDATE takes SET pairs = s.pairs
            FROM (
                SELECT k.purpose, k.step,
                    SUM(TOTAL({PAIRS})) OVER (PARTITION BY k.purpose ORDER BY k.step) AS pairs
                FROM takes k LEFT JOIN taken t ON (t.purpose, t.step) = (k.purpose, k.step)
                LEFT JOIN questions q ON q.id = t.question LEFT JOIN answers a ON a.question = t.question
                GROUP BY k.purpose, k.step) s
            WHERE (takes.purpose, takes.step) = (s.purpose, s.step)""",
    ),
    LAST_WITH_BLOBS: (),
}
"""By schema version, the statements that bring a ledger of this version to the next one. The step from
`LAST_WITH_BLOBS` also moves the blobs into files (`Connection`)."""

_TAKEN = (
    "answers a JOIN questions q ON q.id = a.question LEFT JOIN waiting w ON w.question = q.id "
    "WHERE w.question IS NULL"
)

CANONICAL = (
    "SELECT purpose, step, round, questions, groups FROM rounds ORDER BY purpose, step, round",
    f"""SELECT {KEY}, q.position, q.member, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known,
            hex(q.features), q.cached
        FROM questions q ORDER BY {KEY}""",
    f"SELECT {KEY}, a.vals, a.marks, a.label, a.queries, a.cost, a.tokens FROM {_TAKEN} ORDER BY {KEY}",
    f"""SELECT t.purpose, t.step, t.position, {KEY}
        FROM taken t JOIN questions q ON q.id = t.question ORDER BY 1, 2, 3""",
    "SELECT purpose, step, queries, tokens, cost, refused FROM takes ORDER BY purpose, step",
    f"SELECT {KEY}, a.scores FROM {_TAKEN} AND a.scores != '[]' ORDER BY {KEY}",
    f"""SELECT {KEY}, a.steps, a.sources FROM {_TAKEN} AND (a.steps != '[]' OR a.sources != '{{}}')
        ORDER BY {KEY}""",
    f"SELECT {KEY}, q.notes FROM questions q WHERE q.notes != '{{}}' ORDER BY {KEY}",
)
"""The SQL queries whose results a digest covers. They leave out row numbers, tickets and clock times. They
also leave out answers that no step or evaluation has taken, because chance decides which of these have come
when a run ends."""


class Connection:
    """The open database of one ledger, with the files of its trajectories.

    Args:
        at_a_glance: see `read_only_address`. For a ledger that is only read.

    Attributes:
        is_read_only: True: nothing is written. If the schema version is old, all tables except the bytes of
            trajectories are copied to memory, and the copy is migrated.
        files: the files of the trajectories.
        lock: a thread holds it while it reads or writes, and during other work in which no other thread may
            write.

    Raises:
        LedgerError: the database cannot be opened, is not a ledger, has an unknown schema version, is on a
            network file system, or is a link although it is to be written. Or the folder of the trajectories
            cannot be made.
    """

    is_read_only: ClassVar[bool] = True

    def __init__(self, path: Path, *, at_a_glance: bool = False):
        refuse_network(path)
        self.path = path
        self.files = TrajectoryFiles.beside(path)
        self.standing = DirectoryGuard()
        self.lock = RLock()
        self._has_blobs = False
        try:
            if self.is_read_only:
                self._open_read_only(read_only_address(path, at_a_glance=at_a_glance))
            else:
                self._open_to_write()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            is_denied = isinstance(error, sqlite3.OperationalError)
            hint = "make room or mend what is wrong there" if is_denied else "restore it from a copy"
            raise LedgerError(
                f"{path}: the ledger cannot be opened ({error}); {hint}, or start a new run directory"
            ) from error

        found = self._version()
        if found != VERSION:
            raise LedgerError(
                f"{self.path}: schema version {found or 'unknown'}, this program writes {VERSION}; "
                "continue the run with the version that made it"
            )

    def _open_to_write(self) -> None:
        self._refuse_other_names()
        self.db = _connect(str(self.path))
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.files.make()
        self._bring_up_to_date()
        self._give_space_back()
        databases = (self.path.with_name(self.path.name + end) for end in ("", "-wal", "-shm"))
        self.standing = DirectoryGuard(*databases, self.files.directory)

    def _refuse_other_names(self) -> None:
        """Refuse a database that a second file name leads to. It is changed in place, so a copy of the run
        that is made of links would change with it."""
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            is_link = path.is_symlink()
            if is_link or (path.exists() and path.stat().st_nlink > 1):
                raise LedgerError(
                    f"{path}: is {'a symbolic link' if is_link else 'a hard link, and has other names'}; "
                    "writing there would change the same file in another folder, such as a backup of the "
                    "run. Put a file of its own there: copy the run directory with `cp -rL` and continue "
                    "the copy"
                )

    def _open_read_only(self, address: str) -> None:
        self.db = _connect(address)
        if self._version() not in (None, *MIGRATIONS):
            return
        self.db.close()
        self.db = _connect("file::memory:")
        self.db.execute("ATTACH ? AS old", (address,))
        self.db.execute("BEGIN")  # so that all tables are of one moment
        tables = self.db.execute(
            "SELECT name, type, sql FROM old.sqlite_master WHERE sql IS NOT NULL AND tbl_name != 'blobs' "
            "AND name NOT LIKE 'sqlite%' ORDER BY type = 'index'"
        ).fetchall()
        for name, kind, sql in tables:
            self.db.execute(sql)
            if kind == "table":
                self.db.execute(f'INSERT INTO main."{name}" SELECT * FROM old."{name}"')
        self._has_blobs = bool(tables)
        self.db.execute("COMMIT")
        self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        """Make the tables or migrate them. If the ledger is written, also remove the files that a kill has
        left."""
        with self:
            found = self._version()
            if found is None:
                for statement in TABLES.values():
                    self.db.execute(statement)
                self.db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(VERSION),))
            while found in MIGRATIONS:
                for statement in MIGRATIONS[found]:
                    self.db.execute(statement)
                if found == LAST_WITH_BLOBS and not self.is_read_only:
                    self._move_blobs()
                found += 1
                self.db.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(found),))
            if not self.is_read_only and found == VERSION:
                self.files.sweep(self.kept_names())

    def _move_blobs(self) -> None:
        """Write the trajectories that an older schema has in a table into files, and drop the table. One blob
        is in memory at a time. If a kill comes before the transaction ends, the table stays as it was. The
        next opening begins anew with it."""
        for name, data in self.db.execute("SELECT hash, CAST(data AS BLOB) FROM blobs"):
            if is_name(name):
                self.files.write(name, data)
        self.db.execute("DROP TABLE blobs")

    def _give_space_back(self) -> None:
        """Pack the database if more than half of it is free, as after a migration. If there is no room for
        this, the database stays large, and SQLite uses the free pages for new rows."""
        free, all_pages = (self._one(f"PRAGMA {name}", ()) for name in ("freelist_count", "page_count"))
        if 2 * free > all_pages:
            with suppress(sqlite3.OperationalError):
                self.db.execute("VACUUM")
                self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _version(self) -> int | None:
        """Return the version of the file's schema; 0 if the file does not say it; None if the file has no
        tables."""
        if not self.db.execute("SELECT 1 FROM sqlite_master").fetchone():
            return None
        if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return 0
        row = self.db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        return int(row[0]) if row and row[0].isdigit() else 0

    def __enter__(self) -> Self:
        """Begin a transaction. If an error is raised before the transaction ends, all its changes are undone.
        Other threads wait until it has ended.

        Raises:
            LedgerError: the database cannot be written, was replaced or deleted since it was opened, or is
                being written by another process. The end of the transaction may raise this error too.
        """
        with ExitStack() as held:
            held.enter_context(self.lock)
            self.standing.refuse_lost(LedgerError)
            try:
                self.db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                raise unwritten(self.path, error) from error
            held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            try:
                if error is None:
                    self.db.execute("COMMIT")
            except sqlite3.OperationalError as failed:
                error = failed
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
        finally:
            self.lock.release()
        if isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError):
            raise unwritten(self.path, error) from error

    def close(self) -> None:
        """Close the database. A thread that still reads or writes ends first."""
        with self.lock:
            self.db.close()

    def kept_names(self) -> set[str]:
        """Return the names of all trajectories that were not dropped."""
        return {name for (name,) in self.rows("SELECT DISTINCT groups FROM rounds WHERE kept = 1")}

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self.lock:
            return self.db.execute(sql, values).fetchall()

    def row(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query; None if it has none."""
        with self.lock:
            found: tuple[Any, ...] | None = self.db.execute(sql, values).fetchone()
        return found

    def _one(self, sql: str, values: Sequence[Any]) -> int:
        with self.lock:
            number: int = self.db.execute(sql, values).fetchone()[0]
        return number

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context that holds the lock, and raises a LedgerError in place of the errors that damaged rows
        raise.

        Raises:
            LedgerError: a row is damaged.
        """
        try:
            with self.lock:
                yield
        except (ValueError, TypeError, LookupError) as error:
            raise self._damaged(f"a row ({type(error).__name__}: {error})") from error

    def _damaged(self, what: str) -> LedgerError:
        hint = (
            "`oat ledger RUN --check` says what else is wrong: restore the file from a copy, or begin "
            "anew in another run_dir"
        )
        return LedgerError(f"{self.path}: {what} is not what was written there; {hint}")

    def _each(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a query that contains `IN ({})`, for any number of values."""
        with self.lock:
            parts = [values[start : start + 500] for start in range(0, len(values), 500)]
            return [row for some in parts for row in self.rows(sql.format(", ".join("?" * len(some))), some)]


def _connect(address: str) -> sqlite3.Connection:
    return sqlite3.connect(
        address, uri=address.startswith("file:"), isolation_level=None, timeout=30.0, check_same_thread=False
    )


NEW_QUESTION_COLUMNS = (
    "id, purpose, step, round, occurrence, number, position, member, kind, oracle, prompt, candidates, "
    "picks, known, features, cached, notes"
)
"""The columns that `new_question_row` fills."""

QUESTION_COLUMNS = (
    f"q.id, {KEY}, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known, q.features, "
    "q.member, q.ticket, q.sent, q.cached, q.notes"
)
"""The columns that `question_of` reads, of the table `questions` under the alias `q`."""

ANSWER_COLUMNS = "vals, marks, label, queries, cost, answered_by, seconds, tokens, scores, steps, sources"
"""The columns of the table `answers`, without the question's id, in the order in which `answer_row` fills
them."""

_SCALARS = {str, int, float, bool, type(None)}
"""The types whose values JSON gives back unchanged."""


def new_question_row(
    intent: Intent, position: int, prompt: str, candidates: Sequence[str]
) -> tuple[Any, ...]:
    """Return the row of a question, with the columns `NEW_QUESTION_COLUMNS`.

    Args:
        position: the question's place in its round.
        prompt: the name of the prompt's text (`text_name`).
        candidates: the names of the candidates' texts.
    """
    question, key = intent.question, intent.question.key
    place = (intent.id, key.purpose, key.step, key.round, key.occurrence, key.index, position, intent.member)
    features = None if question.features is None else wire.encode(question.features)
    texts = (prompt, list_text(candidates), common_text(question.picks), list_text(question.known))
    notes = dict_text(question.notes)
    return (*place, question.kind, question.oracle, *texts, features, cached_text(intent.cached), notes)


def as_read(question: Question, prompt: str) -> Question:
    """Return a question as the tables would give it back. The tables store the prompt's columns as JSON,
    which turns a tuple into a list.

    Args:
        prompt: the question's `prompt_text`.
    """
    if all(type(value) in _SCALARS for value in question.columns.values()):
        return question
    return replace(question, columns=json.loads(prompt)["columns"])


def text_names(row: Sequence[Any]) -> tuple[str, ...]:
    """Return the names (`text_name`) of a question's texts: first the prompt's, then the candidates'.

    Args:
        row: the question's values of `QUESTION_COLUMNS`.
    """
    return (row[8], *json.loads(row[9]))


def question_of(row: Sequence[Any], texts: Mapping[str, str]) -> Intent:
    """Return the intent in a row of `QUESTION_COLUMNS`.

    Args:
        texts: the texts by name; those named by `text_names` must be present.
    """
    id, *address = row[:6]
    kind, oracle, _, _, picks, known, features, member, ticket, sent, cached, notes = row[6:]
    prompt, *candidates = [texts[name] for name in text_names(row)]
    content = json.loads(prompt)
    question = Question(
        Key(*address),
        kind,
        tuple(Message(*message) for message in content["messages"]),
        tuple(candidates),
        common_values(picks),
        content["reference"],
        content["columns"],
        oracle,
        list_values(known),
        None if features is None else wire.decode(features),
        content.get("is_chat", False),
        notes=json.loads(notes) if notes != "{}" else {},
    )
    return Intent(id, question, member, ticket, sent, cached_values(cached, question.key.purpose))


def answer_row(answer: Answer, label: int | None) -> tuple[Any, ...]:
    """Return the row of an answer, with the columns `ANSWER_COLUMNS`."""
    took = (answer.queries, answer.cost, answer.by, answer.seconds, answer.tokens)
    parts = (list_text(answer.scores), steps_text(answer.steps, answer.step_unit), dict_text(answer.sources))
    return (list_text(answer.values), common_text(answer.marks), label, *took, *parts)


def answer_of(key: Key, row: Sequence[Any]) -> tuple[Answer, int | None]:
    """Return the answer and the label in a row of `ANSWER_COLUMNS`."""
    values, marks, label, queries, cost, by, seconds, tokens, scores, steps, sources = row
    answer = Answer(
        key,
        list_values(values),
        common_values(marks),
        queries,
        cost,
        by,
        seconds,
        tokens,
        list_values(scores),
        *steps_of(steps),
        sources_of(sources),
    )
    return answer, label


def cached_known(value: float, mark: Mark, scores: str, steps: str, sources: str) -> Known:
    """Return the value in a row of the table `cache`."""
    own, unit = steps_of(steps)
    return Known(
        value, mark, list_values(scores), own[0] if own else (), unit, (*sources_of(sources).items(),)
    )


def answered_state(answer: Answer) -> int:
    """Return the value of the column `answered` of the table `waiting` for a question with this answer."""
    return -1 if AWAITED in answer.marks else 2 if "unpaid" in answer.marks else 1


def steps_text(steps: Sequence[Steps], unit: StepUnit) -> str:
    """Return the step rewards of some candidates as JSON text: a list of the unit, and for each candidate the
    list of its pairs of an end and a reward. Without steps, the list is empty."""
    return json.dumps([unit, *steps]) if any(steps) else "[]"


def steps_of(text: str) -> tuple[tuple[Steps, ...], StepUnit]:
    """Return the step rewards and their unit in a text that `steps_text` wrote."""
    if text == "[]":
        return (), "characters"
    unit, *candidates = json.loads(text)
    return tuple(tuple((end, reward) for end, reward in steps) for steps in candidates), unit


def dict_text(values: Mapping[str, Any]) -> str:
    """Return a dict of lists or numbers as JSON text."""
    return json.dumps(values, ensure_ascii=False) if values else "{}"


def sources_of(text: str) -> dict[str, tuple[float | None, ...]]:
    """Return `Answer.sources` from a text that `dict_text` wrote."""
    return {name: tuple(scores) for name, scores in json.loads(text).items()} if text != "{}" else {}


def list_text(values: Sequence[Any]) -> str:
    """Return a list as JSON text."""
    return json.dumps(values) if values else "[]"


def list_values(text: str) -> tuple[Any, ...]:
    """Return the values in a text that `list_text` wrote."""
    return tuple(json.loads(text)) if text != "[]" else ()


@functools.lru_cache(4096)
def common_text(values: tuple[int | str, ...]) -> str:
    """Return values as JSON text, as `list_text` does. The texts are cached, because the picks and the marks
    of most questions are equal."""
    return list_text(values)


@functools.lru_cache(4096)
def common_values(text: str) -> tuple[Any, ...]:
    """Return the values in a text that `common_text` or `list_text` wrote. They are cached."""
    return list_values(text)
