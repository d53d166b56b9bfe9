"""What a task does with the events of its partitions where tasks commit: each slice by itself, in one transaction or in several, in order.

Runs in Python workers, without a driver beside it: what it needs came with it as a `SliceJob`. Errors go back as values, so that
nothing is run again that cannot pass, and the driver raises them: as what they are, or as `Elsewhere` where they cannot travel whole.
Called by spark/tasks.py; needs no Spark itself.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint import guards
from checkpoint.errors import BudgetExceeded, ConfigError, DedupError, HandlerError, PositionGap, StoreError, StoreUnavailable
from checkpoint.guards import TopicIdentity
from checkpoint.head import OVER_BUDGET, Head, Run, SliceClaim
from checkpoint.position import Partition
from deadletter.classify import Rule, classify, outlasted
from deadletter.crashes import CrashMarker
from deadletter.failure import Elsewhere, describe
from deadletter.known import PERMANENT
from deadletter.outage import with_replanning
from deadletter.parked import ParkedGroup, together
from dedup.core import planning
from dedup.core.index import Index
from dedup.core.rows import in_utc
from dedup.core.store import Store
from dedup.decode.prepare import Prepare
from dedup.pipeline.batch import process_run
from dedup.pipeline.commit import Chunk, DecidedChunk, Part, Policy, committed, decide_chunk, index_of, refuse_parts
from dedup.spark.keeping import EvaluatedKept, Share

OUTCOMES = pa.schema(
    [
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("states", pa.list_(pa.int64())),  # rows by what became of them: planning's states
        pa.field("decisions", pa.int64()),  # transactions that decided something
        pa.field("reached", pa.int64()),  # the highest position that is decided, null where none is
        pa.field("error", pa.binary()),  # pickled; the rows behind it are not decided
        pa.field("parked", pa.binary()),  # pickled: ParkedGroup of new letters, committed ones alone
        pa.field("lost", pa.string()),  # a file of kept rows that the task does not find; then it has begun no slice
    ]
)
"""One row per slice."""


@dataclass(frozen=True)
class SliceJob:
    """What the tasks of one batch need. Travels to them."""

    policy: Policy  # its marker are the task's own
    head: Head  # as the driver planned the batch
    run: Run
    attempt: str  # of the driver at this batch; random
    max_events: int
    identify: TopicIdentity | None
    gap_checked: frozenset[Partition]  # partitions that the driver has found without a gap
    alone: bool = True  # whether its slices run one at a time
    late: Prepare | None = None  # how to complete few rows of those that `prepare_keys` has made


KEPT_STORES = 4
"""Stores of this process of tasks that stay open: a process serves one query at a time, and rarely several."""


_stores: dict[str, Store] = {}


def task(batches: Iterable[pa.RecordBatch], packed: bytes, keep: bool) -> Iterator[pa.RecordBatch]:
    """Unpack what the driver has sent, and `run`; a task without rows opens nothing.

    Args:
        packed: the store, pickled by itself, and a SliceJob.
        keep: the store's connections stay open in this process for the next batch.
    """
    rows = (batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    sent = unpacked(packed)
    if isinstance(sent, ConfigError):
        yield _nothing_done(sent)
        return
    packed_store, job = sent
    store = _kept_store(packed_store)
    try:
        yield from run(itertools.chain([first], rows), job, store)
    finally:
        if not keep:
            store.close()


def task_of_kept(number: int, packed: bytes, shares: Sequence[bytes], keep: bool) -> Iterator[pa.RecordBatch]:
    """As `task`, where the rows are kept in files. All of them are opened before a slice begins.

    Args:
        number: of the task.
        shares: by task, list[Share].
    """
    mine: list[Share] = pickle.loads(shares[number])
    files: dict[str, pa.Table] = {}
    for part in itertools.chain.from_iterable(share.parts for share in mine):
        try:
            part.open(files)
        except StoreUnavailable as error:
            yield _nothing_done(error, lost=part.path)
            return
    yield from task((batch for share in mine for batch in share.read(files).to_batches()), packed, keep)


def _nothing_done(error: DedupError, lost: str | None = None) -> pa.RecordBatch:
    """OUTCOMES of a task that has not begun a slice. `lost`: a file of kept rows that could not be opened."""
    told = {"states": [0] * planning.STATES, "decisions": 0, "error": pickle.dumps(error), "lost": lost}
    return pa.RecordBatch.from_pylist([told], OUTCOMES)


def unpacked(packed: bytes) -> Any:
    """What the driver has sent; a ConfigError where this process, which came after `workers.check`, cannot load it."""
    try:
        return pickle.loads(packed)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the modules of the handler raise when they are imported
        return ConfigError(
            f"Spark's tasks cannot load the handler of events, or something that it uses: {type(error).__name__}: {error}. Ship its "
            "modules to the executors (spark.submit.pyFiles, addArtifacts), or take the driver: @consumer.foreach(..., on='driver')."
        )


def _kept_store(packed: bytes) -> Store:
    """The store of these settings in this process, with the connections that an earlier task has opened."""
    name = hashlib.sha256(packed).hexdigest()
    if name not in _stores:
        while len(_stores) >= KEPT_STORES:
            _stores.pop(next(iter(_stores))).close()
        _stores[name] = pickle.loads(packed).in_tasks()
    return _stores[name]


def run(batches: Iterable[pa.RecordBatch], job: SliceJob, store: Store) -> Iterator[pa.RecordBatch]:
    """Make the slices of this task true, one after the other; yields OUTCOMES, one row for each.

    After an error nothing more of this task is begun: the driver decides how it goes on.

    Args:
        batches: prepared rows, those of one partition together, in the order of their positions.

    Crash: chunks that were committed are true, the one in hand is not; a task that runs again drops what it finds decided.
    """
    slices: list[_Slice] = []
    for partition, chunks in itertools.groupby(cut(batches, job.max_events), lambda chunk: chunk[0]):
        tables = (table for _, table in chunks)
        if not slices or slices[-1].error is None:
            slices.append(_Slice(job, store, partition))
            slices[-1].commit_all(tables)
        for _ in tables:
            pass  # read to the end, so that the process can be used again
    for each in slices:
        yield each.outcome()


class _UnreadError(Exception):
    """The rows of a task cannot be read: nothing that a slice has done."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _reading(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    try:
        yield from tables
    except Exception as error:
        raise _UnreadError(error) from error


@dataclass
class _Slice:
    """One partition's events on their way."""

    job: SliceJob
    store: Store
    partition: Partition
    states: np.ndarray = field(default_factory=lambda: np.zeros(planning.STATES, dtype=np.int64))
    error: BaseException | None = None
    parked: list[ParkedGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head, name = self.job.head, self.job.head.consumer
        scope = str(self.partition)
        marker = CrashMarker(
            lambda: self.store.crash_marker(name, scope), lambda text: self.store.set_crash_marker(name, text, scope), alone=self.job.alone
        )
        self._policy = replace(self.job.policy, marker=marker)

    def commit_all(self, tables: Iterator[pa.Table]) -> None:
        """Make chunk after chunk true, up to one that fails, and keep its error.

        Crash: before a chunk's commit nothing of it is true; after it, all of it is.
        """
        run = replace(self.job.run, joined=True, ends=False)  # the driver alone knows the end of a batch
        try:
            for done in committed(self._parts(_reading(tables)), run, self.head, self._commit):
                self.head = done.head
                self.states += np.bincount(done.state, minlength=planning.STATES)
                self.parked.extend(done.parked)
        except _UnreadError as unread:
            raise unread.error from unread.error.__cause__  # the task fails, and Spark runs it again
        except Exception as error:  # noqa: BLE001 - the driver raises it
            self.error = carried(error, self._policy.on_failure.errors)
            if isinstance(error, BudgetExceeded):
                self._tell_others()

    def _parts(self, tables: Iterator[pa.Table]) -> Iterator[Part]:
        """The chunks of this slice as they come. With bisect=False a slice of several is refused before any of it is true."""
        first = next(tables)
        if not self._policy.on_failure.bisect and (others := sum(table.num_rows for table in tables)):
            refuse_parts(self.head.consumer, first.num_rows + others, self.job.max_events, "slice")
        for number, table in enumerate(itertools.chain([first], tables)):
            rows = EvaluatedKept(table, late=self.job.late)
            index = index_of(rows)
            topic_ids = guards.ask(self.job.identify, {(self.partition.source, self.partition.topic)})
            if number == 0:
                self._refuse_gap(index)
            yield Part(rows, index, topic_ids)

    def _commit(self, chunk: Chunk) -> DecidedChunk:
        """One chunk, again where another decision comes first."""
        return with_replanning(lambda: self._transact(chunk))

    def _transact(self, chunk: Chunk) -> DecidedChunk:
        with self.store.begin(self.head.consumer, self.head.epoch, self._claim(chunk.run)) as transaction:
            return decide_chunk(chunk, self.store, transaction, self._policy)

    def _claim(self, run: Run) -> SliceClaim:
        point, limit = self.head.checkpoints.get(self.partition), self._policy.on_failure.seconds_of_handler
        return SliceClaim(
            self.partition,
            number=0,
            run_id=process_run(),
            query_id=run.query_id,
            batch_id=run.batch_id,
            expected=None if point is None else point.sequence_number,
            attempt=self.job.attempt,
            patience=float("inf") if limit is None else limit,
        )

    def _refuse_gap(self, index: Index) -> None:
        """The driver looks for gaps where it knows that there may be one; where a partition comes later, it is told."""
        if self.partition in self.job.gap_checked:
            return
        first, _ = index.spans[self.partition]
        if guards.gaps(self.job.head, self.job.run, {self.partition: first}):
            raise PositionGap(f"Consumer {self.head.consumer!r}: {self.partition} begins at {first}, behind its checkpoint.")

    def _tell_others(self) -> None:
        with contextlib.suppress(StoreError):  # then each of them finds out by itself
            self.store.set_crash_marker(self.head.consumer, self.job.attempt, OVER_BUDGET)

    def outcome(self) -> pa.RecordBatch:
        """OUTCOMES."""
        point = self.head.checkpoints.get(self.partition)
        row = {
            **self.partition._asdict(),
            "states": self.states.tolist(),
            "decisions": self.head.seq - self.job.head.seq,
            "reached": None if point is None else point.sequence_number,
            "error": None if self.error is None else pickle.dumps(self.error),
            "parked": pickle.dumps(together(self.parked)) if self.parked else None,
        }
        return pa.RecordBatch.from_pylist([row], schema=OUTCOMES)


def carried(error: Exception, rules: Sequence[Rule]) -> BaseException:
    """The error itself where it survives the journey with its class, so that whoever waits for its type has it; else as `told`."""
    same = _travelled(error)
    if type(same) is not type(error) or classify(same, rules) != classify(error, rules):
        return told(error, rules)
    if not isinstance(error, DedupError):
        same.add_note(describe(error, dt.datetime.now(dt.UTC)).stack)
    return same


def told(error: BaseException, rules: Sequence[Rule]) -> BaseException:
    """The error as the driver can have it: one of ours as it is, another one by what is kept of it.

    A pickled exception has lost its causes, and with them what told whose fault it is; some cannot be pickled at all.
    """
    if isinstance(error, DedupError | MemoryError):
        known = MemoryError if isinstance(error, MemoryError) else HandlerError
        return _travelled(error) or known(f"{type(error).__name__}: {error}")
    ours_to_judge = isinstance(error, Exception)  # what else there is means the handler alone: sys.exit, a panic
    found = classify(error, rules) if ours_to_judge else PERMANENT
    return Elsewhere(describe(error, dt.datetime.now(dt.UTC)), found, outlasted(error) if ours_to_judge else PERMANENT)


def _travelled(error: BaseException) -> BaseException | None:
    """What another process makes of it; None where it cannot travel."""
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever the user's own class does when it is pickled
        return None
    return same


def cut(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[tuple[Partition, pa.Table]]:
    """The rows of each partition in tables of at most `size` rows, in order; parts of one position stay together."""
    held: pa.Table | None = None
    for batch in batches:
        for part in _by_partition(in_utc(pa.Table.from_batches([batch]))):
            if held is not None and _partition(held) != _partition(part):
                yield _partition(held), held
                held = None
            held = part if held is None else pa.concat_tables([held, part])
            while (stop := _end(held, size)) is not None:
                yield _partition(held), held.slice(0, stop)
                held = held.slice(stop)
    if held is not None:
        yield _partition(held), held


def _partition(table: pa.Table) -> Partition:
    return Partition(*(table[name][0].as_py() for name in ("source", "topic", "partition")))


def _by_partition(table: pa.Table) -> Iterator[pa.Table]:
    changes = np.zeros(max(table.num_rows - 1, 0), dtype=bool)
    for name in ("source", "topic", "partition"):
        changes |= _differs(table[name])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist(), table.num_rows]
    yield from (table.slice(a, b - a) for a, b in itertools.pairwise(starts) if b > a)


def _differs(column: pa.ChunkedArray) -> np.ndarray:
    """Which values are another one than the value before; nulls are one value."""
    codes = column.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy(zero_copy_only=False)
    return np.asarray(codes[1:] != codes[:-1])


def _end(table: pa.Table, size: int) -> int | None:
    """Where the first `size` rows end, and the parts of their last position with them; None while more of them may come."""
    stop = size
    while stop < table.num_rows and _position(table, stop - 1) == _position(table, stop):
        stop += 1
    return stop if stop < table.num_rows else None


def _position(table: pa.Table, row: int) -> tuple[int, ...]:
    return (table["sequence_number"][row].as_py(),)
