"""The idempotence key: which bytes make two deliveries the same message, in one canonical encoding; and keys sorted and searched.

The encoding is versioned and the same on every store, Spark version and time zone. dedup/decode/hashing.py follows it over Arrow columns;
tests/kit/key_vectors.json pins it. docs/explanation/keys.md says it in words. A key has 128 bits, here as two columns of 64 bits. Pure.
Called by the preparation of rows, by index.py and by both stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError

VERSION = 1
"""Of the encoding. Another one makes every key another key, so it is part of the settings a consumer's state is written with."""

MAGIC = b"dedup%d" % VERSION
"""First bytes of everything that is hashed into a key."""

USER_KEY = b"K"
"""Before the parts of a key that the user chose, the message id included."""

POSITION_KEY = b"P"
"""Before the parts of a key made of the position, so that it never equals one that the user chose."""

NULL = b"N"
"""A part that is null; distinct from the empty string, which is `V0:`."""

KEY_SIZE = 16
"""Bytes of SHA-256 kept as the key."""

TEXT_SIZE = 200
"""Characters kept of the readable key."""

INTERNAL = ("_key", "_key_text", "_payload_hash", "_undecodable")
"""The columns that `prepare` adds behind all others, in this order."""

SEQUENCE = ("_sequence", "_sequence_text")
"""The columns that `prepare` adds behind those where a sequence key is set: binary(16) and readable; null where every part is null."""

LETTER = "_letter"
"""The column that says which dead letter an event comes from, where letters are reprocessed."""

LOG_TIME = "_log_time"
"""The column in front of INTERNAL: whether `enqueued_time` is when the broker took the event, and not what its producer said."""

HIDDEN = (LOG_TIME, *INTERNAL, *SEQUENCE, LETTER)
"""What no handler sees."""

SEQUENCE_KEY = b"S"
"""Before the parts of a sequence key."""

SEQUENCE_PLACE = ("source", "topic", "partition")
"""Order is kept within these: they are hashed into every sequence key."""

MESSAGE_ID = "message_id"
"""The name that means the producer's message id, where no column has it."""

MESSAGE_ID_PROPERTIES = ("message_id", "message-id")
"""Names of the property that carries the message id: AMQP's, and how Kafka headers spell it."""

Scope = Literal["topic", "consumer"]
NullKey = Literal["dead_letter", "position"]

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

_KEY = pa.binary(16)

TIES = 8
"""Where more than one row in so many shares the first half of its key with another one, all rows are sorted by both halves at once."""


def encode(value: bytes | None) -> bytes:
    """One part: `N` for null, else `V`, the length in decimal, `:` and the bytes. No two lists of parts encode alike."""
    return NULL if value is None else b"V%d:%s" % (len(value), value)


def encode_parts(parts: Iterable[bytes | None]) -> bytes:
    """The parts one after another."""
    return b"".join(map(encode, parts))


def prefix(consumer: str, keyspace: int) -> bytes:
    """The bytes that every key of this consumer's life begins with."""
    return MAGIC + encode_parts([consumer.encode(), b"%d" % keyspace])


def unsupported(name: str, kind: str) -> ConfigError:
    """The error for a key or payload part whose type has no one canonical form."""
    if kind.startswith(("float", "double", "half")):
        advice = f"floating-point numbers are not one value everywhere; cast it: cast({name} as decimal(18, 6)) or cast({name} as string)"
    else:
        advice = f"name the fields that count, such as {name}.id, or make one string of it"
    return ConfigError(f"{name!r} is of type {kind} and cannot be part of an idempotence key or payload hash: {advice}.")


@dataclass(frozen=True)
class KeySettings:
    """What a consumer takes as the idempotence key and as the payload. State written with other settings is refused."""

    columns: tuple[str, ...] = ()
    """Parts of the key: columns, nested fields (`data.id`) or, on Spark, SQL expressions. Empty: the message id, else the position."""

    payload: tuple[str, ...] = ()
    """Parts of the payload hash. Empty: the body."""

    scope: Scope = "topic"
    """A key counts within (consumer, source, topic), or within the whole consumer."""

    null_key: NullKey = "dead_letter"
    """An event whose key is null is a dead letter, or falls back to its position. Never are all nulls one message."""

    sequence: tuple[str, ...] = ()
    """Parts of the sequence key: events of one partition that have the same one keep their order, also behind a dead letter."""

    def __post_init__(self) -> None:
        for name, value, allowed in (("key_scope", self.scope, get_args(Scope)), ("null_key", self.null_key, get_args(NullKey))):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")
        for name, parts in (("idempotence_key", self.columns), ("payload", self.payload), ("sequence_key", self.sequence)):
            if not isinstance(parts, tuple) or not all(isinstance(p, str) and p.strip() for p in parts):
                raise ConfigError(f"{name} must be a tuple of column names, not {parts!r}.")

    @property
    def scope_columns(self) -> tuple[str, ...]:
        """Envelope columns that are hashed into every key, after the prefix."""
        return ("source", "topic") if self.scope == "topic" else ()

    @property
    def position_columns(self) -> tuple[str, ...]:
        """Parts of a position key; `incarnation` is that of the row's topic."""
        place = () if self.scope == "topic" else ("source", "topic")
        return (*place, "incarnation", "partition", "sequence_number", "part")

    @property
    def internal(self) -> tuple[str, ...]:
        """All columns that `prepare` adds behind those of the event."""
        return (LOG_TIME, *INTERNAL, *(SEQUENCE if self.sequence else ()))

    @property
    def falls_back(self) -> bool:
        """Whether an event without a key of its own is known by its position."""
        return not self.columns or self.null_key == "position"

    def canonical(self) -> dict[str, str]:
        """These settings as stored with the consumer's state; equal settings give equal mappings in every version of this library."""
        return dict(self._canonical)

    @cached_property
    def _canonical(self) -> dict[str, str]:
        return {
            "key_encoding": str(VERSION),
            "key_columns": json.dumps(self.columns),
            "key_payload": json.dumps(self.payload),
            "key_scope": self.scope,
            "null_key": self.null_key,
            **({"sequence_key": json.dumps(self.sequence)} if self.sequence else {}),
        }


def key_words(column: pa.ChunkedArray | pa.Array) -> tuple[Words, Words]:
    """The two halves of 16-byte keys as big-endian numbers, so that they sort as the bytes do; nulls are zero.

    Raises ValueError for keys of another length.
    """
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    try:
        flat = flat if flat.type == _KEY else flat.cast(pa.binary()).cast(_KEY)
    except pa.ArrowInvalid as error:
        raise ValueError(f"keys must have 16 bytes each: {error}") from error
    flat = pc.fill_null(flat, bytes(16)) if flat.null_count else flat
    words = np.frombuffer(flat.buffers()[1] or b"", dtype=">u8")[flat.offset * 2 : (flat.offset + len(flat)) * 2]
    return words[0::2].astype(np.uint64), words[1::2].astype(np.uint64)


def key_bytes(high: Words, low: Words) -> pa.Array:
    """The inverse of `key_words`: binary(16)."""
    words = np.empty(2 * len(high), dtype=">u8")
    words[0::2], words[1::2] = high, low
    return pa.FixedSizeBinaryArray.from_buffers(_KEY, len(high), [None, pa.py_buffer(words.tobytes())])


def by_key(high: Words, low: Words) -> Places:
    """Rows in ascending order of their keys' halves, those of one key in their own order.

    As `np.lexsort((low, high))`. Halves of hashes are next to never equal but for duplicates: one sort of one column does nearly all,
    in a tenth of the time (numpy 2.4 with AVX-512; 500,000 keys).
    """
    order = np.argsort(high)
    ordered = high[order]
    equal = ordered[1:] == ordered[:-1]
    if (count := np.count_nonzero(equal)) > len(order) // TIES:
        return np.lexsort((low, high))
    if count:
        tied = np.zeros(len(order), dtype=bool)
        tied[1:] = equal
        tied[:-1] |= equal
        rows = order[tied]
        order[tied] = rows[np.lexsort((rows, low[rows], high[rows]))]
    return order


def find_keys(high: Words, low: Words, wanted_high: Words, wanted_low: Words) -> tuple[Places, Bools]:
    """Where each wanted key stands, or would be inserted, among sorted keys, and whether it is there."""
    at = np.searchsorted(high, wanted_high, "left")
    if not len(high):
        return at, np.zeros(len(at), dtype=bool)
    further = np.flatnonzero(_equal(high, at, wanted_high) & (low[np.minimum(at, len(low) - 1)] < wanted_low))
    if len(further):
        at[further] = _among_equals(high, low, at[further], wanted_high[further], wanted_low[further])
    return at, _equal(high, at, wanted_high) & _equal(low, at, wanted_low)


def _equal(words: Words, at: Places, wanted: Words) -> Bools:
    found: Bools = (at < len(words)) & (words[np.minimum(at, len(words) - 1)] == wanted)
    return found


def _among_equals(high: Words, low: Words, left: Places, wanted_high: Words, wanted_low: Words) -> Places:
    """A binary search on the low half, all keys at once: equal high halves are rare for real hashes, but must be right for any."""
    right = np.searchsorted(high, wanted_high, "right")
    while (open_ := left < right).any():
        middle = (left + right) >> 1
        below = np.zeros(len(left), dtype=bool)
        below[open_] = low[middle[open_]] < wanted_low[open_]
        left = np.where(open_ & below, middle + 1, left)
        right = np.where(open_ & ~below, middle, right)
    return left
