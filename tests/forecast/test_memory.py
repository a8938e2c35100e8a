"""The estimate of `oat check --memory` is compared with the tensors and with the peak of real runs, and the
command's output is checked."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import ALPHABET, World, make_model, oat
from transformers import LlamaConfig

from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.config.settings import ModelConfig
from oat.engines.embedded import TorchMemory
from oat.engines.kind import Load
from oat.engines.torch_config import TorchEngineConfig
from oat.forecast.estimate import SURE, Lengths, estimate, lengths_of
from oat.forecast.memory import memory_rows
from oat.learner.limits import LiveBytes
from oat.models.loading import load_lm
from oat.models.outlines import Outlines
from oat.resolve.resolve import resolve
from oat.types import Sampling

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
BESIDE_GB = 0.15
"""GB by which a process may differ from the stated `PROCESS`: libraries differ by processor and build."""
SMALL = {
    "vocab_size": 30_000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


@pytest.mark.slow(instead="test_parts_by_hand, test_the_estimate_is_near_the_tensors_of_a_run", seconds=20)
@pytest.mark.parametrize("algorithm", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="whole"), pytest.param(8, id="adapter", marks=pytest.mark.slow)]
)
def test_the_estimate_is_near_the_measured_peak(lora: int | None, algorithm: str, tmp_path: Path) -> None:
    """The estimate is close to the anonymous memory of a process that runs one step of 4 sequences of 256
    tokens. Machines differ in how much freed memory a process keeps; `freed` is the most that was measured.
    `benchmarks/memory.py` compares them for real models."""
    from memory import Shape, compare, write_model

    config = LlamaConfig(
        **SMALL, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True
    )
    shape = Shape(config, tokens=29_000, lora=lora)
    write_model(shape, tmp_path / "model")
    row = compare(shape, algorithm, tmp_path, 1)
    told, room = row["told_gb"], 0.15 * row["measured_gb"] + BESIDE_GB
    assert told - row["freed_gb"] - room <= row["measured_gb"] <= told + room


TWELVE = {"algorithm.prompts": 3, "algorithm.samples": 4}
UPDATES = {
    "mini-batches": ("grpo", {**TWELVE, "algorithm.minibatches": 6}),
    "one pass": ("grpo", TWELVE),
    "a KL": ("grpo", {**TWELVE, "algorithm.kl_coef": 0.1}),
    "passes of unequal size": ("grpo", {**TWELVE, "learner.micro_batch_size": 7}),
    "passes of equal size": ("grpo", {**TWELVE, "learner.micro_batch_size": 4}),
    "one step": ("grpo", {**TWELVE, "learner.micro_batch_size": 4, "stop.max_steps": 1}),
    "pairs": ("dpo", {"algorithm.prompts": 4, "learner.micro_batch_size": 4}),
    "a critic": ("ppo", {"algorithm.prompts": 8, "algorithm.minibatches": 4}),
}


@pytest.fixture(scope="module")
def wide(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with so many tokens that a response hardly ends early."""
    folder = tmp_path_factory.mktemp("wide")
    make_model(
        folder,
        hidden=64,
        layers=2,
        tokens=[*ALPHABET, *(f"{'a' * (number % 9)}t{number}" for number in range(4000))],
    )
    return folder


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name,
            marks=[] if name == "mini-batches" else pytest.mark.slow(instead="[mini-batches]", seconds=2),
        )
        for name in UPDATES
    ],
)
def test_the_estimate_is_near_the_tensors_of_a_run(
    world: World, wide: Path, tmp_path: Path, case: str
) -> None:
    """The bytes of all tensors that are alive are counted in a run."""
    algorithm, changes = UPDATES[case]
    fixed = {"model.path": str(wide), "sampling.max_new_tokens": 40, "stop.max_steps": 2, **changes}
    file = world.config(algorithm, tmp_path, {**fixed, "checkpoint.background": False, "evaluation": None})
    resolved = resolve(*load_config(file))
    found = estimate(resolved, lengths_of(gather_inputs(resolved, known=None)))
    with LiveBytes() as live:
        assert oat("train", file) == 0
    loaded = sum(tensor.nbytes for tensor in load_lm(str(wide)).module.parameters())
    assert live.peak + loaded == pytest.approx(found.peak, rel=1 - SURE)


def test_an_outline_has_the_shapes_of_the_model(world: World) -> None:
    path = str(world.folder / "model")
    outline = Outlines().on_meta(ModelConfig(path))
    shapes = {name: tensor.shape for name, tensor in load_lm(path).tensors().items()}
    assert {name: tensor.shape for name, tensor in outline.tensors().items()} == shapes
    assert load_lm(path).module.get_output_embeddings().weight.sum().isfinite()


def test_parts_by_hand(world: World, tmp_path: Path) -> None:
    config, origins = load_config(world.config("dpo", tmp_path))
    found = estimate(resolve(config, origins), Lengths(8))
    weights = sum(tensor.nbytes for tensor in load_lm(str(world.folder / "model")).module.parameters())
    assert found.parts["weights that learn"] == weights
    assert weights <= found.parts["other weights"] < 1.2 * weights
    assert 2 * weights <= found.parts["moments of AdamW"] < 2.1 * weights
    assert found.peak == max(found.phases.values()) >= 5 * weights
    assert torch.ones(1).sum().item() == 1


FORWARD, SAMPLING = "forward and backward", "sampling"
MORE: dict[str, tuple[str, Any, Any]] = {
    "algorithm.samples": (FORWARD, 2, 6),
    "sampling.max_new_tokens": (FORWARD, 8, 41),
    "sampling.temperature": (FORWARD, 1.0, 0.7),
    "learner.micro_batch_size": (FORWARD, 2, 8),
    "learner.micro_batch_tokens": (FORWARD, 20, 200),
    "learner.logits_chunk": (FORWARD, 4, 64),
    "learner.gradient_checkpointing": (FORWARD, True, False),
    "learner.sync_every": (FORWARD, 1, 2),
    "model.lora": ("optimiser", {"rank": 2}, None),
    "algorithm.kl_coef": ("optimiser", 0.0, 0.1),
    "engine.dtype": ("optimiser", "float32", "bfloat16"),
    "engine.max_rows": (SAMPLING, 2, 64),
    "engine.deterministic": (SAMPLING, False, True),
    "checkpoint.background": ("beside a checkpoint", False, True),
}


@pytest.mark.parametrize("setting", MORE)
def test_more_of_a_setting_takes_more_memory(world: World, wide: Path, tmp_path: Path, setting: str) -> None:
    part, *values = MORE[setting]
    fixed = {"model.path": str(wide), "evaluation": None, "checkpoint.every": 1, "algorithm.prompts": 12}
    fixed |= {"sampling.max_new_tokens": 40, "learner.micro_batch_size": 36}
    less, more = (
        estimate(resolve(*load_config(world.config("grpo", tmp_path, {**fixed, setting: value}))), Lengths(8))
        for value in values
    )
    assert less.phases.get(part, 0) < more.phases[part]


def test_a_run_that_does_not_fit_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names a setting with which the run fits, and it does."""
    changes = {"evaluation": None, "sampling.max_new_tokens": 40, "checkpoint.background": False}
    config = world.config("grpo", tmp_path, {**changes, "algorithm.prompts": 8, "algorithm.samples": 8})
    resolved = resolve(*load_config(config))
    peak = estimate(resolved, lengths_of(gather_inputs(resolved, known=None))).peak / 1e9
    small = ["--compute.memory_gb", f"{0.9 * SURE * peak:.6f}"]
    assert oat("check", config, *small) == 2
    said = capsys.readouterr().err
    assert "learner.micro_batch_tokens: " in said
    row = said.split("learner.micro_batch_tokens: ")[1].split(" ")[0]
    assert oat("check", config, *small, "--learner.micro_batch_tokens", row) == 0


def test_how_tokens_are_drawn_is_in_the_memory_of_the_engine() -> None:
    memory, load = TorchMemory(TorchEngineConfig()), Load(prompts=1, samples=64, prompt=4, response=4)
    samplings = [{}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9}]
    found = [memory.work_bytes(100, 10_000, load, Sampling(4, **changes)) for changes in samplings]
    assert sorted({*found}) == found
    assert memory.work_bytes(10**6, 1, replace(load, prompts=4, prompt=400), Sampling(4)) == 1600 * 10**6
    assert memory.work_bytes(1, 1, replace(load, prompts=900, samples=1, prompt=400), Sampling(4)) <= 16_384


def test_a_row_names_its_setting(world: World, tmp_path: Path) -> None:
    resolved = resolve(*load_config(world.config("grpo", tmp_path)))
    run_inputs = gather_inputs(resolved, known=None)
    rows = memory_rows(resolved, lengths_of(run_inputs), run_inputs.outline)
    found = {row.name: row for row in rows}
    assert all(row.setting for row in rows)
    assert found["anonymous peak"].number > found["peak"].number / 2 > 0
    assert "engine.max_rows" in found["at sampling"].setting


def test_an_evaluation_is_in_the_estimate(world: World, tmp_path: Path) -> None:
    """The estimate includes an evaluation of many held-out prompts, which fill the engine even if a training
    step samples few. Their cache comes on top of weights and moments."""
    config, origins = load_config(world.config("grpo", tmp_path))
    config = resolve(config, origins)
    few, many = (estimate(config, Lengths(8, count, 24)) for count in (1, 400))
    assert "evaluation" not in estimate(config, Lengths(8)).phases
    assert many.phases["evaluation"] > 10 * few.phases["evaluation"] - 9 * sum(
        few.parts[name] for name in few.parts if name != "keys and values"
    )
    assert many.parts["keys and values"] > few.parts["keys and values"]
    assert many.phases["sampling"] == few.phases["sampling"]


def test_oat_check(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("grpo", tmp_path)
    assert oat("check", config) == 0
    out = capsys.readouterr().out
    assert "is sound" in out
    assert "parameters" in out
    assert oat("check", config, "--memory") == 0
    assert "peak" in capsys.readouterr().out
    assert not (tmp_path / "grpo").exists()
    assert oat("check", config, "--learner.learning_rat", 1) == 2
    assert "did you mean `learning_rate`" in capsys.readouterr().err
