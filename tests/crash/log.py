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

from kit.orders import batch, event

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
        """The row of `balances` that it belongs to: the greatest mark stays there."""
        return f"b{zlib.crc32((self.key or '').encode()) % 5}"

    @property
    def seat(self) -> str:
        """The row of `latest` that it belongs to, one of its partition: the last event stays there, or takes it away."""
        return f"{self.partition}-{self.number % 3}"

    @property
    def mark(self) -> int:
        """What its merged rows hold: greater for later positions, and of one event only."""
        return PARTITIONS * self.number + self.partition + 1

    @property
    def leaves(self) -> bool:
        """Whether it takes the row of `latest` away."""
        return self.mark % 4 == 0

    def delivered(self) -> dict[str, Any]:
        """As a source delivers it."""
        body = b"junk" if self.junk else json.dumps({"id": self.key, "amount": self.amount}).encode()
        return event(2 * self.number, self.key, partition=self.partition, body=body)


def fact(seed: int, partition: int, number: int) -> Fact:
    """About a third repeats a key of any partition, or of its own; a few have none, or a body that does not decode."""
    dice = random.Random(f"{seed}/{partition}/{number}")
    key, kind = f"k{partition if apart(seed) else ''}-{dice.randrange(2 * (number + 1))}", dice.random()
    return Fact(partition, number, None if kind < 0.05 else key, kind > 0.95)


def apart(seed: int) -> bool:
    """Whether no key is in two partitions: where slices commit side by side, either one may be first."""
    return seed % 4 == 2


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
    merged: Counter[tuple[str, int]]  # of `balances`
    latest: Counter[tuple[str, int]]

    def difference(self, other: Outcome) -> tuple[list[Any], list[Any]]:
        """What this has and the other has not, and the reverse."""
        pairs = [(self.rows, other.rows), (self.held, other.held), (self.merged, other.merged), (self.latest, other.latest)]
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
    latest: dict[str, int | None] = {}
    for one in written:
        merged[one.account] = max(merged.get(one.account, 0), one.mark)
        latest[one.seat] = None if one.leaves else one.mark
    return Outcome(
        Counter((str(one.key), one.amount) for one in written),
        Counter(parked & set(first)),
        sum(one.junk or one.key is None for one in every),
        Counter(merged.items()),
        Counter((seat, mark) for seat, mark in latest.items() if mark is not None),
    )
