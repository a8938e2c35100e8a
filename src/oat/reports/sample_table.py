"""`oat samples --csv`: the responses of a run as a table, for pandas or a spreadsheet."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from oat.ledger.reader import Reader
from oat.reports.samples import NothingThere, Sampled, is_one, sampled

TABLE = ("step", "kind", "query", "model response", "score", "reward", "advantage")
"""The columns of every table. `query`, `model response` and `score` are those of TRL's PPO trainer."""
SOURCE = "oracle/source/"
"""Beginning of the names of the columns with the scores of a mixture's sources, and of the metrics with their
means."""


def sample_table(
    run_dir: Path, step: int | None = None, *, evaluations: bool = False
) -> Iterator[Sequence[object]]:
    """Yield the names of the columns, and then a row for each response. None stands for an empty cell.

    The columns are those of `TABLE`, and one for each source of a mixture. The score is the oracle's verdict
    in words; the reward is its number (`JudgedResponse`).

    Args:
        step, evaluations: as for `sampled`, but training and evaluations are both in the table unless
            `evaluations` is True.

    Raises:
        As `sampled`.
    """
    labels: list[str] = []
    if (run_dir / "ledger.sqlite").exists():
        with closing(Reader(run_dir / "ledger.sqlite")) as store:
            labels = store.source_labels()
    yield (*TABLE, *(SOURCE + label for label in labels))
    for each in _chosen(run_dir, step, [True] if evaluations else [False, True]):
        about = (each.step, each.kind, _query(each.messages))
        for response in each.responses:
            said = (response.text, response.score, response.reward, response.advantage)
            yield (*about, *said, *(response.sources.get(label) for label in labels))


def _chosen(run_dir: Path, step: int | None, kinds: Sequence[bool]) -> Iterator[Sampled]:
    """Yield what training and evaluations have of a step; one of them may have nothing.

    Args:
        kinds: False for training, True for evaluations.

    Raises:
        NothingThere: none of them has anything. The error is that of the first.
    """
    empty: list[NothingThere] = []
    for evaluations in kinds:
        try:
            yield from sampled(run_dir, step, evaluations=evaluations, numbers=True)
        except NothingThere as error:
            empty.append(error)
    if len(empty) == len(kinds):
        raise empty[0]


def _query(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a prompt; of a conversation, its messages with their roles."""
    if is_one(messages):
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
