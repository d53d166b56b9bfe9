"""Events in three forms: as users give them, as they are stored, and as they are sent. A resend is the same message.

A publisher sends through a `Sender`: `dedup.eventhub.Sender`, or one of your own. This module has pure values. The publisher, its state
and the senders use it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkpoint.errors import ConfigError
from dedup.core.keys import MESSAGE_ID_PROPERTIES, encode

GROUP, RUN, LEVEL, SEQUENCE, KEY = "dedup_group", "dedup_run", "dedup_owner_level", "dedup_sequence", "dedup_key"
RESERVED = (GROUP, RUN, LEVEL, SEQUENCE, KEY, *MESSAGE_ID_PROPERTIES)
"""Properties that every published event has; users cannot give them. The message id is a field of AMQP, and a header in Kafka."""

GATEWAY = -1
"""In place of a partition: the broker chooses it, by the event's key."""

LONGEST_ID = 512
"""Characters of an id or a key."""

LARGEST = 2**63 - 1
"""A whole number that is a property is sent as 64 bits."""

Property = str | int | float | bool


@dataclass(frozen=True)
class OutgoingEvent:
    """One event to be published.

    Raises:
        ConfigError: the event could not be sent a second time as the same event; the message says why.
    """

    body: bytes
    key: str | None = None
    """Events with the same key go to the same partition, in the order in which they are published."""
    partition: int | None = None
    """Its partition, where you choose it yourself."""
    properties: Mapping[str, Property] = field(default_factory=dict)
    content_type: str | None = None
    id: str | None = None
    """What makes it the same event wherever it is published again. None: it is another event each time."""

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes):
            raise ConfigError(f"The body of an event is bytes, not {type(self.body).__name__}: encode it, always in the same way.")
        for name in ("id", "key", "content_type"):
            check_text(name, getattr(self, name))
        if self.partition is not None and (self.partition < 0 or self.key is not None):
            raise ConfigError("Give an event a key or a partition (0 or higher), not both.")
        for name, value in self.properties.items():
            _check_property(name, value)


def check_text(name: str, value: str | None) -> None:
    """Raise ConfigError for a text that PostgreSQL or AMQP cannot hold."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or "\0" in value):
        raise ConfigError(f"The {name} of an event is a text of 1 to {LONGEST_ID} characters without NUL, not {value!r:.80}.")


def _check_property(name: str, value: object) -> None:
    if not isinstance(name, str) or name in RESERVED:
        raise ConfigError(f"The property {name!r} of an event is reserved: dedup sets {', '.join(RESERVED)}. Give the message id as id=.")
    if not isinstance(value, Property):
        raise ConfigError(f"The property {name!r} of an event is a {type(value).__name__}; give text, a number or a bool.")
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        raise ConfigError(f"The property {name!r} of an event does not fit into 64 bits, as whole numbers are sent; give it as text.")


@dataclass(frozen=True)
class Stored:
    """One event as it is sent, the first time and every time."""

    partition: int  # or GATEWAY
    sequence: int  # from 1, without holes within (producer group, partition)
    message_id: str
    key: str | None
    content_type: str | None
    properties: str  # JSON of everything but the message id
    body: bytes

    @property
    def size(self) -> int:
        """An estimate of its bytes on the wire; rather too large than too small."""
        return len(self.body) + 4 * (len(self.properties) + len(self.message_id) + len(self.key or "") + len(self.content_type or "")) + 512

    @property
    def named(self) -> Mapping[str, Property]:
        """Its properties."""
        found: dict[str, Property] = json.loads(self.properties)
        return found


@dataclass(frozen=True)
class Owner:
    """One opening of a producer group. It tells events of this opening from those of all others, also in a copy of the state."""

    id: int  # of the group in the state
    destination: int
    group: str
    run: str  # random, 64 bits in hex
    level: int  # owner level
    partitions: int  # over which keys are spread


def stored(owner: Owner, event: OutgoingEvent, partition: int, sequence: int) -> Stored:
    """Return the event with its number, its message id and the properties of dedup."""
    ours: dict[str, Property] = {GROUP: owner.group, RUN: owner.run, LEVEL: owner.level, SEQUENCE: sequence}
    ours |= {KEY: event.key} if event.key is not None else {}
    message_id = event.id if event.id is not None else f"{owner.group}/{owner.run}/{partition}/{sequence}"
    try:
        properties = json.dumps({**event.properties, **ours}, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ConfigError("A property of an event is not a finite number.") from None
    return Stored(partition, sequence, message_id, event.key, event.content_type, properties, event.body)


def payload_hash(body: bytes) -> int:
    """Return the 64-bit hash of the body that consumers compute, too (docs/explanation/keys.md)."""
    return int.from_bytes(hashlib.sha256(encode(body)).digest()[:8], "big", signed=True)


def spread(key: str, partitions: int) -> int:
    """Return the partition of a key: the first 8 bytes of its SHA-256, as a number, modulo the count of partitions."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % partitions


def pages(events: Iterator[OutgoingEvent], most: int, most_bytes: int) -> Iterator[Sequence[OutgoingEvent]]:
    """Yield pages of events in their order, each of at most so many events and bytes. It reads one page ahead at most."""
    page: list[OutgoingEvent] = []
    size = 0
    for event in events:
        if page and (len(page) >= most or size + len(event.body) > most_bytes):
            yield page
            page, size = [], 0
        page.append(event)
        size += len(event.body)
    if page:
        yield page


class Sender(Protocol):
    """One topic of one broker. It sends events unchanged and in the order given.

    A sender may have an attribute `longest_key`: the most characters of a key by which the broker chooses the partition.
    """

    @property
    def source(self) -> str:
        """The broker's name, as consumers have it in `source`."""
        ...

    @property
    def topic(self) -> str:
        """The event hub or topic."""
        ...

    def partitions(self) -> int:
        """Return how many partitions the topic has. Raises SourceUnavailable, ConfigError."""
        ...

    def largest(self) -> int:
        """Return the largest size of an event in bytes. Raises SourceUnavailable, ConfigError."""
        ...

    def send(self, partition: int, events: Sequence[Stored]) -> int:
        """Send the first events of a list to one partition (GATEWAY: the broker chooses it by key). Return how many the broker has.

        Raises:
            SourceUnavailable: it is not known whether the broker has them. ConfigError: the broker refuses them, and a retry does not help.

        Crash: the broker has some of them, in order, or none; the same events are sent again.
        """
        ...

    def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        ...
