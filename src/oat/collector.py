"""The collector. For a step of training it samples responses, lets the explorer choose, and asks the chosen
questions, until the step has enough questions. No other box of the loop calls the actor to sample for
training.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from oat.errors import warn
from oat.explore.base import Explorer, Round, candidates_of
from oat.protocols import Actor, Ledger, Plans, PromptSource
from oat.seeds import Seeds
from oat.types import UNASKED, Feedback, Group, IsUsable, Key, Plan, Prompt, Work

MAX_ROUNDS = 100
"""Largest number of rounds that a step tries before it goes on with the questions that it has."""


@dataclass(frozen=True)
class Refill:
    """Dynamic sampling: a step asks further rounds in place of questions that teach nothing.

    Attributes:
        is_usable: see `Objective.is_usable`.
        rounds: largest number of rounds of a step that begin when it has asked as many questions as its plan
            has.
    """

    is_usable: IsUsable
    rounds: int


class Collector:
    """The box that fills the ledger for the steps of training.

    Args:
        oracle: address of the oracle for questions to which the explorer gave no oracle.
        plans: function from the number of a step to its plan.
        last: number of steps of the run; None: no limit. No questions are asked ahead for steps after the
            last.
        max_outstanding: largest number of questions that are asked ahead of those that are due.
        refill: None: no dynamic sampling. With it, `max_outstanding` is 0.
        reads_text: True if the oracle of training reads texts (`is_same`).

    Attributes:
        is_usable: that of `refill`; None without it.
        due: sum of the numbers of questions in the plans of all steps so far; with `refill`, the number of
            questions that they asked.
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
        refill: Refill | None = None,
        reads_text: bool = True,
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
        self.refill = refill
        self.is_usable = refill.is_usable if refill else None
        self.reads_text = reads_text
        self.due = 0
        self._before: dict[int, dict[str, dict[str, Any]]] = {}
        self._explore_s = 0.0
        self._has_warned = False

    @property
    def state(self) -> dict[str, Any]:
        return {"due": self.due}

    def load_state(self, state: dict[str, Any]) -> None:
        self.due = state["due"]
        self._before.clear()

    def states_at(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the states of the prompts and of the collector before a step; see
        `oat.protocols.Collector`."""
        self._before = {begun: states for begun, states in self._before.items() if begun >= step}
        assert step in self._before or not self._before, f"step {step} has not begun, and a later one has"
        return self._before[step] if step in self._before else self._now()

    def _now(self) -> dict[str, dict[str, Any]]:
        return {"prompts": self.prompts.state, "collector": self.state}

    @property
    def ended(self) -> str | None:
        """The reason why no further step can be filled: a run with `refill` has used up its prompts. Without
        `refill` the number of steps is known beforehand (`last`)."""
        if self.refill is None or not self.prompts.is_used_up:
            return None
        return "all prompts are used up (prompts.epochs)"

    def metrics(self, feedback: Feedback) -> dict[str, float]:
        """Return the explorer's metrics of the questions that a step took."""
        return self.explorer.metrics(feedback)

    def fill(self, step: int, plan: Plan) -> dict[str, float]:
        """Ask questions until the ledger has all that this step and earlier ones need, and those to be
        asked ahead for later steps.

        The method asks fewer questions in four cases:

        * the prompts are used up;
        * this step has taken `MAX_ROUNDS` rounds, or with `refill` as many as it allows;
        * the budget is used up: no question is asked;
        * the open questions could use up the budget: no question is asked ahead.

        With `refill`, questions that teach nothing do not count; see `_ask_until_usable`.

        If the step's feedback is already recorded, the method asks nothing. It only takes the prompts of the
        recorded rounds again, so a replay takes the same prompts.

        Returns:
            "roofline/decode" and "roofline/padded_keys"; a metric is absent if no sampling was measured for
            it. "episode/broken_calls", if there are any. "time/explore_s", if the explorer chose: the seconds
            in which samples were scored and questions chosen.
        """
        before = self.actor.work()
        self._before[step] = self._now()
        self.due += plan.questions
        if self.ledger.has_taken(step):
            self._replay(step, plan)
        elif self.refill is None:
            self._ask_all(step, plan)
        elif self._bound(step):
            self._ask_until_usable(step, plan, self.refill)
        if self.refill is not None:
            self.due = self.ledger.asked(step + 1, 0)
        took = {"time/explore_s": self._explore_s} if self._explore_s else {}
        self._explore_s = 0.0
        return {**_reached(self.actor.work().since(before)), **took}

    def _replay(self, step: int, plan: Plan) -> None:
        """Take the prompts of the recorded rounds of a step whose feedback is recorded."""
        for round in count():
            if not self.ledger.recalls(step, round):
                break
            self.prompts.take(plan.prompts if self.refill is None else self.ledger.num_prompts(step, round))

    def _ask_all(self, step: int, plan: Plan) -> None:
        """Ask rounds until there are as many questions as this step and earlier ones need."""
        bound = self._bound(step)
        for round in range(MAX_ROUNDS):
            if self.ledger.asked(step, round) >= bound or not self._round(step, round, plan, plan.prompts):
                break

    def _ask_until_usable(self, step: int, plan: Plan, refill: Refill) -> None:
        """Ask rounds until as many of the step's questions are usable as its plan has.

        Until the step has asked as many questions as its plan has, a round has the prompts of the plan. Each
        further round has only as many prompts as are missing, and is asked when all answers before it are
        recorded. So the rounds follow from recorded answers of earlier rounds, and a killed and continued run
        makes the same ones.
        """
        missing = plan.questions
        further = 0
        before = self.ledger.asked(step, 0)
        most = MAX_ROUNDS + refill.rounds if plan.questions else 0
        for round in range(most):
            is_further = self.ledger.asked(step, round) - before >= plan.questions
            further += is_further
            fewer = max(min(missing, plan.prompts), math.ceil(plan.prompts * missing / plan.questions))
            if not self._round(step, round, plan, fewer if is_further else plan.prompts):
                break
            if self.ledger.recalls(step, round + 1):
                continue  # asked before a kill, even if a user's rule would now do without it
            answered = self.ledger.answered(step, round)
            items = [item for item in answered if item.question.oracle != UNASKED]
            usable = sum(map(refill.is_usable, items))
            missing = plan.questions - usable
            if missing <= 0 or any("unpaid" in item.answer.marks for item in items):
                break
            has_enough = self.ledger.asked(step, round + 1) - before >= plan.questions
            if (has_enough and further >= refill.rounds) or round + 1 == most:
                self._warn(step, plan, usable, len(items), len(answered) - len(items))
                break

    def _round(self, step: int, round: int, plan: Plan, prompts: int) -> bool:
        """Take the prompts of a round and, unless the round is recorded, sample and ask it. Return False if
        no prompt is left.

        Args:
            prompts: number of prompts of a new round.
        """
        is_recorded = self.ledger.recalls(step, round)
        if is_recorded and self.refill is not None:
            prompts = self.ledger.num_prompts(step, round)
        batch = self.prompts.take(prompts)
        if batch and not is_recorded:
            self._ask(step, round, batch, plan)
        return bool(batch)

    def _warn(self, step: int, plan: Plan, usable: int, asked: int, unasked: int) -> None:
        """Warn, once in a process, that a step had too few usable questions after its last round.

        Args:
            asked: number of the step's questions that an oracle was asked.
            unasked: number of the others. Most of them are about two equal responses.
        """
        if self._has_warned:
            return
        self._has_warned = True
        why = []
        if asked:
            why.append(f"{asked - usable} of {asked} questions ({1 - usable / asked:.0%}) teach nothing")
        if unasked or not asked:
            why.append(f"{unasked} of {asked + unasked} were asked of no oracle (equal responses)")
        warn(
            f"step {step + 1}: {' and '.join(why)}, and no further round is asked (sampling.refill_rounds); "
            f"the step learns from {usable} instead of {plan.questions} (metrics refill/*)"
        )

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
        address = ("train", step, round)
        groups = self.actor.sample(batch, plan.samples, address)
        if plan.branching is not None:
            groups = self.actor.branch(groups, plan.branching, address)
        begin = time.perf_counter()
        chosen = self.explorer.choose(self._round_of(step, round, groups))
        self._explore_s += time.perf_counter() - begin
        questions = [each if each.oracle else replace(each, oracle=self.oracle) for each in chosen]
        self.ledger.ask(step, round, groups, questions)

    def _round_of(self, step: int, round: int, groups: Sequence[Group]) -> Round:
        """Return what the explorer chooses from."""
        return Round(
            groups,
            [Key("train", step, round, group.prompt.occurrence) for group in groups],
            self.actor.score(groups, sorted(self.explorer.needs)),
            [candidates_of(group, reads_text=self.reads_text) for group in groups],
            self.ledger.pairs_before(step),
            self.seeds.at("explore", step, round),
        )


def _reached(work: Work) -> dict[str, float]:
    """Return the metrics of sampling: the share of the machine's limit that decoding reached, the share of
    cached keys that were padding, and the number of calls whose tool failed. A metric is left out if there
    was no work to measure."""
    return {
        **({"roofline/decode": work.least_s / work.seconds} if work.seconds > 0 else {}),
        **({"roofline/padded_keys": work.padded_keys / work.keys} if work.keys else {}),
        **({"episode/broken_calls": float(work.broken_calls)} if work.broken_calls else {}),
    }
