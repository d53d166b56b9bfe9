"""Which batch records somebody wants to read: not all of them, where a window of positions or the newest decisions are meant."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import LAST, Partition


@dataclass(frozen=True)
class Wanted:
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


ALL = Wanted()
