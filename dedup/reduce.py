"""The last row of each key: what a merge of a batch comes down to. Pure.

Two source rows of one key fail a MERGE, and which of them counts must not depend on how rows happen to arrive.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsMisfit
from dedup.envelope import POSITION
from dedup.steps import Merge

_ROW, _KNOWN = "__dedup_row", "__dedup_known"


def last_per_key(rows: pa.Table, merge: Merge) -> pa.Table:
    """The rows that count, in the order of their positions.

    Raises:
        RowsMisfit: a column that `merge` names is missing.
    """
    missing = [c for c in (*merge.keys, merge.newer_by, merge.delete_when) if c is not None and c not in rows.column_names]
    if missing:
        raise RowsMisfit(f"tx.merge names {', '.join(map(repr, missing))}, which the rows do not have: {', '.join(rows.column_names)}.")
    order = _order(rows, merge)
    ordered = rows.take(pc.sort_indices(_sortable(rows, merge), sort_keys=order)) if order else rows
    numbered = ordered.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(merge.keys)).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    return ordered.take(last.combine_chunks().sort())


def _sortable(rows: pa.Table, merge: Merge) -> pa.Table:
    """With a column that puts nulls before everything: without a value a row is older than any other."""
    return rows.append_column(_KNOWN, pc.is_valid(rows[merge.newer_by])) if merge.newer_by else rows


def _order(rows: pa.Table, merge: Merge) -> list[tuple[str, str]]:
    by = [_KNOWN, merge.newer_by] if merge.newer_by else []
    place = list(POSITION) if set(POSITION) <= set(rows.column_names) else []
    return [(name, "ascending") for name in (*by, *place)]
