"""Arrow types as PostgreSQL would call them: for error messages that name the ALTER TABLE to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as at


def plain(arrow: pa.DataType) -> pa.DataType:
    """The type of the values themselves, below dictionaries and extensions."""
    if at.is_dictionary(arrow):
        return plain(arrow.value_type)
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def is_text(arrow: pa.DataType) -> bool:
    """Any of the string types."""
    return bool(at.is_string(arrow) or at.is_large_string(arrow) or at.is_string_view(arrow))


def is_bytes(arrow: pa.DataType) -> bool:
    """Any of the binary types."""
    return bool(at.is_binary(arrow) or at.is_large_binary(arrow) or at.is_fixed_size_binary(arrow) or at.is_binary_view(arrow))


_NAMES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (at.is_boolean, "boolean"),
    (at.is_int8, "smallint"),
    (at.is_int16, "smallint"),
    (at.is_uint8, "smallint"),
    (at.is_int32, "integer"),
    (at.is_uint16, "integer"),
    (at.is_uint64, "numeric(20)"),
    (at.is_integer, "bigint"),
    (at.is_float64, "double precision"),
    (at.is_floating, "real"),
    (at.is_date, "date"),
    (at.is_time, "time"),
    (at.is_duration, "interval"),
    (is_bytes, "bytea"),
    (at.is_nested, "jsonb"),
)


def type_for(arrow: pa.DataType) -> str:
    """The PostgreSQL type that takes every value of an Arrow type."""
    arrow = plain(arrow)
    if at.is_decimal(arrow):
        return f"numeric({arrow.precision},{arrow.scale})"
    if at.is_timestamp(arrow):
        return "timestamptz" if arrow.tz else "timestamp"
    if at.is_list(arrow) and not at.is_nested(arrow.value_type):
        return type_for(arrow.value_type) + "[]"
    return next((name for is_it, name in _NAMES if is_it(arrow)), "text")


def named(arrow: pa.DataType) -> str:
    """Both names of a type."""
    return f"{arrow} ({type_for(arrow)})"
