"""Arrow rows as JSON can hold them, and back, exactly. Pure.

Bytes are base64, or hex where they are hashes, and the name says which (`body_base64`, `key_hex`). Times are ISO 8601 in UTC. Files of
letters and the output of `--json` both have this form, which belongs to the columns of letters.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

HEX = frozenset({"key", "body_sha256", "sequence"})
"""Byte columns that are hashes; all others may hold anything and are base64."""


def iso(value: dt.datetime) -> str:
    """ISO 8601 in UTC; a naive time is taken as UTC."""
    aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
    return aware.astimezone(dt.UTC).isoformat()


def json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as JSON can hold them. The names follow from the column types, so that null bytes have the same name as others."""
    schema = table.schema
    return [{_name(f): _value(f.type, f.name, row[f.name]) for f in schema} for row in table.to_pylist()]


def from_json(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """What `json_rows` was given. Names that the schema does not have are ignored, nullable ones may be missing.

    Raises:
        ValueError, TypeError, pa.ArrowInvalid: a value is not one of its column.
    """
    found = pa.Table.from_pylist([{f.name: _back(f.type, f.name, row.get(_name(f))) for f in schema} for row in rows], schema=schema)
    found.validate(full=True)
    missing = [f.name for f in schema if not f.nullable and found[f.name].null_count]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    return found


def _name(field: pa.Field) -> str:
    if not _is_bytes(field.type):
        return str(field.name)
    return f"{field.name}_{'hex' if field.name in HEX else 'base64'}"


def _value(kind: pa.DataType, name: str, value: Any) -> Any:
    if value is None:
        return None
    if _is_bytes(kind):
        return value.hex() if name in HEX else base64.b64encode(value).decode("ascii")
    if pa.types.is_struct(kind):
        # a header's name is its `key`: text; only its value is bytes
        return {_name(f): _value(f.type, f.name, value[f.name]) for f in kind}
    if _is_list(kind):
        return [_value(kind.value_type, name, v) for v in value]
    return iso(value) if isinstance(value, dt.datetime) else value


def _back(kind: pa.DataType, name: str, value: Any) -> Any:
    if value is None:
        return None
    if _is_bytes(kind):
        return bytes.fromhex(value) if name in HEX else base64.b64decode(value, validate=True)
    if pa.types.is_struct(kind):
        return {f.name: _back(f.type, f.name, value.get(_name(f))) for f in kind}
    if _is_list(kind):
        return [_back(kind.value_type, name, v) for v in value]
    return dt.datetime.fromisoformat(value) if pa.types.is_timestamp(kind) else value


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
