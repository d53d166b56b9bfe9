"""What sends for a publisher: `dedup.eventhub.Sender`, `dedup.kafka.Sender`, or one of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dedup.publish.events import Stored


class Sender(Protocol):
    """One topic of one broker. Decides nothing: what it is given is sent as it is, in the order given."""

    @property
    def source(self) -> str:
        """Which broker, as consumers call it."""
        ...

    @property
    def topic(self) -> str:
        """The event hub or topic."""
        ...

    def partitions(self) -> int:
        """How many partitions it has now. Raises SourceUnavailable, ConfigError."""
        ...

    def largest(self) -> int:
        """Bytes of the largest event that it takes. Raises SourceUnavailable, ConfigError."""
        ...

    def send(self, partition: int, events: Sequence[Stored]) -> int:
        """Send events of one partition (GATEWAY: the broker chooses, by key), the first ones at least; returns how many the broker has.

        Raises:
            SourceUnavailable: it is not known whether the broker has them. ConfigError: it has not, and trying again does not help.

        Crash: the broker has some of them, in order, or none; the same events are sent again.
        """
        ...

    def close(self) -> None:
        """Let go of connections; the next call opens others."""
        ...
