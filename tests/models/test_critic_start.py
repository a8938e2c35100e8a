"""What a critic starts from: the policy's model, another language model, or a sequence-classification model,
whose head becomes the value head."""

import json
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import NO_BITSANDBYTES, World, forked, kill_at, make_model, named, oat
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build_config, save_model, save_reward_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from oat.answering.learned import load_learned
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.config.settings import LoraConfig, ModelConfig
from oat.errors import ModelError, OatWarning
from oat.forecast.estimate import Lengths, estimate
from oat.learner.models import Critic
from oat.models.loading import load_lm
from oat.models.lora import load_model
from oat.models.outlines import Outlines
from oat.models.value_head import check_value_head, read_value_head
from oat.resolve.resolve import resolve
from oat.types import Segment, Trajectory


def trajectory(ids: list[int], prompt: int) -> Trajectory:
    size = len(ids) - prompt
    zeros = np.zeros(size, np.float32)
    segments = (
        Segment("context", np.array(ids[:prompt], np.int32)),
        Segment(
            "model",
            np.array(ids[prompt:], np.int32),
            np.ones(size, bool),
            np.zeros(size, np.int32),
            zeros,
            zeros,
        ),
    )
    return Trajectory("sampler", segments, "stop", "")


def critic_of(path: str, **changes: Any) -> Critic:
    lm = load_model(ModelConfig(path, **changes), needs_head=False)
    lm.drop_head()
    return Critic(lm, np.random.default_rng(0), head=read_value_head(path, lm))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_critic_that_starts_as_a_reward_model(tmp_path: Path, family: str, lora: LoraConfig | None) -> None:
    """The value after the last token is the score that transformers computes for the sequence."""
    path = save_reward_model(tmp_path, build_config(family))
    critic, ids = critic_of(path, lora=lora), [5, 9, 3, 17, 22, 8]
    with torch.no_grad():
        found = critic.outputs([trajectory(ids, 2)], {}, {"value", "value_after"})
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        expected = [float(model(input_ids=torch.tensor([ids[:end]])).logits) for end in range(2, 7)]
    assert np.std(expected) > 1e-2
    assert found["value"].tolist() == pytest.approx(expected[:-1], rel=1e-4, abs=1e-5)
    assert found["value_after"].tolist() == pytest.approx(expected[1:], rel=1e-4, abs=1e-5)
    assert "score.weight" in critic.trainable()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_has_no_value_head(tmp_path: Path, family: str) -> None:
    """The head is drawn as for a critic that starts from the policy, and the output embeddings are freed."""
    path = save_model(tmp_path, build_config(family))
    critic, plain = critic_of(path), Critic(load_lm(path), np.random.default_rng(0))
    assert torch.equal(critic.score.weight, plain.score.weight)
    rows = [trajectory([5, 9, 3, 17], 2)]
    values = [model.outputs(rows, {}, {"value"})["value"] for model in (critic, plain)]
    assert torch.equal(*values)
    sizes = [
        sum(parameter.numel() for parameter in model.lm.module.parameters()) for model in (critic, plain)
    ]
    head = 0 if family == "qwen3" else critic.lm.vocab_rows * 32  # Qwen3's head is its input embedding
    assert sizes[1] - sizes[0] == head


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def dropped(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return drop


def shifted(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def shift(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] += 1

    return shift


def renamed(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight"] = tensors.pop("score.weight")

    return rename


def added(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize("name", ["value_head", "v_head.summary", "score"])
def test_names_of_the_head(tmp_path: Path, name: str) -> None:
    path = save_reward_model(tmp_path, build_config("llama"))
    head = load_file(tmp_path / "model.safetensors")["score.weight"]
    change_tensors(tmp_path, renamed(name))
    change_tensors(tmp_path, added(f"{name}.bias", 1))
    change_tensors(tmp_path, lambda tensors: tensors[f"{name}.bias"].zero_())
    assert torch.equal(critic_of(path).score.weight, head)
    # with another head beside it, and with the output embeddings of a language model
    change_tensors(tmp_path, added("other.weight", 3, 32))
    change_tensors(tmp_path, added("lm_head.weight", 44, 32))
    if name != "score":
        with pytest.raises(ModelError, match=f"2 heads.*{name}.*value_head_prefix"):
            critic_of(path)
        change_config(tmp_path, value_head_prefix=name)
    with pytest.warns(OatWarning, match=f"`{name}` gives the value, and other is not used"):
        assert torch.equal(critic_of(path).score.weight, head)
    change_config(tmp_path, value_head_prefix="missing")
    with pytest.raises(ModelError, match=f"`missing`.*other, {name}"):
        critic_of(path)


WRONG_HEADS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "several labels": (added("score.weight", 3, 32), "its head `score` has 3 labels, and a critic gives one"),
    "another width": (added("score.weight", 1, 16), "its head `score` reads 16 numbers.* have 32"),
    "a bias": (added("score.bias", 1), "its head `score` has a bias"),
    "no number": (
        lambda tensors: tensors["score.weight"].fill_(float("nan")),
        "its head `score` has numbers that are not finite",
    ),
    "no head": (dropped("score.weight"), "its files have no head"),
}


@pytest.mark.parametrize("kind", WRONG_HEADS)
def test_heads_that_are_refused(tmp_path: Path, kind: str) -> None:
    """An outline finds the same mistakes."""
    change, message = WRONG_HEADS[kind]
    path = save_reward_model(tmp_path, build_config("llama"))
    change_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        critic_of(path)
    lm = Outlines().on_meta(ModelConfig(path), needs_head=False)
    with pytest.raises(ModelError, match=message):
        check_value_head(path, lm)


def test_only_the_output_embeddings_may_be_missing(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, build_config("llama"))
    with pytest.raises(ModelError, match=r"lack 1 tensors, for example `lm_head\.weight`"):
        load_lm(path)
    change_tensors(tmp_path, dropped("model.norm.weight"))
    with pytest.raises(ModelError, match=r"lack 1 tensors, for example `model\.norm\.weight`"):
        load_lm(path, needs_head=False)


def test_loading_draws_no_global_random_number(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, build_config("llama"))
    before = torch.random.get_rng_state()
    load_lm(path, needs_head=False)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture(scope="module")
def reward_model(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a reward model with the tokenizer of the world's model, and other weights."""
    folder = tmp_path_factory.mktemp("judge") / "judge"
    shutil.copytree(world.folder / "model", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def config_of(world: World, folder: Path, **changes: Any) -> Path:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    algorithm = {"name": "ppo", "prompts": 4, "samples": 2}
    return world.config("ppo", folder, {"algorithm": algorithm, "evaluation": None, **dotted})


def test_from_reward_model_to_critic_and_on(
    world: World, reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run starts its critic from a reward model. Its exported critic gives, in transformers, the values of
    the run, and can start another critic."""
    config = config_of(world, tmp_path, model__critic=str(reward_model), stop__max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert oat("check", config) == 0
    assert oat("train", config) == 0
    capsys.readouterr()
    assert oat("export", tmp_path / "ppo", tmp_path / "critic", "--critic") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"oat export: the critic after 2 steps is in {tmp_path / 'critic'}"
    assert "pass not compared" not in said[1]
    card = (tmp_path / "critic" / "README.md").read_text()
    assert "The critic after 2 steps of ppo, begun as `judge`, by oat." in card
    assert "`model: {critic: critic}`" in card
    learned = load_learned(tmp_path / "ppo", critic=True).model
    assert isinstance(learned, Critic)
    ids = [3, 4, 5, 6, 7]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    with torch.no_grad():
        value = float(model.eval()(input_ids=torch.tensor([ids])).logits)
        found = learned.outputs([trajectory(ids, 2)], {}, {"value_after"})["value_after"]
        before = critic_of(str(reward_model)).outputs([trajectory(ids, 2)], {}, {"value_after"})
    assert float(found[-1]) == pytest.approx(value, rel=1e-4)
    assert abs(float(before["value_after"][-1]) - value) > 1e-4
    (tmp_path / "next").mkdir()
    again = config_of(world, tmp_path / "next", model__critic=str(tmp_path / "critic"), stop__max_steps=1)
    assert oat("train", again) == 0


def die_in_an_update() -> None:

    kill_at(*named("an optimiser step"), 9)


@pytest.mark.slow(
    instead=(
        "tests/faults/test_inner_kills.py kills a run of PPO; "
        "tests/learner/test_reference_update.py kills one with an adapter"
    ),
    seconds=4,
)
@pytest.mark.parametrize("kind", ["full", "lora", "nf4"])
def test_killed_and_continued(
    world: World,
    reward_model: Path,
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A continued run is bitwise the unbroken one. If only an adapter is trained, the critic's frozen weights
    are read again, and must be those with which the run began."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes", reason=NO_BITSANDBYTES)
    judge = tmp_path / "judge"
    shutil.copytree(reward_model, judge)
    changes: dict[str, Any] = {"model__critic": str(judge), "learner__critic_only_steps": 1}
    if kind != "full":
        changes |= {"model__lora": {"rank": 2}, "learner__gradient_checkpointing": True}
    if kind == "nf4":
        changes |= {"model__quantize": "nf4"}
    config = config_of(world, tmp_path, **changes)
    assert oat("train", config) == 0
    other, log = tmp_path / "killed", tmp_path / "log"

    def die() -> int:
        die_in_an_update()
        return oat("train", config, "--run_dir", other)

    assert forked(die, log) == -signal.SIGKILL, log.read_text()
    assert oat("train", config, "--run_dir", other) == 0
    assert digest_run(other) == digest_run(tmp_path / "ppo")
    assert oat("export", other, tmp_path / "out", "--critic") == 0
    if kind == "full":
        return
    change_tensors(judge, shifted("model.embed_tokens.weight"))
    capsys.readouterr()
    assert oat("train", config, "--stop.max_steps", "5") == 2
    assert "model.critic is" in (said := capsys.readouterr().err)
    assert "what is read of it is not what this run began with:\n  weights: " in said


@pytest.mark.slow(
    instead="tests/algorithms/test_ppo_runs.py::test_a_critic_leaves_less_memory_for_a_pass", seconds=1.7
)
def test_the_memory_of_a_critic(world: World, tmp_path: Path) -> None:
    """The estimate counts the weights of a larger critic, their gradients and their moments, and no head."""
    make_model(tmp_path / "large", hidden=64, layers=3)
    config = config_of(world, tmp_path, model__critic=str(tmp_path / "large"))
    found = estimate(resolve(*load_config(config)), Lengths(5))

    def size(module: torch.nn.Module) -> int:
        return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))

    policy = size(load_lm(str(world.folder / "model")).module)
    large = load_lm(str(tmp_path / "large")).module.base_model
    learned = policy + size(large) + 4 * 64
    buffers = sum(tensor.nbytes for tensor in large.buffers())
    assert abs(found.parts["weights that learn"] - learned) <= 2 * buffers
    assert abs(found.parts["moments of AdamW"] - 2 * learned) <= 1000  # and counts of steps
    assert abs(found.parts["other weights"] - policy) <= 2 * buffers, "the reference's"
    assert found.peak > policy + 4 * learned


def test_only_a_critic_reads_its_start(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("check", world.config("grpo", tmp_path, {"model.critic": "x"})) == 2
    assert "nothing reads model.critic with algorithm grpo" in capsys.readouterr().err


def make_short(folder: Path) -> None:
    make_model(folder)
    change_config(folder, max_position_embeddings=6)


def make_adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")


def make_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text("")


def make_three_labels(folder: Path) -> None:
    make_model(folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


STARTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an adapter": (make_adapter, "an adapter, and a critic starts from a whole model"),
    "a run": (make_run, "write the model of this run with `oat export"),
    "nothing": (lambda folder: None, "there is no directory"),
    "a short context": (make_short, "it reads at most 6 tokens, and a prompt with its response may have"),
    "few tokens": (lambda folder: make_model(folder, tokens="01"), "a model of the same family"),
    "other ids": (lambda folder: make_model(folder, tokens="9876543210+=ab"), "other ids than the policy's"),
    "three labels": (make_three_labels, "has 3 labels"),
}


@pytest.mark.sample("train-*", seconds=1.4)
@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("command", ["check", "train"])
def test_starts_that_are_refused(
    world: World, tmp_path: Path, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = STARTS[kind]
    make(tmp_path / "start")
    config = config_of(world, tmp_path, model__critic=str(tmp_path / "start"))
    assert oat(command, config) == 2
    said = capsys.readouterr().err
    assert f"{config}:" in said
    assert "model.critic is" in said
    assert message in said


def test_exports_that_are_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert oat("train", world.config("grpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})) == 0
    assert oat("export", tmp_path / "grpo", tmp_path / "out", "--critic") == 2
    assert "grpo has no critic; leave --critic out" in capsys.readouterr().err
    changes = {"model__lora": {"rank": 2}, "stop__max_steps": 1}
    assert oat("train", config_of(world, tmp_path, **changes)) == 0
    assert oat("export", tmp_path / "ppo", tmp_path / "out", "--critic", "--adapter") == 2
    assert "--critic names the critic, whose adapter is useless" in capsys.readouterr().err
    monkeypatch.setattr("oat.models.sequence_classifier.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    assert oat("export", tmp_path / "ppo", tmp_path / "out", "--critic") == 2
    assert "a `llama` has no sequence-classification form" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
