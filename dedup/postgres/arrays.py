"""Keys on the wire: sorted KEYS tables as PostgreSQL's binary arrays and COPY rows, and its answers back, all by numpy.

No Python object per key. Called by reserve.py and records.py.

Source: PostgreSQL's array_send (ndim, flags, element type, length, lower bound, then length and bytes of each element) and the
binary COPY format (manual, "COPY", file formats), read 2025-06.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from psycopg.adapt import Dumper
from psycopg.pq import Format

from dedup.sorting import Words, by_key, find_keys
from dedup.store import KEYS

UUID, UUID_ARRAY, INT8, INT8_ARRAY = 2950, 2951, 20, 1016
"""Type numbers of uuid, uuid[], int8, int8[]. Source: pg_type.dat, the same in every version."""

COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
COPY_END = struct.pack(">h", -1)
_KEY = np.dtype([("length", ">i4"), ("key", "V16")])
_NUMBER = np.dtype([("length", ">i4"), ("number", ">i8")])
_ROW = np.dtype([("columns", ">i2"), ("key_length", ">i4"), ("key", "V16"), ("hash_length", ">i4"), ("hash", ">i8")])
HALVES = np.dtype([("high", ">u8"), ("low", ">u8")])
_KNOWN = np.dtype([("key", "V16"), ("hash", ">i8")])

Keys = npt.NDArray[Any]


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


def register(connection: Any) -> None:
    """Teach a connection, or what has adapters as one does, the two array types."""
    connection.adapters.register_dumper(UuidArray, _UuidArrayDumper)
    connection.adapters.register_dumper(Int8Array, _Int8ArrayDumper)


def keys_of(column: pa.ChunkedArray | pa.Array) -> Keys:
    """A binary(16) column without nulls as an array of 16-byte items, without copying where it is one chunk."""
    array = column.cast(pa.binary(16))
    chunk = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return np.frombuffer(chunk.buffers()[1] or b"", dtype="V16", offset=16 * chunk.offset, count=len(chunk))


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
