"""Warnings and metrics about questions that got no usable answer."""

from collections.abc import Sequence

from oat.errors import warn
from oat.plugins.registry import ORACLES
from oat.types import UNASKED, Item

MISSING, WASTED = "answers/missing_frac", "answers/wasted_frac"
"""The metrics of missing values. Alarms watch them in every run whose algorithm reads answers."""
CAUSES = {
    "abstain": "answers/abstained_frac",
    "failed": "answers/failed_frac",
    "unpaid": "answers/unpaid_frac",
}
"""For each mark of a missing value, the metric with the share of a step's questions that have this mark."""

_SAID = {"abstain": "it abstained", "failed": "it failed", "unpaid": "the budget did not allow them"}
_FAILS = (
    "look at the log of what was asked (a service's own, or what a function prints), and at oracle.deadline_s"
)
_LATE = (
    "see the warnings that count late episodes; raise sampling.environment_deadline_s, or repair what the "
    "environment waits for"
)
_COSTS = (
    "raise stop.max_cost, max_tokens or max_queries, or lower the most that a question may cost "
    "(docs/ledger.md)"
)


def why(mark: str, oracle: str) -> str:
    """Return a text for the user. It says why an oracle's answers probably have this mark, and what to check.

    Args:
        mark: "abstain", "failed" or "unpaid".
        oracle: name or address of the oracle; "" if there are several.
    """
    if mark == "failed":
        is_late = oracle.partition("/")[0] == "environment"
        return f"{_SAID[mark]}: {_LATE if is_late else _FAILS}"
    if mark == "unpaid":
        return f"{_SAID[mark]}: {_COSTS}"
    columns = "look at prompts.reference_key and the columns of the data that it reads"
    returned = f"its function returned None; {columns}" if ":" in oracle else columns
    own = getattr(ORACLES.get(oracle.partition("/")[0]), "when_it_abstains", "")
    return f"{_SAID[mark]}: {own or returned}"


def missing(items: Sequence[Item]) -> dict[str, float]:
    """Return two metrics of the values that a step asked an oracle for.

    Returns:
        * `MISSING`: the share of missing values among those asked for. It is left out if no value was asked
          for.
        * `WASTED`: among the questions whose answers cost tokens or money, the share that gave no value. It
          is left out if there are no such questions.
    """
    asked = [item.answer for item in items if item.question.oracle != UNASKED]
    lacking = [[mark in CAUSES for mark in answer.marks] for answer in asked]
    paid = [all(lacks) for answer, lacks in zip(asked, lacking, strict=True) if answer.tokens or answer.cost]
    values = [lacks for each in lacking for lacks in each]
    return {
        **({MISSING: sum(values) / len(values)} if values else {}),
        **({WASTED: sum(paid) / len(paid)} if paid else {}),
    }


def warn_of_silence(warned: set[str], purpose: str, step: int, items: Sequence[Item]) -> None:
    """Warn if a step learns nothing, or if an evaluation has no result. There are two warnings:

    * No oracle was asked about any item. This warning comes once in a process.
    * The oracle abstained or failed on every value that it was asked for. This warning comes once for each
      purpose.

    Args:
        warned: the warnings given so far. "none" stands for the first warning; a purpose stands for the
            second warning of this purpose. This function adds to the set.
        purpose: the purpose of the questions: "train", "eval" or "gold", or that of a command.
        step: the step that learns from the items; for an evaluation, the number of steps before it.
        items: all items of the step or of the evaluation.
    """
    asked = [item for item in items if item.question.oracle != UNASKED]
    if items and not asked and UNASKED not in warned:
        warned.add(UNASKED)
        warn(
            f"step {step + 1}: nobody was asked about any of {len(items)} pairs, since its two responses "
            "are equal, or the explorer chose so; it "
            "learns nothing: look at sampling.temperature, or at the recorded responses (oat check "
            "--show-tokens)"
        )
    marks = {mark for item in asked for mark in item.answer.marks}
    if not marks or not marks <= {"abstain", "failed"} or purpose in warned:
        return
    warned.add(purpose)
    names = sorted({item.question.oracle for item in asked})
    what, lost = (
        (f"step {step + 1}", "it learns nothing")
        if purpose == "train"
        else (f"the evaluation after {step} steps", "it has no result")
        if purpose in ("eval", "gold")
        else (purpose, "there is no result")
    )
    hint = "; ".join(why(mark, names[0] if len(names) == 1 else "") for mark in sorted(marks))
    warn(
        f"{what}: oracle {' and '.join(names)} gave no usable answer to any of {len(asked)} questions, so "
        f"{lost}; {hint}"
    )
