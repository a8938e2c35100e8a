"""The output of `oat ledger` about a run, and the data sets that it writes."""

import json
import random
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fixtures import (
    Finished,
    World,
    forked,
    kill_at,
    logged,
    make_group,
    make_questions,
    named,
    oat,
    recorded,
)
from old_ledgers import OLDER, make_old

from oat.ledger import schema
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.reports.accounts import accounts
from oat.types import Answer
from oat.types.questions import in_money


@pytest.fixture(scope="module")
def runs(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return runs of four steps of four questions. Each has three evaluations of four prompts, with two
    samples and a greedy response per prompt."""
    folder = tmp_path_factory.mktemp("runs")
    for algorithm in ("dpo", "grpo"):
        finished.copy(algorithm, folder, {"oracle.repeats": 0})
    return folder


def table(run_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, str]]:
    assert oat("ledger", run_dir, *flags) == 0
    head, *rows = (
        line.split() for line in capsys.readouterr().out.splitlines() if line != "the ledger is sound"
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_the_table_counts_by_purpose_and_oracle(
    runs: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    train, evaluation = table(runs / "grpo", capsys, "--check")
    assert (train["purpose"], train["asked"], train["answered"], train["taken"], train["queries"]) == (
        "train",
        "16",
        "16",
        "16",
        "48",
    )
    assert (evaluation["purpose"], evaluation["asked"], evaluation["queries"]) == (
        "eval",
        "24",
        str(3 * 4 * 3),
    )
    assert (train["failed"], train["again"], train["cost"]) == ("0", "0", "0.00")


@pytest.mark.parametrize(
    ("cost", "said"),
    [(0.0, "0.00"), (0.00032376, "0.000324"), (0.32376, "0.324"), (12.345, "12.35"), (12345.6, "12,345.60")],
)
def test_a_cent_is_not_the_smallest_cost(cost: float, said: str) -> None:
    assert in_money(cost) == said


def test_what_was_known_is_counted_and_cost_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("train", world.config("grpo", tmp_path, {"oracle.whole_groups": False})) == 0
    capsys.readouterr()
    _, evaluation = table(tmp_path / "grpo", capsys, "--check")
    assert (evaluation["asked"], evaluation["answered"]) == ("24", "24")
    assert 0 < int(evaluation["cached"]) <= 16
    assert int(evaluation["queries"]) < 3 * 4 * 3


def test_two_oracles_that_were_asked_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`oat ledger` reports that two oracles agree on 1 of 3 pairs. They order two pairs of scored responses
    oppositely and one compared pair alike. A pair that one of them ties does not count."""
    store = Store(tmp_path / "ledger.sqlite")
    groups = [make_group(0, "a", "b", "c")]
    for number, (oracle, values) in enumerate({"first": (1.0, 2.0, 3.0), "second": (5.0, 5.0, 4.0)}.items()):
        questions = make_questions(groups, "score", number, oracle=oracle)
        with store:
            store.add_round("train", number, 0, groups, questions, [0])
            (row,) = recorded(store, "train", number)
            store.add_answers([(row.id, Answer(row.question.key, values, ("ok",) * 3, 3, by=oracle), None)])
    with store:
        groups = [make_group(1, "d", "e")]
        for number, (oracle, p) in enumerate({"first": 0.9, "second": 0.8}.items()):
            store.add_round(
                "eval",
                number,
                0,
                groups,
                make_questions(groups, "compare", number, oracle=oracle, purpose="eval"),
                [0],
            )
            (row,) = recorded(store, "eval", number)
            store.add_answers([(row.id, Answer(row.question.key, (p,), ("ok",), 1, by=oracle), 0)])
    store.close()
    assert oat("ledger", tmp_path) == 0
    assert "first and second agree on 1 of 3 pairs" in capsys.readouterr().out


def test_what_a_kill_left_unanswered_is_counted(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, log = world.config("grpo", tmp_path), tmp_path / "log"
    place = named("oat.ledger.outstanding:Outstanding.submit")
    assert forked(lambda: kill_at(*place, 4) or oat("train", config), log) == -signal.SIGKILL
    assert logged(log, "train", config) == 0
    again = {row["purpose"]: int(row["again"]) for row in table(tmp_path / "grpo", capsys)}
    assert again == {"train": 4, "eval": 0}
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["oracle/reasked"] == 4


def test_preferences_and_scores_as_data(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import load_dataset

    for algorithm, ending in (("dpo", "jsonl"), ("grpo", "parquet")):
        out = tmp_path / f"{algorithm}.{ending}"
        assert oat("ledger", runs / algorithm, "--export", out) == 0
        rows = list(
            load_dataset(
                "json" if ending == "jsonl" else "parquet",
                data_files=str(out),
                split="train",
                cache_dir=str(tmp_path / "cache"),
            )
        )
        assert f"{len(rows)} rows are in" in capsys.readouterr().out
        assert 0 < len(rows) <= 16
        for row in rows:
            assert isinstance(row["prompt"], str), "plain prompts make plain rows"
            best, worst = (
                side.count("a") + 0.1 * side.count("b") for side in (row["chosen"], row["rejected"])
            )
            assert best > worst
    out = tmp_path / "folders" / "not there" / "scored.jsonl"
    assert oat("ledger", runs / "grpo", "--export", out, "--layout", "scored") == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(scored) == 48
    assert all(
        row["score"] == pytest.approx(row["completion"].count("a") + 0.1 * row["completion"].count("b"))
        for row in scored
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--export", "a.csv"), "ends in .jsonl or .parquet"),
        (("--export", "a.jsonl", "--layout", "pairs"), "one of preference, scored"),
    ],
)
def test_what_cannot_be_written(
    runs: Path, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("ledger", runs / "dpo", *flags) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_folder_that_cannot_be_made(
    runs: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert oat("ledger", runs / "dpo", "--export", tmp_path / "file" / "below" / f"rows.{ending}") == 2
    assert (
        f"the folder {tmp_path / 'file' / 'below'} cannot be made (Not a directory); give"
        in capsys.readouterr().err
    )


def test_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("ledger", tmp_path) == 1
    assert "has no ledger.sqlite; give the directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE texts SET text = 'other' WHERE rowid = 1", "its content has another hash"),
        ("DELETE FROM answers WHERE question = 30", "learned from a question without an answer"),
        ("DELETE FROM questions WHERE id = 30", "more or fewer questions"),
        ("DELETE FROM takes WHERE step = 2", "has no record"),
        ("DELETE FROM texts", "a candidate of a question is missing"),
        (
            "UPDATE rounds SET groups = '../ledger.sqlite'",
            "the trajectories of a round are missing or damaged",
        ),
        ("DELETE FROM taken WHERE position = 1", "neither waiting nor taken"),
        ("UPDATE purses SET queries = queries + 1", "a budget does not have the sum of its answers: train"),
        (
            "UPDATE purses SET taken_tokens = 1 WHERE purpose = 'eval'",
            "a budget does not have the sum of its answers: eval",
        ),
        (
            "UPDATE answers SET cost = 0.5 WHERE question = 30",
            "a budget does not have the sum of its answers",
        ),
        ("DELETE FROM purses WHERE purpose = 'eval'", "a purpose has questions and no budget: eval"),
        (
            "UPDATE answers SET vals = 'no' WHERE question = 30",
            "one value and one mark for each item of its question: 30",
        ),
        (
            "UPDATE answers SET vals = '[1.0]' WHERE question = 30",
            "one value and one mark for each item of its question: 30",
        ),
        (
            "UPDATE answers SET marks = '[\"ok\"]' WHERE question = 30",
            "one value and one mark for each item of its question: 30",
        ),
        (
            "UPDATE answers SET vals = '[1.0, 2.0, \"3\"]' WHERE question = 30",
            "a value of an answer is no number",
        ),
        (
            "UPDATE answers SET marks = replace(marks, 'ok', 'so') WHERE question = 30",
            "a mark of an answer is none of ok, tie",
        ),
        ("UPDATE answers SET label = 1 WHERE question = 30", "a label stands where no two were compared"),
        (
            "UPDATE taken SET position = position + 10 WHERE step = 3 AND purpose = 'train'",
            "at the places from the first to the last: train 3",
        ),
        (
            "UPDATE taken SET position = -2 WHERE step = 3 AND purpose = 'train' AND position = 3",
            "the places from the first to the last: train 3",
        ),
        (
            "UPDATE answers SET marks = CAST(x'ff5b22' AS TEXT) WHERE question = 30",
            "one value and one mark for each item of its question: 30",
        ),
        (
            "UPDATE questions SET oracle = CAST(x'ff6f' AS TEXT)",
            "what is known from earlier answers: cannot be checked (OperationalError",
        ),
    ],
)
def test_a_ledger_that_contradicts_itself_is_found(
    runs: Path, tmp_path: Path, damage: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "grpo", tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as database:
        database.execute(damage)
    database.close()
    assert oat("ledger", tmp_path / "run", "--check") == 1
    assert words in capsys.readouterr().err


def test_a_comparison_that_contradicts_itself_is_found(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "dpo", tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as database, database:
        (first, second) = database.execute(
            "SELECT question FROM answers WHERE label IS NOT NULL LIMIT 2"
        ).fetchall()
        database.execute("UPDATE answers SET vals = '[1.5]' WHERE question = ?", first)
        database.execute("UPDATE answers SET label = 2 WHERE question = ?", second)
    assert oat("ledger", tmp_path / "run", "--check") == 1
    error = capsys.readouterr().err
    assert f"no probability where two were compared: {first[0]}" in error
    assert f"or is neither of the two: {second[0]}" in error


@pytest.mark.sample("value*-grpo", seconds=2.7)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
@pytest.mark.parametrize("damage", ["value = value + 1000", "mark = 'abstain'", "step = step + 1"])
def test_what_is_known_and_nobody_said_is_found(
    world: World, tmp_path: Path, algorithm: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"stop.max_steps": 1, **({"oracle.whole_groups": False} if algorithm == "grpo" else {})}
    assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    assert oat("ledger", tmp_path / algorithm, "--check") == 0
    with closing(sqlite3.connect(tmp_path / algorithm / "ledger.sqlite")) as database, database:
        rows = database.execute(
            f"UPDATE cache SET {damage} WHERE purpose = 'train' RETURNING item"
        ).fetchall()
    assert len(rows) > 2
    capsys.readouterr()
    assert oat("ledger", tmp_path / algorithm, "--check") == 1
    error = capsys.readouterr().err
    assert [
        item for (item,) in rows if f"what is known of {item[:12]} (0) is no answer that step" not in error
    ] == []


def test_a_flipped_bit_is_said_in_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit of the ledger's file is flipped anywhere, also in the schema that SQLite reads first. No command
    ends with a traceback. Commands that only count may miss the damage."""
    shutil.copytree(runs / "grpo", tmp_path / "run")
    file = tmp_path / "run" / "ledger.sqlite"
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
    whole, found = file.read_bytes(), 0
    used = [place for place, byte in enumerate(whole) if byte]
    for place in [*used[:20:2], *used[20:2000:200], *random.Random(0).sample(used, 40)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x80  # what was ASCII is no UTF-8 any more
        file.write_bytes(damaged)
        for flags in ((), ("--check",), ("--export", tmp_path / "rows.jsonl")):
            code = oat("ledger", tmp_path / "run", *flags)
            error = capsys.readouterr().err
            assert (code, bool(error)) in ((0, False), (1, True))
            (tmp_path / "rows.jsonl").unlink(missing_ok=True)
            found += code if flags == ("--check",) else 0
    assert found > 30, "of 60"


def test_what_is_exported_is_checked_where_both_are_asked(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "grpo", tmp_path / "run")
    out = tmp_path / "rows.jsonl"
    assert oat("ledger", tmp_path / "run", "--check", "--export", out) == 0
    printed = capsys.readouterr().out
    assert "the ledger is sound" in printed
    assert "rows are in" in printed
    out.unlink()
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as database, database:
        database.execute("UPDATE answers SET vals = '[1.0]' WHERE question = 30")
    assert oat("ledger", tmp_path / "run", "--check", "--export", out) == 1
    assert not out.exists()


@pytest.mark.sample("2", seconds=0.9)
@pytest.mark.parametrize("version", OLDER)
def test_a_ledger_of_an_older_schema_goes_on(
    runs: Path, tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(schema.MIGRATIONS) == set(OLDER) == {*range(2, schema.VERSION)}
    shutil.copytree(runs / "grpo", tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as database:
        make_old(database, version)
    database.close()
    file = tmp_path / "run" / "ledger.sqlite"
    content = file.read_bytes()
    assert oat("ledger", tmp_path / "run") == 0
    assert file.read_bytes() == content, "who only looks changes nothing"
    before, after = Reader(runs / "grpo" / "ledger.sqlite"), Store(file)
    assert after.digest() == before.digest()
    assert accounts(after) == accounts(before)
    assert [after.committed(purpose) for purpose in ("train", "eval")] == [
        before.committed(purpose) for purpose in ("train", "eval")
    ]
    before.close()
    after.close()
    assert file.read_bytes() != content
    assert (
        oat("train", tmp_path / "run" / "config.yaml", "--run_dir", tmp_path / "run", "--stop.max_steps", "6")
        == 0
    )
    capsys.readouterr()
    assert table(tmp_path / "run", capsys, "--check")[0]["asked"] == "24"


def test_what_steps_cost_is_known_after_a_migration(tmp_path: Path) -> None:
    """A ledger of an older schema gets the cost of each step. Step 1 learned from nothing, so the costs up to
    it are those of step 0."""
    store = Store(tmp_path / "ledger.sqlite")
    for step, costs in enumerate([(0.5, 0.25), (), (2.0,)]):
        groups = [make_group(10 * step + number, "a", "b") for number in range(len(costs))]
        with store:
            store.add_round(
                "train",
                step,
                0,
                groups,
                make_questions(groups, "compare", step, oracle="o"),
                range(len(costs)),
            )
            rows = recorded(store, "train", step)
            store.add_answers(
                (row.id, Answer(row.question.key, (0.9,), ("ok",), 1, cost), 0)
                for row, cost in zip(rows, costs, strict=True)
            )
            store.add_take("train", step, [row.id for row in rows])
    digest = store.digest()
    make_old(store.db, 2)
    store.close()
    with closing(Reader(tmp_path / "ledger.sqlite")) as store:
        assert [store.take_price("train", step).cost for step in range(3)] == [0.75, 0.75, 2.75]
        assert store.digest() == digest
