"""The collector: fills the ledger for a step. The only caller of actor and explorer."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from oat.explore.base import Explorer
from oat.protocols import Actor, Ledger, Plans, PromptSource
from oat.seeds import Seeds
from oat.types import Key, Plan, Prompt, Work

MAX_ROUNDS = 100
"""Rounds a step tries before it goes on with the questions it has."""


class Collector:
    """Samples, chooses and asks until a step has its questions.

    Args:
        oracle: the address that a question gets which the explorer gave none.
        plans: of all steps.
        last: steps of the run; no questions are asked ahead for later ones. None: it has no end.
        max_outstanding: questions asked beyond those that are due.

    Attributes:
        due: questions that the steps so far were to have.
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
        """Ask until the questions of the steps up to this one and the allowance for late answers are on disk.

        Nothing here depends on when answers arrive: the count is of recorded rounds before the cursor, so a
        replay does the same. A step that already has its record goes over the rounds it asked and no others,
        also when the run has since been made longer. Stops early when the prompts are used up or a step has
        tried `MAX_ROUNDS` rounds; asks nothing while the budget buys nothing, and the steps take what is paid
        for. Asks nothing ahead while what waits may take all that is left.

        Returns:
            "roofline/decode" and "roofline/padded_keys", if anything was sampled.
        """
        before = self.actor.work()
        self.due += plan.questions
        target = self.due + self._ahead(step)
        replayed = self.ledger.has_taken(step)
        bound = (
            0
            if self.ledger.is_spent(step)
            else self.due
            if self.ledger.is_spent(step, ahead=True)
            else target
        )
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

    def _ahead(self, step: int) -> int:
        """Questions to ask beyond those that are due: as many as are allowed, and as later steps will
        take."""
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
    """The share of the machine's limit that was reached, and of the cached keys that were computed with for
    nothing."""
    reached = {"roofline/decode": work.least_s / work.seconds} if work.seconds > 0 else {}
    return {**reached, "roofline/padded_keys": work.padded_keys / work.keys} if work.keys else reached
