"""The quickstart's parts with small sizes, and its four configurations through `oat train`. `make quickstart`
runs the complete quickstart."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fixtures import forked, kill_at

from oat.cli import main
from oat.errors import ConfigError, DataError
from oat.models.loading import load_lm, load_tokenizer, save_lm
from oat.plugins.loading import load_symbol
from oat.quickstart import (
    _MADE_BY,
    MAX_STEPS,
    PermutedRewards,
    _claim,
    _is_done,
    configurations,
    quickstart,
)
from oat.quickstart.processes import ChildError, run_all
from oat.quickstart.report import Curve, plot, read_curve, table
from oat.quickstart.task import MAX_NEW_TOKENS, Sum, build_model, build_task, build_tokenizer, supervise
from oat.text.renderer import Renderer
from oat.types import Key, Message, Question

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "quickstart.py"
PRINT_AND_SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def test_the_task_is_what_it_says():
    task = build_task(0)
    pairs = {frozenset((s.first, s.second)) for s in task.train}
    held = {frozenset((s.first, s.second)) for s in task.heldout}
    assert not pairs & held
    assert len(held) == len(task.heldout) == 520
    assert len(pairs | held) == 1845
    assert {(s.second, s.first) for s in task.train} == {(s.first, s.second) for s in task.train}
    for s in (*task.train, *task.heldout):
        assert min(s.first, s.second) >= 10
        assert max(s.first, s.second) <= 99
        assert s.first % 10 + s.second % 10 >= 10
    assert (Sum(37, 48).prompt, Sum(37, 48).right, Sum(37, 48).forgotten) == ("37+48=", "85", "75")
    assert (Sum(87, 46).right, Sum(87, 46).forgotten) == ("133", "123")


def test_the_teacher_forgets_the_carry_75_times_in_100():
    task = build_task(0)
    known = set(task.train)
    wrong = [shown == s.forgotten for s, shown in task.demonstrations]
    assert all(s in known and shown in (s.right, s.forgotten) for s, shown in task.demonstrations)
    assert abs(np.mean(wrong) - 0.75) < 4 * (0.75 * 0.25 / len(wrong)) ** 0.5


def test_the_task_is_a_function_of_its_seed(tmp_path: Path):
    assert build_task(1, demonstrations=100) == build_task(1, demonstrations=100)
    assert build_task(1, demonstrations=100).heldout != build_task(2, demonstrations=100).heldout
    task = build_task(1, demonstrations=3)
    task.write(tmp_path)
    records = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    assert records["heldout"] == [{"prompt": s.prompt, "answer": s.right} for s in task.heldout]
    assert len(records["train"]) == len(task.train)
    assert len((tmp_path / "demonstrations.jsonl").read_text().splitlines()) == 3


def test_the_tokenizer_survives_disk_and_gives_a_token_a_character(tmp_path: Path):
    tokenizer = build_tokenizer()
    save_lm(build_model(tokenizer, 0, hidden=32, layers=1), tokenizer, str(tmp_path))
    loaded = load_tokenizer(str(tmp_path))
    renderer = Renderer(loaded, template=None, eos_ids=load_lm(str(tmp_path)).eos_ids)
    ids, answer = renderer.prompt([Message("user", "90+47=")]), renderer.response("137")
    assert ids.tolist() == [loaded.bos_token_id, 9, 0, 10, 4, 7, 11]
    assert answer.tolist() == [1, 3, 7, loaded.eos_token_id]
    assert len(answer) == MAX_NEW_TOKENS
    assert (renderer.text(ids[1:]), renderer.text(answer)) == ("90+47=", "137")
    assert renderer.stop_ids == {loaded.eos_token_id}


def test_the_supervised_start_learns_the_same_each_time():
    def losses() -> list[float]:
        tokenizer = build_tokenizer()
        lm = build_model(tokenizer, 3, hidden=32, layers=1)
        history: list[float] = []
        demonstrations = build_task(3, demonstrations=64 * 40 + 1).demonstrations
        supervise(
            lm,
            tokenizer,
            demonstrations,
            batch_size=64,
            learning_rate=5e-3,
            report=lambda step, loss: history.append(loss),
        )
        return history

    before = torch.random.get_rng_state()
    history = losses()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(history) == 40
    assert abs(history[0] - np.log(15)) < 0.3
    assert history[-1] < 0.7 * history[0]
    assert losses() == history


def questions(purpose: str, step: int, answers: list[list[str]]) -> list[Question]:
    keys = [Key(purpose, step, 0, occurrence) for occurrence in range(len(answers))]
    return [
        Question(key, "score", (Message("user", "1+1="),), tuple(texts), tuple(range(len(texts))), "2")
        for key, texts in zip(keys, answers, strict=True)
    ]


def rewards(oracle: PermutedRewards, asked: list[Question]) -> list[tuple[float, ...]]:
    tickets = oracle.submit(asked)
    answers = dict(oracle.collect(tickets, 0.0))
    assert oracle.collect(tickets, 0.0) == []
    assert [answers[ticket].key for ticket in tickets] == [question.key for question in asked]
    return [answers[ticket].values for ticket in tickets]


def test_permuted_rewards_are_the_same_rewards_elsewhere():
    answers = [["2", "2"], ["3", "3"]] * 50
    dealt = rewards(PermutedRewards(), questions("train", 0, answers))
    assert [len(values) for values in dealt] == [2] * 100
    assert sorted(value for values in dealt for value in values) == [0.0] * 100 + [1.0] * 100
    of_right = [value for values in dealt[::2] for value in values]
    assert abs(np.mean(of_right) - 0.5) < 0.2


def test_permuted_rewards_are_a_function_of_the_questions():
    first, second = (questions("train", step, [["2", "3"]] * 30) for step in (0, 1))
    oracle = PermutedRewards()
    dealt = rewards(oracle, first)
    assert rewards(oracle, second) != dealt
    assert rewards(oracle, first) == rewards(PermutedRewards(), first) == dealt
    assert rewards(PermutedRewards(seed=1), first) != dealt
    assert rewards(oracle, first + second) == dealt + rewards(oracle, second)


def test_permuted_rewards_leave_evaluations_and_missing_answers_alone():
    assert rewards(PermutedRewards(), questions("eval", 0, [["2", "3"]] * 30)) == [(1.0, 0.0)] * 30
    unscored = Question(Key("train", 0, 0, 30), "score", (Message("user", "1+1="),), ("2", "3"), (0, 1))
    oracle = PermutedRewards()
    answers = oracle.collect(oracle.submit([*questions("train", 0, [["2", "3"]] * 30), unscored]), 0.0)
    marks = [mark for _, answer in answers for mark in answer.marks]
    assert sorted(marks) == ["abstain"] * 2 + ["ok"] * 60
    assert marks[-2:] != ["abstain"] * 2


def test_every_configuration_runs_as_it_stands_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    task, tokenizer = build_task(0, heldout=520, demonstrations=64 * 30), build_tokenizer()
    task.write(tmp_path)
    heldout = (tmp_path / "heldout.jsonl").read_text().splitlines()[:16]
    (tmp_path / "heldout.jsonl").write_text("\n".join(heldout))
    lm = build_model(tokenizer, 0, hidden=32, layers=1)
    supervise(lm, tokenizer, task.demonstrations, batch_size=64)
    save_lm(lm, tokenizer, str(tmp_path / "start"))
    runs = configurations(tmp_path)
    assert list(runs) == ["dpo", "dpo-control", "grpo", "grpo-control"]
    for name, tree in runs.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        assert main(["train", str(tmp_path / f"{name}.yaml"), "--stop.max_steps", "2"]) == 0, (
            capsys.readouterr().err
        )
    curves = {name: read_curve(tmp_path / name) for name in runs}
    assert {(curve.sampled[0], curve.greedy[0]) for curve in curves.values()} == {
        (curves["dpo"].sampled[0], curves["dpo"].greedy[0])
    }
    assert all(curve.queries[0] == 0 and len(curve.queries) == 2 for curve in curves.values())
    assert curves["grpo"].queries[-1] == curves["grpo-control"].queries[-1] == 2 * 64 * 8
    plot(curves, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_says_what_the_files_say(tmp_path: Path):
    rows = [
        {"step": 0, "eval/sampled": 0.35, "eval/greedy": 0.05, "time/evaluate_s": 1.0},
        {"step": 1, "oracle/queries": 512, "time/step_s": 2.0},
        {
            "step": 2,
            "oracle/queries": 1024,
            "time/step_s": 2.0,
            "eval/sampled": 0.75,
            "eval/greedy": 0.9,
            "time/evaluate_s": 1.5,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_curve(tmp_path)
    assert curve == Curve(queries=(0.0, 1024), sampled=(0.35, 0.75), greedy=(0.05, 0.9), seconds=6.5)
    assert table({"dpo": curve}).splitlines()[1].split() == [
        "dpo",
        "1024",
        "0.350",
        "->",
        "0.750",
        "0.050",
        "->",
        "0.900",
        "6",
    ]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(DataError, match="no evaluation"):
        read_curve(tmp_path)
    with pytest.raises(DataError, match="there is no such file"):
        read_curve(tmp_path / "nowhere")


def cell(
    seed: int, environment: str, dpo: tuple[float, float], control: tuple[float, float]
) -> dict[str, Any]:
    """Return the results of one cell of the benchmark, for runs with these gains. Sampled scores start at
    0.25 and greedy scores at 0.01."""

    def run(sampled: float, greedy: float) -> dict[str, dict[str, float]]:
        rows = [
            {"eval/sampled": 0.25, "eval/greedy": 0.01},
            {"eval/sampled": 0.25 + sampled, "eval/greedy": 0.01 + greedy, "oracle/queries": 1000},
        ]
        for row in rows:
            row |= {
                f"{name}_{bound}": row[name] + by
                for name in ("eval/sampled", "eval/greedy")
                for bound, by in (("low", -0.01), ("high", 0.01))
            }
        return dict(zip(("start", "end"), rows, strict=True))

    return {
        "seed": seed,
        "environment": environment,
        "runs": {"dpo": run(*dpo), "dpo-control": run(*control)},
    }


@pytest.mark.parametrize(
    ("dpo", "control", "missed"),
    [
        ((0.31, 0.51), (0.04, -0.04), None),
        ((0.29, 0.51), (0.04, -0.04), "dpo: sampled +0.290"),
        ((0.31, 0.49), (0.04, -0.04), "dpo: sampled +0.310, greedy +0.490"),
        ((0.31, 0.51), (0.06, 0.0), "dpo-control: sampled +0.060"),
        ((0.31, 0.51), (0.0, -0.06), "dpo-control: sampled +0.000, greedy -0.060"),
    ],
)
def test_a_cell_out_of_bounds_is_named(
    dpo: tuple[float, float], control: tuple[float, float], missed: str | None
):
    found = load_symbol(f"{BENCHMARK}:misses")(cell(3, "avx2", dpo, control))
    assert found == [] if missed is None else len(found) == 1 and f"seed 3, avx2, {missed}" in found[0]


def test_the_tables_show_every_cell_that_is_there(tmp_path: Path):
    cells = {
        "1_as_is": cell(1, "as is", (0.4, 0.9), (0.01, 0.02)),
        "0_as_is": cell(0, "as is", (0.5, 0.8), (0.0, 0.0)),
    }
    cells["4_avx2"] = cell(4, "avx2", (0.45, 0.7), (-0.01, 0.0))
    for name, made in cells.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- cells -->\nold\n<!-- end of cells -->\nafter\n")
    load_symbol(f"{BENCHMARK}:write_tables")(load_symbol(f"{BENCHMARK}:read_cells")(tmp_path), page)
    text = page.read_text()
    assert text.startswith("before\n<!-- cells -->\n| run | seed |")
    assert text.endswith("<!-- end of cells -->\nafter\n")
    assert "old" not in text
    assert "| dpo | 0 | 1,000 | 0.250 | 0.750 [0.740, 0.760] | 0.010 | 0.810 [0.800, 0.820] |" in text
    assert (
        "| as is | dpo | 0, 1 | 0.250 to 0.250 | +0.400 to +0.500 | 0.010 to 0.010 | +0.800 to +0.900 |"
        in text
    )
    assert (
        "| avx2 | dpo-control | 4 | 0.250 to 0.250 | -0.010 to -0.010 | 0.010 to 0.010 | +0.000 to +0.000 |"
    ) in text
    assert "\n| dpo | 4 |" not in text


def test_the_pages_claim_is_a_bound_that_held_over_its_list():
    """The list of results in the page keeps the bounds that the page states. No start is close
    to a tie of the two answers."""
    least_sampled, least_greedy, most = (
        load_symbol(f"{BENCHMARK}:{name}") for name in ("LEAST_SAMPLED", "LEAST_GREEDY", "MOST_CONTROL")
    )
    root = BENCHMARK.parent.parent
    plain = " ".join((root / "docs" / "quickstart.md").read_text().split())
    assert f"raised the accuracy of its samples by at least {least_sampled}, and that of its greedy" in plain
    assert f"answers by at least {least_greedy}. Each control ended within {most} of the two" in plain
    environments = load_symbol(f"{BENCHMARK}:ENVIRONMENTS")
    lines = [
        line.strip("| ").split(" | ")
        for line in (root / "docs" / "quickstart.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    listed = [line for line in lines if line[0] in environments]
    assert {(line[0], line[1]) for line in listed} == {
        (environment, name) for environment in environments for name in configurations(Path("out"))
    }
    for environment, name, seeds, _, sampled, start, greedy in listed:
        assert seeds == ", ".join(map(str, load_symbol(f"{BENCHMARK}:SEEDS"))), (environment, name)
        spans = [[float(value) for value in span.split(" to ")] for span in (sampled, greedy)]
        assert float(start.split(" to ")[1]) < 0.15, (environment, name)
        if name.endswith("-control"):
            assert all(abs(value) <= most for span in spans for value in span), (environment, name)
        else:
            assert spans[0][0] >= least_sampled, (environment, name)
            assert spans[1][0] >= least_greedy, (environment, name)


@pytest.mark.slow
def test_every_run_of_the_command_gains_and_no_control_does(tmp_path: Path):
    quickstart(tmp_path, 0)
    ends = load_symbol(f"{BENCHMARK}:ends")
    made = {
        "seed": 0,
        "environment": "as is",
        "runs": {name: ends(tmp_path / name) for name in configurations(tmp_path)},
    }
    assert load_symbol(f"{BENCHMARK}:misses")(made) == []


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "environment"), [(1, "default"), (2, "avx2")])
def test_so_it_is_where_torch_rounds_otherwise(tmp_path: Path, seed: int, environment: str):
    command = [
        sys.executable,
        str(BENCHMARK),
        "--out",
        str(tmp_path),
        "--cell",
        str(seed),
        "--environment",
        environment,
    ]
    variables = load_symbol(f"{BENCHMARK}:ENVIRONMENTS")[environment]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (
        json.loads((tmp_path / f"{seed}_{environment}.json").read_text())["capability"] == environment.upper()
    )


def test_it_says_what_it_does_before_it_loads_anything(tmp_path: Path):
    """`oat quickstart` says what it does before it imports torch, and then how much there is to do. A pipe
    gets complete lines and no progress counter."""
    code = (
        "import sys\nfrom oat.cli import main\nclass First:\n    def write(self, text):\n        "
        "sys.exit(f'{text} {\"torch\" in sys.modules}')\n    def flush(self):\n        pass\n"
        f"sys.stdout = First()\nmain(['quickstart', '--out', {str(tmp_path / 'first')!r}])\n"
    )
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert first.startswith("oat quickstart: a tiny model that learns sums")
    assert f"all of it in {tmp_path / 'first'} False" in first
    log = tmp_path / "log"

    def begin() -> int:
        kill_at(torch.optim.AdamW, "step", 3)
        return main(["quickstart", "--out", str(tmp_path / "piped")])

    assert forked(begin, log) == -signal.SIGKILL
    lines = log.read_text().splitlines()
    assert re.fullmatch(r"oat quickstart: start, supervised learning: \d+ steps", lines[2])
    assert not any("step" in line for line in lines[3:])


def test_what_cannot_work_is_refused_before_anything_is_done(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(ConfigError, match="something else"):
        quickstart(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("text", "is_ours"), [("My project\n", False), ("Made by `oat", False), ("", False), (_MADE_BY, True)]
)
def test_a_readme_of_the_users_is_never_replaced(tmp_path: Path, text: str, is_ours: bool):
    (tmp_path / "README.txt").write_text(text)
    (tmp_path / "thesis.txt").write_text("eight years")
    if is_ours:
        assert "start" in _claim(tmp_path)
        assert (tmp_path / "README.txt").read_text() == text, "notes that a user has added stay"
    else:
        with pytest.raises(ConfigError, match="something else than a quickstart"):
            _claim(tmp_path)
        assert (tmp_path / "README.txt").read_text() == text


def test_what_is_done_is_not_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tree = {"seed": 0, "stop": {"max_steps": MAX_STEPS}}
    (tmp_path / "dpo" / "checkpoints" / f"step_{MAX_STEPS:08d}").mkdir(parents=True)
    assert not _is_done(tmp_path, "dpo", tree)
    (tmp_path / "dpo.yaml").write_bytes(b"stop: {\xff")
    assert not _is_done(tmp_path, "dpo", tree)
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert _is_done(tmp_path, "dpo", tree)
    assert capsys.readouterr().out == "oat quickstart: dpo was done before\n"
    assert not _is_done(tmp_path, "dpo", {**tree, "seed": 1})
    assert not _is_done(tmp_path, "grpo", tree)


def test_a_failing_run_shows_its_last_words_and_ends_the_others(tmp_path: Path):
    commands = {
        "endless": [sys.executable, "-c", PRINT_AND_SLEEP],
        "broken": [
            sys.executable,
            "-c",
            (
                f"import time\nwhile not open({str(tmp_path / 'endless.log')!r}).read(): time.sleep(0.05)\n"
                "raise SystemExit('alas')"
            ),
        ],
        "never": [sys.executable, "-c", "print(1)"],
    }
    with pytest.raises(ChildError, match=r"broken failed with exit code 1(.|\n)*alas"):
        run_all(commands, tmp_path, at_a_time=2)
    assert has_ended(int((tmp_path / "endless.log").read_text()))
    assert not (tmp_path / "never.log").exists()


def test_sigterm_ends_the_runs_too(tmp_path: Path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom oat.quickstart.processes import "
        "interrupted_by_sigterm, run_all\n"
        f"with interrupted_by_sigterm():\n    run_all({{'run': [sys.executable, '-c', "
        f"{PRINT_AND_SLEEP!r}]}}, Path({str(tmp_path)!r}), at_a_time=2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    log, deadline = tmp_path / "run.log", time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    assert b"KeyboardInterrupt" in parent.communicate(timeout=60)[1]
    assert has_ended(int(log.read_text()))


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl", "demonstrations.jsonl"])
def test_records_of_the_users_are_never_replaced(tmp_path: Path, name: str):
    task = build_task(0, demonstrations=8)
    task.write(tmp_path)
    task.write(tmp_path)
    (tmp_path / name).write_text('{"prompt": "mine"}\n')
    with pytest.raises(ConfigError, match=f"{name}: is not what this command writes"):
        task.write(tmp_path)
    assert (tmp_path / name).read_text() == '{"prompt": "mine"}\n'
