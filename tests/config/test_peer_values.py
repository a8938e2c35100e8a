"""What a message says to write in place of another library's name is accepted, and means the same."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scored_groups import feedback
from shaped import made, prepared

import oat as package
from oat.config.load import load_tree
from oat.config.peers.copied import MARK
from oat.config.peers.table import UNNAMED, Row, family_of, rows
from oat.config.peers.theirs import trl_fields
from oat.errors import ConfigError
from oat.plugins.registry import ALGORITHMS
from oat.resolve.resolve import resolve

TRL = trl_fields()
FAMILIES = {"GRPO": "grpo", "ppo": "grpo", "DPO": "dpo", "dpo": "dpo", "SFT": "sft", "sft": "sft"}
FAMILIES |= {"Reward": "reward_model", "rm": "reward_model"}
OWN = {"pairs": "dpo", "sft": "sft", "reward": "reward_model", "group": "grpo"}
"""Our algorithm for each family of them."""
"""Our algorithm for the beginning of a group's name."""
CHOSEN: dict[str, Any] = {
    "evaluation.path": "held.jsonl",
    "evaluation.pairs": "held.jsonl",
    "evaluation.oracle": "exact_match",
    "evaluation.every": 5,
    "render.template": "tokenizer",
    "model.lora": {},
    "model.lora.targets": ["q_proj"],
    "algorithm.clip_high": 4.0,
    "sampling.max_new_tokens": 64,
    "stop.max_steps": 100,
    "algorithm.kl_coef": 0.1,
    "algorithm.kl_reward_coef": 0.1,
    "algorithm.kl_target": 0.1,
    "algorithm.samples": 4,
    "algorithm.tokens.covariance_clip": 0.1,
    "algorithm.tokens.covariance_kl": 0.1,
    "algorithm.rewards.overlong_from": 100,
    "algorithm.rewards.overlong_to": 200,
    "compute.gpus": 2,
    "compute.memory_gb": 8,
    "oracle.sources": [{"name": "exact_match"}, {"name": "length"}],
}
"""Values for the settings that a row leaves to the user."""
SAMPLES: tuple[Any, ...] = (2, 1000, 0.5, 0.1, "k2", "linear", "grpo", "x", ["wandb"], [0.5, 0.9], True)
"""Values for a name that takes any; for each of them one at least is accepted."""


def algorithms_of(row: Row) -> list[str]:
    """Return the algorithms for which a row is meant."""
    found = []
    for group in row.groups:
        cls, _, own = group.partition(":")
        fitting = [FAMILIES[begin] for begin in FAMILIES if cls.startswith(begin)]
        every = ["grpo", "dpo", "sft", "reward_model"] if cls == "TrainingArguments" else []
        found += [OWN.get(own, own)] if own else every or fitting or ["grpo"]
    return list(dict.fromkeys(found))


def values_of(row: Row) -> Iterator[Any]:
    """Yield the values that a row names, and TRL's default of its field."""
    for entry in row.conversion.split("; ") if " -> " in row.conversion else []:
        key = entry.split(" -> ")[0]
        if key not in UNNAMED:
            try:
                yield json.loads(key)
            except ValueError:
                yield key
    for group in row.groups if row.peer == "TRL" else []:
        field = TRL.get(group.partition(":")[0], {}).get(row.field, {})
        if "default" in field:
            yield field["default"]


def refusal(ours: dict[str, Any], algorithm: str) -> str:
    """Return why a small configuration with these settings is refused; "": it is accepted."""
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "prompts": {"path": "train.jsonl"},
        "oracle": {"name": "exact_match" if family_of(algorithm) == "group" else "recorded"},
        "algorithm": {"name": algorithm},
        "stop": {"max_steps": 2000},
    }
    for setting, value in ours.items():
        *sections, last = setting.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = CHOSEN[setting] if value is ... else value
    try:
        resolve(*load_tree(tree, {(): "run.yaml"}, "run.yaml", []))
    except ConfigError as error:
        return str(error)
    return ""


def check(row: Row) -> None:
    """Every value of a row that becomes settings gives a configuration that is accepted."""
    for algorithm in algorithms_of(row):
        for value in values_of(row):
            ours = row.converted(value, algorithm)
            assert not ours or not refusal(ours, algorithm), (row, value, refusal(ours, algorithm))
        takes_any = row.conversion in ("=", "whole") or "*" in row.conversion or "list -> " in row.conversion
        if takes_any and row.settings[0] not in ("oat.Trainer(callbacks)", "model.adapter"):
            given = [row.converted(value, algorithm) for value in SAMPLES]
            said = [refusal(ours, algorithm) if ours else "" for ours in given]
            assert "" in said, (row, algorithm, said)


@pytest.mark.sample("0", seconds=4)
@pytest.mark.parametrize("part", range(12))
def test_what_a_row_says_to_write_is_accepted(part: int) -> None:
    for row in rows()[part::12]:
        check(row)


def whole(cls: str) -> dict[str, Any]:
    """Return every field of one of TRL's classes, with its default."""
    fields = {**TRL["TrainingArguments"], **TRL[cls]}
    return {name: what["default"] for name, what in fields.items()}


LOSSES = {row.groups[0]: list(values_of(row)) for row in rows() if row.field == "loss_type"}


@pytest.mark.parametrize("cls", ["GRPOConfig", "DPOConfig", "RewardConfig", "SFTConfig"])
def test_all_fields_of_a_class_together_are_accepted(cls: str) -> None:
    """Every field with its default, and so with each loss and with fields that a loss does not read."""
    (algorithm,) = (FAMILIES[begin] for begin in FAMILIES if cls.startswith(begin))
    others = {"GRPOConfig": {"delta": 2.0, "importance_sampling_level": "sequence", "beta": 0.1}}
    others["DPOConfig"] = {"label_smoothing": 0.1, "ld_alpha": 0.5, "sync_ref_model": True}
    for loss in LOSSES.get(cls, [None]):
        for changed in ({}, others.get(cls, {})):
            losses = {} if loss is None else {"loss_type": loss}
            ours = flat(copied({**whole(cls), **losses, **changed}, algorithm))
            name = ours.pop("algorithm.name", algorithm)
            assert not refusal({"algorithm.name": name, **ours}, name), (loss, changed, ours)


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the settings of a tree by their dotted names, without those that are the user's to choose."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{above}{name}.")
        elif value is not ... or f"{above}{name}" in CHOSEN:
            found[f"{above}{name}"] = value
    return found


@dataclasses.dataclass
class GRPOConfig:
    """Stands for TRL's: fields that the user gives, and others that its constructor makes of them."""

    loss_type: str = "dapo"
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    importance_sampling_level: str = "token"
    bf16: bool | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_generations: int = 8
    report_to: str | list[str] = "none"
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0

    def __post_init__(self) -> None:
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("not both")
        self.bf16 = True if self.bf16 is None else self.bf16
        self.report_to = [] if self.report_to in ("none", []) else self.report_to
        rows_per_pass = self.per_device_train_batch_size
        if self.generation_batch_size is not None:
            self.steps_per_generation = self.generation_batch_size // rows_per_pass
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        self.generation_batch_size = rows_per_pass * self.steps_per_generation


GRPOConfig.__module__ = "trl.trainer.grpo_config"  # the constructors of other modules are not called


@dataclasses.dataclass
class DPOConfig:
    loss_type: list[str] = dataclasses.field(default_factory=lambda: ["sigmoid"])
    beta: float = 0.1
    label_smoothing: float = 0.0


DPOConfig.__module__ = "trl.trainer.dpo_config"


def copied(args: Any, algorithm: str = "grpo", *, with_defaults: bool = False) -> dict[str, Any]:
    """Return what the message about TRL's arguments says to write in Python, and TRL's defaults if asked."""
    with pytest.raises(ConfigError) as refused:
        package.Trainer(
            model="m", oracle="exact_match", prompts="p", args=args, algorithm={"name": algorithm}
        )
    said = str(refused.value).partition("\nwrite")[2].partition("\ndocs/")[0]
    lines = said.splitlines()
    said = "\n".join(line for line in lines if with_defaults or not line.endswith(MARK))
    given: dict[str, Any] = eval(f"dict({said[said.index(':') + 1 :]})", {})
    if given.get("prompts") == {"path": "p"}:  # it is the user's own
        del given["prompts"]
    chosen = re.match(r" \(choose (.*?)(, and work| yourself)", said)
    for setting in chosen[1].split(", ") if chosen else []:
        *sections, last = setting.split(".")
        inner = given
        for section in sections:
            inner = inner.setdefault(section, {})
        inner.setdefault(last, ...)
    if not with_defaults:
        given.get("learner", {}).pop("schedule_steps", None)
        if given.get("algorithm", {}).get("clip_high") is ...:
            del given["algorithm"]["clip_high"]
    return {name: section for name, section in given.items() if section != {}}


SCORES = ((1.0, 4.0, 0.5), (2.0, 2.5, 9.0), (0.0, 1.0, 0.25))
OTHERS = ((0.5, 0.0, 3.0), (5.0, 1.0, 1.5), (0.0, 2.0, 8.0))
"""Scores of two reward functions: three groups of three responses."""


def of_trl(scale: str, aggregation: str) -> torch.Tensor:
    """Return the advantages of TRL's GRPOTrainer, (9,)."""
    both = torch.tensor([SCORES, OTHERS])
    mean, std = both.mean(2, keepdim=True), both.std(2, keepdim=True)
    if aggregation == "normalize_then_sum":
        summed = ((both - mean) / (std + 1e-4)).sum(0)
        return ((summed - summed.mean()) / (summed.std() + 1e-4)).flatten()
    rewards = both.sum(0)
    own = rewards - rewards.mean(1, keepdim=True)
    divisors = {"group": rewards.std(1, keepdim=True), "batch": rewards.std()}
    return (own / (divisors[scale] + 1e-4) if scale != "none" else own).flatten()


def of_oat(options: dict[str, Any]) -> list[float]:
    """Return the advantages of responses with the settings of an algorithm."""
    name = options.pop("name")
    given_in_run = {"max_length": 8} if name == "dr_grpo" else {}
    objective = made(name, **{"advantage": ALGORITHMS[name].Config().advantage, **given_in_run, **options})
    summed = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(SCORES, OTHERS, strict=True)]
    given = feedback(*summed)
    items = [
        dataclasses.replace(item, answer=dataclasses.replace(item.answer, sources={"a": one, "b": other}))
        for item, one, other in zip(given.items, SCORES, OTHERS, strict=True)
    ]
    found: list[float] = (
        prepared(objective, dataclasses.replace(given, items=tuple(items))).columns["advantages_N"].tolist()
    )
    return found


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_advantages_are_those_of_trl(loss_type: str) -> None:
    for scale, aggregation in itertools.product(
        ("group", "batch", "none"), ("sum_then_normalize", "normalize_then_sum")
    ):
        options = copied(GRPOConfig(loss_type, scale, aggregation))["algorithm"]
        expected = of_trl(scale, aggregation).tolist()
        assert of_oat(options) == pytest.approx(expected, abs=1e-5), (scale, aggregation)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"beta": 0.04}, {"name": "grpo", "reduction": "token", "kl_coef": 0.04, "kl_unbiased": True}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.3},
            {"name": "cispo", "clip_high": 4.0},
        ),
        (
            {"epsilon": 0.1, "epsilon_high": 0.28},
            {"name": "grpo", "reduction": "token", "clip_low": 0.1, "clip_high": 0.28},
        ),
        (
            {"loss_type": "luspo", "epsilon": 0.1, "importance_sampling_level": "sequence"},
            {"name": "luspo", "policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.1},
        ),
        (
            {"steps_per_generation": 8, "gradient_accumulation_steps": 2},
            {"name": "grpo", "reduction": "token", "prompts": 8, "minibatches": 4},
        ),
        (
            {"generation_batch_size": 32, "num_generations": 4},
            {"name": "grpo", "reduction": "token", "prompts": 8, "minibatches": 4, "samples": 4},
        ),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask"},
            {"name": "grpo", "reduction": "token"},
        ),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_clip_max": 2.0,
                "vllm_importance_sampling_mode": "token_mask",
            },
            {
                "name": "grpo",
                "reduction": "token",
                "correction": {"form": "mask", "level": "token", "low": 0.0, "high": 2.0},
            },
        ),
    ],
)
def test_an_object_is_worked_out_as_a_whole(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What the user set is there, and nothing that the constructor made of it."""
    assert copied(GRPOConfig(**given)) == {"algorithm": expected}


def test_the_class_of_an_object_decides_the_algorithm() -> None:
    assert copied(DPOConfig(beta=0.2)) == {"algorithm": {"name": "dpo", "beta": 0.2}}
    assert copied(DPOConfig(loss_type=["ipo"], beta=0.2)) == {"algorithm": {"name": "ipo", "beta": 0.2}}


@pytest.mark.parametrize("last", ["steps", "num_samples", "dataset", "batch_size", "max_length", "epochs"])
def test_a_name_in_a_section_aside_is_no_setting_of_learning(last: str) -> None:
    for section in ("evaluation", "checkpoint"):
        with pytest.raises(ConfigError) as refused:
            package.Trainer(model="m", oracle="exact_match", prompts="p", **{section: {last: 5}})
        said = str(refused.value)
        for setting in ("stop.max_steps", "algorithm.samples", "algorithm.prompts", "prompts.path"):
            assert f"is `{setting}" not in said, said


def test_a_field_of_another_algorithm_is_not_proposed_to_itself() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(*load_tree(TREE_OF_AOT, {(): "run.yaml"}, "run.yaml", []))
    assert "did you mean" not in str(refused.value)
    assert "robust_dpo" in str(refused.value)


TREE_OF_AOT = {
    "model": {"path": "m"},
    "prompts": {"path": "p"},
    "oracle": {"name": "recorded"},
    "algorithm": {"name": "aot", "label_smoothing": 0.1},
}


def test_an_unknown_field_of_arguments_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        package.Trainer(model="m", oracle="exact_match", prompts="p", args={"unheard_of": 1})
    assert "`args.unheard_of`" in str(refused.value)
    assert "did you mean" not in str(refused.value)
