"""Messages of the outbox: their columns when a handler publishes them, one value each when they are sent, and the protocol `Outbox`.

A message is one value on its way out, because clients of brokers take one message at a time. The dispatcher and people call `Outbox`. Both
stores pass the same contract tests.
"""

from __future__ import annotations

import datetime as dt
import os
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import repeat
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import RowsRefused
from deadletter.letter import ERASED, PROPERTIES

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

Line = tuple[str, bytes]
"""Topic and key: what keeps its order."""

BYTES_PER_TURN = 64 << 20
"""Bytes of bodies that a dispatcher has in hand, about: bounds memory."""


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
    set_by: str | None  # who decided about it last: to send it again, or to give it up
    set_reason: str | None

    @property
    def is_erased(self) -> bool:
        """Whether its body, key and headers were erased."""
        return (self.set_reason or "").startswith(ERASED) and self.size is None and self.key is None


@dataclass(frozen=True)
class OutboxLag:
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


@dataclass(frozen=True)
class Asked:
    """Which messages a dispatcher can send now."""

    topics: tuple[str, ...] = ()  # empty: all
    limit: int = 10_000
    resting_topics: frozenset[str] = frozenset()  # took nothing a moment ago: their turn comes later
    resting: frozenset[Line] = frozenset()  # the same, of keys
    resting_numbers: frozenset[int] = frozenset()  # the same, of messages without a key
    blocking: bool = True  # a dead message holds back the others of its key


@dataclass(frozen=True)
class Failed:
    """A message that was not sent, and why."""

    number: int
    error_type: str
    error_message: str


@dataclass(frozen=True)
class Marks:
    """What became of the messages of one turn; those in none of these stay as they are."""

    sent: Sequence[int] = ()  # numbers
    dead: Sequence[Failed] = ()
    tried: Sequence[Failed] = ()  # to be tried again


def erased_reason(reason: str) -> str:
    """What is kept as the reason of a message that was erased: it begins with ERASED."""
    return f"{ERASED} {reason}".rstrip()


class Turn(Protocol):
    """Messages whose keys nobody else sends for as long as the turn is open. Left without `mark`, nothing of it is noted."""

    messages: Sequence[Message]  # ascending by number; none: there is nothing to do

    def mark(self, marks: Marks) -> None:
        """Note what became of them, durably."""


class Outbox(Protocol):
    """The messages of one consumer."""

    consumer: str
    parallel: ClassVar[bool]  # whether several turns can be open at once

    def turn(self, asked: Asked) -> AbstractContextManager[Turn]:
        """Take messages to send: of each key the first ones that wait, and of no key that another dispatcher has in hand."""

    def entries(self, chosen: Chosen) -> list[Entry]:
        """Messages without their bodies, ascending."""

    def message(self, number: int) -> Message | None:
        """One message with its body."""

    def lag(self, topics: Sequence[str] = ()) -> OutboxLag:
        """What is not sent yet."""

    def topics(self) -> list[str]:
        """The topics of all messages that are stored, sent ones included, ascending."""

    def retry(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Let dead messages be sent again, and those behind them after them. Returns how many were dead.

        Args:
            by: who decides that, and why (`reason`): both are kept with the messages.
        """

    def discard(self, numbers: Sequence[int], *, by: str | None = None, reason: str | None = None) -> int:
        """Give up messages that are not sent; those behind them go on. Returns how many. `by` and `reason`: as for `retry`."""

    def about(self, ids: Sequence[str], keys: Sequence[bytes]) -> list[int]:
        """Numbers of the messages with one of these ids, and of those whose ids were made of one of these incoming keys; ascending.

        A message of `tx.publish` has such an id with `order=`, or from a handler of events. Its first 32 digits are the key.
        """

    def erase(self, numbers: Sequence[int], *, by: str, reason: str) -> int:
        """Erase bodies, keys and headers of messages that were sent or discarded, and what is told of their failures.

        Returns how many. Messages that were not sent, or erased before, stay as they are. `by` and `reason`: as for `retry`.
        """

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time. Returns how many."""


@dataclass(frozen=True)
class Chosen:
    """Which messages somebody wants to see; all conditions must match."""

    states: tuple[State, ...] = ()
    topic: str | None = None
    numbers: tuple[int, ...] = ()
    limit: int | None = field(default=100)
