"""The ledger records what was asked, what came back, and which step learned from it.

Everything is on disk before it has an effect:

* A round of questions, with its trajectories, is recorded before any of it is sent. A recorded question is an
  **intent**.
* Answers that come together are recorded in one transaction. The first answer of a question wins
  (`ledger/outstanding.py`).
* The answers that a step learns from, and their order, are recorded before the step trains. If a step has
  such a record, it gets the recorded answers without waiting.

So a run that is killed and continued learns from the same answers in the same order.

Two rules limit what is sent:

* A value is not asked for if the answers to equal questions give it (`ledger/cache.py`).
* A question is not asked if the budget does not allow it (`ledger/budgets.py`).

A kill at any moment leaves the ledger sound. Many threads may ask, take and read at once: the store's lock
guards the database and everything in memory, and no thread holds it while it waits for answers. Only one
process may write the ledger.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from types import MappingProxyType
from typing import Literal

from oat.control.silence import warn_of_silence
from oat.ledger.budgets import BudgetedBatches, Spending
from oat.ledger.cache import Asks, Cache
from oat.ledger.intents import Intent, Known, whole
from oat.ledger.open_questions import OpenQuestion, OpenQuestions, Stage
from oat.ledger.outstanding import OpenRounds, Outstanding, Settling, close_unanswered, unanswered
from oat.ledger.store import Store
from oat.ledger.versions import changes, load_versions
from oat.oracles.base import Oracle
from oat.oracles.contract import nothing
from oat.seeds import Seeds
from oat.types import UNASKED, Answer, Feedback, Group, IsUsable, Item, Price, Question, Spent
from oat.types.questions import Budget

_Found = tuple[Intent, Answer, int | None]
"""A question, its answer, and its label: the index of the candidate that won, or None."""


class Ledger:
    """Asks questions, records the answers, and gives them to steps.

    Args:
        oracles: the oracles, by address.
        labels: as in `Settling`.
        deadline_s: a question fails if it has no answer this number of seconds after it was submitted.
        max_wait_s: the longest time that a step of training waits for answers, in seconds. After that it
            learns from those that have come. None: it waits until each of its questions is answered or has
            failed.
        max_age: the largest number of steps from the step that asked a question to a step that learns from
            its answer; None: no limit.
        budgets: the budgets, by purpose.
        repeats: number of answers that are bought for a query before they are used again; 0: no answer is
            used again.
        keep_groups: True: keep also the trajectories that no step will read again.
        known_versions: by address, versions that replace those that the oracles themselves state.
        check_interrupt: a function that may raise. The ledger calls it each time an oracle has been asked for
            answers, before these are recorded.
        release: a function that is called when the ledger is closed. No oracle is asked after that.
    """

    def __init__(
        self,
        store: Store,
        oracles: Mapping[str, Oracle],
        seeds: Seeds,
        *,
        labels: Literal["threshold", "bernoulli"],
        deadline_s: float,
        max_wait_s: float | None = None,
        max_age: int | None = None,
        budgets: Mapping[str, Budget] | None = None,
        repeats: int = 1,
        keep_groups: bool = False,
        known_versions: Mapping[str, str] = MappingProxyType({}),
        check_interrupt: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ):
        self.store = store
        self.oracles = oracles
        self.max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self.max_age = max_age
        self.budgets = budgets or {}
        self.keep_groups = keep_groups
        self.release = release
        versions = {name: known_versions.get(name, oracle.version or "") for name, oracle in oracles.items()}
        cacheable = {name for name, oracle in oracles.items() if oracle.cacheable and not oracle.reads_group}
        self.open = OpenQuestions()
        self.cache = Cache(store, repeats, versions, cacheable)
        self.rounds = OpenRounds(store, self.open)
        self.settling = Settling(store, self.open, seeds, labels)
        self.outstanding = Outstanding(
            store, self.open, oracles, self.rounds, self.settling, self.budgets, deadline_s, check_interrupt
        )
        oracle_of = self.outstanding.oracle
        self.waves = BudgetedBatches(
            store, self.open, self.budgets, lambda question: oracle_of(question.oracle).price(question)
        )
        self.spending = Spending(store, self.waves, oracle_of, self.cache, self.rounds.intent)
        self.warned: set[str] = set()
        self._collecting = RLock()
        self._recover(load_versions(store, versions))

    @property
    def reasked(self) -> int:
        """The number of questions that were submitted once more; see `Outstanding.reasked`."""
        return self.outstanding.reasked

    @property
    def reported(self) -> dict[str, float]:
        """The metrics that the oracles report about themselves. If several oracles report the same name, the
        value of the first of them in `oracles` counts."""
        return {
            name: value for oracle in [*self.oracles.values()][::-1] for name, value in oracle.metrics.items()
        }

    def asked(self, step: int, round: int, purpose: str = "train") -> int:
        """Return the number of questions in recorded rounds before (step, round)."""
        return self.store.asked(purpose, step, round)

    def recalls(self, step: int, round: int, purpose: str = "train") -> bool:
        """Return True if this round is on disk. Then it need not be sampled or asked again."""
        return self.store.has_round(purpose, step, round)

    def has_taken(self, step: int, purpose: str = "train") -> bool:
        """Return True if the ledger has a record of the step's feedback."""
        return self.store.has_take(purpose, step)

    def ask(
        self,
        step: int,
        round: int,
        groups: Sequence[Group],
        questions: Sequence[Question],
        purpose: str = "train",
    ) -> None:
        """Record a round of questions with its trajectories, then submit questions.

        A question is not submitted in three cases: it has no oracle; the budget does not allow it; or earlier
        answers and waiting questions bring all of its values. If the purpose is asked in waves, the call
        submits only the questions of the next wave. It submits none if the previous wave is not settled.

        Args:
            groups: the groups of the round, one for each prompt.
            questions: each is about one group. The prompt of this group has the `occurrence` of the
                question's key.

        Raises:
            OracleError: an oracle raises, or breaks its protocol.
            LedgerError: the file cannot be written.
        """
        member_of = {group.prompt.occurrence: number for number, group in enumerate(groups)}
        members = [member_of[question.key.occurrence] for question in questions]
        with self.store.lock:
            with self.store:
                terms = self.spending.terms(purpose, questions)
                quotes = [each.quote for each in terms]
                recorded = self.store.add_round(purpose, step, round, groups, questions, members, quotes)
                known = [_known(intent, each.is_paid) for intent, each in zip(recorded, terms, strict=True)]
                rows = [
                    self.open.add(intent, self._stage(intent, answer), each.asks)
                    for intent, answer, each in zip(recorded, known, terms, strict=True)
                ]
                answers = zip(rows, known, strict=True)
                self.settling.add([(row, answer) for row, answer in answers if answer is not None])
                if self.waves.covers(purpose):
                    due = self._next_wave(purpose)
                else:
                    waiting = [row for row in rows if row.stage is not Stage.ANSWERED]
                    self.settling.complete([row for row in waiting if row.asked.others])
                    due = [row for row in waiting if row.stage is Stage.DUE]
            self.rounds.add((purpose, step, round), groups)
            self.outstanding.submit(due)

    def answered(self, step: int, round: int) -> list[Item]:
        """Wait until every question that a step of training has asked is answered or has failed. Return those
        of its rounds 0 to `round`, in the order in which they were asked. Nothing is recorded as taken.

        Raises:
            OracleError: an oracle raises, or gives an answer that breaks the contract.
            LedgerError: the file cannot be written, or its content is damaged.
        """
        self._settle("train", step, -1, step, math.inf)
        with self.store.lock:
            ids = self.store.takeable_ids("train", step, -1, step)
            intents = [self.rounds.intent(id) for id in ids]
            found = self.store.answers([each for each in intents if each.question.key.round <= round])
            return [self.rounds.item(*each) for each in found]

    def num_prompts(self, step: int, round: int) -> int:
        """Return the number of prompts in a recorded round of training.

        Raises:
            LedgerError: the round's trajectories were dropped, or are damaged.
        """
        with self.store.lock:
            return self.rounds.num_groups(("train", step, round))

    def take_feedback(
        self, step: int, count: int, purpose: str = "train", *, is_usable: IsUsable | None = None
    ) -> Feedback:
        """Return the feedback of a step. If the ledger has recorded what the step takes, the feedback is read
        from this record.

        Otherwise the call waits for answers, decides what the step takes, and records it:

        * In training, a question is too old if its round is more than `max_age` steps old. The step does not
          learn from it. If it is answered, it is recorded as expired.
        * If `max_wait_s` is not set, the call waits for all questions that are too old, and for the next
          `count` others of this step and earlier ones, until each is answered or has failed. So the feedback
          does not depend on when answers come.
        * If `max_wait_s` is set, a step of training waits only until `count` paid questions that are not too
          old are answered, and at most `max_wait_s`. An evaluation still waits for all of its questions.
        * The step then takes the next `count` answered questions, in the order in which they were asked. If
          fewer are answered, it takes all of them. Unpaid questions count as answered.
        * If `is_usable` is given, the call waits for all questions that the step has asked. The step learns
          from the first `count` of them that are usable, and from those that were asked of no oracle. The
          others are taken too, but thrown away. Questions of earlier steps are too old.

        Raises:
            OracleError: an oracle raises, or gives an answer that breaks the contract.
            LedgerError: the file cannot be written, or its content is damaged.
        """
        wanted = count if is_usable is None else -1
        oldest = 0 if self.max_age is None or purpose != "train" else step - self.max_age
        oldest = oldest if is_usable is None else step
        if not self.has_taken(step, purpose):
            self._settle(purpose, step, wanted, oldest, self.max_wait_s if purpose == "train" else math.inf)
        with self.store.lock:
            if self.has_taken(step, purpose):
                kept = self.store.answers(self.store.taken(purpose, step))
            else:
                kept = self._take(step, purpose, wanted, oldest, count, is_usable)
            items = tuple(self.rounds.item(*each) for each in kept)
            others = [] if is_usable is None else self.store.answers(self.store.thrown_away(step))
            thrown_away = tuple(self.rounds.item(*each) for each in others)
            warn_of_silence(self.warned, purpose, step, items + thrown_away)
            self._forget()
            price, too_late = self.store.take_price(purpose, step), self.store.num_expired(purpose, step)
            pairs = self.store.pairs_before(purpose, step + 1)
        return Feedback(step, items, price.queries, too_late, (), price.cost, thrown_away, pairs)

    def changes(self, row: int, *, is_evaluated: bool) -> int:
        """Return how often versions of oracles had changed before the takes that a row of metrics describes.
        Oracles that change together count as one change.

        Args:
            row: the row's number, which is the number of training steps before it.
            is_evaluated: True if the row contains an evaluation. Then a change before the evaluation's
                answers counts too.
        """
        return changes(self.store, row, is_evaluated=is_evaluated)

    def num_taken(self, step: int) -> int:
        """Return the number of questions in the feedback of a training step."""
        return self.store.num_taken("train", step)

    def taken(self, step: int) -> tuple[Item, ...]:
        """Return the items that a step of training learned from, as the ledger records them.

        Raises:
            LedgerError: their trajectories were dropped, or are damaged.
        """
        with self.store.lock:
            found = self.store.answers(self.store.taken("train", step))
            items = tuple(self.rounds.item(*each) for each in found)
            self._forget()
        return items

    def give_up(self, step: int, purpose: str) -> None:
        """Close a step or an evaluation that failed, for example because its oracle raised.

        A take without usable answers is recorded for it. Unanswered questions of this purpose are recorded as
        failed, and their answers are not fetched. Answers that came before go into the cache, for later equal
        questions.
        """
        with self._collecting, self.store.lock:
            dropped = [*self.outstanding.of(purpose)]
            with self.store:
                close_unanswered(self.store, purpose)
                self.open.fail(purpose)
                closed = self.store.takeable_ids(purpose, step, -1)
                self.store.add_take(purpose, step, [], closed)
                self._keep(self._found(closed), step)
            self._forget()
            self.outstanding.drop(dropped)

    def price(self, questions: Sequence[Question]) -> Price:
        """Return the sum of the highest prices of questions if they were asked now. Values that are known or
        awaited cost nothing."""
        with self.store.lock:
            return self.spending.price(questions)

    def refuse(self, step: int, purpose: str, price: Price) -> None:
        """Record that a step asks nothing because the budget does not allow this price."""
        with self.store.lock, self.store:
            self.store.add_take(purpose, step, [], refused=price)

    def refused(self, step: int, purpose: str) -> Price | None:
        """Find the last recorded take or refusal of this purpose at step `step` or before. Return the price
        that the budget did not allow then. Return None if nothing is found, or if the budget allowed
        everything."""
        return self.store.last_refused(purpose, step)

    def is_spent(self, step: int, *, ahead: bool = False) -> bool:
        """Return True if, before this step, training can buy nothing more; see `Spending.is_spent`."""
        with self.store.lock:
            return self.spending.is_spent(step, ahead=ahead)

    def committed(self, purpose: str) -> Price:
        """Return the price of the answers that steps or evaluations have taken, plus the highest price of
        every other question."""
        return self.store.committed(purpose)

    def spent_before(self, step: int, purpose: str = "train") -> Spent:
        """Return the spending right after step `step - 1` took its answers; see `Spending.spent_before`."""
        with self.store.lock:
            return self.spending.spent_before(step, purpose)

    def pairs_before(self, step: int) -> int:
        """Return the number of compared pairs for which the steps of training before `step` took paid
        answers."""
        return self.store.pairs_before("train", step)

    def drop(self, step: int) -> None:
        """If `keep_groups` is True, do nothing. Otherwise drop the trajectories of rounds whose questions
        were all taken by steps before `step - 1`. These steps are never replayed. The trajectories that step
        `step - 1` took stay, because row `step` of the metrics may need them.
        """
        if not self.keep_groups:
            with self.store.lock, self.store:
                self.store.drop_groups(step - 1)

    def close(self) -> None:
        self.store.close()
        self.release()

    def _recover(self, changed: Collection[str]) -> None:
        """Restore the table of open questions before a restart.

        Earlier answers of an oracle may have given values to a question that is still unanswered. If the
        oracle has changed, the question loses these values, so all of its values will be asked for. Two kinds
        of questions keep them:

        * A question that the oracle kept. It is not submitted again.
        * A question of a purpose with a budget, because no price was reserved for these values.

        Args:
            changed: oracles whose version has changed since they answered. New questions await no values from
                questions that these oracles got before the restart.
        """
        with self.store:
            self.waves.begin()
        unpaid_ids = {
            id
            for purpose in self.budgets.keys() - self.waves.limited
            for id in self.store.unpaid_ids(purpose)
        }
        states = self.store.states()
        for intent in self.store.waiting(0, -1, 1, 2):
            is_changed = intent.question.oracle in changed
            asks = [] if is_changed or intent.id in unpaid_ids else self.cache.asks(intent)
            if states[intent.id] > 0:
                self.open.add(intent, Stage.ANSWERED, asks)
            elif states[intent.id] < 0:
                self.open.add(intent, Stage.AWAITING, asks, asked=self.waves.as_asked(intent))
            elif self.waves.is_held(intent):
                self.open.add(intent, Stage.HELD, asks)
            else:
                self._resume(intent, asks, is_changed=is_changed)
        waiting = [row for stage in (Stage.DUE, Stage.SENT, Stage.AWAITING) for row in self.open.at(stage)]
        self.settling.complete(row for row in waiting if row.asked.others)

    def _resume(self, intent: Intent, asks: Asks, *, is_changed: bool) -> None:
        """Add an unanswered question after a restart that waits for no wave.

        Args:
            is_changed: True if the oracle's version has changed.
        """
        asked, is_kept = self.waves.as_asked(intent), self.outstanding.is_kept(intent)
        is_limited = self.budgets.get(intent.question.key.purpose, Budget()).is_limited
        if is_changed and not is_kept and not is_limited:
            asked = replace(asked, cached=())
        row = self.open.add(intent, Stage.DUE if asked.is_sent else Stage.AWAITING, asks, asked=asked)
        if is_kept:
            self.outstanding.resume(row)

    def _stage(self, intent: Intent, answer: Answer | None) -> Stage:
        """Return the first state of a question.

        Args:
            answer: its answer, if the ledger can give it without an oracle.
        """
        if answer is not None:
            return Stage.ANSWERED
        if self.waves.covers(intent.question.key.purpose):
            return Stage.HELD
        return Stage.DUE if intent.is_sent else Stage.AWAITING

    def _found(self, ids: Sequence[int]) -> list[_Found]:
        """Return answered questions, each with its answer and its label (the index of a comparison's winner).
        A step takes them."""
        return self.store.answers([self.open.close(id) for id in ids])

    def _take(
        self, step: int, purpose: str, wanted: int, oldest: int, count: int, is_usable: IsUsable | None
    ) -> list[_Found]:
        """Record what a step takes, and return what it learns from. It takes `wanted` answered questions of
        the steps from `oldest` on (-1: all), and learns from `count` of them."""
        with self.store:
            expired = self.store.takeable_ids(purpose, oldest - 1, -1)
            found = self._found(self.store.takeable_ids(purpose, step, wanted, oldest))
            unpaid = [intent for intent, answer, _ in found if "unpaid" in answer.marks]
            kept = found if is_usable is None else self._usable(found, count, is_usable)
            ids = {intent.id: None for intent, *_ in kept}
            left = [intent.id for intent, *_ in found if intent.id not in ids]
            self.store.add_take(purpose, step, list(ids), [*expired, *left], self.spending.refused(unpaid))
            for id in expired:
                self.open.close(id)
            self._keep(found, step)
        return kept

    def _usable(self, found: list[_Found], count: int, is_usable: IsUsable) -> list[_Found]:
        """Return the first `count` usable questions, and those that were asked of no oracle, in order."""
        kept = []
        for each in found:
            is_unasked = each[0].question.oracle == UNASKED
            if is_unasked or (count > 0 and is_usable(self.rounds.item(*each))):
                kept.append(each)
                count -= not is_unasked
        return kept

    def _keep(self, found: Sequence[_Found], step: int) -> None:
        """Store in the cache the answers that a step took. The caller holds the transaction."""
        for intent, answer, _ in found:
            self.cache.keep(intent, answer, step)

    def _settle(self, purpose: str, step: int, count: int, oldest: int, seconds: float) -> None:
        """Record answers as they come, until a step has all answers that it needs or `seconds` have passed.

        Args:
            count: number of questions that the step takes.
            oldest: the first step whose questions are not too old.
            seconds: the longest wait, in seconds.
        """
        self.outstanding.ask_again(purpose)
        until = time.monotonic() + seconds
        patience = 0.0
        while True:
            with self._collecting:
                self._advance(purpose)
                waiting = self.outstanding.of(purpose)
                has_come = self.outstanding.collect(waiting, patience)
                is_enough = self._is_enough(purpose, step, count, oldest)
                is_over = is_enough or time.monotonic() >= until
                if not waiting or (is_over and not has_come):
                    return
                wake = min(until, self.outstanding.next_deadline(purpose))
                patience = 0.0 if is_enough else max(0.0, wake - time.monotonic())

    def _advance(self, purpose: str) -> None:
        """Record and submit the next wave if the previous one is settled."""
        with self.store.lock:
            if self.waves.is_ready(purpose):
                with self.store:
                    wave = self._next_wave(purpose)
                self.outstanding.submit(wave)

    def _next_wave(self, purpose: str) -> list[OpenQuestion]:
        """Record the next wave, and further ones while a wave has no question that must be sent. A question
        is not sent if other questions or earlier answers bring all of its values. The caller holds the
        transaction.

        Returns:
            The questions to send; empty if no further wave can be formed.
        """
        while True:
            wave = self.waves.next(purpose)
            self.settling.complete([row for row in wave.rows if row.asked.others])
            for refusal in wave.refusals:
                self.spending.say_unpaid(*refusal)
            sent = [row for row in wave.rows if row.stage is Stage.DUE]
            if sent or not wave.rows:
                return sent

    def _is_enough(self, purpose: str, step: int, count: int, oldest: int) -> bool:
        """Return True if a step need not wait any longer.

        Questions that were taken do not count. If `max_wait_s` is infinite, the first `count` questions of
        the steps `oldest` to `step`, and all questions of steps before `oldest`, must be answered or unpaid.
        If `max_wait_s` is finite, any `count` questions of the steps `oldest` to `step` must be answered and
        paid.
        """
        if self.max_wait_s == math.inf:
            return not self.store.lacks(purpose, step, count, oldest)
        return self.store.num_takeable(purpose, step, oldest) >= count

    def _forget(self) -> None:
        """Drop trajectories from memory: those of all rounds that have no pending question."""
        self.rounds.forget(self.outstanding.rounds_pending())


def _known(intent: Intent, is_paid: bool) -> Answer | None:
    """Return the answer to a question if the ledger can give it without an oracle: the question has no
    oracle, it is unpaid, or all its values are known. Otherwise return None."""
    question = intent.question
    if question.oracle == UNASKED:
        return nothing(question, "tie", UNASKED)
    if not is_paid:
        return unanswered(intent, "unpaid")
    if not intent.cached or not all(isinstance(value, Known) for value in intent.cached):
        return None
    return whole(intent, Answer(question.key, (), (), queries=0, by=question.oracle))
