"""`oat samples`: the prompts of a run, what the model said to them, and what the oracle said of that, for
people to read.

Steps are counted as in `metrics.jsonl`: step N is what the N-th update learned from. The newest one stands
first. Training is read from the ledger, which has all of it; evaluations from their records.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from oat.errors import ConfigError, DataError, LedgerError, printable
from oat.ledger.asked import Asked
from oat.ledger.reader import Reader
from oat.rundir.holdings import refuse_lost
from oat.rundir.reading import load_run, read_rows
from oat.types import Answer, FinishReason

_NEVER_MADE = {"length": "cut off", "aborted": "aborted"}
"""How a response ended that the model did not end."""


@dataclass(frozen=True)
class Reply:
    """A response and what was said of it.

    Attributes:
        said: a score, who wins, or why there is none.
    """

    said: str
    text: str


def sample_pages(run_dir: Path, step: int | None = None, *, evaluations: bool = False) -> Iterator[str]:
    """A text for each prompt, printable, its lines without an end.

    Args:
        step: only of this one.
        evaluations: of the evaluations, rather than of training.

    Raises:
        ConfigError: the directory holds no run, or the run nothing of this kind, or not of this step.
        LedgerError: the ledger cannot be opened, or lacks what the run has learned from.
    """
    load_run(run_dir)
    return map(printable, _evaluated(run_dir, step) if evaluations else _learned(run_dir, step))


def _learned(run_dir: Path, step: int | None) -> Iterator[str]:
    refuse_lost(run_dir)
    if not (run_dir / "ledger.sqlite").exists():
        raise ConfigError(
            f"{run_dir}: no step has learned from an answer yet (there is no ledger); let `oat train` "
            "reach its first step"
        )
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        found = (
            "SELECT DISTINCT step + 1 FROM taken WHERE purpose = 'train' AND position >= 0 ORDER BY step DESC"
        )
        steps = _chosen(
            run_dir,
            [number for (number,) in store.db.execute(found)],
            step,
            "step has learned from an answer",
        )
        for number in steps:
            yield from _learned_in(store, number)


def _learned_in(store: Reader, step: int) -> Iterator[str]:
    asked = store.taken("train", step - 1)
    ends: dict[tuple[int, int], list[list[FinishReason]]] = {}
    for number, (question, answer, label) in enumerate(store.answers(asked), 1):
        place = (question.question.key.step, question.question.key.round)
        if place not in ends:
            ends = {place: _ends(store, *place)}
        messages = [message.plain for message in question.question.messages]
        replies = list(_replies(question, answer, label, ends[place]))
        yield _page(f"step {step}, {number} of {len(asked)}", messages, question.question.reference, replies)


def _ends(store: Reader, step: int, round: int) -> list[list[FinishReason]]:
    """How each trajectory of a round ended, by group; empty where they were dropped."""
    try:
        return [
            [trajectory.finish_reason for trajectory in group.trajectories]
            for group in store.groups("train", step, round)
        ]
    except LedgerError:
        return []


def _replies(
    asked: Asked, answer: Answer, label: int | None, ends: Sequence[Sequence[FinishReason]]
) -> Iterator[Reply]:
    question = asked.question
    for place, (pick, text) in enumerate(zip(question.picks, question.candidates, strict=True)):
        end = _NEVER_MADE.get(ends[asked.member][pick]) if ends else None
        if question.kind == "score":
            said = _said(answer.values[place], answer.marks[place])
        elif label is None:
            said = "tie" if answer.marks[0] == "ok" else answer.marks[0]
        else:
            said = (
                f"{'wins' if place == label else 'loses'}, "
                f"{answer.values[0] if place == 0 else 1.0 - answer.values[0]:.3g}"
            )
        yield Reply(f"{said}, {end}" if end else said, text)


def _evaluated(run_dir: Path, step: int | None) -> Iterator[str]:
    files = {
        int(file.stem.removeprefix("step_")): file for file in (run_dir / "evaluations").glob("step_*.jsonl")
    }
    column = load_run(run_dir).config.prompts.prompt_key
    for number in _chosen(run_dir, sorted(files, reverse=True), step, "evaluation is on disk"):
        for mode, rows in groupby(_records(files[number], column), lambda row: row["mode"]):
            prompts = [[*of_one] for _, of_one in groupby(_numbered(rows), lambda pair: pair[0])]
            for place, of_one in enumerate(prompts, 1):
                first = of_one[0][1]
                messages = (
                    first[column]
                    if isinstance(first[column], list)
                    else [{"role": "user", "content": first[column]}]
                )
                replies = [Reply(_evaluated_said(row), row["output"]) for _, row in of_one]
                yield _page(
                    f"evaluation after {number} steps, {mode}, {place} of {len(prompts)}",
                    messages,
                    first["reference"],
                    replies,
                )


def _records(file: Path, column: str) -> Iterator[dict[str, Any]]:
    """
    Raises:
        DataError: a line is no record of an evaluation.
    """
    for number, row in enumerate(read_rows(file), 1):
        missing = {column, "mode", "sample", "output", "reference", "value", "mark"} - row.keys()
        if missing or not isinstance(row["value"], int | float | None):
            wrong = (
                f"without {', '.join(sorted(missing))}" if missing else f"of the value {row['value']!r:.40}"
            )
            raise DataError(
                f"{file}:{number}: expected a record of an evaluation, got one {wrong}; put the file back "
                "as it was"
            )
        yield row


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records with the number of their prompt; its first response has the number 0."""
    number = 0
    for row in rows:
        number += row["sample"] == 0
        yield number, row


def _evaluated_said(row: Mapping[str, Any]) -> str:
    said = _said(row["value"], row["mark"])
    return f"{said}, gold {_said(row['gold'], row['gold_mark'])}" if "gold" in row else said


def _said(value: float | None, mark: str) -> str:
    return f"{value:.4g}" if mark == "ok" and value is not None and not math.isnan(value) else mark


def _chosen(run_dir: Path, steps: Sequence[int], step: int | None, what: str) -> Sequence[int]:
    """All of these, or the one that is wanted.

    Raises:
        ConfigError: there are none, or not this one.
    """
    if not steps:
        raise ConfigError(f"{run_dir}: no {what} yet; let `oat train` go on")
    if step is None or step in steps:
        return steps if step is None else [step]
    near = sorted(sorted(steps, key=lambda number: abs(number - step))[:8])
    of_many = f", or another of {len(steps)} from {steps[-1]} to {steps[0]}" if len(steps) > len(near) else ""
    raise ConfigError(
        f"{run_dir}: nothing of step {step}, since no {what} there; give {', '.join(map(str, near))}{of_many}"
    )


def _page(
    title: str, messages: Sequence[Mapping[str, Any]], reference: str | None, replies: Sequence[Reply]
) -> str:
    lines = [f"── {title} ──"]
    is_one = [message["role"] for message in messages] == ["user"]
    lines += [
        _block("prompt: " if is_one else f"{message['role']}: ", str(message["content"]))
        for message in messages
    ]
    if reference is not None:
        lines.append(_block("reference: ", reference))
    width = max((len(reply.said) for reply in replies), default=0) + 2
    lines += [_block(f"  {f'[{reply.said}]':<{width}} ", reply.text) for reply in replies]
    return "\n".join(lines)


def _block(head: str, text: str) -> str:
    """A text behind a head, its further lines below its first one."""
    return head + f"\n{' ' * len(head)}".join(text.split("\n"))
