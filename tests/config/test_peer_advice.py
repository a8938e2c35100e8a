"""The advice on other libraries' names holds for the algorithm, and gives values that are read."""

import itertools
import re
from typing import Any

import pytest
import yaml

from oat.config.load import load_tree
from oat.config.peers.table import is_read, rows
from oat.config.peers.theirs import CLASSES, fields_of
from oat.config.peers.translated import rows_of
from oat.config.yaml_text import Loader
from oat.errors import ConfigError

_SETTING = re.compile(r"`((?:algorithm|evaluation|sampling)\.[a-z_.]+)")
_OF_PAIRS = ("evaluation.oracle", "evaluation.path", "sampling.")
"""What a reward model has no use for: it draws no responses."""
_SAYS_WITH_WHICH = re.compile(
    r"[Ff]or `(algorithm.name: )?[a-z_]+`|of `[a-z_]+`|`evaluation.pairs` needs none"
)


def test_a_remark_names_settings_that_the_algorithm_of_its_class_reads() -> None:
    asked = 0
    for cls, ours in CLASSES.items():
        trainer = f"{cls.removesuffix('Config')}Trainer"
        fields = [row.field for row in rows() if {cls, trainer} & {*row.groups}]
        for field in {*fields_of(cls), *fields} - {"model", "args"}:
            (row, *others) = rows_of((field,), ours) or (None,)
            assert not others
            if row is None or _SAYS_WITH_WHICH.search(row.remark):
                continue
            for setting in {*row.settings, *_SETTING.findall(row.remark)}:
                assert is_read(setting, ours), (field, ours, row.remark)
                assert not (ours == "reward_model" and setting.startswith(_OF_PAIRS)), (field, row.remark)
                asked += 1
    assert asked > 300


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tree(tree, {(): "run.yaml"}, "run.yaml", [])
    return str(caught.value)


def block_of(said: str) -> dict[str, Any]:
    """Return the block that a message offers to copy, as a tree."""
    lines = re.split(r"\nwrite[^\n]*:\n", said)[1].split("\n")
    return yaml.load("\n".join(itertools.takewhile(lambda line: line.startswith("  "), lines)), Loader=Loader)  # type: ignore[no-any-return]


BEGUN: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "prompts": {"path": "train.jsonl"},
    "oracle": {"name": "recorded"},
    "algorithm": {"name": "sft"},
    "stop": {"max_steps": 1},
}


@pytest.mark.parametrize(
    ("given", "render"),
    [
        ({"chat_template_path": "org/name"}, None),
        ({"chat_template_path": "folder"}, None),
        ({"chat_template_path": "a/b.jinja"}, {"template": "a/b.jinja"}),
        ({"chat_template": "{% for each in messages %}{% endfor %}"}, None),
        ({"chat_template": "{{ x }}.jinja"}, None),
        ({"chat_template": "chatml"}, {"template": "chatml"}),
        ({"system_prompt": "Be kind"}, {"system": "Be kind", "template": "tokenizer"}),
        (
            {"system_prompt": "Be kind", "chat_template": "chatml"},
            {"system": "Be kind", "template": "chatml"},
        ),
        (
            {"system_prompt": "Be kind", "render": {"template": "chatml"}},
            {"system": "Be kind", "template": "chatml"},
        ),
    ],
)
def test_templates_are_proposed_only_in_a_form_that_is_read(
    given: dict[str, Any], render: dict[str, str] | None
) -> None:
    said = refusal({**BEGUN, **given, "learning_rate": 1e-5})
    assert block_of(said).get("render") == render
    alone = refusal({**BEGUN, **given})
    assert ("`render.template`" in alone) == (render is None) or len(given) > 1
    whole = {"num_generations": 4, "max_steps": 3, "learning_rate": 1e-5, "dataset_name": "org/data"}
    assert "add render" in refusal(whole)
    assert "add render" not in refusal({**given, **whole})


def test_fields_within_a_field_of_another_library_are_not_looked_up_alone() -> None:
    inner = {"train_batch_size": "auto", "seed": 3, "learning_rate": 1}
    for name in ("deepspeed", "fsdp_config", "accelerator_config", "lr_scheduler_kwargs"):
        assert "train_batch_size" not in refusal({**BEGUN, name: inner})
    assert "`sampling.temperature`" in refusal({**BEGUN, "generation_kwargs": {"temperature": 0.5}})


def test_the_section_algorithm_of_verl_needs_no_name() -> None:
    theirs = {"adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.01}, "gamma": 1.0}
    alone = refusal({**BEGUN, "algorithm": theirs})
    ours = {"name": "grpo", "reduction": "token", "kl_reward_coef": 0.01}
    assert block_of(alone)["algorithm"] == {**ours, "gamma": 1.0}
    whole = refusal({"algorithm": theirs, "data": {"train_batch_size": 8}})
    assert block_of(whole)["algorithm"] == {**ours, "gamma": 1.0, "prompts": 8}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"use_kl_loss": True}, {"kl_coef": 0.01}),
        ({"kl_estimator": "k3", "use_kl_loss": True}, {"kl_coef": 0.01, "kl_estimator": "k3"}),
        ({"kl_estimator": "k3"}, {"kl_reward_coef": 0.01, "kl_reward_estimator": "k3"}),
    ],
)
def test_the_kl_of_openrlhf_is_where_its_switch_puts_it(given: dict[str, Any], ours: dict[str, Any]) -> None:
    said = refusal({**BEGUN, "algorithm": {"name": "grpo"}, "init_kl_coef": 0.01, **given})
    assert block_of(said)["algorithm"] == {**ours, "name": "grpo"}
