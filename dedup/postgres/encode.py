"""Arrow tables into COPY: binary by pgpq where it knows every type, else row by row as text through psycopg, with the same result.

The types are those of the target columns already (see fit.py). Called by the transaction for sinks and by records.py for letters.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pgpq
import psycopg
import pyarrow as pa
from pgpq import encoders
from pgpq import schema as pg

from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import quoted

ROWS_PER_WRITE = 1_024
"""Rows encoded at a time: the server takes those before them meanwhile, and not more is held twice."""


def copy_in(connection: Connection, target: str, table: pa.Table, jsonb: frozenset[str] = frozenset()) -> int:
    """COPY a table by pgpq into `target` (quoted already), columns by name; returns how many rows the server kept. Raises psycopg.Error.

    Crash: undone with the transaction.
    """
    return copy_batches(connection, target, table.schema, table.to_batches(max_chunksize=ROWS_PER_WRITE), jsonb)


def copy_batches(
    connection: Connection, target: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], jsonb: frozenset[str] = frozenset()
) -> int:
    """As `copy_in`, of batches that are made while the server takes those before them.

    Crash: undone with the transaction.
    """
    nullable = pa.schema([pa.field(f.name, f.type) for f in schema])
    chosen = {f.name: _encoder(f, f.name in jsonb) for f in nullable}
    encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(nullable, chosen)
    cursor = connection.cursor()
    with cursor.copy(_statement(target, schema.names, "binary")) as copy:
        copy.write(encoder.write_header())
        for batch in batches:
            copy.write(encoder.write_batch(batch.cast(nullable)))
        copy.write(encoder.finish())
    return cursor.rowcount


def _encoder(field: pa.Field, jsonb: bool) -> Any:
    if jsonb:
        return encoders.StringEncoderBuilder.new_with_output(field, pg.Jsonb())
    return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field)


def copy_text(connection: Connection, target: str, table: pa.Table, kinds: Mapping[str, str]) -> int:
    """COPY a table as text, for types that pgpq cannot encode; returns how many rows the server kept. Raises psycopg.Error.

    Args:
        kinds: type names of the columns in PostgreSQL, where a value needs help to become text.

    Crash: undone with the transaction.
    """
    convert = [_CONVERSIONS.get(kinds.get(name, ""), _as_is) for name in table.column_names]
    cursor = psycopg.Cursor(connection)  # not one of ours, which may escape texts: these are the user's
    with cursor.copy(_statement(target, table.column_names, "text")) as copy:
        for batch in table.to_batches(max_chunksize=ROWS_PER_WRITE):
            columns = [[None if v is None else f(v) for v in column.to_pylist()] for f, column in zip(convert, batch.columns, strict=True)]
            for row in zip(*columns, strict=True):
                copy.write_row(row)
    return cursor.rowcount


def _statement(target: str, columns: Sequence[str], form: str) -> bytes:
    return f"copy {target} ({', '.join(map(quoted, columns))}) from stdin (format {form})".encode()


def _as_is(value: Any) -> Any:
    return value


def _uuid(value: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=value)


def _uuids(values: list[bytes | None]) -> list[uuid.UUID | None]:
    return [None if v is None else _uuid(v) for v in values]


def _microseconds(value: dt.timedelta) -> str:
    """A duration without days, as pgpq writes it: 24 hours are not always a day."""
    return f"{value // dt.timedelta(microseconds=1)} microseconds"


def _intervals(values: list[dt.timedelta | None]) -> list[str | None]:
    return [None if v is None else _microseconds(v) for v in values]


def as_json(value: Any) -> str:
    """A value as JSON text; text is JSON already."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "uuid": _uuid,
    "_uuid": _uuids,
    "json": as_json,
    "jsonb": as_json,
    "interval": _microseconds,
    "_interval": _intervals,
}
