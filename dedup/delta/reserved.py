"""Reservations as the ledger has them: rows of the sections `keys` and `held`, without those that a later decision freed.

Called by the consumer state, which fills the key index with them, and by `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from dedup.delta.ledger import FREED, HELD, KEYS, Ledger, LedgerFile

FREED_ROWS = pa.schema([pa.field("key", pa.binary()), pa.field("seq", pa.int64())])
"""Keys, and the newest decision that freed each."""


def freed(ledger: Ledger, files: Sequence[LedgerFile], after: int) -> pa.Table:
    """FREED_ROWS of the decisions after this one."""
    found = [ledger.read([f], ["key", "kind"], after) for f in files if f.section == HELD and f.last > after]
    rows = pa.concat_tables([t.filter(pc.equal(t["kind"], FREED)).select(["key", "seq"]) for t in found]) if found else None
    if rows is None or not rows.num_rows:
        return FREED_ROWS.empty_table()
    newest = rows.group_by("key").aggregate([("seq", "max")])
    return pa.table([newest["key"], newest["seq_max"]], schema=FREED_ROWS)


def reservations(ledger: Ledger, files: Sequence[LedgerFile], after: int, gone: pa.Table) -> Iterator[tuple[pa.Table, bool]]:
    """(key, payload_hash, seq) of the decisions after this one, file by file, and whether letters hold them.

    Args:
        gone: FREED_ROWS. A decision may free a key and reserve it again; the other way round it does not list it.
    """
    for file in files:
        if file.section in (KEYS, HELD) and file.last > after:
            rows = ledger.read([file], ["key", "payload_hash", *(["kind"] if file.section == HELD else [])], after)
            if file.section == HELD:
                rows = rows.filter(pc.invert(pc.equal(rows["kind"], FREED)))
            yield (_kept(rows, gone) if gone.num_rows else rows), file.section == HELD


def _kept(rows: pa.Table, gone: pa.Table) -> pa.Table:
    at = pc.index_in(rows["key"], value_set=gone["key"].combine_chunks())
    return rows.filter(pc.fill_null(pc.greater_equal(rows["seq"], gone["seq"].take(at)), True))
