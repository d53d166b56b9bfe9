"""Handlers of single events in Spark's tasks, where one commit of the driver decides the batch.

One job runs the handler, each partition's events in order in one task, and writes what it returns as files; the driver adds up what the
tasks say and commits. Called by dedup/spark/tasks.py; a store whose tasks commit by themselves has dedup/spark/committing.py instead.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle

from checkpoint.errors import ConfigError, StoreError, StoreUnavailable
from checkpoint.position import Ints
from deadletter.classify import Rule
from dedup.core.envelope import POSITION
from dedup.core.index import Index, not_here
from dedup.core.messages import Messages
from dedup.core.rows import ArrowFrames, Rows, picked, with_values
from dedup.core.steps import Merge
from dedup.core.store import Filing, TaskFiles
from dedup.pipeline import reentry
from dedup.pipeline.batch import Tasks, visible
from dedup.pipeline.performance import EventsFailed
from dedup.pipeline.tx import Tx, refuse_unknown_name
from dedup.spark.committing import cut, told, unpacked
from dedup.spark.keeping import KeptFrame, Share, give_up

_NONE = np.zeros(0, np.int64)

OUTCOME = pa.schema([pa.field("outcome", pa.binary(), nullable=False)])
"""One row per partition: a pickled TaskOutcome."""


class EventsHandler(Protocol):
    """A handler of single events, or of the events of one partition."""

    into: str | None

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle the events of the frame."""


@dataclass(frozen=True)
class HandlerJob:
    """What the tasks of one run of the handler need. Travels to them."""

    consumer: reentry.Identity
    handler: EventsHandler
    files: TaskFiles | None  # for the rows that it returns
    rules: Sequence[Rule]


@dataclass(frozen=True)
class Given:
    """The events that a run of the handler is given, where their rows come to tasks by a shuffle. Travels to them."""

    events: Index
    lanes: Ints


class Written(NamedTuple):
    """Rows that a handler wrote or merged by itself."""

    table: str
    rows: Any  # an Arrow table, or a list of dicts
    how: Merge | None
    authors: list[Any] | None  # of rows of single events: the position of each one's event


@dataclass
class TaskOutcome:
    """What a task made of one partition's events. Rows are numbers among all that the run is given. Travels to the driver."""

    rows: Ints  # all that it was given, ascending
    rejected: dict[int, str] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    failed: list[tuple[int, BaseException]] = field(default_factory=list)
    misfits: dict[str, tuple[str, int]] = field(default_factory=dict)  # as those of EventsFailed
    fitting: frozenset[str] = frozenset()  # likewise
    error: BaseException | None = None  # it cannot be told which event's
    lost: str | None = None  # a file of kept rows that the task does not find
    files: list[str] = field(default_factory=list)
    writes: list[Written] = field(default_factory=list)
    messages: list[Messages] = field(default_factory=list)
    of_events: bool = False  # whether what was written is values of single events


@dataclass(frozen=True)
class InTasks:
    """The handler of a batch that runs one of events in the batch's tasks."""

    consumer: reentry.Identity
    handler: EventsHandler
    tasks: Tasks
    rules: Sequence[Rule]

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle every row of the frame.

        Raises:
            EventsFailed: which events failed, and how.
            ConfigError: the handler cannot be sent to tasks.
            What a task raised where it cannot tell whose fault it was.

        Crash: files that tasks have written are named by no commit, and invisible.
        """
        into, transaction = self.handler.into, tx.transaction
        assert isinstance(transaction, Filing)
        files = transaction.task_files(into) if into else None
        packed = self.tasks.pack(HandlerJob(self.consumer, self.handler, files, self.rules))
        found = self._run_kept(frame, tx, packed) if isinstance(frame, KeptFrame) else self._run_placed(frame, tx, packed)
        outcomes = sorted(map(pickle.loads, found["outcome"].to_pylist()), key=lambda outcome: tuple(outcome.rows[:1]))
        _raise(outcomes, tx.events)
        _require_all(outcomes, tx)
        _adopt(outcomes, tx, into)

    def _run_kept(self, frame: KeptFrame, tx: Tx, packed: bytes) -> pa.Table:
        """The tasks read the files that the rows are in."""
        shares = [pickle.dumps(mine) for mine in frame.dealt(max(self.tasks.cores, 1), tx.lanes)]
        return self.tasks.spread(partial(run_kept, packed=packed, shares=shares), len(shares), OUTCOME)

    def _run_placed(self, frame: Any, tx: Tx, packed: bytes) -> pa.Table:
        """The rows come to the tasks by a shuffle."""
        given = pickle.dumps(Given(tx.events(), tx.lanes))
        return self.tasks.run(frame, partial(run, packed=packed, given=given), OUTCOME, max(self.tasks.cores, 1))


def _raise(outcomes: Sequence[TaskOutcome], events: Callable[[], Index]) -> None:
    for outcome in outcomes:
        if outcome.lost is not None:
            give_up(outcome.lost)
        if outcome.error is not None:
            raise outcome.error
    failed = [each for outcome in outcomes for each in outcome.failed]
    if failed:
        positions = events().positions(np.array([row for row, _ in failed]))
        raise EventsFailed(positions, [error for _, error in failed], _misfits(outcomes))


def _misfits(outcomes: Sequence[TaskOutcome]) -> dict[str, tuple[str, int]]:
    """By column in which no value of any task fits. A task that has no value for a column says nothing of it."""
    fitting = frozenset[str]().union(*(outcome.fitting for outcome in outcomes))
    found: dict[str, tuple[str, int]] = {}
    for column, (why, count) in (misfit for outcome in outcomes for misfit in outcome.misfits.items()):
        first, before = found.get(column, (why, 0))
        found[column] = (first, before + count)
    return {column: misfit for column, misfit in sorted(found.items()) if column not in fitting}


def _require_all(outcomes: Sequence[TaskOutcome], tx: Tx) -> None:
    """Raise StoreError unless each event that tasks were given has come back from one of them, once."""
    rows = np.sort(np.concatenate([np.zeros(0, np.int64), *(outcome.rows for outcome in outcomes)]))
    if not np.array_equal(rows, np.arange(len(tx.given))):
        raise StoreError(
            f"Of {len(tx.given)} events that Spark's tasks were given, {len(np.unique(rows))} came back, {len(rows)} times in all. "
            "Nothing was committed; run the batch again."
        )


def _adopt(outcomes: Sequence[TaskOutcome], tx: Tx, into: str | None) -> None:
    given = tx.given
    for made in outcomes:
        tx.adopt({int(given[row]): reason for row, reason in made.rejected.items()}, given[made.skipped].tolist())
    tx.of_events = any(made.of_events for made in outcomes)
    files = [line for made in outcomes for line in made.files]
    if files:
        tx.adopt_files(str(into), files)
    _write([each for made in outcomes for each in made.writes], tx)
    for messages in _by_topic([each for made in outcomes for each in made.messages]):
        tx.transaction.enqueue(messages)


def _write(writes: list[Written], tx: Tx) -> None:
    """What handlers wrote by themselves, for each table in the order of the calls; what can be written at once is."""
    for (table, how, _), calls in groupby(sorted(writes, key=lambda one: one.table), lambda one: (one.table, one.how, _columns(one))):
        together = list(calls)
        if isinstance(together[0].rows, list):
            authors = None if together[0].authors is None else [author for one in together for author in one.authors or ()]
            tx.adopt_rows(table, [row for one in together for row in one.rows], how, authors)
            continue
        names = together[0].rows.column_names
        rows = pa.concat_tables([one.rows.select(names) for one in together], promote_options="default")
        if how is None:
            tx.write(rows, table)
        else:
            tx.merge(rows, table, how.keys, how.newer_by, how.delete_when)


def _columns(written: Written) -> tuple[Any, ...]:
    """What must be the same in rows that are written at once."""
    if isinstance(written.rows, list):
        return (written.authors is None,)
    return (None, *sorted((field.name, str(field.type)) for field in written.rows.schema))  # wider types would change values


def _by_topic(messages: list[Messages]) -> Iterator[Messages]:
    """Those of one topic together, in their order."""
    for _, found in groupby(sorted(messages, key=lambda one: one.topic), lambda one: (one.topic, one.derived)):
        same = list(found)
        yield replace(same[0], rows=pa.concat_tables([one.rows for one in same]))


# The tasks' side.


def run(batches: Iterable[pa.RecordBatch], packed: bytes, given: bytes) -> Iterator[pa.RecordBatch]:
    """Handle the events of this task, those of one partition after those of the other; yields OUTCOME.

    Args:
        batches: rows as the handler sees them, those of one partition together.
        packed: a HandlerJob.
        given: Given.

    Crash: files that no commit names are invisible.
    """
    all_of_them: Given | None = None
    for _, table in cut(batches, sys.maxsize):
        job, all_of_them = unpacked(packed), all_of_them or pickle.loads(given)
        yield _answer(TaskOutcome(_NONE, error=job) if isinstance(job, ConfigError) else _handle_placed(table, job, all_of_them))


def run_kept(number: int, packed: bytes, shares: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
    """Handle the events of this task, whose rows are kept in files, those of one partition after those of the other; yields OUTCOME.

    Args:
        number: of the task.
        packed: a HandlerJob.
        shares: by task, list[Share].

    Crash: files that no commit names are invisible.
    """
    job: HandlerJob | ConfigError = unpacked(packed)
    if isinstance(job, ConfigError):
        yield _answer(TaskOutcome(_NONE, error=job))
        return
    files: dict[str, pa.Table] = {}
    for share in pickle.loads(shares[number]):
        yield _answer(_handle_share(share, job, files))


def _answer(outcome: TaskOutcome) -> pa.RecordBatch:
    # By value: classes of the notebook that the handler came from are in no module here.
    return pa.RecordBatch.from_pylist([{"outcome": bytes(cloudpickle.dumps(outcome))}], schema=OUTCOME)  # type: ignore[no-untyped-call]


def _handle_placed(table: pa.Table, job: HandlerJob, given: Given) -> TaskOutcome:
    rows = given.events.locate(table.select(list(POSITION)))
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    return _handle(picked(table, order), Events(given.events, rows, 0, given.lanes[rows]), job)


def _handle_share(share: Share, job: HandlerJob, files: dict[str, pa.Table]) -> TaskOutcome:
    try:
        table = share.read(files)
    except StoreUnavailable as error:
        return TaskOutcome(_NONE, error=error, lost=share.parts[0].path)
    events = Index.of(table, not_here)
    return _handle(visible(table), Events(events, np.arange(len(events)), share.base, share.lanes), job)


def _call(handler: EventsHandler, table: pa.Table, tx: Tx) -> None:
    """Raise HandlerError where it asks `tx` for a name that is none."""
    try:
        handler(table, tx)
    except BaseException as left:
        refuse_unknown_name(left, tx)
        raise


@dataclass(frozen=True)
class Events:
    """The events of one call of the handler."""

    index: Index
    rows: Ints  # of the index
    base: int  # what the run adds to the numbers of the index
    lanes: Ints | None


def _handle(table: pa.Table, events: Events, job: HandlerJob) -> TaskOutcome:
    """Call the handler.

    Args:
        table: the rows as the handler sees them, in the order of `events`.
    """
    index, base, made = events.index, events.base, _Made()
    rows = events.rows + base
    tx = Tx(ArrowFrames(), index, events.rows, made, events.lanes)  # type: ignore[arg-type]
    outcome = TaskOutcome(rows, writes=made.writes, messages=made.messages)
    try:
        with reentry.handling(job.consumer):
            _call(job.handler, table, tx)
        tx.close()
        tx.perform_writes(partial(_file, outcome, made, job))
    except EventsFailed as found:
        at = (index.locate(found.positions) + base).tolist()
        failed = [(row, told(error, job.rules)) for row, error in zip(at, found.errors, strict=True)]
        return TaskOutcome(rows, failed=failed, misfits=found.misfits, fitting=found.fitting)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the driver judges it
        return TaskOutcome(rows, error=told(error, job.rules))
    outcome.fitting = frozenset(made.fitting)
    outcome.rejected = {row + base: reason for row, reason in tx.rejected.items()}
    outcome.skipped, outcome.of_events = (tx.skipped + base).tolist(), tx.of_events
    return outcome


def _file(outcome: TaskOutcome, made: _Made, job: HandlerJob, table: str, rows: Rows) -> None:
    assert job.files is not None
    outcome.files.extend(job.files.write(rows))
    made.fit(table, rows)


class _Made:
    """The transaction of a task: what the handler said is kept for the driver."""

    def __init__(self) -> None:
        self.writes: list[Written] = []
        self.messages: list[Messages] = []
        self.fitting: set[str] = set()  # columns with values, with their tables; whether those of `writes` fit the driver will say

    def fit(self, table: str, rows: Rows) -> None:
        """Note which columns of a table have values."""
        self.fitting.update(f"{table}.{name}" for name in with_values(rows))

    @property
    def connection(self) -> Any:
        """None. Raises AttributeError."""
        raise AttributeError("A task has no tx.connection here: Delta has no transaction that a statement could join. Use tx.write.")

    def write(self, table: str, rows: Rows) -> int:
        """Kept for the driver."""
        return self._keep(table, rows, None)

    def apart(self, tables: Collection[str]) -> bool:
        """True: the driver writes them table by table."""
        return True

    def merge(self, table: str, rows: Rows, how: Merge) -> int:
        """Kept for the driver: of several partitions one row a key is left."""
        return self._keep(table, rows, how)

    def _keep(self, table: str, rows: Rows, how: Merge | None) -> int:
        plain = rows.plain()
        found = rows.arrow() if plain is None else list(plain.rows)
        self.writes.append(Written(table, found, how, None if plain is None else plain.authors))
        self.fit(table, rows)
        return len(found)

    def enqueue(self, messages: Messages) -> None:
        """Kept for the driver."""
        self.messages.append(messages)
