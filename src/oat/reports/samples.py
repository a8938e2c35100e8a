"""`oat samples`: the prompts of a run, the model's responses and the oracle's verdicts, for people to read.

Steps are numbered like the rows of `metrics.jsonl`. In training, N shows the answers that the step of row N
took. The evaluation of N was made after N steps. The newest step comes first.

The responses of training are read from the ledger, which has all groups and their answers. (`samples.jsonl`
has only some groups of each step.) The responses of evaluations are read from their records. If the run has a
gold oracle, the records also have its verdicts.

The ledger has the text of an episode's last response only. So the turns of an episode of training are shown
if its group is in `samples.jsonl`, and those of an evaluation always.

A table (`sample_table.py`) also has numbers: the scores that the ledger recorded, and the advantages in
`advantages.jsonl`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from oat.errors import ConfigError, DataError, LedgerError, printable
from oat.ledger.intents import Intent
from oat.ledger.reader import Reader
from oat.rundir.holdings import refuse_lost
from oat.rundir.reading import load_run
from oat.rundir.rows import is_step, read_advantages, read_rows
from oat.types import Answer, FinishReason, Question

_NEVER_MADE = {"length": "cut off", "aborted": "aborted"}
"""By finish reason, the text that is shown for a response that the model did not end itself."""


@dataclass(frozen=True)
class _End:
    """How a trajectory ended, and the number of the model's turns in it."""

    reason: FinishReason
    turns: int

    def notes(self, *, has_turns: bool) -> list[str]:
        """Return what is said behind a verdict. `has_turns`: the turns themselves are shown."""
        ended = [_NEVER_MADE[self.reason]] if self.reason in _NEVER_MADE else []
        return ended + ([f"last of {self.turns} turns"] if self.turns > 1 and not has_turns else [])


@dataclass(frozen=True)
class JudgedResponse:
    """A response and the oracle's verdict.

    Attributes:
        verdict: a score, a win, a loss or a tie; without these, the answer's mark, such as `failed`. In
            training, "cut off" or "aborted" may follow, and "last of N turns" if `turns` is not known. In an
            evaluation, gold's verdict may follow.
        text: the response; of an episode, the last one.
        score: the verdict without what may follow.
        turns: the turns of an episode of several turns, as `oat.text.turns` describes them.
        reward: the number that the oracle gave the response: its score; of a pair that was made from scores,
            the response's score. None: there is none.
        sources: by label, what each source of a mixture gave the response (`Answer.sources`).
        advantage: as in `advantages.jsonl`; None: not known, or the algorithm has none.
    """

    verdict: str
    text: str
    score: str
    turns: Sequence[Mapping[str, Any]] = ()
    reward: float | None = None
    sources: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None


@dataclass(frozen=True)
class Sampled:
    """A prompt with its judged responses.

    Attributes:
        title: the step, and the place within the step.
        step: number of the row of metrics to which the responses belong.
        kind: `train`, or the evaluation's mode: `sampled`, `greedy`, `best` or `online`.
        reference: the reference answer of the data; None if there is none.
    """

    title: str
    step: int
    kind: str
    messages: Sequence[Mapping[str, Any]]
    reference: str | None
    responses: Sequence[JudgedResponse]


class NothingThere(ConfigError):
    """A run has nothing to show, or nothing of a step."""


def sample_pages(run_dir: Path, step: int | None = None, *, evaluations: bool = False) -> Iterator[str]:
    """Yield one printable text for each prompt of `sampled`. Long lines are not cut. Arguments and errors are
    those of `sampled`."""
    return (printable(_page(each)) for each in sampled(run_dir, step, evaluations=evaluations))


def sampled(
    run_dir: Path, step: int | None = None, *, evaluations: bool = False, numbers: bool = False
) -> Iterator[Sampled]:
    """Yield each question that training has learned from, or each prompt of an evaluation.

    Args:
        step: number of a row of metrics; only what belongs to this row is shown. None: all rows.
        evaluations: True: show evaluations instead of training.
        numbers: True: also read what only tables have: advantages, and of evaluations the ledger's scores.

    Raises:
        ConfigError: the directory holds no run.
        NothingThere: the run has nothing to show yet, or it has nothing of this step.
        LedgerError: the ledger cannot be opened, or lacks answers that the run has learned from.
        DataError: a record of an evaluation, or a line of `samples.jsonl` or `advantages.jsonl`, cannot be
            read.
    """
    load_run(run_dir)
    return (_evaluated if evaluations else _learned)(run_dir, step, numbers)


def _learned(run_dir: Path, step: int | None, numbers: bool) -> Iterator[Sampled]:
    refuse_lost(run_dir)
    if not (run_dir / "ledger.sqlite").exists():
        raise NothingThere(
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
        tracked: dict[int, list[dict[str, Any]]] = {}
        for row in read_rows(run_dir / "samples.jsonl") if load_run(run_dir).has_environment else ():
            if is_step(row.get("step")):
                tracked.setdefault(row["step"], []).append(row)
        file = run_dir / "advantages.jsonl"
        used = read_advantages(file) if numbers else {}
        for number in steps:
            line, advantages = used.get(number, (0, None))
            yield from _learned_in(store, number, tracked.get(number, []), advantages, f"{file}:{line}")


def _learned_in(
    store: Reader,
    step: int,
    tracked: Sequence[Mapping[str, Any]],
    used: Sequence[Sequence[float | None]] | None,
    place_of_used: str,
) -> Iterator[Sampled]:
    """Yield the questions of a step.

    Args:
        tracked: the lines of `samples.jsonl` of this step, which are about its first questions.
        used: the advantages of each question's responses; None: not known.
        place_of_used: the file and the line of `used`.

    Raises:
        DataError: `used` has other numbers of questions or responses than the step.
    """
    intents = store.taken("train", step - 1)
    sizes = [len(intent.question.candidates) for intent in intents]
    if used is not None and [*map(len, used)] != sizes:
        raise DataError(
            f"{place_of_used}: step {step} has {len(sizes)} questions with {sum(sizes)} responses, and the "
            "numbers here fit others; take the line out, and the step's cells are empty"
        )
    ends: dict[tuple[int, int], list[list[_End]]] = {}
    for number, (intent, answer, label) in enumerate(store.answers(intents), 1):
        question = intent.question
        place = (question.key.step, question.key.round)
        if place not in ends:
            ends = {place: _ends(store, *place)}
        messages = [message.plain for message in question.messages]
        turns = _tracked_turns(tracked[number - 1], question) if number <= len(tracked) else {}
        responses = list(_judged(intent, answer, label, ends[place], turns))
        if used is not None:
            pairs = zip(responses, used[number - 1], strict=True)
            responses = [replace(response, advantage=value) for response, value in pairs]
        title = f"step {step}, {number} of {len(intents)}"
        yield Sampled(title, step, "train", messages, question.reference, responses)


def _tracked_turns(row: Mapping[str, Any], question: Question) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Return the turns of a question's episodes by the place of each in its group, from a line of
    `samples.jsonl`. Return an empty dict if the line is about another question, or has no turns."""
    responses, turns = row.get("responses", []), row.get("turns", [])
    is_about = [responses[pick] for pick in question.picks if pick < len(responses)] == [*question.candidates]
    return dict(enumerate(map(_sound_turns, turns))) if is_about else {}


def _sound_turns(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return the turns of an episode. Return () if `value` is something else, such as a prompt in a column
    that is called `turns`."""
    is_sound = isinstance(value, list) and all(
        isinstance(turn, dict)
        and turn.get("author") in ("model", "context")
        and isinstance(turn.get("text"), str)
        and isinstance(turn.get("reward"), int | float | None)
        for turn in value
    )
    return value if is_sound else ()


def _ends(store: Reader, step: int, round: int) -> list[list[_End]]:
    """Return how a round's trajectories ended, by group. Return an empty list if the trajectories were
    dropped or are damaged."""
    try:
        return [
            [
                _End(trajectory.finish_reason, sum(each.author == "model" for each in trajectory.segments))
                for trajectory in group.trajectories
            ]
            for group in store.groups("train", step, round)
        ]
    except LedgerError:
        return []


def _judged(
    intent: Intent,
    answer: Answer,
    label: int | None,
    ends: Sequence[Sequence[_End]],
    turns: Mapping[int, Sequence[Mapping[str, Any]]],
) -> Iterator[JudgedResponse]:
    question = intent.question
    for place, (pick, text) in enumerate(zip(question.picks, question.candidates, strict=True)):
        known = turns.get(pick, ())
        notes = ends[intent.member][pick].notes(has_turns=bool(known)) if ends else []
        if question.kind == "score":
            verdict = _verdict(answer.values[place], answer.marks[place])
        elif label is None:
            verdict = "tie" if answer.marks[0] == "ok" else answer.marks[0]
        else:
            verdict = (
                f"{'wins' if place == label else 'loses'}, "
                f"{answer.values[0] if place == 0 else 1.0 - answer.values[0]:.3g}"
            )
        said = ", ".join([verdict, *notes])
        yield JudgedResponse(said, text, verdict, known, *_given(intent, answer, place))


def _given(intent: Intent, answer: Answer, place: int) -> tuple[float | None, dict[str, float | None]]:
    """Return the number that an answer has for a candidate, or None, and those of its sources, by label."""
    if intent.question.kind == "score":
        reward = answer.values[place] if answer.marks[place] == "ok" else None
    else:
        reward = answer.scores[place] if answer.scores else None
    return reward, {label: scores[place] for label, scores in answer.sources.items()}


def _evaluated(run_dir: Path, step: int | None, numbers: bool) -> Iterator[Sampled]:
    files = {
        int(file.stem.removeprefix("step_")): file for file in (run_dir / "evaluations").glob("step_*.jsonl")
    }
    run = load_run(run_dir)
    column, what = run.prompt_key, "evaluation is on disk"
    if not files and not run.settings.get("evaluation"):
        raise NothingThere(f"{run_dir}: no {what}, since the run has no section `evaluation`")
    for number in _chosen(run_dir, sorted(files, reverse=True), step, what):
        given = _answers(run_dir, number) if numbers else {}
        modes = groupby(_records(files[number], column), lambda row: row["mode"])
        for round, (mode, rows) in enumerate(modes):
            prompts = [[*of_one] for _, of_one in groupby(_numbered(rows), lambda pair: pair[0])]
            for place, of_one in enumerate(prompts, 1):
                first = of_one[0][1]
                messages = (
                    first[column]
                    if isinstance(first[column], list)
                    else [{"role": "user", "content": first[column]}]
                )
                responses = [
                    JudgedResponse(
                        _verdicts(row),
                        row["output"],
                        _verdict(row["value"], row["mark"]),
                        _sound_turns(row.get("turns")),
                        *given.get((round, place - 1, row["sample"], row["output"]), ()),
                    )
                    for _, row in of_one
                ]
                yield Sampled(
                    f"evaluation after {number} steps, {mode}, {place} of {len(prompts)}",
                    number,
                    mode,
                    messages,
                    first["reference"],
                    responses,
                )


def _answers(
    run_dir: Path, step: int
) -> dict[tuple[int, int, int, str], tuple[float | None, dict[str, float | None]]]:
    """Return what the ledger has of the responses of an evaluation (`_given`), by the places of the mode, of
    the prompt and of the response, and by the response. Return an empty dict if the ledger is missing."""
    if not (run_dir / "ledger.sqlite").exists():
        return {}
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        return {
            (intent.question.key.round, intent.question.key.occurrence, pick, text): _given(
                intent, answer, place
            )
            for intent, answer, _ in store.answers(store.taken("eval", step))
            for place, (pick, text) in enumerate(
                zip(intent.question.picks, intent.question.candidates, strict=True)
            )
        }


def _records(file: Path, column: str) -> Iterator[dict[str, Any]]:
    """Yield the records in a file of an evaluation.

    Raises:
        DataError: a line is not a record of an evaluation.
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
    """Yield the number of each record's prompt, and the record. A record of sample 0 begins the next
    prompt."""
    number = 0
    for row in rows:
        number += row["sample"] == 0
        yield number, row


def _verdicts(row: Mapping[str, Any]) -> str:
    verdict = _verdict(row["value"], row["mark"])
    return f"{verdict}, gold {_verdict(row['gold'], row['gold_mark'])}" if "gold" in row else verdict


def _verdict(value: float | None, mark: str) -> str:
    return f"{value:.4g}" if mark == "ok" and value is not None and not math.isnan(value) else mark


def _chosen(run_dir: Path, steps: Sequence[int], step: int | None, what: str) -> Sequence[int]:
    """Return a list of only `step`; if `step` is None, return all of `steps`.

    Raises:
        NothingThere: `steps` is empty, or does not contain `step`.
    """
    if not steps:
        raise NothingThere(f"{run_dir}: no {what} yet; let `oat train` go on")
    if step is None or step in steps:
        return steps if step is None else [step]
    near = sorted(sorted(steps, key=lambda number: abs(number - step))[:8])
    of_many = f", or another of {len(steps)} from {steps[-1]} to {steps[0]}" if len(steps) > len(near) else ""
    raise NothingThere(
        f"{run_dir}: nothing of step {step}, since no {what} there; give {', '.join(map(str, near))}{of_many}"
    )


def _page(given: Sampled) -> str:
    lines = [f"── {given.title} ──"]
    lines += [
        _block("prompt: " if is_one(given.messages) else f"{message['role']}: ", str(message["content"]))
        for message in given.messages
    ]
    if given.reference is not None:
        lines.append(_block("reference: ", given.reference))
    width = max((len(response.verdict) for response in given.responses), default=0) + 2
    lines += [
        _block(f"  {f'[{response.verdict}]':<{width}} ", _said(response)) for response in given.responses
    ]
    return "\n".join(lines)


def _said(response: JudgedResponse) -> str:
    """Return the text of a response; of an episode of several turns, all turns with their rewards."""
    return "\n".join(map(_turn, response.turns)) if response.turns else response.text


def _turn(turn: Mapping[str, Any]) -> str:
    if turn["author"] == "context":
        return _block("environment: ", turn["text"])
    reward = "" if turn["reward"] is None else f" [{turn['reward']:.4g}]"
    return _block(f"model{reward}: ", turn["text"])


def is_one(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a prompt is a single message of the user."""
    return [message["role"] for message in messages] == ["user"]


def _block(head: str, text: str) -> str:
    """Return a text after a heading. All lines of the text are aligned."""
    return head + f"\n{' ' * len(head)}".join(text.split("\n"))
