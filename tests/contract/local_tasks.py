"""A double for Spark's tasks: a batch is brought to one task in this process, and everything travels there pickled, as with Spark's.

The real ones are in test_foreach_spark.py and test_foreach_files.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from orders import batch

from checkpoint.position import Partition
from dedup import Consumer, consumer, slices
from dedup.decode import prepare as arrow
from dedup.decode.prepare import Prepare
from dedup.envelope import POSITION
from dedup.executors import RunTask
from dedup.feed import ArrowFeed
from dedup.report import Report

IN_ORDER = [(name, "ascending") for name in POSITION]


class Tasks:
    """Spark's shuffle and its tasks. Loses the last `lost` rows."""

    def __init__(self, rows: pa.Table | None = None, lost: int = 0) -> None:
        self.cores, self.lost = 2, lost
        self._rows = batch() if rows is None else rows

    def pack(self, what: object) -> bytes:
        """As Spark's."""
        from pyspark import cloudpickle

        return bytes(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition."""
        rows = arrow.prepare(self._rows, prepare).group_by(["source", "topic", "partition"]).aggregate([("sequence_number", "min")])
        return {Partition(r["source"], r["topic"], r["partition"]): r["sequence_number_min"] for r in rows.to_pylist()}

    def run(self, prepare: Prepare, packed: bytes, tasks: int, *, keep: bool) -> pa.Table:
        """All partitions in one task, which has a store of its own."""
        return run_task(arrow.prepare(self._rows, prepare), packed)

    def each(self, frame: pa.Table, run: RunTask, answers: pa.Schema) -> pa.Table:
        """All partitions in one task."""
        rows = frame.sort_by(IN_ORDER)
        return pa.Table.from_batches(run(rows.slice(0, rows.num_rows - self.lost).to_batches(max_chunksize=3)), answers)


class TaskEach(Tasks):
    """Each partition in a task of its own, one after the other."""

    def run(self, prepare: Prepare, packed: bytes, tasks: int, *, keep: bool) -> pa.Table:
        """In the order of their numbers."""
        rows = arrow.prepare(self._rows, prepare)
        numbers = sorted(set(rows["partition"].to_pylist()))
        return pa.concat_tables(run_task(rows.filter(pc.equal(rows["partition"], number)), packed) for number in numbers)


def run_task(rows: pa.Table, packed: bytes) -> pa.Table:
    """OUTCOMES of one task, which has a store of its own."""
    packed_store, work = pickle.loads(packed)
    store = pickle.loads(packed_store).in_tasks()
    try:
        batches = rows.sort_by(IN_ORDER).to_batches(max_chunksize=3)
        return pa.Table.from_batches(slices.run(batches, work, store), slices.OUTCOMES)
    finally:
        store.close()


def run_in(tasks: Tasks | None, made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled in these tasks or on the driver."""

    def opened(given: Any, *args: Any, **named: Any) -> ArrowFeed:
        feed = ArrowFeed(given)
        feed.tasks = tasks  # type: ignore[assignment]
        return feed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consumer, "open_feed", opened)
        return made(rows, number)


def run_in_tasks(made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled in tasks."""
    return run_in(Tasks(rows), made, rows, number)


def run_here(made: Consumer, rows: pa.Table, number: int = 0) -> Report:
    """One batch, its events handled on the driver."""
    return run_in(None, made, rows, number)
