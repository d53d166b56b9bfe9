"""Dead letters as the steps of a decision change them: parked and noted.

Executes what is planned elsewhere, inside the open transaction; decides nothing.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import StoreError
from dedup.postgres import encode
from dedup.postgres.connect import Connection
from dedup.postgres.sqlfiles import Statements, quoted
from dedup.steps import Park


def park(connection: Connection, sql: Statements, step: Park) -> None:
    """Keep the letters that are not kept yet, and their history. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    there = {row[0] for row in connection.execute(sql["parked"], {"ids": step.letters["id"].to_pylist()})}
    kept = pa.array(sorted(there), pa.string())
    letters = step.letters.filter(pc.invert(pc.is_in(step.letters["id"], value_set=kept)))
    _copy(connection, sql, "dead_letter", _letter_columns(letters))
    _copy(connection, sql, "letter_history", _clean(step.history.filter(pc.invert(pc.is_in(step.history["letter_id"], value_set=kept)))))


def _copy(connection: Connection, sql: Statements, table: str, rows: pa.Table) -> None:
    if not rows.num_rows:
        return
    kept = encode.copy_in(connection, f"{quoted(sql.schema)}.{table}", rows)
    if kept != rows.num_rows:
        raise StoreError(f"{table} kept {kept} of {rows.num_rows} rows. Remove the trigger that somebody has added to it.")


def _clean(rows: pa.Table) -> pa.Table:
    """PostgreSQL's text holds no NUL: readable texts show it as U+2400."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({n: pc.replace_substring(v, "\0", "\u2400") if pa.types.is_string(v.type) else v for n, v in columns.items()})


def _letter_columns(letters: pa.Table) -> pa.Table:
    """LETTERS as the columns of dead_letter."""
    columns: dict[str, Any] = {}
    rows = _clean(letters)
    for name in rows.column_names:
        values = rows[name].combine_chunks()
        if name == "properties":
            columns |= _properties(values.chunk(0) if isinstance(values, pa.ChunkedArray) else values)
        else:
            columns["event_offset" if name == "offset" else name] = values
    return pa.table(columns)


def _properties(values: pa.ListArray) -> dict[str, pa.Array]:
    """Two arrays side by side: names as text, values as exact bytes, in the order of the event."""
    items, mask = values.flatten(), values.is_null()
    offsets = pc.cumulative_sum(pc.fill_null(pc.list_value_length(values), 0))
    starts = pa.concat_arrays([pa.array([0], pa.int32()), offsets.cast(pa.int32())])
    names = pc.replace_substring(items.field("key"), "\0", "\u2400") if len(items) else pa.array([], pa.string())
    return {
        "property_names": pa.ListArray.from_arrays(starts, names, mask=mask),
        "property_values": pa.ListArray.from_arrays(starts, items.field("value"), mask=mask),
    }
