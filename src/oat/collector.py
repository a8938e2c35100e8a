"""The collector. For a step of training it samples responses, lets the explorer choose, and asks the chosen
questions, until the step has enough questions. No other box of the loop calls the actor to sample for
training.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from oat.explore.base import Explorer
from oat.protocols import Actor, Ledger, Plans, PromptSource
from oat.seeds import Seeds
from oat.types import Key, Plan, Prompt, Work

MAX_ROUNDS = 100
"""Largest number of rounds that a step tries before it goes on with the questions that it has."""


class Collector:
    """The box that fills the ledger for the steps of training.

    Args:
        oracle: address of the oracle for questions to which the explorer gave no oracle.
        plans: function from the number of a step to its plan.
        last: number of steps of the run; None: no limit. No questions are asked ahead for steps after the
            last.
        max_outstanding: largest number of questions that are asked ahead of those that are due.

    Attributes:
        due: sum of the numbers of questions in the plans of all steps so far.
    """

    def __init__(
        self,
        prompts: PromptSource,
        actor: Actor,
        explorer: Explorer,
        oracle: str,
        ledger: Ledger,
        seeds: Seeds,
        *,
        plans: Plans,
        last: int | None,
        max_outstanding: int,
    ):
        self.prompts = prompts
        self.actor = actor
        self.explorer = explorer
        self.oracle = oracle
        self.ledger = ledger
        self.seeds = seeds
        self.plans = plans
        self.last = last
        self.max_outstanding = max_outstanding
        self.due = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"due": self.due}

    def load_state(self, state: dict[str, Any]) -> None:
        self.due = state["due"]

    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask questions until the ledger has all that this step and earlier ones need, and those to be
        asked ahead for later steps.

        The method asks fewer questions in four cases:

        * the prompts are used up;
        * this step has taken `MAX_ROUNDS` rounds;
        * the budget is used up: no question is asked;
        * the open questions could use up the budget: no question is asked ahead.

        If the step's feedback is already recorded, the method asks nothing. It only takes the prompts of the
        recorded rounds again, so a replay takes the same prompts.

        Returns:
            "roofline/decode" and "roofline/padded_keys"; a metric is absent if no sampling was measured for
            it.
        """
        before = self.actor.work()
        self.due += plan.questions
        replayed = self.ledger.has_taken(step)
        bound = self._bound(step)
        round = 0
        while round < MAX_ROUNDS and (
            self.ledger.recalls(step, round) if replayed else self.ledger.asked(step, round) < bound
        ):
            batch = self.prompts.take(plan.prompts)
            if not batch:
                break
            if not self.ledger.recalls(step, round):
                self._ask(step, round, batch, plan)
            round += 1
        return _reached(self.actor.work().since(before))

    def _bound(self, step: int) -> int:
        """Return the number of questions, of all steps together, that `fill` tries to have on disk:

        * 0 if the budget is used up;
        * `due`, the questions in the plans of this and all earlier steps, if the open questions could use up
          the budget;
        * otherwise `due` plus the number of questions to ask ahead.
        """
        if self.ledger.is_spent(step):
            return 0
        return self.due if self.ledger.is_spent(step, ahead=True) else self.due + self._ahead(step)

    def _ahead(self, step: int) -> int:
        """Return the number of questions to ask ahead: `max_outstanding`, or the number of questions of all
        later steps if this is smaller."""
        ahead = 0
        for later in count(step + 1):
            if ahead >= self.max_outstanding or (self.last is not None and later >= self.last):
                break
            ahead += self.plans(later).questions
        return min(ahead, self.max_outstanding)

    def _ask(self, step: int, round: int, batch: Sequence[Prompt], plan: Plan) -> None:
        groups = self.actor.sample(batch, plan.samples, ("train", step, round))
        keys = [Key("train", step, round, prompt.occurrence) for prompt in batch]
        scores = self.actor.score(groups, sorted(self.explorer.needs))
        chosen = self.explorer.choose(groups, keys, scores, self.seeds.at("explore", step, round))
        questions = [each if each.oracle else replace(each, oracle=self.oracle) for each in chosen]
        self.ledger.ask(step, round, groups, questions)


def _reached(work: Work) -> dict[str, float]:
    """Return the metrics of sampling: the share of the machine's limit that decoding reached, and the share
    of cached keys that were padding. A metric is left out if there was no work to measure."""
    reached = {"roofline/decode": work.least_s / work.seconds} if work.seconds > 0 else {}
    return {**reached, "roofline/padded_keys": work.padded_keys / work.keys} if work.keys else reached
