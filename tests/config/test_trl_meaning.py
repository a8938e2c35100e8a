"""What a message offers to copy for a whole configuration of TRL's means what TRL does with it."""

import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl_meaning import RECORDS, drawn, group, recorded

from oat.config.load import dump, load_tree
from oat.config.peers.faults import RANGES
from oat.config.peers.our_defaults import default_of
from oat.config.peers.theirs import CLASSES, fields_of
from oat.errors import ConfigError
from oat.resolve.resolve import resolve

CHOSEN = {"learner.schedule_steps": 77, "evaluation.path": "held.jsonl", "evaluation.pairs": "held.jsonl"}
CHOSEN |= {"evaluation.every": 5, "algorithm.clip_high": 4.0, "oracle.sources": [{"name": "exact_match"}]}
"""Values for the settings that a message leaves to the user."""


def asked(cls: str, given: dict[str, Any]) -> tuple[dict[str, Any], set[str], str]:
    """Return what the message about a configuration in a section `args` says to write: the tree to which the
    block was added, the names that are left to the user, and the message."""
    is_group = cls == "GRPOConfig"
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "prompts": {"path": "data.jsonl"},
        "oracle": {"name": "exact_match" if is_group else "recorded"},
        "algorithm": {"name": CLASSES[cls]},
    }
    with pytest.raises(ConfigError) as refused:
        load_tree({**tree, "args": given}, {(): "run.yaml"}, "run.yaml", [])
    said = str(refused.value)
    written = re.search(r"\nwrite(?: \((.*?) yourself\))?:\n((?:  .*\n?)*)", said)
    if written is None:
        return tree, set(), said
    for section, fields in yaml.safe_load(written[2]).items():
        if isinstance(fields, dict):
            merge(tree.setdefault(section, {}), fields)
        else:
            tree[section] = fields
    left = re.sub(r"choose |and |work out |correct ", "", written[1] or "")
    return tree, {*filter(None, left.split(", "))}, said


def merge(tree: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, dict):
            merge(tree.setdefault(name, {}), value)
        else:
            tree[name] = value


def run_of(cls: str, given: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the whole configuration of a run as a message tells it, and what was left to the user."""
    tree, left, said = asked(cls, given)
    for setting in left:
        assert setting in CHOSEN, (setting, said)
        *sections, last = setting.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = CHOSEN[setting]
    try:
        return dump(resolve(*load_tree(tree, {(): "run.yaml"}, "run.yaml", [])).config), left
    except ConfigError as error:
        raise AssertionError((given, said, str(error))) from error


def at(tree: Any, setting: str) -> Any:
    """Return the value of a setting; None: a section around it is null."""
    for part in setting.split("."):
        tree = tree[part] if isinstance(tree, dict) else None
    return tree


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"prompt": "Hi", "chosen": "a", "rejected": "b", "response": "a", "answer": "x"}
    Path("data.jsonl").write_text(f"{json.dumps(record)}\n" * RECORDS)


@pytest.mark.sample("0", seconds=10)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("data")
def test_a_random_configuration_means_here_what_it_means_in_trl(seed: int) -> None:
    draw = random.Random(seed)
    for cls in [*CLASSES, "GRPOConfig", "DPOConfig"]:
        given = drawn(cls, draw)
        expected = group(given) if cls == "GRPOConfig" else recorded(cls, given)
        run, left = run_of(cls, given)
        wrong = {name: (at(run, name), meant) for name, meant in expected.items() if at(run, name) != meant}
        assert wrong.keys() <= left, (wrong, given)
        ends = expected["stop.max_steps"] is not None
        falls = expected["learner.schedule"] in ("linear", "cosine")
        assert ("learner.schedule_steps" in left) == (falls and not ends), given


def effective(cls: str, given: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the settings that a message's block adds to our defaults, and what is left to the user."""
    tree, left, _ = asked(cls, given)
    return added(tree), left


def added(tree: dict[str, Any]) -> dict[str, Any]:
    name = tree["algorithm"]["name"]
    return {setting: value for setting, value in flat(tree) if value != plain(default_of(setting, name))}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def flat(tree: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs = [
        flat(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]
        for name, value in tree.items()
    ]
    return list(itertools.chain.from_iterable(pairs))


BEGUN: dict[str, dict[str, Any]] = {
    "GRPOConfig": {"num_generations": 4, "learning_rate": 1e-5, "temperature": 0.9},
    "DPOConfig": {"beta": 0.2, "learning_rate": 1e-5, "weight_decay": 0.1},
    "RewardConfig": {"learning_rate": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5},
    "SFTConfig": {"learning_rate": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5},
}
"""Configurations to which a field is added."""
ASIDE = ("compute.profile", "run_dir", "seed", "engine.", "checkpoint.", "learner.gradient_checkpointing")
"""Settings of where and how a run computes; TRL's defaults of them are not added."""


def with_defaults(cls: str, fields: Iterable[str]) -> tuple[dict[str, Any], set[str]]:
    """Return what `effective` does for a configuration with fields that have TRL's defaults."""
    defaults = {field: fields_of(cls)[field]["default"] for field in fields}
    found, left = effective(cls, {**defaults, **BEGUN[cls]})
    return {name: value for name, value in found.items() if not name.startswith(ASIDE)}, left


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.usefixtures("data")
def test_defaults_of_trl_that_are_written_out_change_nothing(cls: str) -> None:
    assert with_defaults(cls, fields_of(cls)) == effective(cls, BEGUN[cls])


@pytest.mark.slow(instead="test_defaults_of_trl_that_are_written_out_change_nothing", seconds=8)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.usefixtures("data")
def test_a_default_of_trl_that_is_written_out_changes_nothing(cls: str) -> None:
    expected = effective(cls, BEGUN[cls])
    for field in fields_of(cls):
        assert with_defaults(cls, [field]) == expected, field


WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("GRPOConfig", {"ref_model_sync_steps": 64}),
    ("GRPOConfig", {"ref_model_mixup_alpha": 0.5}),
    ("GRPOConfig", {"use_bias_correction_kl": True}),
    ("GRPOConfig", {"use_bias_correction_kl": False, "beta": 0.0}),
    ("GRPOConfig", {"entropy_target": 0.3}),
    ("GRPOConfig", {"entropy_coef_max": 0.3}),
    ("GRPOConfig", {"entropy_coef_delta": 0.3, "use_adaptive_entropy": False}),
    ("GRPOConfig", {"vllm_importance_sampling_correction": True}),
    ("GRPOConfig", {"vllm_importance_sampling_mode": "token_mask"}),
    ("GRPOConfig", {"vllm_importance_sampling_clip_max": 2.0, "use_vllm": False}),
    ("GRPOConfig", {"vllm_importance_sampling_clip_min": 0.1}),
    ("GRPOConfig", {"vllm_gpu_memory_utilization": 0.5}),
    ("GRPOConfig", {"vllm_tensor_parallel_size": 2}),
    ("GRPOConfig", {"num_generations_eval": 2}),
    ("GRPOConfig", {"eval_steps": 10}),
    ("DPOConfig", {"eval_steps": 10, "eval_strategy": "no"}),
    ("DPOConfig", {"eval_steps": 10, "eval_strategy": "epoch"}),
    ("DPOConfig", {"save_steps": 10, "save_strategy": "no"}),
    ("DPOConfig", {"ref_model_sync_steps": 64, "sync_ref_model": False}),
    ("GRPOConfig", {"sapo_temperature_pos": 0.5}),
    ("GRPOConfig", {"vespo_lambda_neg": 0.5}),
    ("DPOConfig", {"metric_for_best_model": "loss"}),
    ("SFTConfig", {"lora_r": 8, "lora_alpha": 16, "use_peft": False}),
    ("SFTConfig", {"lora_target_modules": ["q_proj"]}),
    ("SFTConfig", {"bnb_4bit_quant_type": "fp4"}),
]
"""Fields that TRL does not read without another one."""


@pytest.mark.usefixtures("data")
def test_a_field_without_its_switch_changes_nothing() -> None:
    expected = {cls: effective(cls, BEGUN[cls]) for cls in CLASSES}
    for cls, fields in WITHOUT:
        tree, left, said = asked(cls, {**BEGUN[cls], **fields})
        if fields.get("eval_strategy") != "epoch":
            assert (added(tree), left) == expected[cls], fields
        assert "evaluation" not in tree, fields
        named = next(iter(fields))
        (line,) = (line for line in said.splitlines() if named in line.split())
        assert "without" in line, line


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DPOConfig", {"beta": 0.0}, "beta"),
    ("DPOConfig", {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing"),
    ("DPOConfig", {"ld_alpha": 1.5}, "ld_alpha"),
    ("DPOConfig", {"max_length": 0}, "max_length"),
    ("GRPOConfig", {"epsilon": 1.0}, "epsilon"),
    ("GRPOConfig", {"delta": 1.0}, "delta"),
    ("GRPOConfig", {"top_p": 1.5}, "top_p"),
    ("GRPOConfig", {"adam_beta2": 1.0}, "learner.betas"),
    ("GRPOConfig", {"loss_type": "cispo", "epsilon": 0.2}, "algorithm.clip_high"),
    ("GRPOConfig", {"loss_type": "cispo"}, "algorithm.clip_high"),
    ("GRPOConfig", {"max_completion_length": None}, "sampling.max_new_tokens"),
    ("GRPOConfig", {"use_adaptive_entropy": True, "entropy_target": 0.0}, "entropy_target"),
]
"""Values that TRL takes, or has by default, and the loader refuses; with what is left to the user."""


@pytest.mark.usefixtures("data")
def test_a_value_that_the_loader_refuses_is_not_copied() -> None:
    for cls, given, named in REFUSED:
        tree, left, said = asked(cls, {**BEGUN[cls], **given})
        assert left == {named, "learner.schedule_steps"}, said
        tree["learner"]["schedule_steps"] = 7
        if "clip_high" in named:
            tree["algorithm"]["clip_high"] = 4.0
        resolve(*load_tree(tree, {(): "run.yaml"}, "run.yaml", []))


@pytest.mark.parametrize("name", RANGES)
def test_the_ranges_of_the_table_are_those_of_the_loader(name: str) -> None:
    """A bound that is no part of a range is refused, and one that is a part is accepted."""
    limit = RANGES[name]
    within = {limit.ge: True, limit.le: True, limit.gt: False, limit.lt: False}
    within |= {-1: False} if limit.ge in (0, 1) or limit.gt in (0, 1) else {}
    algorithm, beside = BESIDE.get(name, ("grpo", {}))
    for value, is_right in within.items():
        if value is None:
            continue
        tree: dict[str, Any] = {"name": algorithm}
        for setting, each in {**beside, name: value}.items():
            *sections, last = setting.split(".")
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = each
        whole = {**RUN, "algorithm": tree, "oracle": {"name": "recorded" if "centr" in name else "length"}}
        with (
            contextlib.nullcontext()
            if is_right
            else pytest.raises(ConfigError, match=name.rpartition(".")[2])
        ):
            resolve(*load_tree(whole, {(): "run.yaml"}, "run.yaml", []))


RUN = {"model": {"path": "m"}, "prompts": {"path": "p"}, "stop": {"max_steps": 1}}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("beta", "label_smoothing", "ld_alpha", "sft_weight"), ("dpo", {})),
    "tau": ("discopop", {}),
    "centring": ("reward_model", {}),
    "lam": ("ppo", {}),
    "samples": ("reinforce_pp", {}),
    "smooth.tau": ("sapo", {}),
    "smooth.negative_tau": ("sapo", {}),
    "entropy.step": ("grpo", {"entropy.target": 0.1}),
    "entropy.highest": ("grpo", {"entropy.target": 0.1}),
    "correction.low": ("grpo", {"correction.form": "mask"}),
    "correction.high": ("grpo", {"correction.form": "mask", "correction.low": 0.0}),
}
"""The algorithm with which a range is tried, and settings without which nothing reads it."""


def message(given: dict[str, Any], algorithm: str, flags: str = "") -> str:
    tree: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "data.jsonl"}}
    tree |= {"oracle": {"name": "exact_match"}, "algorithm": {"name": algorithm}}
    with pytest.raises(ConfigError) as refused:
        load_tree({**tree, **given}, {(): "run.yaml"}, "run.yaml", flags.split())
    return str(refused.value)


@pytest.mark.usefixtures("data")
def test_a_part_of_an_epoch_is_a_number_of_steps() -> None:
    given = {"num_train_epochs": 0.5, "max_steps": -1, "learning_rate": 1e-5}
    for algorithm, steps in (("dpo", math.ceil(0.5 * math.ceil(RECORDS / 8))), ("grpo", RECORDS // 2)):
        said = message({"args": given}, algorithm)
        assert f"max_steps: {steps}\n" in said
        assert "epochs: " not in said.partition("\nwrite")[2]
        Path("data.jsonl").rename("data.csv")
        unknown = message({"args": {**given, "dataset_name": "data.csv"}}, algorithm)
        assert "(choose stop.max_steps yourself)" in unknown
        Path("data.csv").rename("data.jsonl")


@pytest.mark.usefixtures("data")
def test_a_loss_of_another_family_replaces_the_algorithm() -> None:
    tree, _, said = asked("DPOConfig", {"loss_type": "sft", "beta": 0.3, "learning_rate": 1e-5})
    assert tree["algorithm"]["name"] == "sft"
    assert "beta" not in tree["algorithm"]
    (line,) = (line for line in said.splitlines() if line.split()[:1] == ["beta"])
    assert "sft" in line


def test_an_adapter_of_trls_scripts_has_their_defaults() -> None:
    for given, rank, alpha in (({}, 16, 32), ({"lora_r": 4}, 4, 32), ({"lora_alpha": 8}, 16, 8)):
        tree, left, _ = asked("SFTConfig", {"use_peft": True, "load_in_4bit": True, "bf16": True, **given})
        assert tree["model"]["lora"] == {"rank": rank, "alpha": alpha}
        assert left == {"learner.schedule_steps"}


OF_OPENRLHF = "--micro_train_batch_size 1 --zero_stage 3"


def test_the_flags_of_openrlhf_are_not_those_of_trl() -> None:
    """Names that both libraries have mean what those beside them say, and no default of TRL's is added."""
    pairs = "--beta 0.2 --learning_rate 5e-7 --bf16 true --max_len 512 --train_batch_size 32 --max_epochs 2"
    said = message({}, "dpo", f"{pairs} {OF_OPENRLHF}")
    assert "TRL" not in said
    assert "\n  --max_len 512 " in said
    copied = said.partition("\nwrite")[2].partition(":\n")[2].splitlines()[0]
    flags = dict(re.findall(r"--(\S+) (\S+)", copied))
    assert flags == {
        "algorithm.beta": "0.2",
        "learner.learning_rate": "5e-07",
        "learner.autocast": "bfloat16",
        "prompts.max_tokens": "512",
        "algorithm.prompts": "32",
        "prompts.epochs": "2",
        "learner.micro_batch_size": "1",
    }
    for algorithm in ("grpo", "ppo"):
        for flags_of_it in ("--max_epochs 1", "--train.max_epochs 1", f"--max_epochs 1 {OF_OPENRLHF}"):
            assert "algorithm.epochs 1" in message({}, algorithm, flags_of_it)


def test_what_bounds_a_prompt_there_bounds_no_recorded_data_here() -> None:
    for algorithm in ("dpo", "sft", "reward_model"):
        for name in ("max_prompt_length", "max_completion_length"):
            said = message({}, algorithm, f"--{name} 128")
            assert "128" not in said
            assert "means nothing here" in said
    assert "prompts.max_tokens 128" in message({}, "grpo", "--max_prompt_length 128")


def test_packs_are_said_to_be_larger_than_records() -> None:
    given = {"packing": True, "max_length": 512, "learning_rate": 1e-5}
    tree, left, _ = asked("SFTConfig", given)
    assert "packing" in left
    assert "prompts" not in tree["algorithm"]


def test_a_value_of_trl_without_a_counterpart_is_not_taken_for_a_misspelt_one() -> None:
    assert "did you mean `" not in message({}, "dpo", "--loss_type sigmoid_norm")
    assert "did you mean `" not in message({}, "grpo", "--lr_scheduler_type cosine_with_restarts")
