"""What a namespace keeps: hubs, their partitions, and the events in them, encoded once, when they arrive."""

from __future__ import annotations

import bisect
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.eventhubs.messages import stamped


def now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


@dataclass
class Partition:
    """Events in order; what retention took is gone from the front, what is None was never handed out (a hole)."""

    first: int = 0  # sequence number of events[0]
    events: list[bytes | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    end_offset: int = 0
    readers: list[Any] = field(default_factory=list)  # links
    taken: dict[str, int] = field(default_factory=dict)  # consumer group -> owner level of a reader that only tests know of

    @property
    def next(self) -> int:
        """Sequence number of the next event."""
        return self.first + len(self.events)

    def append(self, raw: bytes, key: Any = None, enqueued: int | None = None) -> None:
        """Keep one message."""
        at = now() if enqueued is None else enqueued
        self.events.append(stamped(raw, self.next, str(self.end_offset), at, key))
        self.offsets.append(self.end_offset)
        self.times.append(at)
        self.end_offset += max(1, len(raw))

    def expire(self, before: int) -> None:
        """Retention: nothing below this sequence number is left."""
        gone = max(0, min(before, self.next) - self.first)
        for column in (self.events, self.offsets, self.times):
            del column[:gone]
        self.first += gone

    def position(self, name: str, after: bool, value: str) -> int | str:
        """Sequence number at which a reader with this selector begins; or why there is none."""
        if name == "x-opt-sequence-number":
            wanted = int(value) + after
            last = self.next - 1
            return wanted if wanted <= self.next else f"The supplied sequence number '{value}' is invalid. The last one is '{last}'"
        if value == "@latest":
            return self.next
        if name == "x-opt-offset":
            if int(value) > self.end_offset:
                return f"The supplied offset '{value}' is invalid. The last offset in the system is '{self.end_offset}'"
            return self.first + (bisect.bisect_right if after else bisect.bisect_left)(self.offsets, int(value))
        return self.first + (bisect.bisect_right if after else bisect.bisect_left)(self.times, int(value))


@dataclass
class Hub:
    """One event hub."""

    name: str
    partitions: list[Partition]
    groups: set[str]
    created: int = field(default_factory=now)
    turn: int = 0

    @classmethod
    def new(cls, name: str, partitions: int, groups: list[str]) -> Hub:
        """An empty hub."""
        return cls(name, [Partition() for _ in range(partitions)], {group.lower() for group in ("$Default", *groups)})

    def choose(self, path: list[str], key: Any) -> Partition:
        """Where an event goes. The real service uses another hash of the key; only that it is stable is the same."""
        if len(path) == 3:
            return self.partitions[int(path[2])]
        if key is not None:
            return self.partitions[zlib.crc32(str(key).encode()) % len(self.partitions)]
        self.turn += 1
        return self.partitions[self.turn % len(self.partitions)]

    def readers(self) -> Iterator[Any]:
        """Every link that reads."""
        for partition in self.partitions:
            yield from list(partition.readers)
