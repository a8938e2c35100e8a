"""`compute.profile`: the errors on a machine without a GPU, and the device of every tensor on a simulated
GPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import LORA, learner_in
from fixtures import World, made, oat
from objectives import row
from pretended import DEVICE, MixedDevicesError, pretended_gpu
from tiny_models import build_config, save_model

from oat.assemble.run import build
from oat.config.load import load_config
from oat.learner.models import Critic
from oat.metrics import repeatable
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve

GPU = {"compute.profile": "gpu"}
HALF = {"engine.dtype": "bfloat16", "learner.autocast": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": {**HALF, "learner.logits_chunk": 3},
    "adapter": {**HALF, **LORA, "learner.sync_every": 2},
    "truncated": {"sampling.top_k": 5, "sampling.temperature": 0.8, "sampling.stop": ["ab"]},
    "measured": {
        "learner.micro_batch_size": None,
        "learner.micro_batch_tokens": "auto",
        "compute.memory_gb": 1,
        "compute.serialise": True,
    },
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_profile_without_its_device_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("train", world.config("dpo", tmp_path, GPU)) == 2
    assert (
        "compute.profile is 'gpu', and torch finds no CUDA device: use a machine with one"
        in capsys.readouterr().err
    )
    assert oat("train", world.config("dpo", tmp_path, {"stop.max_steps": 1})) == 0
    assert "CUDA" not in capsys.readouterr().out


def test_an_idle_device_is_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has ended, so nothing is computed while torch takes itself to have a device: a build for CUDA
    would look for its driver then."""
    config = world.config("dpo", tmp_path, {"stop.max_steps": 1})
    assert oat("train", config) == 0
    capsys.readouterr()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert oat("train", config) == 0
    assert (
        "oat train: this machine has a CUDA device, and nothing will run on it; a new run with "
        "compute.profile: gpu uses it\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**GPU, "engine.deterministic": True},
            "engine.deterministic is True: on a GPU the same tokens under any batching are not promised",
        ),
        ({"compute.profile": "cuda"}, "compute.profile"),
    ],
)
def test_settings_that_make_no_sense(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert oat("train", world.config("dpo", tmp_path, changes)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.sample("dpo-measured", seconds=19.0)
@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        *(("dpo", case) for case in CASES),
        *(pytest.param("grpo", case, marks=[] if case == "measured" else pytest.mark.slow) for case in CASES),
    ],
)
def test_a_run_on_a_pretended_device(
    world: World,
    tmp_path: Path,
    algorithm: str,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run on the simulated GPU is trained, continued from its checkpoint and evaluated. In float32 it
    equals the run on the CPU. It measures no thread count. Autocast is off, since it needs a real GPU."""
    monkeypatch.setattr("oat.assemble.learner_side.choose_threads", lambda *_: pytest.fail("measured"))
    changes = {**CASES[case], **({"algorithm.kl_coef": 0.1} if algorithm == "grpo" else {})}
    (tmp_path / "gpu").mkdir()
    config = world.config(algorithm, tmp_path / "gpu", {**GPU, **changes, "compute.threads": None})
    with pretended_gpu() as operations:
        assert [oat("train", config, "--stop.max_steps", steps) for steps in (2, 4)] == [0, 0]
        assert oat("eval", tmp_path / "gpu" / algorithm) == 0
        assert operations.on_device > 1000
    assert oat("export", tmp_path / "gpu" / algorithm, tmp_path / "exported") == 0
    capsys.readouterr()
    assert oat("train", config, "--compute.profile", "cpu") == 2
    assert 'compute.profile: "gpu" -> "cpu"' in capsys.readouterr().err
    assert load_config(tmp_path / "gpu" / algorithm / "config.yaml")[0].engine.options["threads"] is None
    if "engine.dtype" not in changes:
        assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
        found, expected = (
            [json.loads(line) for line in (at / algorithm / "metrics.jsonl").open()]
            for at in (tmp_path / "gpu", tmp_path)
        )
        for one, other in zip(found, expected, strict=True):
            assert repeatable(one) == pytest.approx(repeatable(other), rel=1e-4, abs=1e-6)


@pytest.mark.slow(instead="test_a_run_on_a_pretended_device", seconds=2.0)
def test_a_reference_stays_on_the_cpu(world: World, tmp_path: Path) -> None:
    """With `model.reference_device: cpu` the reference has weights only on the CPU, also when it follows a
    policy on the device. In float32 the run equals the run with both on the device."""
    changes = {"model.reference_update": {"mix": 0.5}, "evaluation": None}
    (tmp_path / "gpu").mkdir()
    config = world.config("dpo", tmp_path / "gpu", {**GPU, **changes, "model.reference_device": "cpu"})
    with pretended_gpu():
        run = build(resolve(*load_config(config)), directory=made(tmp_path / "built"))
        models: Any = learner_in(run).models
        places = {
            name: {parameter.device for parameter in model.module.parameters()}
            for name, model in models.items()
        }
        run.ledger.close()
        assert places == {"policy": {DEVICE}, "reference": {torch.device("cpu")}}
        assert [oat("train", config, "--stop.max_steps", steps) for steps in (2, 4)] == [0, 0]
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    found, expected = (
        [json.loads(line) for line in (at / "dpo" / "metrics.jsonl").open()]
        for at in (tmp_path / "gpu", tmp_path)
    )
    for one, other in zip(found, expected, strict=True):
        assert repeatable(one) == pytest.approx(repeatable(other), rel=1e-4, abs=1e-6)


def test_a_critic_on_a_pretended_device(tmp_path: Path) -> None:
    path, rows = (
        save_model(tmp_path, build_config("llama")),
        [row(np.random.default_rng(5), 4, 3), row(np.random.default_rng(6), 2, 7)],
    )
    with pretended_gpu():
        critic = Critic(load_lm(path, device=DEVICE), np.random.default_rng(0))
        values = critic.outputs(rows, {}, {"value"})["value"]
        assert {parameter.device for parameter in critic.parameters()} == {DEVICE}
        assert values.device == DEVICE
        values.sum().backward()
        found = values.tolist()
    assert found == pytest.approx(
        Critic(load_lm(path), np.random.default_rng(0)).outputs(rows, {}, {"value"})["value"].tolist(),
        abs=1e-5,
    )


def test_a_mixture_is_found() -> None:
    with pretended_gpu():
        here, there = torch.ones(3), torch.arange(3.0, device=DEVICE)
        assert (there.device, (there * 2).is_cuda, there.sum().item()) == (DEVICE, True, 3.0)
        for wrong in (
            lambda: here + there,
            lambda: there[1:] @ here[1:],
            lambda: there.numpy(),
            lambda: torch.cat([there, here]),
        ):
            with pytest.raises(MixedDevicesError):
                wrong()
        assert (there.cpu() + here).tolist() == [1, 2, 3]
        assert (here.to(DEVICE) + there + torch.tensor(1.0)).cpu().tolist() == [2, 3, 4]
