"""Where prompts come from: the sources of a run, and the prompts of one, read on demand. `records.py` reads files, datasets and Python,
`formats.py` knows what the columns of a record are."""

import hashlib
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import DataError
from oat.formats import Layout, unrendered
from oat.records import Records, is_array, open_records
from oat.types import Prompt

_FIRST = 3
"""Malformed records that a note names."""


@dataclass(frozen=True)
class Source:
    """One place that prompts come from.

    Attributes:
        records: what the head of `records.py` lists.
        weight: its share of a run's prompts, relative to the weights of the other sources.
        split: of a dataset that has several; None is `train`.

    Raises:
        DataError: the weight is not a number above 0.
    """

    records: Records
    weight: float = 1.0
    split: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise DataError(f"{self.name}: a weight of {self.weight} gives no share of the prompts; set a number above 0, or leave the source out")

    @property
    def name(self) -> str:
        return str(self.records) if isinstance(self.records, str | Path) else "records"

    def place(self, row: int) -> str:
        """Of a record, for messages; the objects of a JSON array have no lines of their own."""
        return f"{self.name}: record {row}" if self._is_array else f"{self.name}:{row}"

    @cached_property
    def _is_array(self) -> bool:
        return isinstance(self.records, str | Path) and is_array(Path(self.records))


class PromptSet:
    """The prompts of one source, read from it whenever they are asked for: what stays in memory is where each record is.

    Every record is read and checked once when this is made. JSONL and CSV files are then read in place, and must stay as they are: a record that
    does not is an error. Saved datasets, lists and JSON arrays are indexed; what can only be read in order (Parquet, streamed datasets, iterators)
    is written as JSON lines to a file without a name, which is gone with the process.

    Args:
        accept: whether a prompt is kept; it may raise DataError, and the record is then malformed.
        max_prompts: read the first so many records and no more.
        skip: leave malformed records out and count them.
        folder: where the file without a name lies; by default where the system keeps temporary files.
        reads: whether the template reads a field of messages; by default it reads none.

    Attributes:
        read: well-formed records.
        skipped: malformed ones that are left out.
        columns: names of the columns beside the prompt that any prompt has which is kept.
        unrendered: in how many records something stands that is not rendered, by its name.

    Raises:
        DataError: the source cannot be read or has no record, or a record is malformed; names source, row and field, what was expected and
            found, and what to do.
        ConfigError: a function cannot be loaded.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        accept: Callable[[Prompt], bool] = lambda prompt: True,
        *,
        max_prompts: int | None = None,
        skip: bool = False,
        folder: Path | None = None,
        reads: Callable[[str], bool] = lambda name: False,
    ):
        self.name, self.layout, self._place = source.name, layout, source.place
        self.read = self.skipped = 0
        self.columns: set[str] = set()
        self.unrendered: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._reader = open_records(source.records, source.name, source.split, folder)
        places, rows, marks = array("q"), array("q"), array("q")
        for place, row, record in islice(self._reader, max_prompts):
            try:
                prompt = self._prompt(record, row, len(places))
                is_kept = accept(prompt)
            except DataError as error:
                if not skip:
                    raise
                self._skip(row, error)
                continue
            self.read += 1
            self.unrendered.update(unrendered(record, reads))
            if is_kept:
                self.columns |= prompt.columns.keys()
                for values, value in ((places, place), (rows, row), (marks, _mark(prompt))):
                    values.append(value)
        if not self.read:
            raise self._nothing()
        self._index = np.array([places, rows, marks], dtype=np.int64)

    def __len__(self) -> int:
        return self._index.shape[1]

    def __getitem__(self, number: int) -> Prompt:
        """A prompt, from 0; its row as the head of `records.py` says, its occurrence this number."""
        place, row, mark = (int(value) for value in self._index[:, number])
        prompt = self._prompt(self._reader.at(place, row), row, number)
        if _mark(prompt) != mark:
            raise DataError(
                f"{self._place(row)}: expected the record that stood there when this was opened, got another; put the data back as they were"
            )
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    @property
    def digest(self) -> str:
        """Of all prompts in their order, wherever they lie; by checksums, against mistakes and not against malice."""
        return hashlib.sha256(self._index[1:].tobytes()).hexdigest()[:32]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for people about the format, and one each about what is left out or not rendered."""
        form = self.layout.format
        assert form is not None, "a set has at least one record"
        further = ", ".join(name[:80] for name in islice(sorted(self.columns), 20)) if not self.layout.responses else ""
        rest = f"; further columns, for the reward: {further}" if further else ""
        notes = [f"{self.name}: read as {form.name} ({', '.join(form.columns)}){rest}"]
        if self.unrendered:
            each = (f"`{name}` ({number} of {self.read} records)" for name, number in sorted(self.unrendered.items()))
            notes.append(f"{self.name}: not rendered: {', '.join(each)}")
        if self.skipped:
            more = ", ..." if self.skipped > len(self._wrong) else ""
            notes.append(f"{self.name}: {self.skipped} malformed records are left out: {', '.join(self._wrong)}{more}")
        return tuple(notes)

    def _prompt(self, record: Any, row: int, number: int) -> Prompt:
        if isinstance(record, DataError):
            raise record
        return self.layout.prompt(record, self._place(row), row, number)

    def _skip(self, row: int, error: DataError) -> None:
        self.skipped += 1
        if len(self._wrong) < _FIRST:
            self._wrong.append(str(error) if not self._wrong else self._place(row))

    def _nothing(self) -> DataError:
        if self.skipped:
            return DataError(
                f"{self.name}: expected well-formed records, got {self.skipped} malformed ones and no other; the first: {self._wrong[0]}"
            )
        return DataError(f"{self.name}: expected at least one record, got an empty file or dataset; add records, or name another")


def _mark(prompt: Prompt) -> int:
    fields = [message.fields for message in prompt.messages if message.fields]
    return zlib.crc32(repr((prompt.messages, prompt.reference, prompt.columns, *fields)).encode())


def read_prompts(source: Source, *, prompt_key: str = "prompt", reference_key: str | None = None, max_prompts: int | None = None) -> list[Prompt]:
    """All prompts of a source, in its order and in memory.

    Raises:
        DataError, ConfigError: as `PromptSet`.
    """
    return list(PromptSet(source, Layout(prompt_key, reference_key), max_prompts=max_prompts))
