"""A step of policy gradients, made so that every setting acts on it, and the table of where each one acts.

The responses have one or two turns, some were cut, some have an end token; one group is flat; ratios lie on
both sides of 1, within and beyond the bounds. The models are made up: each gives numbers that follow from the
row, the model and the name of the value, so that no two values are equal by chance.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from objectives import row

from oat.algorithms.policy_gradient_config import ADVANTAGES
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.plugins.registry import ALGORITHMS
from oat.types import Answer, Batch, Feedback, Group, Item, Key, Message, Prompt, Question, Trajectory

Options = Mapping[str, Any]
SECTIONS = ("vine", "smooth", "rewards", "correction", "entropy", "tokens")
END_ID = 3
GROUPS, SAMPLES = 4, 4
OF_MODELS = {"policy": 0.4, "reference": 0.8}
"""By how much a model's log-probabilities differ from the recorded ones, nats: a standard deviation."""
UPDATE = 0.7
"""By how much the policy's log-probabilities have changed since `prepare`."""
LENGTH = 6
"""The length from which a response has no final state (`ppo`)."""


@dataclass(frozen=True)
class Acts:
    """Values of a setting that must all have different outcomes.

    Attributes:
        beside: other settings with which it acts.
        on: what differs: an entry of `outcome`; `usable`, the questions that are learned from; or a field of
            the plan, such as `plan.prompts`.
        steps: number of the step that is looked at; what the algorithm keeps of the steps before it acts too.
    """

    values: tuple[Any, ...]
    beside: Options = field(default_factory=dict)
    on: str = "gradient"
    steps: int = 1


def response(generator: np.random.Generator, number: int) -> Trajectory:
    """Return a response of one or two turns of 1 to 5 tokens each."""
    first, second = (row(generator, 2, int(generator.integers(1, 6))) for _ in range(2))
    pieces = first.segments if number % 2 else (*first.segments, *second.segments)
    rewarded = [replace(p, reward=float(generator.normal())) if p.author == "model" else p for p in pieces]
    return replace(first, segments=tuple(rewarded), finish_reason="length" if number % 5 == 0 else "stop")


@functools.cache
def step_of(number: int) -> Feedback:
    """Return the feedback of a step. Each answer has a score, rewards of steps, and scores of two sources."""
    generator, items = np.random.default_rng(number + 1), []
    for group in range(GROUPS):
        rows = tuple(response(generator, group + place) for place in range(SAMPLES))
        made = Group(Prompt(group + 1, group, (Message("user", "p"),)), rows)
        scores = [0.4] * SAMPLES if group == 1 else generator.normal(size=SAMPLES).tolist()
        steps = [((1, 0.3 * s), (len(r.completion), 0.7 * s)) for s, r in zip(scores, rows, strict=True)]
        key = Key("train", number, 0, group)
        answer = Answer(
            key,
            tuple(map(float, scores)),
            ("ok",) * SAMPLES,
            SAMPLES,
            steps=tuple(each if each[0][0] < each[1][0] else () for each in steps),
            step_unit="tokens",
            sources={name: tuple(generator.normal(size=SAMPLES).tolist()) for name in "ab"},
        )
        items.append(Item(made, Question.about(made, key, "score", tuple(range(SAMPLES))), answer, None))
    return Feedback(number, tuple(items), GROUPS * SAMPLES)


@functools.cache
def value_of(made: Trajectory, model: str, name: str, *, is_updated: bool) -> np.ndarray:
    """Return the values of a row's trained tokens under a model, before the update or in it."""
    seed = zlib.crc32(f"{model} {name}".encode() + made.ids.tobytes())
    generator = np.random.default_rng(seed)
    drawn, moved = generator.normal(size=(2, made.num_trained))
    if name == "entropy":
        return 1 + np.tanh(drawn)
    if name in ("raw", "sampled"):
        values = made.recorded(f"{name}_logps") + OF_MODELS[model] * drawn
        return values + UPDATE * moved if is_updated else values
    return drawn + is_updated * moved


def tensor_of(rows: Sequence[Trajectory], model: str, name: str, *, is_updated: bool = False) -> torch.Tensor:
    values = [value_of(made, model, name, is_updated=is_updated) for made in rows]
    return torch.from_numpy(np.concatenate(values)).float()


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    return {name: tensor_of(rows, model, name) for name in wants}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return the settings in which the dotted path has this value."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def merged(first: Options, second: Options) -> dict[str, Any]:
    """Return both settings, the second ones before the first, in sections too."""
    sections = {key: {**first[key], **second[key]} for key in SECTIONS if key in first and key in second}
    return {**first, **second, **sections}


def made(name: str, options: Options) -> Any:
    """Return an algorithm with these settings. Sections are given as dicts."""
    cls: Any = ALGORITHMS[name]
    derived = {"max_length": 9} if name == "dr_grpo" else {}
    derived |= {"response_length": LENGTH} if options.get("end") == "final_state" else {}
    given = merged({"prompts": GROUPS, "samples": SAMPLES, **derived}, options)
    default = cls.Config()
    built = {
        key: type(getattr(default, key))(**value) if key in SECTIONS else value
        for key, value in given.items()
    }
    objective = cls(cls.Config(**built))
    objective.end_ids = frozenset({END_ID})
    return objective


def paths_of(config: Any) -> list[str]:
    """Return the dotted paths of all fields of a configuration."""
    found: list[str] = []
    for each in fields(config):
        value = getattr(config, each.name)
        inner = paths_of(value) if is_dataclass(value) else [""]
        found += [f"{each.name}.{path}" if path else each.name for path in inner]
    return found


def gradients(objective: Any, batch: Batch) -> tuple[dict[str, Any], dict[str, tuple[torch.Tensor, str]]]:
    """Return the derivatives of the whole loss with respect to each value that the models give, by model and
    name; beside them `gradient`, the whole loss with all of them. And return the metrics."""
    leaves = {
        (model, name): tensor_of(batch.rows, model, name, is_updated=True).requires_grad_()
        for model, names in objective.wants.items()
        for name in sorted(names)
    }
    outputs = {model: {n: leaf for (m, n), leaf in leaves.items() if m == model} for model in objective.wants}
    view = view_of(batch)
    total = torch.zeros(())
    for loss in objective.losses(outputs, view).values():
        total = total + loss.coef * Reduction(batch)(loss, view, view.group_of_N, first=True)
    total.backward()
    found: dict[str, Any] = {
        " ".join(key): torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for key, leaf in leaves.items()
    }
    found["gradient"] = torch.cat([total.detach()[None], *found.values()])
    return found, objective.metrics(outputs, view)


def seen(name: str, options: Options, acts: Acts) -> Any:
    """Return what is looked at of an algorithm with these settings (`Acts.on`)."""
    objective = made(name, options)
    if acts.on == "usable":
        return [objective.is_usable(item) for item in step_of(1).items]
    if acts.on.startswith("plan."):
        return getattr(objective.plan(1), acts.on.removeprefix("plan."))
    return outcome(objective, acts.steps)[acts.on]


def outcome(objective: Any, steps: int) -> dict[str, Any]:
    """Return what an algorithm makes of the last of some steps: the loss with its gradient; parts of this
    gradient, such as `policy sampled`; passes and mini-batches of a batch; whether the passes end; and the
    metrics of `prepare`."""
    generator = np.random.default_rng(0)
    batch = [objective.prepare(step_of(number), forward, generator) for number in range(steps, 0, -1)][-1]
    slopes, measured = gradients(objective, batch)
    means = {
        metric: float(values.detach().mean()) for metric, (values, per) in measured.items() if per == "K"
    }
    return {
        **batch.metrics,
        **slopes,
        "passes": (batch.epochs, batch.minibatches),
        "ends": objective.ends_passes(means),
    }


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two entries of outcomes are equal, but for rounding."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    return bool(np.isclose(one, other, rtol=1e-5)) if isinstance(one, float) else bool(one == other)


CLIPPED_LOSSES = ("clipped", "gspo", "gspo_token", "cispo", "cpgd")
PLAIN: Options = {"advantage": "group_mean", "whiten": False}
"""Advantages that keep the scale of rewards."""
RAW: Options = {"advantage": "none", "whiten": False}
KL: Options = {"kl_coef": 0.3, "kl_reward_coef": 0.0}
KL_REWARD: Options = {"kl_coef": 0.0, "kl_reward_coef": 0.3}
OVERLONG: Options = {"overlong_penalty": 1.0, "overlong_from": 1, "overlong_to": 6}
VESPO: Options = {"policy_loss": "vespo"}
VINE: Options = {"advantage": "vine"}
LARGE: Options = {**RAW, "rewards": {"scale": 9.0}}
COVARIANCE: Options = {"covariance_clip": 1.0, "covariance_low": -0.2, "covariance_high": 0.1}

FIELDS: dict[str, tuple[Acts, ...]] = {
    "prompts": (Acts((2, 3), on="plan.prompts"), Acts((2, 3), on="plan.questions")),
    "samples": (Acts((2, 3), on="plan.samples"),),
    "advantage": (
        Acts(tuple(name for name in ADVANTAGES if name != "vine")),
        Acts(("leave_one_out", "vine"), on="plan.branching"),
    ),
    "credit": (Acts(("response", "steps", "turns"), PLAIN),),
    "turn_gamma": (Acts((1.0, 0.7, 0.3), PLAIN),),
    "vine.branches": (Acts((2, 3), VINE, on="plan.branching"),),
    "vine.delimiter": (Acts(("\n", ";"), VINE, on="plan.branching"),),
    "vine.most_steps": (Acts((4, 8), VINE, on="plan.branching"),),
    "std_eps": (
        *(Acts((1e-4, 0.1, 0.5), {"advantage": name}) for name in ("group_norm", "batch_norm")),
        Acts((1e-4, 0.1, 0.5), {"advantage": "leave_one_out", "whiten": True, "whiten_over": "responses"}),
    ),
    "kl_reward_coef": (Acts((0.0, 0.1, 0.3), PLAIN),),
    "kl_reward_estimator": (Acts(("k1", "k2", "k3"), {**KL_REWARD, **PLAIN}),),
    "gamma": (Acts((1.0, 0.7, 0.3), PLAIN), Acts((1.0, 0.7, 0.3), {**PLAIN, "turn_gamma": 0.5})),
    "whiten": (Acts((False, True), {"advantage": "group_mean"}),),
    "whiten_over": (Acts(("step", "step_biased", "group", "responses"), {"whiten": True}),),
    "advantage_clip": (Acts((None, 0.1, 0.5)), Acts((None, 0.1, 0.5), {"gamma": 0.7})),
    "old_from": (Acts(("policy", "sampler", "reference")),),
    "policy_loss": (
        Acts(
            ("clipped", "reinforce", "gspo", "gspo_token", "cispo", "cpgd", "sapo", "vespo"), {"gamma": 0.7}
        ),
    ),
    "smooth.tau": (Acts((0.5, 1.0, 2.0), {"policy_loss": "sapo"}),),
    "smooth.negative_tau": (Acts((0.5, 1.05, 2.0), {"policy_loss": "sapo"}),),
    "smooth.power": (Acts((1.0, 2.0, 3.0), VESPO),),
    "smooth.decay": (Acts((1.0, 2.0, 3.0), VESPO),),
    "smooth.negative_power": (Acts((1.0, 2.0, 3.0), VESPO),),
    "smooth.negative_decay": (Acts((1.0, 2.0, 3.0), VESPO),),
    "clip_low": tuple(Acts((None, 0.05, 0.2), {"policy_loss": name}) for name in CLIPPED_LOSSES),
    "clip_high": tuple(Acts((0.05, 0.2, 0.5), {"policy_loss": name}) for name in CLIPPED_LOSSES),
    "dual_clip": (Acts((None, 1.2, 1.6)),),
    "drift_coef": (Acts((0.0, 0.1, 0.3)),),
    "kl_coef": (Acts((0.0, 0.1, 0.3), {"kl_reward_coef": 0.0}),),
    "kl_estimator": (Acts(("k1", "k2", "k3"), KL),),
    "kl_unbiased": (Acts((False, True), KL),),
    "kl_max_log_ratio": (
        Acts((None, 0.3, 0.8), KL),
        Acts((None, 0.3, 0.8), {**KL_REWARD, **PLAIN}),
    ),
    "kl_target": (
        *(Acts((None, 1e-3), beside) for beside in (KL, {**KL_REWARD, **PLAIN})),
        *(Acts((1e-3, 9.0), beside) for beside in (KL, {**KL_REWARD, **PLAIN})),
    ),
    "kl_horizon": (
        Acts((16, 100, 10_000), {**KL, "kl_target": 1e-3}),
        Acts((16, 100, 10_000), {**KL_REWARD, **PLAIN, "kl_target": 1e-3}),
    ),
    "epochs": (Acts((1, 2), on="passes"),),
    "minibatches": (Acts((1, 2), on="passes"),),
    "target_kl": (
        Acts((None, 0.01), {"epochs": 2}, on="ends"),
        Acts((0.01, 9.0), {"epochs": 2}, on="ends"),
    ),
    "rewards.sources": (Acts(("sum", "group", "batch", "running"), RAW, steps=2),),
    "rewards.source_weights": (Acts(({}, {"a": 0.5}, {"b": 0.5}), {**RAW, "rewards": {"sources": "batch"}}),),
    "rewards.missing_end_penalty": (Acts((0.0, 0.5, 1.0), PLAIN),),
    "rewards.missing_end": (Acts(("length", "no_end"), {**PLAIN, "rewards": {"missing_end_penalty": 1.0}}),),
    "rewards.overlong_penalty": (Acts((0.5, 1.0), {**PLAIN, "rewards": OVERLONG}),),
    "rewards.overlong_from": (Acts((1, 3), {**PLAIN, "rewards": OVERLONG}),),
    "rewards.overlong_to": (Acts((4, 8), {**PLAIN, "rewards": OVERLONG}),),
    "rewards.truncated": (Acts(("keep", "mask", "drop")),),
    "rewards.scale": (Acts((0.5, 1.0, 2.0), PLAIN),),
    "rewards.normalise": (Acts(("none", "running"), RAW),),
    "rewards.clip": (Acts((None, (-0.5, 1.0), (-0.5, 0.5), (-1.0, 1.0)), PLAIN),),
    "rewards.whiten": (
        Acts((False, True), PLAIN),
        Acts((False, True), {**PLAIN, "gamma": 0.7}),
    ),
    "rewards.flat_group_weight": (Acts((None, 0.0, 0.5), RAW),),
    "correction.form": (Acts(("none", "truncate", "mask")), Acts(("none", "truncate", "mask"), VESPO)),
    "correction.level": tuple(
        Acts(("token", "sequence", "geometric"), {"correction": {"form": form}})
        for form in ("truncate", "mask")
    ),
    "correction.low": tuple(
        Acts((None, 0.7, 0.9), {"correction": {"form": form}}) for form in ("truncate", "mask")
    ),
    "correction.high": tuple(
        Acts((None, 1.1, 1.3), {"correction": {"form": form}}) for form in ("truncate", "mask")
    ),
    "correction.off_policy_bound": (Acts((None, 0.01, 0.3)),),
    "entropy.coef": (Acts((0.0, 0.1, 0.3)), Acts((0.0, 0.1), {"entropy": {"target": 9.0}})),
    "entropy.target": (Acts((None, 0.1, 9.0), {"entropy": {"coef": 0.1}}),),
    "entropy.step": (Acts((0.005, 0.1), {"entropy": {"target": 9.0}}),),
    "entropy.highest": (Acts((0.3, 1.0), {"entropy": {"coef": 0.3, "target": 9.0, "step": 0.1}}),),
    "tokens.high_entropy_share": (
        Acts((0.2, 0.5, 1.0)),
        Acts((0.2, 0.5), {"tokens": {"high_entropy_per": "row"}}),
    ),
    "tokens.high_entropy_per": (Acts(("step", "row"), {"tokens": {"high_entropy_share": 0.3}}),),
    "tokens.covariance_clip": (Acts((0.05, 1.0), {"tokens": COVARIANCE}), Acts((0.0, 1.0), LARGE)),
    "tokens.covariance_low": (Acts((-0.2, -0.05), {"tokens": COVARIANCE}),),
    "tokens.covariance_high": (Acts((0.1, 0.3, 5.0), {"tokens": COVARIANCE}),),
    "tokens.covariance_kl": (Acts((0.0, 0.1, 0.5)),),
    "tokens.covariance_kl_coef": (Acts((0.5, 1.0), {"tokens": {"covariance_kl": 0.2}}),),
}
"""Where each setting of all policy gradients acts."""

FINAL: Options = {"end": "final_state"}
OWN: dict[str, dict[str, tuple[Acts, ...]]] = {
    "grpo": {
        "reduction": (Acts(("sequence", "token", "sequence_sum")),),
        "kl_reward_coef": (*FIELDS["kl_reward_coef"], Acts((0.0, 0.1), on="usable")),
        "whiten": (*FIELDS["whiten"], Acts((False, True), on="usable")),
        "rewards.whiten": (*FIELDS["rewards.whiten"], Acts((False, True), on="usable")),
        "rewards.sources": (
            *FIELDS["rewards.sources"],
            *(Acts(("sum", how), on="usable") for how in ("group", "batch", "running")),
        ),
    },
    "dr_grpo": {"max_length": (Acts((9, 18)),)},
    "ppo": {
        "advantage": (Acts(("gae", "vtrace"), {"whiten": False}),),
        "gamma": (
            *FIELDS["gamma"],
            Acts((1.0, 0.7), {"advantage": "vtrace"}),
            Acts((1.0, 0.7), FINAL),
        ),
        "kl_max_log_ratio": (
            *FIELDS["kl_max_log_ratio"],
            Acts((None, 0.3), KL_REWARD, on="kl/response"),
        ),
        "kl_reward_estimator": (
            *FIELDS["kl_reward_estimator"],
            Acts(("k1", "k3"), KL_REWARD, on="kl/response"),
        ),
        "whiten_over": (Acts(("step", "step_biased", "group"), {"whiten": True}),),
        "lam": (
            Acts((0.5, 0.95)),
            Acts((0.5, 0.95), {"turn_gamma": 0.5}),
            Acts((0.5, 0.95), {"advantage": "vtrace"}),
        ),
        "end": (Acts(("last_token", "final_state")),),
        "response_length": (Acts((3, 9), {"end": "final_state"}),),
        "value_coef": (Acts((0.5, 1.0)),),
        "value_clip": tuple(
            Acts((None, 0.2, 0.5), FINAL, on=f"critic {name}") for name in ("value", "value_after")
        ),
        "reduction": (Acts(("sequence", "token", "sequence_sum")),),
        "rewards.whiten": (*FIELDS["rewards.whiten"], Acts((False, True), FINAL)),
        "rewards.truncated": (Acts(("keep", "mask", "drop"), {"rewards": {"normalise": "running"}}),),
    },
}
"""Settings that only one algorithm has, or that act in further places there."""

UNSET = ("rewards.overlong_from", "rewards.overlong_to", "response_length", "max_length")
"""Settings that must have a number where they act, although their type allows None."""
REFUSED = {
    "ppo": {
        "std_eps": "its critic takes the place of a group",
        "rewards.flat_group_weight": "it compares no groups",
        "vine.branches": "it has no branches",
        "vine.delimiter": "it has no branches",
        "vine.most_steps": "it has no branches",
    }
}
"""Settings that an algorithm has and refuses, because nothing would read them; and why."""
