"""Which batch records somebody wants to read: not all of them, where a window of positions or the newest decisions are meant.

`BATCHES` is what a batch record says. Pure values; both stores answer them, `verify` and reprocess ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import LAST, Partition, Ranges

RANGES = pa.list_(pa.struct([pa.field("first", pa.int64(), nullable=False), pa.field("last", pa.int64(), nullable=False)]))

BATCHES = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),  # -1 in key-only mode, with empty source and topic
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("chunk", pa.int32(), nullable=False),  # 0, 1, ... within the batch
        pa.field("seen", RANGES, nullable=False),  # new positions of this chunk
        pa.field("duplicates", RANGES, nullable=False),  # positions of which every part was a duplicate
        pa.field("skipped", RANGES, nullable=False),  # positions of which every part was skipped
        pa.field("late", RANGES, nullable=False),  # positions at or below the checkpoint, never seen before
        pa.field("delivered", pa.int64(), nullable=False),  # rows; = redelivered + the next four counts
        pa.field("redelivered", pa.int64(), nullable=False),
        pa.field("processed", pa.int64(), nullable=False),
        pa.field("duplicate", pa.int64(), nullable=False),
        pa.field("skipped_rows", pa.int64(), nullable=False),
        pa.field("dead_lettered", pa.int64(), nullable=False),
        pa.field("reserved", pa.int64(), nullable=False),  # keys newly reserved
    ]
)
"""The batch record: one row per chunk and partition. Stores add consumer, generation, epoch, seq, committed_at."""


def union(records: Iterable[Mapping[str, Any]], name: str) -> Ranges:
    """The positions that one of these records has in this column of RANGES."""
    return Ranges.of((one["first"], one["last"]) for record in records for one in record[name])


@dataclass(frozen=True)
class RecordFilter:
    """Records of the decisions (after, until], and, where a partition is named, of positions in [first, last] of it."""

    after: int = 0
    until: int = LAST
    partition: Partition | None = None
    first: int = -LAST
    last: int = LAST

    def decided(self, seq: pa.ChunkedArray) -> pa.ChunkedArray:
        """Which of these decisions."""
        return pc.and_(pc.greater(seq, self.after), pc.less_equal(seq, self.until))

    def placed(self, rows: pa.Table) -> pa.Table:
        """Those of the rows (with source, topic, partition) that are of the partition."""
        if self.partition is None:
            return rows
        same = [pc.equal(rows[name], value) for name, value in self.partition._asdict().items()]
        return rows.filter(pc.and_(pc.and_(same[0], same[1]), same[2]))


ALL = RecordFilter()
