"""LoRA: the adapter in its model, in the learner, in the engine, in checkpoints, and merged."""

import json
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import LORA, bend, built, engine_in, learner_in, logits
from fixtures import World, forked, kill_at, logged, made, oat
from objectives import row
from tiny_models import CONTEXT, FAMILIES, VOCAB_ROWS, build_config, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights import turn_bit, weights_of

from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.config.settings import LoraConfig, ModelConfig
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError, ModelError, WeightsError
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.loop import restore
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm, load_tokenizer, save_lm
from oat.models.lora import add_adapter, load_model, merged
from oat.resolve.resolve import resolve
from oat.rundir.checkpoints import Checkpoints
from oat.runtime.transfer import Inbox
from oat.runtime.weights import Weights
from oat.seeds import Seeds

PROJECTIONS = {"gpt_neox": "query_key_value", "llama": "q_proj", "qwen3": "q_proj"}
TARGETS = [(family, "all-linear") for family in FAMILIES] + [
    (family, (name,)) for family, name in PROJECTIONS.items()
]
TARGETS += [("llama", ("q_proj", "lm_head")), ("llama", ("lm_head",))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {family: save_model(tmp_path_factory.mktemp(family), build_config(family)) for family in FAMILIES}


@pytest.mark.sample("*-all-linear", "llama-targets7", seconds=0.4)
@pytest.mark.parametrize(("family", "targets"), TARGETS)
def test_the_model_is_seen_through_its_adapter(
    paths: Mapping[str, str], family: str, targets: Any, tmp_path: Path
) -> None:
    """A new adapter does not change the logits. With other adapter weights the model gives PEFT's logits, and
    the base stays bitwise the same. Transformers reads the merged model with the same log-probabilities."""
    ids = torch.randint(0, VOCAB_ROWS, (3, 9), generator=torch.Generator().manual_seed(0))
    plain = load_lm(paths[family])
    lm = add_adapter(load_lm(paths[family]), rank=4, alpha=8, targets=targets, seed=3)
    base = lm.base()
    assert torch.equal(logits(lm, ids), logits(plain, ids))
    bend(lm)
    flags = {name: parameter.requires_grad for name, parameter in lm.module.named_parameters()}
    assert torch.equal(logits(base, ids), logits(plain, ids))
    assert {name: parameter.requires_grad for name, parameter in lm.module.named_parameters()} == flags
    found = logits(lm, ids)
    assert (found - logits(plain, ids)).abs().max() > 1e-2
    with torch.no_grad():
        torch.testing.assert_close(found, lm.adapter(input_ids=ids).logits, atol=1e-5, rtol=0)
    assert (lm.vocab_rows, lm.context_length, lm.model_type) == (VOCAB_ROWS, CONTEXT, family)

    save_lm(merged(lm), load_tokenizer(paths[family]), str(tmp_path))
    assert not list(tmp_path.glob("adapter*"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert set(theirs.state_dict()) == set(AutoModelForCausalLM.from_pretrained(paths[family]).state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(input_ids=ids).logits.log_softmax(-1), found.log_softmax(-1), atol=1e-5, rtol=0
        )


def test_the_seed_decides_the_start_and_nothing_else(paths: Mapping[str, str]) -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in load_model(ModelConfig(paths["llama"], lora=LoraConfig()), seed)
            .trainable()
            .items()
        }

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = start(1)
    again = start(1)
    other = start(2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == ("lora_B" in name) for name in one)


@pytest.mark.parametrize(
    ("family", "targets", "error", "words"),
    [
        (
            "llama",
            ("q_prj",),
            ConfigError,
            r"a llama has no layer 'q_prj'; its linear layers: down_proj, .*q_proj",
        ),
        ("llama", ("q_proj", "other"), ConfigError, "no layer 'other'"),
        ("llama", ("norm",), ConfigError, "name linear layers of a llama"),
        ("qwen3", ("lm_head",), ModelError, "'lm_head' is tied to the model's other embedding"),
        ("qwen3", ("q_proj", "embed_tokens"), ModelError, "'embed_tokens' is tied"),
    ],
)
def test_targets_that_cannot_be_adapted(
    paths: Mapping[str, str], family: str, targets: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        add_adapter(load_lm(paths[family]), rank=4, alpha=8, targets=targets, seed=3)


def test_without_peft_the_message_says_what_to_install(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert oat("train", world.config("dpo", tmp_path, LORA)) == 2
    assert "pip install 'oat-align[lora]'" in capsys.readouterr().err


def test_a_critic_trains_its_head_and_its_adapter_only(paths: Mapping[str, str]) -> None:
    """A critic with an adapter learns the adapter and the head. The head is new and in no adapter, so all its
    weights are learned (M3)."""
    critic = Critic(
        load_model(ModelConfig(paths["llama"], lora=LoraConfig(rank=2))), np.random.default_rng(0)
    )
    learner = Learner(
        {"critic": critic},
        {"critic": OptimiserSettings(1e-2, max_grad_norm=1.0)},
        micro_batch_size=8,
        seeds=Seeds(0),
    )
    before = {name: parameter.detach().clone() for name, parameter in critic.named_parameters()}
    assert {name for name, parameter in critic.named_parameters() if parameter.requires_grad} == set(
        critic.trainable()
    )
    assert "score.weight" in critic.trainable()
    rows = [row(np.random.default_rng(seed), 4, 3) for seed in range(3)]
    for _ in range(2):
        (critic.outputs(rows, {}, {"value"})["value"] - 1).square().mean().backward()
        learner.trained["critic"].optimiser.step()
    moved = {
        name for name, parameter in critic.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert moved == {"score.weight"} | {name for name in before if "lora_" in name}
    stored = {
        name.removeprefix("critic/weights/") for name in learner.state if name.startswith("critic/weights/")
    }
    assert stored == moved


def test_there_is_one_base_in_memory(world: World, tmp_path: Path) -> None:
    """The reference is the policy's module, and the sampler's copy shares the frozen weights. Only adapters
    have gradients and moments."""
    run = built(world, tmp_path, {"learner.sync_every": 2})
    learner, slots = learner_in(run), engine_in(run)._slots
    assert slots["reference"].module is slots["policy"].module is learner.models["policy"].module
    assert slots["sampler"].module is not slots["policy"].module
    held, sent = slots["sampler"].tensors(), weights_of(learner)
    assert {name for name in sent if held[name].data_ptr() == sent[name].data_ptr()} == {
        name for name in sent if "lora_" not in name
    }
    optimised = {id(p) for group in learner.trained["policy"].optimiser.param_groups for p in group["params"]}
    assert optimised == {
        id(p) for name, p in learner.models["policy"].module.named_parameters() if "lora_" in name
    }
    run.ledger.close()


def test_a_reference_of_its_own_is_loaded(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder / "model", tmp_path / "reference")
    run = built(world, tmp_path, {"model.reference": str(tmp_path / "reference")})
    slots = engine_in(run)._slots
    assert slots["reference"].module is not slots["policy"].module
    assert slots["reference"].adapter is None
    run.ledger.close()


@pytest.mark.sample("1-adapter", "2-*", seconds=0.2)
@pytest.mark.inventory(94, 95)
@pytest.mark.parametrize(
    "lora",
    [LORA, {"model.lora": None}, {"model.lora": {"targets": ["q_proj", "lm_head"]}}],
    ids=["adapter", "whole", "head"],
)
@pytest.mark.parametrize("sync_every", [1, 2])
def test_after_a_push_the_engine_answers_as_the_learner(
    world: World, tmp_path: Path, sync_every: int, lora: Mapping[str, Any]
) -> None:
    """After a push of weights, the engine gives the learner's log-probabilities, and those of the merged
    model. The reference does not change."""
    run = built(world, tmp_path, {**lora, "learner.sync_every": sync_every})
    learner, engine = learner_in(run), engine_in(run)
    restore(run)
    sequences = [np.array([2, 3, 4, 12, 13, 1], dtype=np.int32), np.array([5, 11, 13], dtype=np.int32)]
    ids = torch.from_numpy(sequences[0].astype(np.int64))[None]

    def of_slot(slot: str) -> np.ndarray:
        return engine.logps(sequences, slot)[0]

    def of_model(lm: CausalLM) -> np.ndarray:
        return logits(lm, ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()

    start = of_slot("sampler")
    policy: Any = learner.models["policy"]
    bend(policy.lm)
    run.weights.sync(run.learner, 1)
    run.weights.push("policy", 1, run.learner)
    assert (engine.version("sampler"), engine.version("policy"), engine.version("reference")) == (1, 1, 0)
    for slot in ("sampler", "policy"):
        np.testing.assert_allclose(of_slot(slot), of_model(policy.lm), atol=1e-5)
    assert np.abs(of_slot("sampler") - start).max() > 1e-2
    assert np.array_equal(of_slot("reference"), start)
    np.testing.assert_allclose(of_slot("sampler"), of_model(merged(policy.lm)), atol=1e-5)
    run.ledger.close()


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "base_layer"])
def test_one_turned_bit_in_the_samplers_copy_is_found(world: World, tmp_path: Path, part: str) -> None:
    """A flipped bit in the sampler's copy is found. The bit is in the adapter, or in frozen weights of which
    the copy has its own, as over a wire."""
    model = ModelConfig(str(world.folder / "model"), lora=LoraConfig(rank=2))
    policy, copy = load_model(model), load_model(model)
    learner = Learner(
        {"policy": LanguageModel(policy, num_tokens=16, chunk=64)},
        {"policy": OptimiserSettings(1e-3, max_grad_norm=1.0)},
        micro_batch_size=8,
        seeds=Seeds(0),
    )
    name = next(name for name in copy.tensors() if part in name)

    class FaultyMemory(TorchEngine):
        def load(self, slot: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
            super().load(slot, version, tensors)
            turn_bit(self.tensors(slot)[name], 3, 2)

    options: dict[str, Any] = {"num_tokens": 16, "stop_ids": [1], "decode": lambda ids: ""}
    bend(policy)
    Weights({"sampler": Inbox(TorchEngine({"sampler": copy}, **options))}, sync_every=2).sync(learner, 1)
    with pytest.raises(WeightsError, match=f"1 tensors differ.*{name}"):
        Weights({"sampler": Inbox(FaultyMemory({"sampler": copy}, **options))}, sync_every=2).sync(learner, 2)


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of GRPO with an adapter and a KL to the reference. Tests must not change it. The
    head is adapted too, since otherwise the tiny model would not change its responses."""
    folder = tmp_path_factory.mktemp("run")
    options = {
        "algorithm.samples": 8,
        "algorithm.kl_coef": 0.01,
        "learner.learning_rate": 0.03,
        "stop.max_steps": 12,
    }
    lora = {"model.lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj", "lm_head"]}}
    config = world.config(
        "grpo", folder, {**lora, **options, "evaluation.every": 12, "evaluation.samples": 16}
    )
    assert logged(folder / "log", "train", config) == 0, (folder / "log").read_text()
    return folder / "grpo"


@pytest.mark.slow(
    instead="tests/learning, for models without an adapter; test_an_exported_adapter_is_the_policy",
    seconds=1.3,
)
def test_an_adapter_learns(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.5
    assert rows[1]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl/reference"] > 1e-3


def test_a_checkpoint_holds_adapters_only(finished: Path) -> None:
    found = Checkpoints(finished / "checkpoints", every=1, keep_last=1).load()
    assert found is not None
    assert len(found[1]) > 0
    assert all("lora_" in name for name in found[1])


def test_the_export_is_the_policy(finished: Path, world: World, tmp_path: Path) -> None:
    """Transformers reads the export, and its log-probabilities agree to 1e-5 for prompts and responses of the
    run. The first evaluation of a run that begins with the export equals this run's last one."""
    assert oat("export", finished, tmp_path / "model") == 0
    config = resolve(load_config(finished / "config.yaml")[0], {})
    run = build(config, directory=made(tmp_path / "built"))
    found = Checkpoints(finished / "checkpoints", every=1, keep_last=1).load()
    assert found is not None
    learner_in(run).load_state(
        {name.removeprefix("learner/"): tensor for name, tensor in found[1].items()} | found[2]["learner"]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("3+4=ab", "0+0=aabb12"):
        ids = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
        with torch.no_grad():
            theirs = model(torch.from_numpy(ids[None]).long()).logits.log_softmax(-1)[0, :-1]
        expected = theirs.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(engine_in(run).logps([ids], "policy")[0], expected, atol=1e-5)
        assert np.abs(engine_in(run).logps([ids], "reference")[0] - expected).max() > 1e-2
    run.ledger.close()
    config_of_next = world.config(
        "grpo",
        tmp_path,
        {"model.path": str(tmp_path / "model"), "stop.max_steps": 1, "evaluation.samples": 16},
    )
    assert logged(tmp_path / "log", "train", config_of_next) == 0
    first = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["eval/greedy"] == last["eval/greedy"]


def test_an_exported_adapter_is_the_policy(
    finished: Path,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The start model with the adapter, loaded by PEFT or as its card says, equals the merged export."""
    import peft  # here, since it takes most of a second

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # PEFT uses what transformers calls deprecated
        for out, flags in {"merged": [], "adapter": ["--adapter"]}.items():
            assert oat("export", finished, tmp_path / out, *flags) == 0
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    whole, start = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (tmp_path / "merged", world.folder / "model")
    )
    ids = AutoTokenizer.from_pretrained(tmp_path / "adapter")("3+4=ab", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected, before = whole(ids).logits, start(ids).logits
        found = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert (found - before).abs().max() > 1e-3
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert str(world.folder) not in card
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], loaded)  # as a reader pastes it
    with torch.no_grad():
        assert torch.allclose(loaded["model"](ids).logits, expected, atol=1e-5)
    capsys.readouterr()
    assert oat("export", finished, tmp_path / "adapter") == 0, "the whole model over the adapter"
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("in place of the model that was there")
    assert "12 tensors equal" in said[1]
    assert "pass not compared" not in said[1]
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)(ids).logits,
            expected,
        )
    assert oat("export", finished, tmp_path / "merged", "--adapter") == 0, "and the other way round"
    assert not (tmp_path / "merged" / "model.safetensors").exists()
    assert oat("train", world.config("grpo", tmp_path)) == 0
    assert oat("export", tmp_path / "grpo", tmp_path / "out", "--adapter") == 2
    assert "trained every weight, so there is no adapter" in capsys.readouterr().err


@pytest.mark.slow(
    instead="tests/learner/test_reference_update.py::test_killed_and_continued, with an adapter", seconds=5.0
)
@pytest.mark.parametrize("sync_every", [1, 2])
def test_a_killed_run_is_the_unbroken_run(world: World, tmp_path: Path, sync_every: int) -> None:
    """A run with bfloat16 and gradient checkpointing is killed between two syncs, and ends bitwise like the
    unbroken run. The checkpoint has the sampler's adapter without the base."""
    learner = {
        "learner.sync_every": sync_every,
        "learner.autocast": "bfloat16",
        "learner.gradient_checkpointing": True,
    }
    changes = {**LORA, **learner, "checkpoint.every": 1, "stop.max_steps": 4, "evaluation": None}
    config = world.config("grpo", tmp_path, changes)

    def run(name: str, kill: int | None = None) -> int:
        def action() -> int:
            if kill:
                kill_at(Learner, "update", kill)
            return oat("train", config, "--run_dir", tmp_path / name)

        return forked(action, tmp_path / "log")

    assert run("unbroken") == 0, (tmp_path / "log").read_text()
    assert [run("killed", kill=2), run("killed", kill=3), run("killed")] == [
        -signal.SIGKILL,
        -signal.SIGKILL,
        0,
    ]
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")
    found = Checkpoints(tmp_path / "killed" / "checkpoints", every=1, keep_last=1).load()
    assert found is not None
    kept = [name for name in found[1] if name.startswith("weights/")]
    assert all("lora_" in name for name in kept)
    assert bool(kept) == (sync_every > 1)


def test_an_evaluation_of_a_run_has_its_adapter(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("eval", finished) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["eval/greedy"] == last["eval/greedy"]


@pytest.mark.slow(
    instead="tests/assemble/test_inputs.py::test_a_reference_and_an_adapter_are_held_against_what_they_were",
    seconds=3.7,
)
@pytest.mark.parametrize(
    "changes", [LORA, {"model.reference": "reference"}], ids=["base of an adapter", "reference"]
)
def test_weights_that_never_change_are_those_the_run_began_with(
    world: World, tmp_path: Path, changes: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", "reference"):
        shutil.copytree(world.folder / "model", tmp_path / name)
    changes = {
        **changes,
        "model.path": str(tmp_path / "model"),
        **({"model.reference": str(tmp_path / "reference")} if changes != LORA else {}),
    }
    config = world.config("dpo", tmp_path, {**changes, "evaluation": None})
    assert oat("train", config, "--stop.max_steps", "2") == 0
    file = tmp_path / ("model" if "model.lora" in changes else "reference") / "model.safetensors"
    before = file.read_bytes()
    assert oat("train", config, "--stop.max_steps", "3") == 0
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    capsys.readouterr()
    assert oat("train", config, "--stop.max_steps", "4") == 2
    assert "what is read of it is not what this run began with:\n  weights: " in capsys.readouterr().err
    # a run of before knows a checksum of all that is frozen
    (tmp_path / "dpo" / "environment.json").rename(tmp_path / "aside")
    assert oat("train", config, "--stop.max_steps", "4") == 1
    assert "what is frozen in the " in capsys.readouterr().err
    (tmp_path / "aside").rename(tmp_path / "dpo" / "environment.json")
    if "model.lora" in changes:
        assert oat("export", str(tmp_path / "dpo"), str(tmp_path / "out")) == 1
        assert "put its files back" in capsys.readouterr().err
    file.write_bytes(before)
    assert oat("train", config, "--stop.max_steps", "4") == 0
    assert oat("export", str(tmp_path / "dpo"), str(tmp_path / "out")) == 0
