"""Dead letters as the steps of a decision change them: parked, noted, changed, their keys freed.

Executes what is planned elsewhere, inside the open transaction; decides nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import chain
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import StoreError
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements, fill, quoted
from dedup.postgres import arrays, encode, order, reserve
from dedup.postgres.charset import Charset, charset_of
from dedup.steps import Change, Free, Note, Park

_CHANGING: Mapping[str, str] = {
    "event_key": "bytea",
    "key": "uuid",
    "holds_key": "boolean",
    "idempotence_key": "text",
    "payload_hash": "bigint",
    "body": "bytea",
    "body_size": "bigint",
    "body_sha256": "bytea",
    "kind": "text",
    "reason": "text",
    "error_type": "text",
    "error_message": "text",
    "stack": "text",
    "fingerprint": "text",
    "attempts": "integer",
    "first_failed_at": "timestamptz",
    "last_failed_at": "timestamptz",
    "status": "text",
    "blocked_by": "text",
    "extras": "bytea",
}
"""Columns that may change, and their types. Position, headers and sequence are the event's."""


def park(connection: Connection, sql: Statements, step: Park, consumer: str) -> None:
    """Keep the letters that are not kept yet, and their history. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    try:
        with connection.transaction():
            _copy_letters(connection, sql, step.letters)
    except psycopg.errors.UniqueViolation:  # which is rare: asking first would cost every flood a look at each letter
        step = _not_kept(connection, sql, step)
        _copy_letters(connection, sql, step.letters)
    _copy(connection, sql, "letter_history", _kept(_clean(step.history), charset_of(connection)))
    order.parked(connection, sql, step.letters, consumer)


def _not_kept(connection: Connection, sql: Statements, step: Park) -> Park:
    there = {row[0] for row in connection.execute(sql["parked"], {"ids": step.letters["id"].to_pylist()})}
    kept = pa.array(sorted(there), pa.string())
    letters = step.letters.filter(pc.invert(pc.is_in(step.letters["id"], value_set=kept)))
    return Park(letters, step.history.filter(pc.invert(pc.is_in(step.history["letter_id"], value_set=kept))))


def note(connection: Connection, sql: Statements, step: Note) -> None:
    """Count the copies of held keys. Waits for nobody.

    Crash: undone with the transaction.
    """
    if step.copies.num_rows:
        keys = arrays.uuid_array(arrays.keys_of(step.copies["key"]))
        connection.execute(sql["note"], {"keys": keys, "counts": arrays.int8_array(step.copies["count"].to_numpy())})


def change(connection: Connection, sql: Statements, step: Change, consumer: str) -> None:
    """Set what changes of letters that are locked, keep why, and put their sequences in order.

    Raises StoreError for columns that are the event's own, and where a letter is gone.

    Crash: undone with the transaction.
    """
    ids = step.letters["id"].to_pylist()
    if ids:
        sequences = order.lock(connection, sql, ids, consumer)
        _set(connection, sql, _clean(step.letters))
        if "holds_key" in step.letters.column_names:
            reserve.keep(connection, sql, ids)
        order.changed(connection, sql, ids, sequences)
    _copy(connection, sql, "letter_history", _kept(_clean(step.history), charset_of(connection)))


def _set(connection: Connection, sql: Statements, letters: pa.Table) -> None:
    names = [name for name in letters.column_names if name != "id"]
    if wrong := [name for name in names if name not in _CHANGING]:
        raise StoreError(f"Letters keep their {', '.join(wrong)}: these are the event's own. Change the others only.")
    if not names:
        return
    statement = fill(
        sql["change_letters"],
        assignments=", ".join(f"{name} = u.{name}" for name in names),
        arrays=", ".join(f"%({name})s::{_CHANGING.get(name, 'text')}[]" for name in letters.column_names),
        names=", ".join(letters.column_names),
    )
    given = {name: _values(letters[name], _CHANGING.get(name)) for name in letters.column_names}
    count = connection.execute(statement, given).rowcount
    if count != letters.num_rows:
        raise StoreError(f"{letters.num_rows - count} of {letters.num_rows} letters are not there any more. Look for them and start again.")


def _values(column: pa.ChunkedArray, kind: str | None) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return [v and uuid.UUID(bytes=v) for v in values] if kind == "uuid" else values


def free(connection: Connection, sql: Statements, step: Free) -> None:
    """Forget these reservations.

    Crash: undone with the transaction.
    """
    if step.keys.num_rows:
        connection.execute(sql["free_keys"], {"keys": arrays.uuid_array(arrays.keys_of(step.keys["key"]))})


def _copy_letters(connection: Connection, sql: Statements, letters: pa.Table) -> None:
    """A few at a time: while the server takes them the next ones are made. Columns without any value are left out."""
    if not letters.num_rows:
        return
    given = letters.select([name for name in letters.column_names if letters[name].null_count < letters.num_rows])
    held = charset_of(connection)
    made = (_letter_columns(given.slice(first, encode.ROWS_PER_WRITE), held) for first in range(0, letters.num_rows, encode.ROWS_PER_WRITE))
    some = next(made)
    batches = (batch for table in chain([some], made) for batch in table.to_batches())
    kept = encode.copy_batches(connection, f"{quoted(sql.schema)}.dead_letter", some.schema, batches)
    _refuse_fewer("dead_letter", kept, letters.num_rows)


def _copy(connection: Connection, sql: Statements, table: str, rows: pa.Table) -> None:
    if rows.num_rows:
        _refuse_fewer(table, encode.copy_in(connection, f"{quoted(sql.schema)}.{table}", rows), rows.num_rows)


def _refuse_fewer(table: str, kept: int, given: int) -> None:
    if kept != given:
        raise StoreError(f"{table} kept {kept} of {given} rows. Remove the trigger that somebody has added to it.")


def _clean(rows: pa.Table) -> pa.Table:
    """PostgreSQL's text holds no NUL: readable texts show it as U+2400."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({n: pc.replace_substring(v, "\0", "\u2400") if pa.types.is_string(v.type) else v for n, v in columns.items()})


def _kept(rows: pa.Table, held: Charset | None) -> pa.Table:
    """What a COPY takes in place of texts that the database cannot hold; parameters of statements are changed by their cursor."""
    if held is None:
        return rows
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({n: held.escaped(v) if pa.types.is_string(v.type) else v for n, v in columns.items()})


def _letter_columns(letters: pa.Table, held: Charset | None) -> pa.Table:
    """LETTERS as the columns of dead_letter."""
    columns: dict[str, Any] = {}
    rows = _kept(_clean(letters), held)
    for name in rows.column_names:
        values = rows[name].combine_chunks()
        if name == "properties":
            columns |= property_arrays(values.chunk(0) if isinstance(values, pa.ChunkedArray) else values, held)
        else:
            columns["event_offset" if name == "offset" else name] = values
    return pa.table(columns)


def property_arrays(values: pa.ListArray, held: Charset | None = None) -> dict[str, pa.Array]:
    """`property_names` and `property_values`: two arrays side by side: names as text, values as exact bytes, in the order of the event."""
    items, mask = values.flatten(), values.is_null()
    offsets = pc.cumulative_sum(pc.fill_null(pc.list_value_length(values), 0))
    starts = pa.concat_arrays([pa.array([0], pa.int32()), offsets.cast(pa.int32())])
    names = pc.replace_substring(items.field("key"), "\0", "\u2400") if len(items) else pa.array([], pa.string())
    return {
        "property_names": pa.ListArray.from_arrays(starts, held.escaped(names) if held else names, mask=mask),
        "property_values": pa.ListArray.from_arrays(starts, items.field("value"), mask=mask),
    }
