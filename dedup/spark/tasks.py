"""Handlers of single events in Spark's tasks: the driver plans a batch, brings each partition to one task, and adds up what they say.

Called by the consumer for each batch that has tasks. Where tasks commit by themselves their side is spark/committing.py; where one commit
of the driver decides a batch, they only run the handler: spark/handling.py. Either way rows are kept in files if they can be
(spark/keeping.py), else shuffled. Works on classic Spark and Spark Connect alike.
"""

from __future__ import annotations

import datetime as dt
import logging
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from checkpoint import guards
from checkpoint.errors import BudgetExceeded, CommitConflict, ConfigError, PositionGap
from checkpoint.head import Checkpoint, Head, Run
from checkpoint.position import Partition
from deadletter import outage
from deadletter.classify import is_cancelled
from deadletter.crashes import Marker, cancelled, untried
from deadletter.failure import describe
from deadletter.parked import tell_parked, together
from deadletter.policy import OwnPolicy
from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.index import Index
from dedup.core.store import Slicing
from dedup.decode.prepare import Prepare
from dedup.pipeline import company
from dedup.pipeline.batch import Batch, EvaluatedArrow, RunShare, RunTask, Tasks
from dedup.pipeline.commit import Chunk, Culprits, Job, check_assumptions, commit_batch, commit_chunk, guard, index_of, reached
from dedup.pipeline.handlers import A_TASK, MOST_TASKS, Where
from dedup.pipeline.report import Report
from dedup.spark import committing, features, keeping, workers
from dedup.spark.committing import OUTCOMES, SliceJob
from dedup.spark.handling import InTasks
from dedup.spark.keeping import EvaluatedInTasks
from dedup.spark.prepare import answers as registry_answers
from dedup.spark.prepare import plan, positions, prepare_columns

ENOUGH = 100_000
"""Rows of a frame that have one in each of its partitions, on clusters of up to so many cores."""

log = logging.getLogger("dedup")

_told: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


class SparkTasks:
    """A batch as the cluster has it."""

    def __init__(self, batch: DataFrame, scratch: str | None = None) -> None:
        self._batch, self._scratch = batch, scratch
        self._prepare: Prepare | None = None  # of the rows that `run` brings

    @cached_property
    def cores(self) -> int:
        """Tasks that the cluster runs at once, as Spark's own default for new frames."""
        return _cores(self._batch.sparkSession)

    def firsts(self, prepare: Prepare) -> dict[Partition, int]:
        """The lowest sequence number of each partition: one job, which reads the source."""
        rows = positions(self._batch, prepare)
        lowest = rows.groupBy("source", "topic", "partition").agg(F.min("sequence_number").alias("first"))
        with plan(self._batch, prepare).evaluating(self._batch):
            found = features.to_arrow(lowest).to_pylist()
        return {Partition(r["source"], r["topic"], r["partition"]): r["first"] for r in found if None not in r.values()}

    def pack(self, what: object) -> bytes:
        """What travels to the tasks. Raises ConfigError where the handler, or something that it uses, cannot be pickled."""
        try:
            return bytes(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigError(
                f"The handler of events, or something that it or the consumer uses, cannot be sent to Spark's tasks: "
                f"{type(error).__name__}: {error}. Make connections and locks inside the handler, at its first event; or let it run on the "
                f"driver: @consumer.foreach(..., on='driver')."
            ) from error

    def ask_worker(self, consumer: str, *packed: bytes) -> None:
        """Ask a worker of each core, on Spark Connect one, whether it can unpack this. Raises ConfigError, with what to set."""
        workers.check(self._batch.sparkSession, consumer, packed)

    def prepared(self, prepare: Prepare) -> DataFrame:
        """The rows of the batch as events with keys, evaluated where `run` brings them."""
        self._prepare = prepare
        return prepare_columns(self._batch, prepare)

    def run(self, rows: DataFrame, task: RunTask, answers: pa.Schema, at_once: int) -> pa.Table:
        """Bring each partition of these rows to one task, in order, and run this there; returns what the tasks yield.

        Crash: of the driver: tasks that run go on to the end of their transaction, unless a newer driver has fenced them.
        """
        evaluating = nullcontext() if self._prepare is None else plan(self._batch, self._prepare).evaluating(self._batch)
        with evaluating, registry_answers():
            return features.to_arrow(features.map_in_arrow(_placed(rows, at_once), task, features.spark_schema(answers)))

    def folder(self) -> AbstractContextManager[str] | None:
        """Below the user's folder for scratch files where that is a path; else, where tasks run on this machine, a temporary one."""
        if self._scratch is not None:
            path = keeping.path_of(self._scratch)
            return None if path is None else keeping.shared_folder(path)
        return keeping.shared_folder(None) if features.is_local(self._batch.sparkSession) else None

    def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
        """Evaluate the batch, once, in the tasks that read it. Returns PIECES, and how to complete few rows."""
        found = plan(self._batch, prepare)
        rows, late = found.rows(self._batch), None if found.parts else found.spec
        task = keeping.Keeping(folder, found.finish, late)
        with found.evaluating(self._batch), registry_answers():
            return features.to_arrow(features.map_in_arrow(rows, task, features.spark_schema(keeping.PIECES))), late

    def spread(self, task: RunShare, parts: int, answers: pa.Schema) -> pa.Table:
        """Run this in so many tasks, each with a number of its own; returns what they yield."""
        numbers = self._batch.sparkSession.range(0, parts, 1, parts)
        return features.to_arrow(numbers.mapInArrow(partial(_each_number, task=task), features.spark_schema(answers)))


def _each_number(batches: Iterable[pa.RecordBatch], task: RunShare) -> Iterator[pa.RecordBatch]:
    for number in [number for batch in batches for number in batch.column(0).to_pylist()]:
        yield from task(number)


def _placed(rows: DataFrame, tasks: int) -> DataFrame:
    """Each partition of a topic in one task, in order."""
    # Partition p of a topic goes to task (p + something of the topic) mod tasks: hashing would leave half of the tasks idle.
    task = F.coalesce(F.pmod(F.col("partition").cast("bigint") + F.hash("source", "topic").cast("bigint"), F.lit(tasks)), F.lit(0))
    return features.place(rows, tasks, task.cast("int")).sortWithinPartitions(*POSITION)


def _cores(session: SparkSession) -> int:
    try:
        return int(session.sparkContext.defaultParallelism)
    except (PySparkException, AttributeError):  # Spark Connect does not tell: a small job does, once
        if (known := _told.get(session)) is None:
            known = _told[session] = session.range(ENOUGH).select(F.spark_partition_id()).distinct().count()
        return known


_PREPARED = {"_key": pa.binary(16), "_payload_hash": pa.int64(), "_undecodable": pa.bool_()}
_NO_ROWS = pa.schema([*ENVELOPE, *(pa.field(*item) for item in _PREPARED.items())]).empty_table()


def check(job: Job, tasks: Tasks, head: Head) -> None:
    """Refuse, before anything is written, a handler that cannot travel, workers that lack what it takes to run it, and a database with
    too few connections. Raises ConfigError.
    """
    if not isinstance(job.store, Slicing):
        tasks.ask_worker(job.name, tasks.pack(job.policy.handler))
        return
    tasks.ask_worker(job.name, tasks.pack(job.store), tasks.pack(slice_job(job, head, Run("", 0), frozenset())))
    wanted, free = A_TASK * _at_once(job, tasks), job.store.room(job.name)
    if wanted > free:
        raise ConfigError(
            f"Consumer {job.name!r}: its tasks may use {wanted} connections at once, and PostgreSQL has {free} for this role "
            f"(max_connections, and the limits of the role and the database, less what is in use). Raise that, or give the handler fewer: "
            f"@consumer.foreach(..., connections={max(free // A_TASK * A_TASK, A_TASK)})."
        )


def process(job: Job, batch: Batch, tasks: Tasks, head: Head, run: Run, culprits: Culprits, *, first: bool) -> tuple[Report, Head]:
    """One batch whose events are handled in tasks; returns what became of the rows, and what the state cannot be behind.

    Args:
        first: of this run of the query, or after a failure.

    Crash: what was committed is true, the rest is not; the batch is delivered again, and drops what is decided.
    """
    if isinstance(job.store, Slicing):
        return _commit_in_tasks(job, tasks, head, run, first=first)
    handler: Any = job.policy.handler
    in_tasks = InTasks(job.policy.on_failure.owner, handler, tasks, job.policy.on_failure.errors)
    kept = keeping.KeptBatch(batch, tasks)
    return commit_batch(replace(job, policy=replace(job.policy, handler=in_tasks)), kept, head, run, culprits)


def _commit_in_tasks(job: Job, tasks: Tasks, head: Head, run: Run, *, first: bool) -> tuple[Report, Head]:
    """Guards, slices, and what they leave to the driver. At first, gaps are looked for before anything is written, and deaths of tasks.

    Raises:
        What a slice raised: what no waiting can mend comes first.
    """
    report = Report()
    guard(job, head, run, {})
    with keeping.kept(tasks, job.prepare(head)) as found:
        if found is not None:
            outcomes = _commit_kept(job, tasks, head, run, KeptSlices(found), alone=first and _have_died(job, tasks))
    if found is None:
        outcomes = _commit_shuffled(job, tasks, head, run, first=first)
    for row in outcomes:
        report += Report.of_counts(np.asarray(row["states"]))
    _tell_parked(job, outcomes)
    _raise_worst(_errors(outcomes), job.policy.on_failure)
    return report, close(job, _reached(head, run, outcomes), run)


def _tell_parked(job: Job, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Tell of the letters that these slices have committed. Crash: as of `tell_parked`."""
    parked = [group for row in outcomes if row["parked"] for group in pickle.loads(row["parked"])]
    tell_parked(job.policy.on_failure.on_parked, together(parked))


@dataclass(frozen=True)
class KeptSlices:
    """The rows of a batch in files of tasks, and which task reads which."""

    rows: EvaluatedInTasks

    @cached_property
    def index(self) -> Index:
        """In the order of positions. Raises ConfigError where one is null."""
        return index_of(self.rows)

    def run(self, tasks: Tasks, packed: bytes, at_once: int, *, keep: bool) -> pa.Table:
        """Run all slices, each partition's in one task; returns OUTCOMES. Crash: as `SparkTasks.run`."""
        dealt = self.rows.frame(self.index.order).dealt(at_once)
        if not dealt:
            return OUTCOMES.empty_table()
        task = partial(committing.task_of_kept, packed=packed, shares=[pickle.dumps(mine) for mine in dealt], keep=keep)
        return tasks.spread(task, len(dealt), OUTCOMES)


def _commit_kept(job: Job, tasks: Tasks, head: Head, run: Run, kept: KeptSlices, *, alone: bool) -> list[dict[str, Any]]:
    """The slices of rows that are kept in files: their first positions are known, so that gaps are looked for before anything is written.

    Raises:
        PositionGap, and what `guard` raises. CommitConflict: keys are others by now than those that the rows were prepared with.
    """
    firsts = {partition: first for partition, (first, _) in kept.index.spans.items()}
    if guards.gaps(head, run, firsts):  # a slice may have committed more than the driver knows
        now = replace(job.store.head(job.name), epoch=head.epoch)
        check_assumptions(head, now)
        head = now
    guard(job, head, run, firsts)
    outcomes = _run_tasks(job, tasks, head, run, frozenset(firsts), alone=alone, kept=kept)
    for lost in [row["lost"] for row in outcomes if row["lost"] is not None]:
        keeping.give_up(lost)
    return outcomes


def _commit_shuffled(job: Job, tasks: Tasks, head: Head, run: Run, *, first: bool) -> list[dict[str, Any]]:
    """The slices of rows that come by a shuffle. To look for gaps is to evaluate the batch: done where there may be one."""
    gap_checked = _check_gaps(job, tasks, head, run) if first and _may_gap(head, run) else frozenset()
    outcomes = _run_tasks(job, tasks, head, run, gap_checked, alone=first and _have_died(job, tasks))
    if any(isinstance(error, PositionGap) for error in _errors(outcomes)):
        _tell_parked(job, outcomes)  # of the slices that have committed: they do not park these events again
        now = replace(job.store.head(job.name), epoch=head.epoch)
        outcomes = _run_tasks(job, tasks, now, run, _check_gaps(job, tasks, head, run), alone=_have_died(job, tasks))
    return outcomes


def _may_gap(head: Head, run: Run) -> bool:
    return not head.gap_accepted and any(point.query_id != run.query_id for point in head.checkpoints.values())


def _check_gaps(job: Job, tasks: Tasks, head: Head, run: Run) -> frozenset[Partition]:
    """The partitions of this batch, none of which leaves anything out. Raises PositionGap."""
    found = tasks.firsts(job.prepare(head))
    guard(job, head, run, found)
    return frozenset(found)


def _have_died(job: Job, tasks: Tasks) -> bool:
    """Whether a slice was being tried at the end of two runs. Spark ends others with the one that kills: only alone they are told apart.

    Of one run, where slices run one at a time anyway.
    """
    assert isinstance(job.store, Slicing)
    one = _at_once(job, tasks) == 1
    left = job.store.crash_markers(job.name)
    found = any(marker.running is not None and (marker.deaths or one) for marker in map(Marker.read, left.values()))
    if found:
        log.warning("%s: processes of tasks have died; slices run one at a time until the batch is through", job.name)
    return found


def _run_tasks(
    job: Job, tasks: Tasks, head: Head, run: Run, gap_checked: frozenset[Partition], *, alone: bool = False, kept: KeptSlices | None = None
) -> list[dict[str, Any]]:
    """The slices of a batch. After deaths one at a time, and with no other query's chunk in hand in the driver, which may end them all."""
    count = 1 if alone else _at_once(job, tasks)
    with company.taken(job.name, alone=alone) as by_itself, _acquitting(job):
        late = None if kept is None else kept.rows.late
        packed = _pack(job, tasks, replace(slice_job(job, head, run, gap_checked), alone=by_itself, late=late))
        keep = tasks.cores <= count  # each core may have its connections, so processes keep theirs: there are never more than the cap
        if kept is not None:
            found = kept.run(tasks, packed, count, keep=keep)
        else:
            task = partial(committing.task, packed=packed, keep=keep)
            found = tasks.run(tasks.prepared(job.prepare(head)), task, OUTCOMES, count)
    outcomes: list[dict[str, Any]] = found.to_pylist()
    return outcomes


@contextmanager
def _acquitting(job: Job) -> Iterator[None]:
    """Where the job of the block is cancelled, as by stopping the query, the end of its tasks counts as nobody's doing.

    Crash: before it is noted, the end of a task counts as a death, of which it takes several to park an event.
    """
    assert isinstance(job.store, Slicing)
    try:
        yield
    except Exception as error:
        if is_cancelled(error):
            for scope, marker in cancelled(job.store.crash_markers(job.name)).items():
                job.store.set_crash_marker(job.name, marker, scope)
        raise


def _pack(job: Job, tasks: Tasks, work: SliceJob) -> bytes:
    return tasks.pack((tasks.pack(job.store), work))


def _at_once(job: Job, tasks: Tasks) -> int:
    where: Where = job.policy.handler.where  # type: ignore[attr-defined]
    cap = where.connections // A_TASK if where.connections else MOST_TASKS
    return min(cap, max(tasks.cores, 1))


def slice_job(job: Job, head: Head, run: Run, gap_checked: frozenset[Partition]) -> SliceJob:
    """What the tasks of one batch need."""
    policy = replace(job.policy, marker=untried(), on_failure=replace(job.policy.on_failure, on_parked=None))  # which the driver calls
    return SliceJob(policy, head, run, uuid.uuid4().hex, job.max_events, job.identify, gap_checked)


def _errors(outcomes: Iterable[Mapping[str, Any]]) -> list[BaseException]:
    return [pickle.loads(row["error"]) for row in outcomes if row["error"] is not None]


def _raise_worst(errors: list[BaseException], failures: OwnPolicy) -> None:
    """Of several errors that one which waiting cannot mend; then that of a budget, whose slice says why."""
    if not errors:
        return
    for failure in (describe(error, dt.datetime.now(dt.UTC)) for error in errors):
        said = "" if failures.redact is not None else f": {failure.message}"  # what letters hide is not for logs
        log.warning("a slice failed: %s%s", failure.error_type, said)
    raise min(errors, key=partial(_rank, failures=failures))


def _rank(error: BaseException, failures: OwnPolicy) -> tuple[bool, bool, bool, bool]:
    told = "another slice" in str(error)  # the slice that was over the budget says which events failed
    budget = isinstance(error, BudgetExceeded) and not told
    return outage.may_pass(error, failures), isinstance(error, CommitConflict), not budget, told


def _reached(head: Head, run: Run, outcomes: Iterable[Mapping[str, Any]]) -> Head:
    """What the state cannot be behind, by what the slices committed."""
    points, decisions = dict(head.checkpoints), 0
    for row in outcomes:
        partition, decisions = Partition(row["source"], row["topic"], row["partition"]), decisions + row["decisions"]
        point = points.get(partition)
        if row["reached"] is not None and (point is None or point.sequence_number < row["reached"]):
            points[partition] = Checkpoint(row["reached"], query_id=run.query_id)
    return replace(head, seq=head.seq + decisions, checkpoints=points)


def close(job: Job, known: Head, run: Run) -> Head:
    """Record that the batch is at its end, which no slice can know, and with it that a gap was accepted for the whole query.

    Crash: recorded or not; the batch is delivered again.
    """
    head = replace(job.store.head(job.name), epoch=known.epoch)  # whoever took over meanwhile must not be spoken for
    guards.refuse_older(head, known)
    if (head.query_id, head.batch_id, head.batch_ended, head.gap_accepted) == (run.query_id, run.batch_id, True, False):
        return known
    rows = EvaluatedArrow(_NO_ROWS)
    chunk = Chunk(rows, index_of(rows), run, head)
    return reached(chunk, commit_chunk(chunk, job))
