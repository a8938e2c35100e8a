"""An engine in bfloat16 has its own weights, cast from the learner's: what is stored and verified, and the
results of a run."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import LORA
from engines import KEYS, build_engine, run
from fixtures import World, forked, kill_at, logged, made, oat
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_model
from weights import Source, held, turn_bit, weights_of

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.errors import ModelError, WeightsError
from oat.learner.learner import Learner
from oat.loop import Run, restore
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.models.lora import load_model
from oat.resolve.resolve import resolve
from oat.runtime.transfer import Inbox
from oat.runtime.weights import Weights
from oat.types import Request, Sampling

HALF = {"engine.dtype": "bfloat16"}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def built(world: World, algorithm: str, folder: Path, changes: Mapping[str, Any]) -> tuple[Run, TorchEngine]:
    folder.mkdir(exist_ok=True)
    run = build(
        resolve(*load_config(world.config(algorithm, folder, {**HALF, **changes}))),
        directory=made(folder / "built"),
    )
    inbox: Any = run.weights.holders["sampler"]  # type: ignore[attr-defined]
    return run, getattr(inbox, "_box", inbox).holder


@pytest.mark.sample("True-qwen3", "False-llama", seconds=1.9)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_recorded_is_what_the_cast_model_says(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    """The recorded log-probabilities are close to a plain forward pass of the cast model, which also rounds
    its attention scores. They are also close to the model before the cast."""
    path = save_model(tmp_path, build_config(family), scale=2.0)
    lm, exact = load_lm(path, dtype="bfloat16"), load_lm(path)
    generator = np.random.default_rng(1)
    lengths = [int(length) for length in generator.integers(1, 20, 12)]
    requests = [
        Request(generator.integers(0, NUM_TOKENS, n).astype(np.int32), Sampling(9), KEYS.key("half", n, k))
        for k, n in enumerate(lengths)
    ]
    completions = run(build_engine(lm, deterministic=deterministic), requests)
    assert {completion.raw_logps.dtype for completion in completions} == {np.dtype(np.float32)}
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([request.ids, completion.ids]).astype(np.int64))[None]
        with torch.no_grad():
            for module in (lm.module, exact.module):
                logps = module(input_ids=ids).logits[0].float().log_softmax(-1)[len(request.ids) - 1 : -1]
                expected = logps.gather(1, ids[0, len(request.ids) :, None])[:, 0].numpy()
                np.testing.assert_allclose(completion.raw_logps, expected, atol=0.1)
        gaps.append(np.abs(completion.raw_logps - expected).max())
    assert max(gaps) > 1e-4


def test_what_is_sent_is_cast_and_what_is_held_is_proven(world: World) -> None:
    source, path = Source(load_lm(str(world.folder / "model"))), str(world.folder / "model")
    engine = TorchEngine(
        {"sampler": load_lm(path, dtype="bfloat16")}, num_tokens=16, stop_ids=[1], decode=lambda ids: ""
    )
    source.move()
    Weights({"sampler": Inbox(engine)}, 1, {"sampler": torch.bfloat16}).sync(source, 1)
    for name, tensor in engine._slots["sampler"].tensors().items():
        assert torch.equal(tensor, weights_of(source)[name].bfloat16())
    assert {tensor.dtype for tensor in weights_of(source).values()} == {torch.float32}
    with pytest.raises(WeightsError, match="tensors differ from those sent"):
        Weights({"sampler": Inbox(engine)}, 1).sync(source, 2)


@pytest.mark.parametrize(
    ("name", "place", "bit"),
    [("model.embed_tokens.weight", 0, 0), ("model.norm.weight", 31, 7), ("lm_head.weight", 500, 3)],
)
def test_one_turned_bit_in_the_cast_copy_is_found(world: World, name: str, place: int, bit: int) -> None:
    source = Source(load_lm(str(world.folder / "model")))

    class FaultyMemory(TorchEngine):
        def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            super().load(slot, version, tensors)
            turn_bit(self.tensors(slot)[name], place, bit)

    slots = {"sampler": load_lm(str(world.folder / "model"), dtype="bfloat16")}
    faulty = FaultyMemory(slots, num_tokens=16, stop_ids=[1], decode=lambda ids: "")
    with pytest.raises(WeightsError, match=rf"1 tensors differ .*\({name}\)"):
        Weights({"sampler": Inbox(faulty)}, 1, {"sampler": torch.bfloat16}).sync(source, 1)


@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "adapter"])
def test_slots_are_copies_of_the_learners_weights(
    world: World, tmp_path: Path, changes: dict[str, Any], sync_every: int
) -> None:
    """The engine's slots hold copies of the policy and of its adapter, and share no memory with the learner.
    The learner's weights do not change. If only the learner reads the reference, the engine has no copy of
    it."""
    run, engine = built(world, "dpo", tmp_path, {**changes, "learner.sync_every": sync_every})
    learner: Any = run.learner
    learner = getattr(learner, "_box", learner)
    assert (engine._slots["sampler"] is engine._slots["policy"]) == (sync_every == 1)
    assert engine._slots.keys() == {"sampler", "policy"}
    restore(run)
    run.weights.push("policy", 0, run.learner)
    mine = weights_of(learner)
    theirs = [engine._slots[slot].tensors() for slot in ("sampler", "policy")]
    assert {tensor.dtype for tensor in mine.values()} == {torch.float32}
    assert {tensor.data_ptr() for tensor in mine.values()} & {
        tensor.data_ptr() for tensors in theirs for tensor in tensors.values()
    } == set()
    for tensors in theirs:
        assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in mine.items())
    assert held(engine, "sampler") == held(engine, "policy")
    run.ledger.close()


@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "adapter"])
def test_a_reference_that_is_sampled_from_is_the_start(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    algorithm = "xpo"
    options = {"algorithm": {"name": algorithm, "prompts": 4}, **changes}
    run, engine = built(world, "dpo", tmp_path, options)
    start = load_lm(str(world.folder / "model"), dtype="bfloat16")
    ids = [np.arange(9) % 15, np.arange(4)]
    restore(run)
    learner: Any = run.learner
    with torch.no_grad():
        for tensor in getattr(learner, "_box", learner).models["policy"].trainable().values():
            tensor += 0.25
    run.weights.push("policy", 1, run.learner)
    for found, expected in zip(
        engine.logps(ids, "reference"), build_engine(start, num_tokens=16).logps(ids, "sampler"), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert any(
        (a != b).any()
        for a, b in zip(engine.logps(ids, "reference"), engine.logps(ids, "policy"), strict=True)
    )
    run.ledger.close()


@pytest.fixture(scope="module")
def learnt(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return finished runs of GRPO with an engine in bfloat16, many samples and a reward for one letter. One
    of them sends its values over the wire."""
    found = {}
    for name, serialise in (("plain", False), ("wired", True)):
        folder = tmp_path_factory.mktemp(name)
        changes = {
            "algorithm.samples": 8,
            "stop.max_steps": 12,
            "evaluation.every": 12,
            "evaluation.samples": 16,
            "compute.serialise": serialise,
        }
        config = world.config("grpo", folder, {**HALF, **changes, "learner.learning_rate": 0.01})
        assert logged(folder / "log", "train", config) == 0
        found[name] = folder / "grpo"
    return found


@pytest.mark.slow(
    instead="the learning runs of tests/learning, and the tests of what the engine records", seconds=2.9
)
def test_learning_raises_the_reward(learnt: Mapping[str, Path]) -> None:
    rows = rows_of(learnt["plain"])
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.8
    assert digest_run(learnt["plain"]) == digest_run(learnt["wired"])


@pytest.mark.slow(
    instead="tests/learner/test_precision.py::test_old_log_probabilities_are_the_learners_own", seconds=2.2
)
def test_old_log_probabilities_are_the_learners_own(learnt: Mapping[str, Path]) -> None:
    """Old log-probabilities are computed in float32. The recorded ones are the engine's, and
    `logps/recorded_gap` is their distance."""
    for row in rows_of(learnt["plain"])[1:]:
        assert 0 < row["logps/recorded_gap"] < 0.05
        assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow(
    instead=("tests/faults/test_kill.py, for an engine in float32; the tests of what the engine records"),
    seconds=7.7,
)
@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "adapter"])
def test_a_killed_run_goes_on_bitwise(
    world: World, tmp_path: Path, changes: dict[str, Any], sync_every: int
) -> None:
    settings = {
        **HALF,
        **changes,
        "learner.sync_every": sync_every,
        "checkpoint.every": 1,
        "stop.max_steps": 4,
        "evaluation.every": 1,
    }
    config = world.config("grpo", tmp_path, settings)

    def train(name: str, kill: int | None = None) -> int:
        def action() -> int:
            if kill:
                kill_at(Learner, "update", kill)
            return oat("train", config, "--run_dir", tmp_path / name)

        return forked(action, tmp_path / "log")

    assert [train("unbroken"), train("killed", kill=2), train("killed", kill=2), train("killed")] == [
        0,
        -signal.SIGKILL,
        -signal.SIGKILL,
        0,
    ]
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")


def test_a_finished_run_is_evaluated_as_it_was(
    learnt: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("eval", learnt["plain"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/sampled"] == rows_of(learnt["plain"])[-1]["eval/sampled"]


def test_a_tensor_that_stays_in_float32_is_named(world: World, tmp_path: Path) -> None:
    """A model keeps a tensor in float32, as some models do with a router's bias. An engine in bfloat16 is
    refused with the tensor's name."""

    def with_bias(*given: Any, **options: Any) -> CausalLM:
        lm = load_model(*given, **options)
        lm.module.register_buffer("router_bias", torch.zeros(3))
        return lm

    with pytest.raises(
        ModelError,
        match=(
            r"a `llama` keeps `router_bias` in float32 when it is loaded in bfloat16; leave engine.dtype at "
            r"float32"
        ),
    ):
        build(resolve(*load_config(world.config("dpo", tmp_path, HALF))), load=with_bias)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine.dtype": "float16"}, "engine.dtype"),
        (
            {
                "engine.dtype": "bfloat16",
                "prompts.responses": ["answer", "worse"],
                "oracle.name": "recorded",
                "evaluation": None,
            },
            "engine.dtype is 'bfloat16': nothing is sampled from recorded responses without an evaluation",
        ),
    ],
)
def test_settings_that_make_no_sense(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert oat("train", world.config("dpo", tmp_path, changes)) == 2
    assert words in capsys.readouterr().err


def test_a_run_keeps_its_precision(
    learnt: Mapping[str, Path], world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = learnt["plain"] / "config.yaml"
    assert oat("train", stored, "--engine.dtype", "float32") == 2
    assert 'engine.dtype: "bfloat16" -> "float32"' in capsys.readouterr().err
