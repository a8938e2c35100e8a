"""`oat samples`: the questions of a run and their answers, for people."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import pytest
from fixtures import World, oat, write_jsonl
from terminal import in_a_terminal

from oat.errors import DataError
from oat.reports.sample_table import sample_table
from oat.rundir.reading import load_run
from oat.rundir.rows import read_advantages

COMPARE = """
def longer(prompts, first, second, **columns):
    return [0.9 if len(a) > len(b) else 0.25 if len(a) < len(b) else 0.5 for a, b in zip(first, second)]


def fullness(prompts, completions, **columns):
    return [len(text) / 8 for text in completions]
"""


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs: groups with scores of two functions, and an evaluation by two oracles;
    compared pairs; recorded pairs."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "judge.py").write_text(COMPARE)
    write_jsonl(
        folder / "pairs.jsonl", [{"prompt": f"{a}+1=", "chosen": "ab", "rejected": "b"} for a in range(8)]
    )
    sources = [{"name": world.oracle, "label": "letters"}, {"name": f"{folder / 'judge.py'}:fullness"}]
    changes = {"evaluation.gold": world.oracle, "oracle": {"name": "mixture", "sources": sources}}
    assert oat("train", world.config("grpo", folder, changes)) == 0
    name = {"oracle.name": f"{folder / 'judge.py'}:longer", "evaluation": None}
    assert oat("train", world.config("dpo", folder, name)) == 0
    recorded = {
        "prompts": {"path": str(folder / "pairs.jsonl"), "responses": ["chosen", "rejected"]},
        "oracle": {"name": "recorded"},
    }
    offline = world.config(
        "dpo",
        folder,
        {**recorded, "evaluation": None, "run_dir": str(folder / "offline"), "stop.max_steps": 1},
    )
    assert oat("train", offline) == 0
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object, code: int = 0) -> str:
        assert oat("samples", *words) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    return run


def test_a_step_has_every_prompt_its_responses_and_their_scores(runs: Path, said: Callable[..., str]) -> None:
    pages = said(runs / "grpo", "--step", 3).split("\n\n")[:-1]
    questions = load_run(runs / "grpo").questions.query("purpose == 'train' and learned == 2")
    assert len(pages) == len(questions) == 4
    for number, (page, question) in enumerate(zip(pages, questions.itertuples(), strict=True), 1):
        title, user, reference, *replies = page.split("\n")
        assert title == f"── step 3, {number} of 4 ──"
        assert user == f"prompt: {question.prompt[0]['content']}"
        assert reference == "reference: a"
        found = [re.fullmatch(r"  \[([-\d.]+)(?:, cut off)?\] +(.*)", reply) for reply in replies]
        assert [reply[2] for reply in found if reply] == question.candidates
        assert [float(reply[1]) for reply in found if reply] == pytest.approx(question.values, rel=1e-3)


@pytest.mark.inventory(43)
def test_a_table_has_a_row_for_each_response(runs: Path, said: Callable[..., str], tmp_path: Path) -> None:
    """A row is a response: of training, of an evaluation, and of pairs, where the score is a verdict. The
    advantages of a group are its rewards minus their mean, divided by their standard deviation."""
    file = tmp_path / "table.csv"
    printed = said(runs / "dpo", "--csv", "-")
    assert not Path("-").exists()

    def table(*words: object) -> list[dict[str, str]]:
        file.unlink(missing_ok=True)
        assert said(*words, "--csv", file).endswith(f"responses are in {file}\n")
        with file.open(encoding="utf-8", newline="") as text:
            return [*csv.DictReader(text)]

    rows = table(runs / "grpo", "--step", 3)
    label = f"oracle/source/{runs / 'judge.py'}:fullness"
    assert [*rows[0]] == [
        *("step", "kind", "query", "model response", "score", "reward", "advantage"),
        *("oracle/source/letters", label),
    ]
    assert {(row["step"], row["kind"]) for row in rows} == {("3", "train")}
    for group in (rows[start : start + 3] for start in range(0, 12, 3)):
        rewards = [float(row["reward"]) for row in group]
        expected = [(reward - mean(rewards)) / (stdev(rewards) + 1e-4) for reward in rewards]
        assert [float(row["advantage"]) for row in group] == pytest.approx(expected, abs=1e-5)
    questions = load_run(runs / "grpo").questions.query("purpose == 'train' and learned == 2")
    expected = [
        (question.prompt[0]["content"], text, value)
        for question in questions.itertuples()
        for text, value in zip(question.candidates, question.values, strict=True)
    ]
    found = [(row["query"], row["model response"], float(row["score"])) for row in rows]
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-3)
    evaluated = [json.loads(line) for line in (runs / "grpo/evaluations/step_00000004.jsonl").open()]
    rows = table(runs / "grpo", "--step", 4, "--eval")
    assert sorted(row["model response"] for row in rows) == sorted(row["output"] for row in evaluated)
    assert all(float(row["score"]) >= 0 for row in rows)
    assert {row["score"].partition(",")[0] for row in table(runs / "dpo")} <= {"wins", "loses", "tie"}
    assert {(row["advantage"], row["reward"]) for row in table(runs / "dpo")} == {("", "")}
    everything = table(runs / "grpo")
    evaluations = {(step, kind) for step in "024" for kind in ("sampled", "greedy")}
    assert {(row["step"], row["kind"]) for row in everything} == evaluations | {(s, "train") for s in "1234"}
    for row in everything:
        assert bool(row["advantage"]) == (row["kind"] == "train")
        parts = [float(row["oracle/source/letters"]), float(row[label])]
        assert parts[1] == len(row["model response"]) / 8
        assert float(row["reward"]) == pytest.approx(sum(parts))
    shutil.copytree(runs / "grpo", tmp_path / "older")
    (tmp_path / "older" / "advantages.jsonl").unlink()
    assert {row["advantage"] for row in table(tmp_path / "older")} == {""}
    table(runs / "dpo")
    assert file.read_bytes().decode() == printed
    for place in (tmp_path, file):
        assert "is there already, and is not overwritten" in said(runs / "dpo", "--csv", place, code=2)
    (tmp_path / "file").touch()
    assert "cannot be made" in said(runs / "dpo", "--csv", tmp_path / "file" / "table.csv", code=2)


def test_a_response_that_was_cut_off_says_so(runs: Path, said: Callable[..., str]) -> None:
    """`oat samples` marks the responses that were cut off, in agreement with samples.jsonl, which has all
    four groups of a step."""
    rows = [json.loads(line) for line in (runs / "grpo" / "samples.jsonl").read_text().splitlines()]
    finish = [end for row in rows if row["step"] == 4 for end in row["finish"]]
    assert set(finish) == {"stop", "length"}
    replies = re.findall(r"^  \[.*\]", said(runs / "grpo", "--step", 4), flags=re.MULTILINE)
    assert ["length" if "cut off" in reply else "stop" for reply in replies] == finish


def test_without_a_step_the_newest_stands_first(runs: Path, said: Callable[..., str]) -> None:
    titles = re.findall(r"^── step (\d)", said(runs / "grpo"), flags=re.MULTILINE)
    assert "".join(titles) == "4444333322221111"


def test_pairs_say_who_won(runs: Path, said: Callable[..., str]) -> None:
    pages = said(runs / "dpo").split("\n\n")[:-1]
    assert {tuple(re.findall(r"\[(\w+)", page)) for page in pages} <= {
        ("wins", "loses"),
        ("loses", "wins"),
        ("tie", "tie"),
    }
    for page in pages:
        (first, one), (second, other) = re.findall(r"^  \[(.*?)\] +(.*)$", page, flags=re.MULTILINE)
        chances = {1: ("wins, 0.9", "loses, 0.1"), -1: ("loses, 0.25", "wins, 0.75"), 0: ("tie", "tie")}
        is_longer = (len(one) > len(other)) - (len(one) < len(other))
        assert (first.replace(", cut off", ""), second.replace(", cut off", "")) == chances[is_longer]


def test_recorded_pairs_are_shown_too(runs: Path, said: Callable[..., str]) -> None:
    pages = said(runs / "offline").split("\n\n")[:-1]
    assert len(pages) == 4
    assert all(re.search(r"\[.*\] +ab\n.*\[.*\] +b$", page) for page in pages)


def test_evaluations_with_the_second_opinion(runs: Path, said: Callable[..., str]) -> None:
    pages = said(runs / "grpo", "--eval", "--step", 2).split("\n\n")[:-1]
    assert len(pages) == 4 + 4, "four prompts, sampled and greedily"
    rows = [
        json.loads(line)
        for line in (runs / "grpo" / "evaluations" / "step_00000002.jsonl").read_text().splitlines()
    ]
    assert re.findall(r"\] +(.*)$", "\n".join(pages), flags=re.MULTILINE) == [row["output"] for row in rows]
    assert re.findall(r"\[([\d.]+), gold [\d.]+\]", "\n".join(pages)) == [
        f"{row['value']:.4g}" for row in rows
    ]
    assert "── evaluation after 4 steps, sampled, 1 of 4 ──" in said(runs / "grpo", "--eval")


def test_what_is_not_there_is_said(
    world: World, runs: Path, tmp_path: Path, said: Callable[..., str]
) -> None:
    assert "nothing of step 7, since no step has learned from an answer there; give 1, 2, 3, 4" in said(
        runs / "grpo", "--step", 7, code=2
    )
    assert "the run has no section `evaluation`" in said(runs / "dpo", "--eval", code=2)
    assert "holds no run" in said(tmp_path, code=2)
    shutil.copy(runs / "grpo" / "config.yaml", tmp_path)
    assert "no step has learned from an answer yet" in said(tmp_path, code=2)
    shutil.copytree(runs / "grpo", tmp_path / "lost")
    (tmp_path / "lost" / "ledger.sqlite").unlink()
    assert "ledger.sqlite" in said(tmp_path / "lost", code=1)


def test_damaged_records_are_one_message(runs: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    shutil.copytree(runs / "grpo", tmp_path / "damaged")
    file = tmp_path / "damaged" / "evaluations" / "step_00000004.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for change, words in (
        ({"value": "high"}, "got one of the value 'high'"),
        ({"mode": None}, "got one without mode"),
    ):
        changed = {name: value for name, value in {**rows[1], **change}.items() if value is not None}
        write_jsonl(file, [rows[0], changed])
        found = said(tmp_path / "damaged", "--eval", code=2)
        assert f"{file}:2: expected a record of an evaluation, {words}" in found


@pytest.mark.parametrize(
    "value",
    [
        *("null", "3", '"abc"', "{}", "[null, null, null, null]", '["abc", "abc", "abc", "abc"]'),
        "[[0.1, 0.2, 0.3]]",
        "[[0.1], [0.2], [0.3], [0.4]]",
        *(f"[{', '.join([f'[{each}, 1, 1]'] * 4)}]" for each in ("true", "NaN", "1e999", '"=a"', "[]", "{}")),
    ],
)
def test_damaged_advantages_are_one_message(runs: Path, tmp_path: Path, value: str) -> None:
    """Nothing but a number for each response gets into the table."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for part in (runs / "grpo").iterdir():
        (run_dir / part.name).symlink_to(part)
    file = run_dir / "advantages.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.unlink()
    file.write_text(whole[0] + f'{{"step": 2, "advantages": {value}}}\n')
    with pytest.raises(DataError, match=re.escape(f"{file}:2: ")):
        list(sample_table(run_dir))


def test_lines_of_advantages_that_are_no_steps_of_their_own(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "advantages.jsonl"
    first = (runs / "grpo" / "advantages.jsonl").read_text().splitlines(keepends=True)[0]
    for step in ("1", "1.0", "true", "[1]", "{}", "-1", "null"):
        file.write_text(first + first.replace('"step": 1,', f'"step": {step},'))
        with pytest.raises(DataError, match=re.escape(f"{file}:2: ")):
            read_advantages(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(DataError, match=re.escape(str(file))):
        read_advantages(file)


def test_a_terminal_gets_a_pager(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal the output goes through the pager, which may end before it has read everything."""
    monkeypatch.setenv("PAGER", "sed -n '1p;1q'")
    monkeypatch.setenv("TERM", "xterm")
    seen = in_a_terminal(lambda: oat("samples", runs / "grpo"))
    assert (seen.code, seen.lines[0]) == (0, "── step 4, 1 of 4 ──")
    assert not any("4 of 4" in line for line in seen.lines)
    seen = in_a_terminal(lambda: oat("samples", runs / "grpo", "--step", 7))
    assert seen.code == 2
    assert "give 1, 2, 3, 4" in " ".join(seen.lines)
    for broken in ("there-is-no-such-pager", "less 'with a quote"):
        monkeypatch.setenv("PAGER", broken)
        assert "4 of 4" in " ".join(in_a_terminal(lambda: oat("samples", runs / "grpo", "--step", 1)).lines)
