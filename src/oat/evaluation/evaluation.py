"""Evaluation on held-out prompts. It has its own questions, budget and random numbers, so it does not change
what training learns. docs/evaluation.md explains its metrics.

Every evaluation samples responses to the same prompts with the same random numbers. So the samples of two
evaluations differ only because of the weights.

With a scoring oracle, the value of a response is its score. With a comparing oracle, the value is the
probability that the response wins against the data's reference response.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oat.errors import ENDING, OatError, OracleError, warn
from oat.evaluation.modes import Mode, best_of, learned_from
from oat.evaluation.records import RecordFiles
from oat.evaluation.statistics import (
    agreement,
    average,
    bootstrap_interval,
    length_controlled_win_rate,
    majority_at,
    pass_at,
    wins,
)
from oat.evaluation.trigger import Trigger
from oat.protocols import Actor, Ledger
from oat.seeds import Seeds
from oat.types import (
    ENSEMBLE,
    Feedback,
    Group,
    Item,
    Key,
    Kind,
    Mark,
    Price,
    Prompt,
    Question,
    Trajectory,
)
from oat.types.questions import Budget

_Extracted = list[list[Hashable | None]]
"""The answers extracted from responses: B lists of G answers. An answer is None if none was found in the
response, or if the evaluation extracts no answers."""


@dataclass(frozen=True)
class EvaluationOracle:
    """An oracle that evaluations ask, and its budget.

    Attributes:
        purpose: purpose of its questions in the ledger, "eval" or "gold".
        address: address of the oracle.
        kind: "score", or "compare": each response is compared with `Prompt.reference`.
        budget: budget of all evaluations together. An evaluation that could exceed it does not begin.
    """

    purpose: str
    address: str
    kind: Kind
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class ExtraMetrics:
    """Metrics that an evaluation may have in addition to means and win rates.

    Attributes:
        kl: True: estimate the KL divergence between the slot's weights and the reference.
        intervals: True: add a 95 % interval to every mean score and win rate.
        pass_at, majority_at: the values of k for pass@k and majority@k.
        success: lowest value with which a response counts as a success for pass@k.
        extract: function that returns the answer in a text, or None; the majority vote uses it.
        online: True: also evaluate the responses that training sampled.
    """

    kl: bool = False
    intervals: bool = False
    pass_at: tuple[int, ...] = ()
    success: float = 1.0
    majority_at: tuple[int, ...] = ()
    extract: Callable[[str], Hashable | None] | None = None
    online: bool = False


@dataclass(frozen=True, eq=False)
class _Table:
    """The responses of one mode (`Mode`), and an oracle's values of these responses.

    Attributes:
        values_BG: (B, G) values; one half for a tie, NaN for a response without a value.
        groups: by a prompt's index in `values_BG`, the group of the sampled responses. The data's reference
            response is left out.
        marks: mark of each response, by (index of the prompt, index of the response).
    """

    values_BG: np.ndarray
    groups: dict[int, Group] = field(default_factory=dict)
    marks: dict[tuple[int, int], Mark] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        place = item.question.key.occurrence
        question = item.question
        samples = self.values_BG.shape[1]
        self.groups[place] = replace(item.group, trajectories=item.group.trajectories[:samples])
        for pick, value, mark in zip(
            question.picks, item.answer.values, item.answer.marks, strict=question.kind == "score"
        ):
            self.marks[place, pick] = mark
            self.values_BG[place, pick] = 0.5 if mark == "tie" else value if mark == "ok" else np.nan

    def map(self, measure: Callable[[Group, Trajectory], float]) -> np.ndarray:
        """Return a number for each response, (B, G); 0 for a response that does not exist.

        Args:
            measure: function that returns the number of one response.
        """
        found = np.zeros(self.values_BG.shape)
        for place, group in self.groups.items():
            found[place] = [measure(group, response) for response in group.trajectories]
        return found


class Evaluation:
    """Evaluates on held-out prompts. The ledger records all questions and answers. So a run that is killed
    and continued does not pay again for a recorded answer.

    Args:
        oracles: one or two oracles; the second judges the same responses as the first.
        slot: the slot whose weights sample the responses.
        measure: function that returns metrics for which no oracle is asked.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        actor: Actor,
        ledger: Ledger,
        modes: Sequence[Mode],
        oracles: Sequence[EvaluationOracle],
        *,
        slot: str,
        trigger: Trigger,
        extra: ExtraMetrics,
        records: RecordFiles,
        seeds: Seeds,
        measure: Callable[[], dict[str, float]] = dict,
    ):
        self.measure = measure
        self.prompts = prompts
        self.actor = actor
        self.ledger = ledger
        self.modes = modes
        self.oracle = oracles[0]
        self.gold = oracles[1] if len(oracles) > 1 else None
        self.slot = slot
        self.trigger = trigger
        self.extra = extra
        self.records = records
        self.seeds = seeds
        self.warned: set[str] = set()

    def due(self, step: int, queries: int) -> bool:
        """Return True if an evaluation is due after `step` updates and `queries` queries of training. The
        evaluations at the start and at the end of a run take place in any case."""
        return self.trigger.due(step, queries)

    @property
    def state(self) -> dict[str, Any]:
        return self.trigger.state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.trigger.load_state(state)

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the slot's weights after `step` updates and `queries` queries of training, and return
        metrics. If the budget of the first oracle does not suffice, the only metric is `eval/skipped`.

        Args:
            feedback: the feedback of the last step. If the setting `evaluation.online` is True, its responses
                are evaluated too.

        Raises:
            OatError: sampling, the first oracle, the extraction of answers or the writing of records failed.
                If only the second oracle failed, nothing is raised; there is a warning and the metric
                `eval/gold_failed`.
            LedgerError: the ledger failed, for the first or the second oracle.
        """
        self.trigger.begin(step, queries)
        rounds = [*self.modes, *(learned_from(feedback) if self.extra.online and feedback else [])]
        tables = self._tables(
            self.oracle, step, rounds, lambda round: rounds[round].groups or self._sample(rounds[round])
        )
        if tables is None:
            return {"eval/skipped": 1.0}
        extracted = [self._extracted(table) for table in tables]
        metrics, golds = self._second_opinion(step, rounds, tables)
        for mode, table, answers in zip(rounds, tables, extracted, strict=True):
            metrics |= self._metrics(mode, table, answers)
        if self.extra.kl:
            metrics |= self._distance(rounds, tables)
        self._write(step, rounds, tables, extracted, golds)
        return metrics

    def _exceeds_budget(self, oracle: EvaluationOracle, step: int, price: Price) -> bool:
        """Return True if an evaluation of this price would exceed the oracle's budget. If so, also record the
        refusal. Only the first refusal of a purpose gives a warning."""
        spent = self.ledger.committed(oracle.purpose)
        if oracle.budget.allows(spent + price):
            return False
        self.ledger.refuse(step, oracle.purpose, price)
        if oracle.purpose not in self.warned:
            self.warned.add(oracle.purpose)
            section = "evaluation.gold" if oracle is self.gold else "evaluation"
            warn(
                f"after {step} steps {oracle.address} is not asked, and will not be again: an evaluation may "
                f"cost {oracle.budget.beside(spent, price, section)}; training goes on"
            )
        return True

    def _sample(self, mode: Mode) -> Sequence[Group]:
        assert mode.sampling is not None, "only responses that training sampled have none"
        samples = {self.slot: mode.best_of or mode.samples}
        groups = self.actor.sample(self.prompts, samples, ("eval", mode.name), mode.sampling)
        return best_of(groups, self.actor.score(groups, (ENSEMBLE,))[ENSEMBLE]) if mode.best_of else groups

    def _ask(
        self,
        oracle: EvaluationOracle,
        step: int,
        count: int,
        groups: Callable[[int], Sequence[Group]],
    ) -> bool:
        """Ask those questions of an evaluation that are not on disk yet.

        If none of the questions is on disk and their price exceeds the budget, record the price and ask
        nothing. Before a later evaluation samples anything, it compares this recorded price with the budget.

        Args:
            count: number of rounds. Each round has the questions of one mode (`Mode`).
            groups: function that returns the groups of a round, given its index.

        Returns:
            True if all questions are on disk now; False if the budget does not suffice.
        """
        rounds = [round for round in range(count) if not self.ledger.recalls(step, round, oracle.purpose)]
        is_new = len(rounds) == count
        refused = self.ledger.refused(step, oracle.purpose)
        if is_new and refused is not None and self._exceeds_budget(oracle, step, refused):
            return False
        pending = [(round, *self._questions(oracle, step, round, groups(round))) for round in rounds]
        if is_new and oracle.budget.is_limited:
            price = self.ledger.price([question for *_, questions in pending for question in questions])
            if self._exceeds_budget(oracle, step, price):
                return False
        for round, about, questions in pending:
            self.ledger.ask(step, round, about, questions, oracle.purpose)
        return True

    def _questions(
        self, oracle: EvaluationOracle, step: int, round: int, groups: Sequence[Group]
    ) -> tuple[Sequence[Group], list[Question]]:
        """Return the groups, and the questions about them. If the oracle compares, each group gets a further
        response, the reference of its prompt, and each sample is compared with this response."""
        if oracle.kind == "compare":
            groups = [
                replace(group, trajectories=(*group.trajectories, _recorded(group.prompt)))
                for group in groups
            ]
        questions = []
        for group in groups:
            samples = range(len(group.trajectories))
            picks = (
                [tuple(samples)]
                if oracle.kind == "score"
                else [(sample, samples[-1]) for sample in samples[:-1]]
            )
            for index, pick in enumerate(picks):
                key = Key(oracle.purpose, step, round, group.prompt.occurrence, index)
                questions.append(Question.about(group, key, oracle.kind, pick, oracle.address))
        return groups, questions

    def _tables(
        self,
        oracle: EvaluationOracle,
        step: int,
        modes: Sequence[Mode],
        groups: Callable[[int], Sequence[Group]],
    ) -> list[_Table] | None:
        """Ask an oracle about the responses of all modes.

        The ledger may also return answers to an earlier evaluation that a kill interrupted. They are ignored.

        Args:
            groups: function that returns the groups of a mode, given its index. It is not called for a mode
                whose questions are already on disk.

        Returns:
            A table of the oracle's values for each mode; None if the budget does not suffice for all modes.

        Raises:
            OatError: sampling or the oracle failed, now or before a restart. The ledger records the failure,
                so the same evaluation fails again after a restart.
            ActorError: a process that works for the run is lost for good. The ledger records no failure.
        """
        tables = [_Table(np.full((len(mode.groups or self.prompts), mode.samples), np.nan)) for mode in modes]
        try:
            if not self.ledger.has_taken(step, oracle.purpose) and not self._ask(
                oracle, step, len(modes), groups
            ):
                return None
            feedback: Feedback = self.ledger.take_feedback(
                step, self.ledger.asked(step, len(modes), oracle.purpose), purpose=oracle.purpose
            )
        except ENDING:
            raise
        except OatError:
            self.ledger.give_up(step, oracle.purpose)
            raise
        if self.ledger.refused(step, oracle.purpose) is not None:
            return None
        if not feedback.items:
            raise OracleError(
                f"{oracle.address} failed when this evaluation was first made, which stays on record; begin "
                "another run to make it again (another --run_dir)"
            )
        for item in feedback.items:
            if item.question.key.step == step:
                tables[item.question.key.round].add(item)
        return tables

    def _second_opinion(
        self, step: int, modes: Sequence[Mode], tables: Sequence[_Table]
    ) -> tuple[dict[str, float], Sequence[_Table]]:
        """Ask the second oracle about the responses that the first oracle has judged.

        Returns:
            The second oracle's metrics, and its table for each mode. There are no tables if there is no
            second oracle, if its budget does not suffice, or if it failed.
        """
        oracle = self.gold
        if oracle is None:
            return {}, ()
        try:
            golds = self._tables(oracle, step, modes, lambda round: list(tables[round].groups.values()))
        except ENDING:
            raise
        except OatError as error:
            warn(f"the second opinion after {step} steps failed and is left out: {error}")
            return {"eval/gold_failed": 1.0}, ()
        if golds is None:
            return {"eval/gold_skipped": 1.0}, ()
        found = {
            f"eval/gold_{mode.name}": average(gold.values_BG) for mode, gold in zip(modes, golds, strict=True)
        }
        held_out = len(self.modes)
        first, second = (
            np.hstack([table.values_BG for table in each[:held_out]]) for each in (tables, golds)
        )
        found["eval/gold_agreement"] = agreement(first, second)
        return {name: value for name, value in found.items() if value is not None}, golds

    def _distance(self, modes: Sequence[Mode], tables: Sequence[_Table]) -> dict[str, float]:
        """Estimate KL(slot || reference) in nats per response, by the estimator k1.

        For each response of the mode `sampled`, log p_slot - log p_reference is summed over its tokens. The
        estimate is the mean of these sums. Both log-probabilities are raw. Those of the slot were recorded at
        sampling.
        """
        sampled = next(table for mode, table in zip(modes, tables, strict=True) if mode.name == "sampled")
        groups = [group for _, group in sorted(sampled.groups.items())]
        logps = self.actor.score(groups, ("sampler", "reference"))
        return {
            "eval/kl": float(
                np.mean(np.concatenate(logps["sampler"]).astype(float) - np.concatenate(logps["reference"]))
            )
        }

    def _extracted(self, table: _Table) -> _Extracted:
        extract = self.extra.extract
        prompts, samples = table.values_BG.shape
        found: dict[int, list[Hashable | None]] = {}
        if extract:
            for place, group in table.groups.items():
                found[place] = [extract(response.text) for response in group.trajectories]
        return [found.get(place, [None] * samples) for place in range(prompts)]

    def _metrics(self, mode: Mode, table: _Table, extracted: _Extracted) -> dict[str, float]:
        """Return the metrics of a mode; empty if no response has a value."""
        name = f"eval/{mode.name}"
        values_BG = table.values_BG
        if np.isnan(values_BG).all():
            return {}
        found: dict[str, float | None] = {f"{name}_length": _mean_length(table)}
        means_of = {name: values_BG}
        if self.oracle.kind == "compare":
            wins_BG = wins(values_BG)
            lengths = (
                table.map(lambda _, response: len(response.text)),
                table.map(lambda group, _: len(group.prompt.reference or "")),
            )
            found[f"{name}_win_rate_lc"] = length_controlled_win_rate(
                wins_BG.ravel(), *(each.ravel() for each in lengths)
            )
            means_of[f"{name}_win_rate"] = wins_BG
        for metric, numbers_BG in means_of.items():
            found[metric] = average(numbers_BG)
            if self.extra.intervals and (
                ends := bootstrap_interval(numbers_BG, self.seeds.at("bootstrap", metric))
            ):
                found[f"{metric}_low"], found[f"{metric}_high"] = ends
        if mode.name == "sampled":
            found |= {
                f"eval/pass@{k}": pass_at(values_BG, k, success=self.extra.success)
                for k in self.extra.pass_at
            }
            found |= {
                f"eval/majority@{k}": majority_at(values_BG, extracted, k) for k in self.extra.majority_at
            }
        return {metric: value for metric, value in found.items() if value is not None}

    def _write(
        self,
        step: int,
        modes: Sequence[Mode],
        tables: Sequence[_Table],
        extracted: Sequence[_Extracted],
        golds: Sequence[_Table],
    ) -> None:
        lines = []
        for round, (mode, table) in enumerate(zip(modes, tables, strict=True)):
            for place, group in sorted(table.groups.items()):
                for sample, response in enumerate(group.trajectories):
                    fields = {
                        "mode": mode.name,
                        "sample": sample,
                        **_fields(table, place, sample, "value", "mark"),
                    }
                    if golds:
                        fields |= _fields(golds[round], place, sample, "gold", "gold_mark")
                    if self.extra.extract:
                        answer = extracted[round][place][sample]
                        fields["answer"] = None if answer is None else str(answer)
                    lines.append(self.records.record(group.prompt, response, fields))
        self.records.write(step, lines)


def _fields(table: _Table, place: int, sample: int, value: str, mark: str) -> dict[str, object]:
    found = float(table.values_BG[place, sample])
    return {value: None if np.isnan(found) else found, mark: table.marks.get((place, sample), "failed")}


def _recorded(prompt: Prompt) -> Trajectory:
    assert prompt.reference is not None, "resolve/ refuses a win rate without references"
    return Trajectory("recorded", (), "stop", prompt.reference)


def _mean_length(table: _Table) -> float:
    """Return the mean number of tokens that the model wrote per response."""
    return float(
        np.mean(
            [response.trained.sum() for group in table.groups.values() for response in group.trajectories]
        )
    )
