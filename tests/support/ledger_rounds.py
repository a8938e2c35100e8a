"""Rounds that tests record in a ledger, and the files that these leave."""

from pathlib import Path

from fixtures import make_group, make_questions

from oat.ledger.reader import Reader
from oat.ledger.store import Store
from oat.types import Answer


def add(store: Store, step: int, *texts: str) -> None:
    """Record a round of one group with these responses."""
    groups = [make_group(0, *(texts or (f"a{step}", "b")))]
    with store:
        store.add_round("train", step, 0, groups, make_questions(groups, "score", step, oracle="o"), [0])


def take(store: Store, step: int) -> None:
    """Answer and take all questions that wait."""
    with store:
        for intent in store.unanswered():
            values = tuple(0.5 for _ in intent.question.candidates)
            marks = ("ok",) * len(values)
            store.add_answers([(intent.id, Answer(intent.question.key, values, marks, 1), None)])
        store.add_take("train", step, store.takeable_ids("train", step, -1))


def files(store: Reader) -> list[Path]:
    return sorted(file for file in store.files.directory.rglob("*") if file.is_file())


def name_of(store: Reader, step: int) -> str:
    ((name,),) = store.rows("SELECT groups FROM rounds WHERE step = ?", (step,))
    return str(name)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
