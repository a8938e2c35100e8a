"""Messages about a whole configuration of TRL's: what they offer to copy trains as TRL does. Wrong values and
misspelt names of TRL's are not taken for right ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import oat

import oat as package
from oat.config.load import load_config, load_tree
from oat.config.peers.theirs import CLASSES, class_of, fields_of, version_of
from oat.config.peers.translated import rows_of, translated
from oat.config.peers.trl_defaults import by_default, is_endless
from oat.errors import ConfigError, did_you_mean
from oat.resolve.resolve import resolve

THEIRS = """\
model_name_or_path: models/tiny
dataset_name: prompts.jsonl
learning_rate: 2.0e-5
num_generations: 4
per_device_train_batch_size: 8
beta: 0.04
max_steps: 10
loss_type: dr_grpo
bf16: false
use_peft: false
"""
OURS = {
    "model": {"path": "models/tiny"},
    "algorithm": {
        "name": "dr_grpo",
        "samples": 4,
        "prompts": 2,
        "kl_coef": 0.04,
        "kl_unbiased": True,
        "advantage": "group_norm",
    },
    "sampling": {"max_new_tokens": 512},
    "prompts": {"path": "prompts.jsonl"},
    "learner": {"learning_rate": 2e-5, "schedule": "linear", "betas": [0.9, 0.999], "autocast": None},
    "stop": {"max_steps": 10},
}
BY_DEFAULT = {"sampling.max_new_tokens", "learner.schedule", "learner.betas", "render.template"}
"""The settings in it that the user did not give."""
MESSAGES = [{"role": "user", "content": "Hi"}]


def said(flags: str, tree: dict[str, Any]) -> str:
    """Return the message about a configuration."""
    with pytest.raises(ConfigError) as refused:
        resolve(*load_tree(tree, {(): "run.yaml"}, "run.yaml", flags.split()))
    return str(refused.value)


def of_file(tree: dict[str, Any], *flags: str) -> str:
    """Return the message about a file in the working directory."""
    Path("own.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        resolve(*load_config("own.yaml", flags))
    return str(refused.value)


def block(message: str) -> str:
    return re.split(r"\n(?=docs/)", message.partition("\nwrite")[2].partition(":\n")[2])[0]


def marked(text: str) -> set[str]:
    """Return the settings whose lines are marked."""
    found, sections = set(), [""]
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip()) - 2) // 2
        name = line.strip().partition(":")[0]
        sections[depth:] = [name]
        if line.endswith("# TRL's default"):
            found.add(".".join(sections))
    return found


@pytest.mark.parametrize("prompt", [MESSAGES, "Hi", None])
@pytest.mark.parametrize("section", ["", "args"])
def test_a_file_of_trl_is_answered_by_one_that_trains_as_it(here: Path, prompt: Any, section: str) -> None:
    if prompt is not None:
        Path("prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "x"}) + "\n")
    theirs = yaml.safe_load(THEIRS)
    message = said("", {section: theirs} if section else theirs)
    copied = block(message)
    template = {"render": {"template": "tokenizer"}} if prompt == MESSAGES else {}
    assert yaml.safe_load(copied) == {**OURS, **template}
    assert marked(copied) == {name for name in BY_DEFAULT if template or name != "render.template"}
    assert ("{template: tokenizer}" in message.rpartition(copied)[2]) == (prompt is None)
    tree = {**yaml.safe_load(copied), "oracle": {"name": "exact_match"}}
    assert resolve(*load_tree(tree, {(): "run.yaml"}, "run.yaml", [])).config.learner.schedule_steps == 10


def test_what_is_given_as_ours_is_not_given_by_default() -> None:
    theirs = {"args": {"num_generations": 4, "beta": 0.1, "max_steps": 3}, "seed": 7}
    ours = {"learner": {"schedule": "constant"}, "render": {"template": None}, "algorithm": {"name": "rloo"}}
    copied = yaml.safe_load(block(said("", {**theirs, **ours})))
    assert copied["learner"].keys() == {"schedule", "betas", "autocast"}
    assert copied["learner"]["schedule"] == "constant"
    assert copied["render"] == {"template": None}, "the block can be the whole file"
    assert copied["seed"] == 7
    assert copied["algorithm"].keys() == {"name", "samples", "kl_coef", "kl_unbiased", "prompts"}, "rloo's"


def test_a_few_names_get_no_defaults() -> None:
    tree: dict[str, Any] = {"prompts": {"path": "p"}, "learner": {"learning_rate": 1e-5}}
    several = "--beta 0.1 --num_generations 4 --max_steps 5"
    for flags, given in (("--beta 0.1", {}), ("--beta 0.1 --num_generations 4", {}), (several, tree)):
        message = said(flags, {**given, "algorithm": {"name": "grpo"}})
        assert "betas" not in message
        assert "render" not in message
    assert "--learner.betas" in block(said(several, {"algorithm": {"name": "grpo"}}))


def test_the_defaults_of_a_class_are_known_without_an_algorithm() -> None:
    for cls in CLASSES:
        ours = by_default(cls, [], None)
        assert ours["algorithm.name"] == CLASSES[cls]
        assert ours["learner.betas"] == [0.9, 0.999]
        rate = fields_of(cls)["learning_rate"]["default"]
        assert ours.get("learner.learning_rate", 1e-6) == rate
        assert ours["learner.schedule_steps"] is ...
    assert class_of(["num_generations", "beta"], None) == "GRPOConfig"
    assert class_of(["beta"], None) is None
    assert class_of(["max_steps"], "dpo") == "DPOConfig"
    assert not is_endless({"learner.schedule": "linear", "stop.max_steps": 1})


def test_objects_and_python_have_the_defaults_in_their_form() -> None:
    with pytest.raises(ConfigError) as refused:
        package.Trainer(
            model="m",
            oracle="exact_match",
            prompts=[{"prompt": MESSAGES, "answer": "x"}],
            algorithm={"name": "grpo"},
            args={"num_generations": 4, "beta": 0.1, "max_steps": 5},
        )
    given = eval(f"dict({block(str(refused.value))}\n)", {})
    assert given["learner"] == {"schedule": "linear", "betas": [0.9, 0.999], "autocast": "bfloat16"}
    assert given["algorithm"]["samples"] == 4
    assert given["render"] == {"template": "tokenizer"}


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ("--temperature hot --num_generations 4", "sampling.temperature"),
        ("--beta abc --num_generations 4", "algorithm.kl_coef"),
        ("--num_iterations 1.5 --num_generations 4", "algorithm.epochs"),
        ("--learning_rate true --num_generations 4", "learner.learning_rate"),
        ("--per_device_train_batch_size many --num_generations 4", "algorithm.prompts"),
        ("--loss_type Grpo --num_generations 4", "algorithm.name"),
        ("--loss_type dr-grpo --num_generations 4", "algorithm.name"),
        ("--scale_rewards Batch --num_generations 4", "algorithm.advantage"),
        ("--kl_weight much --num_generations 4", "algorithm.kl_coef"),
    ],
)
def test_a_wrong_value_is_not_copied(flags: str, wrong: str) -> None:
    message = said(flags, {"algorithm": {"name": "grpo"}})
    field, value = re.findall(r"--(\w+) (\S+)", flags)[0]
    assert block(message).split("\n")[0].strip() == "--algorithm.samples 4"
    assert re.search(rf"\nwrite \(correct {field} yourself\)", message)
    shown = "..." if value in ("hot", "abc", "many", "much") else value  # any text may be a secret
    assert wrong in next(line for line in message.splitlines() if f"--{field} {shown} " in line)
    alone = said(flags.partition(" --")[0], {"algorithm": {"name": "grpo"}})
    assert f"{value}`" not in alone.partition("; ")[2]


@pytest.mark.parametrize(("given", "meant"), [("Grpo", "grpo"), ("dr-grpo", "dr_grpo"), ("bnpoo", "bnpo")])
def test_a_value_that_is_nearly_one_is_proposed(given: str, meant: str) -> None:
    assert f"`{meant}`" in said(f"--loss_type {given}", {"algorithm": {"name": "grpo"}})


@pytest.mark.parametrize(
    ("tree", "proposed"),
    [
        (
            {"args": {"num_generation": 4, "max_completion_len": 8}},
            {"num_generation": "algorithm.samples", "max_completion_len": "sampling.max_new_tokens"},
        ),
        (
            {"learner": {"learning_rat": 1, "schedul": "linear"}},
            {"learning_rat": "learner.learning_rate", "schedul": "learner.schedule"},
        ),
        (
            {"num_generation": 4, "beta": 0.1, "unheard_of": 1},
            {"num_generation": "algorithm.samples", "beta": "algorithm.kl_coef"},
        ),
    ],
)
def test_every_misspelt_name_is_answered(tree: dict[str, Any], proposed: dict[str, str]) -> None:
    lines = said("", {**tree, "algorithm": {"name": "grpo"}}).partition("\nwrite")[0].splitlines()[1:]
    told = {line.split(":")[0].strip(): line.partition(" -> ")[2] for line in lines}
    assert told.keys() == proposed.keys()
    for name, setting in proposed.items():
        assert setting in told[name]


def test_a_remark_is_there_if_it_matters() -> None:
    def line(field: str, value: Any, **others: Any) -> str:
        leaves = [((name,), each) for name, each in {field: value, "num_generations": 4, **others}.items()]
        return translated("run.yaml:1", leaves, "grpo").splitlines()[1]

    for field, value in (("loss_type", "dr_grpo"), ("lr_scheduler_type", "constant"), ("max_steps", 8)):
        assert not line(field, value).endswith(")"), field
    assert line("lr_scheduler_type", "cosine").endswith(")")
    assert line("max_steps", 8, num_iterations=2).endswith(")")
    sizes = {"gradient_accumulation_steps": 1, "steps_per_generation": 4}
    assert line("loss_type", "dapo", **sizes).endswith(")")
    assert not line("loss_type", "dapo").endswith(")")


def test_the_version_is_said_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--beta", "1"], ["--beta", "1", "--num_generations", "4"]):
        assert oat("train", "run.yaml", *flags) == 2
        assert capsys.readouterr().err.count(version_of("TRL")) == 1


def test_a_good_proposal_has_no_long_list_behind_it() -> None:
    names = [f"name_{number}" for number in range(40)]
    assert did_you_mean("naem_39", names).count("name_") == 1
    assert did_you_mean("xyz", names).count("name_") > 1
    assert did_you_mean("beat", ["beta", "alpha"]).count("alpha") == 1


def test_recorded_pairs_and_an_adapter_of_trl_are_complete() -> None:
    theirs = "model_name_or_path: m\ndataset_name: p\nbeta: 0.2\nmax_length: 64\nuse_peft: true\nlora_r: 4\n"
    message = said("", yaml.safe_load(theirs))
    copied = yaml.safe_load(block(message))
    assert copied["oracle"] == {"name": "recorded"}
    assert copied["model"] == {"path": "m", "lora": {"rank": 4, "alpha": 32}}
    assert copied["algorithm"] == {"name": "dpo", "beta": 0.2, "prompts": 8}
    assert "\nwrite (choose learner.schedule_steps yourself):" in message
    verl = {"data": {"train_files": "p", "train_batch_size": 4, "max_prompt_length": 8}}
    assert "{template: tokenizer}" in said("", verl)
    assert "{template: tokenizer}" not in said("", {**verl, "render": {"template": None}})


@pytest.mark.parametrize("own", ["sft", {"name": "sft", "epochs": 2}])
def test_the_lines_of_a_file_keep_the_sections_that_they_replace(here: Path, own: Any) -> None:
    """A section that is its part alone gets the part's name, and a section its own fields."""
    mine = {"model": "m", "prompts": "p", "oracle": "recorded", "algorithm": own}
    theirs = {"args": {"max_length": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-5}}
    learner = {"betas": [0.5, 0.6], "weight_decay": 0.3}
    copied = yaml.safe_load(block(of_file({**mine, "learner": learner, **theirs})))
    named = own if isinstance(own, dict) else {"name": own}
    assert copied["algorithm"].items() >= {**named, "prompts": 4}.items()
    assert copied["prompts"]["path"] == "p"
    assert copied["learner"].items() >= {**learner, "learning_rate": 1e-5}.items()
    within = of_file({**mine, "learner": {**learner, "lr": 1e-5, "lr_scheduler_type": "linear"}})
    assert yaml.safe_load(block(within))["learner"].items() >= learner.items()


@pytest.mark.parametrize(
    "field",
    [
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"accelerator_config": {"split_batches": True}},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"model_init_kwargs": {"attn_implementation_": "x"}},
        {"lr_scheduler_kwargs": {"min_lr": 0.1}},
        {"fsdp_config": {"min_num_params": 1}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_within_a_field_that_a_table_has_get_its_row(field: dict[str, Any]) -> None:
    [(name, inner)] = field.items()
    reason = rows_of((name,), "grpo")[0].remark[1:].rstrip(".")
    for args in (field, {**field, "learning_rate": 1e-5}, {"learning_rate": 1e-5, "beta": 0.1, **field}):
        message = said("", {"args": args, "algorithm": {"name": "grpo"}})
        assert reason in message
        assert not any(f"`{each}`" in message for each in inner)
    both = said("", {"args": {"model_init_kwargs": {"torch_dtype": "bfloat16", "token": "x"}}})
    assert "autocast: bfloat16" in both
    assert "model_init_kwargs " in both


def test_a_setting_of_ours_of_another_algorithm_is_no_name_of_a_peers(here: Path) -> None:
    tree = {"model": "m", "prompts": "p", "oracle": "recorded", "algorithm": {"name": "grpo", "kl_coef": 0.1}}
    message = of_file(tree, "--algorithm", "dpo")
    assert "is read by grpo" in message
    assert "kl_ctrl" not in message
    beside = of_file({**tree, "algorithm": {"name": "dpo", "num_generations": 4, "kl_coef": 0.1}})
    assert "`algorithm.kl_coef` is read by grpo" in beside
    assert "no table" not in beside


def test_a_value_in_place_of_a_section_is_answered_in_its_form() -> None:
    assert "--learner.field" in said("--learner 1e-5", {})
    assert "--" not in said("", {"learner": 1e-5})
