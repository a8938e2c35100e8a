"""The examples do what they claim."""

import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from fixtures import oat, write_jsonl

from oat.config.load import load_config
from oat.plugins.loading import load_symbol

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOP = EXAMPLES / "00_loop.py"
LEARNED = {
    "01_custom_reward.py": (r"mean reward: (\S+) in the first step, (\S+) in the last", 0.6),
    "02_custom_oracle.py": (
        r"log-probability of a preferred answer: (\S+) in the first step, (\S+) in the last",
        1.5,
    ),
    "04_custom_loss.py": (r"mean reward: (\S+) in the first step, (\S+) in the last", 0.6),
    "05_environment.py": (r"found in two guesses: (\S+)% in the first step, (\S+)% in the last", 40),
    "06_step_rewards.py": (r"mean reward: (\S+) in the first step, (\S+) in the last", 0.8),
    "07_calculator.py": (r"mean reward: (\S+) in the first step, (\S+) in the last", 0.5),
}
"""By example: a pattern of the printed line about the first and the last step, and the smallest rise between
them."""
WITHIN = ("05_environment.py", "06_step_rewards.py", "07_calculator.py")
"""The examples whose rewards are earned within a response or an episode, which must learn with three
seeds."""
Started = Callable[..., str]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Started:
    """Return a function that runs an example as `python FILE FLAGS` does, and returns its output."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def start(name: str, *flags: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *flags])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return start


def test_the_loop_without_a_framework_has_the_losses_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example without a framework has the losses of `oat train` with the settings in the example's
    docstring."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    module = sys.modules[load_symbol(f"{LOOP}:train").__module__]
    settings = re.search(r"\n\n(    model: .*?)\n\n", module.__doc__, flags=re.DOTALL)
    assert settings is not None
    Path("loop.yaml").write_text(dedent(settings[1]))
    config, _ = load_config("loop.yaml")
    options = config.algorithm.options
    assert (config.stop.max_steps, config.learner.learning_rate, config.sampling.max_new_tokens) == (
        module.STEPS,
        module.LEARNING_RATE,
        module.T,
    )
    assert (options["prompts"], options["samples"], options["epochs"]) == (
        len(module.PROMPTS),
        module.G,
        module.EPOCHS,
    )
    model, tokenizer = module.make_model()
    for part in (model, tokenizer):
        part.save_pretrained("model")
    write_jsonl(Path("prompts.jsonl"), [{"prompt": prompt} for prompt in module.PROMPTS])
    assert oat("train", "loop.yaml", "--stop.max_steps", 5, "--compute.threads", 1) == 0
    rows = [json.loads(line) for line in Path("runs/loop/metrics.jsonl").read_text().splitlines()][1:]
    steps = list(module.train(model, tokenizer, steps=5))
    assert len(rows) == len(steps) == 5
    for row, step in zip(rows, steps, strict=True):
        assert abs(row["loss/total"]) > 0.01
        assert row["loss/total"] == pytest.approx(step["loss"], abs=1e-5, rel=0)
        assert row["optim/grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
        assert row["reward/mean"] == pytest.approx(step["reward"], abs=1e-6)
        print(row["loss/total"] - step["loss"], row["optim/grad_norm"] - step["grad_norm"])


def test_the_loop_is_short_and_needs_no_framework() -> None:
    text = LOOP.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert set(re.findall(r"from (oat\S*) import", text)) == {
        "oat.functional.advantages",
        "oat.functional.logprobs",
        "oat.functional.policy",
        "oat.functional.sampling",
        "oat.seeds",
    }


@pytest.mark.slow(instead="test_the_loop_without_a_framework_has_the_losses_of_the_loop", seconds=1.3)
def test_the_loop_shows_what_is_learned(started: Started) -> None:
    first, *_, last = re.findall(
        r"^step +\d+ .* reward (\S+)   a=", started("00_loop.py"), flags=re.MULTILINE
    )
    assert float(first) < 0.2
    assert float(last) > 0.9


EXTENSIONS = sorted(file.name for file in EXAMPLES.glob("*.py") if file != LOOP)


def test_there_is_one_of_each_kind() -> None:
    assert len(EXTENSIONS) == 7
    assert {*EXTENSIONS} - {*LEARNED} == {"03_custom_explorer.py"}


@pytest.mark.sample(
    "01_custom_reward.py",
    "05_environment.py",
    "06_step_rewards.py",
    instead="tests/pages/test_extending.py runs parts of each kind",
    seconds=2.2,
)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_runs_and_names_itself_in_its_configuration(
    name: str, started: Started, tmp_path: Path
) -> None:
    started(name, "--stop.max_steps", "2")
    (metrics,) = tmp_path.glob("*/run/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 3
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    named = re.findall(r'"\{__file__\}:(\w+)"', text)
    assert named
    for symbol in named:
        assert load_symbol(f"{EXAMPLES / name}:{symbol}").__doc__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, seed) for name in LEARNED for seed in range(3 if name in WITHIN else 1)],
)
def test_an_extension_learns(name: str, seed: int, started: Started) -> None:
    said, least = LEARNED[name]
    found = re.search(said, started(name, f"--seed={seed}"))
    assert found is not None
    print(name, "seed", seed, found[0])
    assert float(found[2]) - float(found[1]) >= least


def test_the_explorer_asks_about_two_of_six(started: Started) -> None:
    found = re.search(
        r"(\d+) answers were asked about, of 384 sampled; (\d+)% of the pairs were ties",
        started("03_custom_explorer.py", "--stop.max_steps=2"),
    )
    assert found is not None
    assert int(found[1]) <= 384 / 3
    assert int(found[2]) < 50
