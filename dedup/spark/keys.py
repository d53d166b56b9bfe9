"""Keys and payload hashes as Spark columns: the canonical encoding of dedup/keys.py.

Nothing here depends on the session's time zone or on ANSI mode. Called by dedup/spark/prepare.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dedup import keys

Piece = bytes | Column
"""A constant, or a binary column."""

_EPOCH = "timestamp_ntz'1970-01-01 00:00:00'"
_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType, T.NullType)


def canonical(name: str, column: Column, kind: T.DataType) -> Column:
    """The column's values as the bytes that are hashed: binary, null where null. Raises ConfigError for a type without such bytes."""
    if isinstance(kind, T.BinaryType):
        return column
    if isinstance(kind, (T.StringType, T.CharType, T.VarcharType)):
        return column.cast("binary")
    if isinstance(kind, (*_INTEGERS, T.DateType)):
        return column.cast("string").cast("binary")
    if isinstance(kind, T.TimestampType):
        return F.unix_micros(column).cast("string").cast("binary")
    if isinstance(kind, T.TimestampNTZType):
        return _naive_micros(column).cast("string").cast("binary")
    if isinstance(kind, T.DecimalType):
        # A pattern and not a cast: the cast answers 1E-7 without ANSI mode and keeps trailing zeros with it.
        pattern = "0." + "#" * kind.scale if kind.scale else "0"
        return F.call_function("format_number", column, F.lit(pattern)).cast("binary")
    raise keys.unsupported(name, kind.simpleString())


def _naive_micros(column: Column) -> Column:
    # The difference of two timestamps without zone is taken in UTC; every cast to a timestamp would take the session's zone.
    seconds = (column - F.expr(_EPOCH)).cast("interval second").cast("decimal(20, 6)")
    return (seconds * 1_000_000).cast("bigint")


def part(value: Column) -> list[Piece]:
    """One encoded part."""
    size = F.octet_length(value).cast("string").cast("binary")
    return [F.coalesce(F.concat(F.lit(b"V"), size, F.lit(b":"), value), F.lit(keys.NULL))]


def parts(values: Sequence[Column]) -> list[Piece]:
    """The encoded parts one after another."""
    return [piece for value in values for piece in part(value)]


def join(pieces: Sequence[Piece]) -> Column:
    """The pieces one after another, constants that meet made one."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and isinstance(piece, bytes) and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    columns = [F.lit(piece) if isinstance(piece, bytes) else piece for piece in merged]
    return columns[0] if len(columns) == 1 else F.concat(*columns)


def all_null(values: Sequence[Column]) -> Column:
    """Whether every part is null."""
    return reduce(lambda left, right: left & right, [value.isNull() for value in values])


def key_hash(encoded: Column) -> Column:
    """The first 16 bytes of SHA-256."""
    return F.unhex(F.substring(F.sha2(encoded, 256), 1, 2 * keys.KEY_SIZE))


def payload_hash(encoded: Column) -> Column:
    """The first 8 bytes of SHA-256 as a signed big-endian integer. Base -10 makes conv answer a signed number."""
    return F.conv(F.substring(F.sha2(encoded, 256), 1, 16), 16, -10).cast("bigint")


def text(values: Sequence[tuple[Column, bool]]) -> Column:
    """The parts for people: joined with `|`, null as nothing, bytes that are no UTF-8 in hex, without NUL, cut.

    Args:
        values: binary columns, and whether they are ASCII for sure.
    """
    shown = [F.coalesce(value.cast("string") if ascii else _readable(value), F.lit("")) for value, ascii in values]
    return F.substring(F.replace(F.concat_ws("|", *shown), F.lit("\x00"), F.lit("")), 1, keys.TEXT_SIZE)


def _readable(value: Column) -> Column:
    string = value.cast("string")
    return F.when(F.is_valid_utf8(string), string).otherwise(F.lower(F.hex(value)))


def message_id(properties: Column) -> Column:
    """The value of the first property that is named as message ids are; null where there is none."""
    named = F.filter(properties, lambda pair: pair["key"].isin(*keys.MESSAGE_ID_PROPERTIES))
    return F.get(named, 0)["value"]


def incarnation(known: Mapping[tuple[str, str], int]) -> Column:
    """The incarnation of the row's topic; 0 where none is known."""
    found = F.lit(0)
    for (source, topic), number in known.items():
        found = F.when((F.col("source") == source) & (F.col("topic") == topic), F.lit(number)).otherwise(found)
    return found
