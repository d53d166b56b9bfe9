"""Keys and Arrow tables on the wire: PostgreSQL's binary arrays, COPY rows and its answers back, without a Python object per key.

A table goes into COPY in binary by pgpq where it knows every type, else row by row as text through psycopg, with the same result. The
types are those of the target columns already (fit.py). Called by keys.py, key_filter.py, letters.py, outbox.py and sinks.py.

Source: PostgreSQL's array_send (ndim, flags, element type, length, lower bound, then length and bytes of each element) and the
binary COPY format (manual, "COPY", file formats), read 2025-06.
"""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pgpq
import psycopg
import pyarrow as pa
from pgpq import encoders
from pgpq import schema as pg
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.string import BytesBinaryDumper

from checkpoint.postgres.connection import Connection
from checkpoint.postgres.sql import quoted
from deadletter.store import KEYS
from dedup.core.keys import Words, by_key, find_keys
from dedup.postgres.fit import as_json

UUID, UUID_ARRAY, INT8, INT8_ARRAY, BYTEA = 2950, 2951, 20, 1016, 17
"""Type numbers of uuid, uuid[], int8, int8[], bytea. Source: pg_type.dat, the same in every version."""

COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
COPY_END = struct.pack(">h", -1)
_KEY = np.dtype([("length", ">i4"), ("key", "V16")])
_NUMBER = np.dtype([("length", ">i4"), ("number", ">i8")])
_ROW = np.dtype([("columns", ">i2"), ("key_length", ">i4"), ("key", "V16"), ("hash_length", ">i4"), ("hash", ">i8")])
HALVES = np.dtype([("high", ">u8"), ("low", ">u8")])
_KNOWN = np.dtype([("key", "V16"), ("hash", ">i8")])

Keys = npt.NDArray[Any]

ROWS_PER_WRITE = 1_024
"""Rows encoded at a time: the server takes those before them meanwhile, and not more is held twice."""


class UuidArray(bytes):
    """A uuid[] in PostgreSQL's binary form."""


class Int8Array(bytes):
    """An int8[] in PostgreSQL's binary form."""


class _UuidArrayDumper(Dumper):
    format, oid = Format.BINARY, UUID_ARRAY

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)


class _Int8ArrayDumper(_UuidArrayDumper):
    oid = INT8_ARRAY


class _HexDumper(Dumper):
    """Bytes as text, where psycopg asks libpq, which doubles each backslash if standard_conforming_strings is off in any session.

    Nothing undoes that in a parameter, an array or a COPY: they would be stored as other bytes.
    """

    oid = BYTEA

    def dump(self, obj: Any) -> bytes:
        return b"\\x" + bytes(obj).hex().encode()


def register(connection: Any) -> None:
    """Teach a connection, or what has adapters as one does, the two array types, and bytes that no setting changes."""
    connection.adapters.register_dumper(UuidArray, _UuidArrayDumper)
    connection.adapters.register_dumper(Int8Array, _Int8ArrayDumper)
    for kind in (bytes, bytearray, memoryview):
        connection.adapters.register_dumper(kind, _HexDumper)
        connection.adapters.register_dumper(kind, BytesBinaryDumper)  # the last one is psycopg's choice where both will do


def keys_of(column: pa.ChunkedArray | pa.Array) -> Keys:
    """A binary(16) column without nulls as an array of 16-byte items, without copying where it is one chunk."""
    array = column.cast(pa.binary(16))
    chunk = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return np.frombuffer(chunk.buffers()[1] or b"", dtype="V16", offset=16 * chunk.offset, count=len(chunk))


def heads_of(keys: Keys) -> npt.NDArray[np.int64]:
    """The first 31 bits of each key, as `key_head` of the database has them."""
    return (keys.view(HALVES)["high"] >> np.uint64(33)).astype(np.int64)


def order_of(keys: Keys) -> npt.NDArray[np.int64]:
    """The rows in the order in which PostgreSQL sorts uuids: by bytes."""
    halves = keys.view(HALVES)
    if bool((halves["high"][1:] > halves["high"][:-1]).all()):  # the usual case: they come sorted
        return np.arange(len(keys))
    return by_key(*_words(halves))


def uuid_array(keys: Keys) -> UuidArray:
    """16-byte items as uuid[]."""
    items = np.empty(len(keys), dtype=_KEY)
    items["length"], items["key"] = 16, keys
    return UuidArray(_array_head(len(keys), UUID) + items.tobytes())


def int8_array(numbers: npt.NDArray[np.int64]) -> Int8Array:
    """Integers as int8[]."""
    items = np.empty(len(numbers), dtype=_NUMBER)
    items["length"], items["number"] = 8, numbers
    return Int8Array(_array_head(len(numbers), INT8) + items.tobytes())


def _array_head(count: int, element: int) -> bytes:
    return struct.pack(">iii", 1, 0, element) + struct.pack(">ii", count, 1) if count else struct.pack(">iii", 0, 0, element)


def copy_rows(keys: Keys, hashes: npt.NDArray[np.int64]) -> bytes:
    """(uuid, int8) rows as the body of a binary COPY."""
    rows = np.empty(len(keys), dtype=_ROW)
    rows["columns"], rows["key_length"], rows["key"], rows["hash_length"], rows["hash"] = 2, 16, keys, 8, hashes
    return rows.tobytes()


def known_table(answer: bytes) -> pa.Table:
    """KEYS from the answer of `known_keys`: 24 bytes a row."""
    rows = np.frombuffer(answer, dtype=_KNOWN)
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(rows), [None, pa.py_buffer(rows["key"].tobytes())])
    return pa.table([keys, pa.array(rows["hash"].astype(np.int64))], schema=KEYS)


def among(keys: Keys, others: Keys) -> npt.NDArray[np.bool_]:
    """For each of these keys, whether it is among the others."""
    if not len(others):
        return np.zeros(len(keys), dtype=bool)
    ours, theirs = keys.view(HALVES), others[order_of(others)].view(HALVES)
    return find_keys(*_words(theirs), *_words(ours))[1]


def _words(halves: Keys) -> tuple[Words, Words]:
    return halves["high"].astype(np.uint64), halves["low"].astype(np.uint64)


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


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "uuid": _uuid,
    "_uuid": _uuids,
    "json": as_json,
    "jsonb": as_json,
    "interval": _microseconds,
    "_interval": _intervals,
}
