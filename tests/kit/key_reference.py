"""The canonical encoding once more, small and per value, from keys.md with hashlib alone: what both implementations must equal."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dedup.core.keys import KeySettings

_EPOCH = dt.datetime(1970, 1, 1)


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type of a type name in the vectors."""
    if name.startswith("decimal"):
        return pa.decimal128(*map(int, name[8:-1].split(",")))
    fixed = {"date": pa.date32(), "timestamp": pa.timestamp("us", tz="UTC"), "timestamp_ntz": pa.timestamp("us"), "boolean": pa.bool_()}
    return fixed.get(name) or pa.type_for_alias(name)


def value_bytes(value: Any) -> bytes | None:
    """One value as the bytes that are hashed."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, dt.datetime):
        naive = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return str((naive - _EPOCH) // dt.timedelta(microseconds=1)).encode()
    if isinstance(value, dt.date):
        return value.isoformat().encode()
    if isinstance(value, Decimal):
        text = f"{value:f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return b"0" if text in ("-0", "") else text.encode()
    return str(value).encode()


def encoded(*values: bytes | None) -> bytes:
    """Parts, each with its length in front."""
    return b"".join(b"N" if value is None else b"V" + str(len(value)).encode() + b":" + value for value in values)


def key(consumer: str, settings: KeySettings, row: Mapping[str, Any], keyspace: int = 0, incarnation: int = 0) -> bytes | None:
    """The key of one event; `row` has the envelope and the key's columns, and no column called message_id means the property."""
    start = b"dedup1" + encoded(consumer.encode(), str(keyspace).encode())
    place = [row["source"].encode(), row["topic"].encode()]
    if settings.scope == "topic":
        start += encoded(*place)
    parts = [_part(row, name) for name in settings.columns or ("message_id",)]
    if any(part is not None for part in parts):
        return hashlib.sha256(start + b"K" + encoded(*parts)).digest()[:16]
    if settings.columns and settings.null_key == "dead_letter":
        return None
    numbers = [str(n).encode() for n in (incarnation, row["partition"], row["sequence_number"], row["part"])]
    return hashlib.sha256(start + b"P" + encoded(*([] if settings.scope == "topic" else place), *numbers)).digest()[:16]


def payload_hash(settings: KeySettings, row: Mapping[str, Any]) -> int:
    """The payload hash of one event."""
    parts = [_part(row, name) for name in settings.payload or ("body",)]
    if all(part is None for part in parts):
        parts = [_part(row, "body")]
    return int.from_bytes(hashlib.sha256(encoded(*parts)).digest()[:8], "big", signed=True)


def _part(row: Mapping[str, Any], name: str) -> bytes | None:
    if name in row or name != "message_id":
        return value_bytes(row[name])
    return _first_message_id(row.get("properties") or ())


def _first_message_id(properties: Sequence[Mapping[str, Any]]) -> bytes | None:
    return next((pair["value"] for pair in properties if pair["key"] in ("message_id", "message-id")), None)
