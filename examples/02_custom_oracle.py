"""An oracle of your own: a class that takes questions, and answers when it can.

A function (`examples/01_custom_reward.py`) is enough for an oracle that answers at once. A class is for one
that takes time: a judge behind a network, a queue of people. It takes questions with `submit`, which returns
at once, and hands out answers with `collect`, late and in any order if need be. A question that is lost fails
after its deadline. With `oracle.max_outstanding` answers arrive while the run learns; with
`oracle.max_wait_s` the run goes on without those that are late.

Here a judge compares two answers, takes a moment for each, and works on several at once. `python
examples/02_custom_oracle.py` aligns a tiny random model with it by DPO in seconds.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from oat.types import Answer, Kind, Price, Question

CONFIG = f"""
sampling:
  max_new_tokens: 4
oracle:
  name: "{__file__}:Judge"
  likes: aeiou            # options of the class, by the names of its constructor's arguments
  workers: 8
  deadline_s: 10          # the rest is `oat`'s: after so many seconds a question counts as failed
algorithm:
  name: dpo
  prompts: 32
learner:
  learning_rate: 2e-3
stop:
  max_steps: 25
  max_queries: 700        # the budget is never passed
"""
PROMPTS = [f"{a}{b}=" for a in "abcdefgh" for b in "aeio"]


class Judge:
    """Prefers the answer with more of the letters that it likes; two with equally many are a tie.

    Args:
        likes: letters.
        workers: questions that it works on at once.
    """

    answers: Kind = "compare"
    """`compare`: which of two is better. `score`: a number for each, which a preference algorithm then
    compares itself."""
    durable = False
    """Whether tickets stay valid when this process dies. If so, a run that is killed and continued waits for
    them instead of asking again."""

    def __init__(self, likes: str, workers: int = 4):
        self.likes = set(likes)
        self.pool = ThreadPoolExecutor(workers)
        self.open: dict[str, Future[Answer]] = {}

    def price(self, question: Question) -> Price:
        """Return the most that a question can cost, for budgets; by default one query a value."""
        return Price(queries=1)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions, and return one ticket each, all of them different. Must not wait for answers."""
        tickets = [str(question.key) for question in questions]
        self.open |= {
            ticket: self.pool.submit(self.compare, question)
            for ticket, question in zip(tickets, questions, strict=True)
        }
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return the answers to these tickets that are ready, or that become ready within `seconds`, as soon
        as there is at least one. Each answer is returned once."""
        waiting = {ticket: self.open[ticket] for ticket in tickets if ticket in self.open}
        wait(waiting.values(), timeout=seconds, return_when=FIRST_COMPLETED)
        ready = [ticket for ticket, future in waiting.items() if future.done()]
        return [(ticket, self.open.pop(ticket).result()) for ticket in ready]

    def compare(self, question: Question) -> Answer:
        """The probability that the first wins. A mark other than "ok" says that there is none: "tie",
        "abstain", "failed"."""
        time.sleep(0.01)
        first, second = (sum(letter in self.likes for letter in text) for text in question.candidates)
        if first == second:
            return Answer(question.key, (0.5,), ("tie",), queries=1, by="judge")
        return Answer(question.key, (1.0 if first > second else 0.0,), ("ok",), queries=1, by="judge")


def main(*flags: str) -> None:
    from oat.testing import check_oracle, tiny_run

    check_oracle(Judge, options={"likes": "aeiou"})
    rows = tiny_run(CONFIG, PROMPTS, flags=flags)
    print(
        f"\n{rows[-1]['oracle/queries']:.0f} comparisons; log-probability of a preferred answer: "
        f"{rows[1]['logps/chosen']:.1f} in the first step, {rows[-1]['logps/chosen']:.1f} in the last"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
