"""Golden trajectories: twenty steps over a committed ledger. The tokens are fixed, so only numerics can
change the numbers.

All digits hold on machines that compute as the one of golden.json did (tests/support/last_digits.py). On
other machines, and on other code paths for the same mathematics, the tolerance is 1e-5. A change that is
meant to change numerics computes the numbers again with make.py, and says why.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make
import numpy as np
import pytest
import torch
from last_digits import machine

from oat.engines.torch import TorchEngine
from oat.functional import products
from oat.models.loading import load_lm, load_tokenizer
from oat.seeds import Seeds
from oat.types import Request, Sampling

PADDED = json.loads((make.HERE / "padded.json").read_text(encoding="utf-8"))
"""Numbers of the first engine and learner, which padded their batches: numbers for the same ledgers, and
deterministic tokens. They are never computed again."""
GOLDEN = json.loads((make.HERE / "golden.json").read_text(encoding="utf-8"))


def assert_near(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name in make.NUMBERS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("is_wired", [True, False], ids=["wire", "plain"])
@pytest.mark.parametrize("algorithm", make.ALGORITHMS)
def test_twenty_steps(algorithm: str, is_wired: bool, tmp_path: Path) -> None:
    found = make.replay(algorithm, tmp_path, {"compute": {"serialise": is_wired}})
    assert len(found["loss/total"]) == make.STEPS
    if machine() == GOLDEN["machine"]:
        assert found == GOLDEN[algorithm]
    else:
        assert_near(found, GOLDEN[algorithm])


MEASURED = """
import contextlib, json, sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path[:0] = sys.argv[1].split(":")
from last_digits import machine

found = machine()
assert "oat" not in sys.modules, "a change of the program is no other machine"
import make

with contextlib.redirect_stdout(sys.stderr):
    numbers = make.replay("grpo", Path(sys.argv[2]))
print(json.dumps([found, numbers]))
"""


LIMITS: list[dict[str, str]] = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"MKL_CBWR": "COMPATIBLE"},
]


@pytest.mark.slow(instead="test_twenty_steps", seconds=34.0)
def test_what_changes_the_numbers_is_another_machine(tmp_path: Path) -> None:
    """Libraries are told to use fewer instructions. Either the measure of the machine differs then, or every
    digit of the run is the same."""

    def measured(limit: dict[str, str]) -> tuple[dict[str, str], dict[str, list[float]]]:
        folders = f"{make.HERE}:{make.HERE.parent / 'support'}"
        command = [sys.executable, "-c", MEASURED, folders, str(tmp_path / str(limit))]
        kept = {name: value for name, value in os.environ.items() if name not in chosen}
        done = subprocess.run(command, env={**kept, **limit}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found, numbers = json.loads(done.stdout)
        return found, numbers

    chosen = {name for limit in LIMITS for name in limit}
    of_all, all_digits = measured({})
    for limit in LIMITS:
        of_fewer, fewer_digits = measured(limit)
        assert of_all != of_fewer or all_digits == fewer_digits, limit
        assert_near(fewer_digits, all_digits)


@pytest.mark.parametrize("algorithm", make.ALGORITHMS)
def test_numbers_are_those_of_the_padded_learner(algorithm: str) -> None:
    assert_near(GOLDEN[algorithm], PADDED["numbers"][algorithm])


def test_deterministic_tokens_are_those_of_the_padded_engine() -> None:
    lm, tokenizer = load_lm(str(make.HERE / "model")), load_tokenizer(str(make.HERE / "model"))
    keys, generator = Seeds(5), np.random.default_rng(5)
    settings = [
        Sampling(12),
        Sampling(12, temperature=0.7, top_k=5),
        Sampling(12, top_p=0.8),
        Sampling(12, min_p=0.1),
        Sampling(12, temperature=0.0),
    ]
    drawn = [
        generator.integers(0, len(tokenizer), generator.integers(1, 9)).astype(np.int32) for _ in range(60)
    ]
    requests = [
        Request(drawn[3 * (n // 3)], settings[n // 3 % 5], keys.key("tokens", n // 3, n % 3))
        for n in range(60)
    ]
    engine = TorchEngine(
        {"sampler": lm}, num_tokens=len(tokenizer), stop_ids=[0], decode=tokenizer.decode, deterministic=True
    )
    completions = sorted(engine.generate(requests, "sampler"), key=lambda completion: completion.index)
    assert [completion.ids.tolist() for completion in completions] == PADDED["tokens"]


PATHS: dict[str, dict[str, Any]] = {
    "micro-batches of 3 rows": {"micro_batch_size": 3},
    "one batch": {"micro_batch_size": 64},
    "the head in chunks of 7 tokens": {"logits_chunk": 7},
}


@pytest.mark.sample("grpo-micro-batches*", "dpo-*", seconds=0.9)
@pytest.mark.parametrize("changes", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("algorithm", make.ALGORITHMS)
def test_other_paths(algorithm: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert_near(make.replay(algorithm, tmp_path, {"learner": changes}), GOLDEN[algorithm])


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use oneDNN for all float32 products, of any size, on any processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    calls, product = [], products._onednn
    monkeypatch.setattr(products, "_LEAST", 1)
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn", lambda *tensors: calls.append(1) or product(*tensors))
    yield
    assert len(calls) > 100


@pytest.mark.sample("grpo", seconds=0.8)
@pytest.mark.parametrize("algorithm", make.ALGORITHMS)
def test_products_by_onednn(algorithm: str, by_onednn: None, tmp_path: Path) -> None:
    assert_near(make.replay(algorithm, tmp_path), GOLDEN[algorithm])


def test_deterministic_tokens_by_onednn(by_onednn: None) -> None:
    test_deterministic_tokens_are_those_of_the_padded_engine()


def test_another_learning_rate_is_noticed(tmp_path: Path) -> None:
    """The numbers are sensitive: a learning rate that is higher by a ten-thousandth gives other numbers."""
    with pytest.raises(AssertionError):
        assert_near(make.replay("dpo", tmp_path, {"learner": {"learning_rate": 0.0030003}}), GOLDEN["dpo"])


def test_an_oracle_that_is_asked_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        make.replay("dpo", tmp_path, {"stop": {"max_steps": make.STEPS + 1}})
    assert "a golden run asked a question" in capsys.readouterr().err


def test_what_is_committed_is_small_and_whole() -> None:
    model = sum(file.stat().st_size for file in (make.HERE / "model").iterdir())
    assert model < 60_000
    for algorithm in make.ALGORITHMS:
        names = {file.name for file in (make.HERE / algorithm).iterdir()}
        assert names - {"ledger.trajectories"} == {"config.yaml", "ledger.sqlite"}
        assert (make.HERE / algorithm / "ledger.sqlite").stat().st_size < 300_000
