"""The last row of each key: what a merge of a batch comes down to. Pure.

Two source rows of one key fail a MERGE, and which of them counts must not depend on how rows happen to arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsMisfit
from dedup.envelope import POSITION
from dedup.steps import Merge

_ROW, _KNOWN = "__dedup_row", "__dedup_known"


def last_per_key(rows: pa.Table, merge: Merge, ranks: Mapping[str, pa.ChunkedArray] | None = None) -> pa.Table:
    """The rows that count, in the order of their positions; keys have 0.0 for -0.0.

    Args:
        ranks: of columns that are not to be compared as they are: numbers that compare as the sink compares the values.

    Raises:
        RowsMisfit: a column that `merge` names is missing, or that of newer_by is of a type that has no order.
    """
    require(rows, merge)
    rows = one_zero(rows, merge)
    compared = _compared(rows, merge, ranks or {})
    order = _order(compared, merge)
    if order:
        with requiring_order(rows, merge):
            moved = pc.sort_indices(compared, sort_keys=order)
        rows, compared = rows.take(moved), compared.take(moved)
    numbered = compared.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(merge.keys)).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    return rows.take(last.combine_chunks().sort())


@contextmanager
def requiring_order(rows: pa.Table, merge: Merge) -> Iterator[None]:
    """Raise RowsMisfit where Arrow cannot order what `merge` goes by."""
    try:
        yield
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        kind = rows[merge.newer_by].type if merge.newer_by else "a position"
        raise RowsMisfit(f"tx.merge cannot go by newer_by={merge.newer_by!r}: {kind} has no order.") from error


def require(rows: pa.Table, merge: Merge) -> None:
    """Raise RowsMisfit where a column that `merge` names is missing."""
    missing = [c for c in (*merge.keys, merge.newer_by, merge.delete_when) if c is not None and c not in rows.column_names]
    if missing:
        raise RowsMisfit(f"tx.merge names {', '.join(map(repr, missing))}, which the rows do not have: {', '.join(rows.column_names)}.")


def one_zero(rows: pa.Table, merge: Merge) -> pa.Table:
    """The rows with 0.0 for -0.0 in their keys: engines do not agree on whether these are equal."""
    for name in merge.keys:
        if pa.types.is_floating(rows[name].type):
            at = rows.column_names.index(name)
            zeros = pc.equal(rows[name], pa.scalar(0.0, rows[name].type))
            rows = rows.set_column(at, rows.schema.field(at), pc.if_else(zeros, pa.scalar(0.0, rows[name].type), rows[name]))
    return rows


def _compared(rows: pa.Table, merge: Merge, ranks: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """With ranks for values, and with a column that puts nulls before everything: without a value a row is older than any other."""
    needed = dict.fromkeys([*merge.keys, *([merge.newer_by] if merge.newer_by else []), *(c for c in POSITION if c in rows.column_names)])
    found = pa.table({name: ranks.get(name, rows[name]) for name in needed})
    return found.append_column(_KNOWN, pc.is_valid(rows[merge.newer_by])) if merge.newer_by else found


def _order(rows: pa.Table, merge: Merge) -> list[tuple[str, str]]:
    by = [_KNOWN, merge.newer_by] if merge.newer_by else []
    place = list(POSITION) if set(POSITION) <= set(rows.column_names) else []
    return [(name, "ascending") for name in (*by, *place)]
