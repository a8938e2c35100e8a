"""`oat eval A --against B`: which of two models answers held-out prompts better.

Both answer the same prompts under the same random numbers, and response i of one meets response i of the
other. An oracle that compares is asked in both orders, and the mean of both is taken, so that a liking for
whoever stands first cancels; of one that scores the scores are compared. Where both are equal it is a tie,
half a win.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oat.build.contenders import Contender, contenders_of
from oat.build.fingerprints import recorded
from oat.build.learned import take_up_policy
from oat.build.run import build
from oat.build.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.evaluation.evaluation import Evaluation, EvaluationOracle
from oat.evaluation.statistics import average, bootstrap_interval, length_controlled_win_rate, wins
from oat.loop import Run
from oat.seeds import Seeds
from oat.types import Feedback, Group, Key, Prompt, Question

SLOT = "policy"


def compare_models(first: str, second: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """The share of prompts and samples in which the first model beats the second.

    Args:
        first, second: a run directory, a configuration, or a model (a directory or a hub id). Prompts,
            sampling, seed and oracle are those of the first one that is no bare model.
        flags: over its configuration.

    Returns:
        "a", "b", "a_step", "b_step", "prompts", "oracle"; and by mode the win rate of the first with the 95 %
        interval over prompts, and what it would be at equal lengths; the mean scores of both, or the mean
        probability of winning and how often both orders agree.

    Raises:
        OatError: nobody says which prompts and which oracle, or a part cannot be made as configured.
    """
    contenders = contenders_of(first, second, flags)
    inputs = [_inputs_of(contender) for contender in contenders]
    prompts = _common(inputs)
    other_step, others = _answers(contenders[1], inputs[1], prompts)
    with tempfile.TemporaryDirectory() as scratch:
        run, step = _made(contenders[0], inputs[0], Path(scratch))
        evaluation = _evaluation_of(run)
        feedback = _ask(run, evaluation, _sampled(evaluation, prompts), others)
        run.ledger.close()
    found: dict[str, Any] = {
        "a": first,
        "b": second,
        "a_step": step,
        "b_step": other_step,
        "prompts": len(prompts),
        "oracle": evaluation.oracle.address,
    }
    for round, mode in enumerate(evaluation.modes):
        items = [item for item in feedback.items if item.question.key.round == round]
        numbers = (
            _scored(items, mode.samples)
            if evaluation.oracle.kind == "score"
            else _compared(items, mode.samples)
        )
        found |= _summary(mode.name, *numbers, items, mode.samples, evaluation.seeds)
    return found


def _inputs_of(contender: Contender) -> RunInputs:
    known = None if contender.run_dir is None else recorded(contender.run_dir)
    run_inputs = gather_inputs(contender.resolved, has_opponent=True, known=known)
    if contender.run_dir is not None:
        refuse_weights(contender.resolved, run_inputs, is_begun=True)
    return run_inputs


def _common(inputs: Sequence[RunInputs]) -> list[Prompt]:
    """The held-out prompts that are short enough for both."""
    (first, second) = (run_inputs.held_out for run_inputs in inputs)
    assert first is not None, "a comparison has a section `evaluation`"
    assert second is not None, "and both have the same"
    rows = {prompt.row for prompt in second.all()}
    return [prompt for prompt in first.all() if prompt.row in rows]


def _made(contender: Contender, run_inputs: RunInputs, scratch: Path) -> tuple[Run, int]:
    """The run that a contender is of, its policy in the slot that answers, and how many updates it has
    had."""
    run = build(contender.resolved, directory=scratch, run_inputs=run_inputs)
    step = take_up_policy(run, contender.run_dir) if contender.run_dir is not None else 0
    run.weights.push(SLOT, step, run.learner.tensors("policy"))
    return run, step


def _evaluation_of(run: Run) -> Evaluation:
    assert isinstance(run.evaluation, Evaluation), "a comparison has a section `evaluation`"
    return run.evaluation


def _answers(
    contender: Contender, run_inputs: RunInputs, prompts: Sequence[Prompt]
) -> tuple[int, list[list[Group]]]:
    """By mode; the model is gone afterwards, so that there is one at a time."""
    with tempfile.TemporaryDirectory() as scratch:
        run, step = _made(contender, run_inputs, Path(scratch))
        groups = _sampled(_evaluation_of(run), prompts)
        run.ledger.close()
    return step, groups


def _sampled(evaluation: Evaluation, prompts: Sequence[Prompt]) -> list[list[Group]]:
    return [
        evaluation.actor.sample(prompts, {SLOT: mode.samples}, ("eval", mode.name), mode.sampling)
        for mode in evaluation.modes
    ]


def _ask(
    run: Run, evaluation: Evaluation, ours: Sequence[Sequence[Group]], theirs: Sequence[Sequence[Group]]
) -> Feedback:
    """About groups in which the responses of both stand one behind the other."""
    oracle = evaluation.oracle
    for round, (mode, mine, others) in enumerate(zip(evaluation.modes, ours, theirs, strict=True)):
        groups = [
            replace(a, trajectories=(*a.trajectories, *b.trajectories))
            for a, b in zip(mine, others, strict=True)
        ]
        questions = [
            question for group in groups for question in _questions(group, oracle, round, mode.samples)
        ]
        run.ledger.ask(0, round, groups, questions, oracle.purpose)
    return run.ledger.take_feedback(
        0, run.ledger.asked(0, len(evaluation.modes), oracle.purpose), purpose=oracle.purpose
    )


def _questions(group: Group, oracle: EvaluationOracle, round: int, samples: int) -> list[Question]:
    pairs = [(sample, samples + sample) for sample in range(samples)]
    picks = [tuple(range(2 * samples))] if oracle.kind == "score" else [*pairs, *((b, a) for a, b in pairs)]
    keys = [Key(oracle.purpose, 0, round, group.prompt.occurrence, index) for index in range(len(picks))]
    return [
        Question.about(group, key, oracle.kind, pick, oracle.address)
        for key, pick in zip(keys, picks, strict=True)
    ]


def _scored(items: Sequence[Any], samples: int) -> tuple[np.ndarray, dict[str, float | None]]:
    """(B, G) wins, and the mean scores."""
    values = np.array([_values(item) for item in items])
    ours_BG, theirs_BG = values[:, :samples], values[:, samples:]
    return (1.0 + np.sign(ours_BG - theirs_BG)) / 2.0, {
        "score": average(ours_BG),
        "other_score": average(theirs_BG),
    }


def _compared(items: Sequence[Any], samples: int) -> tuple[np.ndarray, dict[str, float | None]]:
    """(B, G) wins by the mean of both orders; the mean probability, and the share of pairs of which both
    orders name the same winner."""
    values = np.array([_values(item)[0] for item in items]).reshape(-1, 2, samples)
    first_BG, second_BG = values[:, 0], 1.0 - values[:, 1]
    mean_BG = (first_BG + second_BG) / 2.0
    is_known = ~np.isnan(mean_BG)
    agrees = np.sign(first_BG - 0.5) == np.sign(second_BG - 0.5)
    return wins(mean_BG), {
        "probability": average(mean_BG),
        "same_in_both_orders": float(agrees[is_known].mean()) if is_known.any() else None,
    }


def _values(item: Any) -> list[float]:
    """A tie is one half; NaN where there is no value."""
    pairs = zip(item.answer.values, item.answer.marks, strict=True)
    return [0.5 if mark == "tie" else value if mark == "ok" else np.nan for value, mark in pairs]


def _summary(
    mode: str,
    wins_BG: np.ndarray,
    others: Mapping[str, float | None],
    items: Sequence[Any],
    samples: int,
    seeds: Seeds,
) -> dict[str, float]:
    """The numbers of a mode by name; none that nothing is known of."""
    groups = list({item.question.key.occurrence: item.group for item in items}.values())
    lengths = np.array([[len(response.text) for response in group.trajectories] for group in groups])
    ours, theirs = lengths[:, :samples], lengths[:, samples:]
    rate = f"{mode}_win_rate"
    found = {
        rate: average(wins_BG),
        f"{rate}_lc": length_controlled_win_rate(wins_BG.ravel(), ours.ravel(), theirs.ravel()),
    }
    if ends := bootstrap_interval(wins_BG, seeds.at("bootstrap", rate)):
        found |= {f"{rate}_low": ends[0], f"{rate}_high": ends[1]}
    found |= {f"{mode}_{name}": value for name, value in others.items()}
    found |= {f"{mode}_characters": float(ours.mean()), f"{mode}_other_characters": float(theirs.mean())}
    return {name: value for name, value in found.items() if value is not None}
