"""The pipeline's view of a batch, whatever its source: evaluated rows, named by number, and frames for the handler.

A batch is evaluated once, before anything is decided. Handler, reservations, outcomes and checkpoints all refer to these rows. This module
evaluates Arrow tables; spark/batch.py evaluates Spark's DataFrames.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from checkpoint.position import Ints, Partition
from dedup.core.index import INDEX_COLUMNS
from dedup.core.keys import HIDDEN, SEQUENCE
from dedup.core.rows import ArrowFrames, picked
from dedup.core.store import Frames
from dedup.decode.prepare import Prepare, prepare_events


class EvaluatedBatch(Protocol):
    """The rows of one batch, evaluated once. Rows are named by their number in it."""

    @property
    def frames(self) -> Frames:
        """How the handler's frames of these rows are asked."""

    @property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""

    def payload_hashes(self) -> Ints:
        """The payload hash of every row. What they are computed of may be left alone until somebody asks."""

    def content(self, rows: Ints) -> pa.Table:
        """All prepared columns of these rows, in this order. For few rows: letters, checkpoints."""

    def frame(self, rows: Ints) -> Any:
        """The handler's frame of these rows, without internal columns."""

    def expect(self, rows: Ints) -> None:
        """These rows are likely to be asked for as a frame next: a chance to make it while something else is waited for."""


RunTask = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What a task does with its rows. Travels to it."""

RunShare = Callable[[int], Iterator[pa.RecordBatch]]
"""What a task does that is given a number. Travels to it."""


class Tasks(Protocol):
    """The rows of one batch where they are: in the tasks of a cluster."""

    @property
    def cores(self) -> int:
        """Tasks that the cluster runs at once."""

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition. Evaluates the batch once."""

    def pack(self, what: object) -> bytes:
        """What travels to the tasks, for `pickle.loads`. Raises ConfigError where it cannot."""

    def ask_worker(self, consumer: str, *packed: bytes) -> None:
        """Ask whether tasks can unpack this, once for each consumer. Raises ConfigError, with what to set, where they cannot."""

    def prepared(self, prepare: Prepare) -> Any:
        """The rows of the batch as events with keys, for `run`: evaluated where it brings them, each time anew."""

    def run(self, rows: Any, task: RunTask, answers: pa.Schema, at_once: int) -> pa.Table:
        """Bring each partition of these rows to one task, in order, and run this there; returns what the tasks yield.

        Args:
            rows: what `prepared` gave, or a handler's frame.
            answers: schema of what `task` yields.
            at_once: how many tasks run at once.
        """

    def folder(self) -> AbstractContextManager[str] | None:
        """A folder that this process shares with all tasks, for the time of the block; None where there is none."""

    def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
        """Evaluate the batch, once, and keep its rows as files in the folder (dedup/spark/keeping.py).

        Returns which files (PIECES), and how few of their rows are completed.
        """

    def spread(self, task: RunShare, parts: int, answers: pa.Schema) -> pa.Table:
        """Run this in so many tasks, each with a number of its own; returns what they yield.

        Args:
            answers: schema of what `task` yields.
        """


class Evaluating(Protocol):
    """Rows that can be evaluated."""

    def evaluate(self, prepare: Prepare) -> AbstractContextManager[EvaluatedBatch]:
        """Map, decode, compute keys, and evaluate, once."""


class Batch(Evaluating, Protocol):
    """One batch as it came."""

    run_key: str  # the query run it belongs to: an epoch is taken once for each
    query_id: str | None  # an id that outlives the process, where there is one
    tasks: Tasks | None  # where its rows can be handled without coming here; None: nowhere

    @property
    def names(self) -> Sequence[str]:
        """The columns of the input."""

    @property
    def reads_files(self) -> bool:
        """Whether it is known to come from files, so that there is no broker behind it."""

    @property
    def is_over(self) -> bool:
        """Whether the query that it belongs to was stopped: nobody waits for the batch any more."""

    def check(self, prepare: Prepare) -> None:
        """Raise ConfigError for what can be seen without evaluating anything."""


_run: tuple[int, str] = (0, "")


def process_run() -> str:
    """A random id of this process; another one after a fork."""
    global _run
    if _run[0] != os.getpid():
        _run = (os.getpid(), uuid.uuid4().hex)
    return _run[1]


class ArrowBatch:
    """A pyarrow Table as a batch."""

    is_over: ClassVar[bool] = False

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.run_key = process_run()
        self.query_id: str | None = None
        self.tasks: Tasks | None = None

    @property
    def names(self) -> Sequence[str]:
        """The columns of the table."""
        return list(self._table.column_names)

    @property
    def reads_files(self) -> bool:
        """False: a table does not tell where it comes from."""
        return False

    def check(self, prepare: Prepare) -> None:
        """Raise ConfigError for missing columns."""
        prepare_events(self._table.slice(0, 0), prepare)

    @contextmanager
    def evaluate(self, prepare: Prepare) -> Iterator[EvaluatedBatch]:
        """Computed here, by pyarrow."""
        table = prepare_events(self._table, prepare)
        yield EvaluatedArrow(table if prepare.positions else numbered(table))


@dataclass(frozen=True)
class EvaluatedArrow:
    """Rows in memory, handed to the handler as pa.Table."""

    table: pa.Table
    frames: Frames = field(default_factory=ArrowFrames)

    @cached_property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""
        return self.table.select(index_columns(self.table.column_names))

    def payload_hashes(self) -> Ints:
        """The payload hash of every row."""
        return np.asarray(self.table["_payload_hash"])

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        return picked(self.table, rows)

    def frame(self, rows: Ints) -> pa.Table:
        """These rows as the handler sees them."""
        return picked(self._visible, rows)

    @cached_property
    def _visible(self) -> pa.Table:
        return visible(self.table)

    def expect(self, rows: Ints) -> None:
        """Nothing to make: a frame is quick."""


def index_columns(names: Sequence[str]) -> list[str]:
    """What decisions are made on, of prepared rows with these columns."""
    return [*INDEX_COLUMNS, *(name for name in SEQUENCE[:1] if name in names)]


def visible(table: pa.Table) -> pa.Table:
    """Without the internal columns."""
    names = table.column_names
    return table.drop_columns([name for name in HIDDEN if name in names])


def numbered(table: pa.Table) -> pa.Table:
    """Rows without positions get a number of this batch, so that `tx.reject` can name them; it is never stored."""
    at = table.column_names.index("sequence_number")
    return table.set_column(at, table.schema.field(at), pa.array(range(table.num_rows), pa.int64()))
