"""One CUDA device: engine, learner and whole runs on it, compared with the CPU. Without a device the tests
are skipped (docs/gpu.md)."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_heads import GROUPED
from engines import KEYS, SAMPLINGS, build_requests, groups_of
from exploring import EXPLORING
from fixtures import World, gradient_of, made, oat
from objectives import OBJECTIVES, VOCABULARY, compared_feedback, row, scored_feedback
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_llama, save_model
from transformers import AutoModelForCausalLM
from weights import turn_bit, weights_of

from oat.answering.learned import policy_weights
from oat.assemble.run import build
from oat.config.load import load_config
from oat.engines.decoding import Pooling
from oat.engines.torch import TorchEngine
from oat.errors import WeightsError
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.models import attention
from oat.models.attention import Packed, Span
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.rollout.features import FromSampling, SecondPass
from oat.seeds import Seeds
from oat.types import Completion, Request, Sampling

pytestmark = pytest.mark.gpu

CUDA, GPU = torch.device("cuda"), {"compute.profile": "gpu", "compute.threads": None}
HALF = {"engine.dtype": "bfloat16", "learner.autocast": "bfloat16"}
LORA = {
    "model.lora": {
        "rank": 8,
        "alpha": 16,
        "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"],
    }
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {
        family: save_model(tmp_path_factory.mktemp(family), build_config(family), scale=3.0)
        for family in FAMILIES
    }


def sampled(lm: CausalLM, requests: list[Request], **options: Any) -> list[Completion]:
    engine = TorchEngine(
        {"sampler": lm}, num_tokens=NUM_TOKENS, stop_ids=[0], decode=lambda ids: "", **options
    )
    return sorted(engine.generate(requests, "sampler"), key=lambda completion: completion.index)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_engine_records_is_what_the_model_says_on_a_cpu(
    paths: Mapping[str, str], family: str, dtype: str, tolerance: float
) -> None:
    """The engine's log-probabilities on the GPU are close to those of the model on a CPU, and most tokens are
    equal. Rows enter and leave, prompts are shared, and every kind of sampling is used."""
    requests = build_requests(*SAMPLINGS.values(), each=6)
    exact, lm = load_lm(paths[family]), load_lm(paths[family], dtype=dtype, device=CUDA)
    assert lm.takes_layouts
    found, expected = sampled(lm, requests, max_rows=8), sampled(exact, requests, max_rows=8)
    for request, completion in zip(requests, found, strict=True):
        ids = torch.from_numpy(np.concatenate([request.ids, completion.ids]).astype(np.int64))
        with torch.no_grad():
            logps = exact.module(input_ids=ids[None]).logits[0].log_softmax(-1)[len(request.ids) - 1 : -1]
        raw = logps.gather(1, ids[len(request.ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.raw_logps, raw, atol=tolerance)
    same = [one.ids.tolist() == other.ids.tolist() for one, other in zip(found, expected, strict=True)]
    assert np.mean(same) > (0.9 if dtype == "float32" else 0.3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_scored_sequences_are_those_of_a_cpu(paths: Mapping[str, str], dtype: str, tolerance: float) -> None:
    sequences = [request.ids for request in build_requests(Sampling(1), each=20, seed=4)]
    on = {
        device: load_lm(paths["qwen3"], dtype=dtype if device == "cuda" else "float32", device=device)
        for device in ("cuda", "cpu")
    }
    engines = {
        device: TorchEngine({"sampler": lm}, num_tokens=NUM_TOKENS, stop_ids=[0], decode=lambda ids: "")
        for device, lm in on.items()
    }
    for one, other in zip(
        *(engines[device].logps(sequences, "sampler") for device in ("cuda", "cpu")), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.06)])
@pytest.mark.parametrize("pooling", [Pooling("all", False), Pooling(-1, True)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_a_cpu(
    paths: Mapping[str, str], family: str, pooling: Pooling, dtype: str, tolerance: float
) -> None:
    """The features that the engine keeps while it samples on the GPU, and those of a second pass there, are
    close to those of a pass on the CPU over the same tokens. The tolerance is relative to a feature's
    length."""
    requests = [
        Request(request.ids, request.sampling, KEYS.key("features", number, sample))
        for number, request in enumerate(build_requests(Sampling(6), each=4))
        for sample in range(5)
    ]
    lm = load_lm(paths[family], dtype=dtype, device=CUDA)
    groups = groups_of(requests, sampled(lm, requests, max_rows=8, pooling=pooling), 5)
    name = "last" if pooling.takes_last else "mean"
    kept_GD = FromSampling(lm, pooling.layer, name).of(groups)
    passed_GD, exact_GD = (
        SecondPass(each, pooling.layer, name, name="policy", weights=0, is_policy=True).of(groups)
        for each in (lm, load_lm(paths[family]))
    )
    for kept, passed, exact in zip(kept_GD, passed_GD, exact_GD, strict=True):
        length = np.linalg.norm(exact, axis=1)
        assert kept.dtype == passed.dtype == np.float32
        assert (np.linalg.norm(kept - exact, axis=1) <= tolerance * length).all()
        assert (np.linalg.norm(passed - exact, axis=1) <= tolerance * length).all()


def test_a_full_cache_changes_no_token(paths: Mapping[str, str]) -> None:
    lm, generator = load_lm(paths["llama"], device=CUDA), np.random.default_rng(0)
    prompts = [generator.integers(0, NUM_TOKENS, length).astype(np.int32) for length in (3, 20, 9, 11)]
    requests = [
        Request(ids, Sampling(20), KEYS.key("full", number, n))
        for number, ids in enumerate(prompts)
        for n in range(3)
    ]
    expected, found = sampled(lm, requests), sampled(lm, requests, cache_gb=2e-5)
    assert [completion.ids.tolist() for completion in found] == [
        completion.ids.tolist() for completion in expected
    ]


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smooth")
    return save_llama(path, vocab_size=VOCABULARY, hidden=32, inner=48, spread=0.1)


def learner_on(
    device: torch.device | str,
    path: Path,
    *,
    autocast: bool = False,
    checkpointing: bool = False,
    chunk: int = 4096,
) -> Learner:
    lms = {name: load_lm(str(path), device=device) for name in ("policy", "reference")}
    models = {
        name: LanguageModel(lm, num_tokens=VOCABULARY, chunk=chunk, autocast=autocast)
        for name, lm in lms.items()
    }
    if checkpointing:
        lms["policy"].checkpoint_gradients()
    options: dict[str, Any] = {
        "micro_batch_size": 8,
        "gradient_checkpointing": checkpointing,
        "seeds": Seeds(0),
    }
    return Learner(models, {"policy": OptimiserSettings(1e-3, max_grad_norm=1.0)}, **options)


def update(learner: Learner, name: str) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradient of one optimiser step."""
    objective: Any = OBJECTIVES[name]()
    feedback = compared_feedback() if objective.requires.feedback == "compare" else scored_feedback()
    batch = objective.prepare(feedback, learner.forward, np.random.default_rng(0))
    report, found = gradient_of(learner, lambda: learner.update(objective, batch))
    return report["loss/total"], torch.cat([part.flatten().cpu() for part in found.values()])


@pytest.mark.parametrize("chunk", [4096, 5])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_a_cpu(smooth: Path, name: str, chunk: int) -> None:
    (loss, found), (expected_loss, expected) = (
        update(learner_on(CUDA, smooth, chunk=chunk), name),
        update(learner_on("cpu", smooth), name),
    )
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_gradients_in_bfloat16_are_near_those_of_a_cpu(smooth: Path, name: str, checkpointing: bool) -> None:
    attention.kernel_agrees.cache_clear()
    _, found = update(learner_on(CUDA, smooth, autocast=True, checkpointing=checkpointing), name)
    _, expected = update(learner_on("cpu", smooth), name)
    assert 0 < (found - expected).norm() <= 3e-2 * expected.norm()


def test_a_state_goes_from_device_to_device(smooth: Path) -> None:
    """A learner's state is moved between the GPU and the CPU, AdamW's moments included. Later updates are the
    same."""
    one = learner_on(CUDA, smooth)
    update(one, "dpo")
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in one.state.items()
    }
    other, third = learner_on(CUDA, smooth), learner_on("cpu", smooth)
    for learner in (other, third):
        learner.load_state(
            {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        )
    for learner in (one, other, third):
        update(learner, "grpo")
    for name, tensor in one.named_tensors("policy"):
        torch.testing.assert_close(weights_of(other)[name], tensor, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights_of(third)[name], tensor.cpu(), atol=1e-4, rtol=0)


def test_values_of_a_critic(smooth: Path) -> None:
    rows = [row(np.random.default_rng(5), 4, 3), row(np.random.default_rng(6), 2, 7)]
    found, expected = (
        Critic(load_lm(str(smooth), device=device), np.random.default_rng(0)).outputs(rows, {}, {"value"})
        for device in (CUDA, "cpu")
    )
    torch.testing.assert_close(found["value"].cpu(), expected["value"], atol=1e-4, rtol=0)


def has_kernel() -> bool:
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 8), (16, 8, 128), (32, 8, 64), (2, 1, 128)])
def test_the_kernel_is_taken_where_there_is_one(
    dtype: torch.dtype, heads: int, key_heads: int, width: int
) -> None:
    assert (
        attention.kernel_agrees(torch.device("cuda", 0), dtype, heads, key_heads, width, width)
        == has_kernel()
    )


@pytest.mark.parametrize(
    "spans", [GROUPED, [Span(0, 300), Span(300, 301, prefix=0), Span(301, 555, prefix=0), Span(555, 1555)]]
)
def test_all_spans_at_once_are_the_spans_in_buckets(spans: list[Span]) -> None:
    if not has_kernel():
        pytest.skip("torch or the device has no variable-length attention")
    generator, length = np.random.default_rng(0), spans[-1].stop
    drawn = [torch.from_numpy(generator.normal(size=(1, count, length, 64))) for count in (8, 2, 2)]
    tensors = [values.to(CUDA, torch.bfloat16).requires_grad_() for values in drawn]
    slopes = torch.from_numpy(generator.normal(size=(1, length, 8, 64))).to(CUDA, torch.bfloat16)
    found = []
    for attend in (Packed(spans).at_once, Packed(spans).in_buckets):
        seen = attend(*tensors, 0.125)  # type: ignore[arg-type]
        found.append([seen, *torch.autograd.grad((seen * slopes).sum(), tensors)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_a_model_in_half_precision_goes_through_the_kernel(
    smooth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, kernel = [], attention.variable_length
    monkeypatch.setattr(
        attention, "variable_length", lambda query, *rest: calls.append(len(query)) or kernel(query, *rest)
    )
    lm, exact = load_lm(str(smooth), dtype="bfloat16", device=CUDA), load_lm(str(smooth))
    del calls[:]
    sequences = [np.arange(20) % VOCABULARY, np.concatenate([np.arange(12), np.arange(3)])]
    with torch.no_grad():
        hidden_TD, places = lm.hidden_of(sequences, [12, 12])
        assert calls == [12 + 8 + 3] * 2 * has_kernel()
        for sequence, place in zip(sequences, places, strict=True):
            alone = exact.hidden(torch.from_numpy(sequence)[None])[0]
            assert (hidden_TD[torch.from_numpy(place)].float().cpu() - alone).norm() <= 3e-2 * alone.norm()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


LEARNING: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm.samples": 2},
    "grpo": {"algorithm.samples": 8, "sampling.refill_rounds": 3},
    "ppo": {
        "algorithm.samples": 8,
        "algorithm.minibatches": 2,
        "learner.critic_learning_rate": 0.01,
        "learner.micro_batch_size": 16,
    },
}


@pytest.mark.parametrize(
    "changes", [{}, HALF, {**HALF, **LORA, "learner.sync_every": 2}], ids=["float32", "bfloat16", "adapter"]
)
@pytest.mark.parametrize("algorithm", LEARNING)
def test_a_whole_run(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on the GPU learns, is continued, evaluated and exported. Its weights can be read without a
    GPU."""
    rate = {"learner.learning_rate": 0.03 if "model.lora" in changes else 0.01, "algorithm.prompts": 8}
    steps = {"stop.max_steps": 10, "evaluation.every": 10, "evaluation.samples": 32}
    options = {**GPU, **rate, **steps, **LEARNING[algorithm], **changes}
    config, run_dir = world.config(algorithm, tmp_path, options), tmp_path / algorithm
    assert oat("train", config) == 0
    rows = rows_of(run_dir)
    assert rows[10]["eval/sampled"] > rows[0]["eval/sampled"] + 0.2
    assert load_config(run_dir / "config.yaml")[0].compute.profile == "gpu"
    assert oat("train", config, "--stop.max_steps", "12") == 0
    assert [row["weights/version"] for row in rows_of(run_dir)[11:]] == (
        [10, 12] if "learner.sync_every" in changes else [11, 12]
    )
    capsys.readouterr()
    assert oat("eval", run_dir) == 0
    assert json.loads(capsys.readouterr().out)["eval/sampled"] == pytest.approx(
        rows_of(run_dir)[-1]["eval/sampled"], abs=0.2
    )
    assert oat("export", run_dir, tmp_path / "exported") == 0
    exported, (step, weights, *_) = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported"),
        policy_weights(run_dir),
    )
    assert step == 12
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    if "model.lora" not in changes:
        assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.named_parameters())
    assert oat("train", config, "--compute.profile", "cpu") == 2
    assert 'compute.profile: "gpu" -> "cpu"' in capsys.readouterr().err


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from fixtures import kill_at, oat
from oat.learner.learner import Learner
kill_at(Learner, "update", 2)
sys.exit(oat("train", {config!r}))
"""


GUESSING = Path(__file__).parent / "protocol" / "guessing.py"


@pytest.mark.parametrize("changes", [{}, HALF], ids=["float32", "bfloat16"])
def test_a_run_of_episodes(world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    """In episodes of two turns, PPO earns more after some steps. The sampler and the learner agree about the
    log-probabilities of both turns."""
    played = {"oracle.name": "environment", "sampling.environment": f"{GUESSING}:Guessing"}
    steps = {"stop.max_steps": 12, "evaluation": None, "learner.learning_rate": 0.01, "algorithm.prompts": 8}
    config = world.config("ppo", tmp_path, {**GPU, **steps, **LEARNING["ppo"], **played, **changes})
    assert oat("train", config) == 0
    rows = [row for row in rows_of(tmp_path / "ppo") if "reward/mean" in row]
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert max(row["logps/recorded_gap_max"] for row in rows) < (0.5 if changes else 1e-3)


@pytest.mark.parametrize("changes", [{}, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", EXPLORING)
def test_an_exploring_run(world: World, tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    """A run with an explorer learns on the GPU, and is continued. The best of 3 by its ensemble, which reads
    features from the GPU, is better than a sample."""
    algorithm, exploring = EXPLORING[case]
    steps = {"stop.max_steps": 14, "evaluation.every": 14, "evaluation.samples": 32, "algorithm.prompts": 8}
    options = {**GPU, "learner.learning_rate": 0.01, **steps, **exploring, **changes}
    config = world.config(algorithm, tmp_path, options)
    assert oat("train", config) == 0
    rows = rows_of(tmp_path / algorithm)
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.2
    if "explorer/model_frac" in rows[-1]:
        assert max(row["explorer/model_frac"] for row in rows if "explorer/model_frac" in row) == 0.5
        assert rows[-1]["eval/best"] > rows[-1]["eval/sampled"] + 0.1
    assert oat("train", config, "--stop.max_steps", "16") == 0
    assert [row["step"] for row in rows_of(tmp_path / algorithm)[-2:]] == [15, 16]


KILLED_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{algorithm: (algorithm, {}) for algorithm in ("dpo", "grpo", "ppo")},
    **{f"exploring {name}": EXPLORING[name] for name in ("policy", "refreshed", "xpo")},
}


@pytest.mark.parametrize("changes", [{}, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", KILLED_RUNS)
def test_a_killed_run_goes_on(world: World, tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    """A killed run on the GPU continues with the recorded samples and answers. Sums on a GPU have no fixed
    order, so its numbers are close to those of the unbroken run, not equal."""
    algorithm, special = KILLED_RUNS[case]
    recording = {"checkpoint.every": 1, "evaluation": None}
    special = {name: value for name, value in special.items() if not name.startswith("evaluation")}
    config = world.config(algorithm, tmp_path, {**GPU, **special, **changes, **recording})
    code = KILLED.format(tests=str(Path(__file__).parent / "support"), config=str(config))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert oat("train", config) == 0
    assert oat("train", config, "--run_dir", tmp_path / "unbroken") == 0
    found, expected = rows_of(tmp_path / algorithm), rows_of(tmp_path / "unbroken")
    assert len(found) == len(expected) == 5
    for name in ("loss/total", "optim/grad_norm"):
        assert found[2][name] == pytest.approx(expected[2][name], rel=0.05, abs=1e-2)


def test_one_turned_bit_on_the_device_is_found(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(
        resolve(*load_config(world.config("dpo", tmp_path, {**GPU, **HALF}))),
        directory=made(tmp_path / "built"),
    )
    load = TorchEngine.load

    def turned(self: TorchEngine, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        load(self, slot, version, tensors)
        turn_bit(self.tensors(slot)["model.norm.weight"], 5, 2)

    run.weights.sync(run.learner, 1)
    monkeypatch.setattr(TorchEngine, "load", turned)
    with pytest.raises(WeightsError, match=r"1 tensors differ .*\(model.norm.weight\)"):
        run.weights.sync(run.learner, 2)
    run.ledger.close()


def test_tokens_that_fit_are_measured(world: World, tmp_path: Path) -> None:
    changes = {
        "learner.micro_batch_size": None,
        "learner.micro_batch_tokens": "auto",
        "compute.memory_gb": 1,
        "stop.max_steps": 1,
    }
    config = world.config("grpo", tmp_path, {**GPU, **changes})
    assert oat("train", config) == 0
    assert load_config(tmp_path / "grpo" / "config.yaml")[0].learner.micro_batch_tokens == 96
