"""PPO with a critic against a straight implementation: two trained models in one loss, epochs of
mini-batches, ratios under truncation, responses without a score."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import straight
import torch
from bench import HERE, LOGIT_ROWS, Bench, assert_a_kill_changes_nothing
from fixtures import kill_at, named, oat
from torch import Tensor

from oat.answering.learned import policy_weights
from oat.commands.digest import digest_run
from oat.seeds import Seeds
from oat.types import Item

CLIP = 0.1
VALUE_CLIP = 0.1
VALUE_COEF = 0.7
KL_PENALTY = 0.1
KL_COEF = 0.03
ENTROPY_COEF = 0.02
GAMMA = 0.95
LAM = 0.9
SEED = 3
TEMPERATURE = 0.8
STEPS = 4
EPOCHS = 2
MINIBATCHES = 2
MAX_NORM = 2.0
DECAY = 0.1
RATE = 3e-3
CRITIC_RATE = 8e-3
WARMUP = 3


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    coefficients = {
        "clip_low": CLIP,
        "clip_high": CLIP,
        "value_clip": VALUE_CLIP,
        "value_coef": VALUE_COEF,
        "kl_reward_coef": KL_PENALTY,
        "kl_coef": KL_COEF,
        "reduction": "sequence",
    }
    coefficients |= {
        "entropy": {"coef": ENTROPY_COEF},
        "gamma": GAMMA,
        "lam": LAM,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
    }
    learner = {
        "learning_rate": RATE,
        "critic_learning_rate": CRITIC_RATE,
        "weight_decay": DECAY,
        "max_grad_norm": MAX_NORM,
        "micro_batch_size": 3,
    }
    return bench.config(
        tmp_path_factory.mktemp("ppo") / "ppo.yaml",
        algorithm={"name": "ppo", "prompts": 6, "samples": 2, **coefficients},
        sampling={"max_new_tokens": 5, "temperature": TEMPERATURE, "top_k": 7},
        oracle={"name": f"{HERE / 'rewards.py'}:graded"},
        learner={**learner, "schedule": "linear", "warmup_steps": WARMUP},
        evaluation={"path": str(bench.folder / "train.jsonl"), "max_prompts": 4, "every": 2},
        checkpoint={"every": 2},
        stop={"max_steps": STEPS},
    )


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


class Critic(torch.nn.Module):
    """A critic with one value per token: the hidden state before the token, times one vector."""

    def __init__(self, path: Path):
        super().__init__()
        self.backbone = straight.load(path).model
        width = self.backbone.config.hidden_size
        self.score = torch.nn.Linear(width, 1, bias=False)
        self.score.weight.data = torch.from_numpy(
            Seeds(SEED).at("init", "critic").normal(0, 1 / (width + 1), (1, width))
        ).float()

    def forward(self, batch: straight.Padded) -> Tensor:
        hidden = self.backbone(input_ids=batch.ids, attention_mask=batch.attention).last_hidden_state[:, :-1]
        return (hidden * self.score.weight[0]).sum(-1) * batch.mask


@dataclass(frozen=True)
class Rollout:
    """Tensors that stay the same over the epochs of a step; each is (N, T - 1)."""

    batch: straight.Padded
    kept: Tensor
    old: Tensor
    reference: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor


def kept_mask(batch: straight.Padded) -> Tensor:
    """Return (N, T - 1, V), True for tokens that could be drawn at that place."""
    kept = torch.zeros(*batch.mask.shape, LOGIT_ROWS, dtype=torch.bool)
    for n, row in enumerate(batch.rows):
        prompt, response = row.segments
        for t in range(len(response.ids)):
            kept[
                n,
                len(prompt.ids) - 1 + t,
                response.kept.ids[response.kept.offsets[t] : response.kept.offsets[t + 1]].tolist(),
            ] = True
    return kept


def rollout(items: list[Item], reference: torch.nn.Module, critic: Critic) -> Rollout:
    scored = [
        (item.group.trajectories[pick], value)
        for item in items
        for pick, value, mark in zip(item.question.picks, item.answer.values, item.answer.marks, strict=True)
        if mark == "ok"
    ]
    batch, scores = straight.pad([row for row, _ in scored]), [score for _, score in scored]
    with torch.no_grad():
        reference_logps = straight.picked(straight.log_softmax(straight.logits_of(reference, batch)), batch)
        values = critic(batch)
    advantages = torch.zeros_like(values)
    divergence = batch.scattered("raw_logps") - reference_logps
    for n, score in enumerate(scores):
        places = batch.mask[n].nonzero().flatten().tolist()
        carry, after = 0.0, 0.0
        for place in reversed(places):
            reward = -KL_PENALTY * float(divergence[n, place]) + score * (place == places[-1])
            carry = reward + GAMMA * after - float(values[n, place]) + GAMMA * LAM * carry
            after = float(values[n, place])
            advantages[n, place] = carry
    whole = advantages[batch.mask > 0].double()
    spread = ((whole - whole.mean()).square().sum() / (len(whole) - 1) + 1e-8).sqrt()
    whitened = ((advantages - whole.mean()) / spread).float()
    old = batch.scattered("sampled_logps")
    return Rollout(batch, kept_mask(batch), old, reference_logps, values, advantages + values, whitened)


def losses(policy: torch.nn.Module, critic: Critic, r: Rollout, chosen: list[int]) -> dict[str, Tensor]:
    """Return the four terms over the sequences of one mini-batch, and their sum."""
    logits, mask = straight.logits_of(policy, r.batch), r.batch.mask[chosen]
    raw_all = straight.log_softmax(logits)
    raw = straight.picked(raw_all, r.batch)[chosen]
    drawable = torch.where(
        r.kept | (r.batch.mask[:, :, None] == 0), logits / TEMPERATURE, torch.tensor(-1e30)
    )
    sampled = straight.picked(straight.log_softmax(drawable), r.batch)[chosen]

    def reduced(terms: Tensor) -> Tensor:
        """Return the mean over the tokens of each response, and then over responses."""
        return ((terms * mask).sum(1) / mask.sum(1)).mean()

    ratio, advantages = torch.exp(sampled - r.old[chosen]), r.advantages[chosen]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    policy_term = -reduced(surrogate)

    value = critic(r.batch)[chosen]
    old_value = r.values[chosen]
    target = r.returns[chosen]
    near = torch.minimum(torch.maximum(value, old_value - VALUE_CLIP), old_value + VALUE_CLIP)
    value_term = reduced(0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2))

    apart = r.reference[chosen] - raw
    kl_term = reduced(torch.exp(apart) - apart - 1)

    entropy = -(raw_all.exp() * raw_all).sum(-1)[chosen]
    entropy_term = reduced(entropy)
    total = policy_term + VALUE_COEF * value_term + KL_COEF * kl_term - ENTROPY_COEF * entropy_term
    clipped = ((ratio * advantages > surrogate) * mask).sum() / mask.sum()
    terms = {
        "loss/policy": policy_term,
        "loss/value": value_term,
        "loss/kl": kl_term,
        "loss/entropy": entropy_term,
        "loss/total": total,
    }
    return {**terms, "policy/clipped_frac": clipped}


def shuffled(update: int, rows: int) -> list[list[int]]:
    """Return the mini-batches of a step, epoch after epoch, in the addressed order."""
    generator = Seeds(SEED).at("shuffle", "ppo", update)
    half = -(-rows // MINIBATCHES)
    orders = [generator.permutation(rows).tolist() for _ in range(EPOCHS)]
    return [sorted(order[start : start + half]) for order in orders for start in range(0, rows, half)]


def test_every_step_is_the_straight_line_version(bench: Bench, run: Path) -> None:
    policy, reference, start = (
        straight.load(bench.folder / name) for name in ("model", "reference", "model")
    )
    critic, critic_start = Critic(bench.folder / "model"), Critic(bench.folder / "model")
    shared = {"decay": DECAY, "max_norm": MAX_NORM, "warmup": WARMUP, "total": STEPS * EPOCHS * MINIBATCHES}
    optimisers = (
        straight.Optimiser(list(policy.parameters()), rate=RATE, **shared),
        straight.Optimiser(list(critic.parameters()), rate=CRITIC_RATE, **shared),
    )
    curve: list[dict[str, float] | None] = []
    missing = set()
    cut = set()
    clipped = 0.0
    for update, items in enumerate(straight.recorded_steps(run)):
        r = rollout(items, reference, critic)
        missing |= {mark != "ok" for item in items for mark in item.answer.marks}
        reports = []
        for chosen in shuffled(update, len(r.old)):
            terms = losses(policy, critic, r, chosen)
            terms["loss/total"].backward()
            norms = [optimiser.step() for optimiser in optimisers]
            cut |= {norm > MAX_NORM for norm in norms}
            reports.append(
                {name: term.item() for name, term in terms.items()}
                | {"optim/grad_norm": norms[0], "optim/critic_grad_norm": norms[1]}
            )
        means = {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
        clipped += means.pop("policy/clipped_frac")
        means.pop("loss/policy")  # a difference of numbers near 1 that is itself near 0
        curve.append(means)
    assert missing == cut == {True, False}
    assert clipped > 0
    straight.assert_same_curve(run, curve)
    straight.assert_same_weights(run, policy, start)
    prefix = "learner/critic/weights/"
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in policy_weights(run)[2].items()
        if name.startswith(prefix)
    }
    straight.assert_close(found, dict(critic.named_parameters()), dict(critic_start.named_parameters()))


@pytest.mark.slow(
    instead="tests/learner/test_critic.py; tests/faults/test_state.py walks over a run of PPO over the wire",
    seconds=1.1,
)
def test_over_the_wire(config: Path, run: Path) -> None:
    other = run.with_name("wire")
    assert oat("train", config, "--run_dir", other, "--compute.serialise", "true") == 0
    assert digest_run(other) == digest_run(run)


def die_in_an_epoch() -> None:

    kill_at(*named("an optimiser step"), 3 * EPOCHS * MINIBATCHES)


def die_in_a_save() -> None:

    kill_at(*named("a checkpoint is published"), 2)


@pytest.mark.slow(
    instead="tests/faults/test_inner_kills.py::test_killed_inside_an_update, in a run of PPO", seconds=3.8
)
@pytest.mark.parametrize("arm", [die_in_an_epoch, die_in_a_save])
def test_killed_and_continued(config: Path, run: Path, tmp_path: Path, arm: Callable[[], None]) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)
