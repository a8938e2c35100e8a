"""Reports on a run's ledger: which oracles were asked, what they cost, and whether the file is sound. The
answers can also be exported as a data set, in one of two layouts that TRL's trainers read:

    preference    {"prompt", "chosen", "rejected"}. A comparison with a winner makes a row. If the scores of a
                  question differ, its best and its worst candidate make a row.
    scored        {"prompt", "completion", "score"}. Each candidate with a score makes a row.

Prompts and responses are texts if the run has no chat template and the data have texts. Otherwise they are
lists of messages, which a reader puts into a template.

A recorded response is written with all of its messages, as in the data. A response without tokens is written
as an empty text.

Two kinds of answers are left out, and a warning says how many:

* Answers about an episode that had several turns, or whose trajectory was dropped. Without the trajectory,
  the ledger has only the last response of an episode.
* Answers about texts without a prompt.

Pairs that the ensemble of the run's explorer labelled itself are left out too: they are its guesses, and no
oracle's answers.

The ledger's file is opened read only, so a report can be made while the run writes to the file.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from oat.errors import ConfigError, LedgerError, plural, printable, warn
from oat.files import appearing, refuse_known, saying_what_is_free
from oat.ledger.audit import UNREADABLE, contradictions
from oat.ledger.intents import Intent, Known, values_of
from oat.ledger.reader import Reader
from oat.ledger.versions import changes_of
from oat.rundir.holdings import lacking, refuse_lost
from oat.rundir.reading import LoadedRun
from oat.types import ENSEMBLE, Answer, Group
from oat.types.questions import in_money

DatasetLayout = Literal["preference", "scored"]


@dataclass(frozen=True)
class Account:
    """The account of one oracle for one purpose. The fields from `asked` to `cached` count questions.

    Attributes:
        pending: questions without an answer yet.
        taken: questions whose answer a step or an evaluation took, including answers that came too late to
            learn from.
        tied, abstained, failed, unpaid: questions with this mark on at least one value.
        cached: questions with at least one value from an answer to an equal question.
        again: number of submissions that repeated an earlier one after a kill.
        queries: priced items of the answers.
        tokens, cost, seconds: sums over the answers; `cost` is in the oracle's own currency.
    """

    purpose: str
    oracle: str
    asked: int
    answered: int
    pending: int
    taken: int
    tied: int
    abstained: int
    failed: int
    unpaid: int
    cached: int
    again: int
    queries: int
    tokens: int
    cost: float
    seconds: float


@dataclass(frozen=True)
class Agreement:
    """The number of response pairs on which two oracles agree.

    Attributes:
        judged: number of pairs for which both oracles have a winner. A winner comes from a comparison or from
            two different scores.
        agreed: number of these pairs for which both winners are the same response.
    """

    first: str
    second: str
    judged: int
    agreed: int


_COLUMNS = tuple(f.name for f in fields(Account))


def accounts_table(run_dir: Path) -> str:
    """Return a table with a line for each purpose and oracle. Below the table is a sentence for each change
    of an oracle, and a sentence for each pair of oracles that judged the same responses.

    Raises:
        LedgerError: the directory has no ledger, or the ledger cannot be read.
    """
    with _opened(run_dir) as store:
        rows = [list(_COLUMNS), *(_cells(account) for account in accounts(store))]
        alike = agreements(store)
        history = changes_of(store)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            _justified(cell, width, column)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [
        f"{' and '.join(change['before'])} had changed before step {change['train'] + 1} took its answers"
        for change in history
    ]
    return "\n".join(
        lines + [f"{a.first} and {a.second} agree on {a.agreed:,} of {a.judged:,} pairs" for a in alike]
    )


def problems(run_dir: Path) -> list[str]:
    """Return one sentence for each fault of a run's ledger. A fault is a contradiction within the ledger, or
    a missing record on which the run's checkpoints or metrics rely.

    Raises:
        LedgerError: as in `accounts_table`. If the ledger is missing and checkpoints or metrics rely on it,
            this fault is returned instead.
    """
    found = lacking(run_dir)
    if found and not (run_dir / "ledger.sqlite").exists():
        return found
    with _opened(run_dir) as store:
        return [*found, *contradictions(store)]


def left_by_kills(run_dir: Path) -> str | None:
    """Return a sentence about files of trajectories that no round of a run's ledger names; None if there are
    none. They are no fault.

    Raises:
        LedgerError: as in `accounts_table`.
    """
    with _opened(run_dir) as store:
        left = store.leftovers()
    if not left.paths:
        return None
    return (
        f"{plural(len(left.paths), 'file')} of trajectories ({left.bytes:,} bytes) belong to no round, the "
        f"first is {left.paths[0]}; a run is writing them, or a kill has left them and the next `oat train` "
        "removes them"
    )


def accounts(store: Reader) -> list[Account]:
    """Return the accounts of a ledger, one for each purpose and oracle."""
    marked = ", ".join(
        f"""COALESCE(SUM(a.marks LIKE '%"{mark}"%'), 0)""" for mark in ("tie", "abstain", "failed", "unpaid")
    )
    numbers = "COUNT(*), COUNT(a.question), COUNT(*) - COUNT(a.question), COUNT(t.question)"
    sql = f"""SELECT q.purpose, q.oracle, {numbers}, {marked}, SUM(q.cached LIKE '%"%'), SUM(q.again),
        COALESCE(SUM(a.queries), 0), COALESCE(SUM(a.tokens), 0), COALESCE(SUM(a.cost), 0.0),
        COALESCE(SUM(a.seconds), 0.0)
        FROM questions q LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
        GROUP BY q.purpose, q.oracle ORDER BY q.purpose DESC, q.oracle"""
    return [Account(*row) for row in store.db.execute(sql)]


def agreements(store: Reader) -> list[Agreement]:
    """Return the agreement of each two oracles that judged the same responses to the same prompt. If an
    oracle was asked about the same responses several times, its first question counts."""
    once = (
        "(SELECT MIN(id) AS id, oracle, kind, prompt, candidates FROM questions GROUP BY oracle, kind, "
        "prompt, candidates)"
    )
    sql = f"""SELECT f.oracle, s.oracle, f.kind, a.vals, a.marks, b.vals, b.marks
        FROM {once} f JOIN {once} s ON (s.kind, s.prompt, s.candidates) = (f.kind, f.prompt, f.candidates)
        AND f.oracle < s.oracle
        JOIN answers a ON a.question = f.id JOIN answers b ON b.question = s.id"""
    found: dict[tuple[str, str], list[bool]] = {}
    for first, second, kind, *answers in store.db.execute(sql):
        found.setdefault((first, second), []).extend(_alike(kind, *map(json.loads, answers)))
    return [Agreement(*oracles, len(alike), sum(alike)) for oracles, alike in sorted(found.items()) if alike]


def export_answers(run_dir: Path, out: Path, layout: str) -> tuple[int, int]:
    """Write the answers that oracles gave in training as a data set. Return its number of rows, and the
    number of pairs that the ensemble of the run's explorer labelled itself, which are left out.

    Args:
        out: file that ends in .jsonl or .parquet; the ending selects the format. Its folder is made if it
            does not exist.
        layout: "preference" or "scored".

    Raises:
        ConfigError: the layout or the ending is unknown, `out` is there already, the folder cannot be made,
            the run directory has no config.yaml, Parquet cannot hold the rows, or pyarrow is not installed.
        LedgerError: as in `accounts_table`, or the ledger lacks answers on which the run's checkpoints or
            metrics rely.
    """
    if layout not in get_args(DatasetLayout):
        raise ConfigError(f"no layout {layout!r}; give one of {', '.join(get_args(DatasetLayout))}")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out}: give a name that ends in .jsonl or .parquet")
    refuse_known(out, "--export")
    make = _preferences if layout == "preference" else _scored
    run = LoadedRun(run_dir)
    columns, has_turns = run.response_columns, run.has_environment
    refuse_lost(run_dir)
    with _opened(run_dir) as store:
        responses = _Responses(store, columns, has_turns=has_turns)
        rows = []
        left_out = 0
        trained = [intent for intent in store.answered() if intent.question.key.purpose == "train"]
        answered = [intent for intent in trained if intent.question.oracle != ENSEMBLE]
        prompted = [intent for intent in answered if intent.question.messages]
        for intent in prompted:
            try:
                made = make(responses.of(intent), intent, *store.answer(intent))
                is_plain = not (run.has_template or intent.question.is_chat)
                rows += [_plain(row) for row in made] if is_plain else list(made)
            except _SeveralTurns:
                left_out += 1
    if left_out:
        warn(
            f"{left_out} answers about episodes of an environment are left out: only the last response of an "
            "episode is in the ledger, and those had several turns, or their trajectories are dropped "
            "(tracking.keep_trajectories: true keeps them)"
        )
    if len(prompted) < len(answered):
        warn(
            f"{len(answered) - len(prompted)} answers about texts without a prompt are left out: both "
            "layouts have one"
        )
    with appearing(out, "--export") as new, saying_what_is_free(out):
        if out.suffix == ".jsonl":
            lines = (printable(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
            new.write_text("".join(lines), encoding="utf-8")
        else:
            _write_parquet(rows, out, new)
    return len(rows), len(trained) - len(answered)


@contextmanager
def _opened(run_dir: Path) -> Iterator[Reader]:
    """Open the ledger of a run. If SQLite or damaged data raise an error within the context, raise a
    LedgerError that names the file."""
    path = run_dir / "ledger.sqlite"
    if not path.exists():
        raise LedgerError(f"{run_dir}: has no ledger.sqlite; give the directory that `oat train` named")
    with closing(Reader(path)) as store:
        try:
            yield store
        except UNREADABLE as error:
            raise LedgerError(
                f"{path}: cannot be read ({type(error).__name__}: {error}); `oat ledger {run_dir} "
                "--check` says where, and a copy may help"
            ) from error


def _alike(
    kind: str, values: list[float], marks: list[str], others: list[float], their_marks: list[str]
) -> list[bool]:
    """Compare the answers of two oracles to the same question. Return one bool for each pair of candidates
    that has a winner in both answers: True if the winner is the same.

    Args:
        values, marks: the answer of one oracle.
        others, their_marks: the answer of the other oracle.
    """
    sound = [place for place, both in enumerate(zip(marks, their_marks, strict=True)) if both == ("ok", "ok")]
    if kind == "compare":
        pairs = [(values[place] - 0.5, others[place] - 0.5) for place in sound]
    else:
        pairs = [(values[i] - values[j], others[i] - others[j]) for i, j in combinations(sound, 2)]
    return [(mine > 0) == (theirs > 0) for mine, theirs in pairs if mine and theirs]


def _cells(account: Account) -> list[str]:
    values = {column: getattr(account, column) for column in _COLUMNS} | {
        "cost": in_money(account.cost),
        "seconds": f"{account.seconds:,.2f}",
    }
    return [value if isinstance(value, str) else f"{value:,}" for value in values.values()]


def _justified(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if _COLUMNS[column] in ("purpose", "oracle") else cell.rjust(width)


_Messages = list[dict[str, Any]]
_TEXTS = ("prompt", "chosen", "rejected", "completion")


class _SeveralTurns(Exception):
    """A response has several turns, or its number of turns is unknown because its trajectory was dropped."""


class _Responses:
    """The responses of a run as messages.

    Args:
        columns: columns of recorded responses; empty if responses are sampled.
        has_turns: True if a sampled response may have several turns.
    """

    def __init__(self, store: Reader, columns: Sequence[str], *, has_turns: bool):
        self.store = store
        self.columns = columns
        self.has_turns = has_turns
        self.round: tuple[Any, ...] = ()
        self.groups: list[Group] = []

    def of(self, intent: Intent) -> list[_Messages]:
        """Return the responses that a question is about.

        Raises:
            _SeveralTurns: a response has several turns. Or it may have several, and its trajectory was
                dropped.
        """
        question = intent.question
        if self.columns:
            recorded = [question.columns[self.columns[pick]] for pick in question.picks]
            return [
                _assistant_message(response) if isinstance(response, str) else response
                for response in recorded
            ]
        if self.has_turns and not all(self._is_whole(intent, pick) for pick in question.picks):
            raise _SeveralTurns
        return [_assistant_message(text) for text in question.candidates]

    def _is_whole(self, intent: Intent, pick: int) -> bool:
        key = intent.question.key
        if (place := (key.purpose, key.step, key.round)) != self.round:
            self.round, self.groups = place, self.store.groups(*place) if self.store.keeps(*place) else []
        return (
            bool(self.groups)
            and sum(part.author == "model" for part in self.groups[intent.member].trajectories[pick].segments)
            == 1
        )


def _preferences(
    responses: list[_Messages], intent: Intent, answer: Answer, label: int | None
) -> Iterator[dict[str, Any]]:
    if intent.question.kind == "compare":
        if label is not None:
            yield {"prompt": _prompt(intent), "chosen": responses[label], "rejected": responses[1 - label]}
        return
    sound = [
        (value, number)
        for number, (value, mark) in enumerate(zip(answer.values, answer.marks, strict=True))
        if mark == "ok"
    ]
    if sound and max(sound)[0] > min(sound)[0]:
        (_, best), (_, worst) = max(sound), min(sound)
        yield {"prompt": _prompt(intent), "chosen": responses[best], "rejected": responses[worst]}


def _scored(
    responses: list[_Messages], intent: Intent, answer: Answer, label: int | None
) -> Iterator[dict[str, Any]]:
    if intent.question.kind == "score":
        for place, (response, known) in enumerate(zip(responses, values_of(answer), strict=True)):
            if known.mark == "ok":
                row = {"prompt": _prompt(intent), "completion": response, "score": known.value}
                yield row | _parts_of_score(known, answer, place)


def _parts_of_score(known: Known, answer: Answer, place: int) -> dict[str, Any]:
    """Return the fields `steps`, `step_unit` and `sources` of a row in the layout "scored"; a field that the
    answer does not have is left out."""
    parts: dict[str, Any] = {}
    if known.steps:
        parts["steps"] = [{"end": end, "reward": reward} for end, reward in known.steps]
        parts["step_unit"] = known.step_unit
    if answer.sources:
        parts["sources"] = {name: scores[place] for name, scores in answer.sources.items()}
    return parts


def _prompt(intent: Intent) -> _Messages:
    return [message.plain for message in intent.question.messages]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with each list of one message replaced by the message's text."""
    return {
        name: value[0]["content"] if name in _TEXTS and len(value) == 1 else value
        for name, value in row.items()
    }


def _assistant_message(text: str) -> _Messages:
    return [{"role": "assistant", "content": text}]


def _write_parquet(rows: list[dict[str, Any]], out: Path, new: Path) -> None:
    """Write rows to the file `new`. Messages call it `out`."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{out}: writing Parquet needs the library pyarrow ({error}); pip install 'oat-align[data]'"
        ) from error
    try:
        made = arrow.Table.from_pylist(rows)
        is_same = _without_nulls(made.to_pylist()) == _without_nulls(rows)
        if is_same:
            parquet.write_table(made, new)
    except arrow.ArrowException:
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{out}: a field of the messages, such as `tool_calls`, has no one type in all rows, as "
            "Parquet wants; write .jsonl instead"
        )


def _without_nulls(rows: list[dict[str, Any]]) -> str:
    """Return rows as JSON text, without the null fields of messages. Parquet gives each message every field
    that some message has, and fills the missing ones with nulls."""

    def bare(value: Any) -> Any:
        return (
            [{name: field for name, field in message.items() if field is not None} for message in value]
            if isinstance(value, list)
            else value
        )

    return json.dumps(
        [{column: bare(value) for column, value in row.items()} for row in rows], sort_keys=True
    )
