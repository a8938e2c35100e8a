"""Reading of a run's files as tables. Nothing is written, and the run may still be going on.

    run = oat.load_run("runs/mine")
    run.metrics["eval/sampled"]

If pandas is installed (`oat-align[data]` brings it), a table is a pandas data frame. Otherwise it is a dict
with one list for each column. In both cases, `table["step"]` is a column. A missing value is NaN in a data
frame, and None in a dict. A table without rows still has the columns that every row would have.
"""

import importlib
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.config.load import dump
from oat.config.settings import Config
from oat.config.stored import load_stored
from oat.errors import ConfigError
from oat.files import absolute
from oat.rundir.rows import read_metrics, read_rows
from oat.types import Message

Table = Any
"""A pandas DataFrame, or dict[str, list]."""

_QUESTIONS = """SELECT q.purpose, q.step, q.round, q.occurrence, q.number, q.kind, q.oracle, x.text,
        q.candidates, q.again, a.vals, a.marks, a.label, a.answered_by,
        a.queries, a.tokens, a.cost, a.seconds, a.steps, a.sources, CASE WHEN t.position >= 0 THEN t.step END
    FROM questions q JOIN texts x ON x.hash = q.prompt
    LEFT JOIN answers a ON a.question = q.id LEFT JOIN taken t ON t.question = q.id
    ORDER BY q.id"""

_METRICS = ("step",)
_SAMPLES = (
    "step",
    "row",
    "prompt",
    "responses",
    "finish",
    "reference",
    "columns",
    "asked",
    "oracle",
    "values",
    "marks",
    "label",
)
_EVALUATED = ("output", "reference", "generator", "mode", "sample", "value", "mark")
_ADDRESS = ("purpose", "step", "round", "occurrence", "number", "kind", "oracle")
_ANSWER = (
    "values",
    "marks",
    "label",
    "by",
    "queries",
    "tokens",
    "cost",
    "seconds",
    "steps",
    "sources",
    "learned",
)
_ASKED = (*_ADDRESS, "prompt", "reference", "columns", "candidates", *_ANSWER, "again")
"""`_METRICS`, `_SAMPLES`, `_EVALUATED` and `_ASKED` name the columns that the four tables have even without
rows. The table of evaluations has three more columns, which come first: `step`, and two for the prompt."""


@dataclass(frozen=True)
class LoadedRun:
    """A run directory that is opened for reading. Each attribute except `path` reads the files whenever it is
    used. So it shows the present state of a run that is still going on.

    Attributes:
        path: the absolute path of the run directory.
    """

    path: Path

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return load_stored(self.path / "config.yaml")[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting as plain data, named as in `config.yaml`."""
        return dump(self.config)

    @property
    def prompt_key(self) -> str:
        """The name of the data's column with the prompt."""
        return self.config.prompts.prompt_key

    @property
    def response_columns(self) -> tuple[str, ...]:
        """The names of the data's columns with the recorded responses; empty if responses are sampled."""
        return self.config.prompts.responses

    @property
    def has_template(self) -> bool:
        """True if a chat template writes the conversations."""
        return self.config.render.template is not None

    @property
    def has_environment(self) -> bool:
        """True if an environment answers the model. An episode may then have several responses."""
        return self.config.sampling.environment is not None

    @property
    def environment(self) -> list[dict[str, Any]]:
        """One entry for each process that made rows of the run, in the order of the processes
        (docs/watching.md)."""
        from oat.rundir.provenance import entries

        return entries(self.path / "environment.json")

    @property
    def metrics(self) -> Table:
        """One row for each step, after row 0, which shows the start. The columns are `step` and the names of
        docs/metrics.md. If the file is damaged, a warning says where (`read_metrics`)."""
        return table(read_metrics(self.path / "metrics.jsonl"), _METRICS)

    @property
    def samples(self) -> Table:
        """One row for each group in `samples.jsonl`, with columns such as `step`, `prompt`, `responses` and
        `values`."""
        return table(read_rows(self.path / "samples.jsonl"), _SAMPLES)

    @property
    def evaluations(self) -> Table:
        """One row for each response of each evaluation: `step`, and the fields of docs/evaluation.md."""
        files = sorted((self.path / "evaluations").glob("step_*.jsonl"))
        rows = (
            {"step": int(file.stem.removeprefix("step_")), **row} for file in files for row in read_rows(file)
        )
        prompt = self.prompt_key
        return table(rows, ("step", prompt, f"format_{prompt}", *_EVALUATED))

    @property
    def questions(self) -> Table:
        """One row for each question of the ledger, in the order in which the questions were asked, with its
        answer.

        Columns:
            purpose, step, round, occurrence, number: the question's address; purposes are `train`, `eval` and
                `gold`.
            kind, oracle: `score` or `compare`, and the address of the oracle that was asked.
            prompt, reference, columns, candidates: the question's content; the prompt is a list of messages.
            values, marks, label, by, queries, tokens, cost, seconds, steps, sources: the answer; all None if
                there is none.
            steps: the rewards of the steps of responses: a list of the unit of their ends, and for each
                candidate its pairs of an end and a reward; empty without steps.
            sources: the scores of a mixture's sources, a list for each source by name; empty otherwise.
            learned: the step that learned from the answer, or the evaluation that read it. None if no step
                has learned from it yet, if it came too late, or if the step failed.
            again: number of times that the question was submitted again after a kill.

        Raises:
            LedgerError: the ledger cannot be opened, or lacks what the run's checkpoints and rows claim.
        """
        from oat.ledger.reader import Reader
        from oat.rundir.holdings import refuse_lost

        refuse_lost(self.path)
        file = self.path / "ledger.sqlite"
        if not file.exists():
            return table([], _ASKED)
        with closing(Reader(file)) as store:
            found = store.db.execute(_QUESTIONS).fetchall()
            texts = dict(store.db.execute("SELECT hash, text FROM texts"))
        return table((_question(row, texts) for row in found), _ASKED)


def load_run(path: str | Path) -> LoadedRun:
    """Open a run directory for reading from Python.

    Raises:
        ConfigError: the directory is not a run directory.
    """
    if not (Path(path) / "config.yaml").exists():
        raise ConfigError(
            f"{path}: holds no run (config.yaml is missing); give the directory that `oat train` named"
        )
    return LoadedRun(absolute(path))


def table(rows: Iterable[dict[str, Any]], names: Sequence[str] = ()) -> Table:
    """Return rows as a table. Its columns are in the order in which their names first occur.

    Args:
        names: columns that the table has even without rows; they come first.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in (dict.fromkeys(names), *rows) for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        return columns
    return pandas.DataFrame(columns)


def _question(row: tuple[Any, ...], texts: dict[str, str]) -> dict[str, Any]:
    """Turn one result of the SQL query `_QUESTIONS` into a row of the table of questions.

    Args:
        texts: the texts of the candidates, by hash.
    """
    found = dict(zip((*_ADDRESS, "text", "candidates", "again", *_ANSWER), row, strict=True))
    prompt = json.loads(found.pop("text"))
    answer = {
        name: None if (text := found[name]) is None else json.loads(text)
        for name in ("values", "marks", "steps", "sources")
    }
    return {
        **found,
        **answer,
        "prompt": [Message(*message).plain for message in prompt["messages"]],
        "reference": prompt["reference"],
        "columns": prompt["columns"],
        "candidates": [texts[name] for name in json.loads(found["candidates"])],
    }
