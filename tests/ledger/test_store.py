"""The tables of the ledger: transactions, order, refusals, digest."""

import sqlite3
from pathlib import Path

import pytest
from fixtures import make_group, make_questions, recorded

from oat import files, wire
from oat.errors import LedgerError
from oat.ledger.audit import contradictions
from oat.ledger.intents import Intent, Known
from oat.ledger.store import Store
from oat.types import Answer, Price, Question


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ledger.sqlite")


def add(
    store: Store, step: int, round: int, *occurrences: int, purpose: str = "train", oracle: str = "o"
) -> list[Question]:
    groups = [make_group(occurrence, "aa", "b") for occurrence in occurrences]
    questions = make_questions(groups, "compare", step, round, oracle=oracle, purpose=purpose)
    with store:
        store.add_round(purpose, step, round, groups, questions, range(len(groups)))
    return questions


def takeable(store: Store, step: int, limit: int, oldest: int = 0) -> list[Intent]:
    return [store.by_id(id) for id in store.takeable_ids("train", step, limit, oldest)]


def answer(
    store: Store, step: int, round: int, *places: int, p: float = 0.9, label: int | None = 0, queries: int = 2
) -> None:
    rows = recorded(store, "train", step, round)
    with store:
        store.add_answers(
            [
                (rows[place].id, Answer(rows[place].question.key, (p,), ("ok",), queries, by="o"), label)
                for place in places
            ]
        )


def test_what_goes_in_comes_out(store: Store) -> None:
    groups = [
        make_group(7, "aé\u2028\n", "", reference="42", columns={"level": {"x": [1, None, "ü"]}}),
        make_group(3, "b", "cc"),
    ]
    questions = make_questions(groups[::-1], "compare", 2, 1, oracle="o")
    with store:
        store.add_round("train", 2, 1, groups, questions, [1, 0])
    found = recorded(store, "train", 2, 1)
    assert [row.question for row in found] == questions
    assert [row.member for row in found] == [1, 0]
    assert wire.encode(store.groups("train", 2, 1)) == wire.encode(groups)


def test_counts_stand_at_the_cursor(store: Store) -> None:
    """`asked(step, round)` counts the questions of one purpose in all rounds before this one, in order of
    step and round. Later records do not count."""
    add(store, 0, 0, 0, 1)
    add(store, 0, 1, 2)
    add(store, 1, 0, 3, 4, 5)
    add(store, 1, 1)
    add(store, 0, 0, 0, 1, 2, 3, purpose="eval")
    counts = {
        place: store.asked("train", *place)
        for place in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (9, 0)]
    }
    assert counts == {(0, 0): 0, (0, 1): 2, (0, 2): 3, (1, 0): 3, (1, 1): 6, (1, 2): 6, (9, 0): 6}
    assert store.asked("eval", 0, 1) == 4
    assert [store.has_round("train", 1, round) for round in range(3)] == [True, True, False]


def test_takeable_is_answered_untaken_and_not_of_the_future_in_the_order_asked(store: Store) -> None:
    add(store, 0, 0, 5, 1, 3)
    add(store, 2, 0, 6)
    answer(store, 2, 0, 0)
    answer(store, 0, 0, 2, 0)
    assert [row.question.key.occurrence for row in takeable(store, 1, 9)] == [5, 3]
    assert (
        store.num_takeable("train", 1),
        store.num_takeable("train", 2),
        store.num_takeable("eval", 2),
    ) == (2, 3, 0)
    with store:
        store.add_take("train", 1, [row.id for row in takeable(store, 1, 1)])
    assert [row.question.key.occurrence for row in takeable(store, 2, 9)] == [3, 6]
    assert [row.question.key.occurrence for row in store.taken("train", 1)] == [5]
    assert store.take_price("train", 1) == Price(2), "of the one that was taken"


def test_taken_rows_keep_their_recorded_order(store: Store) -> None:
    add(store, 0, 0, 0, 1, 2)
    answer(store, 0, 0, 0, 1, 2)
    ids = [row.id for row in takeable(store, 0, 9)]
    with store:
        store.add_take("train", 0, [ids[2], ids[0], ids[1]])
    assert [row.question.key.occurrence for row in store.taken("train", 0)] == [2, 0, 1]


def test_a_question_is_taken_once(store: Store) -> None:
    add(store, 0, 0, 0)
    answer(store, 0, 0, 0)
    (row,) = takeable(store, 0, 9)
    with store:
        store.add_take("train", 0, [row.id])
    with (
        pytest.raises(
            LedgerError, match=r"UNIQUE constraint failed.*one process works in a run at a time.*`lock`"
        ),
        store,
    ):
        store.add_take("train", 1, [row.id])
    assert not store.has_take("train", 1)


def test_the_first_answer_wins(store: Store) -> None:
    add(store, 0, 0, 0)
    answer(store, 0, 0, 0, p=0.9, label=0)
    answer(store, 0, 0, 0, p=0.1, label=1, queries=50)
    (row,) = recorded(store, "train", 0, 0)
    kept, label = store.answer(row)
    assert (kept.values, label, store.spent("train")) == ((0.9,), 0, Price(2))


def test_what_is_too_old_is_recorded_and_not_handed_out(store: Store) -> None:
    add(store, 0, 0, 0, 1)
    add(store, 2, 0, 2)
    answer(store, 0, 0, 0, 1)
    answer(store, 2, 0, 0)
    fresh, old = takeable(store, 2, 9, oldest=1), takeable(store, 0, -1)
    assert ([row.question.key.occurrence for row in fresh], store.num_takeable("train", 2, oldest=1)) == (
        [2],
        1,
    )
    with store:
        store.add_take("train", 2, [row.id for row in fresh], [row.id for row in old])
    assert [row.question.key.occurrence for row in store.taken("train", 2)] == [2]
    assert (store.num_expired("train", 2), store.num_takeable("train", 9)) == (2, 0)
    assert contradictions(store) == []


def test_trajectories_go_once_nothing_will_read_them_again(store: Store) -> None:
    """Trajectories of a round are dropped when no later step reads them. The questions of steps 0 and 1 are
    taken at steps 0 and 2; that of step 2 is not taken yet. A file that a later round shares stays."""
    add(store, 0, 0, 0)
    add(store, 1, 0, 1)
    add(store, 2, 0, 0)
    for step, take in ((0, 0), (1, 2)):
        answer(store, step, 0, 0)
        with store:
            store.add_take("train", take, [row.id for row in takeable(store, take, 9)])

    def dropped(step: int) -> int:
        with store:
            return store.drop_groups(step)

    assert [dropped(0), dropped(1), dropped(2)] == [0, 0, 0], (
        "the round of step 2 has the trajectories of step 0"
    )
    assert dropped(3) == 1
    assert len(store.groups("train", 0, 0)) == 1
    with pytest.raises(
        LedgerError, match=r"the trajectories of step 1 were dropped .* \(tracking.keep_trajectories"
    ):
        store.groups("train", 1, 0)
    assert [row.question.candidates for row in store.taken("train", 2)] == [("aa", "b")], "texts stay"
    assert contradictions(store) == []


def test_a_ledger_is_cut_back(tmp_path: Path) -> None:
    """The ledger is cut back to its state before step 1. Questions and takes of later steps are removed, and
    earlier questions that these steps took can be taken again."""

    def filled(name: str, steps: int) -> Store:
        store = Store(tmp_path / name)
        for step in range(steps):
            add(store, step, 0, 2 * step, 2 * step + 1)
            add(store, step, 0, 0, purpose="eval")
            answer(store, step, 0, 0, 1, p=0.5)
            with store:
                store.add_take("train", step, [row.id for row in takeable(store, step, 1)])
                store.add_cached("train", "o", f"item {step}", 0, Known(0.5, "ok"), step)
        return store

    long, short = filled("long", 3), filled("short", 1)
    add(short, 1, 0, 0, purpose="eval")
    with long:
        long.cut(1, evaluated=True)
    assert long.digest() == short.digest()
    assert [row.question for row in takeable(long, 5, 9)] == [row.question for row in takeable(short, 5, 9)]
    assert (long.spent("train"), long.committed("train")) == (Price(4), Price(4))
    assert (long.cached("train", "o", "item 0"), long.cached("train", "o", "item 1")) == (
        [Known(0.5, "ok")],
        [],
    )
    assert contradictions(long) == []


def test_a_failing_insert_leaves_nothing(store: Store) -> None:
    groups = [make_group(0, "a", "b"), make_group(1, "a", "b")]
    same = make_questions([groups[0], groups[0]], "compare", 0, oracle="o")
    with pytest.raises(LedgerError, match="UNIQUE constraint failed"), store:
        store.add_round("train", 0, 0, groups, same, [0, 0])
    assert not store.has_round("train", 0, 0)
    tables = ("rounds", "questions", "texts", "waiting", "purses")
    assert [store.db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables] == [0] * 5
    assert store.is_empty()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE texts SET text = 'c' WHERE text = 'b'", "text [0-9a-f]{12} is not"),
        ("""UPDATE texts SET text = substr(text, 2) WHERE text LIKE '{%'""", "text [0-9a-f]{12} is not"),
        ("""UPDATE questions SET candidates = '["'""", "a row .JSONDecodeError: .*. is not"),
        ("UPDATE answers SET vals = '[0.9'", "a row .JSONDecodeError: .*. is not"),
    ],
    ids=["a candidate", "a prompt", "a list of candidates", "values"],
)
def test_what_is_damaged_is_named_and_not_read(store: Store, damage: str, message: str) -> None:
    """SQLite has no checksums, so the store itself finds damaged records. The error names them."""
    add(store, 0, 0, 0)
    answer(store, 0, 0, 0)
    store.db.execute("PRAGMA foreign_keys = OFF")
    store.db.execute(damage)
    with pytest.raises(
        LedgerError, match=rf"ledger\.sqlite: {message} what was written there; `oat ledger RUN --check` says"
    ):
        store.answers(store.answered())


def test_equal_texts_and_trajectories_are_stored_once(store: Store) -> None:
    add(store, 0, 0, 0, 1)
    add(store, 1, 0, 0, 1)
    texts = [row[0] for row in store.db.execute("SELECT text FROM texts")]
    assert sorted(text for text in texts if not text.startswith("{")) == ["aa", "b"]
    assert store.leftovers().paths == []
    assert len([path for path in store.files.directory.glob("*/*")]) == 1


def test_the_digest_knows_content_only(tmp_path: Path) -> None:
    """The digest of a ledger ignores row numbers, tickets, seconds and the order of answers, which differ
    between equal runs. Everything else counts."""

    def filled(name: str, *, late: bool = False, p: float = 0.9, label: int = 0) -> Store:
        store = Store(tmp_path / name)
        if late:
            add(store, 5, 0, 9)
            for table in ("waiting", "questions", "rounds"):
                store.db.execute(f"DELETE FROM {table}")
        add(store, 0, 0, 0, 1)
        rows = recorded(store, "train", 0, 0)
        with store:
            if late:
                store.set_tickets([("ticket", 1.0, rows[0].id)])
            for row in rows[::-1] if late else rows:
                given = Answer(
                    row.question.key, (p,), ("ok",), 2, by="x" if late else "y", seconds=float(late)
                )
                store.add_answers([(row.id, given, label)])
            store.add_take("train", 0, [row.id for row in rows])
        return store

    plain = filled("a").digest()
    late = filled("b", late=True)
    with late:
        late.db.execute("UPDATE questions SET id = id + 100")
        late.db.execute("UPDATE answers SET question = question + 100")
        late.db.execute("UPDATE taken SET question = question + 100")
    assert late.digest() == plain
    assert filled("c", p=0.8).digest() != plain
    assert filled("d", label=1).digest() != plain
    other = filled("e")
    with other:
        other.db.execute("UPDATE taken SET position = 2 WHERE position = 0")
    assert other.digest() != plain


def test_a_ledger_reopens_with_what_was_committed(tmp_path: Path) -> None:
    first = Store(tmp_path / "ledger.sqlite")
    questions = add(first, 0, 0, 0, 1)
    first.db.execute("BEGIN IMMEDIATE")
    first.db.execute("DELETE FROM questions")
    first.close()
    assert [row.question for row in Store(tmp_path / "ledger.sqlite").unanswered()] == questions


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = Store(path)
    store.db.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    store.close()
    with pytest.raises(
        LedgerError, match=r"ledger.sqlite: schema version 99, this program writes 9; continue the run with"
    ):
        Store(path)
    database = sqlite3.connect(path)
    database.execute("DELETE FROM meta")
    database.commit()
    database.close()
    with pytest.raises(LedgerError, match="schema version unknown"):
        Store(path)


@pytest.mark.parametrize("content", [b"these are words\n" * 100, b"SQLite format 3\0" + b"\7" * 4096])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(content)
    with pytest.raises(LedgerError, match=r"ledger.sqlite: the ledger cannot be opened"):
        Store(tmp_path / "ledger.sqlite")
    assert (tmp_path / "ledger.sqlite").read_bytes() == content


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be opened"):
        Store(tmp_path / "absent" / "ledger.sqlite")


@pytest.mark.parametrize(
    ("mounts", "refused"),
    [
        ("/dev/sda / ext4 rw 0 0\nserver:/x {here} nfs4 rw 0 0\n", "nfs4"),
        ("/dev/sda / ext4 rw 0 0\nserver:/x /elsewhere nfs4 rw 0 0\n", None),
        ("server:/x {parent} nfs rw 0 0\n/dev/sda {here} ext4 rw 0 0\n", None),
        ("/dev/sda {parent} ext4 rw 0 0\nhost:/x {parent} cifs rw 0 0\n", "cifs"),
        ("/dev/sda / ext4 rw 0 0\nserver:/x {here}er nfs4 rw 0 0\n", None),
        ("server:/x / 9p rw 0 0\n", "9p"),
    ],
)
def test_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, refused: str | None
) -> None:
    """A ledger on a network file system is refused, since SQLite's locks are unreliable there. A local disk
    mounted inside one is accepted. Blanks in a mount path are escaped."""
    here = tmp_path / "a run"
    here.mkdir()
    places = {"here": str(here).replace(" ", "\\040"), "parent": str(tmp_path)}
    (tmp_path / "mounts").write_text(mounts.format(**places))
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mounts")
    if refused is None:
        Store(here / "ledger.sqlite").close()
    else:
        with pytest.raises(
            LedgerError, match=rf"ledger.sqlite: lies on a network file system \({refused}\).*local disk"
        ):
            Store(here / "ledger.sqlite")
        assert not (here / "ledger.sqlite").exists()
