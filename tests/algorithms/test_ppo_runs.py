"""Runs of PPO: settings that contradict them, recorded responses, TRL's metrics, memory, and learning."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, oat, write_jsonl
from ppo_steps import feedback_of
from tiny_models import build_config, save_model

from oat.algorithms.ppo_config import PPOConfig
from oat.assemble.models import load_models
from oat.config.load import load_config
from oat.errors import ConfigError
from oat.learner.models import LanguageModel
from oat.ledger.store import Store
from oat.metrics.counterparts import TRL
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.rundir.rows import read_metrics
from oat.seeds import Seeds
from oat.types import Segment

SIZES = (3, 5, 1, 4, 5, 2, 3, 3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mini-batches that do not divide": ({"minibatches": 3}, "the 8 responses of a step .* give a divisor"),
    "few whitened rewards": ({"minibatches": 2, "rewards": {"whiten": True}}, "a mini-batch has 4 responses"),
    "a target without passes": (
        {"epochs": 1, "target_kl": 0.1},
        "target_kl is set, and an update is one optimiser step",
    ),
}


@pytest.mark.inventory(40, 42)
@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_contradict_the_run(world: World, tmp_path: Path, kind: str) -> None:
    options, message = REFUSED[kind]
    algorithm = {"name": "ppo", "prompts": 8, **options}
    with pytest.raises(ConfigError, match=message):
        resolve(*load_config(world.config("ppo", tmp_path, {"algorithm": algorithm})))


def test_the_length_of_final_states_follows_from_the_run(world: World, tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "prompts": 8, "end": "final_state"}
    resolved = resolve(*load_config(world.config("ppo", tmp_path, {"algorithm": algorithm})))
    assert resolved.config.algorithm.options["response_length"] == 4
    assert {field.name for field in fields(PPOConfig)} >= {"response_length"}
    changes = {"algorithm": algorithm, "sampling.environment": "game.py:Game", "evaluation": None}
    with pytest.raises(ConfigError, match=r"set algorithm\.response_length"):
        resolve(*load_config(world.config("ppo", tmp_path, changes)))


SEVENTEEN = (
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "lr",
    "episode",
    "eps",
)


@pytest.mark.inventory(41)
def test_every_metric_of_trl_is_in_every_row(world: World, tmp_path: Path) -> None:
    """The table of names gives each of TRL's seventeen metrics a metric that every step of a run reports.
    Two of them add up to a third."""
    algorithm = {"name": "ppo", "prompts": 4, "end": "final_state"}
    config = world.config("ppo", tmp_path, {"algorithm": algorithm, "evaluation": None})
    assert oat("train", config) == 0
    rows = read_metrics(tmp_path / "ppo" / "metrics.jsonl")[1:]
    assert len(rows) == 4
    for found in rows:
        for name in SEVENTEEN:
            assert TRL[name].ours in found, name
        parts = found["reward/shaped_mean"] + found["reward/kl"]
        assert found["reward/total"] == pytest.approx(parts, abs=1e-5)


@pytest.mark.sample("final_state", seconds=1.4)
@pytest.mark.inventory(35)
@pytest.mark.parametrize("end", ["last_token", "final_state"])
def test_learning_from_recorded_responses_and_rewards(world: World, tmp_path: Path, end: str) -> None:
    """A file of prompts, responses and rewards suffices. Nothing is sampled, and the reward of the better
    responses rises: their log-probability under the policy grows, that of the worse ones falls."""
    records = [
        {"prompt": f"{a}+{b}=", "output": "aa" if (a + b) % 2 else "1b", "reward": float((a + b) % 2)}
        for a in range(6)
        for b in range(6)
    ]
    write_jsonl(tmp_path / "records.jsonl", records)
    algorithm = {"name": "ppo", "prompts": 12, "end": end, "epochs": 2, "kl_reward_coef": 0.0}
    if end == "final_state":
        algorithm["response_length"] = 4
    changes = {
        "prompts": {
            "path": str(tmp_path / "records.jsonl"),
            "responses": ["output"],
            "score_key": "reward",
        },
        "oracle": {"name": "recorded"},
        "algorithm": algorithm,
        "learner.learning_rate": 0.02,
        "stop.max_steps": 12,
        "checkpoint.every": 20,
        "evaluation": {"path": str(world.folder / "held_out.jsonl"), "oracle": world.oracle, "every": 12},
    }
    assert oat("train", world.config("ppo", tmp_path, changes)) == 0
    rows = read_metrics(tmp_path / "ppo" / "metrics.jsonl")
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.5
    assert all(found["oracle/queries"] == 0 for found in rows[1:])
    assert all(found["logps/recomputed"] == 1 for found in rows[1:])


@pytest.mark.parametrize("field", ["advantage", "old_from"])
def test_recorded_responses_have_no_probabilities(world: World, tmp_path: Path, field: str) -> None:
    given = {"advantage": "vtrace", "old_from": "sampler"}
    changes = {
        "prompts": {"path": str(tmp_path / "records.jsonl"), "responses": ["output"], "score_key": "r"},
        "oracle": {"name": "recorded"},
        "algorithm": {"name": "ppo", "prompts": 8, field: given[field]},
        "evaluation": None,
        "sampling": None,
    }
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} is .*not known"):
        resolve(*load_config(world.config("ppo", tmp_path, changes)))


@pytest.mark.inventory(34)
def test_a_toy_reward_rises(world: World, tmp_path: Path) -> None:
    """The mean reward of the last ten of thirty steps is far above that of the first ten."""
    algorithm = {"name": "ppo", "prompts": 8, "epochs": 2, "end": "final_state"}
    changes = {
        "algorithm": algorithm,
        "evaluation": None,
        "stop.max_steps": 30,
        "learner.learning_rate": 0.01,
        "checkpoint.every": 40,
    }
    assert oat("train", world.config("ppo", tmp_path, changes)) == 0
    rewards = [found["reward/mean"] for found in read_metrics(tmp_path / "ppo" / "metrics.jsonl")[1:]]
    assert len(rewards) == 30
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 1.0


@pytest.mark.inventory(36)
def test_a_response_ends_at_its_stop_token(tmp_path: Path) -> None:
    """The id of the end-of-text token is 0. No token follows it, it counts as an action, and the responses
    that it ends have a final state, unless they have the largest length."""
    model = save_model(tmp_path / "model", build_config("llama", layers=1), scale=1.0)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "abc"}, {"prompt": "de"}])
    (tmp_path / "reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    config = tmp_path / "ppo.yaml"
    config.write_text(
        f"run_dir: {tmp_path / 'run'}\nmodel: {{path: {model}}}\nprompts: {{path: {tmp_path}/train.jsonl}}\n"
        f"oracle: {{name: '{tmp_path}/reward.py:reward'}}\nsampling: {{max_new_tokens: 30}}\n"
        "algorithm: {name: ppo, prompts: 2, samples: 32, end: final_state}\ncompute: {threads: 1}\n"
        "tracking: {keep_trajectories: true}\nstop: {max_steps: 1}\n"
    )
    assert oat("train", config) == 0
    store = Store(tmp_path / "run" / "ledger.sqlite")
    rows = [row for group in store.groups("train", 0, 0) for row in group.trajectories]
    store.close()
    ended = [row for row in rows if row.finish_reason == "stop"]
    assert len(rows) == 64
    assert len(ended) > 8
    for each in rows:
        ids = each.completion.tolist()
        assert (0 in ids) == (ids[-1] == 0) == (each in ended)
        assert ids.count(0) <= 1
        assert each.trained.sum() == len(ids)
    (found,) = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert found["response/ended"] == len(ended)


@pytest.mark.inventory(44)
def test_without_a_reference_an_adapter_is_turned_off(world: World, tmp_path: Path) -> None:
    """The reference of a policy with an adapter is the model without it, also when the adapter has learned.
    The critic's adapter has no part in it."""
    changes = {"algorithm": {"name": "ppo", "prompts": 4}, "model.lora": {"rank": 2}, "evaluation": None}
    config = resolve(*load_config(world.config("ppo", tmp_path, changes))).config
    lms = load_models(config, {"reference", "critic"}, Seeds(0))
    assert lms["reference"].module is lms["policy"].module
    plain = LanguageModel(load_lm(str(world.folder / "model")), num_tokens=18)
    rows = [item.group.trajectories[0] for item in feedback_of(SIZES).items]
    rows = [replace(made, segments=tuple(map(_small, made.segments))) for made in rows]
    expected = plain.outputs(rows, {}, {"raw"})["raw"]
    with torch.no_grad():
        for name in ("policy", "critic"):
            for parameter in lms[name].trainable().values():
                parameter.add_(0.3)
        models = {name: LanguageModel(lms[name], num_tokens=18) for name in ("policy", "reference")}
        found = {name: model.outputs(rows, {}, {"raw"})["raw"] for name, model in models.items()}
    torch.testing.assert_close(found["reference"], expected)
    assert (found["policy"] - expected).abs().max() > 0.1


def _small(segment: Segment) -> Segment:
    return replace(segment, ids=segment.ids % 16)


def test_a_critic_leaves_less_memory_for_a_pass(world: World, tmp_path: Path) -> None:
    """`micro_batch_tokens: auto` counts the activations, gradients and moments of both models. Gradient
    checkpointing, in both, makes room for more."""
    found = {}
    for name, changes in {
        "grpo": {"algorithm": {"name": "grpo", "prompts": 64, "samples": 2, "kl_coef": 0.1}},
        "ppo": {"algorithm": {"name": "ppo", "prompts": 128}},
        "checkpointed": {
            "algorithm": {"name": "ppo", "prompts": 128},
            "learner.gradient_checkpointing": True,
        },
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        common = {
            "learner.micro_batch_tokens": "auto",
            "learner.micro_batch_size": None,
            "compute": {"threads": 1, "memory_gb": 0.0016},
            "prompts": {"path": str(world.folder / "train.jsonl"), "max_tokens": 8},
            "evaluation": None,
            "stop.max_steps": 1,
        }
        assert oat("train", world.config("x", folder, {**common, **changes})) == 0
        config = load_config(folder / "x" / "config.yaml")[0]
        found[name] = config.learner.micro_batch_tokens
        assert isinstance(found[name], int)
    assert found["ppo"] < 0.7 * found["grpo"]
    assert found["ppo"] < found["checkpointed"]
