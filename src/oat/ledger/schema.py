"""The schema of a run's ledger: its tables, what brings older files to it, and rows that a sound one does not
have."""

from typing import get_args

from oat.types import Mark

VERSION = 6
KEY = "q.purpose, q.step, q.round, q.occurrence, q.number"
"""The address of a question, of the table `questions q`."""

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE texts (hash TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE blobs (hash TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE rounds (
    purpose TEXT, step INTEGER, round INTEGER, questions INTEGER NOT NULL, groups TEXT NOT NULL, kept INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (purpose, step, round));
CREATE INDEX kept_rounds ON rounds (groups) WHERE kept = 1;
CREATE TABLE questions (
    id INTEGER PRIMARY KEY, purpose TEXT, step INTEGER, round INTEGER, occurrence INTEGER, number INTEGER,
    position INTEGER NOT NULL, member INTEGER NOT NULL, kind TEXT NOT NULL, oracle TEXT NOT NULL,
    prompt TEXT NOT NULL, candidates TEXT NOT NULL, picks TEXT NOT NULL, known TEXT NOT NULL, features BLOB, ticket TEXT,
    again INTEGER NOT NULL DEFAULT 0, cached TEXT NOT NULL DEFAULT '[]', sent REAL,
    UNIQUE (purpose, step, round, occurrence, number));
CREATE TABLE waiting (
    question INTEGER PRIMARY KEY REFERENCES questions, purpose TEXT NOT NULL, step INTEGER NOT NULL, round INTEGER NOT NULL,
    position INTEGER NOT NULL, answered INTEGER NOT NULL DEFAULT 0, queries INTEGER NOT NULL, tokens INTEGER NOT NULL, cost REAL NOT NULL);
CREATE INDEX waiting_in_order ON waiting (purpose, answered, step, round, position);
CREATE TABLE answers (
    question INTEGER PRIMARY KEY REFERENCES questions, vals TEXT NOT NULL, marks TEXT NOT NULL, label INTEGER,
    queries INTEGER NOT NULL, cost REAL NOT NULL, answered_by TEXT NOT NULL, seconds REAL NOT NULL, tokens INTEGER NOT NULL DEFAULT 0,
    scores TEXT NOT NULL DEFAULT '[]');
CREATE TABLE purses (
    purpose TEXT PRIMARY KEY, again INTEGER NOT NULL DEFAULT 0,
    queries INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0,
    taken_queries INTEGER NOT NULL DEFAULT 0, taken_tokens INTEGER NOT NULL DEFAULT 0, taken_cost REAL NOT NULL DEFAULT 0);
CREATE TABLE takes (
    purpose TEXT, step INTEGER, queries INTEGER NOT NULL, tokens INTEGER NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0, refused TEXT,
    PRIMARY KEY (purpose, step));
CREATE TABLE taken (
    purpose TEXT, step INTEGER, position INTEGER, question INTEGER UNIQUE REFERENCES questions,
    PRIMARY KEY (purpose, step, position));
CREATE TABLE cache (
    purpose TEXT, oracle TEXT, item TEXT, number INTEGER, value REAL NOT NULL, mark TEXT NOT NULL, step INTEGER NOT NULL,
    scores TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (purpose, oracle, item, number)) WITHOUT ROWID;
CREATE TABLE waves (
    purpose TEXT, number INTEGER, first INTEGER NOT NULL, last INTEGER NOT NULL, queries INTEGER, tokens INTEGER, cost REAL,
    PRIMARY KEY (purpose, number));
"""
"""`waiting` has every question that no step has taken, with the most that its answer may cost, so that
nothing here grows slower with a run's age; `answered` is 1 with an answer, 2 where nobody was asked since it
could not be paid, and -1 where values are awaited that equal questions bring; `purses` has running sums over
answers and over what was taken. A question of `taken` at a position below 0 came too late to be learned from.
`waves` has runs of question ids that were asked together, and what all answers before them had taken; NULL
where nothing was waited for."""


def _table(name: str) -> str:
    return next(
        statement
        for statement in TABLES.split(";\n")
        if statement.startswith((f"CREATE TABLE {name} ", f"CREATE INDEX {name} "))
    )


RECOUNTS = (
    """INSERT OR IGNORE INTO waiting SELECT q.id, q.purpose, q.step, q.round, q.position,
        CASE WHEN a.question IS NULL THEN 0 WHEN a.marks LIKE '%"awaited"%' THEN -1 WHEN a.marks LIKE '%"unpaid"%' THEN 2 ELSE 1 END,
        CASE WHEN a.question IS NULL THEN json_array_length(q.candidates) ELSE a.queries END, COALESCE(a.tokens, 0), COALESCE(a.cost, 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id WHERE t.question IS NULL""",
    """INSERT INTO purses SELECT q.purpose, SUM(q.again), COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0),
        COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.queries END), 0), COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.tokens END), 0),
        COALESCE(SUM(CASE WHEN t.question IS NOT NULL THEN a.cost END), 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id GROUP BY q.purpose""",
)
"""What fills `waiting` and `purses` from the other tables. The price of an unanswered question that is not
waiting yet is taken as a query a candidate."""

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
        """UPDATE takes SET cost = s.cost FROM (SELECT k.purpose, k.step, SUM(TOTAL(a.cost)) OVER (PARTITION BY k.purpose ORDER BY k.step) AS cost
            FROM takes k LEFT JOIN taken t ON (t.purpose, t.step) = (k.purpose, k.step) LEFT JOIN answers a ON a.question = t.question
            GROUP BY k.purpose, k.step) s WHERE (takes.purpose, takes.step) = (s.purpose, s.step)""",
        *map(_table, ("kept_rounds", "waiting", "waiting_in_order", "purses")),
        """CREATE TABLE cache (
            purpose TEXT, oracle TEXT, item TEXT, number INTEGER, value REAL NOT NULL, mark TEXT NOT NULL, step INTEGER NOT NULL,
            PRIMARY KEY (purpose, oracle, item, number)) WITHOUT ROWID""",
        *RECOUNTS,
    ),
    4: tuple(
        f"ALTER TABLE {table} ADD COLUMN scores TEXT NOT NULL DEFAULT '[]'" for table in ("answers", "cache")
    ),
    5: (_table("waves"),),
}
"""What brings a ledger from a schema version to the next one."""

_SIZE = "CASE q.kind WHEN 'compare' THEN 1 ELSE json_array_length(q.candidates) END"
_MARKS = ", ".join(repr(mark) for mark in get_args(Mark))


def _each(column: str) -> str:
    """The entries of a list in JSON; none of what is no JSON, which is found elsewhere."""
    return f"json_each(CASE WHEN json_valid({column}) THEN {column} ELSE '[]' END)"


CONTRADICTIONS = {
    f"""SELECT a.question FROM answers a JOIN questions q ON q.id = a.question WHERE CASE WHEN json_valid(a.vals) AND json_valid(a.marks)
        THEN json_array_length(a.vals) != {_SIZE} OR json_array_length(a.marks) != {_SIZE} ELSE TRUE END""": (
        "an answer does not have one value and one mark for each item of its question"
    ),
    f"""SELECT DISTINCT a.question FROM answers a JOIN questions q ON q.id = a.question, {_each("a.vals")} v
        WHERE v.type NOT IN ('real', 'integer') OR (q.kind = 'compare' AND v.value NOT BETWEEN 0 AND 1)""": (
        "a value of an answer is no number, or no probability where two were compared"
    ),
    f"""SELECT DISTINCT a.question FROM answers a LEFT JOIN waiting w ON w.question = a.question, {_each("a.marks")} m
        WHERE m.type != 'text' OR (m.value NOT IN ({_MARKS}) AND (m.value != 'awaited' OR w.answered IS NOT -1))""": (
        f"a mark of an answer is none of {', '.join(get_args(Mark))}"
    ),
    """SELECT a.question FROM answers a JOIN questions q ON q.id = a.question
        WHERE a.label IS NOT NULL AND (q.kind != 'compare' OR a.label NOT IN (0, 1) OR a.marks != '["ok"]')""": (
        "a label stands where no two were compared, or is neither of the two"
    ),
    """SELECT purpose, step FROM (SELECT purpose, step, position < 0 AS late, CASE WHEN position < 0 THEN -1 - position ELSE position END AS place
        FROM taken) GROUP BY purpose, step, late HAVING MIN(place) != 0 OR MAX(place) != COUNT(*) - 1""": (
        "what a step learned from does not stand at the places from the first to the last"
    ),
    """SELECT r.purpose, r.step, r.round FROM rounds r LEFT JOIN questions q ON (q.purpose, q.step, q.round) = (r.purpose, r.step, r.round)
        GROUP BY r.purpose, r.step, r.round HAVING COUNT(q.id) != r.questions""": "a round has more or fewer questions than were asked",
    (
        "SELECT r.purpose, r.step, r.round FROM rounds r LEFT JOIN blobs b ON b.hash = r.groups WHERE r.kept "
        "= 1 AND b.hash IS NULL"
    ): ("the trajectories of a round are missing"),
    (
        "SELECT t.purpose, t.step, t.position FROM taken t LEFT JOIN answers a ON a.question = t.question "
        "WHERE a.question IS NULL"
    ): ("a step learned from a question without an answer"),
    "SELECT q.id FROM questions q LEFT JOIN texts x ON x.hash = q.prompt WHERE x.hash IS NULL": "the prompt of a question is missing",
    (
        "SELECT q.id FROM questions q, json_each(q.candidates) c LEFT JOIN texts x ON x.hash = c.value WHERE "
        "x.hash IS NULL"
    ): ("a candidate of a question is missing"),
    (
        "SELECT t.purpose, t.step FROM taken t LEFT JOIN takes k ON (k.purpose, k.step) = (t.purpose, "
        "t.step) "
        "WHERE k.step IS NULL"
    ): ("a step learned from questions and has no record"),
    """SELECT q.id FROM questions q LEFT JOIN taken t ON t.question = q.id LEFT JOIN waiting w ON w.question = q.id
        WHERE (t.question IS NULL) = (w.question IS NULL)""": "a question is neither waiting nor taken, or both",
    """SELECT w.question FROM waiting w LEFT JOIN answers a ON a.question = w.question
        WHERE (a.question IS NOT NULL) != (w.answered != 0)""": "a waiting question is marked answered and is not, or the other way round",
    """SELECT p.purpose FROM purses p LEFT JOIN questions q ON q.purpose = p.purpose LEFT JOIN answers a ON a.question = q.id
        LEFT JOIN taken t ON t.question = q.id GROUP BY p.purpose HAVING TOTAL(a.queries) != p.queries OR TOTAL(a.tokens) != p.tokens
        OR TOTAL(CASE WHEN t.question IS NOT NULL THEN a.queries END) != p.taken_queries
        OR TOTAL(CASE WHEN t.question IS NOT NULL THEN a.tokens END) != p.taken_tokens
        OR ABS(TOTAL(a.cost) - p.cost) > 1e-6 * (1 + p.cost)
        OR ABS(TOTAL(CASE WHEN t.question IS NOT NULL THEN a.cost END) - p.taken_cost) > 1e-6 * (1 + p.cost)""": (
        "a budget does not have the sum of its answers"
    ),
    "SELECT DISTINCT purpose FROM questions WHERE purpose NOT IN (SELECT purpose FROM purses)": "a purpose has questions and no budget",
    """SELECT n.purpose, n.number FROM waves n JOIN waves w ON (w.purpose, w.number) = (n.purpose, n.number - 1)
        WHERE n.first <= w.last OR ABS(n.cost - w.cost - (SELECT TOTAL(a.cost) FROM questions q JOIN answers a ON a.question = q.id
        WHERE q.purpose = n.purpose AND q.id >= w.first AND q.id < n.first)) > 1e-6 * (1 + n.cost)""": (
        "a wave does not follow the one before, or has another sum than its answers"
    ),
}
"""Rows that a sound ledger does not have, and what they mean."""

_TAKEN = (
    "answers a JOIN questions q ON q.id = a.question LEFT JOIN waiting w ON w.question = q.id WHERE "
    "w.question IS NULL"
)

CANONICAL = (
    "SELECT purpose, step, round, questions, groups FROM rounds ORDER BY purpose, step, round",
    f"""SELECT {KEY}, q.position, q.member, q.kind, q.oracle, q.prompt, q.candidates, q.picks, q.known, hex(q.features), q.cached
        FROM questions q ORDER BY {KEY}""",
    f"SELECT {KEY}, a.vals, a.marks, a.label, a.queries, a.cost, a.tokens FROM {_TAKEN} ORDER BY {KEY}",
    (
        f"SELECT t.purpose, t.step, t.position, {KEY} FROM taken t JOIN questions q ON q.id = t.question "
        "ORDER BY 1, 2, 3"
    ),
    "SELECT purpose, step, queries, tokens, cost, refused FROM takes ORDER BY purpose, step",
    f"SELECT {KEY}, a.scores FROM {_TAKEN} AND a.scores != '[]' ORDER BY {KEY}",
)
"""What a digest is of: no row numbers, tickets or clock times; and no answer that has come before a step took
it, which nothing reads until then."""
