"""The explorer `ensemble`: a rule chooses a pair of each prompt's candidates from the rewards of an ensemble
(SEA, arXiv:2411.01493; EE4LLM, arXiv:2402.00396), and the ensemble may label some pairs itself (mixed
preference learning).

For each group the explorer chooses a pair by the rule (`rules.py`). With `model_labels`, after the burn-in,
some prompts get another pair instead, which the ensemble labels (`model_labels.py`).

Departure from the papers' code: a group has as many candidates as it has different responses. With fewer than
two, no oracle is asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oat.errors import ConfigError, plural
from oat.explore.base import Round
from oat.explore.find_rule import call_rule, find_rule
from oat.explore.metrics import pair_metrics
from oat.explore.model_labels import label_of, model_pairs, num_labelled
from oat.explore.rules import READS_NO_REWARDS, RULES
from oat.explore.settings import EnsembleConfig, EnsembleExplorerConfig, ModelLabelsConfig
from oat.explore.uncertainty import logits_variance, sigmoid
from oat.types import ENSEMBLE, UNASKED, Feedback, Kind, Plan, Question
from oat.types.part import Check, RunFacts


@dataclass(frozen=True, eq=False)
class _Beliefs:
    """What the ensemble believes about the candidates of B prompts. Groups are padded to the largest one.

    Attributes:
        rewards_MBG: 0 where `valid_BG` is false.
        valid_BG: True for candidates.
    """

    rewards_MBG: np.ndarray
    valid_BG: np.ndarray

    @classmethod
    def of(cls, round: Round) -> "_Beliefs":
        sizes = [len(group.trajectories) for group in round.groups]
        valid_BG = np.zeros((len(sizes), max(sizes, default=0)), dtype=bool)
        members = len(round.scores[ENSEMBLE][0]) if sizes else 0
        rewards_MBG = np.zeros((members, *valid_BG.shape), dtype=np.float32)
        for place, size in enumerate(sizes):
            valid_BG[place, :size] = round.candidates[place]
            rewards_MBG[:, place, :size] = round.scores[ENSEMBLE][place]
        return cls(np.where(valid_BG, rewards_MBG, np.float32(0.0)), valid_BG)

    def of_pairs(self, pairs_B2: np.ndarray) -> np.ndarray:
        """Return the rewards of chosen pairs, (M, B, 2)."""
        return np.take_along_axis(self.rewards_MBG, pairs_B2[None], axis=2)


class EnsembleExplorer:
    """See the module's docstring.

    Raises:
        ConfigError: the algorithm does not learn from comparisons, or there is no such rule or option.
    """

    Config = EnsembleExplorerConfig
    needs = frozenset({ENSEMBLE})

    def __init__(self, kind: Kind, config: EnsembleExplorerConfig):
        if kind != "compare":
            raise ConfigError(
                "the explorer ensemble chooses pairs, and the algorithm learns from scores; take an "
                "algorithm that learns from comparisons, such as dpo, or remove the section explorer"
            )
        self.config = config
        self.rule = find_rule(*rule_of(config.rule))

    @staticmethod
    def checks(config: EnsembleExplorerConfig, run: RunFacts) -> list[Check]:
        """Return the checks of the rule, of the ensemble's labels, of the burn-in and of the backbone
        (`oat.types.part`)."""
        labels = config.model_labels
        return [
            *_rule_checks(config),
            *([] if labels is None else _label_checks(labels, config.ensemble)),
            *([] if labels is None else _share_checks(labels, run)),
            *([] if labels is None else _burn_in_checks(labels, run)),
            Check(
                "explorer.features.backbone",
                config.features.backbone == "policy" and (run.has_environment or run.has_recorded),
                "the policy's features are kept while it samples a single response, and here responses are "
                "recorded, or an episode has several; set the field to reference",
            ),
            Check(
                "explorer.features.backbone",
                config.features.is_own and run.has_environment,
                "it reads a prompt and one response, and an episode of an environment may have several; set "
                "the field to reference",
                refuses="new",
            ),
        ]

    def widen(self, plan: Plan) -> Plan:
        """Return the plan with `samples` responses to each prompt."""
        return replace(plan, samples={"sampler": self.config.samples})

    def choose(self, round: Round) -> list[Question]:
        """Return one question for each group. Each has the features of its candidates, and the notes of
        `oat.explore.metrics`."""
        if not round.groups:
            return []
        beliefs = _Beliefs.of(round)
        pairs_B2 = call_rule(self.rule, beliefs.rewards_MBG, beliefs.valid_BG, round.generator)
        has_pair_B = beliefs.valid_BG.sum(axis=1) >= 2
        is_clash_B = (pairs_B2[:, 0] == pairs_B2[:, 1]) & has_pair_B
        if self.config.clash == "random":
            _draw_others(pairs_B2, is_clash_B, beliefs.valid_BG, round.generator)
        is_model_B, is_audited_B = self._label(round, beliefs, pairs_B2)
        notes = _notes(beliefs, pairs_B2, is_clash_B & ~is_model_B)
        questions = []
        for place, (group, key) in enumerate(zip(round.groups, round.keys, strict=True)):
            picks = (int(pairs_B2[place, 0]), int(pairs_B2[place, 1]))
            is_model = bool(is_model_B[place])
            is_pair = picks[0] != picks[1]
            oracle = ENSEMBLE if is_model and not is_audited_B[place] else ""
            if not is_pair or (self._is_pure(round) and not is_model):
                oracle = UNASKED
            question = replace(
                Question.about(group, key, "compare", picks, oracle=oracle),
                features=round.scores["features"][place][list(picks)],
                notes={name: float(values[place]) for name, values in notes.items()}
                | ({"model": 1.0} if is_model else {}),
            )
            if oracle == ENSEMBLE:
                assert self.config.model_labels is not None, "only with model labels the ensemble answers"
                p = label_of(question.notes["belief"], self.config.model_labels, round.generator)
                question = replace(question, known=(p, 1 - p))
            questions.append(question)
        return questions

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return the metrics that `pair_metrics` makes of the notes."""
        return pair_metrics(feedback)

    def _label(self, round: Round, beliefs: _Beliefs, pairs_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Replace the pairs that the ensemble labels. Return `ModelPairs.is_chosen_B` and
        `ModelPairs.is_audited_B`."""
        labels = self.config.model_labels
        if labels is None or not labels.is_burnt_in(round.step, round.pairs):
            none_B = np.zeros(len(pairs_B2), dtype=bool)
            return none_B, none_B
        found = model_pairs(beliefs.rewards_MBG, beliefs.valid_BG, labels, round.generator)
        pairs_B2[found.is_chosen_B] = found.pairs_B2[found.is_chosen_B]
        return found.is_chosen_B, found.is_audited_B

    def _is_pure(self, round: Round) -> bool:
        labels = self.config.model_labels
        return labels is not None and labels.pure and labels.is_burnt_in(round.step, round.pairs)


READS_DISAGREEMENT = frozenset(RULES) - {
    *READS_NO_REWARDS,
    "mean_best_random",
    "mean_best_worst",
    "mean_best_improvement",
}
"""The rules that make no sense for an ensemble of one member."""


def _rule_checks(config: EnsembleExplorerConfig) -> Iterator[Check]:
    """Check that the rule gets what it reads. A run that began with more tries than members goes on: it looks
    at all members."""
    name, options = rule_of(config.rule)
    members, tries = config.ensemble.members, options.get("tries")
    yield Check(
        "explorer.samples",
        config.samples < 3 and name not in READS_NO_REWARDS,
        f"the rule {name} chooses between pairs, and {config.samples} responses are one pair; raise "
        "explorer.samples, for example to 20",
    )
    yield Check(
        "explorer.ensemble.members",
        members < 2 and name in READS_DISAGREEMENT,
        f"the rule {name} reads how much members disagree; give at least 2 members",
    )
    yield Check(
        "explorer.rule",
        name == "eets" and isinstance(tries, int) and tries > members,
        f"tries is {tries}, and the ensemble has {members} members (explorer.ensemble.members), so that no "
        "more can be looked at; lower tries, leave it out for all members, or raise "
        "explorer.ensemble.members",
        refuses="new",
    )


def _label_checks(labels: ModelLabelsConfig, ensemble: EnsembleConfig) -> Iterator[Check]:
    """Check that the ensemble's labels mean something."""
    yield Check(
        "explorer.model_labels.max_variance",
        ensemble.members < 2 and (labels.pick == "certain" or labels.max_variance is not None),
        "the ensemble has one member, so nothing is known about its certainty; give at least 2",
    )
    yield Check(
        "explorer.model_labels",
        not ensemble.learn and ensemble.start is None,
        "the ensemble neither learns nor starts from a learned one, so its labels mean nothing; set "
        "explorer.ensemble.learn to true, or explorer.ensemble.start",
    )
    yield Check(
        "explorer.model_labels.pure",
        labels.pure and ensemble.start is None and labels.burn_in == 0 and labels.burn_in_pairs == 0,
        "without a burn-in no oracle is ever asked, and the ensemble learns nothing; set "
        "explorer.model_labels.burn_in, or explorer.ensemble.start",
    )


def _share_checks(labels: ModelLabelsConfig, run: RunFacts) -> Iterator[Check]:
    """Check that the ensemble labels pairs at all, and that the run can end."""
    if run.questions is None:
        return
    yield Check(
        "explorer.model_labels.share",
        labels.share > 0 and num_labelled(run.questions, labels) == 0,
        f"a step has {plural(run.questions, 'question')}, and this share of them, rounded down, is 0, so the "
        "ensemble labels nothing; raise it, or remove explorer.model_labels",
        refuses="new",
    )
    yield Check(
        "explorer.model_labels.pure",
        labels.pure and labels.audit == 0 and run.max_steps is None and run.steps is None,
        "after the burn-in the run asks no oracle, so stop.max_queries does not end it; set stop.max_steps, "
        "prompts.epochs or explorer.model_labels.audit",
        refuses="never",
    )


def _burn_in_checks(labels: ModelLabelsConfig, run: RunFacts) -> Iterator[Check]:
    """Check that the run does not end before the burn-in does.

    A run is refused if this is certain:

    * It has too few steps for `burn_in`, or for the pairs of `burn_in_pairs`.
    * Its budget has no more queries than `burn_in_pairs`. A pair that counts costs at least one query. It may
      cost less than the highest price: a response that was scored before is not paid again
      (`oracle.repeats`), and a user's oracle may charge less than it states. Ties and abstentions cost as
      much as other pairs. A pair that costs nothing does not count.

    It is only likely, and gives a warning, if one pair of each prompt at the highest price spends the budget
    in the burn-in. For pairs may cost less, and a step asks fewer of them if the rule clashes, or if a prompt
    has fewer than two candidates.
    """
    steps, queries = run.max_steps if run.steps is None else run.steps, run.max_queries
    none = "so the ensemble labels nothing"
    is_short = steps is not None and labels.burn_in >= steps
    yield Check(
        "explorer.model_labels.burn_in",
        is_short,
        f"the run has at most {steps} steps (stop.max_steps, prompts.epochs), {none}; lower it, let the run "
        "have more steps, or set explorer.model_labels to null",
    )
    is_poor = queries is not None and labels.burn_in_pairs >= queries
    yield Check(
        "explorer.model_labels.burn_in_pairs",
        is_poor,
        f"a pair costs at least one query, and stop.max_queries is {queries}, {none}; lower it, or raise "
        "stop.max_queries",
    )
    most = None if steps is None or run.most_questions is None else (steps - 1) * run.most_questions
    yield Check(
        "explorer.model_labels.burn_in_pairs",
        most is not None and labels.burn_in_pairs > most,
        f"before the last of at most {steps} steps, at most {most} pairs are asked, {none}; lower it, or let "
        "the run have more steps (stop.max_steps, prompts.epochs)",
    )
    price = run.question_price
    if queries is None or not price or run.questions is None or is_short or is_poor:
        return
    for name, pairs in (
        ("burn_in", labels.burn_in * run.questions),
        ("burn_in_pairs", labels.burn_in_pairs),
    ):
        yield Check(
            f"explorer.model_labels.{name}",
            pairs * price >= queries,
            f"this is {plural(pairs, 'pair')} at a price of at most {price}, and stop.max_queries is "
            f"{queries}, so the run probably ends before the ensemble labels anything; lower it, or raise "
            "stop.max_queries",
            refuses="never",
        )


def rule_of(rule: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a rule's name and its options.

    Raises:
        ConfigError: the section has no name.
    """
    if isinstance(rule, str):
        return rule, {}
    options = dict(rule)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"explorer.rule is {dict(rule)}; give its `name`, and options of the rule beside it"
        )
    return name, options


def _draw_others(
    pairs_B2: np.ndarray, is_clash_B: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator
) -> None:
    """Draw the second candidate of clashing pairs from the others, in place."""
    drawn_BG = np.where(valid_BG, generator.random(valid_BG.shape), -1.0)
    drawn_BG[np.arange(len(pairs_B2)), pairs_B2[:, 0]] = -1.0
    pairs_B2[is_clash_B, 1] = drawn_BG.argmax(axis=1)[is_clash_B]


def _gaps(beliefs: _Beliefs) -> np.ndarray:
    """Return, for each prompt, by how much the members expect their own best candidate to exceed the best one
    by the mean, (B,), in the mean over members; 0 for a prompt without candidates."""
    hidden_MBG = np.where(beliefs.valid_BG, beliefs.rewards_MBG.astype(float), -np.inf)
    best_B = np.where(beliefs.valid_BG, beliefs.rewards_MBG.mean(axis=0), -np.inf).argmax(axis=1)
    of_best_MB = np.take_along_axis(beliefs.rewards_MBG, best_B[None, :, None], axis=2)[..., 0]
    has_any_B = beliefs.valid_BG.any(axis=1)
    return np.where(has_any_B, np.where(has_any_B, hidden_MBG.max(axis=2), 0.0) - of_best_MB, 0.0).mean(
        axis=0
    )


def _notes(beliefs: _Beliefs, pairs_B2: np.ndarray, is_clash_B: np.ndarray) -> dict[str, np.ndarray]:
    """Return the notes of the questions, (B,) each, by name (`oat.explore.metrics`)."""
    rewards_MB2 = beliefs.of_pairs(pairs_B2).astype(float)
    margin_MB = rewards_MB2[..., 0] - rewards_MB2[..., 1]
    unbiased = int(len(margin_MB) > 1)
    counts_B = beliefs.valid_BG.sum(axis=1)
    is_pair_BGG = beliefs.valid_BG[:, :, None] & beliefs.valid_BG[:, None, :]
    variance_BGG = np.where(is_pair_BGG, logits_variance(beliefs.rewards_MBG), 0.0)
    return {
        "belief": sigmoid(margin_MB).mean(axis=0),
        "reward_first": rewards_MB2[..., 0].mean(axis=0),
        "reward_second": rewards_MB2[..., 1].mean(axis=0),
        "pair_variance": margin_MB.var(axis=0, ddof=unbiased),
        "prompt_variance": variance_BGG.sum(axis=(1, 2)) / np.maximum(counts_B * (counts_B - 1), 1),
        "gap": _gaps(beliefs),
        "second_std": rewards_MB2[..., 1].std(axis=0, ddof=unbiased),
        "clash": is_clash_B.astype(float),
    }
