"""The order in which a run takes its prompts, and the run's position in this order. The
prompts of a source are read when the run takes them: `data/sources.py` reads records, and `data/formats.py`
turns a record into a prompt.

Some records can only be read in order: Parquet, streamed datasets and iterators. They are copied as JSON
lines to an unnamed file in the run directory or, if there is no run, in the system's folder for temporary
files. The file vanishes when the process ends, and a continued run writes it again. Without the copy, reading
one record of a Parquet file would decode a complete row group.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from oat.data.fit import Fit, TooLong
from oat.data.formats import IMPLICIT, Layout
from oat.data.index import Index, IndexCache, Pass, checksum_of
from oat.data.sources import Records, is_array, open_records
from oat.errors import DataError
from oat.seeds import Seeds, uniforms
from oat.text.renderer import Renderer
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


class Prompts:
    """The prompts of one or several sources in a seeded order, with a cursor: the number of prompts that were
    taken.

    The n-th prompt of a run depends only on the data, the settings, the seed and n. If the prompts are
    shuffled, each epoch of a source has its own random permutation. Several sources take turns
    (`interleave`), and each source has its own epochs.

    Random addresses: the generator at ("prompts", e) draws the permutation for epoch e of the first source;
    the generator at ("prompts", e, i) draws it for epoch e of the source with index i > 0.

    The constructor reads and renders every record, so a bad record is found before the run starts.
    `data/fit.py` defines the length of a record.

    Args:
        source: a source as listed at the head of `data/sources.py`, or a list of `Source`.
        prompt_key, reference_key, responses, score_key, numbers: columns of a record, as in `Layout`.
        on_bad_record: "stop" raises an error at a malformed record; "skip" leaves the record out.
        max_prompts: largest number of records that are read of each source; None reads all.
        max_tokens: largest length of a record; None sets no limit.
        too_long: treatment of recorded data that are too long, as in `Fit`.
        room: largest length that fits into the model's context; None if the context is unknown. A longer
            record that is neither cut nor left out is an error.
        room_is: text that says how `room` was computed, for messages.
        epochs: the order ends after `epochs` times `size` prompts; None: it never ends. The sources share
            these prompts by weight, so a source with a large weight may be repeated more often than others.
        shuffle: False takes the records of a source in their stored order, in every epoch.
        folder: folder for copies of sources that can only be read in order, as in `PromptSet`.
        caches: folders of stored indexes, as in `PromptSet`.
        shard: (rank, count): of the whole order, `take` returns the prompts with the indices `rank`,
            `rank` + `count`, `rank` + 2 `count` and so on.

    Attributes:
        fit: renderer and limits on length.
        size: number of prompts in all sources, each counted once.
        dropped: number of records left out because they are too long.
        cut: number of records whose prompt or responses are cut.
        skipped: number of malformed records left out.
        longest: length of the longest record, in tokens.
        columns: names of the columns, other than the prompt's, that at least one prompt has.
        has_references: True if at least one prompt has a reference answer.
        responses: names of the columns with recorded responses; empty if none are read.
        formats: names of the formats of the sources.
        notes: sentences for people about each source: its format, and what was not rendered, left out or cut.

    Raises:
        DataError: a source or a record cannot be used, a prompt cannot be rendered or does not fit into the
            context, or all records of a source are too long.
        ConfigError: the function that a source names cannot be loaded.
    """

    def __init__(
        self,
        source: Records | Sequence[Source],
        renderer: Renderer,
        seeds: Seeds,
        *,
        prompt_key: str = "prompt",
        reference_key: str | None = None,
        responses: Sequence[str] = (),
        score_key: str | None = None,
        numbers: Mapping[str, str] | None = None,
        on_bad_record: Literal["stop", "skip"] = "stop",
        max_prompts: int | None = None,
        max_tokens: int | None = None,
        too_long: TooLong = "leave_out",
        room: int | None = None,
        room_is: str = "",
        epochs: int | None = None,
        shuffle: bool = True,
        folder: Path | None = None,
        caches: Sequence[Path] = (),
        shard: tuple[int, int] = (0, 1),
    ):
        if not 0 <= shard[0] < shard[1]:
            raise DataError(
                f"there is no shard {shard[0]} of {shard[1]}; give (rank, count) with 0 <= rank < count"
            )
        sources = _sources(source)
        self.fit = Fit(renderer, max_tokens, room, too_long)
        self.dropped = self.cut = self.skipped = self.longest = 0
        self.columns: set[str] = set()
        self.has_references = False
        self.responses = tuple(responses)
        self.notes: tuple[str, ...] = ()
        self.formats: set[str] = set()
        self._pools: list[_Pool] = []
        skip = on_bad_record == "skip"
        own: dict[str, Any] = {"max_prompts": max_prompts, "skip": skip, "folder": folder, "caches": caches}
        for number, one in enumerate(sources):
            layout = Layout(prompt_key, reference_key, responses, score_key, numbers)
            found = PromptSet(one, layout, self.fit, **own)
            self.notes += found.notes
            self._count(one, found.index)
            if found.index.over and room is not None:
                raise _no_room(one, found.index, layout, room, room_is)
            self.formats |= {layout.format.name} if layout.format else set()
            self._pools.append(_Pool(found, seeds, number, shuffle))
        self.size = sum(len(pool.prompts) for pool in self._pools)
        self._names = [one.name for one in sources]
        self._weights = [one.weight for one in sources]
        self._seeds = seeds
        self._end = None if epochs is None else epochs * self.size
        self._shard = shard
        self._taken = 0
        self._turns: tuple[np.ndarray, np.ndarray] = interleave(self._weights, 0, seeds)

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts of this shard and move the cursor. When the epochs are used up, return
        fewer than n, or none. The occurrence of a prompt is its index in the order of all shards together."""
        rank, count = self._shard
        start = rank + self._taken * count
        end = start + n * count if self._end is None else min(start + n * count, self._end)
        places = range(start, end, count)
        taken = [replace(self._at(place), occurrence=place) for place in places]
        self._taken += len(taken)
        return taken

    @property
    def is_used_up(self) -> bool:
        """True if the epochs are over: `take` returns no prompt."""
        rank, count = self._shard
        return self._end is not None and rank + self._taken * count >= self._end

    def all(self) -> list[Prompt]:
        """Return every prompt in stored order, one source after another. The occurrence of a prompt is its
        index in this list. What `take` returns next stays the same."""
        prompts = [prompt for pool in self._pools for prompt in pool.prompts]
        return [replace(prompt, occurrence=place) for place, prompt in enumerate(prompts)]

    def spread(self, count: int) -> list[Prompt]:
        """Return at most `count` prompts, evenly spaced in the stored order of all sources. The cursor does
        not move."""
        places = sorted(
            {place * self.size // min(count, self.size) for place in range(min(count, self.size))}
        )
        ends = np.cumsum([len(pool.prompts) for pool in self._pools])
        numbers = np.searchsorted(ends, places, side="right")
        starts = ends - [len(pool.prompts) for pool in self._pools]
        return [
            self._pools[number].prompts[int(place - starts[number])]
            for place, number in zip(places, numbers, strict=True)
        ]

    @property
    def digests(self) -> list[str]:
        """The checksum of each source's prompts (`PromptSet.digest`)."""
        return [pool.prompts.digest for pool in self._pools]

    @property
    def state(self) -> dict[str, Any]:
        """The cursor and the digests of the sources, for a checkpoint."""
        return {"taken": self._taken, "data": self.digests}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the number of prompts that were taken so far.

        Args:
            state: the property `state` of an instance with the same data, seed and shard.

        Raises:
            DataError: the data have changed.
        """
        self.refuse_others(state.get("data", []))
        self._taken = state["taken"]

    def refuse_others(self, digests: Sequence[str]) -> None:
        """Compare the digest of each source with a stored digest.

        Args:
            digests: the property `digests` when the run began.

        Raises:
            DataError: the data have changed.
        """
        for name, before, now in zip(self._names, digests, self.digests, strict=False):
            if before != now:
                earlier = {
                    "could split common beginnings of texts inside a word": IMPLICIT in self.formats,
                    "did not read the column `system`": "system" in self.columns,
                }
                did = ", and ".join(what for what, is_so in earlier.items() if is_so)
                raise DataError(
                    f"{name}: expected the prompts that the run began with, got others"
                    f"{f' (an earlier version of oat {did})' if did else ''}; put the data back as they "
                    "were if they have changed, or begin a new run"
                )

    def _at(self, place: int) -> Prompt:
        if len(self._pools) == 1:
            return self._pools[0].at(place)
        if place >= len(self._turns[0]):
            self._turns = interleave(self._weights, max(2 * place, 1024), self._seeds)
        number, turn = (int(values[place]) for values in self._turns)
        return self._pools[number].at(turn)

    def _count(self, source: Source, index: Index) -> None:
        """Add the counts in a source's index to the attributes of this object, and add notes on the records
        that are left out or cut.

        Raises:
            DataError: all records of the source are too long.
        """
        self.skipped += index.skipped
        self.longest = max(self.longest, index.longest)
        self.columns |= index.columns
        self.has_references |= index.has_references
        what = "prompts with their longest response" if self.responses else "prompts"
        limit = self.fit.limit
        rule = self.fit.too_long
        dropped = index.read - len(index)
        longer = f"of {index.read} {what} are longer than {limit} tokens"
        makes_none = f"prompts.too_long: {rule} makes no room"
        if not len(index):
            all_of = f"{source.name}: all {index.read} {what} are longer than {limit} tokens"
            if rule == "leave_out":
                raise DataError(f"{all_of}; raise `prompts.max_tokens`, or give shorter ones")
            raise DataError(
                f"{all_of}, and {makes_none} for any; cut at the other end, raise `prompts.max_tokens`, "
                "or give shorter ones"
            )
        if dropped:
            why = "" if rule == "leave_out" else f", since {makes_none} for them"
            self.notes = (*self.notes, f"{source.name}: {dropped} {longer} and left out{why}")
        if index.cut:
            self.notes = (
                *self.notes,
                f"{source.name}: {index.cut} {longer} and cut (prompts.too_long: {rule})",
            )
        self.dropped += dropped
        self.cut += index.cut


class _Pool:
    """The prompts of one source, with one order per epoch."""

    def __init__(self, prompts: PromptSet, seeds: Seeds, number: int, shuffle: bool):
        self.prompts = prompts
        self._seeds = seeds
        self._number = number
        self._shuffle = shuffle
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def at(self, turn: int) -> Prompt:
        """Return the prompt that this source gives at its turn number `turn`, counted from 0."""
        epoch, place = divmod(turn, len(self.prompts))
        if not self._shuffle:
            return self.prompts[place]
        if self._order[0] != epoch:
            address = (epoch, self._number) if self._number else (epoch,)
            self._order = (epoch, self._seeds.at("prompts", *address).permutation(len(self.prompts)))
        return self.prompts[self._order[1][place]]


def _no_room(source: Source, index: Index, layout: Layout, room: int, room_is: str) -> DataError:
    row, size = index.first_over
    if layout.responses:
        return DataError(
            f"{source.place(row)}: the prompt and its longest response have {size} tokens, and the model's "
            f"context holds {room} ({index.over} of {len(index)} records are too long); drop longer ones "
            f"(prompts.max_tokens: {room}), cut them (prompts.too_long), or shorten them"
        )
    drop = f"drop longer ones (prompts.max_tokens: {room}), " if room > 0 and index.over < len(index) else ""
    return DataError(
        f"{source.place(row)}: the prompt has {size} tokens, and the model's context leaves room for "
        f"{max(0, room)}{room_is}; {index.over} of {len(index)} prompts are too long; {drop}lower "
        "sampling.max_new_tokens, or set sampling.overflow to cut"
    )


def interleave(weights: Sequence[float], n: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
    """Return a random order in which several sources take turns in proportion to their weights.

    Let w be a source's weight divided by the sum of all weights, and S the number of sources. The positive
    numbers are divided into intervals of length 1/w. For each interval, one number is drawn uniformly (key
    ("mixture", source), position: index of the interval). The drawn numbers of all sources are sorted. Each
    number is one turn of its source.

    Among the first n turns, a source has n w turns, up to a difference of at most 1 + w S. A larger n appends
    turns and leaves the first ones unchanged.

    Args:
        n: number of turns to return.

    Returns:
        Two arrays, (n,) int64 each. The first has the index of the source of each turn. The second has the
        number of earlier turns of this source.
    """
    shares = np.array(weights) / max(weights)
    shares /= math.fsum(shares)
    end = n + len(weights)  # at least n turns lie before `end`
    turns, places = [], []
    for number, share in enumerate(shares):
        stretches = np.arange(int(end * share) + 2)
        keys = np.full(len(stretches), seeds.key("mixture", number), dtype=np.uint64)
        turns.append(stretches)
        places.append((stretches + uniforms(keys, stretches)) / share)
    numbers = np.repeat(np.arange(len(weights)), [len(turn) for turn in turns])
    order = np.argsort(np.concatenate(places), kind="stable")[:n]
    return numbers[order], np.concatenate(turns)[order]


def _sources(given: Records | Sequence[Source]) -> list[Source]:
    if isinstance(given, list | tuple) and any(isinstance(entry, Source) for entry in given):
        return list(given)
    if isinstance(given, list | tuple) and not given:
        raise DataError("there is no source of prompts in an empty list; name a file, or give records")
    return [Source(cast(Records, given))]
