"""`oat.load_run`: the results of a run as tables, with pandas and without, also during the run."""

import json
import re
import shutil
import sqlite3
import sys
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from fixtures import Finished, World, damage_metrics, oat

from oat.errors import ConfigError, DataError, OatWarning
from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.rundir.reading import load_run, table
from oat.rundir.rows import read_rows, sound_rows


@pytest.fixture(scope="module")
def run_dir(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of DPO: four steps of four questions, and three evaluations of four prompts with
    two samples and a greedy response."""
    return finished.copy("dpo", tmp_path_factory.mktemp("reading"), {"oracle.repeats": 0})


@pytest.fixture
def without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)


def test_tables_are_frames_where_pandas_is(run_dir: Path) -> None:
    import pandas

    run = load_run(run_dir)
    metrics = run.metrics
    assert isinstance(metrics, pandas.DataFrame)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert list(metrics["step"]) == [0, 1, 2, 3, 4]
    assert list(metrics["loss/total"][1:]) == [row["loss/total"] for row in rows[1:]]
    assert list(metrics["eval/sampled"].isna()) == [False, True, False, True, False]
    assert metrics["loss/total"].dtype == float
    assert run.config.algorithm.name == "dpo"


def test_a_run_without_evaluations_has_their_columns(world: World, run_dir: Path, tmp_path: Path) -> None:
    assert oat("train", world.config("dpo", tmp_path, {"evaluation": None, "stop.max_steps": 1})) == 0
    evaluations = load_run(tmp_path / "dpo").evaluations
    assert len(evaluations[evaluations["mode"] == "greedy"]) == 0
    assert list(evaluations) == list(load_run(run_dir).evaluations)


def test_tables_are_dicts_of_lists_elsewhere(run_dir: Path, without_pandas: None) -> None:
    metrics = load_run(str(run_dir)).metrics
    assert isinstance(metrics, dict)
    assert metrics["step"] == [0, 1, 2, 3, 4]
    assert [value is None for value in metrics["eval/sampled"]] == [False, True, False, True, False]
    assert table([]) == {}
    assert table([{"a": 1}, {"b": [2]}]) == {"a": [1, None], "b": [None, [2]]}


def test_samples_and_evaluations(run_dir: Path, without_pandas: None) -> None:
    run = load_run(run_dir)
    assert run.samples["step"] == [step for step in range(1, 5) for _ in range(4)]
    assert all(len(texts) == 2 for texts in run.samples["responses"])
    evaluations = run.evaluations
    assert evaluations["step"] == [step for step in (0, 2, 4) for _ in range(4 * 3)]
    last = [
        value
        for step, mode, value in zip(*(evaluations[name] for name in ("step", "mode", "value")), strict=True)
        if (step, mode) == (4, "greedy")
    ]
    assert sum(last) / 4 == pytest.approx(run.metrics["eval/greedy"][-1])


def test_questions_and_answers(run_dir: Path, without_pandas: None) -> None:
    """The table of questions has the questions and answers of the ledger."""
    questions = load_run(run_dir).questions
    rows = [dict(zip(questions, values, strict=True)) for values in zip(*questions.values(), strict=True)]
    assert [row["purpose"] for row in rows].count("train") == 16
    assert [row["purpose"] for row in rows].count("eval") == 3 * 4 * 2
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        asked = {str(row.question.key): (row.question, *store.answer(row)) for row in store.answered()}
    for row in rows:
        question, answer, label = asked[
            f"{row['purpose']}/{row['step']}/{row['round']}/{row['occurrence']}/{row['number']}"
        ]
        assert row["prompt"] == [{"role": m.role, "content": m.content} for m in question.messages]
        assert (tuple(row["candidates"]), row["reference"], row["columns"]) == (
            question.candidates,
            question.reference,
            question.columns,
        )
        assert (tuple(row["values"]), tuple(row["marks"]), row["label"], row["by"]) == (
            answer.values,
            answer.marks,
            label,
            answer.by,
        )
        assert (row["queries"], row["tokens"], row["cost"], row["again"]) == (
            answer.queries,
            answer.tokens,
            answer.cost,
            0,
        )
        assert row["learned"] == row["step"]
    assert (
        sum(row["queries"] for row in rows if row["purpose"] == "train")
        == load_run(run_dir).metrics["oracle/queries"][-1]
    )


def contents(folder: Path) -> dict[Path, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and "shm" not in file.name)
    return {file: file.read_bytes() for file in files}


def test_a_run_that_is_being_written(run_dir: Path, tmp_path: Path, without_pandas: None) -> None:
    """A run can be read while it is written: its last line is cut, a question has no answer, and a writer
    holds the ledger. Reading changes no file of the directory."""
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    run = load_run(tmp_path)
    assert (run.metrics, run.environment) == ({"step": []}, [])
    for name in ("samples", "evaluations", "questions"):
        assert getattr(run, name) == {column: [] for column in getattr(load_run(run_dir), name)}, name
    whole = (run_dir / "metrics.jsonl").read_bytes()
    for size in range(len(whole) - 3 * len(whole.splitlines()[-1]) // 2, len(whole) + 1):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:size])
        assert run.metrics["step"] == list(range(whole[:size].count(b"\n")))
    with (
        closing(sqlite3.connect(run_dir / "ledger.sqlite")) as old,
        closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as new,
    ):
        old.backup(new)
    with closing(Store(tmp_path / "ledger.sqlite")) as writer:
        writer.db.execute("DELETE FROM taken WHERE question = 16")
        writer.db.execute("DELETE FROM answers WHERE question = 16")
        with writer:
            before = contents(tmp_path)
            questions = run.questions
            assert contents(tmp_path) == before
    open_ones = [place for place, values in enumerate(questions["values"]) if values is None]
    assert open_ones == [15]
    assert [questions[name][15] for name in ("marks", "by", "queries", "learned")] == [None] * 4


@pytest.mark.sample("both", "nested", seconds=2.6)
@pytest.mark.parametrize(
    ("lines", "steps", "said"),
    [
        pytest.param(
            {3: b"x"},
            [0, 1, 2, 4],
            "line 4 cannot be read as metrics, and there is no row of step 3; ",
            id="damaged",
        ),
        pytest.param({1: None, 2: None}, [0, 3, 4], "there is no row of steps 1 to 2; ", id="deleted"),
        pytest.param(
            {0: None, 2: b'{"step": 2, "a": "b"}'},
            [1, 3, 4],
            "line 2 cannot .*no row of steps 0 and 2; ",
            id="both",
        ),
        pytest.param(
            {2: b'{"step": 3}'},
            [0, 1, 3, 3, 4],
            "no row of step 2, and there are several rows of step 3; ",
            id="twice",
        ),
        pytest.param({1: b"\xff\xfe\n[]\n{}"}, [0, 2, 3, 4], "lines 2 to 4 cannot .*step 1; ", id="several"),
        pytest.param(
            {3: b"[" * 100_000},
            [0, 1, 2, 4],
            "line 4 cannot be read as metrics, and there is no row of step 3; ",
            id="nested",
        ),
        pytest.param(
            {3: b'{"step": 3, "a": 1%s}' % (b"0" * 400)},
            [0, 1, 2, 4],
            "line 4 cannot .*no row of step 3; ",
            id="a number without end",
        ),
    ],
)
def test_damaged_and_deleted_rows_are_warned_of(
    run_dir: Path,
    tmp_path: Path,
    without_pandas: None,
    capsys: pytest.CaptureFixture[str],
    lines: dict[int, bytes | None],
    steps: list[int],
    said: str,
) -> None:
    """Rows of metrics are damaged or deleted. Tables, plots and `oat check` warn and read the sound rows;
    `oat digest` ends with one message."""
    shutil.copytree(run_dir, tmp_path / "run")
    damage_metrics(tmp_path / "run", lines)
    with pytest.warns(OatWarning, match=rf"metrics\.jsonl: .*{said}the others are read"):
        assert load_run(tmp_path / "run").metrics["step"] == steps
    for command in (
        ["plot", tmp_path / "run", "--out", tmp_path / "plot.csv"],
        ["check", tmp_path / "run" / "config.yaml", "--run_dir", tmp_path / "run"],
    ):
        with pytest.warns(OatWarning, match=rf"run/metrics\.jsonl: .*{said}the others are read"):
            assert oat(*command) == 0
    capsys.readouterr()
    assert oat("digest", tmp_path / "run") == 2
    assert re.fullmatch(
        rf"oat digest: \S*metrics\.jsonl: .*{said}no hash could say .*\n", capsys.readouterr().err
    )


def test_a_step_far_away_takes_no_memory(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    damage_metrics(tmp_path / "run", {4: b'{"step": 2000000000}'})
    with pytest.warns(OatWarning, match="there is no row of steps 4 to 1999999999; the others are read"):
        assert oat("plot", tmp_path / "run", "--out", tmp_path / "plot.csv") == 0
    assert oat("digest", tmp_path / "run") == 2
    assert "there is no row of steps 4 to 1999999999; no hash could say" in capsys.readouterr().err
    content = b'{"step": 0}\n{"step": 3000000}\n'
    tracemalloc.start()
    try:
        assert sound_rows(content)[1] == "there is no row of steps 1 to 2999999"
        assert sound_rows(content, 3_000_000)[1] == "there is no row of steps 1 to 2999999"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_what_is_no_run_and_what_is_damaged(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(config.yaml is missing\)"):
        load_run(tmp_path)
    deep = "[" * 100_000 + "\n"
    for text, problem in (
        ("{}\nx\n{}\n", ":2: this is not JSON"),
        (deep, ":1: this is not JSON"),
        ("[]\n", ":1: expected an object"),
    ):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(DataError, match=problem):
            read_rows(tmp_path / "metrics.jsonl")
