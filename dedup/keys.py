"""The idempotence key: which bytes make two deliveries the same message, in one canonical encoding.

The encoding is versioned and the same on every store, Spark version and time zone. dedup/decode/hashing.py follows it over Arrow columns;
tests/kit/key_vectors.json pins it. docs/keys.md says it in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

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
