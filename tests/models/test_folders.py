"""Loaders read the configuration and the weights of a folder, and nothing else: every further file that
another program would pick up is refused with one message, or said not to be used."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapters import built, learner_in
from fixtures import World, made, oat
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import build_config, save_model, save_reward_model
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
)

from oat.assemble.changes import CHANGES
from oat.config.load import load_config as load_settings
from oat.config.settings import ModelConfig
from oat.errors import CheckpointError, ModelError, OatWarning
from oat.learner.models import refuse_other_tensors
from oat.models.beside import is_adapter_directory
from oat.models.frozen import frozen_checksum
from oat.models.loading import load_config, load_lm, load_module, load_tokenizer
from oat.models.lora import load_model
from oat.models.outlines import Outlines
from oat.models.scoring import Scorer
from oat.models.weight_files import refuse_two_sources

Change = Callable[[Path], Any]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def said_in_config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def said_of_generation(**fields: Any) -> Change:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(fields))


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = SINGLE) -> Change:
    """Write the weights with changes to the file `name`."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return write


def doubled(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: 2 * tensor for name, tensor in tensors.items()})


def twice(rename: Callable[[str], str], factor: float = 2) -> Change:
    """Write the tensors whose names change under new names too, multiplied by `factor`."""
    return with_tensors(
        lambda held: held.update(
            {rename(name): factor * tensor for name, tensor in list(held.items()) if rename(name) not in held}
        )
    )


def index_naming(*names: str) -> Change:
    """Write an index in which tensors are spread over these files. Files of the folder that are named and
    missing are written, each with all tensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        places = {tensor: names[number % len(names)] for number, tensor in enumerate(tensors)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for name in names:
            if "/" not in name and not (folder / name).exists():
                save_file(tensors, folder / name, metadata={"format": "pt"})

    return write


def adapter_beside(folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(module, lora).save_pretrained(folder)


def only_shards(folder: Path) -> None:
    index_naming("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")(folder)
    (folder / SINGLE).unlink()


def shards_of_two_names(folder: Path) -> None:
    """Write two files of one index. The second one has the model again, without its prefix."""
    tensors, places = load_file(folder / SINGLE), {}
    (folder / SINGLE).unlink()
    for number, prefix in ((1, ""), (2, "model.")):
        name = f"model-0000{number}-of-00002.safetensors"
        held = {each.removeprefix(prefix): number * tensor for each, tensor in tensors.items()}
        held = {each: tensor for each, tensor in held.items() if each not in places}
        save_file(held, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(held, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def of_other_versions(folder: Path) -> None:
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    said_in_config(configuration_files=["config.4.0.0.json"])(folder)


HARMLESS: Mapping[str, Change] = {
    "tensors twice, with the same values": twice(lambda name: name.removeprefix("model."), 1),
    "an ensemble": with_tensors(doubled, "ensemble.safetensors"),
    "states of a trainer": lambda folder: (folder / "training_args.bin").write_bytes(b"no weights"),
    "weights in a folder within": with_tensors(doubled, "original/model.safetensors"),
    "an index of the one file": index_naming(SINGLE),
    "settings of drawing": said_of_generation(eos_token_id=0, do_sample=True, temperature=0.6, top_p=0.9),
    "a processor": lambda folder: (folder / "preprocessor_config.json").write_text("{}"),
}
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 538090408\n"
SAID: Mapping[str, Change] = {
    "weights in pickles": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"no pickle"),
    "weights of other frameworks": lambda folder: (folder / "tf_model.h5").write_bytes(b"no weights"),
    "weights in another layout": with_tensors(doubled, "consolidated.safetensors"),
    "weights of a variant": with_tensors(doubled, "model.fp16.safetensors"),
    "shards that no index names": with_tensors(doubled, "model-00002-of-00002.safetensors"),
    "weights of another adapter": with_tensors(doubled, "adapter_model.safetensors"),
    "an adapter": adapter_beside,
    "a broken adapter": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "code": said_in_config(auto_map={"AutoModelForCausalLM": "own.Model"}),
    "penalties": said_of_generation(eos_token_id=0, repetition_penalty=1.2, suppress_tokens=[1]),
    "penalties of strings": said_of_generation(eos_token_id=0, stop_strings=["x"]),
    "more tensors than the model has": with_tensors(
        lambda held: held.update({"model.layers.9.more": torch.ones(2)})
    ),
    "the model again by a name that is not known": twice(lambda name: f"language_model.{name}"),
}
REFUSED: Mapping[str, Change] = {
    "quantised by the configuration": said_in_config(
        quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    "quantised by a method that is not known": said_in_config(quantization_config={"quant_method": "mine"}),
    "quantised weights": with_tensors(
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].to(torch.int8)})
    ),
    "weights by another name": said_in_config(transformers_weights="consolidated.safetensors"),
    "fused layers": said_in_config(fusion_config={"rms_norm": True}),
    "shards beside the one file": index_naming("model-00001-of-00001.safetensors"),
    "shards in another folder": index_naming("../other/model.safetensors"),
    "parts of processes": with_tensors(doubled, "shard-00000-model-00001-of-00001.safetensors"),
    "shards that have a tensor twice": only_shards,
    "the model again without the prefix": twice(lambda name: name.removeprefix("model.")),
    "one tensor again without the prefix": twice(
        lambda name: name.removeprefix("model.") if name == "model.norm.weight" else name
    ),
    "shards that have the model by two names": shards_of_two_names,
    "a configuration for other versions": of_other_versions,
    "pointers in place of weights": lambda folder: (folder / SINGLE).write_text(POINTER),
    "settings that are no JSON": lambda folder: (folder / "generation_config.json").write_text("{"),
}
CHANGED = {**HARMLESS, **SAID, **REFUSED}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a language model (`lm`) and a reward model (`reward`)."""
    folder = tmp_path_factory.mktemp("clean")
    save_model(folder / "lm", build_config("llama"))
    save_reward_model(folder / "reward", build_config("llama"))
    return folder


def values(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


def own_names(folder: Path, mapping: Mapping[Any, Any]) -> set[str]:
    """Return the names of the parameters of the module that the configuration itself makes."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return {name for name, _ in mapping[type(config)](config).named_parameters()}


def loaded(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each loader's name, and a function that loads the folder's module with it."""
    path = str(folder)
    if folder.name == "reward":
        yield "reward model", lambda: Scorer(path)._module
        return
    yield "outline", lambda: Outlines().on_meta(ModelConfig(path)).module
    yield "run", lambda: load_model(ModelConfig(path)).module
    yield "features", lambda: load_module(path, load_config(path), MODEL_MAPPING, "float32")


def outcome(load: Callable[[], Any]) -> tuple[Any, str, list[str]]:
    """Return the module, or the message with which it is refused, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module, message = load(), ""
        except ModelError as error:
            module, message = None, str(error)
    return module, message, [str(each.message) for each in caught if each.category is OatWarning]


@pytest.mark.sample(
    "an adapter-*",
    "penalties-lm",
    "weights in *-lm",
    "more tensors*-lm",
    "shards that*-lm",
    "tensors twice*-lm",
    "quantised by the configuration-*",
    "quantised weights-lm",
    "settings*-lm",
    "the model again*-lm",
    "one tensor*-reward",
    "a configuration*-lm",
    "parts of processes-lm",
    seconds=4.0,
)
@pytest.mark.parametrize("kind", ["lm", "reward"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_folder_is_read_as_its_configuration_says(
    clean: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / kind
    shutil.copytree(clean / kind, folder)
    if kind == "reward" and name == "an adapter":
        shutil.copytree(clean / "lm", tmp_path / "lm")
        adapter_beside(tmp_path / "lm")
        for file in tmp_path.glob("lm/adapter*"):
            shutil.copy(file, folder)
    else:
        CHANGED[name](folder)
    mapping: Mapping[Any, Any] = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    expected = values(auto.from_pretrained(clean / kind))
    is_of_generation = "penalties" in name or "JSON" in name
    for loader, load in loaded(folder):
        module, message, said = outcome(load)
        if is_of_generation and loader in ("reward model", "features"):
            assert (message, said) == ("", [])  # they generate nothing
            continue
        assert bool(message) == (name in REFUSED), (loader, message)
        assert "\n" not in message
        assert ("Git LFS" in message) == ("pointers" in name), message
        assert bool(said) == (name in SAID), (loader, said)
        assert len(set(said)) == len(said)
        if message:
            continue
        found = values(module)
        prefix = "model." if loader == "features" else ""
        assert {prefix + each for each in found} == {
            each for each in expected if each.startswith(prefix) and (not prefix or each != "lm_head.weight")
        }
        if kind == "reward":
            assert set(found) == own_names(folder, mapping)
        if loader != "outline":
            assert all(torch.equal(tensor, expected[prefix + each]) for each, tensor in found.items())


@given(chosen=st.sets(st.sampled_from(sorted({*HARMLESS, *SAID} - {"a broken adapter"})), max_size=4))
@settings(max_examples=6, deadline=None)
def test_together_they_change_nothing_either(
    clean: Path, tmp_path_factory: pytest.TempPathFactory, chosen: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("some") / "lm"
    shutil.copytree(clean / "lm", folder)
    for name in sorted(chosen):
        CHANGED[name](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = values(load_lm(str(folder)).module), values(load_lm(str(clean / "lm")).module)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


NAMES: Mapping[str, Callable[[str], str]] = {
    "without the prefix": lambda name: name.removeprefix("model."),
    "prefix": lambda name: f"model.{name}",
    "foreign prefix": lambda name: f"language_model.{name}",
    "wrapped": lambda name: f"base_model.model.{name}",
    "old": lambda name: name.replace(".weight", ".gamma"),
    "parametrised": lambda name: name.replace(".weight", ".parametrizations.weight.original0"),
    "within": lambda name: name.replace("model.layers.", "model.language_model.layers."),
}


@given(name=st.sampled_from(sorted(NAMES)), chosen=st.sets(st.integers(0, 20), min_size=1))
@settings(max_examples=12, deadline=None)
def test_no_tensor_takes_the_place_of_another(
    clean: Path, tmp_path_factory: pytest.TempPathFactory, name: str, chosen: set[int]
) -> None:
    """Whatever further names a file has, the module has the tensors of its own names, or is refused."""
    folder = tmp_path_factory.mktemp("some") / "lm"
    shutil.copytree(clean / "lm", folder)
    held = load_file(folder / SINGLE)
    expected = values(AutoModelForCausalLM.from_pretrained(clean / "lm"))
    more = {NAMES[name](each): 2 * held[each] for each in [sorted(held)[place] for place in chosen]}
    save_file(held | {k: v for k, v in more.items() if k not in held}, folder / SINGLE, {"format": "pt"})
    module, message, _ = outcome(lambda: load_lm(str(folder)).module)
    assert message or all(torch.equal(tensor, expected[each]) for each, tensor in values(module).items())


@pytest.mark.parametrize("is_other", [True, False], ids=["two values", "one value"])
def test_experts_have_one_source(tmp_path: Path, is_other: bool) -> None:
    """Transformers puts the experts of a layer together. Files may have them apart and together."""
    config = MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2
    )
    config.num_attention_heads = config.num_key_value_heads = 2
    module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(tmp_path)
    apart = load_file(tmp_path / SINGLE)
    assert apart.keys() != module.state_dict().keys()
    refuse_two_sources(module, str(tmp_path))
    whole = {name: tensor for name, tensor in module.state_dict().items() if name not in apart}
    expert = {f"model.{name}": 2 * tensor for name, tensor in apart.items() if ".experts.1." in name}
    more = whole if is_other else {}
    save_file({**apart, **more}, tmp_path / SINGLE, {"format": "pt"})
    if is_other:
        with pytest.raises(ModelError, match="nobody can tell"):
            refuse_two_sources(module, str(tmp_path))
    save_file(
        {**apart, **{name.removeprefix("model.model."): t for name, t in expert.items()}}, tmp_path / SINGLE
    )
    with pytest.raises(ModelError, match="nobody can tell"):
        refuse_two_sources(module, str(tmp_path))


@pytest.mark.parametrize(
    "name", ["score.bias", "value_head.weight", "lm_head.weight", "v_head.summary.weight"]
)
def test_a_reward_model_names_what_it_does_not_use(clean: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(clean / "reward", folder)
    with_tensors(lambda held: held.update({name: torch.ones(1, 32)}))(folder)
    _, message, said = outcome(lambda: Scorer(str(folder))._module)
    assert not message
    assert len(said) == 1
    assert f"`{name}`" in said[0]


@pytest.mark.parametrize("has_values", [True, False], ids=["two values", "one value"])
def test_tied_embeddings_have_one_value(tmp_path: Path, has_values: bool) -> None:
    """Transformers leaves embeddings untied if the files have two of them that differ, whatever the
    configuration says."""
    folder = Path(save_model(tmp_path / "lm", build_config("qwen3")))
    write = with_tensors(
        lambda held: held.update(
            {"lm_head.weight": held["model.embed_tokens.weight"] * (2 if has_values else 1)}
        )
    )
    write(folder)
    messages = []
    for loader, load in loaded(folder):
        if loader == "features":
            continue
        module, message, _ = outcome(load)
        messages.append(message)
        if not has_values:
            assert set(values(module)) == own_names(folder, {type(module.config): type(module)})
    assert len(set(messages)) == 1
    assert ("tie_word_embeddings" in messages[0]) == has_values


def test_fewer_layers_than_the_files_have_are_said(clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lm"
    shutil.copytree(clean / "lm", folder)
    said_in_config(num_hidden_layers=1, layer_types=None)(folder)
    for _, load in loaded(folder):
        module, message, said = outcome(load)
        assert not message
        assert module.config.num_hidden_layers == 1
        assert len(said) == 1
        assert " 9 tensors " in said[0]


@pytest.mark.sample("model.path", seconds=2.5)
@pytest.mark.parametrize("place", ["model.path", "model.reference", "model.critic", "oracle"])
def test_every_model_of_a_run_leaves_the_adapter_out(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """`oat check` and `oat train` say it, and the run does not depend on the adapter's weights."""
    folder = tmp_path / "merged"
    shutil.copytree(world.folder / "model", folder)
    changes: dict[str, Any] = {place: str(folder), "evaluation": None, "stop.max_steps": 1}
    changes["engine.threads"] = 1
    algorithm = "ppo" if place == "model.critic" else "grpo"
    changes |= {"algorithm.kl_coef": 0.1} if algorithm == "grpo" else {}
    if place == "oracle":
        tokenizer = load_tokenizer(str(folder))
        shutil.rmtree(folder)
        config = AutoConfig.from_pretrained(world.folder / "model")
        save_reward_model(folder, config, tokenizer)
        changes["oracle"] = {"name": "reward_model", "path": str(folder)}
    config = world.config(algorithm, tmp_path, changes)
    assert oat("train", config, "--run_dir", tmp_path / "without") == 0
    adapter_of = tmp_path / "lm"
    shutil.copytree(world.folder / "model", adapter_of)
    adapter_beside(adapter_of)
    for file in adapter_of.glob("adapter*"):
        shutil.copy(file, folder)
    for command, run_dir in (("check", "with"), ("train", "with")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert oat(command, config, "--run_dir", tmp_path / run_dir) == 0
        said = {str(each.message) for each in caught if "adapter beside it" in str(each.message)}
        assert len(said) == 1 or (place == "oracle" and command == "check")
    capsys.readouterr()
    digests = []
    for run_dir in ("without", "with"):
        assert oat("digest", tmp_path / run_dir) == 0
        digests.append([line for line in capsys.readouterr().out.splitlines() if "weights" in line])
    assert digests[0] == digests[1]
    assert next(each for each in CHANGES if "adapter" in each.name).concerns(load_settings(config)[0])


def test_a_folder_with_an_adapter_alone_is_an_adapter(clean: Path, tmp_path: Path) -> None:
    """Some programs write the configuration of the base model beside an adapter."""
    folder = tmp_path / "lm"
    shutil.copytree(clean / "lm", folder)
    adapter_beside(folder)
    assert not is_adapter_directory(str(folder))
    (folder / SINGLE).unlink()
    assert is_adapter_directory(str(folder))


def test_a_checkpoint_that_has_an_adapter_too_is_refused() -> None:
    """An earlier version trained the adapter in a model's folder together with the model."""
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    held = [names[0].replace(".weight", ".base_layer.weight"), names[0].replace("weight", "lora_A.weight")]
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        refuse_other_tensors("policy", [*held, names[1]], names)
    refuse_other_tensors("policy", names, names)


def test_a_reference_that_had_an_adapter_is_refused_for_this_reason(world: World, tmp_path: Path) -> None:
    """An earlier version used the adapter in the reference's folder. No file has changed since."""
    folder = tmp_path / "merged"
    shutil.copytree(world.folder / "model", folder)
    for has_adapter in (False, True):
        if has_adapter:
            adapter_beside(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            place = made(tmp_path / str(has_adapter))
            run = built(world, place, {"model.lora": None, "model.reference": str(folder)})
        learner = learner_in(run)
        before = AutoModelForCausalLM.from_pretrained(folder)  # with the adapter
        frozen = frozen_checksum(before, ()) + (not has_adapter)
        state = {**learner.state, "frozen": {**learner.frozen, "reference": frozen}}
        with pytest.raises(CheckpointError, match=r"model\.reference back as they were") as caught:
            learner.load_state(state)
        assert ("adapter_config.json" in str(caught.value)) == has_adapter
        run.ledger.close()


def test_an_outline_is_made_anew_when_a_file_changes_and_warns_each_time(clean: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(clean / "lm", tmp_path / "model")

    def outlined() -> tuple[Any, list[str]]:
        module, message, said = outcome(lambda: Outlines().on_meta(ModelConfig(str(folder))).module)
        assert not message, message
        return module, said

    first, _ = outlined()
    layers = first.config.num_hidden_layers
    again, said = outlined()
    assert again is not first, "whoever changes a copy changes no other"
    assert list(again.state_dict()) == list(first.state_dict())
    assert not said
    said_in_config(num_hidden_layers=layers - 1)(folder)
    for _ in range(2):
        fewer, said = outlined()
        assert fewer.config.num_hidden_layers == layers - 1
        assert len(said) == 1, "tensors of the last layer are not used"
