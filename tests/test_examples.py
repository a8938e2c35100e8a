"""The examples do what they say."""

import json
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fixtures import oat, write_jsonl

from oat.config import load_config
from oat.plugins import load_symbol

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOP = EXAMPLES / "00_loop.py"


def test_the_loop_without_a_framework_has_the_losses_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings are those that the file itself names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    module = sys.modules[load_symbol(f"{LOOP}:train").__module__]
    settings = re.search(r"\n\n(    model: .*?)\n\n", module.__doc__, flags=re.DOTALL)
    assert settings is not None
    Path("loop.yaml").write_text(dedent(settings[1]))
    config, _ = load_config("loop.yaml")
    options = config.algorithm.options
    assert (config.stop.max_steps, config.learner.learning_rate, config.sampling.max_new_tokens) == (module.STEPS, module.LEARNING_RATE, module.T)
    assert (options["prompts"], options["samples"], options["epochs"]) == (len(module.PROMPTS), module.G, module.EPOCHS)
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
