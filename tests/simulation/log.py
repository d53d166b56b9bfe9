"""The simulated log, and what the preparation of real events would make of its events."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from deadletter.letter import LETTERS, table_of
from dedup.core.keys import LETTER
from dedup.core.rows import picked
from dedup.pipeline.batch import EvaluatedArrow

TOPIC = ("broker", "topic")
KEYS = 6
"""Different ones."""


class Event(NamedTuple):
    """One event of the log."""

    partition: int
    number: int
    key: int | None
    undecodable: bool = False
    sequence: bytes | None = None
    held: bool = False  # it comes a batch later than its neighbours

    @property
    def at(self) -> tuple[int, int]:
        """Where it stands."""
        return self.partition, self.number

    def __str__(self) -> str:
        what = "undecodable" if self.undecodable else "without a key" if self.key is None else f"key {self.key}"
        more = [f"sequence {self.sequence.hex()[:4]}"] if self.sequence else []
        return ", ".join([f"{self.partition}/{self.number} {what}", *more, *(["late"] * self.held)])


def make_log(rng: random.Random) -> tuple[Event, ...]:
    """One or two partitions with repeated keys, null keys, undecodable bodies and missing positions; mostly short."""
    longest, late = rng.choices((8, 4, 3), (3, 27, 70))[0], rng.random() < 0.05
    return tuple(e for p in range(rng.choice((1, 1, 1, 2))) for e in _partition(rng, p, rng.randrange(2, longest + 1), late))


def _partition(rng: random.Random, partition: int, length: int, late: bool) -> Iterator[Event]:
    number = 0
    for _ in range(length):
        number += rng.choice((1, 1, 1, 3))
        junk, key = rng.random() < 0.05, None if rng.random() < 0.05 else rng.randrange(KEYS)
        held = late and rng.random() < 0.3
        ordered = not (junk or held) and rng.random() < 0.8
        yield Event(partition, number, key, junk, bytes((partition, rng.randrange(2))) * 8 if ordered else None, held)


PREPARED = pa.schema(
    [LETTERS.field(n) for n in ("source", "topic", "partition", "sequence_number", "part", "offset", "enqueued_time")]
    + [pa.field("key", pa.binary()), LETTERS.field("body"), LETTERS.field("properties")]
    + [
        pa.field("_key", pa.binary()),
        pa.field("_key_text", pa.string()),
        pa.field("_payload_hash", pa.int64()),
        pa.field("_undecodable", pa.bool_()),
        pa.field("_sequence", pa.binary(16)),
        pa.field("_sequence_text", pa.string()),
    ]
)


def prepared(events: Sequence[Event]) -> pa.Table:
    """What `prepare` would make of these events."""
    count, keys = len(events), [e.key for e in events]
    columns: dict[str, Any] = {
        "source": [TOPIC[0]] * count,
        "topic": [TOPIC[1]] * count,
        "partition": [e.partition for e in events],
        "sequence_number": [e.number for e in events],
        "part": [0] * count,
        "offset": [f"o{e.number}" for e in events],
        "body": [str(key).encode() for key in keys],
        "properties": [[]] * count,
        "_key": [None if e.key is None or e.undecodable else e.key.to_bytes(16, "big") for e in events],
        "_key_text": [str(key) for key in keys],
        "_payload_hash": [-1 if key is None else key for key in keys],
        "_undecodable": [e.undecodable for e in events],
        "_sequence": [e.sequence for e in events],
        "_sequence_text": [e.sequence and e.sequence.hex() for e in events],
    }
    names, rows = list(columns), zip(*columns.values(), strict=True)
    return table_of([dict(zip(names, row, strict=True)) for row in rows], _ROW)


_ROW = pa.struct(list(PREPARED))


class Log:
    """All events, prepared once."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events, self._table = tuple(events), prepared(events)
        self._made: dict[tuple[tuple[int, int], ...], EvaluatedArrow] = {}  # batches come again and again
        self._row = {e.at: row for row, e in enumerate(events)}
        self.partitions = tuple(tuple(e for e in events if e.partition == p) for p in sorted({e.partition for e in events}))

    def at(self, place: tuple[int, int]) -> Event:
        """The event there."""
        return self.events[self._row[place]]

    def rows(self, places: Sequence[tuple[int, int]]) -> EvaluatedArrow:
        """Prepared, in this order."""
        asked = tuple(places)
        if asked not in self._made:
            self._made[asked] = EvaluatedArrow(picked(self._table, np.array([self._row[at] for at in asked], dtype=np.int64)))
        return self._made[asked]


@dataclass
class SimBatch:
    """A batch of a simulated query."""

    rows: EvaluatedArrow
    run_key: str
    query_id: str | None
    reads_files: ClassVar[bool] = False
    is_over: ClassVar[bool] = False

    @property
    def names(self) -> list[str]:
        """Columns of the batch, as they were before it was prepared."""
        return [name for name in self.rows.table.column_names if not name.startswith("_")]

    def check(self, prepare: Any) -> None:
        """Nothing to check."""

    @contextmanager
    def evaluate(self, prepare: Any) -> Iterator[EvaluatedArrow]:
        """Already prepared."""
        yield self.rows


@dataclass
class LetterBatch:
    """Letters on their way through the door again: the events that they were parked from."""

    letters: pa.Table
    log: Log

    @contextmanager
    def evaluate(self, prepare: Any) -> Iterator[EvaluatedArrow]:
        """Prepared as they were."""
        places = list(zip(self.letters["partition"].to_pylist(), self.letters["sequence_number"].to_pylist(), strict=True))
        yield EvaluatedArrow(self.log.rows(places).table.append_column(LETTER, self.letters[LETTER]))


class Picked:
    """Prepared events in place of a table that a runner was given."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.num_rows = table, table.num_rows

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        return self.table[name]

    def filter(self, chosen: pa.Array) -> Picked:
        """Some of them."""
        return Picked(self.table.filter(chosen))


def batch_of(events: Any) -> SimBatch:
    """In place of the batch that a table is."""
    return SimBatch(EvaluatedArrow(events.table if isinstance(events, Picked) else events), "run", None)
