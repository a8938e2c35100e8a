"""An oracle of your own: a class that takes questions and answers them later.

If an oracle answers immediately, a function is enough (`examples/01_custom_reward.py`). A class suits an
oracle that takes time, such as a judge on the network or a queue of people:

* `submit` takes questions and returns immediately.
* `collect` returns answers that are ready, in any order.
* A question without an answer fails at its deadline.
* With `oracle.max_outstanding`, the run learns while it waits for answers. With `oracle.max_wait_s`, it goes
  on without late answers.

In this example, a judge compares two responses, takes a moment for each question, and works on several
questions at a time. `python examples/02_custom_oracle.py` aligns a tiny random model with it by DPO in
seconds.
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
    """A judge that prefers the response with more of the letters that it likes. If both have equally many,
    the mark is "tie".

    Args:
        likes: the letters that the judge likes.
        workers: number of questions on which the judge works at a time.
    """

    answers: Kind = "compare"
    """The kind of questions. `compare`: an answer says which of two responses is better. `score`: an answer
    has a number for each response; a preference algorithm then compares the numbers."""
    durable = False
    """True if tickets stay valid after this process has ended. Then a run that is killed and continued waits
    for the answers; otherwise it asks again."""

    def __init__(self, likes: str, workers: int = 4):
        self.likes = set(likes)
        self.pool = ThreadPoolExecutor(workers)
        self.open: dict[str, Future[Answer]] = {}

    def price(self, question: Question) -> Price:
        """Return the most that the answer to a question can cost. An oracle without this method has the price
        of one query per value."""
        return Price(queries=1)

    def submit(self, questions: Sequence[Question]) -> list[str]:
        """Take questions, and return a different ticket for each question. Do not wait for answers."""
        tickets = [str(question.key) for question in questions]
        self.open |= {
            ticket: self.pool.submit(self.compare, question)
            for ticket, question in zip(tickets, questions, strict=True)
        }
        return tickets

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return the answers to these tickets that are ready. If none is ready, wait at most `seconds` for
        the first. Each answer is returned once."""
        waiting = {ticket: self.open[ticket] for ticket in tickets if ticket in self.open}
        wait(waiting.values(), timeout=seconds, return_when=FIRST_COMPLETED)
        ready = [ticket for ticket, future in waiting.items() if future.done()]
        return [(ticket, self.open.pop(ticket).result()) for ticket in ready]

    def compare(self, question: Question) -> Answer:
        """Return the answer to a question: the probability that the first response wins, and a mark. A mark
        other than "ok" says that there is no probability: "tie", "abstain" or "failed"."""
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
