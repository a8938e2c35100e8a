"""The files and commands of the tour and of the page about kills, and the recipes of `configs/`, work as they
are."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from readme import ROOT, TOUR, commands, files
from tiny_models import build_config, save_model

from oat.cli import main

KILLS = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")


def test_the_tour_works_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files().items():
        Path(name).write_text(text, encoding="utf-8")
    assert set(files()) == {"prompts.jsonl", "reward.py", "mine.yaml"}
    save_model(tmp_path / "quickstart" / "start", build_config("llama"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))  # for `oat chat`
    for program, *arguments in (shlex.split(line, comments=True) for line in commands()):
        assert program == "oat"
        assert main(arguments) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(11))
    assert "eval/greedy" in rows[0]
    assert "eval/greedy" in rows[-1]
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    for promised in (
        "environment.json",
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "evaluations",
        "checkpoints",
        "ledger.sqlite",
    ):
        assert Path("runs/mine", promised).exists()
    assert len(Path("answers.jsonl").read_text(encoding="utf-8").splitlines()) == len(
        files()["prompts.jsonl"].splitlines()
    )
    assert Path("exported/model.safetensors").exists()
    monkeypatch.syspath_prepend(str(tmp_path))
    for marker in ("load", "python"):
        block = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", TOUR, flags=re.DOTALL)
        assert block is not None
        exec(block[1], {})
    del sys.modules["reward"]  # which other tests have under the same name
    assert Path("exported_too/model.safetensors").exists()
    assert len(capsys.readouterr().out.strip().splitlines()) > 10


@pytest.mark.slow
def test_a_run_is_killed_as_the_page_shows(tmp_path: Path) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    save_model(tmp_path / "quickstart" / "start", build_config("llama"))
    block = re.search(r"<!-- kill -->\n```sh\n(.*?)```", KILLS, flags=re.DOTALL)
    assert block is not None
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", block[1]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "No such process" not in done.stderr, "it had ended before it was killed"
    # the reward of a tiny model in place of the real one is always 0
    ended = r"^oat train: (finished|the run learned nothing)"
    assert len(re.findall(ended, done.stdout, re.MULTILINE)) == 2, (
        "the unbroken one, and the one that went on"
    )
    hashes = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\w+ +[0-9a-f]{64}", line)]
    assert hashes[: len(hashes) // 2] == hashes[len(hashes) // 2 :] != []
    assert "the ledger is sound" in done.stdout


def test_a_comparing_function_works_as_the_tour_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(files()["prompts.jsonl"])
    Path("judge.py").write_text(
        "def compare(prompts, first, second, **columns):\n    return [0.9 if len(a) > len(b) else 0.2 for "
        "a, b in zip(first, second)]\n"
    )
    config = yaml.safe_load(files()["mine.yaml"]) | {
        "algorithm": {"name": "dpo", "prompts": 3},
        "oracle": {"name": "judge.py:compare", "labels": "bernoulli"},
    }
    config["evaluation"] = None
    config["stop"] = {"max_steps": 2}
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    save_model(tmp_path / "quickstart" / "start", build_config("llama"))
    assert main(["train", "mine.yaml", "--run_dir", "runs/scaled", "--oracle.scale", "3"]) == 2
    assert main(["train", "mine.yaml"]) == 0


def claims(figures: str) -> str:
    """Return the page's table of kills, made from the figures of row R1 of the fault table."""

    def of(words: str) -> tuple[str, str]:
        found = re.search(rf"(?:^|; )(([\d,]+) of ([\d,]+)) {words}(?:;|$)", figures)
        assert found is not None, f"the fault table has no figure of `{words}`; run make faults ROW=R1"
        return found[1], found[3].replace(",", "")

    equal = "killed runs equal the unbroken one bitwise, "
    series = [of(f"{equal}{name}") for name in ("synchronous", "copied sampler", "late answers")]
    synchronous, lagging, late = (found for found, _ in series)
    all_three = (
        f"{synchronous}, {lagging} where the sampler lags (`sync_every: 2`), {late} where answers come late"
    )
    runs = sum(int(count) for _, count in series)
    again = of("questions in flight asked once more, and no other")[0]
    return f"""\
| {runs} runs of 60 steps, each killed once with `kill -9` and continued by the same command | |
| --- | --- |
| killed runs that end bitwise equal to the same run without a kill: \
weights, optimiser, every other state, metrics, ledger | {all_three} |
| answers in the ledger at a kill that were lost | {of("answers lost")[0]} |
| questions asked again: those that were in flight, and no others | {again} |
| questions learned from twice | {of("questions trained twice")[0]} |
"""


def test_what_a_kill_costs_is_what_the_fault_table_says() -> None:
    row = re.search(
        r"^\| R1 \|[^|]*\| ([^|]*) \|",
        (ROOT / "docs" / "faults.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert row is not None
    expected = claims(row[1])
    assert expected in KILLS, f"copy this table into docs/resume.md:\n{expected}"
    assert "| answers in the ledger at a kill that were lost | 3 of " in claims(
        row[1].replace("; 0 of", "; 3 of", 1)
    )


OWN_TESTS = (
    "stories",
    "dpo_remote",
    "dpo_judge",
    "dpo_ray",
    "grpo_ray",
    "grpo_processes",
    "sea_",
    "ee4llm",
    "apl",
    "xpo",
)
"""Recipes that test_stories.py, test_remote_recipe.py, test_judge_runs.py, test_ray_recipes.py and
test_exploration_recipes.py run."""
RECIPES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.stem.startswith(OWN_TESTS)]


@pytest.mark.sample("grpo", seconds=0.8)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "heldout.jsonl"):
        Path(name).write_text(files()["prompts.jsonl"])
    Path("reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(set(text))) for text in "
        "completions]\n"
    )
    model = save_model(tmp_path / "model", build_config("llama"))
    small = {
        "--model.path": model,
        "--render.template": "null",
        "--sampling.max_new_tokens": "6",
        "--algorithm.prompts": "3",
        "--stop.max_steps": "2",
    }
    assert main(["train", str(path), *(word for flag in small.items() for word in flag)]) == 0
    assert (tmp_path / "runs" / path.stem / "checkpoints" / "latest").exists()
