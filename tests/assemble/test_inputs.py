"""A run warns or ends if its model, texts or rewards have changed since it began. These are real runs whose
files are changed before they are continued."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, kill_at, make_model, named, write_jsonl
from inputs import TEMPLATE, edit, make, rows, run, told
from tiny_models import build_config, save_reward_model
from transformers import AutoTokenizer


def config(*removed: str, **fields: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", *removed, **fields)


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        found = json.loads((model / "tokenizer.json").read_text())
        change(found)
        (model / "tokenizer.json").write_text(json.dumps(found))

    return apply


def exchanged(found: dict[str, Any]) -> None:
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def other_weights(model: Path) -> None:
    make_model(model.parent / "other", seed=9)
    shutil.copy(model.parent / "other" / "model.safetensors", model)


def few_of(cases: dict[str, Any], *names: str) -> list[Any]:
    """Return all cases as parameters. Only the cases in `names` are not slow."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.slow, id=name) for name in cases]


CHANGES: dict[str, tuple[Callable[[Path], None], Sequence[str]]] = {
    "the base of the positions": (
        config(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
        ["run.yaml:3: model.path is 'model'", "config.json: rope_theta was 10000.0 and is 500000.0"],
    ),
    "the same as older files have it": (
        config("rope_parameters", rope_theta=5e5),
        ["config.json: rope_theta was 10000.0 and is 500000.0"],
    ),
    "an epsilon": (config(rms_norm_eps=0.01), ["config.json: rms_norm_eps was 1e-06 and is 0.01"]),
    "an activation": (config(hidden_act="gelu"), ['config.json: hidden_act was "silu" and is "gelu"']),
    "the context": (
        config(max_position_embeddings=48),
        ["config.json: max_position_embeddings was 64 and is 48"],
    ),
    "the ids that end a text": (
        lambda model: edit(model / "generation_config.json", eos_token_id=[2, 5]),
        ["generation_config.json: eos_token_id was [2] and is [2, 5]"],
    ),
    "two tokens": (
        tokenizer(exchanged),
        ["tokenizer.json: model.vocab.a was 14 and is 15", "tokenizer.json: model.vocab.b was 15 and is 14"],
    ),
    "a normaliser": (
        tokenizer(lambda found: found.update(normalizer={"type": "Lowercase"})),
        ['tokenizer.json: normalizer.type was not there and is "Lowercase"'],
    ),
    "a pre-tokenizer": (
        tokenizer(lambda found: found["pre_tokenizer"].update(behavior="MergedWithNext")),
        ['tokenizer.json: pre_tokenizer.behavior was "Isolated" and is "MergedWithNext"'],
    ),
    "a decoder": (tokenizer(lambda found: found.update(decoder=None)), ["tokenizer.json: decoder"]),
    "an added token": (
        tokenizer(
            lambda found: found["added_tokens"].append({**found["added_tokens"][0], "id": 14, "content": "a"})
        ),
        ["tokenizer.json: added_tokens.a."],
    ),
    "the token that ends a text": (
        lambda model: edit(model / "tokenizer_config.json", eos_token="<pad>"),
        ['tokenizer_config.json: eos_token was "<eos>" and is "<pad>"'],
    ),
    "the chat template": (
        lambda model: edit(model / "tokenizer_config.json", chat_template=TEMPLATE + " "),
        [
            "run.yaml:",
            (
                "render.template is 'tokenizer': the text of the chat template (chat_template.jinja, or "
                "`chat_template` in tokenizer_config.json)"
            ),
        ],
    ),
    "the weights of the reference": (other_weights, ["weights: lm_head.weight, model.embed_tokens.weight,"]),
}


@pytest.mark.parametrize(
    "change",
    few_of(
        CHANGES, "the base of the positions", "the ids that end a text", "two tokens", "the chat template"
    ),
)
def test_a_change_of_model_or_text_is_refused_by_file_and_field(copy: Path, change: str) -> None:
    apply, words = CHANGES[change]
    apply(copy / "model")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, len(rows(copy / "run"))) == (2, 3), said
    for part in (*words, "put "):
        assert part in said
    assert "Traceback" not in said


def saved_again(model: Path) -> None:
    """Save the model again with the libraries themselves, with the weights in several files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, tokens = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    (model / "model.safetensors").unlink()
    module.save_pretrained(model, max_shard_size="2KB")
    tokens.save_pretrained(model)
    assert len(list(model.glob("model-*.safetensors"))) > 1


def by_another_program(model: Path) -> None:
    """Rewrite the model's files as another program might: other version, aliases, order and white space,
    fields that nothing reads, and no fields with default values."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if not (model / name).exists():
            continue
        found = json.loads((model / name).read_text(encoding="utf-8"))
        if name != "tokenizer.json":
            found["transformers_version"] = "4.40.1"
        if name == "config.json":
            found |= {
                "torch_dtype": found.pop("dtype"),
                "use_cache": False,
                "architectures": None,
                "attention_dropout": 0.3,
                "initializer_range": 0.5,
            }
            found |= {
                "rope_theta": found.pop("rope_parameters")["rope_theta"],
                "rope_scaling": None,
                "_name_or_path": "elsewhere",
            }
            del found["mlp_bias"], found["attention_bias"], found["pretraining_tp"], found["rms_norm_eps"]
        (model / name).write_text(json.dumps(dict(reversed(found.items())), indent=7), encoding="utf-8")


def template_in_a_file(model: Path) -> None:
    edit(model / "tokenizer_config.json", "chat_template")
    (model / "chat_template.jinja").write_text(TEMPLATE)


SAME: dict[str, Callable[[Path], None]] = {
    "by the libraries": saved_again,
    "by another program": by_another_program,
    "the template in a file of its own": template_in_a_file,
    "without the ends that config.json has too": lambda model: (model / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("again", few_of(SAME, "by another program"))
def test_a_file_that_is_only_saved_again_is_the_same(copy: Path, again: str) -> None:
    SAME[again](copy / "model")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, len(rows(copy / "run"))) == (0, 4), said
    assert "warning" not in said
    assert "inputs" not in told(copy / "run")[-1], "nothing new is to be said"


def test_whoever_uses_a_run_meets_the_same_refusal(copy: Path) -> None:
    """The model of a run has changed. Every command refuses the run with the same message. Otherwise `oat
    eval` would measure another model, and `oat export` would write another model's configuration."""
    assert run(copy, "eval", "run")[0] == 0
    CHANGES["the base of the positions"][0](copy / "model")
    fork = ("train", "run.yaml", "--from", "run@1", "--run_dir", "fork", "--learner.learning_rate", 0.1)
    commands = (
        ("eval", "run"),
        ("export", "run", "out"),
        ("check", "run.yaml", "--stop.max_steps", 3),
        ("check", *fork[1:]),
        fork,
    )
    for arguments in (
        *commands,
        ("eval", "model", "--against", "run"),
        ("eval", "run", "--against", "model"),
    ):
        code, said = run(copy, *arguments)
        assert (code, "config.json: rope_theta was 10000.0 and is 500000.0" in said) == (2, True), (
            arguments,
            said,
        )
    assert not (copy / "out").exists()


def test_a_reference_and_an_adapter_are_held_against_what_they_were(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "dpo", {"model.reference": "reference", "evaluation": None})
    shutil.copytree(folder / "model", folder / "reference")
    assert run(folder, "train", "run.yaml")[0] == 0
    config(rms_norm_eps=0.01)(folder / "reference")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        "model.reference is 'reference'" in said,
        "config.json: rms_norm_eps was 1e-06 and is 0.01" in said,
    ) == (2, True, True), said
    config(rms_norm_eps=1e-6)(folder / "reference")
    other_weights(folder / "reference")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "model.reference is 'reference'" in said, "weights: lm_head.weight" in said) == (
        2,
        True,
        True,
    ), said


@pytest.mark.sample("train.jsonl*", seconds=0.8)
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model/model.safetensors", "weights: "),
        ("train.jsonl", "expected the prompts that the run began with"),
    ],
)
def test_before_the_first_checkpoint_start_and_prompts_are_what_the_ledger_knows(
    world: World, tmp_path: Path, file: str, words: str
) -> None:
    """A run without a checkpoint is refused if its start model or its prompts have changed, since the
    recorded rounds were sampled from them."""
    folder = make(world, tmp_path, "grpo", {"checkpoint.every": 2})
    code, said = run(
        folder, "train", "run.yaml", before=lambda: kill_at(*named("oat.learner.learner:Learner.update"), 1)
    )
    assert code == -signal.SIGKILL, said
    if file == "train.jsonl":
        write_jsonl(folder / file, [{"prompt": "9+9=", "answer": "b"}])
    else:
        other_weights(folder / "model")
    code, said = run(folder, "train", "run.yaml")
    assert (code, words in said) == (2, True), said


@pytest.mark.slow(instead="test_a_change_of_model_or_text_is_refused_by_file_and_field", seconds=1.5)
def test_the_start_may_go_where_nobody_reads_it_any_more(world: World, tmp_path: Path) -> None:
    """The start model of a run without a reference may change after the first checkpoint, since the
    checkpoint has every weight."""
    folder = make(world, tmp_path, "grpo")
    assert run(folder, "train", "run.yaml")[0] == 0
    other_weights(folder / "model")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "warning" in said) == (0, False), said


@pytest.mark.slow(instead="test_a_reference_and_an_adapter_are_held_against_what_they_were", seconds=1.4)
def test_a_distance_that_only_evaluations_measure_is_from_the_same_reference(
    world: World, tmp_path: Path
) -> None:
    folder = make(world, tmp_path, "grpo", {"evaluation.kl": True})
    assert run(folder, "train", "run.yaml")[0] == 0
    other_weights(folder / "model")
    for arguments in (("train", "run.yaml", "--stop.max_steps", 3), ("eval", "run")):
        code, said = run(folder, *arguments)
        assert (code, "weights: lm_head.weight" in said) == (2, True), said


@pytest.mark.slow(
    instead="test_before_the_first_checkpoint_start_and_prompts_are_what_the_ledger_knows", seconds=3.1
)
@pytest.mark.parametrize("is_removed", [False, True])
def test_runs_begun_before_go_on_with_one_warning(copy: Path, is_removed: bool) -> None:
    """A run of an earlier version has no record of its inputs, and continues with one warning. A run whose
    environment.json was removed cannot be told from it, and is treated alike."""
    entries = [
        {name: value for name, value in entry.items() if name != "inputs"} for entry in told(copy / "run")
    ]
    (copy / "run" / "environment.json").write_text(json.dumps(entries))
    if is_removed:
        (copy / "run" / "environment.json").unlink()
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "environment.json does not say what the run's model" in said,
    ) == (0, 1, True), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "warning" in said) == (0, False), said
    config(rms_norm_eps=0.01)(copy / "model")
    assert run(copy, "train", "run.yaml", "--stop.max_steps", 5)[0] == 2


MIXED = {
    "name": "mixture",
    "sources": [{"name": "reward_model", "path": "scores"}, {"name": "reward.py:reward", "weight": 0.5}],
}


@pytest.mark.parametrize(
    "oracle",
    [pytest.param({"name": "reward_model", "path": "scores"}, marks=pytest.mark.slow), MIXED],
    ids=["alone", "in a mixture"],
)
def test_a_reward_model_is_what_is_read_of_it(world: World, tmp_path: Path, oracle: dict[str, Any]) -> None:
    """A reward model that another program saved again counts as unchanged, without a warning. With another
    field it counts as another reward."""
    folder = make(world, tmp_path, "grpo", {"oracle": oracle, "evaluation": None})
    save_reward_model(
        folder / "scores",
        build_config("llama", vocab_rows=18),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    assert run(folder, "train", "run.yaml")[0] == 0
    by_another_program(folder / "scores")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "warning" in said) == (0, False), said
    config(rms_norm_eps=0.01)(folder / "scores")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "config.json" in said, ": rms_norm_eps was 1e-06 and is 0.01" in said) == (2, True, True), (
        said
    )
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert (code, rows(folder / "run")[-1]["oracle/changes"]) == (0, 1), said


def test_a_hub_model_is_what_is_read_of_its_commit(world: World, tmp_path: Path) -> None:
    """A model of the hub is compared by content. The folder of the cache and the commit may change."""
    import huggingface_hub.constants
    import transformers.utils.hub

    folder = make(world, tmp_path, "dpo", {"model.path": "org/name"})

    def published(cache: str, commit: str, change: Callable[[Path], None]) -> Callable[[], None]:
        place = folder / cache / "models--org--name"
        shutil.copytree(folder / "model", place / "snapshots" / commit)
        change(place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)

        def patch() -> None:
            for module in (huggingface_hub.constants, transformers.utils.hub):
                for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
                    if hasattr(module, name):
                        setattr(module, name, str(folder / cache))
            huggingface_hub.constants.HF_HUB_OFFLINE = True

        return patch

    code, said = run(folder, "train", "run.yaml", before=published("here", "a" * 40, lambda model: None))
    assert code == 0, said
    assert told(folder / "run")[0]["inputs"]["weights"]["model.path"]["is"]["weights"]
    code, said = run(
        folder,
        "train",
        "run.yaml",
        "--stop.max_steps",
        3,
        before=published("there", "b" * 40, by_another_program),
    )
    assert (code, "warning" in said) == (0, False), said
    code, said = run(
        folder,
        "train",
        "run.yaml",
        "--stop.max_steps",
        4,
        before=published("there", "c" * 40, config(rms_norm_eps=0.01)),
    )
    assert (
        code,
        "model.path is 'org/name'" in said,
        "config.json: rms_norm_eps was 1e-06 and is 0.01" in said,
    ) == (2, True, True), said
    code, said = run(
        folder, "train", "run.yaml", "--stop.max_steps", 4, before=published("there", "d" * 40, other_weights)
    )
    assert (code, "weights: lm_head.weight" in said) == (2, True), said
