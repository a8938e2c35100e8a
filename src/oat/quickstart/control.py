"""The oracle of the quickstart's controls. In training, it shuffles the rewards among the responses."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from oat.oracles.base import Oracle
from oat.oracles.callables import CallableOracle
from oat.oracles.rules.exact import exact_match
from oat.seeds import Seeds
from oat.types import Answer, Kind, Question


class PermutedRewards(Oracle):
    """An oracle that computes the scores of `exact_match`, and permutes them at random over all candidates of
    a training round. So a score says nothing about the response that gets it.

    * A round has as many right and wrong scores as without the permutation.
    * If the scores of two responses differ, each is the preferred one with probability 1/2.
    * The scores of evaluations are not permuted.
    * The answers depend only on the seed and on the questions that are submitted together.

    Args:
        seed: seed of the permutations.
    """

    answers: Kind = "score"
    cacheable = False

    def __init__(self, seed: int = 0):
        self._rule = CallableOracle(exact_match, "permuted exact_match", reads_group=False)
        self._seeds = Seeds(seed)
        self._open: dict[str, Answer] = {}

    def submit(self, questions: Sequence[Question]) -> list[str]:
        tickets = self._rule.submit(questions)
        answered = self._rule.collect(tickets, 0.0)
        for (purpose, _, _), members in groupby(
            answered, key=lambda pair: (pair[1].key.purpose, pair[1].key.step, pair[1].key.round)
        ):
            round_ = list(members)
            self._open.update(self._permute(round_) if purpose == "train" else round_)
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        return [(ticket, self._open.pop(ticket)) for ticket in tickets if ticket in self._open]

    def _permute(self, round_: Sequence[tuple[str, Answer]]) -> list[tuple[str, Answer]]:
        rewards = [reward for _, answer in round_ for reward in zip(answer.values, answer.marks, strict=True)]
        order = self._seeds.at("permuted", str(round_[0][1].key)).permutation(len(rewards))
        dealt = iter([rewards[i] for i in order])
        permuted = []
        for ticket, answer in round_:
            values, marks = zip(*(next(dealt) for _ in answer.values), strict=True)
            permuted.append((ticket, replace(answer, values=values, marks=marks)))
        return permuted
