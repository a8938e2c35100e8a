"""Runs that begin with an adapter, references that are adapters, and several adapters on one base model."""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import bend, built, engine_in, learner_in, logits
from fixtures import World, made, make_model, oat
from safetensors.torch import load_file, save_file
from tiny_models import build_config, save_model
from transformers import AutoModelForCausalLM

from oat.answering.speaker import GenerationOptions, load_speaker
from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.config.settings import LoraConfig, ModelConfig
from oat.errors import ModelError
from oat.learner.models import Critic, LanguageModel
from oat.models.adapter_files import described_adapter
from oat.models.loading import load_tokenizer
from oat.models.lora import load_model, save_adapter
from oat.models.outlines import Outlines
from oat.resolve.resolve import resolve

TARGETS = ("lm_head", "q_proj")
IDS = torch.tensor([[2, 3, 4, 12, 13, 1]])


@pytest.fixture(scope="module")
def base(world: World) -> str:
    return str(world.folder / "model")


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the directory of an adapter of the tiny model. `ours` and `other` are
    written as by `oat export --adapter`, `theirs` by PEFT."""
    made: dict[str, str] = {}

    def adapter(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp("adapter")
            if name == "theirs":
                import peft  # here, since it takes most of a second

                torch.manual_seed(4)
                model = peft.get_peft_model(
                    AutoModelForCausalLM.from_pretrained(base),
                    peft.LoraConfig(
                        r=3,
                        lora_alpha=6,
                        target_modules=["v_proj"],
                        init_lora_weights=False,
                        task_type="CAUSAL_LM",
                    ),
                )
                model.save_pretrained(folder)
            else:
                targets = TARGETS if name == "ours" else ("v_proj",)
                lm = load_model(ModelConfig(base, lora=LoraConfig(rank=4, alpha=8, targets=targets)), seed=5)
                bend(lm)
                save_adapter(lm, base, folder)
            made[name] = str(folder)
        return made[name]

    return adapter


def taken_up(base: str, path: str) -> Any:
    """Return the model with an adapter, loaded by PEFT alone."""
    import peft

    return peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), path
    ).eval()


def logps(of: torch.Tensor) -> np.ndarray:
    return of.log_softmax(-1)[0, :-1].gather(1, IDS[0, 1:, None])[:, 0].numpy()


@torch.no_grad()
def by_peft(base: str, path: str) -> np.ndarray:
    return logps(taken_up(base, path)(IDS).logits)


@torch.no_grad()
def of_slot(run: Any, slot: str) -> np.ndarray:
    return engine_in(run).logps([IDS[0].numpy().astype(np.int32)], slot)[0]


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_a_run_begins_where_its_adapter_is(
    world: World, base: str, adapters: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    """A run that begins with an adapter has PEFT's log-probabilities with it, and the adapter's own settings.
    Its reference is this start, and stays when the policy changes."""
    path = adapters(name)
    run = built(world, tmp_path, {"model.lora": None, "model.adapter": path})
    expected, without = by_peft(base, path), logps(logits(load_model(ModelConfig(base)), IDS))
    assert np.abs(expected - without).max() > 1e-2
    for slot in ("sampler", "policy", "reference"):
        np.testing.assert_allclose(of_slot(run, slot), expected, atol=1e-5)
    policy: Any = learner_in(run).models["policy"]
    bend(policy.lm)
    run.weights.sync(run.learner, 1)
    assert np.abs(of_slot(run, "sampler") - expected).max() > 1e-3
    np.testing.assert_allclose(of_slot(run, "reference"), expected, atol=1e-5)
    run.ledger.close()


def test_its_settings_are_its_own(world: World, adapters: Callable[[str], str], tmp_path: Path) -> None:
    changes = {"model.adapter": adapters("theirs"), "evaluation": None}
    config = resolve(*load_config(world.config("dpo", tmp_path, changes))).config
    assert config.model.lora == LoraConfig(rank=3, alpha=6.0, targets=("v_proj",))
    assert resolve(config, {}).config == config, "as it stands in the run's config.yaml"


@pytest.mark.sample("fresh-*", seconds=0.5)
@pytest.mark.parametrize(
    ("reference", "is_shared"),
    [("base", True), ("adapter", True), ("another adapter", True), ("another model", False)],
)
@pytest.mark.parametrize("start", ["fresh", "adapter"])
def test_which_reference(
    world: World,
    base: str,
    adapters: Callable[[str], str],
    tmp_path: Path,
    start: str,
    reference: str,
    is_shared: bool,
) -> None:
    """The reference is the model without adapters, or has another adapter than the policy. Neither needs a
    second copy of the frozen weights."""
    make_model(tmp_path / "model", seed=3)
    paths = {
        "base": base,
        "adapter": adapters("ours"),
        "another adapter": adapters("other"),
        "another model": str(tmp_path / "model"),
    }
    lora = {"model.lora": None, "model.adapter": adapters("ours")} if start == "adapter" else {}
    run = built(world, tmp_path, {**lora, "model.reference": paths[reference]})
    own: dict[str, Any] = {name: model for name, model in learner_in(run).models.items()}
    bend(own["policy"].lm)
    path = paths[reference]
    expected = (
        by_peft(base, path) if "adapter" in reference else logps(logits(load_model(ModelConfig(path)), IDS))
    )
    np.testing.assert_allclose(of_slot(run, "reference"), expected, atol=1e-5)
    frozen = [
        {p.data_ptr() for name, p in own[name].module.named_parameters() if "lora_" not in name}
        for name in ("policy", "reference")
    ]
    assert (frozen[0] == frozen[1]) == is_shared
    run.ledger.close()


def test_a_whole_policy_beside_a_reference_with_an_adapter(
    world: World, base: str, adapters: Callable[[str], str], tmp_path: Path
) -> None:
    """A policy with full weights stands beside a reference with an adapter. The policy's weights change, so
    the reference has its own copy."""
    run = built(world, tmp_path, {"model.lora": None, "model.reference": adapters("ours")})
    own: dict[str, Any] = dict(learner_in(run).models.items())
    with torch.no_grad():
        for parameter in own["policy"].module.parameters():
            parameter.add_(0.1)
    np.testing.assert_allclose(of_slot(run, "reference"), by_peft(base, adapters("ours")), atol=1e-5)
    run.ledger.close()


@pytest.mark.slow(instead="test_a_reference_in_half_precision; tests/models/test_lora.py", seconds=1.6)
def test_a_run_goes_on_with_the_adapter_of_another(world: World, base: str, tmp_path: Path) -> None:
    """A run begins with the adapter that another run exported. Its first evaluation equals the last one of
    the earlier run. Its own exports, as adapter or merged, equal its policy."""
    lora = {
        "model.lora": {"rank": 4, "targets": ["q_proj", "lm_head"]},
        "learner.learning_rate": 0.03,
        "algorithm.samples": 8,
    }
    changes = {**lora, "evaluation.every": 4, "evaluation.samples": 16}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    assert oat("export", tmp_path / "grpo", tmp_path / "adapter", "--adapter") == 0
    (tmp_path / "next").mkdir()
    following = {
        **changes,
        "model.lora": None,
        "model.adapter": str(tmp_path / "adapter"),
        "algorithm.kl_coef": 0.05,
        "checkpoint.every": 1,
    }
    config = world.config("grpo", tmp_path / "next", following)
    assert oat("check", config) == 0
    assert oat("train", config) == 0

    def rows(run_dir: Path) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    last, first = rows(tmp_path / "grpo")[-1], rows(tmp_path / "next" / "grpo")[0]
    assert (first["eval/sampled"], first["eval/greedy"]) == (last["eval/sampled"], last["eval/greedy"])
    assert rows(tmp_path / "next" / "grpo")[1]["kl/reference"] == pytest.approx(0, abs=1e-6), (
        "the reference is the start, and not the base"
    )
    assert oat("export", tmp_path / "next" / "grpo", tmp_path / "alone", "--adapter") == 0
    assert oat("export", tmp_path / "next" / "grpo", tmp_path / "merged") == 0
    with torch.no_grad():
        merged = logps(
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(IDS).logits
        )
    np.testing.assert_allclose(by_peft(base, str(tmp_path / "alone")), merged, atol=1e-5)
    assert np.abs(merged - by_peft(base, str(tmp_path / "adapter"))).max() > 1e-3


def test_a_run_whose_references_adapter_was_changed_is_refused(
    world: World, adapters: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(adapters("ours"), tmp_path / "adapter")
    config = world.config("dpo", tmp_path, {"model.adapter": str(tmp_path / "adapter"), "evaluation": None})
    assert oat("train", config, "--stop.max_steps", "2") == 0
    before = digest_run(tmp_path / "dpo")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert oat("train", config, "--stop.max_steps", "3") == 2
    assert "model.adapter is" in (said := capsys.readouterr().err)
    assert "what is read of it is not what this run began with:\n  weights: " in said
    # a run of before knows a checksum of all that is frozen
    (tmp_path / "dpo" / "environment.json").rename(tmp_path / "aside")
    assert oat("train", config, "--stop.max_steps", "3") == 1
    assert "what is frozen in the reference is not what this run began with" in capsys.readouterr().err
    assert digest_run(tmp_path / "dpo") == before
    (tmp_path / "aside").rename(tmp_path / "dpo" / "environment.json")
    file.write_bytes(sound)
    assert oat("train", config, "--stop.max_steps", "3") == 0


def test_policy_critic_and_reward_model_stand_beside_one_base(
    world: World, base: str, tmp_path: Path
) -> None:
    """Policy, critic and reward model each have an adapter with its own seed, and the shared base is in
    memory once. Learning one adapter changes no other."""
    from oat.assemble.models import load_models
    from oat.seeds import Seeds

    changes = {"model.lora": {"rank": 2}, "learner.sync_every": 2, "evaluation": None}
    config = resolve(*load_config(world.config("dpo", tmp_path, changes))).config
    lms = load_models(config, {"reference", "critic", "reward"}, Seeds(0))
    assert set(lms) == {"policy", "reference", "critic", "reward"}

    def part(name: str, *, adapter: bool) -> dict[str, torch.Tensor]:
        return {key: p for key, p in lms[name].module.named_parameters() if ("lora_" in key) == adapter}

    frozen = {name: {p.data_ptr() for p in part(name, adapter=False).values()} for name in lms}
    head = {p.data_ptr() for p in lms["policy"].module.get_output_embeddings().parameters()}
    assert frozen["reference"] == frozen["policy"]
    assert frozen["critic"] == frozen["reward"] == frozen["policy"] - head
    places = [
        p.data_ptr() for name in ("policy", "critic", "reward") for p in part(name, adapter=True).values()
    ]
    assert len(set(places)) == len(places)
    starts = [
        next(p for key, p in part(name, adapter=True).items() if "lora_A" in key)
        for name in ("policy", "critic", "reward")
    ]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    before = logits(lms["policy"], IDS)
    critic = Critic(lms["critic"], np.random.default_rng(0))
    assert {name.rpartition(".lora_")[0] for name in critic.trainable() if "lora_" in name}
    bend(lms["critic"])
    bend(lms["reward"])
    assert torch.equal(logits(lms["policy"], IDS), before)
    assert isinstance(LanguageModel(lms["policy"], num_tokens=16).trainable(), dict)


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        told = json.loads(file.read_text())
        change(told)
        file.write_text(json.dumps(told))

    return spoil


def with_weights_of_the_model(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Any]:
    """Write the head of the model into the adapter's file, as PEFT does if it is adapted."""

    def spoil(folder: Path) -> None:
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        head = load_file(Path(base) / "model.safetensors")["lm_head.weight"]
        file = folder / "adapter_model.safetensors"
        name = "base_model.model.lm_head.base_layer.weight"
        save_file({**load_file(file), name: change(head).contiguous()}, file, {"format": "pt"})

    return spoil


WRONG: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "nested too deep": (
        lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000),
        "holds no adapter that can be read",
    ),
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "holds no adapter that can be read",
    ),
    "no weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "model.adapter is .*: its weights cannot be read",
    ),
    "another method": (
        spoiled(lambda told: told.update(peft_type="LOHA")),
        "holds an adapter of PEFT's kind LOHA, and only LORA is read",
    ),
    "DoRA": (spoiled(lambda told: told.update(use_dora=True)), "none of plain LoRA .*use_dora True"),
    "whole modules": (spoiled(lambda told: told.update(modules_to_save=["norm"])), "modules_to_save"),
    "a pattern": (spoiled(lambda told: told.update(target_modules=".*_proj")), "target_modules"),
    "another start": (
        spoiled(lambda told: told.update(init_lora_weights="pissa")),
        "init_lora_weights 'pissa'",
    ),
    "weights of the model, resized": (
        with_weights_of_the_model(lambda tensor: torch.cat([tensor, tensor[:2]])),
        "has weights of the model itself too, and `base_model.model.lm_head",
    ),
    "another rank": (spoiled(lambda told: told.update(r=2)), "it is of another model than this llama"),
    "a layer too few": (
        spoiled(lambda told: told.update(target_modules=["q_proj"])),
        "it is of another model than this llama",
    ),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 9), "cannot be read"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_adapters_that_cannot_be_taken_up(
    world: World,
    adapters: Callable[[str], str],
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unusable adapter is refused. `oat check` and `oat train` print the same error."""
    spoil, words = WRONG[kind]
    shutil.copytree(adapters("ours"), tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    config = world.config("dpo", tmp_path, {"model.adapter": str(tmp_path / "adapter")})
    said = []
    for command in ("check", "train"):
        assert oat(command, config) == 2
        said.append(capsys.readouterr().err.replace(f"oat {command}", "oat"))
    assert said[0] == said[1]
    assert re.search(words, said[0]), said[0]


@pytest.mark.parametrize("name", ["prefix", "prompt", "ia3"])
def test_an_adapter_of_another_kind_is_named(base: str, tmp_path: Path, name: str) -> None:
    import peft

    kinds = {
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    }
    kinds[name].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"kind {kinds[name].peft_type.value},"):
        described_adapter(str(tmp_path))


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens"]], ids=["head", "embeddings"])
def test_adapted_embeddings_are_those_of_peft(tmp_path: Path, targets: list[str]) -> None:
    """PEFT writes the weights of adapted embeddings too. They are the model's, or the adapter is refused.
    What we write, PEFT reads."""
    import peft

    base = save_model(tmp_path / "base", build_config("llama"))
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    assert any("base_layer" in name for name in load_file(file))
    path = str(tmp_path / "theirs")
    config = ModelConfig(base, lora=described_adapter(path)[0], adapter=path)
    lm = load_model(config)
    with torch.no_grad():
        expected = adapted.eval()(IDS).logits
    torch.testing.assert_close(logits(lm, IDS), expected, atol=1e-4, rtol=1e-4)
    save_adapter(lm, base, tmp_path / "ours")
    with torch.no_grad():
        again = taken_up(base, str(tmp_path / "ours"))(IDS).logits
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)
    Outlines().on_meta(config)
    changed = {name: t + 1 if "base_layer" in name else t for name, t in load_file(file).items()}
    save_file(changed, file, {"format": "pt"})
    with pytest.raises(ModelError, match="is not that of the model here"):
        load_model(config)


@pytest.mark.parametrize("named", [None, "elsewhere/model", "ADAPTER"])
def test_an_adapter_whose_base_cannot_be_read_says_so(
    adapters: Callable[[str], str], tmp_path: Path, named: str | None
) -> None:
    shutil.copytree(adapters("ours"), tmp_path / "adapter")
    named = adapters("theirs") if named == "ADAPTER" else named
    spoiled(lambda told: told.update(base_model_name_or_path=named))(tmp_path / "adapter")
    with pytest.raises(ModelError, match="base_model_name_or_path"):
        load_speaker(str(tmp_path / "adapter"), GenerationOptions())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.adapter": "ADAPTER", "model.lora": {"rank": 3}}, "remove model.lora, or model.adapter"),
        (
            {"model.path": "ADAPTER"},
            "is an adapter; set model.adapter to it, and model.path to the model beside it",
        ),
        ({"model.lora": {}, "model.reference_device": "cpu"}, "has none of its own; remove it"),
        ({"model.adapter": "ADAPTER", "model.reference_dtype": "bfloat16"}, "has none of its own; remove it"),
        ({"model.reference_device": "cpu"}, "everything is there with compute.profile: cpu"),
        ({"model.reference_dtype": "bfloat16", "model.reference_update": {}}, "leave it at float32"),
    ],
)
def test_settings_that_contradict_each_other(
    world: World,
    adapters: Callable[[str], str],
    tmp_path: Path,
    changes: Mapping[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {name: adapters("ours") if value == "ADAPTER" else value for name, value in changes.items()}
    for command in ("check", "train"):
        assert oat(command, world.config("dpo", tmp_path, {**changes, "evaluation": None})) == 2
        assert words in capsys.readouterr().err


def test_a_reference_in_half_precision(world: World, tmp_path: Path) -> None:
    """A reference in bfloat16 takes half the memory, and its log-probabilities have that precision. The
    policy does not change, and a continued run equals the unbroken one."""
    config = world.config("dpo", tmp_path, {"model.reference_dtype": "bfloat16", "evaluation": None})
    run = build(resolve(*load_config(config)), directory=made(tmp_path / "built"))
    own: dict[str, Any] = dict(learner_in(run).models.items())
    assert {p.dtype for p in own["reference"].module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in own["policy"].module.parameters()} == {torch.float32}
    np.testing.assert_allclose(of_slot(run, "reference"), of_slot(run, "policy"), atol=2e-2)
    assert np.abs(of_slot(run, "reference") - of_slot(run, "policy")).max() > 0
    run.ledger.close()
    assert oat("train", config, "--stop.max_steps", "2") == 0
    assert oat("train", config) == 0
    assert oat("train", config, "--run_dir", tmp_path / "unbroken") == 0
    assert digest_run(tmp_path / "dpo") == digest_run(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("tokens", "template", "said"),
    [
        (None, None, None),
        (["<new>"], None, "another vocabulary than"),
        (["<new>"], "{{ messages }}", "another vocabulary and another chat template than"),
    ],
)
def test_a_tokenizer_beside_an_adapter_that_differs_is_said(
    base: str,
    adapters: Callable[[str], str],
    tmp_path: Path,
    tokens: list[str] | None,
    template: str | None,
    said: str | None,
) -> None:
    """Other programs would read it: they store the tokenizer that the adapter was trained with beside it."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapters("ours"), folder)
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens(tokens or [])
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    lora = LoraConfig(rank=4, alpha=8, targets=TARGETS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(ModelConfig(base, lora=lora, adapter=str(folder)))
    told = [str(each.message) for each in caught if "whose tokenizer has" in str(each.message)]
    assert len(told) == (said is not None)
    assert all(str(said) in each for each in told)
