"""Events of azure-eventhub as Arrow: the columns of the envelope, one row per event.

Names and texts can arrive as bytes or as text, depending on the client that sent them. Both become the same here, before anything is
hashed. This module imports no driver: it reads attributes of `EventData`.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.core.envelope import ENVELOPE

SCHEMA = pa.schema([field for field in ENVELOPE if field.name != "part"])
"""source, topic, partition, sequence_number, offset, enqueued_time, key, body, properties."""

NONE = pa.RecordBatch.from_pylist([], SCHEMA)
"""No events."""

Numbers: TypeAlias = npt.NDArray[np.int64]

_PAIRS = SCHEMA.field("properties").type

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

_NAMES = [name for _, name in SYSTEM]
_values_of = attrgetter(*(attribute for attribute, _ in SYSTEM))
_NOTHING = (None,) * len(SYSTEM)


def batch(events: Sequence[Any], source: str, topic: str, partition: int) -> pa.RecordBatch:
    """Return events of one partition in the order given, with the columns of SCHEMA.

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
        _texts([mark.get(OFFSET) for mark in marks]),
        pa.array([mark.get(ENQUEUED) for mark in marks], pa.int64())
        .cast(pa.timestamp("ms", tz="UTC"))
        .cast(SCHEMA.field("enqueued_time").type),
        _binaries([mark.get(KEY) for mark in marks]),
        pa.array([body(event) for event in events], pa.binary()),
        _properties(messages),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def table(events: Sequence[Any], source: str, topic: str, partition: int) -> pa.Table:
    """Return what `batch` returns, as a table."""
    return pa.Table.from_batches([batch(events, source, topic, partition)], SCHEMA)


def numbers(events: pa.RecordBatch) -> Numbers:
    """Return the sequence numbers of rows of SCHEMA."""
    found: Numbers = events.column("sequence_number").to_numpy()
    return found


def body(event: Any) -> bytes | None:
    """Return the bytes of the event: of an AMQP value or sequence its JSON, of an AMQP null None."""
    message = event.raw_amqp_message
    given, kind = message.body, message.body_type
    if kind == "data":
        try:
            return b"".join(given)
        except TypeError:  # the client gives None for no bytes
            return b"".join(piece or b"" for piece in message.body)
    return _bytes(list(given) if kind == "sequence" else given)


def _properties(messages: Sequence[Any]) -> pa.ListArray:
    """AMQP's own properties that are there, then the application's, as names and bytes."""
    found = [_NOTHING if (own := message.properties) is None else _values_of(own) for message in messages]
    there = [(name, column) for name, column in zip(_NAMES, zip(*found, strict=True), strict=False) if column.count(None) < len(column)]
    rows = zip(*(column for _, column in there), strict=True) if there else repeat(())
    names: list[Any] = []
    values: list[Any] = []
    ends, own_names = [0], [name for name, _ in there]
    for message, row in zip(messages, rows, strict=False):
        for name, value in zip(own_names, row, strict=True):
            if value is not None:
                names.append(name)
                values.append(value)
        if given := message.application_properties:
            names += given
            values += given.values()
        ends.append(len(names))
    pairs = pa.StructArray.from_arrays([_texts(names), _binaries(values)], fields=list(_PAIRS.value_type))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs, type=_PAIRS)


def _texts(values: list[Any]) -> pa.Array:
    """Texts, many at once where they are what the client mostly gives: bytes of UTF-8, or text."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except (pa.ArrowException, TypeError):
        return pa.array([None if value is None else _name(value) for value in values], pa.string())


def _binaries(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, pa.binary())
    except (pa.ArrowException, TypeError):
        return pa.array([_bytes(value) for value in values], pa.binary())


def _name(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


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
