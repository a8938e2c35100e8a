"""`oat features`: before a run is paid for, say how much the features of its explorer tell about the oracle.

The policy samples responses to a few prompts. The oracle compares them in pairs, and a ridge regression
learns to predict its values from the features. Prompts that the regression has not seen say how good it is:

* correlation: of predicted and true scores within a prompt, over all responses of the prompts; 1 is perfect,
  and 0 is a guess;
* pick: the mean score of the response with the highest predicted score of each prompt, beside the mean of a
  random response and of the best one.

If the oracle gives no scores, but compares, the regression learns from differences of features. Then the
correlation is that with the oracle's probability that the first response of a pair wins, and there is no
pick.

The first row of the table has the features of the configuration; further rows have other layers and poolings
of the same backbone. Features of the policy are read in a pass of their own here.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oat.commands.interruptible import hearing_signals
from oat.errors import ConfigError, plural
from oat.explore.settings import FeaturesConfig
from oat.types import Group, Item, Key, Mark, Prompt, Question

if TYPE_CHECKING:
    from oat.models.causal_lm import CausalLM
    from oat.resolve.resolved import Resolved
    from oat.rollout.features import Features

_PURPOSE = "features"
_STRENGTHS = tuple(10.0**power for power in range(-2, 6))
"""The strengths of the ridge regression that cross-validation chooses from."""
_FOLDS = 5


@dataclass(frozen=True)
class Judged:
    """What features tell about an oracle.

    Attributes:
        name: layer and pooling.
        width: number of features of a response.
        correlation: see the module's docstring; NaN if the oracle's values do not differ.
        pick, random, best: mean scores; None without scores.
    """

    name: str
    width: int
    correlation: float
    pick: float | None = None
    random: float | None = None
    best: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG", help="a YAML file; flags --section.field value override its settings"
    )
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="prompts; default: 64")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="responses per prompt, half as many pairs; default: as many as the explorer takes",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.75,
        metavar="X",
        help="share of the prompts that the regression learns from; default: 0.75",
    )


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import loaded_for, resolve_file

    read = partial(resolve_file, arguments.target, flags)
    with hearing_signals(read, lambda found: loaded_for(found.config)) as (told, resolved), told.at_once():
        found, asked = judge_features(resolved, arguments.prompts, arguments.samples, arguments.share)
    print(f"{table(found)}\noat features: {asked}")
    return 0


def judge_features(
    resolved: "Resolved", prompts: int, samples: int | None, share: float
) -> tuple[list[Judged], str]:
    """Sample, ask and regress. The run's directory is not touched. Return the results, and what was asked.

    Args:
        resolved: a configuration whose explorer reads features. The caller uses this object for nothing else.
        prompts: number of prompts.
        samples: responses per prompt; None: as many as the explorer chooses from.
        share: share of the prompts that the regression learns from; the others say how good it is.

    Raises:
        ConfigError: the explorer reads no features, a number is out of range, the prompts have too few
            different texts, or the oracle gave too few answers.
        OatError: the run cannot be made, or the oracle fails.
    """
    from oat.assemble.ensemble import features_with
    from oat.assemble.late_checks import check_backbone
    from oat.assemble.run import build
    from oat.assemble.run_inputs import gather_inputs

    settings = resolved.features
    if settings is None:
        raise ConfigError("this configuration's explorer reads no features; set explorer: {name: ensemble}")
    count = samples or max(resolved.widened.samples.values())
    if prompts < 4 or count < 2 or not 0 < share < 1:
        raise ConfigError("give at least 4 prompts and 2 samples, and a share between 0 and 1")
    resolved = resolved.without_wire()
    with tempfile.TemporaryDirectory() as scratch:
        run_inputs = gather_inputs(resolved, folder=Path(scratch))
        check_backbone(resolved, run_inputs.prompts, is_begun=False)
        run = build(resolved, directory=Path(scratch), run_inputs=run_inputs)
        try:
            run.weights.restore(run.learner)
            collector: Any = run.collector
            taken = collector.prompts.take(prompts)
            with resolved.error_context("prompts.path"):
                learned = _learned_prompts(taken, share, count // 2)
            groups = collector.actor.sample(taken, {"sampler": count}, (_PURPOSE,))
            questions = _questions(groups, run_inputs.training_oracle[0])
            run.ledger.ask(0, 0, groups, questions, _PURPOSE)
            feedback = run.ledger.take_feedback(0, len(questions), purpose=_PURPOSE)
            items, oracle = feedback.items, run_inputs.training_oracle[0]
            lms = _backbones(run.learner, collector.actor, settings)
            found = [
                _judge(_named(each), features_with(lms, each), groups, items, learned)
                for each in _variants(settings)
            ]
            return found, f"asked {oracle} about {len(items)} pairs: {feedback.queries} queries"
        finally:
            run.ledger.close()


def _backbones(learner: Any, actor: Any, settings: FeaturesConfig) -> "dict[str, CausalLM]":
    """Return the models of a run's learner and actor that features may be read from, by name."""
    from oat.rollout.features import SecondPass

    lms = {"policy": learner.models["policy"].lm}
    features = actor.features
    return {**lms, **({settings.backbone: features.lm} if isinstance(features, SecondPass) else {})}


def _variants(settings: FeaturesConfig) -> list[FeaturesConfig]:
    """Return the settings, and those of other layers and poolings of the same backbone. A PairRM has no
    others."""
    from oat.models.loading import load_config
    from oat.models.pairrm import is_pairrm

    if settings.is_own and is_pairrm(load_config(settings.backbone)):
        return [settings]
    others = [
        replace(settings, layer=layer, pooling=pooling)
        for layer in (-1, "all")
        for pooling in ("last", "mean")
    ]
    return list(dict.fromkeys([settings, *others]))


def _named(settings: FeaturesConfig) -> str:
    layer = "all layers" if settings.layer == "all" else f"layer {settings.layer}"
    return f"{layer}, {settings.pooling}"


def _questions(groups: Sequence[Group], oracle: str) -> list[Question]:
    """Return comparisons of the first response of each group with the second, the third with the fourth, and
    so on."""
    return [
        Question.about(
            group,
            Key(_PURPOSE, 0, 0, group.prompt.occurrence, first // 2),
            "compare",
            (first, first + 1),
            oracle,
        )
        for group in groups
        for first in range(0, len(group.trajectories) - 1, 2)
    ]


def _learned_prompts(prompts: Sequence[Prompt], share: float, pairs: int) -> set[int]:
    """Return the occurrences of the prompts that the regression learns from. Prompts with equal texts are all
    learned, or none of them is: features read nothing but the text of a prompt and a response.

    Args:
        pairs: number of pairs of each prompt.

    Raises:
        ConfigError: the prompts have too few different texts to learn from some and to judge by others.
    """
    texts = list(dict.fromkeys(_text(prompt) for prompt in prompts))
    learned = set(texts[: max(2, min(len(texts) - 2, round(len(texts) * share)))])
    found = {prompt.occurrence for prompt in prompts if _text(prompt) in learned}
    if (len(prompts) - len(found)) * pairs < 2:
        raise ConfigError(
            f"prompts.path gives {plural(len(prompts), 'prompt')} with "
            f"{plural(len(texts), 'different text')}; two are to learn from, and others, with at least two "
            "pairs of responses, to judge by; give at "
            "least 4 different ones"
        )
    return found


def _text(prompt: Prompt) -> str:
    """Return all that features read of a prompt."""
    return json.dumps([message.plain for message in prompt.messages], sort_keys=True)


def _judge(
    name: str, features: "Features", groups: Sequence[Group], items: Sequence[Item], learned: set[int]
) -> Judged:
    """Fit and measure one kind of features."""
    number_of = {group.prompt.occurrence: number for number, group in enumerate(groups)}
    found = [features_GD.astype(np.float64) for features_GD in features.of(groups)]
    told = [item for item in items if item.answer.marks[0] in ("ok", "tie")]
    has_scores = bool(told) and all(
        len(item.answer.scores) == 2 and None not in item.answer.scores for item in told
    )
    rows, values, places = [], [], []
    for item in told:
        place = number_of[item.question.key.occurrence]
        first, second = (found[place][pick] for pick in item.question.picks)
        if has_scores:
            rows += [first, second]
            values += [float(score) for score in item.answer.scores if score is not None]
            places += [place, place]
        else:
            rows.append(first - second)
            values.append(item.answer.values[0] - 0.5)
            places.append(place)
    x_ND, y_N, place_N = np.array(rows), np.array(values), np.array(places)
    is_learned_N = np.isin(place_N, [number_of[place] for place in learned])
    if is_learned_N.sum() < 2 or (~is_learned_N).sum() < 2:
        raise ConfigError(_too_few(items))
    if has_scores:
        x_ND, y_N = _centred(x_ND, place_N), _centred(y_N[:, None], place_N)[:, 0]
    texts = [_text(group.prompt) for group in groups]
    fold_N = np.array([texts.index(text) for text in texts])[place_N] % _FOLDS
    weights_D = _ridge(x_ND[is_learned_N], y_N[is_learned_N], fold_N[is_learned_N])
    predicted_N = x_ND @ weights_D
    correlation = _correlation(predicted_N[~is_learned_N], y_N[~is_learned_N])
    if not has_scores:
        return Judged(name, features.width, correlation)
    picks = []
    for place in np.unique(place_N[~is_learned_N]):
        own = place_N == place
        raw = np.array(values)[own]
        picks.append((raw[predicted_N[own].argmax()], raw.mean(), raw.max()))
    return Judged(name, features.width, correlation, *map(float, np.mean(picks, axis=0)))


def _too_few(items: Sequence[Item]) -> str:
    """Say why the answers do not suffice: only missing ones leave too few."""
    marks = Counter(item.answer.marks[0] for item in items)
    missing: dict[Mark, str] = {
        "abstain": "it abstained on",
        "failed": "it failed on",
        "unpaid": "there was no budget for",
    }
    why = ", ".join(f"{said} {marks[mark]}" for mark, said in missing.items() if marks[mark])
    return (
        f"the oracle gave a value for {marks['ok'] + marks['tie']} of {len(items)} pairs ({why}), which is "
        "too few to learn from some and to judge by others; look at the oracle, "
        "or raise --prompts"
    )


def _centred(values_ND: np.ndarray, place_N: np.ndarray) -> np.ndarray:
    """Subtract the mean of each prompt."""
    found_ND = values_ND.copy()
    for place in np.unique(place_N):
        found_ND[place_N == place] -= found_ND[place_N == place].mean(axis=0)
    return found_ND


def _ridge(x_ND: np.ndarray, y_N: np.ndarray, fold_N: np.ndarray) -> np.ndarray:
    """Fit a ridge regression without intercept. Its strength has the smallest squared error in
    cross-validation over the folds of prompts. Features are scaled to a standard deviation of 1."""
    scale_D = np.maximum(x_ND.std(axis=0), 1e-12)
    scaled_ND = x_ND / scale_D

    def error(strength: float) -> float:
        total = 0.0
        for fold in np.unique(fold_N):
            out = fold_N == fold
            if out.all():
                return float("inf")
            weights_D = _solve(scaled_ND[~out], y_N[~out], strength)
            total += float(((scaled_ND[out] @ weights_D - y_N[out]) ** 2).sum())
        return total

    best = min(_STRENGTHS, key=error)
    return _solve(scaled_ND, y_N, best) / scale_D


def _solve(x_ND: np.ndarray, y_N: np.ndarray, strength: float) -> np.ndarray:
    """Return the weights of a ridge regression, by the smaller of the two systems of equations."""
    rows, width = x_ND.shape
    if width <= rows:
        return np.linalg.solve(x_ND.T @ x_ND + strength * np.eye(width), x_ND.T @ y_N)
    return x_ND.T @ np.linalg.solve(x_ND @ x_ND.T + strength * np.eye(rows), y_N)


def _correlation(one_N: np.ndarray, other_N: np.ndarray) -> float:
    spread = float(one_N.std() * other_N.std())
    covariance = float(((one_N - one_N.mean()) * (other_N - other_N.mean())).mean())
    return covariance / spread if spread else float("nan")


def table(found: Sequence[Judged]) -> str:
    """Return the results as a table for people."""
    lines = [f"{'features':<20}{'numbers':>8}{'correlation':>13}{'pick':>9}{'random':>9}{'best':>9}"]
    for each in found:
        scores = "".join(
            f"{'-' if value is None else f'{value:.3f}':>9}" for value in (each.pick, each.random, each.best)
        )
        lines.append(f"{each.name:<20}{each.width:>8}{each.correlation:>13.2f}{scores}")
    return "\n".join(lines)
