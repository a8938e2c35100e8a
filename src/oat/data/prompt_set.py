"""The prompts of one source, read on demand. `data/sources.py` reads records, and `data/formats.py` turns
a record into a prompt.

Some records can only be read in order: Parquet, streamed datasets and iterators. They are copied as JSON
lines to an unnamed file in the run directory or, if there is no run, in the system's folder for temporary
files. The file vanishes when the process ends, and a continued run writes it again. Without the copy, reading
one record of a Parquet file would decode a complete row group.
"""

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
from oat.data.index import Pass, checksum_of
from oat.data.index_cache import IndexCache
from oat.data.sources import Records, open_records
from oat.data.text_files import is_array
from oat.errors import DataError
from oat.types import Prompt


@dataclass(frozen=True)
class Source:
    """A source of prompts.

    Attributes:
        records: a source as listed at the head of `data/sources.py`.
        weight: a number above 0. The source's share of the prompts is its weight, divided by the sum of all
            weights.
        split: split of a dataset that has several; None means `train`.

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
        """Return the place of a record as text, such as `a.jsonl:7`; in a JSON array, `a.json: record 7`."""
        return f"{self.name}: record {row}" if self.is_array else f"{self.name}:{row}"

    @cached_property
    def is_array(self) -> bool:
        """True if the records are the objects of a JSON array."""
        return isinstance(self.records, str | Path) and is_array(Path(self.records))


class PromptSet:
    """A sequence of the prompts of one source, read on demand.

    If no cache has the source's index, the constructor makes it (`data/index.py`): it reads and checks the
    records once and, if `fit` is given, renders them. Afterwards, the set keeps three numbers of each prompt
    in memory: the place from which its record is read, the row that messages name, and a checksum. It reads a
    record when its prompt is needed. The records of a list or a JSON array stay in memory too. The data must
    not change: reading a prompt that has changed is an error.

    Args:
        layout: the columns of the records.
        fit: the renderer, and limits on length; None renders nothing and keeps all prompts.
        max_prompts: largest number of records that are read, from the first; None reads all.
        skip: True leaves malformed records out; False raises an error at a malformed record.
        folder: folder for the unnamed copy of records that can only be read in order; None means the
            system's folder for temporary files.
        caches: folders of stored indexes (`IndexCache`).

    Attributes:
        index: the index of the records (`data/index.py`).

    Raises:
        DataError: the source cannot be read or has no well-formed record, or a record is malformed and `skip`
            is False.
        ConfigError: the function that the source names cannot be loaded.
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
        if fit is not None:
            layout.is_border = fit.renderer.is_border
        first_pass = Pass(source.name, source.is_array, self._reader.is_json, layout, fit, skip)
        cache = IndexCache(first_pass, self._reader, max_prompts, caches)
        known = cache.index()
        if known is None:
            self.index = first_pass.run(islice(self._reader, max_prompts))
            cache.keep(self.index)
        else:
            self.index = known
            self._reader.prepare()
        layout.format = self.index.format
        if not self.index.read:
            raise self._nothing()
        self._entries = np.array([self.index.places, self.index.rows, self.index.checksums], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Prompt:
        """Return the prompt with index `number`, counted from 0. Its `occurrence` is `number`.

        Raises:
            DataError: the record can no longer be read, or its prompt has changed.
        """
        place, row, checksum = (int(value) for value in self._entries[:, number])
        record = self._reader.at(place, row)
        if isinstance(record, DataError):
            raise record
        prompt = self.layout.prompt(record, self._place(row), row, number)
        if checksum_of(prompt) != checksum:
            raise DataError(
                f"{self._place(row)}: expected the record that stood there when this was opened, got "
                "another; put the data back as they were"
            )
        return prompt

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    @property
    def digest(self) -> str:
        """A checksum of all prompts in order. It does not depend on the path of the data. It detects
        mistakes, not deliberate changes."""
        return hashlib.sha256(self._entries[1:].tobytes()).hexdigest()[:32]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people about the format, about parts of records that are not rendered, and about
        malformed records that are left out."""
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
        """Return a text with the error of the first malformed record and the places of up to two more."""
        (_, trouble), *others = self.index.malformed
        more = ["..."] if self.index.skipped > len(self.index.malformed) else []
        return ", ".join([trouble, *(self._place(row) for row, _ in others), *more])

    def _nothing(self) -> DataError:
        if self.index.skipped:
            _, first = self.index.malformed[0]
            return DataError(
                f"{self.name}: expected well-formed records, got {self.index.skipped} malformed ones and no "
                f"other; the first: {first}"
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
    """Return all prompts of a source, in its order and in memory.

    Raises:
        DataError, ConfigError: see the constructor of `PromptSet`.
    """
    return list(PromptSet(source, Layout(prompt_key, reference_key), max_prompts=max_prompts))
