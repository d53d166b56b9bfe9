"""What a message is on its way into the outbox (columns) and out of it (one value each, because brokers' clients take one at a time)."""

from __future__ import annotations

import datetime as dt
import os
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsRefused
from deadletter.letter import PROPERTIES

LANES = 64
"""Buckets of destination keys. A dispatcher locks whole buckets, so that one key is never in two hands."""

MESSAGES = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("body", pa.binary()),
        pa.field("headers", PROPERTIES),
        pa.field("lane", pa.int16(), nullable=False),
    ]
)
"""One row per message of one topic, in the order in which they are to be sent."""

ID_HEADER = "message-id"
"""The Kafka header that carries the id: what a consumer of dedup takes as the message id by default."""


class State(IntEnum):
    """What became of a message."""

    WAITING = 0
    SENT = 1
    DEAD = 2  # it cannot be sent: a person decides
    BEHIND = 3  # waits behind a dead one of its key
    DISCARDED = 4
    FLYING = 5  # handed to a Kafka transaction whose outcome is not known yet


class Message(NamedTuple):
    """One message as it is sent."""

    number: int  # its place in the outbox: ascending per key
    topic: str
    key: bytes | None  # None: no order is kept
    id: str  # the same however often it is sent
    body: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    attempts: int = 0  # that failed

    @property
    def line(self) -> tuple[str, bytes] | None:
        """What it keeps its order with: messages of the same topic and key."""
        return None if self.key is None else (self.topic, self.key)


@dataclass(frozen=True)
class Entry:
    """A message and what became of it, without its body: for people."""

    number: int
    topic: str
    key: bytes | None
    id: str
    state: State
    attempts: int
    size: int | None  # bytes of the body
    created_at: dt.datetime
    changed_at: dt.datetime | None
    error_type: str | None
    error_message: str | None


@dataclass(frozen=True)
class Lag:
    """What is not sent yet."""

    waiting: int
    oldest: dt.datetime | None  # when the oldest of the waiting, behind and dead ones was stored
    dead: int
    behind: int


@dataclass(frozen=True)
class Messages:
    """Messages of one topic for a store."""

    topic: str
    rows: pa.Table  # MESSAGES
    derived: bool  # their ids are made of the incoming key: the same if the events are handled once more

    def __post_init__(self) -> None:
        """Raises RowsRefused for ids and names of headers that no store and broker keeps as they are."""
        if not self.derived:
            _require_text(self.topic, "id", self.rows["id"])
        if self.rows["headers"].null_count < self.rows.num_rows:
            _require_text(self.topic, "header's name", pc.struct_field(pc.list_flatten(self.rows["headers"]), "key"), empty=True)

    def renamed(self) -> Messages:
        """With random ids: messages of their own, whatever was sent before."""
        ids = random_ids(self.rows.num_rows)
        return replace(self, rows=self.rows.set_column(0, MESSAGES.field("id"), ids), derived=False)


def _require_text(topic: str, what: str, texts: pa.ChunkedArray, *, empty: bool = False) -> None:
    """Kafka's client cuts text at a NUL, and PostgreSQL takes none; no id at all would make all messages one."""
    if pc.any(pc.match_substring(texts, "\0")).as_py() or (not empty and pc.any(pc.equal(pc.binary_length(texts), 0)).as_py()):
        raise RowsRefused(f"tx.publish to {topic!r}: {what} {'with a NUL' if empty else 'that is empty, or with a NUL,'} cannot be sent.")


def random_ids(count: int) -> pa.Array:
    """Distinct ids of 128 random bits, as text in hex."""
    return hex_text(os.urandom(16 * count), 16)


def hex_text(data: bytes, width: int) -> pa.Array:
    """Every `width` bytes as text in hex, without a Python object per row."""
    digits = pa.py_buffer(data.hex().encode())
    count = len(data) // width
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(2 * width), count, [None, digits]).cast(pa.binary()).cast(pa.string())


def lanes(topic: str, keys: pa.Array) -> pa.Array:
    """The lane of each destination key; messages without one are spread, for they keep no order."""
    found = keys.dictionary_encode()
    start = zlib.crc32(topic.encode())
    of_key = np.fromiter(map(zlib.crc32, [*found.dictionary.to_pylist(), b""], repeat(start)), dtype=np.int64) % LANES
    missing = found.indices.is_null().to_numpy(zero_copy_only=False)
    chosen = of_key[found.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)]
    return pa.array(np.where(missing, np.arange(len(keys)) % LANES, chosen).astype(np.int16))
