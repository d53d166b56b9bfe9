"""What a decision leaves in our own tables: letters, notes, the batch record, checkpoints.

Executes the steps of dedup/store.py inside the open transaction; decides nothing.
"""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg.types.json import Jsonb

from checkpoint.errors import CommitConflict, StoreError
from dedup.postgres import arrays, encode
from dedup.postgres.connect import Connection
from dedup.postgres.sqlfiles import Statements, quoted
from dedup.postgres.state import State, checkpoint_row, topic_id
from dedup.steps import Advance, Note, Park, Record

_RANGES = ("seen", "duplicates", "skipped", "late")
_COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")


def park(connection: Connection, sql: Statements, step: Park) -> None:
    """Keep the letters that are not kept yet. Raises StoreError if the table does not take them all.

    Crash: undone with the transaction.
    """
    there = {row[0] for row in connection.execute(sql["parked"], {"ids": step.letters["id"].to_pylist()})}
    missing = pc.invert(pc.is_in(step.letters["id"], value_set=pa.array(sorted(there), pa.string())))
    letters = step.letters.filter(missing)
    if letters.num_rows:
        kept = encode.copy_in(connection, f"{quoted(sql.schema)}.dead_letter", _letter_columns(letters))
        if kept != letters.num_rows:
            raise StoreError(f"dead_letter kept {kept} of {letters.num_rows} letters. Remove the trigger that somebody has added to it.")


def _letter_columns(letters: pa.Table) -> pa.Table:
    """LETTERS as the columns of dead_letter. PostgreSQL's text holds no NUL: readable texts show it as U+2400."""
    columns: dict[str, Any] = {}
    for field in letters.schema:
        name = "event_offset" if field.name == "offset" else field.name
        values = letters[field.name].combine_chunks()
        if field.name == "properties":
            columns |= _properties(values.chunk(0) if isinstance(values, pa.ChunkedArray) else values)
        else:
            columns[name] = pc.replace_substring(values, "\0", "\u2400") if pa.types.is_string(field.type) else values
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


def note(connection: Connection, sql: Statements, step: Note) -> None:
    """Count the copies of held keys.

    Crash: undone with the transaction.
    """
    if step.copies.num_rows:
        keys = arrays.uuid_array(arrays.keys_of(step.copies["key"]))
        connection.execute(sql["note"], {"keys": keys, "counts": arrays.int8_array(step.copies["count"].to_numpy())})


def bump(connection: Connection, sql: Statements, state: State, attempt: uuid.UUID) -> int:
    """Count one more decision; returns its number.

    Crash: undone with the transaction.
    """
    row = connection.execute(sql["bump"], {"id": state.id, "attempt": attempt}).fetchone()
    assert row is not None
    return int(row[0])


def record(connection: Connection, sql: Statements, state: State, step: Record, seq: int, attempt: uuid.UUID) -> None:
    """Keep the batch record.

    Crash: undone with the transaction.
    """
    run = {"query_id": step.run.query_id, "batch_id": step.run.batch_id}
    connection.execute(sql["record"], {"id": state.id, "settings": Jsonb(dict(step.settings)), **run})
    made_by = {"id": state.id, "generation": state.head.generation, "epoch": state.head.epoch, "seq": seq, "attempt": attempt}
    rows = [{**made_by, **_batch_row(connection, sql, state, row)} for row in step.batches.to_pylist()]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(sql["add_batch"], rows)


def _batch_row(connection: Connection, sql: Statements, state: State, row: dict[str, Any]) -> dict[str, Any]:
    plain = {name: row[name] for name in ("incarnation", "partition", "query_id", "batch_id", "chunk", *_COUNTS)}
    ranges = {name: "{" + ",".join(f"[{r['first']},{r['last']}]" for r in row[name]) + "}" for name in _RANGES}
    return {"topic_id": topic_id(connection, sql, state, (row["source"], row["topic"])), **plain, **ranges}


def advance(connection: Connection, sql: Statements, state: State, step: Advance) -> None:
    """Set the checkpoints, each only if it stands where the head says. Raises CommitConflict if one does not.

    Crash: undone with the transaction.
    """
    for where in sorted(step.checkpoints):
        before = state.head.checkpoints.get(where)
        expected = {"expected": before.sequence_number if before else None}
        number = topic_id(connection, sql, state, (where.source, where.topic))
        row = checkpoint_row(where, step.checkpoints[where])
        if connection.execute(sql["advance"], {"id": state.id, "topic_id": number, **row, **expected}).fetchone() is None:
            raise CommitConflict(f"Consumer {state.head.consumer!r}: the checkpoint of {where} changed while the batch ran. Plan it again.")
