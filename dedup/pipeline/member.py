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
from functools import partial
from typing import Any

import pyarrow as pa

from checkpoint.errors import ConfigError, PartitionLost, StoreError
from checkpoint.head import Claim, Head, Holder, Run, Topic
from checkpoint.holders import this_process
from checkpoint.position import Partition
from deadletter import outage
from deadletter.crashes import CrashMarker
from deadletter.parked import tell_parked
from dedup import logs
from dedup.core.envelope import ENVELOPE
from dedup.pipeline import commit, company, reentry
from dedup.pipeline.batch import ArrowBatch
from dedup.pipeline.commit import Chunk, Culprits, DecidedChunk, Job
from dedup.pipeline.report import Report, tell

log = logging.getLogger("dedup")

BEATS = 6
"""Signs of life in the time after which a silent process is taken over."""


@dataclass
class Assignment:
    """One claimed partition, as the process that claimed it works on it."""

    claim: Claim
    marker: CrashMarker
    topic_ids: Mapping[Topic, str] = field(default_factory=dict)  # what the broker says of the topic's present life
    life: tuple[Any, ...] = ()  # of the state when it was claimed
    reached: int = -1  # the checkpoint when it was claimed, then the one that this process made
    hold: int | None = None  # the first batch has to reach this sequence number: another process died in it, and it is told by its rows
    span: tuple[int, int] = (0, 0)  # of the batch that is being tried

    @property
    def partition(self) -> Partition:
        """The partition that was claimed."""
        return self.claim.partition


@dataclass
class Member:
    """One process. `join`, then `claim` partitions and `process` their batches, one at a time; `leave` at the end.

    Args:
        sleep: waits between two tries of a batch; what it raises ends the batch without a commit.
    """

    job: Job
    sleep: Callable[[float], None] = time.sleep
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    epoch: int = 0

    def __post_init__(self) -> None:
        if not self.job.preparation.positions:
            raise ConfigError("A runner goes on at the checkpoints, and positions=None keeps none. Take it out.")
        policy = self.job.policy
        self.job = replace(self.job, policy=replace(policy, on_failure=replace(policy.on_failure, sleep=self.sleep)))
        self._batches = itertools.count()
        self._marker: CrashMarker | None = None  # of the chunk in hand

    @property
    def name(self) -> str:
        """Name of the consumer."""
        return self.job.name

    def join(self) -> None:
        """Share the consumer's epoch.

        Raises:
            StillHeld: a Spark query holds it, and shows life. SettingsChanged: the state was written with other key settings.

        Crash: this process is on record or not; it counts as gone.
        """
        job = self.job
        reentry.refuse(job.policy.on_failure.owner, "A runner")
        ArrowBatch(ENVELOPE.empty_table()).check(job.prepare(job.known_head()))
        holder = Holder(*this_process(), self.run_id)
        head = job.store.join(
            self.name, holder, takeover_after=job.takeover_after, force=job.takeover, on_wait=lambda *what: self._tell(*what)
        )
        self.epoch = head.epoch  # from here on it is on record, and leaves
        job.tell_retention()
        log.info("%s: joined epoch %d", self.name, self.epoch, extra={"epoch": self.epoch})

    def _tell(self, seconds: float, who: str) -> None:
        self.sleep(0)
        log.warning(
            "%s: waiting %.0f s to see whether the other instance (%s) is alive; takeover=Takeover(now=True) does not wait",
            self.name,
            seconds,
            who,
        )

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show life while the block runs, whether events come or not."""
        every = max(self.job.takeover_after / BEATS, 0.1)
        with self.job.store.heartbeat(self.name, self.epoch, every, self.run_id):
            yield

    def stop(self) -> None:
        """It was asked to stop: its end from here on says nothing of the chunk in hand. Crash: the chunk becomes a suspect."""
        if (marker := self._marker) is not None:
            with contextlib.suppress(StoreError):
                marker.stop()

    def leave(self) -> None:
        """Go, so that nobody waits for this process. Crash: as if it had not been called."""
        self.job.store.leave(self.name, self.epoch, self.run_id)

    def claim(self, partition: Partition) -> Assignment:
        """Make a partition this process's own; whoever had it cannot commit any more.

        Raises:
            Fenced: somebody took the whole consumer over. StillHeld: its open batch takes long; try again later.

        Crash: the partition waits for the next claim.
        """
        store = self.job.store
        claim = store.claim(self.name, self.epoch, self.run_id, partition, takeover_after=self.job.takeover_after)
        head = store.head(self.name)
        assignment = Assignment(
            claim, CrashMarker(lambda: None, lambda _: None), life=_life(head, partition), reached=_point(head, partition)
        )
        kept = _of_life(json.loads(store.crash_marker(self.name, claim.scope) or "{}"), assignment.life)
        if "span" in kept:  # one without is of a slice of Spark's, whose batches are others
            assignment.hold = kept["span"][1]
        assignment.marker = CrashMarker(lambda: kept.get("marker"), lambda text: self._keep(assignment, text))
        return assignment

    def _keep(self, assignment: Assignment, marker: str | None) -> None:
        note = {"span": assignment.span, "life": assignment.life, "marker": marker}
        self.job.store.set_crash_marker(self.name, json.dumps(note), assignment.claim.scope)

    def process(self, assignment: Assignment, events: pa.Table) -> Report:
        """Make the effect of these events of one partition true, once; returns what became of them.

        Raises:
            PartitionLost: another process claimed the partition. What `Consumer.__call__` raises.

        Crash: before a chunk's commit nothing of it is true; after it, all of it is. Whoever claims the partition next reads on at its
        checkpoint.
        """
        reentry.refuse(self.job.policy.on_failure.owner, "A batch")
        number = next(self._batches)
        with logs.about(consumer=self.name, batch=number, epoch=self.epoch):
            return self._process_all(assignment, events, number)

    def _process_all(self, assignment: Assignment, events: pa.Table, number: int) -> Report:
        job, report, started = self.job, Report(), time.monotonic()
        what = f"{self.name} {assignment.partition} batch {number}"
        for part in self._parts(assignment, events):
            retrying = outage.retrying(what, job.max_outage, job.policy.on_failure)
            trying = partial(self._process, assignment, ArrowBatch(part), number, Culprits())
            report += retrying(lambda trying=trying: outage.with_replanning(trying))
        with company.sending(self.name):
            job.send_messages()
        job.after_batch()
        if report.dead_lettered:
            log.warning("%s: parked %d; `dedup dead-letter group` says why", what, report.dead_lettered)
        points, seconds = {assignment.partition: assignment.reached}, time.monotonic() - started
        report = replace(report, consumer=self.name, batch_id=number, seconds=seconds, checkpoints=points)
        tell(job.on_batch, report)
        return report

    def _parts(self, assignment: Assignment, events: pa.Table) -> Iterator[pa.Table]:
        """The batch that a process died in comes alone."""
        if assignment.hold is None or not events.num_rows:
            yield events
            return
        numbers = events["sequence_number"].to_numpy()
        first, assignment.hold = numbers <= assignment.hold, None
        yield from (part for part in (events.filter(pa.array(first)), events.filter(pa.array(~first))) if part.num_rows)

    def _process(self, assignment: Assignment, batch: ArrowBatch, number: int, culprits: Culprits) -> Report:
        head, report, run = replace(self.job.store.head(self.name), epoch=self.epoch), Report(), Run(self.run_id, number, joined=True)
        job = replace(self.job, policy=replace(self.job.policy, marker=assignment.marker))
        with company.entered(self.name, batch.evaluate(job.prepare(head))) as rows:
            index = commit.index_of(rows)
            self._check(assignment, set(index.spans))
            self._refuse_another_life(assignment, head)
            commit.guard(job, head, run, {})  # of gaps the runner knows more than the batch
            parts = commit.parts_of(job, rows, index, assignment.topic_ids)
            for done in commit.committed(parts, run, head, partial(self._commit, job, assignment), culprits):
                assignment.reached = _point(done.head, assignment.partition)
                report += Report.of(done.state)
                tell_parked(job.policy.on_failure.on_parked, done.parked)
        return report

    def _commit(self, job: Job, assignment: Assignment, chunk: Chunk) -> DecidedChunk:
        assignment.span = chunk.index.spans.get(assignment.partition, (0, 0))
        self._marker = assignment.marker
        try:
            return commit.commit_chunk(chunk, job, assignment.claim)
        finally:
            self._marker = None

    def _refuse_another_life(self, assignment: Assignment, head: Head) -> None:
        """The partition goes on elsewhere than this batch: after a reset, in a new life of the topic, on an older copy of the state."""
        if _life(head, assignment.partition) != assignment.life:
            raise PartitionLost(
                f"Consumer {self.name!r}: its state began anew while partition {assignment.partition} was read. Nothing of the batch "
                f"is committed; the partition is claimed again and read from where the state says now."
            )
        if _point(head, assignment.partition) < assignment.reached:
            raise PartitionLost(
                f"Consumer {self.name!r}: the state has partition {assignment.partition} at an older position than this process made: "
                f"moved back, or the database failed over to an older copy. It is claimed again and read from where the state says."
            )

    def _check(self, assignment: Assignment, found: set[Partition]) -> None:
        if found - {assignment.partition}:
            others = ", ".join(map(str, sorted(found - {assignment.partition})))
            raise ConfigError(f"A batch of the claimed partition {assignment.partition} holds events of {others}.")


def _point(head: Head, partition: Partition) -> int:
    found = head.checkpoints.get(partition)
    return -1 if found is None else found.sequence_number


FIRST_LIFE = [0, 0, 0]
"""What `_life` says until a person begins the state or the topic anew."""


def _of_life(kept: dict[str, Any], life: tuple[Any, ...]) -> dict[str, Any]:
    """The note of what a process was trying, if that was in this life: positions of another one may never come, or not for long."""
    # Older versions noted no life. Such a note is surely of this one only where there was no other. Elsewhere it is dropped: that costs
    # the count of deaths in one batch, and a hold by mistake would stop the partition for good.
    return kept if kept.get("life", FIRST_LIFE) == list(life) else {}


def _life(head: Head, partition: Partition) -> tuple[Any, ...]:
    return head.generation, head.keyspace, head.incarnations.get((partition.source, partition.topic), 0)
