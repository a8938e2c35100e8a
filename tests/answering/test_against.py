"""`oat eval A --against B`, compared with numbers made by hand from the responses of both models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import World, logged, make_model, oat

from oat.errors import ConfigError
from oat.evaluation.statistics import bootstrap_interval
from oat.seeds import Seeds

JUDGES = """
def prefers_first(prompts, first, second, **columns):
    return [0.9 for _ in first]


def longer(prompts, first, second, **columns):
    return [0.5 if len(a) == len(b) else 0.8 if len(a) > len(b) else 0.3 for a, b in zip(first, second)]


def sees(prompts, completions, answer, **columns):
    assert set(answer) == {"ab"}
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs of different learning rates, and a model of another shape with fewer
    tokens."""
    folder = tmp_path_factory.mktemp("against")
    (folder / "judge.py").write_text(JUDGES, encoding="utf-8")
    for name, rate in (("slow", 1e-4), ("fast", 0.03)):
        (folder / name).mkdir()
        config = world.config("grpo", folder / name, {"learner.learning_rate": rate, "stop.max_steps": 2})
        assert logged(folder / name / "log", "train", config) == 0, (folder / name / "log").read_text()
    make_model(folder / "other", hidden=8, seed=3, tokens="0123456789+=a")
    return folder


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert oat("eval", *arguments) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def responses(run: Path, mode: str) -> np.ndarray:
    """Return the (B, G) responses of a run's last evaluation."""
    lines = [
        json.loads(line) for line in (run / "evaluations" / "step_00000002.jsonl").read_text().splitlines()
    ]
    outputs = [line["output"] for line in lines if line["mode"] == mode]
    return np.array(outputs).reshape(4, -1)


def test_a_run_against_itself_is_a_tie(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "fast" / "grpo"
    found = compared(capsys, run, "--against", run)
    for mode in ("sampled", "greedy"):
        names = [f"{mode}_win_rate{end}" for end in ("", "_low", "_high", "_lc")]
        assert [found[name] for name in names] == [0.5] * 4
        assert found[f"{mode}_score"] == found[f"{mode}_other_score"]
    assert (found["a_step"], found["b_step"], found["prompts"]) == (2, 2, 4)


def test_scores_are_compared_sample_by_sample(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The win rate and the scores equal those computed by hand from the last evaluations of both runs. `oat
    eval` draws the same responses, since it uses the same random numbers."""
    slow, fast = runs / "slow" / "grpo", runs / "fast" / "grpo"
    found = compared(capsys, fast, "--against", slow)
    turned = compared(capsys, slow, "--against", fast)
    for mode in ("sampled", "greedy"):
        ours, theirs = (
            [[t.count("a") + 0.1 * t.count("b") for t in row] for row in responses(run, mode)]
            for run in (fast, slow)
        )
        wins = (1 + np.sign(np.array(ours) - np.array(theirs))) / 2
        assert found[f"{mode}_win_rate"] == pytest.approx(wins.mean())
        assert (found[f"{mode}_score"], found[f"{mode}_other_score"]) == (
            pytest.approx(np.mean(ours)),
            pytest.approx(np.mean(theirs)),
        )
        ends = bootstrap_interval(wins, Seeds(0).at("bootstrap", f"{mode}_win_rate"))
        assert (found[f"{mode}_win_rate_low"], found[f"{mode}_win_rate_high"]) == ends
        assert turned[f"{mode}_win_rate"] == pytest.approx(1 - found[f"{mode}_win_rate"])
    assert (responses(fast, "sampled") != responses(slow, "sampled")).any()


def test_a_judge_is_asked_in_both_orders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = runs / "slow" / "grpo", runs / "fast" / "grpo"
    biased = compared(
        capsys, fast, "--against", slow, "--evaluation.oracle", f"{runs / 'judge.py'}:prefers_first"
    )
    assert biased["sampled_win_rate"] == biased["sampled_win_rate_high"] == 0.5
    assert biased["sampled_probability"] == pytest.approx(0.5)
    assert biased["sampled_same_in_both_orders"] == 0.0

    found = compared(capsys, fast, "--against", slow, "--evaluation.oracle", f"{runs / 'judge.py'}:longer")
    differences = np.vectorize(len)(responses(fast, "sampled")) - np.vectorize(len)(
        responses(slow, "sampled")
    )
    assert found["sampled_win_rate"] == pytest.approx(np.mean((1 + np.sign(differences)) / 2))
    assert found["sampled_probability"] == pytest.approx(np.mean(0.5 + 0.25 * np.sign(differences)))
    assert found["sampled_same_in_both_orders"] == 1.0


def test_models_of_other_shapes(runs: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is compared with a model of another shape. Each uses its own tokenizer. The prompts and the
    oracle are those of the run, on either side."""
    run = runs / "fast" / "grpo"
    model = runs / "other"
    sees = f"{runs / 'judge.py'}:sees"
    found = compared(capsys, run, "--against", model, "--evaluation.oracle", sees)
    turned = compared(capsys, model, "--against", run, "--evaluation.oracle", sees)
    assert (found["a_step"], found["b_step"], turned["a_step"]) == (2, 0, 0)
    assert found["sampled_win_rate"] == pytest.approx(1 - turned["sampled_win_rate"])
    assert found["sampled_score"] == found["sampled_characters"] == turned["sampled_other_score"]
    shutil.copytree(world.folder / "model", runs / "start", dirs_exist_ok=True)
    start = compared(capsys, runs / "slow" / "grpo.yaml", "--against", runs / "start")
    assert (start["sampled_win_rate"], start["greedy_win_rate"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("first", "second", "flags", "words"),
    [
        ("other", "other", (), "nothing says which prompts and which oracle"),
        ("fast/grpo", "nowhere", (), "nowhere: model.path is "),
        ("fast/grpo", "slow/grpo", ("--evaluation", "null"), "has no held-out prompts"),
        ("fast/grpo", "slow/grpo", ("--evaluation.smples", "3"), "did you mean `samples`"),
    ],
)
def test_what_cannot_be_compared(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    first: str,
    second: str,
    flags: tuple[str, ...],
    words: str,
) -> None:
    assert oat("eval", runs / first, "--against", runs / second, *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow(instead="test_models_of_other_shapes", seconds=1.3)
def test_the_model_that_an_adapter_was_trained_beside(
    runs: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world.folder / "model", tmp_path / "model")
    changes = {"model": {"path": str(tmp_path / "model"), "lora": {"rank": 2}}, "stop.max_steps": 1}
    assert logged(tmp_path / "log", "train", world.config("grpo", tmp_path, changes)) == 0
    found = compared(capsys, tmp_path / "grpo", "--against", runs / "fast" / "grpo")
    assert 0 <= found["sampled_win_rate"] <= 1
    make_model(tmp_path / "model", seed=5)
    assert oat("eval", tmp_path / "grpo", "--against", runs / "fast" / "grpo") == 2
    assert "what is read of it is not what this run began with:\n  weights: " in capsys.readouterr().err
    # a run of before knows a checksum of all that is frozen
    (tmp_path / "grpo" / "environment.json").unlink()
    assert oat("eval", tmp_path / "grpo", "--against", runs / "fast" / "grpo") == 1
    assert "put its files back as they were" in capsys.readouterr().err


def test_it_is_for_python_too(runs: Path) -> None:
    from oat.answering.compare import compare_models

    with pytest.raises(ConfigError, match=r"oat eval CONFIG --model\.path"):
        compare_models(str(runs / "other"), str(runs / "other"))
