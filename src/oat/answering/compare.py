"""`oat eval A --against B`: find which of two models answers held-out prompts better.

Both models answer those held-out prompts that are short enough for both, with the same random numbers.
Response i of one model is compared with response i of the other model:
* A comparing oracle is asked about each pair in both orders. The mean of the two probabilities decides, so a
  preference for the first place cancels.
* With a scoring oracle, the higher score wins.
* A tie (equal scores, or a mean of one half) counts as half a win.

Only one policy is in memory at a time. Each question is about a group that has the responses of both models.
The questions are recorded in a temporary ledger, so neither run is changed.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oat.answering.contenders import ComparedModel, contenders_of
from oat.answering.learned import load_trained_policy
from oat.assemble.fingerprints import recorded
from oat.assemble.run import build
from oat.assemble.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.evaluation.evaluation import Evaluation, EvaluationOracle
from oat.evaluation.statistics import average, bootstrap_interval, length_controlled_win_rate, wins
from oat.loop import Run
from oat.seeds import Seeds
from oat.types import Feedback, Group, Key, Prompt, Question

SLOT = "policy"


def compare_models(first: str, second: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Let both models respond to held-out prompts, and compute how often the first model's responses win.

    Args:
        first, second: a run directory, a configuration file, or a model (a directory or a hub id). Prompts,
            sampling, seed and oracle are those of `first`. If `first` is a model, they are those of `second`.
        flags: settings from the command line. They override those of `first` or `second`.

    Returns:
        "a" and "b": the two arguments. "a_step" and "b_step": the number of updates that each model has had.
        "prompts": the number of prompts. "oracle": the address of the oracle.

        Each mode of evaluations ("sampled", "greedy") adds numbers. Their names begin with the name of the
        mode:
        * the win rate of the first model, the ends of its 95 % interval over prompts, and the win rate at
          equal lengths;
        * the mean lengths of both models' responses, in characters;
        * with a scoring oracle, the mean scores of both models;
        * with a comparing oracle, the mean probability that the first model wins, and the share of pairs for
          which both orders give the same winner or both give a tie.

        Numbers that cannot be computed are left out.

    Raises:
        OatError: neither argument is a run or a configuration, the configuration has no held-out prompts, a
            part cannot be made as configured, or sampling or the oracle failed.
    """
    contenders = contenders_of(first, second, flags)
    inputs = [_inputs_of(contender) for contender in contenders]
    prompts = _common_prompts(inputs)
    other_step, others = _sample_apart(contenders[1], inputs[1], prompts)
    with tempfile.TemporaryDirectory() as scratch:
        run, step = _build(contenders[0], inputs[0], Path(scratch))
        evaluation = _evaluation_of(run)
        feedback = _ask(run, evaluation, _sample(evaluation, prompts), others)
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


def _inputs_of(contender: ComparedModel) -> RunInputs:
    known = None if contender.run_dir is None else recorded(contender.run_dir)
    run_inputs = gather_inputs(contender.resolved, has_opponent=True, known=known)
    if contender.run_dir is not None:
        refuse_weights(contender.resolved, run_inputs, is_begun=True)
    return run_inputs


def _common_prompts(inputs: Sequence[RunInputs]) -> list[Prompt]:
    """Return the held-out prompts that are short enough for both models."""
    first, second = (run_inputs.held_out for run_inputs in inputs)
    assert first is not None, "a comparison has a section `evaluation`"
    assert second is not None, "both contenders have the same section `evaluation`"
    rows = {prompt.row for prompt in second.all()}
    return [prompt for prompt in first.all() if prompt.row in rows]


def _build(contender: ComparedModel, run_inputs: RunInputs, scratch: Path) -> tuple[Run, int]:
    """Build a run that samples with a contender's policy. Return the run, and the number of updates that the
    policy has had."""
    run = build(contender.resolved, directory=scratch, run_inputs=run_inputs)
    step = load_trained_policy(run, contender.run_dir) if contender.run_dir is not None else 0
    run.weights.push(SLOT, step, run.learner)
    return run, step


def _evaluation_of(run: Run) -> Evaluation:
    assert isinstance(run.evaluation, Evaluation), "a comparison has a section `evaluation`"
    return run.evaluation


def _sample_apart(
    contender: ComparedModel, run_inputs: RunInputs, prompts: Sequence[Prompt]
) -> tuple[int, list[list[Group]]]:
    """Sample a contender's responses. On return, its models are no longer in memory.

    Returns:
        The number of updates that the contender's policy has had, and its groups, as `_sample` returns them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run, step = _build(contender, run_inputs, Path(scratch))
        groups = _sample(_evaluation_of(run), prompts)
        run.ledger.close()
    return step, groups


def _sample(evaluation: Evaluation, prompts: Sequence[Prompt]) -> list[list[Group]]:
    """Sample responses. Return one list for each mode of the evaluation (`sampled`, `greedy`). A list has one
    group for each prompt."""
    return [
        evaluation.actor.sample(prompts, {SLOT: mode.samples}, ("eval", mode.name), mode.sampling)
        for mode in evaluation.modes
    ]


def _ask(
    run: Run, evaluation: Evaluation, ours: Sequence[Sequence[Group]], theirs: Sequence[Sequence[Group]]
) -> Feedback:
    """Ask the oracle about groups that have the responses of both models, and return its answers.

    Args:
        ours, theirs: the groups of the first model, and those of the second. For each mode there is a list
            with one group for each prompt. In the joined groups, the first model's responses come first.
    """
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
    """Return two values: the first model's wins, (B, G); and, by name, the mean scores of both models. A win
    is 1 if the first model's response has the higher score, 0.5 if the scores are equal, and 0 if it has the
    lower score; NaN if a score is missing."""
    values = np.array([_values(item) for item in items])
    ours_BG, theirs_BG = values[:, :samples], values[:, samples:]
    wins_BG = (1.0 + np.sign(ours_BG - theirs_BG)) / 2.0
    return wins_BG, {"score": average(ours_BG), "other_score": average(theirs_BG)}


def _compared(items: Sequence[Any], samples: int) -> tuple[np.ndarray, dict[str, float | None]]:
    """Return the first model's wins, (B, G), and two numbers by name. The mean of a pair's probabilities in
    both orders decides who wins. The numbers are the average of these means, and the share of pairs for which
    both orders give the same winner or both give a tie."""
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
    """Return the values of an answer. A tie is 0.5; a missing value is NaN."""
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
    """Return the numbers of a mode ("sampled" or "greedy") by name, without those that cannot be computed.

    Args:
        wins_BG: (B, G) wins of the first model.
        others: further numbers by name. This function puts the name of the mode before each name.
    """
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
