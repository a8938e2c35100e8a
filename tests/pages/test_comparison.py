"""`make compare` with small sizes: it makes each run once, goes on after a kill, and its page agrees with its
CSV."""

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oat import Trainer
from oat.errors import ConfigError, DataError
from oat.models.loading import save_lm
from oat.plugins.registry import ALGORITHMS
from oat.quickstart.task import build_model, build_task, build_tokenizer, supervise

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
CSVS = BENCHMARKS / "comparison"
PAGE = ROOT / "docs" / "comparison.md"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny start for the seeds 0 and 1, and with few sums for each."""
    folder = tmp_path_factory.mktemp("starts")
    tokenizer = build_tokenizer()
    for seed in (0, 1):
        place = folder / f"start_{seed}"
        place.mkdir()
        task = build_task(seed, demonstrations=64 * 30)
        task.write(place)
        for name, count in (("train", 256), ("heldout", 16)):
            lines = (place / f"{name}.jsonl").read_text().splitlines()[:count]
            (place / f"{name}.jsonl").write_text("\n".join(lines))
        lm = build_model(tokenizer, seed, hidden=32, layers=1)
        supervise(lm, tokenizer, task.demonstrations, batch_size=64)
        save_lm(lm, tokenizer, str(place / "start"))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make the short comparison small: two algorithms and one run that asks nobody, one learning rate, one
    seed."""
    import compare  # noqa: F401 (all of its modules, before anything is replaced)
    from comparison import algorithms, plan

    size = plan.Size("short", (1,), queries=128, every=64, only=("dpo", "grpo"))
    monkeypatch.setitem(plan.SIZES, "short", size)
    monkeypatch.setattr(plan, "LEARNING_RATES", (1e-3,))
    monkeypatch.setattr(algorithms, "RECORDED", {"sft_right": algorithms.RECORDED["sft_right"]})
    return size


def places_in(folder: Path, starts: Path) -> Any:
    """Return the places of a comparison whose starts are made, and whose page has no tables yet."""
    from compare import Places

    (folder / "work").mkdir()
    for start in starts.iterdir():
        (folder / "work" / start.name).symlink_to(start)
    marks = "".join(
        f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("picture", "made", "results", "search")
    )
    (folder / "page.md").write_text(f"before\n{marks}after\n", encoding="utf-8")
    return Places(folder, folder / "work", folder / "page.md", folder)


def in_this_process(made: list[str], kill_at: int | None = None) -> Callable[..., None]:
    """Return a `Perform` that does all tasks here, and notes the runs that it makes.

    Args:
        kill_at: number of runs after which it is interrupted; None: it is not.
    """
    from compare import do

    def perform(tasks: Mapping[str, Any], places: Any, report: Callable[[str], None]) -> None:
        for name, task in tasks.items():
            for job in task.jobs:
                if len(made) == kill_at:
                    raise KeyboardInterrupt
                do(dataclasses.replace(task, jobs=(job,)), places)
                made.append(f"{job.purpose} {job.name}")
            if not task.jobs:
                do(task, places)
            report(name)

    return perform


@pytest.mark.slow(instead="the other tests of the file", seconds=3.4)
def test_a_killed_comparison_goes_on_and_no_run_is_made_twice(
    tmp_path: Path,
    starts: Path,
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from compare import compare, main
    from comparison import plan
    from comparison.page import tables
    from comparison.records import read_records

    monkeypatch.setattr(plan, "STEP", 32)
    monkeypatch.setattr(plan, "MINIBATCH", 16)
    places = places_in(tmp_path, starts)
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        compare(small, places, in_this_process(made, kill_at=3))
    (places.records(small) / ".new-dpo_search_0_a.json").write_text('{"name": "dp')
    found = compare(small, places, in_this_process(made))
    names = ("dpo", "grpo", "sft_right")
    assert made == [
        *(f"search {name}" for name in names for _ in range(2)),
        *(f"final {name}" for name in names),
    ]
    csv = tmp_path / "short.csv"
    written = csv.read_bytes()
    assert read_records(csv).keys() == found.keys()
    assert compare(small, places, in_this_process(made)).keys() == found.keys()
    assert len(made) == 9
    assert csv.read_bytes() == written
    assert [run.outcome for run in found.values()] == ["done"] * 9
    assert not any((places.work / "runs").glob("*"))
    final = {run.name: run for run in found.values() if run.purpose == "final"}
    assert len({(run.evaluations[0].sampled, run.evaluations[0].greedy) for run in final.values()}) == 1
    assert [each.queries for each in final["grpo"].evaluations] == [0, 64, 128]
    assert final["dpo"].last.queries <= 128
    assert final["sft_right"].last.queries == 0
    assert all(run.last.cpu_seconds > 0 for run in found.values())
    capsys.readouterr()
    assert main(["--short", "--tables"], places) == 0
    page = places.page.read_text(encoding="utf-8")
    assert all(text in page for text in tables(tmp_path).values())
    assert page.startswith("before\n")
    assert page.endswith("<!-- end of search -->\nafter\n")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_other_settings_are_another_run(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    """If the line of an algorithm changes, all of its runs are made again, and no others."""
    from comparison import algorithms, plan

    def keys() -> dict[str, set[Any]]:
        return {name: {job.key for job in jobs} for name, jobs in plan.search_jobs(small).items()}

    before = keys()
    line = dataclasses.replace(algorithms.LINES["dpo"], fixed={"label_smoothing": 0.1})
    monkeypatch.setitem(algorithms.LINES, "dpo", line)
    after = keys()
    assert not before["dpo"] & after["dpo"]
    assert before["grpo"] == after["grpo"]


def test_every_line_of_settings_is_accepted(tmp_path: Path, starts: Path) -> None:
    """Every algorithm of the registry is compared, or left out with a reason. Every setting that the search
    tries is a configuration without mistakes, with one pass over the answers of a step."""
    from comparison.algorithms import LEFT_OUT, LINES, RECORDED
    from comparison.one_run import write_pairs
    from comparison.plan import FULL, search_jobs

    write_pairs(starts / "start_0" / "pairs.jsonl", 0)
    jobs = search_jobs(FULL)
    assert list(jobs) == [*(name for name in ALGORITHMS if name not in LEFT_OUT), *RECORDED]
    assert {len({job.key for job in tried}) for tried in jobs.values()} == {6}
    assert set(LINES) | set(LEFT_OUT) <= set(ALGORITHMS)
    for job in (job for tried in jobs.values() for job in tried[-2:]):
        tree = job.tree(starts / "start_0", tmp_path / "run")
        Trainer(**tree, quiet=True)
        name, options = tree["algorithm"]["name"], dict(tree["algorithm"])
        del options["name"]
        assert ALGORITHMS[name].Config(**options).epochs == 1, job


def test_an_algorithm_without_a_line_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from comparison import algorithms, plan

    monkeypatch.setattr(algorithms, "ALGORITHMS", {"grpo": ALGORITHMS["grpo"], "newest": ALGORITHMS["rloo"]})
    monkeypatch.setattr(plan, "ALGORITHMS", algorithms.ALGORITHMS)
    monkeypatch.setattr(algorithms, "RECORDED", {})
    job = plan.search_jobs(plan.FULL)["newest"][1]
    assert job.tree(Path(), Path())["algorithm"] == {
        "name": "newest",
        "prompts": 32,
        "samples": 8,
        "minibatches": 4,
        "epochs": 1,
    }


def test_a_run_that_diverges_is_an_outcome(tmp_path: Path, starts: Path, small: Any) -> None:
    from comparison.one_run import perform
    from comparison.plan import Setting, search_jobs

    job = search_jobs(small)["grpo"][0]
    wild = dataclasses.replace(job, setting=Setting(1e30, job.setting.knob), queries=512)
    record = perform(wild, starts / "start_0", tmp_path / "run")
    assert record.outcome.startswith("NonFiniteError: ")
    assert "\n" not in record.outcome
    assert [each.step for each in record.evaluations] == [0]
    mistaken = dataclasses.replace(job, setting=Setting(-1.0, job.setting.knob))
    with pytest.raises(ConfigError, match="learning_rate"):
        perform(mistaken, starts / "start_0", tmp_path / "run")


def test_the_best_setting() -> None:
    from comparison.plan import FULL, best_setting, final_jobs, search_jobs

    tried = search_jobs(FULL)["dpo"]
    assert best_setting(tried, [0.1, None, 0.3, 0.3, 0.2, 0.0]) == tried[2].setting
    assert best_setting(tried, [None] * 6) == tried[0].setting
    found = {job.key: 0.1 * number for number, job in enumerate(tried)}
    assert final_jobs(FULL, {key: found[key] for key in list(found)[:5]}) == {}
    jobs = final_jobs(FULL, found)["dpo"]
    assert [job.setting for job in jobs] == [tried[5].setting] * 3
    assert [job.seed for job in jobs] == [1, 2, 3]
    assert {job.queries for job in jobs} == {2 * tried[0].queries}


def test_seconds_are_shared_out_between_a_step_and_its_evaluation() -> None:
    from comparison.one_run import evaluations
    from comparison.records import Evaluation

    start = {"step": 0, "eval/sampled": 0.2, "eval/greedy": 0.0, "time/evaluate_s": 5.0}
    first = {"step": 1, "oracle/queries": 10.0, "time/step_s": 2.0}
    second = {"step": 2, "oracle/queries": 20.0, "time/step_s": 3.0, "time/evaluate_s": 1.0}
    rows = [(start, 7.0), (first, 8.5), ({**second, "eval/sampled": 0.4, "eval/greedy": 0.5}, 10.5)]
    assert evaluations(rows, "dpo") == [
        Evaluation(0, 0, 0.0, 0.0, 0.2, 0.0),
        Evaluation(2, 20, 5.0, 1.5 + 2.0 * 3 / 4, 0.4, 0.5),
    ]


def run_of(name: str, seed: int, *points: tuple[int, float], outcome: str = "done") -> Any:
    """Return the record of a run with these queries and accuracies."""
    from comparison.records import Evaluation, Record

    evaluations = tuple(
        Evaluation(number, queries, 2.0 * number, 1.0 * number, sampled, sampled / 2)
        for number, (queries, sampled) in enumerate(points)
    )
    return Record(name, "learning_rate 1e-4", seed, "d", "final", outcome, "a machine", "c", evaluations)


def test_the_queries_to_an_accuracy() -> None:
    from comparison.page import queries_to, results

    first = run_of("dpo", 1, (0, 0.2), (100, 0.7), (200, 0.9))
    assert queries_to(first, 0.8) == pytest.approx(150)
    assert queries_to(first, 0.2) == 0
    assert queries_to(first, 0.95) is None
    fallen = run_of("dpo", 2, (0, 0.2), (100, 0.8), (200, 0.1))
    assert queries_to(fallen, 0.8) == pytest.approx(100)
    never = run_of("grpo", 1, (0, 0.2), (100, 0.3), outcome="NonFiniteError: a loss")
    recorded = run_of("sft_right", 1, (0, 0.2), (0, 0.9))
    lines = list(results({"grpo": [never], "dpo": [first, fallen], "sft_right": [recorded]}))
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `dpo`",
        "| `grpo` (1 of 1 runs failed: NonFiniteError: a loss)",
        "| the start",
        "| `sft_right`",
    ]
    assert lines[2] == (
        "| `dpo` | learning_rate 1e-4 | 125 (100 to 150) | 200 | 0.500 (0.100 to 0.900) | "
        "0.250 (0.050 to 0.450) | 2 | 4 |"
    )
    assert lines[3].split(" | ")[2] == "never"
    assert lines[4] == "| the start |  |  | 0 | 0.200 (0.200 to 0.200) | 0.100 (0.100 to 0.100) |  |  |"
    assert lines[5].split(" | ")[2:4] == ["", "0"]


def test_values_that_come_to_the_same_are_named() -> None:
    """Of six runs of `dpo`, those of two learning rates end alike; of `sft`, all do, so it tried three
    settings. Runs that differ in the greedy accuracy alone are not alike, and two that failed neither."""
    from comparison.page import alike
    from comparison.plan import FULL, search_jobs

    def searched(name: str, *ends: tuple[float, float], outcome: str = "done") -> dict[Any, Any]:
        runs = {}
        for job, (sampled, greedy) in zip(search_jobs(FULL)[name], ends, strict=True):
            run = run_of(name, 0, (0, 0.25), (2560, sampled), outcome=outcome)
            last = dataclasses.replace(run.last, greedy=greedy)
            runs[job.key] = dataclasses.replace(run, evaluations=(run.evaluations[0], last))
        return runs

    records = {
        **searched("dpo", (0.5, 0.6), (0.5, 0.6), (0.7, 0.8), (0.7, 0.9), (0.1, 0.2), (0.1, 0.2)),
        **searched("sft", *[(0.5, 0.6), (0.5, 0.6), (0.7, 0.8), (0.7, 0.8), (0.1, 0.2), (0.1, 0.2)]),
        **searched("grpo", *[(0.5, 0.6)] * 6, outcome="NonFiniteError: a loss"),
    }
    assert alike(FULL, records) == (
        "At some learning rates the runs with both values of the setting were the same, in the steps, "
        "queries and accuracies of every evaluation: `dpo` at 2 of 3; `sft` at 3 of 3. So the search of "
        "`sft` had three settings and not six."
    )
    assert alike(FULL, searched("dpo", *[(0.1 * n, 0.2) for n in range(6)])) == ""


def test_the_band_is_over_the_seeds() -> None:
    from comparison.picture import band

    runs = [run_of("dpo", 1, (0, 0.2), (100, 0.4), (200, 0.8)), run_of("dpo", 2, (0, 0.4), (150, 0.7))]
    x, low, mean, high = band(runs, lambda each: each.queries)
    assert x.tolist() == [0, 100, 150]
    np.testing.assert_allclose(low, [0.2, 0.4, 0.6])
    np.testing.assert_allclose(high, [0.4, 0.6, 0.7])
    np.testing.assert_allclose(mean, [0.3, 0.5, 0.65])


def test_the_csv_survives_reading_and_says_which_line_is_wrong(tmp_path: Path) -> None:
    from comparison.records import read_records, write_records

    file = tmp_path / "full.csv"
    runs = [run_of("grpo", 1, (0, 0.25), (8, 0.5)), run_of("dpo", 1, (0, 0.25), outcome='Error: a, "b"')]
    write_records(file, runs)
    assert read_records(file) == {run.key: run for run in reversed(runs)}
    assert read_records(tmp_path / "none.csv") == {}
    file.write_text(file.read_text().replace(",8,", ",eight,"))
    with pytest.raises(DataError, match=r"full.csv:4: not a row"):
        read_records(file)


def test_two_comparisons_at_a_time_are_refused(tmp_path: Path, starts: Path, small: Any) -> None:
    from compare import _alone, compare

    places = places_in(tmp_path, starts)
    with _alone(places.work), pytest.raises(ConfigError, match="another comparison is running"):
        compare(small, places, in_this_process([]))


def test_the_page_agrees_with_the_csv() -> None:
    """The page has the tables that the committed CSV gives, and states the plan of the program."""
    from comparison import plan
    from comparison.algorithms import LEFT_OUT
    from comparison.page import REACH, shown_runs, tables

    text = PAGE.read_text(encoding="utf-8")
    for name, made in tables(CSVS).items():
        assert f"<!-- {name} -->\n{made}\n<!-- end of {name} -->" in text, (
            "python benchmarks/compare.py --tables"
        )
    plain = " ".join(text.split())
    rates = ", ".join(map(plan.shown_rate, plan.LEARNING_RATES))
    assert f"three learning rates ({rates})" in plain
    assert f"budget of {plan.FULL.queries:,} queries" in plain
    assert f"{plan.STEP} responses" in plain
    assert f"accuracy {REACH}" in plain
    assert f"after {plan.MOST_STEPS * plan.FULL.queries // plan.STEP} steps" in plain
    assert all(
        f"`{name}`, {reason}" in plain or f"`{name}`, since {reason}" in plain
        for name, reason in LEFT_OUT.items()
    )
    assert (PAGE.parent / "images" / "comparison.png").exists() == (shown_runs(CSVS) is not None)


def test_the_short_comparison_is_the_one_of_eight_names() -> None:
    from comparison.algorithms import RECORDED
    from comparison.plan import FULL, SHORT

    assert set(SHORT.contestants) - set(RECORDED) == {
        "dpo",
        "simpo",
        "kto",
        "grpo",
        "rloo",
        "reinforce_pp",
        "ppo",
        "gspo",
    }
    assert (len(SHORT.seeds), 2 * SHORT.queries, len(FULL.seeds)) == (2, FULL.queries, 3)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import compare
from comparison import algorithms, plan
plan.LEARNING_RATES = (1e-3,)
algorithms.RECORDED.clear()
folder = Path({folder!r})
places = compare.Places(folder, folder / "work", folder / "page.md", folder)
if __name__ == "__main__":
    size = plan.Size("short", (1,), queries=1024, every=256, only=("dpo", "grpo"))
    compare.compare(size, places)
"""


@pytest.mark.slow(instead="the other tests of the file", seconds=60.0)
def test_the_program_in_processes_is_killed_and_goes_on(tmp_path: Path, starts: Path) -> None:
    """After SIGKILL the runs end too, and the next call makes only the runs that were not finished."""
    from comparison.records import read_records

    places = places_in(tmp_path, starts)
    command = [sys.executable, "-c", SCRIPT.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    records = places.work / "records_short"
    deadline = time.monotonic() + 120
    while not any(records.glob("*.json")):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runs = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    assert len(runs) == 2
    child.send_signal(signal.SIGKILL)
    child.wait()
    while any(map(is_running, runs)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first = len(list(records.glob("*.json")))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = read_records(tmp_path / "short.csv")
    assert len(made) == 6
    assert all(run.is_done for run in made.values())
    assert f"search, {4 - first} runs to make" in done.stdout
