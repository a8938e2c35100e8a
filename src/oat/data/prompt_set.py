"""Where prompts come from: the sources of a run, and the prompts of one, read on demand. `data/sources.py`
reads files, datasets and Python, `data/formats.py` knows what the columns of a record are."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from oat.data.fit import Fit
from oat.data.formats import Layout
from oat.data.index import Pass, mark_of
from oat.data.index_cache import IndexCache
from oat.data.sources import Records, open_records
from oat.data.text_files import is_array
from oat.errors import DataError
from oat.types import Prompt


@dataclass(frozen=True)
class Source:
    """One place that prompts come from.

    Attributes:
        records: what the head of `data/sources.py` lists.
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
            raise DataError(
                f"{self.name}: a weight of {self.weight} gives no share of the prompts; set a number "
                "above 0, or leave the source out"
            )

    @property
    def name(self) -> str:
        return str(self.records) if isinstance(self.records, str | Path) else "records"

    def place(self, row: int) -> str:
        """Of a record, for messages; the objects of a JSON array have no lines of their own."""
        return f"{self.name}: record {row}" if self.is_array else f"{self.name}:{row}"

    @cached_property
    def is_array(self) -> bool:
        """Its records have no lines of their own."""
        return isinstance(self.records, str | Path) and is_array(Path(self.records))


class PromptSet:
    """The prompts of one source, read from it whenever they are asked for: what stays in memory is where each
    record is.

    Every record is read, checked and rendered once when this is made (`data/index.py`), unless that is
    remembered from before. JSONL and CSV files are then read in place, and must stay as they are: a record
    that does not is an error. Saved datasets, lists and JSON arrays are indexed; what can only be read in
    order (Parquet, streamed datasets, iterators) is written as JSON lines to a file without a name, which is
    gone with the process.

    Args:
        fit: what is rendered of each prompt, and which are kept; None renders nothing and keeps all.
        max_prompts: read the first so many records and no more.
        skip: leave malformed records out and count them.
        folder: where the file without a name lies; by default where the system keeps temporary files.
        caches: folders in which an index is remembered.

    Attributes:
        index: what is known of the records.

    Raises:
        DataError: the source cannot be read or has no record, or a record is malformed; names source, row and
            field, what was expected and found, and what to do.
        ConfigError: a function cannot be loaded.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        fit: Fit | None = None,
        *,
        max_prompts: int | None = None,
        skip: bool = False,
        folder: Path | None = None,
        caches: Sequence[Path] = (),
    ):
        self.name = source.name
        self.layout = layout
        self._place = source.place
        self._reader = open_records(source.records, source.name, source.split, folder)
        first = Pass(source.name, source.is_array, self._reader.is_json, layout, fit, skip)
        cache = IndexCache(first, self._reader, max_prompts, caches)
        known = cache.index()
        if known is None:
            self.index = first.over(islice(self._reader, max_prompts))
            cache.keep(self.index)
        else:
            self.index = known
            self._reader.prepare()
        layout.format = self.index.format
        if not self.index.read:
            raise self._nothing()
        self._found = np.array([self.index.places, self.index.rows, self.index.marks], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Prompt:
        """A prompt, from 0; its row as the head of `data/sources.py` says, its occurrence this number."""
        place, row, mark = (int(value) for value in self._found[:, number])
        record = self._reader.at(place, row)
        if isinstance(record, DataError):
            raise record
        prompt = self.layout.prompt(record, self._place(row), row, number)
        if mark_of(prompt) != mark:
            raise DataError(
                f"{self._place(row)}: expected the record that stood there when this was opened, got "
                "another; put the data back as they were"
            )
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    @property
    def digest(self) -> str:
        """Of all prompts in their order, wherever they lie; by checksums, against mistakes and not against
        malice."""
        return hashlib.sha256(self._found[1:].tobytes()).hexdigest()[:32]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for people about the format, and one each about what is left out or not rendered."""
        form = self.layout.format
        assert form is not None, "a set has at least one record"
        further = (
            ", ".join(name[:80] for name in islice(sorted(self.index.columns), 20))
            if not self.layout.responses
            else ""
        )
        rest = f"; further columns, for the reward: {further}" if further else ""
        notes = [f"{self.name}: read as {form.name} ({', '.join(form.columns)}){rest}"]
        if self.index.unrendered:
            each = (
                f"`{name}` ({number} of {self.index.read} records)"
                for name, number in sorted(self.index.unrendered.items())
            )
            notes.append(f"{self.name}: not rendered: {', '.join(each)}")
        if self.index.skipped:
            notes.append(f"{self.name}: {self.index.skipped} malformed records are left out: {self._wrong()}")
        return tuple(notes)

    def _wrong(self) -> str:
        """The trouble of the first malformed record, and the places of some others."""
        (_, trouble), *others = self.index.wrong
        more = ["..."] if self.index.skipped > len(self.index.wrong) else []
        return ", ".join([trouble, *(self._place(row) for row, _ in others), *more])

    def _nothing(self) -> DataError:
        if self.index.skipped:
            number, (_, first) = self.index.skipped, self.index.wrong[0]
            return DataError(
                f"{self.name}: expected well-formed records, got {number} malformed ones and no other; "
                f"the first: {first}"
            )
        return DataError(
            f"{self.name}: expected at least one record, got an empty file or dataset; add records, or "
            "name another"
        )


def read_prompts(
    source: Source,
    *,
    prompt_key: str = "prompt",
    reference_key: str | None = None,
    max_prompts: int | None = None,
) -> list[Prompt]:
    """All prompts of a source, in its order and in memory.

    Raises:
        DataError, ConfigError: as `PromptSet`.
    """
    return list(PromptSet(source, Layout(prompt_key, reference_key), max_prompts=max_prompts))
