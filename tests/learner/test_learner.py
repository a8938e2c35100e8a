"""The learner: reduction, micro-batches, optimiser, guard."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, forked, gradient_of, oat
from objectives import OBJECTIVES, VOCABULARY, Poisoned, compared_feedback, row, scored_feedback
from tiny_models import save_llama
from weights import weights_of

from oat.algorithms.base import step_metrics
from oat.algorithms.direct import DPO, DPOConfig
from oat.algorithms.group import GRPO, GRPOConfig
from oat.config.load import load_config
from oat.errors import CheckpointError, NonFiniteError
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel, kept_sets
from oat.learner.optimiser import OptimiserSettings, build_optimiser, learning_rate_factor
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.seeds import Seeds
from oat.types import (
    Feedback,
    Segment,
    Trajectory,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return save_llama(path, vocab_size=VOCABULARY, hidden=16, inner=24, spread=0.3)


def learner_of(
    path: Path,
    *,
    dtype: str = "float32",
    micro: int = 64,
    chunk: int = 4096,
    learning_rate: float = 1e-3,
    **options: Any,
) -> Learner:
    lms = {name: load_lm(str(path)) for name in ("policy", "reference")}
    if dtype == "float64":
        for lm in lms.values():
            lm.module.double()
    with torch.no_grad():
        for parameter in lms["reference"].module.parameters():
            parameter.add_(
                0.05 * torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype)).view_as(parameter)
            )
    models = {name: LanguageModel(lm, num_tokens=VOCABULARY, chunk=chunk) for name, lm in lms.items()}
    optimisers = {
        "policy": OptimiserSettings(learning_rate, schedule_steps=10, **{"max_grad_norm": 1.0, **options})
    }
    return Learner(models, optimisers, micro_batch_size=micro, seeds=Seeds(0))


def gradient(learner: Learner, objective: Any) -> tuple[float, torch.Tensor]:
    """Return the loss and the unclipped gradient of one optimiser step that changes no weight."""
    feedback = compared_feedback() if objective.requires.feedback == "compare" else scored_feedback()
    batch = objective.prepare(feedback, learner.forward, np.random.default_rng(0))
    report, found = gradient_of(learner, lambda: learner.update(objective, batch))
    return report["loss/total"], torch.cat([part.flatten() for part in found.values()])


@pytest.mark.sample("dpo-float64-*", "grpo-token-float64-*", seconds=17.5)
@pytest.mark.fault("R5")
@pytest.mark.inventory(110)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_and_chunks_change_rounding_only(
    model_path: Path, name: str, dtype: str, tolerance: float, figure: Callable[[str], None]
) -> None:
    found = []
    for micro, chunk in ((64, 4096), (8, 4096), (4, 4096), (3, 4096), (1, 5)):
        learner = learner_of(
            model_path, dtype=dtype, micro=micro, chunk=chunk, learning_rate=0.0, max_grad_norm=1e9
        )
        found.append(gradient(learner, OBJECTIVES[name]()))
    loss, expected = found[0]
    assert expected.norm() > 1e-3
    for other_loss, other in found[1:]:
        difference = float((other - expected).norm() / expected.norm())
        figure(f"at most {difference:.1e} between gradients in {dtype}, relative to their norm")
        assert difference <= tolerance
        assert other_loss == pytest.approx(loss, rel=10 * tolerance, abs=tolerance)


@pytest.mark.sample("dpo", seconds=0.4)
@pytest.mark.fault("R5")
@pytest.mark.inventory(110)
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_many_small_passes_end_in_the_weights_of_one_large(model_path: Path, name: str) -> None:
    learners = [learner_of(model_path, dtype="float64", micro=micro) for micro in (64, 3)]
    for learner in learners:
        objective: Any = OBJECTIVES[name]()
        for seed in range(3):
            feedback = compared_feedback(seed=seed) if name == "dpo" else scored_feedback(seed=seed)
            learner.update(objective, objective.prepare(feedback, learner.forward, np.random.default_rng(0)))
    one, other, start = (
        torch.cat([t.flatten() for t in weights_of(learner).values()])
        for learner in (*learners, learner_of(model_path))
    )
    assert (one - start).abs().max() > 1e-3
    assert (one - other).abs().max() < 1e-8


@pytest.mark.slow(instead="tests/golden, bitwise, and tests/faults/test_same_run.py", seconds=2.6)
@pytest.mark.inventory(108)
def test_the_same_seed_gives_the_same_losses(world: World, tmp_path: Path) -> None:
    """The losses of ten steps are equal to the last digit in two runs with one seed. Another seed gives other
    losses."""
    losses = []
    for number, seed in enumerate((3, 3, 4)):
        config = world.config(
            "dpo",
            tmp_path,
            {"seed": seed, "stop.max_steps": 10, "evaluation": None, "learner.learning_rate": 0.03},
        )
        run_dir = tmp_path / str(number)
        assert (
            forked(
                lambda config=config, run_dir=run_dir: oat("train", config, "--run_dir", run_dir),
                tmp_path / "log",
            )
            == 0
        )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss/total"] for line in rows if "loss/total" in line])
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.inventory(93)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("learner.micro_batch_size", 0, "Expected `int` >= 1"),
        ("learner.micro_batch_size", 2.5, "Expected `int"),
        ("learner.sync_every", 0, "Expected `int` >= 1"),
        ("learner.logits_chunk", -1, "Expected `int` >= 1"),
        ("algorithm.prompts", 0, "it must be at least 1"),
        ("algorithm.minibatches", 0, "it must be at least 1"),
        ("algorithm.epochs", -1, "it must be at least 1"),
        ("algorithm.samples", 1, "at least 2 responses a prompt"),
    ],
)
def test_bad_sizes_are_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: float, words: str
) -> None:
    """A wrong size is refused before anything is loaded, and the error names the line of the file."""
    assert oat("train", world.config("grpo", tmp_path, {field: value})) == 2
    printed = capsys.readouterr().err
    assert f"{tmp_path / 'grpo.yaml'}:" in printed
    assert field.split(".")[1] in printed
    assert words in printed
    assert not (tmp_path / "grpo").exists()


RECORDED = {
    "oracle.name": "recorded",
    "evaluation.oracle": "exact_match",
    "prompts.responses": ["answer", "other"],
}


@pytest.mark.inventory(93)
@pytest.mark.parametrize(
    ("algorithm", "changes", "most"),
    [
        ("grpo", {}, "12 rows"),
        ("dpo", {}, "4 pairs"),
        ("sft", {**RECORDED, "algorithm.samples": 2}, "8 rows"),
    ],
)
def test_a_step_is_not_cut_into_more_parts_than_it_has(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    changes: dict[str, Any],
    most: str,
) -> None:
    limit = int(most.split()[0])
    config = world.config(algorithm, tmp_path, {**changes, "algorithm.minibatches": limit + 1})
    assert oat("train", config) == 2
    line = config.read_text().splitlines().index(f"  minibatches: {limit + 1}") + 1
    words = (
        f"{config}:{line}: algorithm.minibatches is {limit + 1}: a step has at most {most}; lower it, or "
        "raise algorithm.prompts"
    )
    assert words in capsys.readouterr().err
    assert not (tmp_path / algorithm).exists()
    resolve(*load_config(config, ["--algorithm.minibatches", str(limit)]))


def test_a_masked_pair_changes_neither_loss_nor_gradient(model_path: Path) -> None:
    objective = DPO(DPOConfig(prompts=6))
    feedback = compared_feedback()
    without = Feedback(1, tuple(item for item in feedback.items if item.label is not None), feedback.queries)
    results = []
    for case in (feedback, without):
        learner = learner_of(model_path, learning_rate=0.0)
        batch = objective.prepare(case, learner.forward, np.random.default_rng(0))
        report, found = gradient_of(learner, functools.partial(learner.update, objective, batch))
        results.append((report["loss/total"], found["lm_head.weight"]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_shuffled_groups_change_rounding_only(model_path: Path) -> None:
    feedback, objective = scored_feedback(), OBJECTIVES["grpo"]()
    shuffled = Feedback(1, tuple(feedback.items[i] for i in (2, 0, 3, 1)), feedback.queries)
    losses = []
    for case in (feedback, shuffled):
        learner = learner_of(model_path, learning_rate=0.0)
        losses.append(
            learner.update(objective, objective.prepare(case, learner.forward, np.random.default_rng(0)))[
                "optim/grad_norm"
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_epochs_and_minibatches_count_optimiser_steps(model_path: Path) -> None:
    learner = learner_of(model_path)
    objective = GRPO(GRPOConfig(prompts=4, samples=4, epochs=2, minibatches=3))
    report = learner.update(
        objective, objective.prepare(scored_feedback(), learner.forward, np.random.default_rng(0))
    )
    assert report["optim/steps"] == 6


def test_an_empty_batch_changes_nothing(model_path: Path) -> None:
    learner, objective = learner_of(model_path), DPO(DPOConfig(prompts=1))
    before = {name: tensor.clone() for name, tensor in learner.named_tensors("policy")}
    ties = Feedback(1, tuple(item for item in compared_feedback().items if item.label is None), 2)
    report = learner.update(objective, objective.prepare(ties, learner.forward, np.random.default_rng(0)))
    assert report["rows/trained"] == 0
    assert step_metrics(ties)["answers/tied_frac"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.named_tensors("policy"))


@pytest.mark.fault("R20")
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_moves_nothing(model_path: Path, where: str) -> None:
    learner, objective = learner_of(model_path), Poisoned(DPOConfig(prompts=6), where)
    before = {name: tensor.clone() for name, tensor in learner.named_tensors("policy")}
    batch = objective.prepare(compared_feedback(), learner.forward, np.random.default_rng(0))
    with pytest.raises(NonFiniteError, match="no weight was moved"):
        learner.update(objective, batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.named_tensors("policy"))


def test_weight_decay_leaves_vectors_alone(model_path: Path) -> None:
    module = load_lm(str(model_path)).module
    optimiser = build_optimiser(module.parameters(), OptimiserSettings(1e-3, weight_decay=0.1))
    for group in optimiser.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(list(module.parameters()))


@pytest.mark.inventory(109)
def test_schedules_by_hand() -> None:
    factors: Mapping[str, list[float]] = {
        "constant": [0.5, 1, 1, 1, 1, 1],
        "linear": [0.5, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * 0.25],
        "cosine": [0.5, 1, 1, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5))],
    }
    for schedule, expected in factors.items():
        found = [learning_rate_factor(schedule, step, warmup=2, total=6) for step in range(6)]  # type: ignore[arg-type]
        assert found == pytest.approx(expected)
    assert learning_rate_factor("cosine", 99, warmup=2, total=6) == pytest.approx(0.1)


@pytest.mark.inventory(109)
def test_the_learning_rate_follows_the_schedule(model_path: Path) -> None:
    learner, objective = learner_of(model_path, schedule="linear", warmup_steps=2), DPO(DPOConfig(prompts=6))
    rates = []
    for _ in range(3):
        batch = objective.prepare(compared_feedback(), learner.forward, np.random.default_rng(0))
        rates.append(learner.update(objective, batch)["optim/learning_rate"])
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_gradients_are_clipped_and_reported_before(model_path: Path) -> None:
    learner, objective = learner_of(model_path, max_grad_norm=1e-3), DPO(DPOConfig(prompts=6))
    batch = objective.prepare(compared_feedback(), learner.forward, np.random.default_rng(0))
    report, found = gradient_of(learner, lambda: learner.update(objective, batch))
    clipped = torch.cat([part.flatten() for part in found.values()]).double().norm()
    assert float(clipped) == pytest.approx(1e-3, rel=1e-7)
    whole = learner_of(model_path, max_grad_norm=math.inf)
    other, found = gradient_of(whole, lambda: whole.update(objective, batch))
    norm = float(torch.cat([part.flatten() for part in found.values()]).double().norm())
    assert report["optim/grad_norm"] == other["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert norm > 1e-2


def test_state_round_trip_continues_bitwise(model_path: Path) -> None:
    objective, one = DPO(DPOConfig(prompts=6)), learner_of(model_path)

    def step(learner: Learner, seed: int) -> None:
        learner.update(
            objective,
            objective.prepare(compared_feedback(seed=seed), learner.forward, np.random.default_rng(0)),
        )

    step(one, 0)
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in one.state.items()
    }
    other = learner_of(model_path)
    other.load_state(state)
    for learner in (one, other):
        step(learner, 1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            weights_of(one).values(),
            weights_of(other).values(),
            strict=True,
        )
    )


@pytest.mark.parametrize("says", [True, False], ids=["new", "old"])
def test_a_state_with_other_moments_is_refused(model_path: Path, *, says: bool) -> None:
    """Each moment of each weight is needed, and there may be no other: neither of a weight that is unknown,
    nor of one that had none. Checkpoints of earlier versions do not say which weights had none."""
    objective, one = DPO(DPOConfig(prompts=6)), learner_of(model_path)
    fresh = learner_of(model_path)
    fresh.load_state(one.state)
    one.update(objective, objective.prepare(compared_feedback(), one.forward, np.random.default_rng(0)))
    state = one.state
    names = [name for name in state if "/moments/" in name]
    of_weight: dict[str, list[str]] = {}
    for name in names:
        of_weight.setdefault(name.split("/", 3)[3], []).append(name)
    weight, (first, *_) = of_weight.popitem()
    assert len(names) == 3 * (1 + len(of_weight))

    def without(*lost: str) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name not in lost}

    assert state["without_moments"] == {"policy": []}
    faults = [without(*names), *(without(name) for name in names)]
    faults += [{**state, f"policy/moments/{more}": state[first]} for more in ("step/none", f"max/{weight}")]
    if says:
        faults += [without(*lost) for lost in of_weight.values()]
        faults.append({**state, "without_moments": {"policy": [weight]}})
    for fault in faults:
        if not says:
            del fault["without_moments"]
        with pytest.raises(CheckpointError, match="other moments of Adam than the policy needs"):
            fresh.load_state(fault)
    lacking = without(*(name for name in names if name.endswith(f"/{weight}")))
    if says:
        lacking["without_moments"] = {"policy": [weight]}
    else:
        del lacking["without_moments"]
    fresh.load_state(lacking)


def plain_logps(lm: CausalLM, trajectory: Trajectory, temperature: float = 1.0) -> list[float]:
    """Return log-probabilities of the trained tokens from the module's own logits, one sequence at a time."""
    ids = torch.from_numpy(trajectory.ids.astype(np.int64))
    with torch.no_grad():
        logits = lm.module(input_ids=ids[None]).logits[0] / temperature
    return [float(logits[t - 1].log_softmax(-1)[ids[t]]) for t in range(len(ids)) if trajectory.trained[t]]


@pytest.mark.inventory(1)
def test_log_probabilities_of_three_tokens_by_hand(model_path: Path) -> None:
    """The log-probability of one trained token equals the one computed by hand. The token is the third of its
    row, so the logits at the second token predict it."""
    ids = np.array([3, 7, 5], dtype=np.int32)
    segments = Segment("context", ids[:2]), Segment("model", ids[2:], np.ones(1, bool))
    lm = load_lm(str(model_path))
    found = LanguageModel(lm, num_tokens=VOCABULARY, chunk=4).outputs(
        [Trajectory("sampler", segments, "stop", "")], {}, {"raw"}
    )["raw"]
    with torch.no_grad():
        logits = lm.module(input_ids=torch.tensor([[3, 7, 5]])).logits[0, 1].tolist()
    total = 0.0
    for logit in logits:
        total += math.exp(logit)
    assert found.tolist() == pytest.approx([logits[5] - math.log(total)], abs=1e-6)


@pytest.mark.inventory(2)
def test_padding_on_either_side_changes_nothing(model_path: Path) -> None:
    generator = np.random.default_rng(8)
    short, long = row(generator, 3, 4), row(generator, 6, 9)
    lm = load_lm(str(model_path))
    model = LanguageModel(lm, num_tokens=VOCABULARY, chunk=64)
    alone = model.outputs([short], {}, {"raw"})["raw"]
    right = model.outputs([short, long], {}, {"raw"})["raw"][:4]
    with torch.no_grad():
        ids = torch.from_numpy(np.concatenate([np.zeros(5, np.int64), short.ids]))[None]
        mask, positions = torch.tensor([[False] * 5 + [True] * 7]), torch.tensor([[1] * 5 + list(range(7))])
        logits = lm.module(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, -5:-1]
    left = logits.log_softmax(-1).gather(1, ids[0, -4:, None]).squeeze(1)
    assert right.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
    assert left.tolist() == pytest.approx(alone.tolist(), abs=1e-5)


def test_outputs_equal_a_plain_forward(model_path: Path) -> None:
    generator = np.random.default_rng(5)
    rows = [
        row(generator, 4, 3, temperature=0.7),
        row(generator, 2, 7, temperature=0.7),
        row(generator, 1, 0, temperature=0.7),
    ]
    lm = load_lm(str(model_path))
    found = LanguageModel(lm, num_tokens=VOCABULARY, chunk=4).outputs(rows, {}, {"raw", "sampled", "entropy"})
    assert found["raw"].tolist() == pytest.approx([x for r in rows for x in plain_logps(lm, r)], abs=1e-5)
    assert found["sampled"].tolist() == pytest.approx(
        [x for r in rows for x in plain_logps(lm, r, 0.7)], abs=1e-5
    )


def test_sampled_renormalises_over_the_recorded_sets(model_path: Path) -> None:
    generator = np.random.default_rng(6)
    rows = [row(generator, 4, 3, kept=True), row(generator, 2, 6, kept=True)]
    lm = load_lm(str(model_path))
    found = LanguageModel(lm, num_tokens=VOCABULARY, chunk=4).outputs(rows, {}, {"sampled"})["sampled"]
    expected = []
    for r in rows:
        ids, kept = torch.from_numpy(r.ids.astype(np.int64)), r.segments[1].kept
        assert kept is not None
        with torch.no_grad():
            logits = lm.module(input_ids=ids[None]).logits[0]
        start = len(r.segments[0].ids)
        for t in range(start, len(ids)):
            chosen = kept.ids[kept.offsets[t - start] : kept.offsets[t - start + 1]]
            expected.append(
                float(
                    logits[t - 1, ids[t]]
                    - torch.logsumexp(logits[t - 1, torch.from_numpy(chosen.astype(np.int64))], -1)
                )
            )
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    flat, bounds = kept_sets(rows)
    assert len(bounds) == len(expected) + 1
    assert bounds[-1] == len(flat)


def test_the_critic_values_the_state_before_each_token(model_path: Path) -> None:
    generator = np.random.default_rng(7)
    rows = [row(generator, 4, 3), row(generator, 2, 6)]
    critic = Critic(load_lm(str(model_path)), np.random.default_rng(0))
    found = critic.outputs(rows, {}, {"value"})["value"]
    expected = []
    for r in rows:
        ids = torch.from_numpy(r.ids.astype(np.int64))
        with torch.no_grad():
            values = critic.score(critic.backbone(input_ids=ids[None]).last_hidden_state[0])
        expected += [float(values[t - 1]) for t in range(len(ids)) if r.trained[t]]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
