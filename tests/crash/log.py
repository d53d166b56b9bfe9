"""The log that the processes read, and what has to become of it: computed from the seed alone, without the code under test."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from orders import batch, event

PARTITIONS, BATCH = 2, 4
"""Partitions, and events of each in one batch."""


@dataclass(frozen=True)
class Fact:
    """One event."""

    partition: int
    number: int
    key: str | None
    junk: bool

    @property
    def amount(self) -> int:
        """Of its order; the handler rejects negative ones."""
        return zlib.crc32((self.key or "").encode()) % 9 - 2

    @property
    def account(self) -> str:
        """The row of the merged sink that it belongs to."""
        return f"b{zlib.crc32((self.key or '').encode()) % 5}"

    def delivered(self) -> dict[str, Any]:
        """As a source delivers it."""
        body = b"junk" if self.junk else json.dumps({"id": self.key, "amount": self.amount}).encode()
        return event(2 * self.number, self.key, partition=self.partition, body=body)


def fact(seed: int, partition: int, number: int) -> Fact:
    """About a third repeats a key of any partition; a few have none, or a body that does not decode."""
    dice = random.Random(f"{seed}/{partition}/{number}")
    key, kind = f"k{dice.randrange(2 * (number + 1))}", dice.random()
    return Fact(partition, number, None if kind < 0.05 else key, kind > 0.95)


def facts(seed: int, number: int) -> Iterator[Fact]:
    """Of batch `number`, in position order."""
    for partition in range(PARTITIONS):
        yield from (fact(seed, partition, n) for n in range(number * BATCH, (number + 1) * BATCH))


def planned(seed: int, number: int) -> pa.Table:
    """Batch `number`. It begins a little before its own first event: a broker delivers again."""
    again = random.Random(f"{seed}/again/{number}")
    rows = []
    for partition in range(PARTITIONS):
        first = max(0, number * BATCH - again.choice([0, 0, 1, 3]))
        rows += [fact(seed, partition, n).delivered() for n in range(first, (number + 1) * BATCH)]
    return batch(*rows)


@dataclass(frozen=True)
class Outcome:
    """What is in the tables, or has to be: one entry per row, letter and merged row."""

    rows: Counter[tuple[str, int]]  # of the sinks that are appended to
    held: Counter[str]  # keys of letters that hold theirs
    keyless: int  # letters that hold none
    merged: Counter[tuple[str, int]]

    def difference(self, other: Outcome) -> tuple[list[Any], list[Any]]:
        """What this has and the other has not, and the reverse."""
        pairs = [(self.rows, other.rows), (self.held, other.held), (self.merged, other.merged)]
        pairs.append((Counter(keyless=self.keyless), Counter(keyless=other.keyless)))
        return [x for a, b in pairs for x in (a - b).elements()], [x for a, b in pairs for x in (b - a).elements()]


def expected(seed: int, batches: int, coins: Iterable[str]) -> Outcome:
    """After so many batches. `coins` are keys that the handler, which may answer differently each time, happened to reject."""
    every = [f for n in range(batches) for f in facts(seed, n)]
    first: dict[str, Fact] = {}
    for one in every:
        if one.key is not None and not one.junk:
            first.setdefault(one.key, one)
    parked = {key for key, one in first.items() if one.amount < 0} | set(coins)
    written = [one for key, one in first.items() if key not in parked]
    merged: dict[str, int] = {}
    for one in written:
        merged[one.account] = max(merged.get(one.account, 0), mark(one))
    return Outcome(
        Counter((str(one.key), one.amount) for one in written),
        Counter(parked & set(first)),
        sum(one.junk or one.key is None for one in every),
        Counter(merged.items()),
    )


def mark(one: Fact) -> int:
    """What the merged row of this event holds: greater for later positions, and of one event only."""
    return PARTITIONS * one.number + one.partition + 1
