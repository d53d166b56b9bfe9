"""A double for Spark's tasks: a batch is brought to one task in this process, and everything travels there pickled, as with Spark's.

The real ones are in test_foreach_spark.py and test_foreach_files.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.position import Partition
from dedup import Consumer, consumer
from dedup.core.envelope import POSITION
from dedup.decode.prepare import Prepare, prepare_events
from dedup.pipeline.batch import ArrowBatch, RunShare, RunTask
from dedup.pipeline.report import Report
from dedup.spark import committing, keeping
from kit.orders import batch

IN_ORDER = [(name, "ascending") for name in POSITION]


class Tasks:
    """Spark's tasks: rows are kept in files, or brought to tasks by a shuffle, which loses the last `lost` rows."""

    def __init__(self, rows: pa.Table | None = None, lost: int = 0, *, keeps: bool = True, root: str | None = None) -> None:
        self.cores, self.lost, self.keeps, self.root = 2, lost, keeps and not lost, root
        self._rows = batch() if rows is None else rows

    def pack(self, what: object) -> bytes:
        """As Spark's."""
        from pyspark import cloudpickle

        return bytes(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]

    def ask_worker(self, consumer: str, *packed: bytes) -> None:
        """This process has what it takes."""

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition."""
        rows = prepare_events(self._rows, prepare).group_by(["source", "topic", "partition"]).aggregate([("sequence_number", "min")])
        return {Partition(r["source"], r["topic"], r["partition"]): r["sequence_number_min"] for r in rows.to_pylist()}

    def prepared(self, prepare: Prepare) -> pa.Table:
        """The events with their keys."""
        return prepare_events(self._rows, prepare)

    def run(self, rows: pa.Table, task: RunTask, answers: pa.Schema, at_once: int) -> pa.Table:
        """All partitions in one task."""
        rows = rows.sort_by(IN_ORDER)
        rows = rows.slice(0, rows.num_rows - self.lost)
        try:
            return pa.Table.from_batches(task(rows.to_batches(max_chunksize=3)), answers)
        finally:
            _let_go()

    def folder(self) -> AbstractContextManager[str] | None:
        """One of this machine."""
        return keeping.shared_folder(self.root) if self.keeps else None

    def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
        """In two tasks, neither of which has whole partitions."""
        task = keeping.Keeping(folder, None, prepare)
        halves = [self._rows.take(pa.array(range(first, self._rows.num_rows, 2), pa.int64())) for first in (1, 0)]
        packed = [pickle.loads(pickle.dumps(task))(half.to_batches(max_chunksize=3)) for half in halves]
        return pa.Table.from_batches([piece for pieces in packed for piece in pieces], keeping.PIECES), prepare

    def spread(self, task: RunShare, parts: int, answers: pa.Schema) -> pa.Table:
        """One after the other."""
        try:
            return pa.Table.from_batches(
                [answer for number in range(parts) for answer in pickle.loads(pickle.dumps(task))(number)], answers
            )
        finally:
            _let_go()


class Told(Tasks):
    """Says when the jobs begin and end."""

    def __init__(self, rows: pa.Table, on_step: Callable[[str], None]) -> None:
        super().__init__(rows)
        self._on_step = on_step

    def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
        """The job that keeps rows."""
        self._on_step("keep")
        found = super().keep(prepare, folder)
        self._on_step("kept")
        return found

    def spread(self, task: RunShare, parts: int, answers: pa.Schema) -> pa.Table:
        """The job that runs the handler."""
        self._on_step("spread")
        found = super().spread(task, parts, answers)
        self._on_step("handled")
        return found


JOBS = ("keep", "kept", "spread", "handled")
"""What `Told` says."""


class TaskEach(Tasks):
    """Each partition in a task of its own, one after the other."""

    def run(self, rows: pa.Table, task: RunTask, answers: pa.Schema, at_once: int) -> pa.Table:
        """In the order of their numbers."""
        numbers = sorted(set(rows["partition"].to_pylist()))
        parts = [rows.filter(pc.equal(rows["partition"], number)) for number in numbers]
        return pa.concat_tables(Tasks.run(self, part, task, answers, at_once) for part in parts)


def _let_go() -> None:
    """A process of tasks ends, and with it the stores that it has kept."""
    while committing._stores:
        committing._stores.popitem()[1].close()


def run_in(tasks: Tasks | None, made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled in these tasks or on the driver."""

    def opened(given: Any, *args: Any, **named: Any) -> ArrowBatch:
        feed = ArrowBatch(given)
        feed.tasks = tasks  # type: ignore[assignment]
        return feed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consumer, "open_batch", opened)
        return made(rows, number)


def run_in_tasks(made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled in tasks."""
    return run_in(Tasks(rows), made, rows, number)


def run_here(made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled on the driver."""
    return run_in(None, made, rows, number)
