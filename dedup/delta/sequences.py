"""Which sequences are blocked, and the chain of letters in each. In memory, filled from the ledger.

One ledger row per sequence and decision that touched it: the last letter that is open or blocked, with its place, or that it is free. The
newest row by seq counts. A summary repeats the row of each blocked sequence, so that nobody has to read those before it. Called by the
consumer state and by the letters of a decision.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.letter import SEQUENCES, Status

PLACE = ("incarnation", "sequence_number", "part", "id")
"""Position order within a sequence, which lies in one partition."""

WAITING = (Status.OPEN.value, Status.BLOCKED.value)

LASTS = pa.schema(
    [
        pa.field("sequence", pa.binary(16)),
        pa.field("letter", pa.string()),  # null: free
        pa.field("kind", pa.string()),
        pa.field("incarnation", pa.int32()),
        pa.field("sequence_number", pa.int64()),
        pa.field("part", pa.int64()),
    ]
)
"""The last waiting letter of each sequence."""

_DOC = ("letter", "kind", "incarnation", "sequence_number", "part")


def ledger_rows(lasts: pa.Table, seq: int) -> pa.Table:
    """LASTS as rows of the section."""
    texts = [lasts[n].cast(pa.string()) for n in _DOC]
    return pa.table(
        {
            "seq": pa.repeat(pa.scalar(seq, pa.int64()), lasts.num_rows),
            "kind": pa.repeat("sequence", lasts.num_rows),
            "key": lasts["sequence"].cast(pa.binary()),
            "doc": pc.binary_join_element_wise(*texts, "\t"),  # null where one is null: free
        }
    )


def from_ledger(rows: pa.Table) -> pa.Table:
    """The inverse; of several rows of one sequence the newest."""
    rows = rows.sort_by("seq")
    numbered = rows.append_column("row", pa.array(range(rows.num_rows), pa.int64())).group_by("key").aggregate([("row", "max")])
    rows = rows.take(numbered["row_max"].sort())
    parts = pc.split_pattern(pc.fill_null(rows["doc"], "\t" * (len(_DOC) - 1)), "\t")
    texts = [pc.list_element(parts, i) for i in range(len(_DOC))]
    blank = pc.is_null(rows["doc"])
    columns = [pc.if_else(blank, None, t).cast(LASTS.field(n).type) for n, t in zip(_DOC, texts, strict=True)]
    return pa.table([rows["key"].cast(pa.binary(16)), *columns], schema=LASTS)


class Sequences:
    """The blocked sequences of one consumer."""

    def __init__(self) -> None:
        self._lasts = LASTS.empty_table()

    def __len__(self) -> int:
        return int(self._lasts.num_rows)

    def take_in(self, lasts: pa.Table) -> None:
        """What a later decision says about some of them."""
        others = self._lasts.filter(pc.invert(_among(self._lasts["sequence"], lasts["sequence"])))
        self._lasts = pa.concat_tables([others, lasts.filter(lasts["letter"].is_valid())]).combine_chunks()

    def after(self, lasts: pa.Table) -> pa.Table:
        """LASTS of all that are blocked once a later decision has said this about some of them, and of those that it frees."""
        return pa.concat_tables([self._lasts.filter(pc.invert(_among(self._lasts["sequence"], lasts["sequence"]))), lasts])

    def find(self, sequences: pa.Array | pa.ChunkedArray) -> pa.Table:
        """LASTS of those that are blocked."""
        return self._lasts.filter(_among(self._lasts["sequence"], sequences))

    def blocked(self, sequences: pa.Array | pa.ChunkedArray) -> pa.Table:
        """SEQUENCES of those that are blocked."""
        return self.find(sequences).select(SEQUENCES.names).cast(SEQUENCES)

    def all(self) -> pa.Table:
        """LASTS."""
        return self._lasts


def _among(values: pa.ChunkedArray, known: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    whole = known.combine_chunks() if isinstance(known, pa.ChunkedArray) else known
    return pc.is_in(values.cast(pa.binary()), value_set=whole.cast(pa.binary()))


def waiting(letters: pa.Table) -> pa.Table:
    """Those that are open or blocked and have an order to keep."""
    return letters.filter(pc.and_(letters["sequence"].is_valid(), pc.is_in(letters["status"], value_set=pa.array(WAITING))))


def chained(letters: pa.Table) -> pa.Table:
    """Letters (PLACE, sequence) in order, with the status and blocked_by that they should have: the first of each sequence is open."""
    rows = letters.append_column("_sequence", letters["sequence"].cast(pa.binary()))
    rows = rows.sort_by([(n, "ascending") for n in ("_sequence", *PLACE)]).drop_columns("_sequence")
    if not rows.num_rows:
        return rows
    before = pa.concat_arrays([pa.nulls(1, pa.binary(16)), rows["sequence"].combine_chunks().slice(0, rows.num_rows - 1)])
    ids = pa.concat_arrays([pa.nulls(1, pa.string()), rows["id"].combine_chunks().slice(0, rows.num_rows - 1)])
    behind = pc.fill_null(pc.equal(before.cast(pa.binary()), rows["sequence"].cast(pa.binary())), False)
    return with_columns(
        rows,
        {
            "status": pc.if_else(behind, Status.BLOCKED.value, Status.OPEN.value),
            "blocked_by": pc.if_else(behind, ids, pa.scalar(None, pa.string())),
        },
    )


def lasts_of(chain: pa.Table, sequences: pa.Array | pa.ChunkedArray) -> pa.Table:
    """LASTS of these distinct sequences, given all their waiting letters in order (`chained`, with kind); those without any are free."""
    wanted = sequences.combine_chunks() if isinstance(sequences, pa.ChunkedArray) else sequences
    keyed = chain.append_column("row", pa.array(range(chain.num_rows), pa.int64())).append_column(
        "_key", chain["sequence"].cast(pa.binary())
    )
    last = keyed.group_by("_key").aggregate([("row", "max")])
    at = last["row_max"].combine_chunks().take(pc.index_in(wanted.cast(pa.binary()), value_set=last["_key"].combine_chunks()))
    named = chain.select(["id", *LASTS.names[2:]]).take(at)
    return pa.table([wanted.cast(pa.binary(16)), *named.columns], names=LASTS.names).cast(LASTS)


def with_columns(rows: pa.Table, columns: dict[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    """The table with these columns in place of its own, or added."""
    for name, values in columns.items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, values) if at >= 0 else rows.append_column(name, values)
    return rows
