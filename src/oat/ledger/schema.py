"""The schema of a run's ledger: its tables, the migration of older files, and its canonical form."""

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
