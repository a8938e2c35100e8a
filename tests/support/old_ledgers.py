"""Turns a ledger of the present schema into one of an older schema, for tests of migrations."""

import shutil
import sqlite3
from pathlib import Path

from oat.ledger.trajectory_files import TrajectoryFiles

TO_7 = ("ALTER TABLE questions DROP COLUMN notes", "ALTER TABLE takes DROP COLUMN pairs")
TO_6 = (
    *TO_7,
    *(
        f"ALTER TABLE {table} DROP COLUMN {column}"
        for table in ("answers", "cache")
        for column in ("steps", "sources")
    ),
)
TO_5 = (*TO_6, "DROP TABLE waves")
TO_4 = (*TO_5, *(f"ALTER TABLE {table} DROP COLUMN scores" for table in ("answers", "cache")))
TO_3 = (
    *TO_4,
    *(
        f"DROP {what}"
        for what in (
            "INDEX kept_rounds",
            "INDEX waiting_in_order",
            "TABLE waiting",
            "TABLE purses",
            "TABLE cache",
        )
    ),
    *(
        f"ALTER TABLE {table} DROP COLUMN {column}"
        for table, column in (
            ("rounds", "kept"),
            ("questions", "cached"),
            ("questions", "sent"),
            ("answers", "tokens"),
        )
    ),
    *(f"ALTER TABLE takes DROP COLUMN {column}" for column in ("tokens", "cost", "refused")),
)
OLDER = {
    8: (),
    7: TO_7,
    6: TO_6,
    5: TO_5,
    4: TO_4,
    3: TO_3,
    2: (*TO_3, "ALTER TABLE questions DROP COLUMN again"),
}
"""By schema version, the statements that remove what later versions added."""


def make_old(database: sqlite3.Connection, version: int) -> None:
    """Give a ledger the tables of an older schema version. What only later versions record is lost. The files
    of trajectories become blobs, and their folder is removed."""
    (path,) = {file for _, name, file in database.execute("PRAGMA database_list") if name == "main"}
    files = TrajectoryFiles.beside(Path(path))
    database.execute("CREATE TABLE blobs (hash TEXT PRIMARY KEY, data BLOB NOT NULL)")
    names = database.execute("SELECT DISTINCT groups FROM rounds WHERE kept = 1").fetchall()
    database.executemany("INSERT INTO blobs VALUES (?, ?)", [(name, files.read(name)) for (name,) in names])
    shutil.rmtree(files.directory)
    for statement in OLDER[version]:
        database.execute(statement)
    database.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(version),))
