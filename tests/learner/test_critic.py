"""The critic in the learner: its values before and after tokens, its optimiser, and steps in which only the
critic learns."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, gradient_of, oat
from objectives import VOCABULARY, row
from tiny_models import save_llama

from oat.algorithms.base import Objective, Outputs, View
from oat.config.load import load_config
from oat.errors import ConfigError
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.models.loading import load_lm
from oat.resolve.defaults import derived
from oat.resolve.resolve import resolve
from oat.rundir.rows import read_metrics
from oat.seeds import Seeds
from oat.types import Batch, Loss, Per, Requires


class ActorCritic(Objective):
    """A policy loss and a value loss, each with a chosen reduction.

    Args:
        has_policy: False: the loss has no term of the policy, which only a metric reads.
    """

    name = "actor_critic"
    requires = Requires(feedback="score", models=frozenset({"policy", "critic"}))
    wants: Mapping[str, set[str]] = {"policy": {"raw"}, "critic": {"value", "value_after"}}

    def __init__(self, per: Per = "token", *, has_policy: bool = True):
        self.per = per
        self.has_policy = has_policy

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        critic, constant = outputs["critic"], 5.0 if self.per == "constant" else None
        errors_K = (critic["value"] - view["targets_K"]) ** 2 + 0.3 * (critic["value_after"] - 1.0) ** 2
        terms = {"user/value": Loss(errors_K, self.per, 0.7, constant)}
        if self.has_policy:
            policy_K = -view["targets_K"] * outputs["policy"]["raw"]
            terms["loss/policy"] = Loss(policy_K, self.per, 1.0, constant)
        return terms

    def metrics(self, outputs: Outputs, view: View) -> dict[str, tuple[torch.Tensor, str]]:
        return {"user/logp": (outputs["policy"]["raw"], "K")}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, hidden=16, inner=24, spread=0.3
    )


def learner_of(path: Path, *, double: bool = False, micro: int = 64, **options: Any) -> Learner:
    """Return a learner of a policy and a critic.

    Args:
        options: arguments of `Learner`; those with the prefix "critic_" are settings of the critic's
            optimiser, unless `Learner` has them.
    """
    of_critic = {
        name.removeprefix("critic_"): options.pop(name)
        for name in list(options)
        if name.startswith("critic_") and name != "critic_only_steps"
    }
    policy, backbone = load_lm(str(path)), load_lm(str(path))
    critic = Critic(backbone, np.random.default_rng(0))
    models = {"policy": LanguageModel(policy, num_tokens=VOCABULARY), "critic": critic}
    if double:
        policy.module.double()
        backbone.module.double()
        critic.double()
    settings = OptimiserSettings(1e-2, weight_decay=0.1, max_grad_norm=1.0)
    optimisers = {"policy": settings, "critic": replace(settings, **of_critic)}
    return Learner(models, optimisers, micro_batch_size=micro, seeds=Seeds(0), **options)


def batch_of(seed: int = 0, *, double: bool = False, minibatches: int = 1) -> Batch:
    """Return twelve rows of four prompts, some of them with several tokens that are masked."""
    generator = np.random.default_rng(seed)
    rows = tuple(
        row(generator, 3 + number % 4, int(size))
        for number, size in enumerate(generator.integers(1, 9, size=12))
    )
    tokens, dtype = sum(int(r.trained.sum()) for r in rows), torch.float64 if double else torch.float32
    columns = {
        "targets_K": torch.from_numpy(generator.normal(size=tokens)).to(dtype),
        "mask_K": torch.from_numpy((generator.random(tokens) > 0.2).astype(float)).to(dtype),
    }
    return Batch(rows, np.arange(12), np.arange(12) // 3, columns, epochs=2, minibatches=minibatches)


def weights(learner: Learner, model: str) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.models[model].trainable().items()}


def moments(learner: Learner, model: str) -> dict[str, Any]:
    return {name: value for name, value in learner.state.items() if name.startswith(f"{model}/moments")}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_values_before_and_after_each_token(model_path: Path) -> None:
    """The rows are two responses that share a prompt, and an episode of two turns."""
    generator = np.random.default_rng(7)
    one, short = row(generator, 9, 3), row(generator, 2, 6)
    other = replace(one, segments=(one.segments[0], short.segments[1]))
    turns = replace(one, segments=(*one.segments, short.segments[0], row(generator, 1, 2).segments[1]))
    rows = [one, other, turns]
    critic = Critic(load_lm(str(model_path)), np.random.default_rng(0))
    with torch.no_grad():
        critic.score.weight.mul_(10)
        found = critic.outputs(rows, {}, {"value", "value_after"})
    before: list[float] = []
    after: list[float] = []
    for r in rows:
        ids = torch.from_numpy(r.ids.astype(np.int64))
        with torch.no_grad():
            values = critic.score(critic.backbone(input_ids=ids[None]).last_hidden_state[0])[:, 0].tolist()
        before += [values[t - 1] for t in range(len(ids)) if r.trained[t]]
        after += [values[t] for t in range(len(ids)) if r.trained[t]]
    assert found["value"].tolist() == pytest.approx(before, abs=1e-5)
    assert found["value_after"].tolist() == pytest.approx(after, abs=1e-5)
    assert critic.outputs(rows, {}, {"value_after"}).keys() == {"value_after"}
    # within a turn, the value after a token is the value before the next one
    assert torch.equal(found["value_after"][:2], found["value"][1:3])
    turn = len(one.segments[1].ids)
    first = len(found["value"]) - int(turns.trained.sum())
    assert found["value_after"][first + turn - 1] != found["value"][first + turn]


@pytest.mark.sample("True-*-token", seconds=6.9)
@pytest.mark.inventory(110)
@pytest.mark.parametrize("per", ["token", "sequence", "sequence_sum", "prompt", "constant"])
@pytest.mark.parametrize(("double", "tolerance"), [(False, 1e-5), (True, 1e-10)])
def test_any_split_gives_the_critic_the_same_gradient(
    model_path: Path, per: Per, double: bool, tolerance: float
) -> None:
    found = []
    for limits in ({"micro": 64}, {"micro": 5}, {"micro": 3}, {"micro": 1}, {"micro_batch_tokens": 20}):
        learner = learner_of(model_path, double=double, **limits)
        batch = replace(batch_of(double=double), epochs=1)
        _, gradient = gradient_of(learner, lambda: learner.update(ActorCritic(per), batch), "critic")  # noqa: B023
        found.append(torch.cat([part.flatten() for part in gradient.values()]))
    assert found[0].norm() > 1e-3
    for other in found[1:]:
        assert float((other - found[0]).norm() / found[0].norm()) <= tolerance


@pytest.mark.sample("False", seconds=0.6)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_policy_waits_while_only_the_critic_learns(
    model_path: Path, gradient_checkpointing: bool
) -> None:
    options = {"gradient_checkpointing": gradient_checkpointing, "micro": 5}
    plain, waiting = (learner_of(model_path, critic_only_steps=steps, **options) for steps in (0, 2))
    if gradient_checkpointing:
        for learner in (plain, waiting):
            for model in learner.models.values():
                model.lm.checkpoint_gradients()  # type: ignore[attr-defined]
    start = weights(waiting, "policy")
    for update in range(2):
        batch = batch_of(update, minibatches=2)
        reports = [learner.update(ActorCritic(), batch) for learner in (plain, waiting)]
        assert same(weights(waiting, "policy"), start)
        assert not moments(waiting, "policy")
        assert same(weights(waiting, "critic"), weights(plain, "critic"))
        assert same(moments(waiting, "critic"), moments(plain, "critic"))
        assert reports[1]["optim/steps"] == 0.0
        assert not {"optim/grad_norm", "optim/learning_rate"} & reports[1].keys()
        assert reports[1]["optim/critic_grad_norm"] == reports[0]["optim/critic_grad_norm"] > 0
    report = waiting.update(ActorCritic(), batch_of(2, minibatches=2))
    assert not same(weights(waiting, "policy"), start)
    assert moments(waiting, "policy")
    assert report["optim/steps"] == 4.0


def test_the_policys_schedule_begins_when_it_learns(model_path: Path) -> None:
    learner = learner_of(model_path, critic_only_steps=1)
    settings = OptimiserSettings(1e-2, schedule="linear", warmup_steps=2, schedule_steps=4)
    learner.trained = {name: replace(part, settings=settings) for name, part in learner.trained.items()}
    reports = [learner.update(ActorCritic(), replace(batch_of(n), epochs=1)) for n in range(3)]
    assert [report["optim/critic_learning_rate"] for report in reports] == [
        settings.rate(n) for n in range(3)
    ]
    assert [report["optim/learning_rate"] for report in reports[1:]] == [settings.rate(n) for n in range(2)]


@pytest.mark.parametrize("killed_after", [1, 2])
def test_continued_between_the_critics_own_steps(model_path: Path, killed_after: int) -> None:
    whole, first, second = (learner_of(model_path, critic_only_steps=2) for _ in range(3))
    for n in range(3):
        whole.update(ActorCritic(), batch_of(n))
    for n in range(killed_after):
        first.update(ActorCritic(), batch_of(n))
    second.load_state(first.state)
    for n in range(killed_after, 3):
        second.update(ActorCritic(), batch_of(n))
    assert whole.state.keys() == second.state.keys()
    for model in ("policy", "critic"):
        assert same(weights(whole, model), weights(second, model))
        assert same(moments(whole, model), moments(second, model))


def test_an_objective_without_a_policy_loss_leaves_the_policy_as_it_is(model_path: Path) -> None:
    """Weight decay and moments, too, leave a policy alone whose loss has no gradient."""
    learner = learner_of(model_path)
    learner.update(ActorCritic(), batch_of(0))
    start, before = weights(learner, "policy"), {k: v.clone() for k, v in moments(learner, "policy").items()}
    of_critic = weights(learner, "critic")
    learner.update(ActorCritic(has_policy=False), batch_of(1))
    assert same(weights(learner, "policy"), start)
    assert same(moments(learner, "policy"), before)
    assert not same(weights(learner, "critic"), of_critic)


def config(world: World, folder: Path, **changes: Any) -> Path:
    return world.config("ppo", folder, {"algorithm": {"name": "ppo", "prompts": 4, "samples": 2}, **changes})


def learner_settings(**values: Any) -> dict[str, Any]:
    return {f"learner.{name}": value for name, value in values.items()}


@pytest.mark.inventory(109)
def test_the_critics_own_optimiser_in_a_run(world: World, tmp_path: Path) -> None:
    """The critic's rate rises and falls by the critic's own settings, to a tenth of its own rate."""
    own = learner_settings(
        critic_learning_rate=0.02,
        critic_schedule="linear",
        critic_warmup_steps=2,
        critic_schedule_steps=10,
        critic_max_grad_norm=0.01,
        critic_weight_decay=0.5,
        critic_only_steps=1,
    )
    assert oat("train", config(world, tmp_path, **own)) == 0
    rows = read_metrics(tmp_path / "ppo" / "metrics.jsonl")[1:]
    settings = OptimiserSettings(0.02, schedule="linear", warmup_steps=2, schedule_steps=10)
    # four optimiser steps a step; a row has the rate of the last
    expected = [settings.rate(4 * step + 3) for step in range(4)]
    assert [row["optim/critic_learning_rate"] for row in rows] == pytest.approx(expected)
    assert expected[-1] == pytest.approx(0.002)
    assert [row.get("optim/learning_rate") for row in rows] == [None, 0.003, 0.003, 0.003]
    assert [row["optim/steps"] for row in rows] == [0, 4, 8, 12]


def test_lengths_of_schedules_that_are_left_open(world: World, tmp_path: Path) -> None:
    def lengths(**values: Any) -> tuple[int | None, int | None]:
        found = resolve(*load_config(config(world, tmp_path, **learner_settings(**values)))).config.learner
        return found.schedule_steps, found.critic_schedule_steps

    assert lengths() == (None, None)
    assert lengths(schedule="linear") == (16, 16)
    assert lengths(schedule="linear", critic_only_steps=1) == (12, 16)
    assert lengths(schedule="linear", schedule_steps=9) == (9, 9)
    assert lengths(schedule="linear", critic_schedule="constant") == (16, None)
    assert lengths(critic_schedule="cosine") == (None, 16)
    assert lengths(critic_schedule="cosine", critic_schedule_steps=7) == (None, 7)
    assert lengths(critic_schedule="cosine", schedule_steps=8) == (8, 8)
    resolved = resolve(*load_config(config(world, tmp_path, **learner_settings(schedule="linear"))))
    said = dict(line.split(": ", 1) for line in derived(resolved))
    assert said["learner.critic_schedule"] == "linear, as learner.schedule"
    assert said["learner.critic_schedule_steps"] == "16, the optimiser steps of stop.max_steps 4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"critic_only_steps": 4}, r"critic_only_steps is 4: the run has 4 steps, so the policy would never"),
        ({"critic_schedule_steps": 4}, r"nothing reads learner\.critic_schedule_steps"),
        ({"schedule": "linear", "critic_schedule": "constant", "critic_schedule_steps": 4}, "nothing reads"),
        ({"schedule_steps": 4}, r"nothing reads learner\.schedule_steps"),
        ({"critic_weight_decay": -1}, r"critic_weight_decay"),
    ],
)
def test_settings_that_are_refused(
    world: World, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(*load_config(config(world, tmp_path, **learner_settings(**values))))


@pytest.mark.parametrize("name", ["critic_weight_decay", "critic_warmup_steps", "critic_only_steps"])
def test_settings_of_a_critic_without_a_critic(world: World, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing reads learner\.{name} with algorithm grpo"):
        resolve(*load_config(world.config("grpo", tmp_path, {f"learner.{name}": 1})))


def test_no_end_for_the_critics_schedule(world: World, tmp_path: Path) -> None:
    changes = learner_settings(critic_schedule="linear") | {"stop": {"max_queries": 40}}
    with pytest.raises(ConfigError, match=r"set learner\.critic_schedule_steps, or stop\.max_steps"):
        resolve(*load_config(config(world, tmp_path, **changes)))
