"""The world with processes that share one epoch: each claims partitions, reads on at their checkpoints, and loses them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from checkpoint.errors import Fenced, PartitionLost, StillHeld
from checkpoint.head import Claim, Head, Holder
from checkpoint.position import Partition
from dedup.pipeline.member import Assignment, Member
from simulation.instances import Instance
from simulation.log import TOPIC, Event, Picked
from simulation.schedule import Schedule
from simulation.store import SimStore
from simulation.transaction import SimTransaction
from simulation.world import World

OPEN_BATCH = 20
"""Turns for which a claim waits for the open batch of its partition."""


class JoinedStore(SimStore):
    """With claims: a number per partition, compared at the beginning, and by the ledger at the commit as well."""

    def __init__(self, world: JoinedWorld, pause: Callable[[str], None]) -> None:
        super().__init__(world.shared, pause, ledger=world.schedule.ledger)
        self.world = world

    def take_epoch(self, consumer: str, holder: Holder, **_: Any) -> Head:
        """For one instance alone."""
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
        self.require_in_step()
        for _ in range(OPEN_BATCH):
            if self.ledger or not self._open(partition):
                break
            self.on_step("wait")
        for transaction in [] if self.ledger else self._open(partition):
            transaction.ended = True
        if self.shared.head.epoch != epoch:
            raise Fenced
        self.world.claims[partition] = number = self.world.claims.get(partition, 0) + 1
        self.shared.next(self.shared.head, [])
        return Claim(partition, number, run_id)

    def _open(self, partition: Partition) -> list[SimTransaction]:
        return [t for t in self.shared.open if t.claimed and t.claimed[0] == partition and not t.ended]

    @contextmanager
    def begin(self, consumer: str, epoch: int, claim: Claim | None = None) -> Iterator[SimTransaction]:
        """Fence by epoch and by claim."""
        with super().begin(consumer, epoch, claim) as transaction:
            if claim is not None:
                if self.world.claims.get(claim.partition) != claim.number and not self.world.careless:
                    raise PartitionLost
                transaction.claimed, transaction.claims = (claim.partition, claim.number), self.world.claims
            yield transaction


class JoinedWorld(World):
    """Runner processes, and now and then a Spark query, which stops them all."""

    def __init__(self, schedule: Schedule, tell: Callable[[str], None] | None = None, *, careless: bool = False) -> None:
        super().__init__(schedule, tell)
        self.careless = careless  # what a store without the comparison of claims would do
        self.joint = False
        self.claims: dict[Partition, int] = {}

    def store(self, pause: Callable[[str], None]) -> SimStore:
        """One with claims."""
        return JoinedStore(self, pause)

    def start(self) -> None:
        """One more runner; sometimes a query."""
        if not self.calm and self.coin("start", self.starts) < 0.15:
            super().start()
        else:
            self.go("runner", self.runner)

    def runner(self, instance: Instance) -> None:
        """Claims what it likes, reads on at the checkpoint, a few batches at a time, and claims anew when it has lost a partition."""
        if not self.joint and self.shared.head.epoch and not self.calm and self.coin("held", instance.number) < 0.7:
            return  # StillHeld: the query lives
        consumer = self.consumer(instance)
        member = Member(consumer.job(), sleep=lambda _: instance.pause("wait for the store"), run_id=f"runner{instance.number}")
        member.join()
        for part in sorted(self.log.partitions, key=lambda part: self.coin("claims", instance.number, part[0].partition)):
            self._read(instance, member, part)

    def _read(self, instance: Instance, member: Member, part: Sequence[Event]) -> None:
        while True:
            try:
                return self._read_on(instance, member, member.claim(Partition(*TOPIC, part[0].partition)), part)
            except (PartitionLost, StillHeld):
                if not self.calm and self.coin("again", instance.number, self.tick) < 0.5:
                    return

    def _read_on(self, instance: Instance, member: Member, assignment: Assignment, part: Sequence[Event]) -> None:
        point = self.shared.head.checkpoints.get(assignment.claim.partition)
        rest = [e for e in part if point is None or e.number > point.sequence_number]
        while rest:
            instance.pause("receive")
            size = 1 + int(self.coin(instance.number, rest[0].at) * 3)
            batch, rest = rest[:size], rest[size:]
            member.process(assignment, Picked(self.log.rows([e.at for e in batch]).table))  # type: ignore[arg-type]
