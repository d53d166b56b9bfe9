"""Handlers of single events on Spark: the driver plans a batch, its tasks make the slices true, the driver adds up what they say.

Called by the consumer for each batch. The tasks' side is dedup/slices.py, Spark's is dedup/spark/tasks.py. Where one commit decides a
batch, its tasks only run the handler: dedup/in_tasks.py.
"""

from __future__ import annotations

import logging
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from checkpoint.errors import BudgetExceeded, CommitConflict, ConfigError, PositionGap
from checkpoint.position import Partition
from deadletter.failure import Elsewhere
from dedup import company, flow, planning, starting
from dedup.claims import Slicing
from dedup.decode.prepare import Prepare
from dedup.envelope import ENVELOPE
from dedup.feed import ArrowMaterial, Feed
from dedup.in_tasks import InTasks
from dedup.report import Report
from dedup.slices import Work
from dedup.store import Checkpoint, Head, Run
from dedup.trial import Trial, untried

if TYPE_CHECKING:
    from dedup.consumer import Consumer

log = logging.getLogger("dedup")

On = Literal["executors", "driver"]

A_TASK = 2
"""Connections of one task: for its transactions, and for what has to outlive them."""

MOST_TASKS = 32
"""Tasks at once, unless more connections are asked for."""


@dataclass(frozen=True)
class Where:
    """Where a handler of single events runs, as its decorator said."""

    on: On | None = None  # None: in tasks, where the store can
    connections: int | None = None


RunTask = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What a task does with its rows. Travels to it."""


class Tasks(Protocol):
    """The rows of one batch where they are: in the tasks of a cluster."""

    @property
    def cores(self) -> int:
        """Tasks that the cluster runs at once."""

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition. Evaluates the batch once."""

    def pack(self, what: object) -> bytes:
        """What travels to the tasks, for `pickle.loads`. Raises ConfigError where it cannot."""

    def each(self, frame: Any, run: RunTask, answers: pa.Schema) -> pa.Table:
        """Bring each partition's rows of a handler's frame to one task, in order, and run this there; returns what it yields."""

    def run(self, prepare: Prepare, packed: bytes, tasks: int, *, keep: bool) -> pa.Table:
        """Bring each partition to one task, in order, and run `slices.run` there; returns OUTCOMES.

        Args:
            keep: connections stay open in the tasks' processes for the next batch.
        """


_PREPARED = {"_key": pa.binary(16), "_payload_hash": pa.int64(), "_undecodable": pa.bool_()}
_NO_ROWS = pa.schema([*ENVELOPE, *(pa.field(*item) for item in _PREPARED.items())]).empty_table()


def tasks_of(consumer: Consumer, feed: Feed) -> Tasks | None:
    """Where the handler of this batch runs; None where that is here.

    Raises:
        ConfigError: the handler is to run in tasks, and cannot.
    """
    where: Where | None = getattr(consumer.policy().handler, "where", None)
    if where is None or where.on == "driver" or feed.tasks is None:
        return None
    if consumer.positions is None:
        if where.on == "executors":
            raise ConfigError(
                f"Consumer {consumer.name!r} has positions=None: its handler of events runs on the driver. Take out on='executors'."
            )
        return None
    return feed.tasks


def policy_in(consumer: Consumer, tasks: Tasks | None) -> flow.Policy:
    """The consumer's policy where the driver commits: where there are tasks, its handler runs in them, and they write files."""
    policy = consumer.policy()
    if tasks is None:
        return policy
    handler: Any = policy.handler
    return replace(policy, handler=InTasks(consumer.identity, handler, tasks, policy.care.rules))


def check(consumer: Consumer, tasks: Tasks, head: Head) -> None:
    """Refuse, before anything is written, a handler that cannot travel and a database with too few connections. Raises ConfigError."""
    if not isinstance(consumer.store, Slicing):
        tasks.pack(consumer.policy().handler)
        return
    _pack(consumer, tasks, _work(consumer, head, Run("", 0), frozenset()))
    wanted, free = A_TASK * _at_once(consumer, tasks), consumer.store.room(consumer.name)
    if wanted > free:
        raise ConfigError(
            f"Consumer {consumer.name!r}: its tasks may use {wanted} connections at once, and PostgreSQL has {free} for this role "
            f"(max_connections, and the limits of the role and the database, less what is in use). Raise that, or give the handler fewer: "
            f"@consumer.foreach(..., connections={max(free // A_TASK * A_TASK, A_TASK)})."
        )


def process(consumer: Consumer, tasks: Tasks, head: Head, run: Run, *, first: bool) -> tuple[Report, Head]:
    """One batch: guards, slices, and what they leave to the driver; returns what became of the rows, and what the state cannot be behind.

    Args:
        first: of this run of the query, or after a failure: gaps are looked for before anything is written, and whether tasks have died.

    Raises:
        What a slice raised: what no waiting can mend comes first.

    Crash: slices that were committed are true, the others are not; the batch is delivered again, and drops what is decided.
    """
    report = Report()
    planning.guard(head, run, consumer.settings, {})
    vouched = _vouched(consumer, tasks, head, run) if first and _may_gap(head, run) else frozenset()
    outcomes = _run(consumer, tasks, head, run, vouched, alone=first and _have_died(consumer, tasks))
    if any(isinstance(error, PositionGap) for error in _errors(outcomes)):
        now = replace(consumer.store.head(consumer.name), epoch=head.epoch)
        outcomes = _run(consumer, tasks, now, run, _vouched(consumer, tasks, head, run), alone=_have_died(consumer, tasks))
    for row in outcomes:
        report.count(np.asarray(row["states"]))
    _raise_worst(_errors(outcomes))
    return report, _close(consumer, _reached(head, run, outcomes), run)


def _may_gap(head: Head, run: Run) -> bool:
    return not head.gap_accepted and any(point.query_id != run.query_id for point in head.checkpoints.values())


def _vouched(consumer: Consumer, tasks: Tasks, head: Head, run: Run) -> frozenset[Partition]:
    """The partitions of this batch, none of which leaves anything out. Raises PositionGap."""
    found = tasks.firsts(consumer.prepare(head))
    planning.guard(head, run, consumer.settings, starting.without_absent(head, run, found, consumer.read_log))
    return frozenset(found)


def _have_died(consumer: Consumer, tasks: Tasks) -> bool:
    """Whether a slice was being tried at the end of two runs. Spark ends others with the one that kills: only alone they are told apart.

    Of one run, where slices run one at a time anyway.
    """
    assert isinstance(consumer.store, Slicing)
    one = _at_once(consumer, tasks) == 1
    found = any(trial.running is not None and (trial.deaths or one) for trial in map(Trial.read, consumer.store.trials(consumer.name)))
    if found:
        log.warning("%s: processes of tasks have died; slices run one at a time until the batch is through", consumer.name)
    return found


def _run(
    consumer: Consumer, tasks: Tasks, head: Head, run: Run, vouched: frozenset[Partition], *, alone: bool = False
) -> list[dict[str, Any]]:
    """The slices of a batch. After deaths one at a time, and with no other query's chunk in hand in the driver, which may end them all."""
    count = 1 if alone else _at_once(consumer, tasks)
    with company.taken(consumer.name, alone=alone) as by_itself:
        packed = _pack(consumer, tasks, replace(_work(consumer, head, run, vouched), alone=by_itself))
        # Where every core may have its connections, the processes of tasks keep them: there are never more than the cap.
        keep = tasks.cores <= count
        outcomes: list[dict[str, Any]] = tasks.run(consumer.prepare(head), packed, count, keep=keep).to_pylist()
    return outcomes


def _pack(consumer: Consumer, tasks: Tasks, work: Work) -> bytes:
    return tasks.pack((tasks.pack(consumer.store), work))


def _at_once(consumer: Consumer, tasks: Tasks) -> int:
    where: Where = consumer.policy().handler.where  # type: ignore[attr-defined]
    cap = where.connections // A_TASK if where.connections else MOST_TASKS
    return min(cap, max(tasks.cores, 1))


def _work(consumer: Consumer, head: Head, run: Run, vouched: frozenset[Partition]) -> Work:
    policy = replace(consumer.policy(), trials=untried())
    return Work(policy, head, run, uuid.uuid4().hex, consumer.max_events, consumer.incarnation, vouched)


def _errors(outcomes: Iterable[Mapping[str, Any]]) -> list[BaseException]:
    return [pickle.loads(row["error"]) for row in outcomes if row["error"] is not None]


def _raise_worst(errors: list[BaseException]) -> None:
    """Of several errors that one which waiting cannot mend; then that of a budget, whose slice says why."""
    if not errors:
        return
    for error in errors:
        log.warning("a slice failed: %s", error if isinstance(error, Elsewhere) else f"{type(error).__name__}: {error}")
    raise min(errors, key=_rank)


def _rank(error: BaseException) -> tuple[bool, bool, bool]:
    told = "another slice" in str(error)  # the slice that was over the budget says which events failed
    return isinstance(error, CommitConflict), not isinstance(error, BudgetExceeded) or told, told


def _reached(head: Head, run: Run, outcomes: Iterable[Mapping[str, Any]]) -> Head:
    """What the state cannot be behind, by what the slices committed."""
    points, decisions = dict(head.checkpoints), 0
    for row in outcomes:
        partition, decisions = Partition(row["source"], row["topic"], row["partition"]), decisions + row["decisions"]
        point = points.get(partition)
        if row["reached"] is not None and (point is None or point.sequence_number < row["reached"]):
            points[partition] = Checkpoint(row["reached"], query_id=run.query_id)
    return replace(head, seq=head.seq + decisions, checkpoints=points)


def _close(consumer: Consumer, known: Head, run: Run) -> Head:
    """Record that the batch is at its end, which no slice can know, and with it that a gap was accepted for the whole query.

    Crash: recorded or not; the batch is delivered again.
    """
    head = replace(consumer.store.head(consumer.name), epoch=known.epoch)  # whoever took over meanwhile must not be spoken for
    planning.refuse_older(head, known)
    if (head.query_id, head.batch_id, head.batch_ended, head.gap_accepted) == (run.query_id, run.batch_id, True, False):
        return known
    material = ArrowMaterial(_NO_ROWS)
    chunk = flow.Chunk(material, flow.index_of(material), run, head)
    return flow.reached(chunk, flow.commit_chunk(chunk, consumer.store, head.epoch, consumer.policy()))
