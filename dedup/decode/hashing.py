"""Keys and payload hashes: the canonical encoding of dedup/core/keys.py over Arrow columns.

Everything but SHA-256 itself is columnar, and that too where DataFusion is installed. Called by dedup/decode/prepare.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import reduce
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from dedup.core import keys
from dedup.decode import datafusion

_BYTES = pa.large_binary()
_NONE = pa.scalar(b"", _BYTES)


def canonical(name: str, column: pa.Array) -> pa.Array:
    """The column's values as the bytes that are hashed: large_binary, null where null. Raises ConfigError for a type without such bytes."""
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return canonical(name, column.dictionary_decode())
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return column.cast(pa.large_string()).cast(_BYTES)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return column.cast(_BYTES)
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind):
        return column.cast(pa.large_string()).cast(_BYTES)
    if types.is_date32(kind):
        return _date(column)
    if types.is_timestamp(kind):
        return _timestamp(column)
    if types.is_decimal(kind) and kind.precision <= 38 and kind.scale >= 0:
        return _decimal(column)
    raise keys.unsupported(name, str(kind))


def _date(column: pa.Array) -> pa.Array:
    text = column.cast(pa.large_string())
    far = pc.greater(column.cast(pa.int32()), 2932896)  # 9999-12-31: later years have a sign in ISO 8601
    plus, nothing = pa.scalar("+", pa.large_string()), pa.scalar("", pa.large_string())
    return pc.if_else(far, pc.binary_join_element_wise(plus, text, nothing), text).cast(_BYTES)


def _timestamp(column: pa.Array) -> pa.Array:
    """Microseconds: as a decimal where a column of nanoseconds has a part of one, and of any size where it counts seconds."""
    try:
        return column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64()).cast(pa.large_string()).cast(_BYTES)
    except pa.ArrowInvalid:  # some values are finer, or too large: nothing of them may be cut
        whole = column.cast(pa.int64()).cast(pa.decimal128(19, 0))
        if column.type.unit != "ns":
            factor = pa.scalar(Decimal(10**6 if column.type.unit == "s" else 1000), pa.decimal128(7, 0))
            return _decimal(pc.multiply(whole, factor).cast(pa.decimal128(38, 0)))
        return _decimal(pa.Array.from_buffers(pa.decimal128(19, 3), len(whole), whole.buffers(), offset=whole.offset))


def _decimal(column: pa.Array) -> pa.Array:
    scale = column.type.scale
    wide = column.cast(pa.decimal128(38, scale))
    # The same 16-byte integers read as scale 0: the cast of a decimal with a scale to text may answer 1E-7.
    whole = pa.Array.from_buffers(pa.decimal128(38, 0), len(wide), wide.buffers(), offset=wide.offset).cast(pa.large_string())
    if scale == 0:
        return whole.cast(_BYTES)
    sign = pc.if_else(pc.starts_with(whole, "-"), "-", "").cast(pa.large_string())
    digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    fraction = pc.utf8_rtrim(pc.utf8_slice_codeunits(digits, -scale, None), "0")
    point = pc.if_else(pc.equal(fraction, ""), "", ".").cast(pa.large_string())
    empty = pa.scalar("", pa.large_string())
    return pc.binary_join_element_wise(sign, pc.utf8_slice_codeunits(digits, 0, -scale), point, fraction, empty).cast(_BYTES)


Piece: TypeAlias = bytes | pa.Array | pa.Scalar
"""A constant, or values row by row (large_binary)."""


def encode(parts: Sequence[pa.Array | pa.Scalar], before: Sequence[Piece] = ()) -> pa.Array:
    """The pieces `before`, then each part encoded, row by row. Parts are large_binary."""
    return join([*before, *pieces(parts)])


def pieces(parts: Sequence[pa.Array | pa.Scalar]) -> list[Piece]:
    """The encoded parts, to be joined; what is large is copied once, by `join`."""
    return [piece for part in parts for piece in _part(part)]


def join(pieces: Sequence[Piece]) -> pa.Array:
    """The pieces one after another, row by row."""
    return pc.binary_join_element_wise(*(pa.scalar(p, _BYTES) if isinstance(p, bytes) else p for p in pieces), _NONE)


def _part(value: pa.Array | pa.Scalar) -> list[Piece]:
    encoded = [b"V", pc.binary_length(value).cast(pa.large_string()).cast(_BYTES), b":", value]
    if isinstance(value, pa.Array) and not value.null_count:
        return encoded
    return [pc.coalesce(join(encoded), pa.scalar(keys.NULL, _BYTES))]


def all_null(parts: Sequence[pa.Array]) -> pa.Array:
    """Rows of which every part is null."""
    return reduce(pc.and_, [p.is_null() for p in parts])


def sha256(column: pa.Array) -> npt.NDArray[np.uint8]:
    """The digests, one row of 32 bytes for each value."""
    if not column.null_count and (hashed := datafusion.digests(column)) is not None:
        return np.frombuffer(hashed, np.uint8).reshape(-1, 32)
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64, len(column) + 1, column.offset * 8).tolist() if len(column) else [0]
    view = memoryview(data) if data is not None else memoryview(b"")
    digests = b"".join(hashlib.sha256(view[a:b]).digest() for a, b in pairwise(ends))
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def key_hash(encoded: pa.Array, absent: pa.Array) -> pa.Array:
    """The first 16 bytes of SHA-256, null where the key is absent."""
    cut = sha256(encoded)[:, : keys.KEY_SIZE].tobytes()
    hashed = pa.Array.from_buffers(pa.binary(keys.KEY_SIZE), len(encoded), [None, pa.py_buffer(cut)])
    return pc.if_else(absent, None, hashed.cast(pa.binary()))


def payload_hash(encoded: pa.Array) -> pa.Array:
    """The first 8 bytes of SHA-256 as a signed big-endian integer."""
    numbers = np.ascontiguousarray(sha256(encoded)[:, :8]).view(">i8").ravel()
    return pa.array(numbers.astype(np.int64), pa.int64())


def text(parts: Sequence[pa.Array]) -> pa.Array:
    """The parts for people: joined with `|`, null as nothing, bytes that are no UTF-8 in hex, without NUL, cut."""
    shown = [_shown(pc.fill_null(part, b"")) for part in parts]
    joined = pc.binary_join_element_wise(*shown, pa.scalar("|", pa.large_string()))
    return pc.utf8_slice_codeunits(pc.replace_substring(joined, "\x00", ""), 0, keys.TEXT_SIZE).cast(pa.string())


def _shown(part: pa.Array) -> pa.Array:
    try:
        return part.cast(pa.large_string())
    except pa.ArrowInvalid:  # some value is no UTF-8
        return pa.array([_readable(value) for value in part.to_pylist()], pa.large_string())


def _readable(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def message_id(properties: pa.Array) -> pa.Array:
    """The value of each row's first property that is named as message ids are; null where there is none."""
    return first_property(properties, keys.MESSAGE_ID_PROPERTIES)


def first_property(properties: pa.Array, names: Sequence[str]) -> pa.Array:
    """The value of each row's first property that has one of these names; null where there is none."""
    entries = properties.flatten()
    named = pc.is_in(pc.struct_field(entries, "key"), pa.array(names)).to_numpy(zero_copy_only=False)
    parents = pc.list_parent_indices(properties).to_numpy()
    rows, first = np.unique(parents[named], return_index=True)
    take = np.full(len(properties), -1, np.int64)
    take[rows] = np.flatnonzero(named)[first]
    values = pc.struct_field(entries, "value").cast(_BYTES)
    return values.take(pa.array(take, mask=take < 0))


def incarnations(source: pa.Array, topic: pa.Array, known: Mapping[tuple[str, str], int]) -> pa.Array:
    """The incarnation of each row's topic; 0 where none is known."""
    found = pa.array(np.zeros(len(source), np.int64))
    for (one_source, one_topic), number in known.items():
        here = pc.and_(pc.equal(source, one_source), pc.equal(topic, one_topic))
        found = pc.if_else(pc.fill_null(here, False), pa.scalar(number, pa.int64()), found)
    return found


def field(column: pa.Array, path: Sequence[str], name: str) -> pa.Array:
    """The nested field at this path, null where a parent is null. Raises ConfigError where there is no such field."""
    for step in path:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(step) < 0:
            raise ConfigError(f"{name!r} names a field that is not there: no {step!r} in {column.type}.")
        column = pc.struct_field(column, step)
    return column
