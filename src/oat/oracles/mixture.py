"""The oracle `mixture`: the weighted sum of the scores of several oracles, its sources. Each source's scores
may be normalised. A column of the data may choose the sources that are asked about a row.

    value of a candidate = sum over the sources of its row of weight * normalised score

| `normalise` | of a score r |
| --- | --- |
| `none` | r |
| `fixed` | (r - mean) / std, with the two numbers of the configuration |
| `group` | (r - mean) / (std + 1e-4) over the source's scores of the question; std is unbiased |
| `batch` | (r - mean) / (std + 1e-4) over the source's scores in the round or wave; std is unbiased |

With `group`, a candidate that is alone in its question gets 0.

The questions of a round are asked together; a budget may split them into waves. When all sources have
answered, the mixture returns all answers of the round or wave together. The ledger records them in one
transaction. So after a kill, all of these questions are asked again, or none.

If a source reads the group (`reads_group`), every source is asked about every response, equal ones too, and
no answer of the mixture is used again.

If a source has `group` or `batch`, its normalised scores depend on other candidates too, and their mean is
0. Then no answer of the mixture is used again (`cacheable`), and the mixture cannot judge evaluations
(`is_relative`).

The answer also has the sources' own scores (`Answer.sources`), without weight and normalisation, and the
ledger records them. So an objective can weigh and normalise them itself, for example by a running mean over
the run. `normalise` has no running mean: it would be a state of the oracle, and checkpoints have no state of
oracles. It belongs to the objective, which computes it from recorded feedback in `prepare`.

If a source gives rewards of the steps of a response (`Answer.steps`), so does the mixture
(`summed_steps`).

If a source abstains about a candidate, the source is left out of the candidate's sum. If all sources abstain,
the mixture abstains. If a source fails, the candidate is marked "failed", because the sum of the other
sources would be on another scale.

The rewards of the steps of a response in a mixture, whose sources may give steps or one number.

    reward of a step = sum over the sources of weight * reward / std

A source's score without steps is about the response as a whole, so it is a reward at the response's end. The
same holds for the share -weight * mean / std of a source with steps whose scores are normalised. So the
rewards add up to the mixture's value.
"""

import hashlib
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oat.errors import ConfigError, OracleError, did_you_mean
from oat.oracles.base import Oracle
from oat.oracles.contract import in_words, pairs_of, plain_answer
from oat.oracles.make import build_oracle
from oat.oracles.steps import lengths, sum_of
from oat.types import Answer, Kind, Mark, Message, Opening, Price, Question, Steps, StepUnit
from oat.types.part import RunFacts


@dataclass(frozen=True)
class Term:
    """What one source adds to the value of one candidate.

    Attributes:
        mean, std: the numbers that normalise the source's score.
        answer: the source's answer.
        place: the candidate's index.
    """

    weight: float
    mean: float
    std: float
    answer: Answer
    place: int

    @property
    def value(self) -> float:
        """The weighted, normalised score."""
        return self.weight * ((self.answer.values[self.place] - self.mean) / self.std)

    @property
    def steps(self) -> Steps:
        """The weighted rewards of the source's steps; they add up to `value` without `shift`."""
        own = self.answer.steps[self.place] if self.answer.steps else ()
        return tuple((end, self.weight * (reward / self.std)) for end, reward in own)

    @property
    def shift(self) -> float:
        """What the normalisation by a mean adds to the value."""
        return -self.weight * (self.mean / self.std)


def summed_steps(terms: Sequence[Term], length: int) -> Steps:
    """Return the step rewards of one candidate.

    Args:
        terms: the sources that gave the candidate a score.
        length: number of the candidate's characters or tokens, whichever the steps count.
    """
    at: dict[int, list[float]] = {}
    for term in terms:
        for end, reward in term.steps or [(length, term.value)]:
            at.setdefault(end, []).append(reward)
        if term.steps and term.shift:
            at.setdefault(length, []).append(term.shift)
    return tuple((end, math.fsum(at[end])) for end in sorted(at))


def own_scores(answer: Answer) -> tuple[float | None, ...]:
    """Return a source's score of each candidate, as the source gave it; None where it gave none."""
    return tuple(
        value if mark == "ok" else None for value, mark in zip(answer.values, answer.marks, strict=True)
    )


Normalise = Literal["none", "fixed", "group", "batch"]
_EPSILON = 1e-4
_OWN = ("name", "label", "weight", "normalise", "mean", "std")


@dataclass(frozen=True)
class _WeightedOracle:
    """A source: an oracle with its weight and its normalisation.

    Attributes:
        label: the name by which the option `recipe` refers to the source.
    """

    oracle: Oracle
    label: str
    weight: float
    normalise: Normalise
    mean: float
    std: float


@dataclass
class _Round:
    """Questions that were asked together.

    Attributes:
        questions: the questions, by the mixture's ticket.
        said: the answers so far, by the mixture's ticket and the source's label.
        open: number of sources' answers that are still to come.
    """

    questions: dict[str, Question]
    said: dict[str, dict[str, Answer]]
    since: float
    open: int = 0


class Mixture(Oracle):
    """An oracle that asks its sources and adds up their scores.

    Args:
        sources: a mapping for each source. `name` is an oracle, `weight` its weight (default 1.0),
            `normalise` its normalisation (default none), `mean` and `std` the numbers of `normalise: fixed`.
            `label` tells sources with the same name apart. Further fields are the oracle's own options.
        by: a column of the data. Its value in a prompt's record chooses the sources that are asked about the
            responses to this prompt.
        recipe: for each value of that column, as text, a list of labels, or labels with weights; `default` is
            for any other value. Without a recipe, every source is asked about every response.
        device: device of each source that has the option `device` and does not set it; by default that of
            `compute.profile`.

    Raises:
        ConfigError: an argument, or a field of a source, is wrong; a source cannot be made, or compares
            pairs; the recipe names an unknown source.
    """

    answers: Kind = "score"

    def __init__(
        self,
        sources: Sequence[Mapping[str, Any]],
        by: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ):
        if (
            not isinstance(sources, list | tuple)
            or not sources
            or not all(isinstance(source, Mapping) for source in sources)
        ):
            raise ConfigError(
                "`sources` of the oracle mixture is a list of {name, weight, normalise, ...}; give at "
                "least one"
            )
        if (by is None) != (recipe is None):
            raise ConfigError(
                "`by` of the oracle mixture names a column, and `recipe` what each of its values asks; "
                "give both, or neither"
            )
        self._sources = {source.label: source for source in (_source(given, device) for given in sources)}
        if len(self._sources) < len(sources):
            raise ConfigError(
                "two sources of the oracle mixture have one label; give each a `label` of its own"
            )
        self.sources = tuple(self._sources)
        self._by, self._recipe = (
            by,
            {str(value): self._weights(value, entry) for value, entry in (recipe or {}).items()},
        )
        self._all = {label: source.weight for label, source in self._sources.items()}
        oracles = [source.oracle for source in self._sources.values()]
        self.is_relative = any(
            source.normalise in ("group", "batch") for source in self._sources.values()
        ) or any(oracle.is_relative for oracle in oracles)
        self._follow(oracles)
        self.gives_steps = _common_unit(self._sources)
        self.names_cost = any(oracle.names_price and oracle.names_cost for oracle in oracles)
        self.max_outage_s = max(
            (oracle.max_outage_s for oracle in oracles if oracle.max_outage_s is not None), default=None
        )
        versions = [oracle.version or "" for oracle in oracles]
        said = json.dumps([versions, list(sources), by, recipe], default=str)
        self.version = hashlib.sha256(said.encode()).hexdigest()[:16]
        declared = [version for oracle, version in zip(oracles, versions, strict=True) if not oracle.made_of]
        options = json.dumps([declared, list(sources), by, recipe], default=str)
        self.made_of: dict[str, dict[str, Any]] = {
            "options": {"mixture": hashlib.sha256(options.encode()).hexdigest()[:16]}
        }
        for label, source in self._sources.items():
            for place, fields in source.oracle.made_of.items():
                if place == "options":
                    self.made_of[place] |= {f"{label}.{name}": value for name, value in fields.items()}
                else:
                    self.made_of[f"{place} of {label}"] = dict(fields)
        self._rounds: list[_Round] = []
        self._open: dict[str, dict[str, tuple[_Round, str]]] = {label: {} for label in self._sources}
        self._dropped: dict[str, set[str]] = {label: set() for label in self._sources}
        self._ready: dict[str, Answer] = {}

    @property
    def names_price(self) -> bool:
        """True if at least one source states what a question can cost."""
        return any(source.oracle.names_price for source in self._sources.values())

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all sources. If several sources report a metric of the same name, the first source's
        value is used."""
        return {
            name: value
            for source in [*self._sources.values()][::-1]
            for name, value in source.oracle.metrics.items()
        }

    def check_columns(self, columns: Collection[str], has_reference: bool) -> None:
        """Check that the data have the column that `by` names, and the columns that the sources read.

        Raises:
            ConfigError: the data lack such a column.
        """
        if self._by is not None and self._by not in columns:
            raise ConfigError(
                f"`by` of the oracle mixture names the column `{self._by}`, which the data lack; "
                f"{did_you_mean(self._by, columns)}"
            )
        for source in self._sources.values():
            source.oracle.check_columns(columns, has_reference)

    def tell_opening(self, opening: Callable[[Sequence[Message]], Opening]) -> None:
        for source in self._sources.values():
            source.oracle.tell_opening(opening)

    def price(self, question: Question) -> Price:
        """Return the sum of the highest prices of the sources that are asked this question."""
        total = Price()
        for label in self._chosen(question):
            total = total + self._sources[label].oracle.price(question)
        return total

    def submit(self, questions: Sequence[Question]) -> list[str]:
        rounds: dict[tuple[str, int, int], _Round] = {}
        asked: dict[str, list[tuple[Question, _Round]]] = defaultdict(list)
        for question in questions:
            key = question.key
            mine = rounds.setdefault((key.purpose, key.step, key.round), _Round({}, {}, time.monotonic()))
            mine.questions[str(key)], mine.said[str(key)] = question, {}
            for label in self._chosen(question):
                asked[label].append((question, mine))
                mine.open += 1
        for label, own in asked.items():
            tickets = self._sources[label].oracle.submit([question for question, _ in own])
            self._dropped[label].difference_update(tickets)
            self._open[label].update(
                {
                    ticket: (mine, str(question.key))
                    for ticket, (question, mine) in zip(tickets, own, strict=True)
                }
            )
        self._rounds += rounds.values()
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return the answers to those of `tickets` whose round or wave is complete. If there are none, wait
        at most `seconds` until a round or wave is complete.

        Raises:
            OracleError: a source raises it, or breaks the contract.
        """
        end = time.monotonic() + seconds
        while not self._ready.keys() & set(tickets) and self._rounds:
            waiting = {label: list(own) for label, own in self._open.items() if own}
            for label, own in waiting.items():
                self._take_answers(
                    label,
                    self._sources[label].oracle.collect(own, max(0.0, end - time.monotonic()) / len(waiting)),
                )
            for each in [each for each in self._rounds if not each.open]:
                self._rounds.remove(each)
                self._ready.update(self._mixed(each))
            if time.monotonic() >= end:
                break
        return [
            (ticket, self._ready.pop(ticket)) for ticket in dict.fromkeys(tickets) if ticket in self._ready
        ]

    def drop(self, tickets: Sequence[str]) -> None:
        """Forget questions, tell their sources, and let the rest of each round be complete without them."""
        gone = {*tickets}
        for label, waiting in self._open.items():
            own = [ticket for ticket, (_, question) in waiting.items() if question in gone]
            for ticket in own:
                mine, _ = waiting.pop(ticket)
                mine.open -= 1
            if own:
                self._dropped[label].update(own)
                self._sources[label].oracle.drop(own)
        for each in self._rounds:
            for question in gone & each.questions.keys():
                del each.questions[question], each.said[question]
        for question in gone & self._ready.keys():
            del self._ready[question]

    def tell(self, run: RunFacts) -> None:
        """Call `tell` of every source."""
        oracles = [source.oracle for source in self._sources.values()]
        for oracle in oracles:
            oracle.tell(run)
        self._follow(oracles)

    def _follow(self, oracles: Sequence[Oracle]) -> None:
        self.cacheable = all(oracle.cacheable for oracle in oracles) and not self.is_relative
        self.reads_group = any(oracle.reads_group for oracle in oracles)

    def bind(self) -> None:
        """Call `bind` of every source."""
        for source in self._sources.values():
            source.oracle.bind()

    def close(self) -> None:
        """Call `close` of every source."""
        for source in self._sources.values():
            source.oracle.close()

    def _take_answers(self, label: str, answers: Sequence[tuple[str, Answer]]) -> None:
        for ticket, answer in pairs_of(answers, label):
            if ticket in self._dropped[label]:
                continue
            if ticket not in self._open[label]:
                raise OracleError(
                    f"oracle {label}: collect returned the ticket {ticket[:80]!r}, which is not open; "
                    "return those it was given"
                )
            mine, own = self._open[label].pop(ticket)
            about, unit = mine.questions[own], self._sources[label].oracle.gives_steps
            mine.said[own][label] = plain_answer(
                answer, "score", about.size, label, in_words(about), unit=unit, about=about
            )
            mine.open -= 1

    def _chosen(self, question: Question) -> dict[str, float]:
        """Return the labels of the sources that are asked about a question, each with its weight. If `by` is
        set, the question's value in this column decides; otherwise every source is asked."""
        if self._by is None:
            return self._all
        value = str(question.columns.get(self._by))
        if value not in self._recipe and "default" not in self._recipe:
            raise OracleError(
                f"the recipe of the oracle mixture has no sources for {value[:80]!r}, the {self._by} of "
                f"question {question.key}; add it, or `default`"
            )
        return self._recipe.get(value, self._recipe.get("default", {}))

    def _mixed(self, round: _Round) -> dict[str, Answer]:
        scales = {label: self._scales(source, round) for label, source in self._sources.items()}
        found = {}
        for ticket, question in round.questions.items():
            weights, said = self._chosen(question), round.said[ticket]
            values, marks, steps = list[float](), list[Mark](), list[Steps]()
            for place in range(question.size):
                own = {label: said[label].marks[place] for label in weights}
                marks.append(
                    "failed" if "failed" in own.values() else "ok" if "ok" in own.values() else "abstain"
                )
                terms = [
                    Term(weights[label], *scales[label][ticket], said[label], place)
                    for label, mark in own.items()
                    if mark == "ok" and marks[-1] == "ok"
                ]
                steps.append(self._steps(terms, question, place))
                values.append(sum_of(steps[-1]) if steps[-1] else math.fsum(term.value for term in terms))
            queries, tokens, cost = (
                sum(getattr(answer, name) for answer in said.values())
                for name in ("queries", "tokens", "cost")
            )
            took: dict[str, Any] = {
                "queries": queries,
                "tokens": tokens,
                "cost": float(cost),
                "seconds": time.monotonic() - round.since,
            }
            if any(steps):
                took |= {"steps": tuple(steps), "step_unit": self.gives_steps}
            took["sources"] = {label: own_scores(said[label]) for label in weights}
            found[ticket] = Answer(question.key, tuple(values), tuple(marks), by="mixture", **took)
        return found

    def _steps(self, terms: Sequence[Term], question: Question, place: int) -> Steps:
        """Return the step rewards of a candidate, to which `terms` are added; () if no source gives any."""
        if not any(term.steps for term in terms):
            return ()
        assert self.gives_steps is not None, "plain_answer refuses steps of a source that declares none"
        length = lengths(question, self.gives_steps)[place]
        assert length is not None, "the ledger sends questions with the ids of their candidates"
        return summed_steps(terms, length)

    def _scales(self, source: _WeightedOracle, round: _Round) -> dict[str, tuple[float, float]]:
        """Return the mean and the divisor that normalise a source's scores for each of the questions that
        were asked together, by ticket."""
        raw = {ticket: said[source.label] for ticket, said in round.said.items() if source.label in said}
        sound = {
            ticket: [value for value, mark in zip(own.values, own.marks, strict=True) if mark == "ok"]
            for ticket, own in raw.items()
        }
        together = [value for values in sound.values() for value in values]
        return {ticket: self._scale(source, sound[ticket], together) for ticket in raw}

    def _scale(
        self, source: _WeightedOracle, group: Sequence[float], batch: Sequence[float]
    ) -> tuple[float, float]:
        """Return the mean and the divisor of the formula (score - mean) / divisor, which normalises the
        source's scores.

        Args:
            group: the source's scores of one question's candidates.
            batch: the source's scores of all questions that were submitted together (a round, or a wave).
        """
        if source.normalise in ("none", "fixed"):
            return source.mean, source.std
        values = group if source.normalise == "group" else batch
        mean = math.fsum(values) / len(values) if values else 0.0
        return mean, (statistics.stdev(values, xbar=mean) if len(values) > 1 else 0.0) + _EPSILON

    def _weights(self, value: object, entry: Any) -> dict[str, float]:
        """Return the weights that an entry of the recipe gives to sources, by the source's label. If the
        entry gives a label without a weight, the weight that is set for the source counts."""
        given = (
            entry
            if isinstance(entry, Mapping)
            else {label: None for label in entry}
            if isinstance(entry, list | tuple)
            else {}
        )
        if not given:
            raise ConfigError(
                f"the recipe of the oracle mixture for {value!r} is {entry!r}; give a list of labels, or "
                "labels with weights"
            )
        for label in given:
            if label not in self._sources:
                raise ConfigError(
                    f"the recipe of the oracle mixture for {value!r} names {label!r}; "
                    f"{did_you_mean(str(label), self._sources)}"
                )
        return {
            label: self._sources[label].weight if own is None else _finite(own, f"weight of {label}")
            for label, own in given.items()
        }


def _source(given: Mapping[str, Any], device: str) -> _WeightedOracle:
    name, normalise = given.get("name"), given.get("normalise", "none")
    if not isinstance(name, str):
        raise ConfigError(f"a source of the oracle mixture is {dict(given)!r}; give the `name` of an oracle")
    if normalise not in get_args(Normalise):
        raise ConfigError(
            f"`normalise` of {name} is {normalise!r}; {did_you_mean(str(normalise), get_args(Normalise))}"
        )
    if (normalise == "fixed") != ("mean" in given or "std" in given):
        raise ConfigError(
            f"`mean` and `std` of {name} are what `normalise: fixed` reads, and nothing else does; give "
            "both with it, or neither"
        )
    mean, std = (
        _finite(given.get(field, default), f"{field} of {name}")
        for field, default in (("mean", 0.0), ("std", 1.0))
    )
    if std <= 0:
        raise ConfigError(f"`std` of {name} in the oracle mixture is {std}; give a number above 0")
    oracle = build_oracle(name, {field: value for field, value in given.items() if field not in _OWN}, device)
    if oracle.answers != "score":
        raise ConfigError(
            f"{name} compares pairs, and the oracle mixture is a sum of scores; name one that scores"
        )
    return _WeightedOracle(
        oracle,
        str(given.get("label", name)),
        _finite(given.get("weight", 1.0), f"weight of {name}"),
        normalise,
        mean,
        std,
    )


def _common_unit(sources: Mapping[str, _WeightedOracle]) -> StepUnit | None:
    """Return the unit in which the sources count the ends of steps; None if no source gives steps."""
    units: dict[StepUnit, str] = {}
    for label, source in sources.items():
        if source.oracle.gives_steps is not None:
            units.setdefault(source.oracle.gives_steps, label)
    if len(units) > 1:
        said = " and ".join(f"{label} in {unit}" for unit, label in units.items())
        raise ConfigError(
            f"sources of the oracle mixture give rewards of steps in two units, {said}; let all of them "
            "count characters, or all tokens"
        )
    return next(iter(units), None)


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"the {what} in the oracle mixture is {value!r}; give a number")
    return float(value)
