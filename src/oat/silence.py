"""What is said when a step, or an evaluation, gets no answer that it can use."""

from collections.abc import Sequence

from oat.errors import warn
from oat.types import UNASKED, Item


def warn_of_silence(warned: set[str], purpose: str, step: int, items: Sequence[Item]) -> None:
    """Say once what would otherwise only be counted: where nobody is asked, or the oracle answers nothing, a run learns nothing."""
    asked = [item for item in items if item.question.oracle != UNASKED]
    if items and not asked and UNASKED not in warned:
        warned.add(UNASKED)
        warn(
            f"step {step}: nobody was asked about any of {len(items)} pairs, since its two responses are equal, or the explorer chose so; it "
            "learns nothing: look at sampling.temperature, or at the recorded responses (oat check --show-tokens)"
        )
    marks = {mark for item in asked for mark in item.answer.marks}
    if not marks or not marks <= {"abstain", "failed"} or purpose in warned:
        return
    warned.add(purpose)
    names = " and ".join(sorted({item.question.oracle for item in asked}))
    what, lost = (f"step {step}", "it learns nothing") if purpose == "train" else (f"the evaluation after {step} steps", "it has no result")
    hints = {
        "abstain": "it abstained: look at prompts.reference_key and the columns of the data that it reads",
        "failed": "it failed: look at its own log and at oracle.deadline_s",
    }
    hint = "; ".join(hints[mark] for mark in sorted(marks))
    warn(f"{what}: oracle {names} gave no usable answer to any of {len(asked)} questions, so {lost}; {hint}")
