"""Frozen tensors (`model.frozen`, or requires_grad=False in a given model) stay as they are, in every model
that starts from the same files, in continued runs and in exports."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, forked, kill_at, make_model, oat
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import letters, lines
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oat import Trainer
from oat.answering.learned import load_learned
from oat.commands.digest import digest_run
from oat.commands.export import export_run
from oat.errors import ConfigError
from oat.models.causal_lm import CausalLM
from oat.models.frozen import freeze, frozen_in

Frozen = Callable[[str], bool]
LOWER = ("embed", "layers.0.")
CASES: dict[str, tuple[bool, Frozen]] = {
    "embeddings and the first layer": (False, lambda name: any(part in name for part in LOWER)),
    "tied embeddings": (True, lambda name: "embed" in name),
    "all but the head": (False, lambda name: "lm_head" not in name),
    "all but the norms": (True, lambda name: "norm" not in name),
}
"""Whether embeddings and head are tied; and the tensors that are frozen, by name."""
MODELS: dict[str, dict[str, Any]] = {
    "a critic": {"algorithm": {"name": "ppo", "prompts": 2, "samples": 2}},
    "a reward model": {
        "algorithm": {"name": "reward_model", "prompts": 2, "samples": 2},
    },
    "a reference that follows": {
        "algorithm": {"name": "grpo", "prompts": 2, "samples": 2, "kl_coef": 0.1},
        "model.reference_update": {"mix": 0.5},
    },
    "a lagging sampler": {
        "algorithm": {"name": "grpo", "prompts": 2, "samples": 2},
        "learner.sync_every": 2,
    },
    "checkpointed gradients, accumulated": {
        "algorithm": {"name": "grpo", "prompts": 2, "samples": 2},
        "learner.gradient_checkpointing": True,
        "learner.micro_batch_size": 1,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, `tied` and `untied`."""
    made = tmp_path_factory.mktemp("models")
    make_model(made / "untied", layers=2)
    config = LlamaConfig.from_pretrained(made / "untied", tie_word_embeddings=True)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(made / "tied")
    AutoTokenizer.from_pretrained(made / "untied").save_pretrained(made / "tied")
    return made


def model_of(folder: Path, *, is_tied: bool, is_frozen: Frozen) -> PreTrainedModel:
    module = AutoModelForCausalLM.from_pretrained(folder / ("tied" if is_tied else "untied"))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    return module


def run_lines(world: World, folder: Path, run_dir: Path, module: Any, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer of three steps, in which weight decay alone would move a tensor."""
    tree = lines(world, run_dir, model=module, tokenizer=AutoTokenizer.from_pretrained(folder / "untied"))
    tree |= {"learner": {"learning_rate": 0.01, "weight_decay": 0.5}, "stop": {"max_steps": 3}, "quiet": True}
    return {**tree, "evaluation": None, **changes}


def moved(before: Mapping[str, torch.Tensor], module: torch.nn.Module) -> set[str]:
    return {name for name, tensor in module.named_parameters() if not torch.equal(tensor, before[name])}


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.sample("embeddings*", "tied*", seconds=2.0)
@pytest.mark.sample("embeddings and the first layer", seconds=2.0)
@pytest.mark.parametrize(("is_tied", "is_frozen"), CASES.values(), ids=CASES.keys())
def test_the_tensors_that_need_no_gradient_are_the_ones_that_stay(
    world: World, folder: Path, tmp_path: Path, *, is_tied: bool, is_frozen: Frozen
) -> None:
    module = model_of(folder, is_tied=is_tied, is_frozen=is_frozen)
    before = values(module)
    trainer = Trainer(**run_lines(world, folder, tmp_path / "run", module))
    trainer.train()
    trainer.save_model(tmp_path / "out")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert moved(before, after) == {name for name in before if not is_frozen(name)}
    assert moved(before, module) == set(), "a copy learns"


@given(st.data())
@settings(max_examples=25)
def test_a_set_of_tensors_is_named_by_its_patterns(data: st.DataObject) -> None:
    """`freeze` undoes `frozen_in`, for every set of tensors, tied or not."""
    shape = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "vocab_size": 6}
    is_tied = data.draw(st.booleans())
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=is_tied, **shape))
    module.tie_weights()
    names = [name for name, _ in module.named_parameters()]
    chosen = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    if data.draw(st.booleans()):  # whole parts, as people freeze them
        part = data.draw(st.sampled_from(["model.embed_tokens.", "model.layers.", "model.layers.0."]))
        chosen |= {name for name in names if name.startswith(part)}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in chosen)
    if len(chosen) == len(names):
        return
    lm = CausalLM(module)
    freeze(lm, frozen_in(module))
    assert lm.frozen == chosen
    assert lm.trainable().keys() == set(names) - chosen


@pytest.mark.sample("a critic", seconds=4.0)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_they_stay_in_every_model_that_starts_from_these_files(
    world: World, folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    named = ["*embed_tokens*", "model.layers.0.*"]
    tree = world.tree(
        changes["algorithm"]["name"],
        tmp_path / "run",
        {
            "model": {"path": str(folder / "untied"), "frozen": named},
            "learner.weight_decay": 0.5,
            "engine.threads": 1,
            "evaluation": None,
            "stop.max_steps": 3,
            **changes,
        },
    )
    tree["oracle"] = letters
    Trainer(**tree, quiet=True).train()
    before = values(AutoModelForCausalLM.from_pretrained(folder / "untied"))
    for critic in [False, True] if changes["algorithm"]["name"] == "ppo" else [False]:
        found = load_learned(tmp_path / "run", critic=critic)
        changed = {
            name
            for name, tensor in found.lm.module.base_model.named_parameters(prefix="model")
            if not torch.equal(tensor, before[name])
        }
        assert changed
        assert not any(part in name for name in changed for part in LOWER), changed


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_frozen_tensors(
    world: World, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A continued run equals an unbroken one. The file that Python's run leaves says what is frozen: the
    command refuses another set, and both commands say how many tensors there are."""
    changes = {
        "model": {"path": str(folder / "untied"), "frozen": ["*embed_tokens*", "model.layers.0.*"]},
        "evaluation": None,
        "engine.threads": 1,
        "checkpoint.every": 1,
    }
    digests = []
    for name, call in (("unbroken", None), ("broken", 3)):
        (tmp_path / name).mkdir()
        config = world.config("grpo", tmp_path / name, changes)
        if call is not None:
            from oat.learner.learner import Learner

            def killed(call: int = call, config: Path = config) -> int:
                kill_at(Learner, "update", call)
                return oat("train", config)

            assert forked(killed, tmp_path / "log") == -9
        assert oat("train", config) == 0
        digests.append(digest_run(tmp_path / name / "grpo"))
    assert digests[0] == digests[1]
    assert "10 of 21 tensors" in capsys.readouterr().out
    assert oat("check", config) == 0
    assert "10 of 21 tensors" in capsys.readouterr().out
    for other in ("[]", "[model.layers.0.*]"):
        assert oat("train", config, "--model.frozen", other) == 2
        assert "model.frozen" in capsys.readouterr().err
    assert export_run(tmp_path / "broken" / "grpo", tmp_path / "out").step == 4


@pytest.mark.slow(instead="test_a_killed_run_goes_on_with_the_same_frozen_tensors", seconds=1.2)
def test_a_given_model_is_continued_with_its_own_set_alone(
    world: World, folder: Path, tmp_path: Path
) -> None:
    def with_frozen(is_frozen: Frozen) -> Trainer:
        module = model_of(folder, is_tied=False, is_frozen=is_frozen)
        return Trainer(**run_lines(world, folder, tmp_path / "run", module, stop={"max_steps": 1}))

    with_frozen(lambda name: "embed" in name).train()
    assert with_frozen(lambda name: "embed" in name).train().is_idle
    for other in (lambda name: "head" in name, lambda name: False):
        with pytest.raises(ConfigError, match=r"model\.frozen"):
            with_frozen(other).train()


@pytest.mark.slow(instead="test_mistakes_are_refused", seconds=1.5)
def test_what_leaves_nothing_to_learn_is_refused(world: World, folder: Path, tmp_path: Path) -> None:
    """Beside an adapter all tensors may be frozen, since all of them are. Some of them may not."""
    every = model_of(folder, is_tied=False, is_frozen=lambda name: True)
    with pytest.raises(ConfigError, match="leaves no tensor"):
        Trainer(**run_lines(world, folder, tmp_path / "run", every)).train()
    adapted = {"path": every, "lora": {"rank": 2}}
    Trainer(**run_lines(world, folder, tmp_path / "run", adapted, stop={"max_steps": 1})).train()
    some = {
        "path": model_of(folder, is_tied=False, is_frozen=lambda name: "embed" in name),
        "lora": {"rank": 2},
    }
    with pytest.raises(ConfigError, match="requires_grad=False"):
        Trainer(**run_lines(world, folder, tmp_path / "other", some))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"frozen": ["model.layer.0.*"]}, "has no tensor 'model.layer.0.*'"),
        ({"frozen": ["*"]}, "leaves no tensor"),
        ({"frozen": ["*embed*"], "lora": {"rank": 2}}, "beside an adapter"),
        ({"frozen": ["*embed*"], "reference_update": {"mix": 0.5}, "reference": "OTHER"}, "would follow"),
    ],
)
def test_mistakes_are_refused(
    world: World,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: dict[str, Any],
    said: str,
) -> None:
    if "reference" in model:
        model = {**model, "reference": str(folder / "tied")}
    section = {"path": str(folder / "untied"), **model}
    config = world.config("grpo", tmp_path, {"model": section, "algorithm.kl_coef": 0.1})
    messages = []
    for command in ("check", "train"):
        assert oat(command, config) == 2
        messages.append(capsys.readouterr().err.removeprefix(f"oat {command}: "))
    assert messages[0] == messages[1]
    assert said in messages[0]
