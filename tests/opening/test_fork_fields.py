"""Every field of a configuration in a fork. A field that may change is changed in a real run; any other field
is refused by name."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from evaluations import JUDGES
from fixtures import World, oat, write_jsonl

from oat.config.fields import said_at
from oat.config.load import convert, dump, load_config
from oat.config.parts import with_settings
from oat.config.settings import Config
from oat.errors import ConfigError
from oat.ledger.audit import contradictions
from oat.ledger.store import Store
from oat.opening.open_run import open_run
from oat.resolve.resolve import resolve

GUESSING = Path(__file__).parents[1] / "protocol" / "guessing.py"
FORKED: dict[str, Any] = {
    "seed": 1,
    "sampling.max_new_tokens": 3,
    "sampling.temperature": 0.7,
    "sampling.top_k": 5,
    "sampling.top_p": 0.9,
    "sampling.min_p": 0.05,
    "sampling.stop": ["="],
    "sampling.overflow": "cut",
    "algorithm.prompts": 8,
    "algorithm.samples": 4,
    "algorithm.clip_low": 0.1,
    "algorithm.clip_high": 0.3,
    "algorithm.kl_coef": 0.1,
    "algorithm.kl_target": 0.01,
    "algorithm.kl_horizon": 500,
    "algorithm.epochs": 2,
    "algorithm.minibatches": 2,
    "algorithm.target_kl": 0.1,
    "sampling.refill_rounds": 2,
    "algorithm.std_eps": 0.1,
    "algorithm.advantage": "leave_one_out",
    "algorithm.vine.branches": 2,
    "algorithm.vine.delimiter": "a",
    "algorithm.vine.most_steps": 4,
    "algorithm.kl_reward_coef": 0.1,
    "algorithm.gamma": 0.9,
    "algorithm.whiten": True,
    "algorithm.policy_loss": "cispo",
    "algorithm.dual_clip": 3.0,
    "algorithm.drift_coef": 0.1,
    "algorithm.reduction": "token",
    "algorithm.advantage_clip": 1.0,
    "algorithm.whiten_over": "group",
    "algorithm.old_from": "sampler",
    "algorithm.credit": "turns",
    "algorithm.turn_gamma": 0.9,
    "algorithm.kl_estimator": "k1",
    "algorithm.kl_unbiased": True,
    "algorithm.kl_max_log_ratio": 10.0,
    "algorithm.kl_reward_estimator": "k3",
    "algorithm.correction.form": "truncate",
    "algorithm.correction.level": "sequence",
    "algorithm.correction.low": 0.1,
    "algorithm.correction.high": 3.0,
    "algorithm.correction.off_policy_bound": 1.0,
    "algorithm.entropy.coef": 0.01,
    "algorithm.entropy.target": 0.5,
    "algorithm.entropy.step": 0.01,
    "algorithm.entropy.highest": 0.5,
    "algorithm.tokens.high_entropy_share": 0.5,
    "algorithm.tokens.high_entropy_per": "row",
    "algorithm.tokens.covariance_clip": 0.1,
    "algorithm.tokens.covariance_low": 0.5,
    "algorithm.tokens.covariance_high": 6.0,
    "algorithm.tokens.covariance_kl": 0.1,
    "algorithm.tokens.covariance_kl_coef": 0.5,
    "algorithm.rewards.scale": 2.0,
    "algorithm.rewards.clip": [-1.0, 1.0],
    "algorithm.rewards.whiten": True,
    "algorithm.rewards.normalise": "running",
    "algorithm.rewards.truncated": "drop",
    "algorithm.rewards.missing_end_penalty": 0.1,
    "algorithm.rewards.missing_end": "no_end",
    "algorithm.rewards.overlong_penalty": 0.1,
    "algorithm.rewards.overlong_from": 2,
    "algorithm.rewards.overlong_to": 4,
    "algorithm.rewards.flat_group_weight": 1.0,
    "algorithm.rewards.sources": "group",
    "algorithm.smooth.tau": 2.0,
    "algorithm.smooth.negative_tau": 2.0,
    "algorithm.smooth.power": 1.0,
    "algorithm.smooth.decay": 2.0,
    "algorithm.smooth.negative_power": 2.0,
    "algorithm.smooth.negative_decay": 1.0,
    "evaluation.path": "WORLD/train.jsonl",
    "evaluation.split": "test",
    "evaluation.every": 3,
    "evaluation.every_queries": 30,
    "evaluation.every_hours": 1.0,
    "evaluation.slot": "sampler",
    "evaluation.samples": 3,
    "evaluation.greedy": False,
    "evaluation.best_of": 4,
    "evaluation.best_of_temperature": 0.5,
    "evaluation.max_prompts": 2,
    "evaluation.oracle": {"name": "WORLD/reward.py:reward"},
    "evaluation.max_queries": 1000,
    "evaluation.max_tokens": 100000,
    "evaluation.max_cost": 5.0,
    "evaluation.online": True,
    "evaluation.gold": {"name": "WORLD/reward.py:reward"},
    "evaluation.kl": True,
    "evaluation.intervals": True,
    "evaluation.pass_at": [1, 2],
    "evaluation.success": 0.5,
    "evaluation.majority_at": [2],
    "evaluation.answers": "last_number",
    "evaluation.pairs": "WORLD/pairs.jsonl",
    "oracle.labels": "bernoulli",
    "oracle.max_outstanding": 5,
    "oracle.max_answer_age": 2,
    "learner.learning_rate": 0.1,
    "learner.critic_learning_rate": 0.1,
    "learner.critic_weight_decay": 0.1,
    "learner.critic_max_grad_norm": 0.5,
    "learner.critic_schedule": "linear",
    "learner.critic_warmup_steps": 9,
    "learner.critic_schedule_steps": 50,
    "learner.critic_only_steps": 1,
    "learner.betas": [0.8, 0.9],
    "learner.weight_decay": 0.1,
    "learner.max_grad_norm": 0.5,
    "learner.schedule": "linear",
    "learner.warmup_steps": 9,
    "learner.schedule_steps": 50,
    "learner.micro_batch_size": 2,
    "learner.gradient_checkpointing": True,
    "learner.logits_chunk": 7,
    "learner.max_updates": 1,
    "engine.max_rows": 8,
    "engine.cache_gb": 1.0,
}
"""A changed value for each field that may change."""

OVERLONG = {
    "algorithm.rewards.overlong_penalty": 0.1,
    "algorithm.rewards.overlong_from": 2,
    "algorithm.rewards.overlong_to": 4,
}
BESIDE: dict[str, dict[str, Any]] = {
    "algorithm.kl_target": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_horizon": {"algorithm.kl_coef": 0.1, "algorithm.kl_target": 0.01},
    "algorithm.target_kl": {"algorithm.epochs": 2},
    "algorithm.whiten_over": {"algorithm.whiten": True},
    "algorithm.kl_estimator": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_unbiased": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_max_log_ratio": {"algorithm.kl_coef": 0.1},
    "algorithm.kl_reward_estimator": {"algorithm.kl_reward_coef": 0.1},
    **{
        f"algorithm.correction.{name}": {"algorithm.correction.form": "mask"}
        for name in ("level", "low", "high")
    },
    **{f"algorithm.entropy.{name}": {"algorithm.entropy.target": 0.5} for name in ("step", "highest")},
    "algorithm.tokens.high_entropy_per": {"algorithm.tokens.high_entropy_share": 0.5},
    "algorithm.tokens.covariance_low": {"algorithm.tokens.covariance_clip": 0.1},
    "algorithm.tokens.covariance_high": {"algorithm.tokens.covariance_clip": 0.1},
    "algorithm.tokens.covariance_kl_coef": {"algorithm.tokens.covariance_kl": 0.1},
    "algorithm.rewards.missing_end": {"algorithm.rewards.missing_end_penalty": 0.1},
    **{
        f"algorithm.rewards.{name}": OVERLONG for name in ("overlong_penalty", "overlong_from", "overlong_to")
    },
    **{f"algorithm.smooth.{name}": {"algorithm.policy_loss": "sapo"} for name in ("tau", "negative_tau")},
    **{
        f"algorithm.smooth.{name}": {"algorithm.policy_loss": "vespo"}
        for name in ("power", "decay", "negative_power", "negative_decay")
    },
    **{
        f"algorithm.vine.{name}": {"algorithm.advantage": "vine"}
        for name in ("branches", "delimiter", "most_steps")
    },
    "evaluation.split": {"evaluation.path": "DATASET"},
    "evaluation.success": {"evaluation.pass_at": [1]},
    "evaluation.majority_at": {"evaluation.answers": "last_number"},
    "evaluation.answers": {"evaluation.majority_at": [1]},
    **{
        f"evaluation.{limit}": {"evaluation.oracle": {"name": "WORLD/judges.py:Metered"}}
        for limit in ("max_tokens", "max_cost")
    },
    "oracle.max_answer_age": {"oracle.max_outstanding": 5},
    "learner.schedule_steps": {"learner.schedule": "linear"},
    "learner.critic_schedule_steps": {"learner.critic_schedule": "linear"},
    "evaluation.best_of_temperature": {"evaluation.best_of": 3},
}
"""Further changes that a changed field needs; without them nothing would read it."""

READS = {
    **dict.fromkeys(
        ("oracle.labels", "oracle.max_outstanding", "oracle.max_answer_age", "evaluation.pairs"), "dpo"
    ),
    "algorithm.rewards.sources": "mixture",
    **dict.fromkeys(("evaluation.best_of", "evaluation.best_of_temperature"), "ensemble"),
    **dict.fromkeys(("algorithm.credit", "algorithm.turn_gamma"), "episodes"),
    **dict.fromkeys(
        (
            "learner.critic_learning_rate",
            "learner.critic_weight_decay",
            "learner.critic_max_grad_norm",
            "learner.critic_schedule",
            "learner.critic_warmup_steps",
            "learner.critic_schedule_steps",
            "learner.critic_only_steps",
        ),
        "ppo",
    ),
}
"""The algorithm that reads a field, for fields that GRPO does not read."""

REFUSED: dict[str, Any] = {
    "model.path": "other",
    "model.reference": "other",
    "model.critic": "other",
    "model.dtype": "bfloat16",
    "model.lora": {"rank": 2},
    "model.adapter": "other",
    "model.frozen": ["lm_head*"],
    "model.quantize": "nf4",
    "model.reference_device": "cpu",
    "model.reference_dtype": "bfloat16",
    "model.reference_update": {"every": 2},
    "prompts.path": "other.jsonl",
    "prompts.split": "train",
    "prompts.max_prompts": 20,
    "prompts.on_bad_record": "skip",
    "prompts.prompt_key": "question",
    "prompts.reference_key": None,
    "prompts.max_tokens": 20,
    "prompts.epochs": 9,
    "prompts.shuffle": False,
    "prompts.responses": ["answer"],
    "prompts.score_key": "score",
    "prompts.too_long": "cut_prompt_start",
    "sampling.environment": "game.py:Game",
    "oracle.name": "other.py:reward",
    "oracle.scale": 2.0,
    "oracle.repeats": 2,
    "oracle.whole_groups": False,
    "algorithm.name": "dr_grpo",
    "learner.micro_batch_tokens": 512,
    "learner.autocast": "bfloat16",
    "learner.sync_every": 2,
    "learner.buffer": {"questions": 8},
    "render.template": "chatml",
    "render.system": "be kind",
    "render.question": "gsm8k",
    "render.few_shot": 1,
    "render.date": "2026-01-01",
    "render.special_tokens": "keep",
    "engine.name": "engine.py:Own",
    "engine.deterministic": True,
    "engine.dtype": "bfloat16",
    "engine.threads": 2,
    "engine.own_reference": True,
    "explorer.name": "explorer.py:Own",
    "compute.profile": "gpu",
    "compute.threads": 2,
}
"""A changed value for each field that may not change."""


@pytest.fixture(scope="module")
def parents(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the configuration of a finished run of four steps, by algorithm. Each run
    is made once. "mixture" is GRPO with an oracle of two sources, "episodes" GRPO with an environment, and
    "ensemble" DPO with an ensemble."""
    found: dict[str, Path] = {}
    (world.folder / "judges.py").write_text(JUDGES, encoding="utf-8")
    write_jsonl(world.folder / "pairs.jsonl", [{"prompt": "1+1=", "chosen": "a", "rejected": "b"}])
    sources = [{"name": world.oracle, "label": label} for label in ("one", "two")]
    changes = {
        "ppo": {"algorithm": {"name": "ppo", "prompts": 4, "samples": 2}},
        "mixture": {
            "algorithm": {"name": "grpo", "prompts": 4, "samples": 3},
            "oracle": {"name": "mixture", "sources": sources},
        },
        "episodes": {
            "algorithm": {"name": "grpo", "prompts": 4, "samples": 3},
            "sampling": {"max_new_tokens": 4, "environment": f"{GUESSING}:Guessing"},
            "oracle": {"name": "environment"},
        },
        "ensemble": {
            "algorithm": {"name": "dpo", "prompts": 4},
            "explorer": {"name": "ensemble", "samples": 3, "ensemble": {"members": 2, "hidden": 4}},
        },
    }

    def make(algorithm: str) -> Path:
        if algorithm not in found:
            found[algorithm] = world.config(
                algorithm, tmp_path_factory.mktemp("parent"), changes.get(algorithm)
            )
            assert oat("train", found[algorithm]) == 0
        return found[algorithm]

    return make


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved dataset with a split `test`."""
    folder = tmp_path_factory.mktemp("dataset") / "saved"
    datasets.DatasetDict(test=datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "a"}])).save_to_disk(
        folder
    )
    return folder


def run_of(config: Path) -> Path:
    return config.with_suffix("")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_field_is_one_or_the_other(parents: Callable[[str], Path]) -> None:
    """Every field of a configuration is free, or is in exactly one of the tables FORKED and REFUSED. A new
    field must be added to one of them."""
    file = run_of(parents("grpo")) / "config.yaml"
    names, config = leaves(yaml.safe_load(file.read_text())).keys(), load_config(file)[0]
    free = {name for name in names if said_at(config, name.split(".")).may_change == "always"}
    assert names - free == {*FORKED, *REFUSED}
    assert not {*FORKED} & {*REFUSED}


@pytest.mark.sample("seed", "oracle.labels", "learner.learning_rate", seconds=20.1)
@pytest.mark.parametrize("field", FORKED)
def test_a_field_that_may_change(
    world: World, parents: Callable[[str], Path], dataset: Path, tmp_path: Path, field: str
) -> None:
    """A fork with a changed field begins with the checkpoint, stores the changed value, and makes one step
    more than its origin."""
    config = parents(READS.get(field, "grpo"))
    text = json.dumps({field: FORKED[field], **BESIDE.get(field, {})})
    changed = json.loads(text.replace("WORLD", str(world.folder)).replace("DATASET", str(dataset)))
    flags = [
        word
        for name, value in {**changed, "stop.max_steps": 5}.items()
        for word in (f"--{name}", json.dumps(value))
    ]
    assert oat("train", config, "--run_dir", tmp_path / "fork", "--from", f"{run_of(config)}@4", *flags) == 0
    stored = leaves(yaml.safe_load((tmp_path / "fork" / "config.yaml").read_text()))
    assert {name: stored[name] for name in leaves(changed)} == leaves(changed)
    assert rows(tmp_path / "fork")[:5] == rows(run_of(config))
    assert [row["step"] for row in rows(tmp_path / "fork")[5:]] == [5]
    with closing(Store(tmp_path / "fork" / "ledger.sqlite")) as store:
        assert contradictions(store) == []


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_may_not_change(parents: Callable[[str], Path], tmp_path: Path, field: str) -> None:
    """A fork that changes the field is refused, before the new value is checked and before any file is
    made."""
    config = parents("grpo")
    begun = resolve(*load_config(config))
    tree = dump(begun.config)
    section, name = field.split(".")
    tree |= {"run_dir": str(tmp_path / "fork"), section: {**tree[section], name: REFUSED[field]}}
    changed: Config = convert(Config, tree, (), {})
    if name == "name" and section != "oracle":  # of a part, whose settings stay
        named: dict[str, Any] = {section: replace(getattr(begun.config, section), name=REFUSED[field])}
        changed = replace(begun.config, run_dir=str(tmp_path / "fork"), **named)
    else:
        changed = with_settings(changed, {}, like=begun.config)
    with (
        pytest.raises(ConfigError, match=rf"cannot change these; .*\n  {field}[.:]"),
        open_run(replace(begun, config=changed, origins={}), f"{run_of(config)}@4"),
    ):
        pass
    assert not (tmp_path / "fork").exists()


@pytest.mark.sample("True-False", seconds=0.6)
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_whole_evaluation_may_come_or_go(world: World, tmp_path: Path, before: bool, after: bool) -> None:
    """A fork may add or remove the evaluation. An added evaluation is due at once."""
    (tmp_path / "after").mkdir()
    for folder, has_one in ((tmp_path, before), (tmp_path / "after", after)):
        config = world.config("grpo", folder, {} if has_one else {"evaluation": None})
    assert oat("train", tmp_path / "grpo.yaml") == 0
    assert oat("train", config, "--from", f"{tmp_path / 'grpo'}@2") == 0
    found = {row["step"] for row in rows(tmp_path / "after" / "grpo") if "eval/sampled" in row}
    assert found == ({3, 4} if after else {0, 2})


def test_prompts_a_step_stay_where_epochs_count_them(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path, {"prompts.epochs": 1})
    assert oat("train", config) == 0
    assert (
        oat(
            "train",
            config,
            "--run_dir",
            tmp_path / "fork",
            "--from",
            f"{tmp_path / 'grpo'}@2",
            "--algorithm.prompts",
            "2",
        )
        == 2
    )
    assert (
        "cannot change these; begin a run of its own, or undo:\n  algorithm.prompts: 4 -> 2"
        in capsys.readouterr().err
    )
