"""The smallest size of each benchmark, our side alone: it runs, counts what it says, and computes what it should."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
LENGTHS = {"mean": 16, "cap": 64}


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    paths = [str(BENCHMARKS), str(BENCHMARKS / "sides")]
    sys.path[:0] = paths
    yield
    for path in paths:
        sys.path.remove(path)


def test_generation() -> None:
    from generation import compare, growth

    row = compare("tiny", "float32", 1, None, None, {"prompt_count": 8, "samples": 4, "cap": 128})
    assert row["tokens_per_second"]["oat"] > 0
    assert 0 < row["padding"] < 0.3
    assert row["shares"]["oat"] > 0
    assert set(growth("tiny", 1, requests=(8, 16), cap=8)["seconds"]) == {"8", "16"}


def test_the_end_of_text_has_the_probability_it_should(tmp_path: Path) -> None:
    from task import END, make_model

    make_model("tiny", tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        probabilities = lm(torch.randint(3, 256, (8, 32))).logits.softmax(-1)[..., END]
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 1 / 32), rtol=0.1, atol=0)


def test_the_update_is_that_of_padded_rows(tmp_path: Path) -> None:
    """The gradient's norm against autograd over padded rows, written out: GRPO's clipped ratio, a mean over each sequence, then over sequences."""
    from peers import Side
    from task import make_model, prompts, ragged

    make_model("tiny", tmp_path)
    with Side(sys.executable, "oat_side.py") as side:
        side.ask("open", model=str(tmp_path), threads=1)
        side.ask("learn", prompt_count=3, samples=4, micro_tokens=256, **LENGTHS)
        found = side.ask("update")
    inputs, responses = prompts(3, 256), ragged(12, 256, **LENGTHS)
    rows = [np.concatenate([inputs[number // 4], ids]) for number, ids in enumerate(responses)]
    width = max(map(len, rows))
    ids_NT = torch.tensor(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    logps_NT = lm(ids_NT).logits[:, :-1].log_softmax(-1).gather(-1, ids_NT[:, 1:, None])[..., 0]
    advantages_N = torch.randn(12, generator=torch.Generator().manual_seed(0))
    terms = []
    for number, row in enumerate(rows):
        ratio = (logps_NT[number, len(inputs[number // 4]) - 1 : len(row) - 1] + 8.0).exp()
        terms.append(-torch.minimum(ratio * advantages_N[number], ratio.clamp(0.8, 1.2) * advantages_N[number]).mean())
    torch.stack(terms).mean().backward()
    norm = torch.stack([parameter.grad.norm() for parameter in lm.parameters() if parameter.grad is not None]).norm()
    assert found["tokens"] == sum(map(len, rows))
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_update_and_step() -> None:
    import step
    import update

    assert update.compare("tiny", 1, None, LENGTHS)["tokens_per_second"]["oat"] > 0
    tokens = update.growth("tiny", 1, tokens=(700, 1400))["tokens"]
    assert tokens["700"] < tokens["1400"]
    row = step.compare("tiny", 1, None, {"prompt_count": 4, "samples": 2, "cap": 16})
    assert row["samples_per_second"]["oat"] > 0
    assert row["peak_gb"]["oat"] > 0


def test_logps() -> None:
    from logps import compare

    row = compare(32, tokens=64, repetitions=1, vocabulary=30_000)
    assert max(row["errors"]["float32"].values()) < 1e-5
    assert max(row["errors"]["float64"].values()) < 1e-10
