"""The table of dead letter events of one consumer, and the letters that follow from it.

A history that only grows: `parked` rows carry a whole letter, `duplicate` rows count later copies of a held key. A letter's state is what
its rows say in the order of seq. Published like a sink. Called by the transaction and the store.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from deadletter.letter import LETTERS
from dedup.delta.sink import Sink, Sinks
from dedup.delta.storage import Options
from dedup.store import Head, Selection

PARKED, DUPLICATE = "parked", "duplicate"

LETTERS_SINK = "dedup.dead_letters"
"""Name under which headers list the table of dead letter events."""

_ALWAYS = frozenset({"consumer", "generation"})

EVENTS = pa.schema(
    [
        pa.field("event", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),  # copies, for `duplicate` rows
        *(pa.field(f.name, pa.binary() if f.type == pa.binary(16) else f.type, nullable=f.name not in _ALWAYS) for f in LETTERS),
    ]
)

ALL_LETTERS = pa.schema([*LETTERS, pa.field("duplicates", pa.int64(), nullable=False)])
"""What `Store.letters` returns."""


def letters_sink(sinks: Sinks, uri: str, consumer: str, options: Options) -> Sink:
    """The table of a consumer's events, created if need be. Crash: it is there, empty, or not."""
    if sinks.table(uri) is None:
        DeltaTable.create(
            uri,
            EVENTS,
            mode="ignore",
            name=f"dedup dead letters of {consumer}"[:250],
            configuration={"delta.enableDeletionVectors": "false", "delta.dataSkippingNumIndexedCols": "4"},
            storage_options=dict(options) if options else None,
        )
    return sinks.open(LETTERS_SINK, uri)


def event_rows(letters: Sequence[pa.Table], copies: Sequence[pa.Table], head: Head, seq: int) -> pa.Table:
    """EVENTS of one decision."""
    parked = [_event(PARKED, seq, t, pa.repeat(0, t.num_rows)) for t in letters if t.num_rows]
    noted = [_event(DUPLICATE, seq, _identified(t, head), t["count"]) for t in copies if t.num_rows]
    return pa.concat_tables([EVENTS.empty_table(), *parked, *noted])


def _identified(copies: pa.Table, head: Head) -> pa.Table:
    count = copies.num_rows
    return pa.table({"key": copies["key"], "consumer": pa.repeat(head.consumer, count), "generation": pa.repeat(head.generation, count)})


def _event(event: str, seq: int, rows: pa.Table, count: pa.Array | pa.ChunkedArray) -> pa.Table:
    own = {"event": pa.repeat(event, rows.num_rows), "seq": pa.repeat(seq, rows.num_rows), "count": count}
    columns = [own.get(f.name, rows[f.name] if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type)) for f in EVENTS]
    return pa.table([c.cast(f.type) for c, f in zip(columns, EVENTS, strict=True)], schema=EVENTS)


def of_decisions(events: pa.Table, decisions: Mapping[int, Collection[int]]) -> pa.Table:
    """Those events whose decision is in the ledger; a RESTORE of the ledger may have taken others back.

    Args:
        decisions: generation -> seqs.
    """
    told = [
        pc.and_(pc.equal(events["generation"], generation), pc.is_in(events["seq"], pa.array(seqs, pa.int64())))
        for generation, seqs in decisions.items()
    ]
    return events.filter(functools.reduce(pc.or_, told)) if told else events.slice(0, 0)


def letters_of(events: pa.Table) -> pa.Table:
    """ALL_LETTERS in position order: one row per letter id, the first time it was parked; copies of a held key summed."""
    parked = events.filter(pc.equal(events["event"], PARKED)).sort_by("seq")
    first = parked.append_column("row", pa.array(range(parked.num_rows), pa.int64())).group_by("id").aggregate([("row", "min")])
    letters = parked.take(first["row_min"].sort()) if parked.num_rows else parked
    copies = events.filter(pc.equal(events["event"], DUPLICATE)).group_by("key").aggregate([("count", "sum")])
    sums = dict(zip(copies["key"].to_pylist(), copies["count_sum"].to_pylist(), strict=True))
    holders = zip(letters["key"].to_pylist(), letters["holds_key"].to_pylist(), strict=True)
    duplicates = pa.array([sums.get(key, 0) if holds else 0 for key, holds in holders], pa.int64())
    table = letters.select(LETTERS.names).append_column("duplicates", duplicates).cast(ALL_LETTERS)
    return table.sort_by([(n, "ascending") for n in ("consumer", "source", "topic", "incarnation", "partition", "sequence_number", "part")])


def selected(letters: pa.Table, selection: Selection) -> pa.Table:
    """Those letters that match everything that is asked for."""
    tests = [
        pc.equal(letters[name], value)
        for name in ("source", "topic", "partition", "kind", "status", "fingerprint")
        if (value := getattr(selection, name)) is not None
    ]
    if selection.first is not None:
        tests.append(pc.greater_equal(letters["sequence_number"], selection.first))
    if selection.last is not None:
        tests.append(pc.less_equal(letters["sequence_number"], selection.last))
    if selection.id is not None:
        tests.append(pc.starts_with(letters["id"], selection.id))
    for mask in [functools.reduce(pc.and_, tests)] if tests else []:
        letters = letters.filter(mask)
    return letters.slice(0, selection.limit)
