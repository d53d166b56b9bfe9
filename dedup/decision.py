"""From a decided chunk to the steps a store executes: letters, notes, batch record, checkpoints, commit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.position import Partition, Ranges
from dedup.index import KEY_ONLY, Bools, Ints
from dedup.planning import DUPLICATE, LETTERED, NEW, REDELIVERED, SKIPPED, WITHOUT_KEY, Settled
from dedup.rows import table_of
from dedup.sorting import key_bytes
from dedup.steps import Advance, Commit, Note, Park, Record, Step
from dedup.store import BATCHES, Checkpoint, Head, Run, Topic


def decide(
    settled: Settled,
    parked: Park | None,
    record: Record,
    head: Head,
    run: Run,
    marks: Mapping[Partition, Checkpoint],
    ids: Mapping[Topic, str] = MappingProxyType({}),
) -> tuple[Step, ...]:
    """Everything that has to become true together, in the order of execution.

    Args:
        marks: for each partition of the chunk, the checkpoint that its highest row would make.
        ids: the broker's ids of topics that have none yet.
    """
    steps: list[Step] = []
    if parked is not None:
        steps.append(parked)
    copies = _copies(settled)
    if copies.num_rows:
        steps.append(Note(copies))
    steps.append(record)
    moved = {p: c for p, mark in marks.items() if (c := _advanced(head.checkpoints.get(p), mark, run)) is not None}
    if head.gap_accepted and record.stream and not run.joined:  # for the whole query: also for partitions and chunks that come later
        moved = {p: replace(c, query_id=run.query_id) for p, c in head.checkpoints.items()} | moved
    if moved or ids:
        steps.append(Advance(moved, ids))
    return (*steps, Commit())


def _advanced(point: Checkpoint | None, mark: Checkpoint, run: Run) -> Checkpoint | None:
    """The checkpoint to write, or None where nothing changes; never one below `point`."""
    if point is None or mark.sequence_number > point.sequence_number:
        return mark
    if point.query_id != run.query_id:  # this query has shown that it begins at or below the checkpoint: no gap
        return replace(point, query_id=run.query_id)
    return None


def _copies(settled: Settled) -> pa.Table:
    """How many duplicates each key has in this chunk: key binary(16), count int64."""
    rows = np.flatnonzero(settled.state == DUPLICATE)
    if not len(rows):
        return _NO_COPIES
    group, first = settled.index.groups(rows)
    counts = np.bincount(group, minlength=len(first)).astype(np.int64)
    return pa.table({"key": key_bytes(settled.index.high[first], settled.index.low[first]), "count": pa.array(counts)})


_RECORD = pa.struct(list(BATCHES))
_NO_COPIES = pa.table({"key": pa.array([], pa.binary(16)), "count": pa.array([], pa.int64())})


def batch_record(settled: Settled, head: Head, run: Run) -> pa.Table:
    """BATCHES for one chunk. An empty chunk gives a row too, so that the batch id is known."""
    index = settled.index
    groups = list(index.by_partition()) or [(KEY_ONLY, np.arange(len(index)))]
    everything = np.arange(len(index))
    if index.partitions == (KEY_ONLY,):
        groups = [(KEY_ONLY, everything)]
    records = [_partition_record(settled, head, run, p, rows) for p, rows in groups]
    reserved = _reserved_by(settled, groups)
    for record, count in zip(records, reserved, strict=True):
        record["reserved"] = count
    return table_of(records, _RECORD)


def _reserved_by(settled: Settled, groups: list[tuple[Partition, Ints]]) -> list[int]:
    """Keys reserved, by the partition of the row that won: rows that are neither dropped nor without a key of their own."""
    winners = ~(WITHOUT_KEY[settled.state] | (settled.state == REDELIVERED) | (settled.state == DUPLICATE))
    return [int(winners[rows].sum()) for _, rows in groups]


def _partition_record(settled: Settled, head: Head, run: Run, partition: Partition, rows: Ints) -> dict[str, Any]:
    state, numbers = settled.state[rows], settled.index.numbers[rows]

    def ranges(chosen: Bools, without: Bools) -> list[dict[str, int]]:
        if partition == KEY_ONLY or not chosen.any():
            return []
        found = Ranges.of_numbers(numbers[chosen]) - Ranges.of_numbers(numbers[without])
        return [r._asdict() for r in found.items]

    fresh = state != REDELIVERED
    none = np.zeros(len(rows), dtype=bool)
    duplicate, skipped = state == DUPLICATE, state == SKIPPED
    lettered = LETTERED[state]
    return {
        "source": partition.source,
        "topic": partition.topic,
        "incarnation": head.incarnations.get((partition.source, partition.topic), 0),
        "partition": partition.partition,
        "query_id": run.query_id,
        "batch_id": run.batch_id,
        "chunk": run.chunk,
        "seen": ranges(fresh, none),
        "duplicates": ranges(duplicate, fresh & ~duplicate),
        "skipped": ranges(skipped, fresh & ~skipped),
        "late": ranges(settled.late[rows], none),
        "delivered": len(rows),
        "redelivered": int((~fresh).sum()),
        "processed": int((state == NEW).sum()),
        "duplicate": int(duplicate.sum()),
        "skipped_rows": int(skipped.sum()),
        "dead_lettered": int(lettered.sum()),
    }
