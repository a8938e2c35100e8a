"""Evaluation on held-out prompts, with its own oracle, budget and random numbers, so that it never disturbs
training. docs/evaluation.md says what its numbers are.

The same prompts are answered under the same random numbers at every evaluation, so two evaluations differ by
the weights alone. With a scoring oracle the value of a response is its score; with a comparing one, the
probability that it wins against the data's reference response.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oat.errors import LedgerError, OatError, OracleError, warn
from oat.evaluation.records import Records
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
from oat.types import Feedback, Group, Item, Key, Kind, Mark, Price, Prompt, Question, Sampling, Trajectory
from oat.types.budget import Budget

_Answers = list[list[Hashable | None]]
"""By prompt and sample."""


@dataclass(frozen=True)
class Mode:
    """One way to answer the held-out prompts; or responses that are there.

    Attributes:
        sampling: how they are drawn; None where they are there.
        groups: those that are.
    """

    name: str
    samples: int
    sampling: Sampling | None
    groups: Sequence[Group] = ()


@dataclass(frozen=True)
class Judge:
    """An oracle that evaluations ask, and its budget.

    Attributes:
        purpose: of its questions in the ledger.
        oracle: its address.
        kind: "score", or "compare" against `Prompt.reference`.
        budget: of all evaluations together; one that would go beyond is not begun.
    """

    purpose: str
    oracle: str
    kind: Kind
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class Wanted:
    """Numbers beside the means.

    Attributes:
        kl: how far samples are from the reference.
        intervals: of every mean and win rate.
        pass_at, majority_at: each k of them.
        success: the value from which on a response passes.
        answer: from a text to its answer; what the majority is of.
        online: also of the responses that training drew.
    """

    kl: bool = False
    intervals: bool = False
    pass_at: tuple[int, ...] = ()
    success: float = 1.0
    majority_at: tuple[int, ...] = ()
    answer: Callable[[str], Hashable | None] | None = None
    online: bool = False


@dataclass(frozen=True, eq=False)
class _Table:
    """The responses of one mode, and what a judge says of them.

    Attributes:
        groups: samples alone, by occurrence, which is the place of their prompt.
        values_BG: a tie is one half; NaN where there is no value.
        marks: by prompt and sample.
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

    def of_each(self, measure: Callable[[Group, Trajectory], float]) -> np.ndarray:
        """(B, G) a number of each response; 0 where there is none."""
        found = np.zeros(self.values_BG.shape)
        for place, group in self.groups.items():
            found[place] = [measure(group, response) for response in group.trajectories]
        return found


class Evaluation:
    """Asks about held-out prompts through the ledger, so a run that is killed pays nothing twice.

    Args:
        judges: the oracle that is asked; a second one, if there is any, is asked about the same responses.
        slot: whose weights answer.
        measured: what else an evaluation measures, of which no oracle is asked.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        actor: Actor,
        ledger: Ledger,
        modes: Sequence[Mode],
        judges: Sequence[Judge],
        *,
        slot: str,
        trigger: Trigger,
        wanted: Wanted,
        records: Records,
        seeds: Seeds,
        measured: Callable[[], dict[str, float]] = dict,
    ):
        self.measure = measured
        self.prompts = prompts
        self.actor = actor
        self.ledger = ledger
        self.modes = modes
        self.judge, self.gold = judges[0], judges[1] if len(judges) > 1 else None
        self.slot = slot
        self.trigger = trigger
        self.wanted = wanted
        self.records = records
        self.seeds = seeds
        self.warned: set[str] = set()

    def due(self, step: int, queries: int) -> bool:
        """Whether one is due after `step` updates and so many queries of training; the loop adds one at the
        start and at the end."""
        return self.trigger.due(step, queries)

    @property
    def state(self) -> dict[str, Any]:
        return self.trigger.state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.trigger.load_state(state)

    def run(self, step: int, queries: int = 0, feedback: Feedback | None = None) -> dict[str, float]:
        """Evaluate the slot's weights as they are after `step` updates and so many queries of training;
        returns metrics.

        Args:
            feedback: what the last of these steps took, whose responses are evaluated too where that is
            wanted.

        Raises:
            OatError: the first oracle failed, or whatever was needed before it is asked. What the second one
            does is counted and said.
        """
        self.trigger.begin(step, queries)
        rounds = [*self.modes, *(learned_from(feedback) if self.wanted.online and feedback else [])]
        tables = self._judged(
            self.judge, step, rounds, lambda round: rounds[round].groups or self._answer(rounds[round])
        )
        if tables is None:
            return {"eval/skipped": 1.0}
        answers = [self._answers(table) for table in tables]
        metrics, golds = self._second_opinion(step, rounds, tables)
        for mode, table, given in zip(rounds, tables, answers, strict=True):
            metrics |= self._numbers(mode, table, given)
        if self.wanted.kl:
            metrics |= self._distance(rounds, tables)
        self._write(step, rounds, tables, answers, golds)
        return metrics

    def _is_beyond(self, judge: Judge, step: int, price: Price) -> bool:
        """Whether an evaluation of this price would spend more than is left; if so that is on record, and
        said once."""
        spent = self.ledger.committed(judge.purpose)
        if judge.budget.allows(spent + price):
            return False
        self.ledger.refuse(step, judge.purpose, price)
        if judge.purpose not in self.warned:
            self.warned.add(judge.purpose)
            section = "evaluation.gold" if judge is self.gold else "evaluation"
            warn(
                f"after {step} steps {judge.oracle} is not asked, and will not be again: an evaluation may "
                f"cost {judge.budget.beside(spent, price, section)}; training goes on"
            )
        return True

    def _answer(self, mode: Mode) -> Sequence[Group]:
        assert mode.sampling is not None, "only responses that were drawn in training have none"
        return self.actor.sample(self.prompts, {self.slot: mode.samples}, ("eval", mode.name), mode.sampling)

    def _ask(self, judge: Judge, step: int, count: int, groups: Callable[[int], Sequence[Group]]) -> bool:
        """Ask whatever is not on disk yet; or nothing, if the evaluation has not begun and its budget does
        not suffice. Then no later one draws samples in vain.

        Args:
            count: of rounds.
        Returns:
            Whether it has begun.
        """
        rounds = [round for round in range(count) if not self.ledger.recalls(step, round, judge.purpose)]
        is_new, refused = len(rounds) == count, self.ledger.refused(step, judge.purpose)
        if is_new and refused is not None and self._is_beyond(judge, step, refused):
            return False
        asked = [(round, *self._questions(judge, step, round, groups(round))) for round in rounds]
        everything = [question for *_, questions in asked for question in questions]
        if is_new and judge.budget.is_limited and self._is_beyond(judge, step, self.ledger.price(everything)):
            return False
        for round, about, questions in asked:
            self.ledger.ask(step, round, about, questions, judge.purpose)
        return True

    def _questions(
        self, judge: Judge, step: int, round: int, groups: Sequence[Group]
    ) -> tuple[Sequence[Group], list[Question]]:
        """What a judge is asked about groups, which have the reference beside the samples where it
        compares."""
        if judge.kind == "compare":
            groups = [
                replace(group, trajectories=(*group.trajectories, _recorded(group.prompt)))
                for group in groups
            ]
        questions = []
        for group in groups:
            samples = range(len(group.trajectories))
            picks = (
                [tuple(samples)]
                if judge.kind == "score"
                else [(sample, samples[-1]) for sample in samples[:-1]]
            )
            for index, pick in enumerate(picks):
                key = Key(judge.purpose, step, round, group.prompt.occurrence, index)
                questions.append(Question.about(group, key, judge.kind, pick, judge.oracle))
        return groups, questions

    def _judged(
        self, judge: Judge, step: int, modes: Sequence[Mode], groups: Callable[[int], Sequence[Group]]
    ) -> list[_Table] | None:
        """By mode, what a judge says; None where its budget does not suffice for all of it. Answers about an
        evaluation that a kill cut off, and that was not due again, are taken too and left aside.

        Args:
            groups: of a mode, by its place; those that the judge was asked about before a kill are not made
            again.

        Raises:
            OatError: it failed, now or when it was first made; a failure is on record, so that a replay has
            it too.
        """
        tables = [_Table(np.full((len(mode.groups or self.prompts), mode.samples), np.nan)) for mode in modes]
        try:
            if not self.ledger.has_taken(step, judge.purpose) and not self._ask(
                judge, step, len(modes), groups
            ):
                return None
            feedback: Feedback = self.ledger.take(
                step, self.ledger.asked(step, len(modes), judge.purpose), purpose=judge.purpose
            )
        except LedgerError:
            raise
        except OatError:
            self.ledger.give_up(step, judge.purpose)
            raise
        if self.ledger.refused(step, judge.purpose) is not None:
            return None
        if not feedback.items:
            raise OracleError(
                f"{judge.oracle} failed when it was first made, which stays on record; a run of its own "
                "has it (another --run_dir)"
            )
        for item in feedback.items:
            if item.question.key.step == step:
                tables[item.question.key.round].add(item)
        return tables

    def _second_opinion(
        self, step: int, modes: Sequence[Mode], tables: Sequence[_Table]
    ) -> tuple[dict[str, float], Sequence[_Table]]:
        """What the second oracle says of the same responses, as metrics and by mode; no tables where it was
        not asked, or failed."""
        judge = self.gold
        if judge is None:
            return {}, ()
        try:
            golds = self._judged(judge, step, modes, lambda round: list(tables[round].groups.values()))
        except LedgerError:
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
        """The estimate k1 of KL(slot || reference), nats a response: the mean, over responses that were
        sampled as in training, of the summed difference of their raw log-probabilities; the slot's are those
        recorded at sampling."""
        sampled = next(table for mode, table in zip(modes, tables, strict=True) if mode.name == "sampled")
        groups = [group for _, group in sorted(sampled.groups.items())]
        logps = self.actor.score(groups, ("sampler", "reference"))
        return {
            "eval/kl": float(
                np.mean(np.concatenate(logps["sampler"]).astype(float) - np.concatenate(logps["reference"]))
            )
        }

    def _answers(self, table: _Table) -> _Answers:
        answer, size = self.wanted.answer, table.values_BG.shape[1]
        given = (
            {
                place: [answer(response.text) for response in group.trajectories]
                for place, group in table.groups.items()
            }
            if answer
            else {}
        )
        return [given.get(place, [None] * size) for place in range(len(table.values_BG))]

    def _numbers(self, mode: Mode, table: _Table, answers: _Answers) -> dict[str, float]:
        """The metrics of a mode; none where no response has a value."""
        name, values_BG = f"eval/{mode.name}", table.values_BG
        if np.isnan(values_BG).all():
            return {}
        found: dict[str, float | None] = {f"{name}_length": _mean_length(table)}
        means_of = {name: values_BG}
        if self.judge.kind == "compare":
            wins_BG = wins(values_BG)
            lengths = (
                table.of_each(lambda _, response: len(response.text)),
                table.of_each(lambda group, _: len(group.prompt.reference or "")),
            )
            found[f"{name}_win_rate_lc"] = length_controlled_win_rate(
                wins_BG.ravel(), *(each.ravel() for each in lengths)
            )
            means_of[f"{name}_win_rate"] = wins_BG
        for metric, numbers_BG in means_of.items():
            found[metric] = average(numbers_BG)
            if self.wanted.intervals and (
                ends := bootstrap_interval(numbers_BG, self.seeds.at("bootstrap", metric))
            ):
                found[f"{metric}_low"], found[f"{metric}_high"] = ends
        if mode.name == "sampled":
            found |= {
                f"eval/pass@{k}": pass_at(values_BG, k, success=self.wanted.success)
                for k in self.wanted.pass_at
            }
            found |= {
                f"eval/majority@{k}": majority_at(values_BG, answers, k) for k in self.wanted.majority_at
            }
        return {metric: value for metric, value in found.items() if value is not None}

    def _write(
        self,
        step: int,
        modes: Sequence[Mode],
        tables: Sequence[_Table],
        answers: Sequence[_Answers],
        golds: Sequence[_Table],
    ) -> None:
        lines = []
        for round, (mode, table) in enumerate(zip(modes, tables, strict=True)):
            for place, group in sorted(table.groups.items()):
                for sample, response in enumerate(group.trajectories):
                    fields = {
                        "mode": mode.name,
                        "sample": sample,
                        **_said(table, place, sample, "value", "mark"),
                    }
                    if golds:
                        fields |= _said(golds[round], place, sample, "gold", "gold_mark")
                    if self.wanted.answer:
                        answer = answers[round][place][sample]
                        fields["answer"] = None if answer is None else str(answer)
                    lines.append(self.records.record(group.prompt, response, fields))
        self.records.write(step, lines)


def learned_from(feedback: Feedback) -> list[Mode]:
    """The responses that a step was told about, as a mode; none where it took nothing. Of each group there
    are as many as of the smallest."""
    told = [[item.group.trajectories[pick] for pick in item.question.picks] for item in feedback.items]
    size = min(map(len, told), default=0)
    groups = [
        Group(replace(item.group.prompt, occurrence=place), tuple(responses[:size]))
        for place, (item, responses) in enumerate(zip(feedback.items, told, strict=True))
    ]
    return [Mode("online", size, None, groups)] if size else []


def _said(table: _Table, place: int, sample: int, value: str, mark: str) -> dict[str, object]:
    found = float(table.values_BG[place, sample])
    return {value: None if np.isnan(found) else found, mark: table.marks.get((place, sample), "failed")}


def _recorded(prompt: Prompt) -> Trajectory:
    assert prompt.reference is not None, "build/ refuses a win rate without references"
    return Trajectory("recorded", (), "stop", prompt.reference)


def _mean_length(table: _Table) -> float:
    """Mean number of tokens that the model wrote in a response."""
    return float(
        np.mean(
            [response.trained.sum() for group in table.groups.values() for response in group.trajectories]
        )
    )
