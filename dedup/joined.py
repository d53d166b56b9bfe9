"""A process that shares a consumer's epoch with others: each works on the partitions that it has claimed.

Promises that a batch commits only while its partition is still claimed by this process. Called by the plain runner; needs no Spark and no
broker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError, PartitionLost, StoreError
from checkpoint.position import Partition
from dedup import company, flow, outage, planning, reentry, too_large
from dedup.consumer import Consumer
from dedup.envelope import ENVELOPE
from dedup.feed import ArrowFeed
from dedup.letter_work import with_replanning
from dedup.process import this_process
from dedup.report import Report
from dedup.store import Claim, Head, Holder, Run, Topic
from dedup.trial import Trials

log = logging.getLogger("dedup")

BEATS = 6
"""Signs of life in the time after which a silent process is taken over."""


@dataclass
class Share:
    """One claimed partition, as the process that claimed it works on it."""

    claim: Claim
    trials: Trials
    told: Mapping[Topic, str] = field(default_factory=dict)  # what the broker says of the topic's present life
    life: tuple[Any, ...] = ()  # of the state when it was claimed
    reached: int = -1  # the checkpoint when it was claimed, then the one that this process made
    hold: int | None = None  # the first batch has to reach this sequence number: another process died in it, and it is told by its rows
    span: tuple[int, int] = (0, 0)  # of the batch that is being tried


@dataclass
class Member:
    """One process. `join`, then `claim` partitions and `process` their batches, one at a time; `leave` at the end.

    Args:
        sleep: waits between two tries of a batch; what it raises ends the batch without a commit.
    """

    consumer: Consumer
    sleep: Callable[[float], None] = time.sleep
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.consumer.positions is None:
            raise ConfigError("A runner goes on at the checkpoints, and positions=None keeps none. Take it out.")
        self._batches = itertools.count()
        self._care = replace(self.consumer.care, sleep=self.sleep)
        self._trials: Trials | None = None  # of the chunk in hand
        self.consumer.policy()

    @property
    def name(self) -> str:
        """Of the consumer."""
        return self.consumer.name

    def join(self) -> None:
        """Share the consumer's epoch.

        Raises:
            StillHeld: a Spark query holds it, and shows life. SettingsChanged: the state was written with other key settings.

        Crash: this process is on record or not; it counts as gone.
        """
        consumer = self.consumer
        reentry.refuse(self.consumer.identity, "A runner")
        ArrowFeed(ENVELOPE.empty_table()).check(consumer.prepare(consumer.known_head()))
        holder = Holder(*this_process(), self.run_id)
        head = consumer.store.join(
            self.name, holder, takeover_after=consumer.takeover_after, force=consumer.takeover, on_wait=lambda *what: self._tell(*what)
        )
        self.epoch = head.epoch
        log.info("%s: joined epoch %d", self.name, self.epoch)

    def _tell(self, seconds: float, who: str) -> None:
        self.sleep(0)
        log.warning("%s: waiting %.0f s for the other copy (%s) to show no life; takeover=True does not wait", self.name, seconds, who)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While the block runs this process shows life, with events or without."""
        every = max(self.consumer.takeover_after / BEATS, 0.1)
        with self.consumer.store.heartbeat(self.name, self.epoch, every, self.run_id):
            yield

    def stop(self) -> None:
        """It was asked to stop: its end from here on says nothing of the chunk in hand. Crash: the chunk becomes a suspect."""
        if (trials := self._trials) is not None:
            with contextlib.suppress(StoreError):
                trials.stop()

    def leave(self) -> None:
        """Go, so that nobody waits for this process. Crash: as if it had not been called."""
        self.consumer.store.leave(self.name, self.epoch, self.run_id)

    def claim(self, partition: Partition) -> Share:
        """Make a partition this process's own; whoever had it cannot commit any more.

        Raises:
            Fenced: somebody took the whole consumer over. StillHeld: its open batch takes long; try again later.

        Crash: the partition waits for the next claim.
        """
        store = self.consumer.store
        claim = store.claim(self.name, self.epoch, self.run_id, partition, takeover_after=self.consumer.takeover_after)
        head = store.head(self.name)
        share = Share(claim, Trials(lambda: None, lambda _: None), life=_life(head, partition), reached=_point(head, partition))
        kept = json.loads(store.trial(self.name, claim.scope) or "{}")
        if "span" in kept:  # one without is of a slice of Spark's, whose batches are others
            share.hold = kept["span"][1]
        share.trials = Trials(lambda: kept.get("trial"), lambda text: self._keep(share, text))
        return share

    def _keep(self, share: Share, trial: str | None) -> None:
        self.consumer.store.set_trial(self.name, json.dumps({"span": share.span, "trial": trial}), share.claim.scope)

    def process(self, share: Share, events: pa.Table) -> Report:
        """Make the effect of these events of one partition true, once; returns what became of them.

        Raises:
            PartitionLost: another process claimed the partition. What `Consumer.__call__` raises.

        Crash: before a chunk's commit nothing of it is true; after it, all of it is. Whoever claims the partition next reads on at its
        checkpoint.
        """
        reentry.refuse(self.consumer.identity, "A batch")
        batch, report = next(self._batches), Report()
        culprits: dict[int, set[int]] = {}
        for part in self._parts(share, events):
            what = f"{self.name} {share.claim.partition} batch {batch}"
            retrying = outage.retrying(what, self.consumer.max_outage, self._care)
            done = retrying(lambda p=part: with_replanning(lambda: self._process(share, p, batch, culprits)))
            culprits.clear()
            report.add_report(done)
        with company.sending(self.name):
            self.consumer.send_messages()
        if report.dead_lettered:
            log.warning("%s: parked %d; `dedup dead-letters groups` says why", what, report.dead_lettered)
        return report

    def _parts(self, share: Share, events: pa.Table) -> Iterator[pa.Table]:
        """The batch that a process died in comes alone."""
        if share.hold is None or not events.num_rows:
            yield events
            return
        numbers = events["sequence_number"].to_numpy()
        first, share.hold = numbers <= share.hold, None
        yield from (part for part in (events.filter(pa.array(first)), events.filter(pa.array(~first))) if part.num_rows)

    def _process(self, share: Share, events: pa.Table, batch: int, culprits: dict[int, set[int]]) -> Report:
        consumer, head = self.consumer, self.consumer.store.head(self.name)
        policy = replace(consumer.policy(), care=self._care, trials=share.trials)
        report = Report()
        with company.entered(self.name, ArrowFeed(events).materialise(consumer.prepare(head))) as material:
            index = flow.index_of(material)
            self._check(share, set(index.spans))
            run = Run(self.run_id, batch, joined=True)
            self._refuse_another_life(share, head)
            planning.guard(head, run, consumer.settings, {})  # of gaps the runner knows more than the batch
            parts = planning.chunks(index, consumer.max_events)
            if len(parts) > 1 and not policy.care.bisect:
                too_large.refuse_parts(self.name, len(index), consumer.max_events)
            for number, rows in enumerate(parts):
                known = culprits.setdefault(number, set())
                chunk = flow.Chunk(material, index[rows], replace(run, chunk=number), head, known, incarnation_ids=share.told)
                share.span = chunk.index.spans.get(share.claim.partition, (0, 0))
                with self._in_hand(share, chunk), consumer.store.begin(self.name, self.epoch, share.claim) as transaction:
                    state = flow.decide_chunk(chunk, consumer.store, transaction, policy)
                head = flow.reached(chunk, state)
                share.reached = _point(head, share.claim.partition)
                report.add(state)
        return report

    @contextmanager
    def _in_hand(self, share: Share, chunk: flow.Chunk) -> Iterator[None]:
        with company.seat(share.trials, lambda: chunk.ident, f"{self.name} {share.claim.partition}", self._care.timeout):
            self._trials = share.trials
            try:
                yield
            finally:
                self._trials = None

    def _refuse_another_life(self, share: Share, head: Head) -> None:
        """The partition goes on elsewhere than this batch: after a reset, in a new life of the topic, on an older copy of the state."""
        if _life(head, share.claim.partition) != share.life:
            raise PartitionLost(
                f"Consumer {self.name!r}: its state began anew while partition {share.claim.partition} was read. Nothing of the batch is "
                f"committed; the partition is claimed again and read from where the state says now."
            )
        if _point(head, share.claim.partition) < share.reached:
            raise PartitionLost(
                f"Consumer {self.name!r}: the state has partition {share.claim.partition} at an older position than this process made: "
                f"moved back, or the database failed over to an older copy. It is claimed again and read from where the state says."
            )

    def _check(self, share: Share, found: set[Partition]) -> None:
        if found - {share.claim.partition}:
            others = ", ".join(map(str, sorted(found - {share.claim.partition})))
            raise ConfigError(f"A batch of the claimed partition {share.claim.partition} holds events of {others}.")


def _point(head: Head, partition: Partition) -> int:
    found = head.checkpoints.get(partition)
    return -1 if found is None else found.sequence_number


def _life(head: Head, partition: Partition) -> tuple[Any, ...]:
    return head.generation, head.keyspace, head.incarnations.get((partition.source, partition.topic), 0)
