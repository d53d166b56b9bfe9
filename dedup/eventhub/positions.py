"""Where reading begins and ends, and how much of it one batch takes. Pure.

As in Spark's Kafka source: `{"hub": {"0": 23, "1": -2}}`, the start included and the end not, -2 is earliest and -1 latest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.errors import ConfigError

EARLIEST, LATEST = -2, -1

Ends = Mapping[int, int]
"""Partition -> sequence number of the next event to be read."""


def parsed(text: str, hub: str, option: str) -> int | Ends:
    """EARLIEST or LATEST for all partitions, or a position for each that is named.

    Raises:
        ConfigError: it is neither a word nor such a JSON document.
    """
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        named = {str(name).lower(): part for name, part in json.loads(text).items()}[hub.lower()]
        found = {int(number): _position(value) for number, value in named.items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        example = json.dumps({hub: {"0": 23, "1": EARLIEST}})
        raise ConfigError(f"{option} is earliest, latest or, for the hub {hub!r}, JSON such as {example}; not {text!r}.") from None
    return found


def _position(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < EARLIEST:
        raise ValueError(value)
    return value


@dataclass(frozen=True)
class Offset:
    """Where a stream stands: next positions, in one life of the hub. What Spark's checkpoint holds of it is `json`."""

    hub: str
    created: str
    ends: Ends

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Offset:
        """From what `json` gave."""
        return cls(said["hub"], said["created_at"], {int(number): int(end) for number, end in said["partitions"].items()})

    def json(self) -> dict[str, Any]:
        """As Spark keeps it."""
        return {"hub": self.hub, "created_at": self.created, "partitions": {str(number): end for number, end in sorted(self.ends.items())}}


def admitted(available: Mapping[int, int], limit: int, turn: int = 0) -> dict[int, int]:
    """How many events of each partition come into a batch of at most `limit`: equal shares, and what one does not use goes to the others.

    Args:
        available: partition -> events that are there.
        limit: events of the batch.
        turn: who gets the odd ones: another number, other partitions, so that none waits for ever behind busy ones.
    """
    shares, left, waiting = dict[int, int](), limit, sorted(available, key=lambda number: (available[number], number))
    while waiting and available[waiting[0]] <= left // len(waiting):
        shares[waiting[0]] = available[waiting[0]]
        left -= available[waiting.pop(0)]
    shares |= dict.fromkeys(waiting, left // max(1, len(waiting)))
    left -= sum(shares[number] for number in waiting)
    numbers = sorted(available)
    for number in (numbers[(turn + at) % len(numbers)] for at in range(len(numbers))):
        if left and shares[number] < available[number]:
            shares[number] += 1
            left -= 1
    return shares
