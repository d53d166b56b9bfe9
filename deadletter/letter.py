"""What a dead letter is: its kinds, its statuses, its columns, its id and the fingerprint of its error.

A letter needs a position and bytes, not a decoded message: what cannot be decoded must still be parkable.
Called by the planning code (which makes letters) and both stores (which keep them). Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

PROPERTIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""Headers as brokers have them: ordered, names may repeat, values are bytes."""

LETTERS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),  # letter_id(): the same position parks under the same id; without one, a decision
        pa.field("consumer", pa.string(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("sequence_number", pa.int64(), nullable=False),
        pa.field("part", pa.int64(), nullable=False),
        pa.field("offset", pa.string()),  # opaque, as the broker gave it
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("event_key", pa.binary()),  # the broker's partition key
        pa.field("key", pa.binary(16)),  # hash of the idempotence key; null where there is none
        pa.field("holds_key", pa.bool_(), nullable=False),
        pa.field("idempotence_key", pa.string()),  # readable, cut to 1,000 characters
        pa.field("payload_hash", pa.int64()),
        pa.field("body", pa.binary()),  # exact bytes; the first 64 kB for TOO_LARGE
        pa.field("body_size", pa.int64()),  # bytes of the whole body; null for a null body
        pa.field("body_sha256", pa.binary()),
        pa.field("properties", PROPERTIES),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("stack", pa.string()),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("first_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("last_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("sequence_key", pa.string()),  # readable, cut to 1,000 characters
        pa.field("sequence", pa.binary(16)),  # hash of consumer, position's partition and sequence key; null: no order to keep
        pa.field("blocked_by", pa.string()),  # the letter right before it in its sequence, while that is open or blocked
        pa.field("extras", pa.binary()),  # the input's other columns as an Arrow IPC stream of one row; null where there are none
    ]
)
"""One row per letter, as it is parked. Stores add `duplicates`: how many later duplicates of a held key were dropped."""

HISTORY = pa.schema(
    [
        pa.field("letter_id", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("action", pa.string(), nullable=False),  # Action
        pa.field("by", pa.string()),  # who; null for the stream itself
        pa.field("reason", pa.string()),  # what that person said
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("stack", pa.string()),
        pa.field("body", pa.binary()),  # what an edit replaced
        pa.field("key", pa.binary(16)),  # what an edit replaced
        pa.field("idempotence_key", pa.string()),  # what an edit replaced
        pa.field("reserved", pa.int64(), nullable=False),  # keys that this reserved (+) or freed (-) beyond those of its batch
    ]
)
"""What happened to letters, appended and never overwritten, but to erase what it tells of an event (`Erase`).

A letter parked at its first failure gets its first row when it changes.
"""

SEQUENCES = pa.schema(
    [
        pa.field("sequence", pa.binary(16), nullable=False),
        pa.field("letter", pa.string(), nullable=False),  # id of its last letter that is open or blocked
        pa.field("kind", pa.string(), nullable=False),  # of that letter
    ]
)
"""Blocked sequences."""

GROUPS = pa.schema(
    [
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("letters", pa.int64(), nullable=False),
        pa.field("first_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("last_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("example", pa.string(), nullable=False),  # id of the letter that failed last
        pa.field("reason", pa.string(), nullable=False),  # of the example
    ]
)
"""Dead letters of one consumer or several, by fingerprint and kind."""


class Kind(StrEnum):
    """Why an event was parked."""

    HANDLER_ERROR = "HANDLER_ERROR"  # the handler raised
    REJECTED = "REJECTED"  # the handler said no
    UNDECODABLE = "UNDECODABLE"  # the body is not null and does not decode
    NO_KEY = "NO_KEY"  # every part of the idempotence key is null
    KEY_CONFLICT = "KEY_CONFLICT"  # known key, another payload
    TOO_LARGE = "TOO_LARGE"  # body above max_body: digest and first bytes only
    CRASHED = "CRASHED"  # it killed the process
    UNSENT = "UNSENT"  # no event, but a message of the outbox that cannot be sent


class Status(StrEnum):
    """Where a letter stands. OPEN and BLOCKED hold the key, DISCARDED too unless released."""

    OPEN = "OPEN"
    BLOCKED = "BLOCKED"
    REPROCESSED = "REPROCESSED"
    DUPLICATE = "DUPLICATE"
    DISCARDED = "DISCARDED"
    LOST = "LOST"


HOLDS_NO_KEY = frozenset({Kind.UNDECODABLE, Kind.NO_KEY, Kind.KEY_CONFLICT})
"""Kinds whose letters hold no key: there is none, or another event has it."""


class Action(StrEnum):
    """What happened to a letter, or was done to it."""

    FAILED = "FAILED"  # an attempt failed: the first ones before it was parked, or a reprocess
    REPROCESSED = "REPROCESSED"  # the handler took it
    DUPLICATE = "DUPLICATE"  # its key turned out to be decided elsewhere
    DISCARDED = "DISCARDED"
    RELEASED = "RELEASED"  # its key is free again
    REOPENED = "REOPENED"
    EDITED = "EDITED"
    RESERVED = "RESERVED"  # it holds the key of its edited body, and goes on to wait behind another letter of its sequence
    LOST = "LOST"  # neither kept nor in the log any more
    REPLAYED = "REPLAYED"  # a processed position was repeated and failed
    FORGOTTEN = "FORGOTTEN"  # what it held of its event was erased


ERASED = "(erased by dedup consumer forget)"
"""The reason of a letter whose contents were erased, and what the rows of its history say in place of theirs."""

CONTENTS = (
    "event_key", "idempotence_key", "body", "body_size", "body_sha256", "properties", "error_message", "stack", "sequence_key", "extras",
)  # fmt: skip
"""Columns of LETTERS, beside `reason`, that hold or may quote what the event said. Erased, they are null."""

PAST_CONTENTS = ("error_message", "stack", "body", "idempotence_key")
"""The same of HISTORY. Hashes of keys stay: they say which reservations are the letter's."""


def extras_of(columns: pa.Table) -> bytes:
    """One row of an event's other columns as a letter keeps them in `extras`: an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as writer:
        writer.write_table(columns)
    return bytes(sink.getvalue())


def is_erased(letters: pa.Table) -> pa.ChunkedArray:
    """For each letter whether its contents were erased: no handler may run it, and nobody can open it again."""
    return pc.equal(letters["reason"], ERASED)


def letter_id(*position: object) -> str:
    """32 hex digits from (consumer, generation, source, topic, incarnation, partition, sequence_number, part)."""
    return hashlib.sha256(_joined(position)).hexdigest()[:32]


def _joined(values: Iterable[object]) -> bytes:
    return "\x1f".join(f"{len(str(v))}:{v}" for v in values).encode("utf-8", "surrogatepass")


class LetterIds:
    """`letter_id` for many letters that have the beginning of their position in common."""

    def __init__(self, *beginning: object) -> None:
        self._hash = hashlib.sha256(_joined(beginning))

    def of_each(self, numbers: Iterable[int], parts: Iterable[int]) -> list[str]:
        """letter_id(*beginning, number, part) of each pair."""
        copy, ids = self._hash.copy, []
        for number, part in zip(numbers, parts, strict=True):
            hashed = copy()
            hashed.update(b"\x1f%d:%d\x1f%d:%d" % (len(str(number)), number, len(str(part)), part))
            ids.append(hashed.hexdigest()[:32])
        return ids


def fingerprint(kind: str, message: str, frame: str = "") -> str:
    """16 hex digits, equal for errors of one kind, place and wording; numbers, ids and quotations in the message are ignored."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\b[0-9a-fA-F-]{8,}\b|\b\w*\d\w*", "?", message)
    return hashlib.sha256(f"{kind}\x1f{frame}\x1f{words}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def table_of(rows: Sequence[Mapping[str, Any]], fields: pa.StructType) -> pa.Table:
    """A table of these rows; what a row does not name is null. `Table.from_pylist` takes several times as long for few rows."""
    return pa.Table.from_struct_array(pa.array(rows, fields))
