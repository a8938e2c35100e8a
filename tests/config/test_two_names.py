"""What is said of two names of TRL's that meet: in one setting, or in one name at two places."""

import itertools
import random
import re
from typing import Any

import pytest
import yaml
from trl_meaning import RANDOM, drawn

from oat.config.load import load_tree
from oat.config.peers.answer import Leaf
from oat.config.peers.theirs import CLASSES
from oat.config.peers.translated import rows_of, settings_of, translated
from oat.errors import ConfigError

OTHERS: dict[str, list[Any]] = {
    "report_to": ["wandb"],
    "project": ["tuning"],
    "wandb_project": ["mine"],
    "wandb_entity": ["we"],
    "run_name": ["first"],
    "dataset_name": ["org/a"],
    "dataset_path": ["org/b"],
    "dataset_config": ["main"],
    "eval_strategy": ["steps"],
    "eval_steps": [7, 0.5],
    "eval_every": [9],
    "warmup_ratio": [0.1],
    "activation_checkpointing": [True, False],
    "lr_scheduler_type": ["cosine_with_min_lr"],
    "lr_scheduler_kwargs": [{"min_lr_rate": 0.1}],
    "torch_dtype": ["bfloat16", "float32"],
    "data_seed": [42, 7],
    "packing": [True],
    "batch_size": [3],
    "lr": [3e-5, 0.5],
    "max_new_tokens": [256, 99],
    "use_peft": [True],
    "lora_r": [4],
    "lora_rank": [4, 9],
    "delta": [4.0],
    "clip_range": [0.1],
    "loss_type": ["ipo"],
}
"""Fields that share a setting with others, and which a random configuration seldom has."""


def leaves(fields: dict[str, Any]) -> list[Leaf]:
    return [((name,), value) for name, value in fields.items()]


def pairs(algorithm: str, cls: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return all pairs of fields of a class that have a setting in common, with values."""
    known = {**RANDOM[""], **RANDOM[cls]}
    fields = {name: known.get(name, []) + OTHERS.get(name, []) for name in {**known, **OTHERS}}
    named = {name: {each for row in rows_of((name,), algorithm) for each in row.settings} for name in fields}
    return [
        ({one: value}, {other: second})
        for one, other in itertools.combinations(fields, 2)
        if named[one] & named[other]
        for value, second in itertools.product(fields[one], fields[other])
    ]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_value_is_said_by_other_names_only_if_they_say_it(cls: str) -> None:
    algorithm = CLASSES[cls]
    found = pairs(algorithm, cls)
    assert len(found) > 50
    for one, other in found:
        both = leaves({**one, **other})
        ours = settings_of(both, algorithm)
        assert ours == settings_of(both[::-1], algorithm), (one, other)
        message = translated("run.yaml:1", both, algorithm)
        said = {line.split()[0].rstrip(":"): line for line in message.splitlines() if " -> " in line}
        for field in (one, other):
            ((name, value),) = field.items()
            alone = settings_of(leaves(field), algorithm)
            differing = {each for each in alone if alone[each] is not ... and alone[each] != ours.get(each)}
            if differing and value is not True:
                assert not said[name].endswith("said by the other names"), (one, other)


def test_the_order_of_names_means_nothing() -> None:
    draw = random.Random(5)
    for cls, algorithm in CLASSES.items():
        for _ in range(10):
            given = list(
                {**drawn(cls, draw), "activation_checkpointing": True, "lr": 0.5, "steps": 3}.items()
            )
            expected = settings_of(leaves(dict(given)), algorithm)
            assert settings_of(leaves(dict(given[::-1])), algorithm) == expected


def message(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        load_tree(tree, {(): "run.yaml"}, "run.yaml", [])
    return str(refused.value)


def written(tree: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the block of a message as settings in sections, and what it leaves to the user."""
    found = re.search(r"\nwrite(?: \((.*?)\))?:\n((?:  .*\n?)*)", message(tree))
    assert found is not None
    return yaml.safe_load(found[2]), found[1] or ""


OWN = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "oracle": {"name": "recorded"}}
TOGETHER: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "sft",
        {"report_to": "wandb", "project": "tuning"},
        {"tracking": {"sinks": [{"name": "wandb", "project": "tuning"}]}},
        "",
    ),
    (
        "sft",
        {"wandb_entity": "we", "wandb_project": "tuning", "report_to": ["wandb", "mlflow"]},
        {"tracking": {"sinks": [{"name": "wandb", "project": "tuning", "entity": "we"}, "mlflow"]}},
        "",
    ),
    ("grpo", {"dataset_name": "o/n", "dataset_config": "main"}, {"prompts": {"path": "o/n@main"}}, ""),
    ("grpo", {"importance_sampling_level": "sequence", "delta": 4.0}, {}, ""),
    ("sft", {"eval_strategy": "steps", "eval_steps": 0.37}, {}, "evaluation.every"),
    ("sft", {"max_steps": 500, "warmup_ratio": 0.1}, {"learner": {"warmup_steps": 50}}, ""),
    ("sft", {"max_steps": 500, "eval_strategy": "steps", "eval_steps": 0.5},
     {"evaluation": {"every": 250}}, ""),
    ("grpo", {"max_completion_length": 512, "generation_kwargs": {"max_new_tokens": 99}},
     {"sampling": {"max_new_tokens": 99}}, ""),
    ("sft", {"activation_checkpointing": True, "gradient_checkpointing": False},
     {"learner": {"gradient_checkpointing": True}}, ""),
    ("sft", {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "learning_rate": 1e-5, "max_grad_norm": 1.0},
     {"learner": {"schedule": "linear"}}, "schedule_steps"),
    ("sft", {"packing": True, "per_device_train_batch_size": 2}, {"algorithm": {"prompts": 2}}, "packing"),
    ("sft", {"seed": 42, "accelerator_config": {"seed": 1}}, {"seed": 42}, ""),
    ("sft", {"lr": 0.5, "learning_rate": 0.1}, {"learner": {"learning_rate": 0.1}}, "work out lr"),
]  # fmt: skip
"""An algorithm, fields in a section of arguments, a part of what is to be written, and of what is left."""


def test_two_names_are_worked_out_together() -> None:
    for algorithm, fields, expected, open_ones in TOGETHER:
        for given in (fields, dict([*fields.items()][::-1])):
            block, left = written({**OWN, "algorithm": {"name": algorithm}, "args": given})
            for section, part in expected.items():
                found = block[section]
                known = {name: found.get(name) for name in part} if isinstance(part, dict) else found
                assert known == part, given
            assert open_ones in left, (given, left)
    lost = message({**OWN, "algorithm": {"name": "grpo"}, "args": TOGETHER[3][1]})
    assert "delta: 4.0 -> no setting beside importance_sampling_level" in re.sub(" +", " ", lost)


def test_a_least_rate_as_here_does_not_differ() -> None:
    kind = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5}
    own = {**OWN, "algorithm": {"name": "sft"}}
    for options, differs in (({"min_lr_rate": 0.1}, False), ({"min_lr": 1e-6}, False), ({"min_lr": 0}, True)):
        said = message({**own, "args": {**kind, "lr_scheduler_kwargs": options}})
        (line,) = (each for each in said.splitlines() if each.split()[:1] == ["lr_scheduler_type:"])
        assert line.endswith(")") == differs


def test_what_trl_ignores_is_conditional_alone_too() -> None:
    said = message({**OWN, "algorithm": {"name": "grpo"}, "args": {"ref_model_mixup_alpha": 0.9}})
    assert said.index("without sync_ref_model") < said.index("model.reference_update.mix")


def test_a_flat_file_is_answered_whole() -> None:
    """Names that no table has are told, sections say nothing about names beside them, and what a run needs
    is left to the user."""
    given = {
        "model_name_or_path": "o/n",
        "seed": 42,
        "num_generations": 8,
        "learning_rate": 1e-5,
        "foo_bar_baz": 3,
        "dataset_prompt_column": "problem",
        "dataset_mixture": {"seed": 0, "datasets": [{"id": "a/b"}]},
        "preprocessing_num_workers": 4,
        "quux": {"seed": 1, "learning_rate": 0.5},
    }
    for tree in (given, dict([*given.items()][::-1])):
        said = message(tree)
        assert "`foo_bar_baz`" in said
        assert "`quux`" in said
        block, left = written(tree)
        assert block["seed"] == 42
        assert block["learner"]["learning_rate"] == 1e-5
        assert block["prompts"]["prompt_key"] == "problem"
        assert "prompts.path" in left
        assert "model.path" not in left
