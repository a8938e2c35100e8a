"""Checks of what an explorer returns: its needs, plans and questions. A run makes these checks of a user's
explorer (`oat.resolve.explorers`); `check_explorer` makes the same checks."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from oat.errors import shown
from oat.explore.base import Round
from oat.types import ENSEMBLE, Group, Key, Kind, Plan, Question

SCORED = {"policy", "sampler", "reference", ENSEMBLE, "features"}
"""The names that an explorer may need."""


_OLD_ARGUMENTS = 4
"""Explorers of runs that began before `Round` existed take groups, keys, scores and generator."""


def choose_of(explorer: Any) -> Callable[[Round], Any]:
    """Return an explorer's method `choose`, as a function of a `Round`."""
    choose = explorer.choose
    given = [
        each
        for each in inspect.signature(choose).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    if len(given) < _OLD_ARGUMENTS:
        return choose
    return lambda round: choose(round.groups, round.keys, round.scores, round.generator)


def needs_faults(needs: Any) -> Iterator[str]:
    """Yield the fault of an explorer's `needs`, if it is not a set of names from `SCORED`."""
    if not isinstance(needs, set | frozenset) or not needs <= SCORED:
        yield f"needs is {shown(needs)}; make it a frozenset of {', '.join(sorted(SCORED))}, or an empty one"


def plan_faults(plan: Any) -> Iterator[str]:
    """Yield the faults of a plan that `widen` returned."""
    if not isinstance(plan, Plan):
        yield f"returned {shown(plan)}; return a Plan: dataclasses.replace(plan, ...)"
        return
    counts = [plan.prompts, plan.questions, *plan.samples.values()]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        yield f"returned {plan}; prompts, samples and questions are whole numbers above 0"


def question_faults(
    chosen: Any, group_of: Mapping[Key, Group], kind: Kind, needs: frozenset[str]
) -> Iterator[str]:
    """Yield the faults of the questions that `choose` returned.

    Args:
        group_of: the groups that `choose` got, each by the key that a question about it must have.
        kind: the kind of question that the run asks.
        needs: the explorer's `needs`.
    """
    if not isinstance(chosen, list) or not all(isinstance(question, Question) for question in chosen):
        yield f"returned {shown(chosen)}; return a list of questions"
        return
    asked: set[Key] = set()
    for question in chosen:
        if question.key not in group_of:
            yield (
                f"asks with the key {question.key}, which it was not given; use the group's own, keys[i] "
                "for groups[i]"
            )
            return
        if question.key in asked:
            yield f"asks more than one question with the key {question.key}; ask one a group"
        asked.add(question.key)
        for fault in _faults(question, group_of[question.key], kind, needs):
            yield f"asks a question, {question.key}, that {fault}"


def _faults(question: Question, group: Group, kind: Kind, needs: frozenset[str]) -> Iterator[str]:
    size, prompt = len(group.trajectories), group.prompt
    if question.kind != kind:
        yield f"is of the kind {shown(question.kind)}, and {kind!r} is wanted; pass on the kind of __init__"
    if not question.picks or not all(isinstance(pick, int) and 0 <= pick < size for pick in question.picks):
        yield (
            f"picks {shown(question.picks)} of {size} responses; pick places from 0 to {size - 1}, as "
            "plain int"
        )
        return
    texts = tuple(group.trajectories[pick].text for pick in question.picks)
    if texts != question.candidates:
        yield (
            f"has the candidates {shown(question.candidates)}, and its picks are {shown(texts)}; use "
            "Question.about"
        )
    if (question.messages, question.reference, question.columns) != (
        prompt.messages,
        prompt.reference,
        prompt.columns,
    ):
        yield "speaks of another prompt than its group; use Question.about(group, key, ...)"
    if kind == "compare" and len(texts) != 2:
        yield f"compares {len(texts)} responses; pick 2"
    if question.oracle == ENSEMBLE and not (ENSEMBLE in needs and len(question.known) == len(texts)):
        yield (
            f"is for the ensemble; put {ENSEMBLE!r} in `needs`, and its belief, one value a candidate, in "
            "`known`"
        )
    if faults := [name for name, note in question.notes.items() if not _is_note(name, note)]:
        yield (
            f"has the note {shown(faults[0])}: {shown(question.notes[faults[0]])}; give names of letters, "
            "digits and _, and finite numbers"
        )
    if question.features is not None and np.shape(question.features)[:1] != (len(texts),):
        yield f"has features of shape {np.shape(question.features)}; give one row a candidate"


def _is_note(name: Any, note: Any) -> bool:
    is_number = isinstance(note, int | float) and math.isfinite(note)
    return isinstance(name, str) and re.fullmatch(r"\w+", name) is not None and is_number
