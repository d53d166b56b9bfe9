"""The table of dead letter events of one consumer: what is in it, and how rows get there.

A history that only grows, published like a sink. A letter's state is its newest row by seq among these events:

* `parked`: a whole letter, as it came in. Of several for one id the first counts.
* `changed`: the letter after a change, in all columns but those of HEAVY, which stay as they were.
* `edited`: the letter after a change, in all columns.

And beside them `duplicate`: later copies of a held key were dropped; `history`: one row of HISTORY. Called by the transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import SinkMismatch
from deadletter.letter import HISTORY, LETTERS
from dedup.delta.sink import Sink, Sinks
from dedup.store import Head

PARKED, CHANGED, EDITED, DUPLICATE, HISTORIC = "parked", "changed", "edited", "duplicate", "history"

STATES = (PARKED, CHANGED, EDITED)
"""Events that say how a letter stands."""

HEAVY = frozenset({"body", "properties", "extras"})
"""Columns that a `changed` row does not repeat."""

LETTERS_SINK = "dedup.dead_letters"
"""Name under which headers list the table of dead letter events."""

ROW_GROUP = 20_000
"""Rows that are read for one letter at least."""

_ALWAYS = frozenset({"consumer", "generation"})
_FIRST = ("id", "consumer", "generation", "source", "topic", "incarnation", "partition", "sequence_number")
_ADDED = [pa.field("decided_in", pa.int32()), *(HISTORY.field(n) for n in ("at", "action", "by", "reserved"))]


def _field(name: str) -> pa.Field:
    kind = LETTERS.field(name).type
    return pa.field(name, pa.binary() if kind == pa.binary(16) else kind, nullable=name not in _ALWAYS)


EVENTS = pa.schema(
    [
        pa.field("event", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),  # copies: of `duplicate` rows, and those so far where a letter changes
        *map(_field, _FIRST),
        *(_field(n) for n in LETTERS.names if n not in _FIRST),
        *(f.with_nullable(True) for f in _ADDED),  # decided_in: generation of the decision, if not that of the letter
    ]
)

_PROPERTIES = {"delta.enableDeletionVectors": "false", "delta.dataSkippingNumIndexedCols": str(3 + len(_FIRST))}


def letters_sink(sinks: Sinks, uri: str, consumer: str) -> Sink:
    """The table of a consumer's events, created if need be. Crash: it is there or not."""
    try:
        sink = sinks.open(LETTERS_SINK, uri)
    except SinkMismatch:
        if sinks.table(uri) is not None:
            raise
        sinks.engine.create(uri, EVENTS, f"dedup dead letters of {consumer}", _PROPERTIES)
        sink = sinks.open(LETTERS_SINK, uri)
    return sink


def parked_rows(letters: pa.Table, seq: int) -> pa.Table:
    """EVENTS for letters as they come in."""
    return _rows(PARKED, seq, letters, pa.repeat(pa.scalar(0, pa.int64()), letters.num_rows))


def changed_rows(letters: pa.Table, heavy: bool, head: Head, seq: int) -> pa.Table:
    """EVENTS for letters (LETTERS + duplicates) as they are after a change.

    Args:
        heavy: one of the columns HEAVY has changed.
    """
    kept = letters.append_column("decided_in", pa.repeat(pa.scalar(head.generation, pa.int32()), letters.num_rows))
    if not heavy:
        kept = kept.drop_columns(sorted(HEAVY))
    return _rows(EDITED if heavy else CHANGED, seq, kept, letters["duplicates"])


def duplicate_rows(copies: pa.Table, head: Head, seq: int) -> pa.Table:
    """EVENTS for copies of held keys (columns key, count)."""
    return _rows(DUPLICATE, seq, _by(copies.select(["key"]), head), copies["count"])


def history_rows(history: pa.Table, head: Head, seq: int) -> pa.Table:
    """EVENTS for rows of HISTORY."""
    named = history.rename_columns(["id" if n == "letter_id" else n for n in history.column_names])
    return _rows(HISTORIC, seq, _by(named, head), pa.repeat(pa.scalar(0, pa.int64()), history.num_rows))


def _by(rows: pa.Table, head: Head) -> pa.Table:
    rows = rows.append_column("consumer", pa.repeat(head.consumer, rows.num_rows))
    return rows.append_column("generation", pa.repeat(pa.scalar(head.generation, pa.int32()), rows.num_rows))


def _rows(event: str, seq: int, rows: pa.Table, count: pa.Array | pa.ChunkedArray) -> pa.Table:
    own = {"event": pa.repeat(event, rows.num_rows), "seq": pa.repeat(pa.scalar(seq, pa.int64()), rows.num_rows), "count": count}
    columns = [own.get(f.name, rows[f.name] if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type)) for f in EVENTS]
    return pa.table([c.cast(f.type) for c, f in zip(columns, EVENTS, strict=True)], schema=EVENTS)


def together(parts: Sequence[pa.Table]) -> pa.Table:
    """EVENTS of one decision, in the order of position, so that a page of letters lies in few row groups."""
    rows = pa.concat_tables([EVENTS.empty_table(), *parts])
    return (
        rows.take(pc.sort_indices(rows, [(n, "ascending") for n in ("topic", "partition", "sequence_number")])) if len(parts) > 1 else rows
    )
