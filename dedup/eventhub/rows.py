"""Events of azure-eventhub as Arrow: the columns of the envelope, one row per event.

Names and texts arrive as bytes where another client sent text: both become the same here, before anything is hashed. Imports no
driver: it looks at attributes that `EventData` has.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dedup.envelope import ENVELOPE

SCHEMA = pa.schema([field for field in ENVELOPE if field.name != "part"])
"""source, topic, partition, sequence_number, offset, enqueued_time, key, body, properties."""

NUMBER, OFFSET, ENQUEUED, KEY = b"x-opt-sequence-number", b"x-opt-offset", b"x-opt-enqueued-time", b"x-opt-partition-key"

SYSTEM = (
    ("message_id", "message-id"),
    ("user_id", "user-id"),
    ("to", "to"),
    ("subject", "subject"),
    ("reply_to", "reply-to"),
    ("correlation_id", "correlation-id"),
    ("content_type", "content-type"),
    ("content_encoding", "content-encoding"),
    ("absolute_expiry_time", "absolute-expiry-time"),
    ("creation_time", "creation-time"),
    ("group_id", "group-id"),
    ("group_sequence", "group-sequence"),
    ("reply_to_group_id", "reply-to-group-id"),
)
"""Properties that AMQP itself defines: attribute, and the name under which they come among the properties, before the application's."""

Pair = tuple[str, bytes | None]


def batch(events: Sequence[Any], source: str, topic: str, partition: int) -> pa.RecordBatch:
    """Events of one partition, in the order given, with the columns of SCHEMA.

    Args:
        events: `EventData` as received; a body of AMQP values or sequences comes as JSON.
        source: host name of the namespace.
        topic: name of the event hub.
        partition: its number.
    """
    count = len(events)
    messages = [event.raw_amqp_message for event in events]
    marks = [message.annotations for message in messages]
    columns = [
        pa.repeat(pa.scalar(source, pa.string()), count),
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array([mark[NUMBER] for mark in marks], pa.int64()),
        pa.array([_text(mark.get(OFFSET)) for mark in marks], pa.string()),
        pa.array([mark.get(ENQUEUED) for mark in marks], pa.int64())
        .cast(pa.timestamp("ms", tz="UTC"))
        .cast(SCHEMA.field("enqueued_time").type),
        pa.array([_bytes(mark.get(KEY)) for mark in marks], pa.binary()),
        pa.array([body(event) for event in events], pa.binary()),
        pa.array([properties(message) for message in messages], SCHEMA.field("properties").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def table(events: Sequence[Any], source: str, topic: str, partition: int) -> pa.Table:
    """As `batch`, as a table."""
    return pa.Table.from_batches([batch(events, source, topic, partition)], SCHEMA)


def numbers(events: Sequence[Any]) -> list[int]:
    """Their sequence numbers."""
    return [event.raw_amqp_message.annotations[NUMBER] for event in events]


def body(event: Any) -> bytes | None:
    """The event's bytes; of an AMQP value or sequence its JSON, None of an AMQP null."""
    given = event.body
    kind = getattr(event.body_type, "value", "data")
    if kind == "data":
        pieces = list(given)
        whole = pieces[0] if len(pieces) == 1 else b"".join(piece or b"" for piece in pieces)
        return whole or b""  # the client gives None for no bytes
    return _bytes(list(given) if kind == "sequence" else given)


def properties(message: Any) -> list[Pair]:
    """AMQP's own properties that are there, then the application's, as names and bytes."""
    own, given = message.properties, message.application_properties
    pairs = (
        [(name, _bytes(value)) for attribute, name in SYSTEM if (value := getattr(own, attribute)) is not None] if own is not None else []
    )
    return [*pairs, *((_name(name), _bytes(value)) for name, value in given.items())] if given else pairs


def _name(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _text(value: Any) -> str | None:
    return None if value is None else _name(value)


def _bytes(value: Any) -> bytes | None:
    """One spelling for each value, whatever type it was sent as: numbers as Python writes them, true and false, JSON for what is nested."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int | float | uuid.UUID):
        return str(value).encode()
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {_name(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
