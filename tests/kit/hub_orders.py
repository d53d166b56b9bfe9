"""Orders in a hub of the double, and what must have become of them: computed without the code under test."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kit.orders import assert_proven, letters
from kit.places import Place

SECONDS = 60.0
"""How long a test waits before it fails."""


class Orders:
    """What was sent to one hub. A tenth of the events repeat an order, some are to be rejected, some are no JSON.

    Args:
        double: of Event Hubs, under control.
        partitions: of the hub that is made.
    """

    def __init__(self, double: Any, hub: str, partitions: int = 4) -> None:
        self.double, self.hub, self.partitions = double, hub, partitions
        self._dice = random.Random(hub)
        self.bodies: list[list[bytes]] = [[] for _ in range(partitions)]
        self._made = 0

    def send(self, count: int) -> None:
        """So many more events, spread over the partitions."""
        fresh: list[list[bytes]] = [[] for _ in range(self.partitions)]
        for _ in range(count):
            fresh[self._dice.randrange(self.partitions)].append(self._body())
        for number, bodies in enumerate(fresh):
            self.double.put(self.hub, number, bodies)
            self.bodies[number] += bodies

    def _body(self) -> bytes:
        kind = self._dice.random()
        if kind < 0.01:
            return b"junk"
        again = kind < 0.1 and self._made > 0
        number = self._dice.randrange(self._made) if again else self._made
        self._made += not again
        return json.dumps({"id": f"o{number}", "amount": -1 if number % 50 == 7 else number}).encode()

    @property
    def ends(self) -> dict[int, int]:
        """Partition -> sequence number of its last event."""
        return {number: len(bodies) - 1 for number, bodies in enumerate(self.bodies) if bodies}

    def wait(self, place: Place, alive: Callable[[], None] = lambda: None) -> None:
        """Until every event is decided."""
        until(lambda: checkpoints(place) == self.ends, alive)

    def check(self, place: Place) -> None:
        """Every position has exactly one outcome, each order one row or one letter, and the tables prove themselves."""
        store = place.store()
        store.publish("shop")
        sent = [body for bodies in self.bodies for body in bodies]
        read = {o["id"]: o["amount"] for o in map(json.loads, (b for b in sent if b != b"junk"))}
        good = Counter((i, a) for i, a in read.items() if a >= 0)
        assert Counter((r["id"], r["amount"]) for r in place.read()) == good
        parked = Counter(x["kind"] for x in letters(store))
        bad = {"REJECTED": len(read) - len(good), "UNDECODABLE": sent.count(b"junk")}
        assert parked == Counter({kind: count for kind, count in bad.items() if count})
        batches = store.batches("shop")
        decided = {name: sum(batches[name].to_pylist()) for name in ("processed", "duplicate", "skipped_rows", "dead_lettered")}
        assert sum(decided.values()) == len(sent) and decided["processed"] == len(good), decided
        assert checkpoints(place) == self.ends
        assert_proven(store)


def checkpoints(place: Place, consumer: str = "shop") -> dict[int, int]:
    """Partition -> sequence number of the consumer's checkpoint."""
    return {p.partition: c.sequence_number for p, c in place.store().head(consumer).checkpoints.items()}


def until(true: Callable[[], object], alive: Callable[[], None] = lambda: None, seconds: float = SECONDS) -> None:
    """Wait until it is true; `alive` raises where that cannot come any more."""
    end = time.monotonic() + seconds
    while not true():
        alive()
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)
