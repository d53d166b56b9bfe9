"""One schedule at work: Spark queries, people, and what the moves do to them."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from checkpoint import changes
from checkpoint.errors import PositionGap, StoreRestored
from checkpoint.head import Checkpoint
from checkpoint.position import Partition
from deadletter.selection import Selection
from dedup import DeadLetters
from dedup.consumer import Consumer
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import ReprocessOptions
from kit.grouped import grouped
from simulation import clock, deeds
from simulation.instances import DONE, Boom, Instance
from simulation.log import TOPIC, Log, SimBatch
from simulation.schedule import BACK, Schedule
from simulation.shared import NAME, Shared
from simulation.spark import Places, SparkCheckpoint
from simulation.store import SimStore

REFUSED = ("StoreRestored", "PublicationStuck")
"""How a process ends that finds tables of different times."""


class World:
    """A log, a store, a number of instances, and faults."""

    def __init__(self, schedule: Schedule, tell: Callable[[str], None] | None = None) -> None:
        self.schedule, self.tell = schedule, tell
        self.log = Log(schedule.events)
        self.shared = Shared(self.log, backups=[] if any(m.deed in BACK for m in schedule.moves) else None)
        self.instances: list[Instance] = []
        self.current: Instance | None = None
        self.tick, self.starts, self.crashes, self.calm = 0, 0, 0, False
        self.taken_back = False  # tables were restored
        self.checkpoints = [SparkCheckpoint("q0", self.log, tuple(0 for _ in self.log.partitions))]

    # What happens is decided by the schedule's number and by what it is about: it stays when other things are left out of the schedule.

    def coin(self, *about: object) -> float:
        """Between 0 and 1. A digest: checksums of texts that differ in a digit, as those of two partitions do, are not independent."""
        return int.from_bytes(blake2b(repr((self.schedule.seed, *about)).encode(), digest_size=4).digest()) / 2**32

    def store(self, pause: Callable[[str], None]) -> SimStore:
        """As one process opens it."""
        return SimStore(self.shared, pause, ledger=self.schedule.ledger)

    @cached_property
    def _consumer(self) -> Consumer:
        asked = self.schedule
        options: dict[str, Any] = {"max_events_per_transaction": asked.chunk, "bisect": asked.bisect, "budget": None}
        options["max_outage"] = 300.0 if asked.patient else 0.0  # a jump of the clock is longer
        return Consumer(NAME, self.store(lambda _: None), idempotence_key="k", sequence_key="s", **grouped(**options))  # type: ignore[arg-type]

    def consumer(self, instance: Instance, *, repaired: bool = False, stream: bool = True) -> Consumer:
        """The real Consumer over the model store, with a handler that never answers the same twice."""
        asked, consumer = self.schedule, copying.copy(self._consumer)  # as it goes to another process
        consumer.store = self.store(instance.pause)  # type: ignore[assignment]
        consumer.on_failure = replace(consumer.on_failure, sleep=lambda _: instance.pause("wait for the store"))
        runs = iter(range(10**9))

        def handle(rows: pa.Table, tx: Any) -> None:
            run, places = next(runs), [*zip(rows["partition"].to_pylist(), rows["sequence_number"].to_pylist(), strict=True)]
            coins = [not repaired and self.coin(instance.number, run, at) < 0.1 for at in places]
            rest = tx.reject(rows, pa.array(coins), "coin") if any(coins) else rows
            written = [at for at, rejected in zip(places, coins, strict=True) if not rejected]
            tx.write(self._sink_rows(rest, written), "sink")
            bad = stream and asked.bisect and any(self.log.at(at).key in asked.bad for at in places)
            if bad or (not self.calm and self.coin(instance.number, run) < 0.07):
                raise Boom

        consumer._handler = handle  # registered: that it takes a frame and a tx need not be found out for each instance
        return consumer

    def _sink_rows(self, rows: pa.Table, places: Places) -> pa.Table:
        sequences = pa.array([self.log.at(at).sequence for at in places], pa.binary())
        return rows.select(["body", "partition", "sequence_number"]).append_column("sequence", sequences)

    # Queries

    def query(self, checkpoint: SparkCheckpoint, run_key: str) -> Callable[[Instance], None]:
        """A Structured Streaming query: plan a batch, call back, mark it finished; replay what was planned but not finished."""

        def body(instance: Instance) -> None:
            consumer, batch = self.consumer(instance), checkpoint.finished
            while True:
                instance.pause("plan")
                if batch >= len(checkpoint.planned) and not checkpoint.plan(batch, self.coin):
                    return
                places = checkpoint.batch(batch)
                delivered = SimBatch(self.log.rows(self._delivered(places, batch, instance)), run_key, checkpoint.query_id)
                try:
                    consumer._through_outages(consumer.job(), delivered, consumer._run_of(delivered, batch))
                except PositionGap:  # queries took turns, and positions are missing between them: a person looks, and accepts
                    if self._missing(places):
                        if self.calm:
                            self.new_checkpoint(at_ours=True)
                        raise
                    self._accept_gap(checkpoint)
                    continue
                except StoreRestored:
                    if self.calm or self.coin("accept", instance.number) < 0.5:
                        self.accept_restore()
                    raise
                instance.pause("finish")
                checkpoint.finished = max(checkpoint.finished, batch + 1)
                batch += 1
                if self.shared.restored:
                    self.note_ahead()

        return body

    def _accept_gap(self, checkpoint: SparkCheckpoint) -> None:
        """As documented: it lets any query through, so whoever has restored tables stops the others first."""
        if self.taken_back:
            self.stop([other for other in self.checkpoints if other is not checkpoint])
        self.store(lambda _: None).amend(NAME, changes.accept_gap)

    def stop(self, queries: Sequence[SparkCheckpoint]) -> None:
        """Every instance of them."""
        for instance in [c for c in self.instances if any(c.reads is checkpoint for checkpoint in queries)]:
            instance.abandon()
            self.instances.remove(instance)

    def _delivered(self, places: Places, batch: int, instance: Instance) -> Places:
        if not self.schedule.shuffled:
            return places
        twice = [at for at in places if self.coin("twice", at, batch, instance.number) < 0.3]
        return sorted([*places, *twice], key=lambda at: self.coin("order", at, batch, instance.number))

    def _missing(self, places: Places) -> bool:
        """Whether a batch would leave events out, and not only positions that no event has."""
        points = self.shared.head.checkpoints
        for part in self.log.partitions:
            number = part[0].partition
            point = points.get(Partition(*TOPIC, number), Checkpoint(-1))
            first = min((n for q, n in places if q == number), default=None)
            if any(first is not None and point.sequence_number < e.number < first and not e.held for e in part):
                return True
        return False

    def note_ahead(self) -> None:
        """What queries have finished, and the restored tables do not know."""
        for checkpoint in self.checkpoints:
            finished = {at: batch for batch in range(checkpoint.finished) for at in checkpoint.batch(batch)}
            self.shared.lost[checkpoint.query_id] = {at: batch for at, batch in finished.items() if at not in self.shared.seen}

    def accept_restore(self) -> None:
        """As documented: restore the sink to the same time, accept, and start a query at the checkpoint."""
        self.shared.put_right()
        self.store(lambda _: None).amend(NAME, changes.accept_restore)
        self.shared.lost, self.shared.restored = {}, False
        self.new_checkpoint(at_ours=True)

    def put_right(self) -> None:
        """Somebody reads the error; putting the newer sink back may show the next one, where the state was copied back as well."""
        self.shared.put_newest_back()
        if self.shared.ahead:
            self.accept_restore()
        self.shared.put_right()

    def new_checkpoint(self, *, at_ours: bool) -> None:
        """Spark's directory is thrown away; what comes late would be missed by a query that does not begin at the earliest position."""
        points = self.shared.head.checkpoints if at_ours and not any(e.held for e in self.log.events) else {}
        passed = {p.partition: point.sequence_number for p, point in points.items()}
        begin = (sum(e.number <= passed.get(e.partition, -1) for e in part) for part in self.log.partitions)
        self.checkpoints.append(SparkCheckpoint(f"q{len(self.checkpoints)}", self.log, tuple(begin)))

    # People

    def person(self, instance: Instance) -> None:
        """Somebody reprocesses everything, or gives a few letters up, with their keys or without."""
        if self.calm or self.coin("person", instance.number) < 0.7:
            asked = ReprocessOptions(by="somebody", stop_after=10**6, sleep=lambda _: instance.pause("between letters"))
            consumer = self.consumer(instance, repaired=self.calm, stream=False)
            consumer.reprocess_within = None if self.calm else clock.DAYS[5]
            reprocess(Selection(limit=None), consumer, options=asked)
            return
        chosen = sorted(self.shared.letters, key=lambda i: self.coin("chosen", i))[:2]
        letters = DeadLetters(self.store(instance.pause))  # type: ignore[arg-type]
        letters.discard(chosen, release_key=self.coin("release", instance.number) < 0.5, by="somebody", reason="given up")

    # The scheduler

    def start(self) -> None:
        """One more instance of the newest query."""
        self.go("query", self.query(self.checkpoints[-1], f"run{self.starts}"), self.checkpoints[-1])

    def go(self, what: str, body: Callable[[Instance], None], reads: object = None) -> None:
        """One more process; it is its turn."""
        self.starts += 1
        self.current = Instance(self.starts, what, body)
        self.current.reads = reads
        self.instances.append(self.current)

    def run(self) -> None:
        """Chaos for as long as there are moves, then peace until the log is done."""
        with clock.simulated(self):
            try:
                for move in self.schedule.moves:
                    while self.tick < move.tick and (self.instances or not self.checkpoints[-1].at_the_end):
                        self.turn(self.awake())
                    deeds.do(self, move)
                self._rest()
            finally:
                for instance in self.instances:
                    instance.abandon()

    def _rest(self) -> None:
        self.calm = True
        self._exhaust()
        if self.schedule.ledger:
            self.put_right()
        for body in (self.start, self._go_on, self._repair):
            body()
            self._exhaust()
        self.store(lambda _: None).publish(NAME)

    def _go_on(self) -> None:
        """Start again, as after an error that a person has looked at; whoever restored the tables knows it without an error, too."""
        if any(at not in self.shared.seen for lost in self.shared.lost.values() for at in lost):
            self.accept_restore()
            self.start()
        elif self.current is None or self.current.ended != DONE:
            self.start()

    def _repair(self) -> None:
        if self.shared.letters:
            self.go("person", self.person)

    def _exhaust(self) -> None:
        while self.instances:  # in turns: who waits for a row lock gives up after a while
            for instance in [*self.instances]:
                instance.asleep = 0
                for _ in range(20):
                    if not instance.done:
                        self.turn(instance)

    def awake(self) -> Instance | None:
        """Whose turn it is; where all sleep, one more instance starts."""
        if self.current is not None and not self.current.done and self.current.asleep <= self.tick:
            return self.current
        awake = [c for c in self.instances if c.asleep <= self.tick]
        if not awake and len(self.instances) < deeds.INSTANCES:
            self.start()
            return self.current
        self.current = awake[0] if awake else None
        return self.current

    def turn(self, instance: Instance | None, fault: BaseException | None = None) -> None:
        """One instance goes to its next step, or meets a fault where it stands."""
        self.tick += 1
        if instance is None:
            return
        before = instance.at
        instance.step(fault)
        if instance.done and instance.ended in REFUSED and (self.calm or self.coin("put right", instance.number) < 0.5):
            self.put_right()
        if instance.done:
            self.instances.remove(instance)
        if self.tell is not None:
            died = "" if fault is None else f", meets {type(fault).__name__}"
            self.tell(f"turn {self.tick}: {instance} does {before}{died}{f'; it ends: {instance.ended}' if instance.done else ''}")
