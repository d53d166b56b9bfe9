"""The simulated world with processes that share one epoch: each claims partitions, reads on at their checkpoints, and loses them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa
from simulation import TOPIC, Copy, Event, SimFeed, SimStore, SimTransaction, World

from checkpoint.errors import Fenced, PartitionLost, StillHeld
from checkpoint.position import Partition
from dedup.consumer import Consumer
from dedup.joined import Member
from dedup.store import Claim, Head, Holder


class JoinedStore(SimStore):
    """A model store with claims: a number per partition, compared at the beginning, and by the ledger at the commit as well."""

    def __init__(self, world: JoinedWorld, pause: Callable[[str], None]) -> None:
        super().__init__(world.shared, pause, world.rng, ledger=world.ledger)
        self.world = world

    def take_epoch(self, consumer: str, holder: Holder, **_: Any) -> Head:
        """For one copy alone."""
        head = super().take_epoch(consumer, holder)
        self.world.joint = False
        return head

    def join(self, consumer: str, holder: Holder, **_: Any) -> Head:
        """The epoch that there is, if it is shared; else a new one."""
        self.on_step("join")
        if not self.world.joint:
            self.take_epoch(consumer, holder)
            self.world.joint = True
        return self.shared.head

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Raise the number. A database waits for the open batch of the partition, and ends it after a while; a ledger never waits."""
        self.on_step("claim")
        for _ in range(20):
            others = [t for t in self.shared.open if getattr(t, "claimed", None) == partition and not t.ended]
            if self.ledger or not others:
                break
            self.on_step("wait")
        for transaction in [] if self.ledger else others:
            transaction.ended = True
        if self.shared.head.epoch != epoch:
            raise Fenced
        number = self.world.claims.get(partition, 0) + 1
        self.world.claims[partition] = number
        self.shared.head = replace(self.shared.head, seq=self.shared.head.seq + 1)
        self.shared.decided.append([])
        return Claim(partition, number, run_id)

    @contextmanager
    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> Iterator[SimTransaction]:
        """Fence by epoch and by claim."""
        with super().begin(consumer, epoch) as transaction:
            if claim is not None:
                if self.world.fenced and self.world.claims.get(claim.partition) != claim.number:
                    raise PartitionLost
                transaction.claimed = claim.partition  # type: ignore[attr-defined]
                transaction.reserve = lambda keys, meanwhile=None: self._reserve(transaction, keys)  # type: ignore[method-assign]
            yield transaction

    def _reserve(self, transaction: SimTransaction, keys: pa.Table) -> pa.Table:
        """As a unique index: who wants a key that another open transaction has reserved waits for its end."""
        for key in () if self.ledger else keys["key"].to_pylist():
            transaction._wait_for(("key", key))
        return SimTransaction.reserve(transaction, keys)

    def trial(self, consumer: str, scope: str = "") -> str | None:
        """None: what a process died of is another test's."""
        return None

    def set_trial(self, consumer: str, trial: str | None, scope: str = "") -> None:
        """Forgotten."""
        self.on_step("trial")


class JoinedWorld(World):
    """Runner processes, and now and then a Spark query, which stops them all."""

    def __init__(self, seed: int, *, ledger: bool, fenced: bool = True) -> None:
        super().__init__(seed, ledger=ledger)
        self.fenced = fenced  # False: what a store without the comparison would do
        self.joint = False
        self.claims: dict[Partition, int] = {}
        self.people = False

    def start(self) -> None:
        """One more runner; sometimes a query."""
        if not self.calm and self.rng.random() < 0.15:
            super().start()
        else:
            self._go(self.runner)

    def consumer(self, copy: Copy, bad: set[int], *, repaired: bool = False) -> Consumer:
        """The same consumer over a store with claims."""
        made = super().consumer(copy, bad, repaired=repaired)
        made.store = JoinedStore(self, copy.pause)  # type: ignore[assignment]
        return made

    def runner(self, copy: Copy) -> None:
        """Claims what it likes, reads on at the checkpoint, a few batches at a time, and claims anew when it has lost a partition."""
        member = Member(self.consumer(copy, self.bad), sleep=lambda _: copy.pause())
        if not self.joint and self.shared.head.epoch and not self.calm and self.rng.random() < 0.7:
            return  # StillHeld: the query lives
        member.join()
        for partition in self.rng.sample(range(len(self.log)), len(self.log)) if not self.calm else range(len(self.log)):
            self._read(copy, member, partition)

    def _read(self, copy: Copy, member: Member, number: int) -> None:
        where = Partition(*TOPIC, number)
        while True:
            try:
                share = member.claim(where)
                point = self.shared.head.checkpoints.get(where)
                rest = [e for e in self.log[number] if point is None or e.number > point.sequence_number]
                while rest:
                    copy.pause("receive")
                    size = self.rng.randrange(1, 4)
                    batch, rest = rest[:size], rest[size:]
                    member.process(share, _Events(batch))  # type: ignore[arg-type]
                return
            except (PartitionLost, StillHeld):
                if not self.calm and self.rng.random() < 0.5:
                    return

    def run(self) -> None:
        """As the world runs, with feeds that are prepared already."""
        with mock.patch("dedup.joined.ArrowFeed", _feed), mock.patch("dedup.letter_work.PAUSE_SECONDS", 0):
            super().run()


class _Events:
    """Events in place of a table."""

    def __init__(self, events: list[Event]) -> None:
        self.events, self.num_rows = events, len(events)


def _feed(events: Any) -> SimFeed:
    return SimFeed(getattr(events, "events", []), "run", None)
