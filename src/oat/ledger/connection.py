"""The file of a ledger: opens it, migrates it to the current schema version, and writes it in
transactions."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self

from oat.errors import LedgerError
from oat.files import Standing, read_only_address, refuse_network, unwritten
from oat.ledger import schema


class Connection:
    """The open file of one ledger.

    Attributes:
        is_read_only: True: the file is only read. If its schema version is old, the file is copied to memory,
            and the copy is migrated.
        lock: a thread holds it during its transactions, and during other work in which no other thread may
            write.

    Raises:
        LedgerError: the file cannot be opened, is not a ledger, has an unknown schema version, or is on a
            network file system.
    """

    is_read_only: ClassVar[bool] = True

    def __init__(self, path: Path):
        refuse_network(path)
        self.path = path
        self.standing = Standing()
        self.lock = RLock()
        try:
            if self.is_read_only:
                self._open_read_only()
            else:
                self.db = _connect(str(path))
                self.db.execute("PRAGMA journal_mode = WAL")
                self.db.execute("PRAGMA synchronous = FULL")
                self._bring_up_to_date()
                self.standing = Standing(*(path.with_name(path.name + end) for end in ("", "-wal", "-shm")))
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            is_denied = isinstance(error, sqlite3.OperationalError)
            hint = "make room or mend what is wrong there" if is_denied else "restore it from a copy"
            raise LedgerError(
                f"{path}: the ledger cannot be opened ({error}); {hint}, or start a new run directory"
            ) from error

        found = self._version()
        if found != schema.VERSION:
            raise LedgerError(
                f"{self.path}: schema version {found or 'unknown'}, this program writes {schema.VERSION}; "
                "continue the run with the version that made it"
            )

    def _open_read_only(self) -> None:
        self.db = _connect(read_only_address(self.path))
        if self._version() in (None, *schema.MIGRATIONS):
            file, self.db = self.db, _connect(":memory:")
            with closing(file):
                file.backup(self.db)
            self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        with self:
            found = self._version()
            if found is None:
                for statement in schema.TABLES.values():
                    self.db.execute(statement)
                self.db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(schema.VERSION),))
            while found in schema.MIGRATIONS:
                for statement in schema.MIGRATIONS[found]:
                    self.db.execute(statement)
                found += 1
                self.db.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(found),))

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

        Raises:
            LedgerError: the file cannot be written, was replaced or deleted since it was opened, or is being
                written by another process. The end of the transaction may raise this error too.
        """
        self.standing.refuse_lost(LedgerError)
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise unwritten(self.path, error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        try:
            if error is None:
                self.db.execute("COMMIT")
        except sqlite3.OperationalError as failed:
            error = failed
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError):
            raise unwritten(self.path, error) from error

    def close(self) -> None:
        self.db.close()

    def _one(self, sql: str, values: Sequence[Any]) -> int:
        number: int = self.db.execute(sql, values).fetchone()[0]
        return number

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise a LedgerError in place of the errors that damaged rows raise.

        Raises:
            LedgerError: a row is damaged.
        """
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:
            raise self._damaged(f"a row ({type(error).__name__}: {error})") from error

    def _damaged(self, what: str) -> LedgerError:
        hint = (
            "`oat ledger RUN --check` says what else is wrong: restore the file from a copy, or begin "
            "anew in another run_dir"
        )
        return LedgerError(f"{self.path}: {what} is not what was written there; {hint}")

    def _each(self, sql: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query that contains `IN ({})`, for any number of values."""
        for start in range(0, len(values), 500):
            some = values[start : start + 500]
            yield from self.db.execute(sql.format(", ".join("?" * len(some))), some).fetchall()


def _connect(address: str) -> sqlite3.Connection:
    return sqlite3.connect(
        address, uri=address.startswith("file:"), isolation_level=None, timeout=30.0, check_same_thread=False
    )
