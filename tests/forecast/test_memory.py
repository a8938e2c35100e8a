"""The estimate of `oat check --memory` is compared with the peak of real runs, and the command's output is
checked."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures import ALPHABET, World, make_model, oat
from transformers import LlamaConfig

from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.config.settings import ModelConfig
from oat.forecast.estimate import SURE, Lengths, estimate, lengths_of
from oat.learner.limits import LiveBytes
from oat.models.loading import load_lm
from oat.models.outlines import Outlines
from oat.resolve.resolve import resolve

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
BESIDE_GB = 0.15
"""GB that a process holds beside tensors after its imports: compiled kernels, which differ by processor, and
memory that the allocator keeps."""
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


@pytest.mark.slow(
    instead="test_parts_by_hand; tests/assemble/test_outline.py::test_what_is_not_estimated_is_small",
    seconds=19.9,
)
@pytest.mark.parametrize("algorithm", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="whole"), pytest.param(8, id="adapter", marks=pytest.mark.slow)]
)
def test_the_estimate_is_near_the_measured_peak(lora: int | None, algorithm: str, tmp_path: Path) -> None:
    """The estimate is close to the measured memory of processes that run one step of 4 sequences of 256
    tokens. At this size, memory beside tensors is a noticeable part."""
    from real_shapes import IMPORTS, Shape, compare, measure, write_model

    config = LlamaConfig(
        **SMALL, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True
    )
    shape = Shape(config, tokens=29_000, lora=lora)
    write_model(shape, tmp_path / "model")
    imports = measure(["-c", IMPORTS])
    row = compare(shape, algorithm, tmp_path, 1, imports)
    assert row["estimate_gb"] == pytest.approx(row["measured_gb"], rel=0.15, abs=BESIDE_GB)


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
    """The estimate imitates one update; a run makes several, and every tensor that is alive is counted."""
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


@pytest.mark.slow(
    instead="test_parts_by_hand; tests/assemble/test_outline.py::test_what_is_not_estimated_is_small",
    seconds=6.0,
)
def test_how_tokens_are_drawn_is_in_the_estimate(tmp_path: Path) -> None:
    """Below temperature 1 or with truncation, the engine computes raw log-probabilities apart from the
    sampled ones. The estimate has the additional memory."""
    from real_shapes import Shape, write_config, write_model

    config = LlamaConfig(
        **SMALL, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True
    )
    shape = Shape(config, tokens=config.vocab_size)
    write_model(shape, tmp_path / "model")
    file = write_config(shape, "grpo", tmp_path, 1)
    found = []
    for flags in (
        [],
        ["--sampling.temperature", "0.7"],
        ["--sampling.top_k", "50"],
        ["--sampling.top_p", "0.9"],
    ):
        config, origins = load_config(file, [*flags, "--algorithm.samples", "256"])
        found.append(estimate(resolve(config, origins), Lengths(shape.prompt)).phases)
    plain, warm, few, nucleus = found
    logits = 4 * 30_000
    assert warm["sampling"] >= plain["sampling"] + 256 * logits
    assert nucleus["sampling"] > few["sampling"] + 5 * 256 * logits
    assert few["sampling"] >= warm["sampling"]
    assert warm["forward and backward"] > plain["forward and backward"] + 100 * logits
    assert few["forward and backward"] == warm["forward and backward"]


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


FORKED = """
import os, sys
import torch
from oat.cli import main

assert main(["check", "--memory", sys.argv[1]]) == 0
child = os.fork()
if child == 0:
    torch.ones(1, requires_grad=True).sum().backward()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow(
    instead="the tests that train in a forked child, where torch is a build for CUDA", seconds=4
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has a thread for the CUDA device here")
def test_children_can_compute_gradients_after_an_estimate(world: World, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(world.config("dpo", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


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
