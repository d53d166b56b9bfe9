"""The Consumer: one handler around which every batch is one exactly-once effect.

`consumer(batch, batch_id)` is what `foreachBatch` calls. Everything below gets a frozen `Job` of it:
the way of a batch goes on in pipeline/commit.py.
Picklable: settings travel, connections and epochs do not.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import pyarrow as pa

from checkpoint import given, guards, start
from checkpoint.errors import ConfigError, DedupError
from checkpoint.guards import TopicIdentity
from checkpoint.head import Head, Run
from checkpoint.holders import Live, take_epoch
from checkpoint.position import KAFKA_SOURCE
from checkpoint.start import Log, New
from deadletter import outage
from deadletter.crashes import CrashMarker
from deadletter.policy import FailurePolicy, OwnPolicy
from dedup import logs
from dedup.core.envelope import Columns
from dedup.core.keys import KeySettings
from dedup.core.planning import OnKeyConflict
from dedup.core.rows import table_of_dicts, without_views
from dedup.core.settings import DISPATCH_TO, SECONDS_OF_SENDING
from dedup.core.store import Store
from dedup.decode import Decoder
from dedup.decode.prepare import Prepare
from dedup.outbox import Destination
from dedup.outbox.dispatch import Inline
from dedup.pipeline import company, reentry
from dedup.pipeline.batch import ArrowBatch, Batch, Tasks
from dedup.pipeline.commit import Culprits, Job, Policy, commit_batch, known_head
from dedup.pipeline.handlers import (
    Where,
    refuse_coroutine,
)
from dedup.pipeline.registered import Registered
from dedup.pipeline.report import OnBatch, Report, tell
from dedup.pipeline.tx import Handler
from dedup.pipeline.upkeep import OwnUpkeep
from dedup.settings import CONSUMER, Limits, Takeover, hints, horizon, mapping, names_of

log = logging.getLogger("dedup")

_SENDING = threading.Lock()
"""A runner's partitions are threads of one process: they make what sends once."""

_DECORATORS = "@consumer.foreach_batch, @consumer.foreach(into='table') or @consumer.foreach_arrow(into='table')"

CONFLICT_ATTEMPTS = 5
"""How often a batch is planned again after another commit of the same epoch came first."""


class Consumer(Registered):
    """A named application that handles every event of its topics with an exactly-once effect.

    Args:
        name: names the state. One Spark query per name.
        store: PostgresStore or DeltaStore; keeps the state beside the sinks.
        idempotence_key: what makes two deliveries the same message: a column (`data.order_id`), several, or, on Spark,
            a SQL expression. Default: the message id, else the position. **It names the message, not the entity.**
        payload: columns that are compared between two events of one key: different values are a KEY_CONFLICT. Default: the body.
        key_scope: "topic": a key counts within (consumer, source, topic); "consumer": across all its topics.
        null_key: what becomes of an event of which all key parts are null. "dead_letter": a letter of the kind NO_KEY; "position": its
            position is its key.
        on_key_conflict: what becomes of an event with a known key and another payload: "dead_letter", "duplicate" (dropped and counted) or
            "error" (the batch fails).
        decode: `decode.json(schema)`, `decode.avro(schema)` or a function Column -> Column, which returns null for a body that it cannot
            decode; adds the column `data`.
        positions: "auto" recognises Spark's Kafka source and the eventhubs schema; `Columns(...)` maps anything else;
            None: rows have no positions. Only keys distinguish events, there is no checkpoint, and `verify` can prove nothing.
        source: the broker's name, where the frame has none. It distinguishes topics of one name on two brokers.
        incarnation: a function that asks the broker for the ids of its topics, such as `kafka.Broker(...).topic_ids`. With it dedup refuses
            a topic that was deleted and created again.
        part: column that numbers the rows one event was exploded into.
        sequence_key: columns of the event. Within a partition, events with the same value keep their order. If one is a dead letter,
            the later ones wait as dead letters, until it is reprocessed or discarded.
        query: a name for the query where Spark gives no id (Spark Connect). Without one dedup cannot notice there that the state was
            restored to an older time.
        on_batch: called with the `Report` of each batch after its commit, in the process that commits it. An error in it is logged with its
            stack and fails nothing. If the process dies between the commit and the call, there is no report of that batch.
        failure: `FailurePolicy(...)`: retries, budget, bisection, the classes of errors, time limits.
        takeover: `Takeover(...)`: when another instance of this name is taken over.
        limits: `Limits(...)`: rows of a transaction, sizes, ages, and whether batches come to the driver.

    Raises:
        ConfigError: a setting has another type, range or unit than it takes (it names the setting, the value and what is expected), or
            settings that cannot work together.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        idempotence_key: str | Sequence[str] | None = None,
        payload: str | Sequence[str] | None = None,
        key_scope: Literal["topic", "consumer"] = "topic",
        null_key: Literal["dead_letter", "position"] = "dead_letter",
        on_key_conflict: OnKeyConflict = "dead_letter",
        decode: Any | None = None,
        positions: Columns | Literal["auto"] | None = "auto",
        source: str | None = None,
        incarnation: TopicIdentity | None = None,
        part: str | None = None,
        sequence_key: str | Sequence[str] | None = None,
        query: str | None = None,
        on_batch: OnBatch | None = None,
        failure: FailurePolicy | None = None,
        takeover: Takeover | None = None,
        limits: Limits | None = None,
    ) -> None:
        given.check(CONSUMER, locals())
        if on_batch is not None:
            refuse_coroutine(on_batch, "on_batch")
        if positions is None and (idempotence_key is None or null_key == "position"):
            raise ConfigError(
                "Without positions every event needs an idempotence key: give idempotence_key= and leave null_key='dead_letter'."
            )
        super().__init__(name)
        self.store = store
        names = {"columns": idempotence_key, "payload": payload, "sequence": sequence_key}
        self.keys = KeySettings(scope=key_scope, null_key=null_key, **{name: names_of(value) for name, value in names.items()})
        self.failure, self.takeover, self.limits = failure or FailurePolicy(), takeover or Takeover(), limits or Limits()
        if self.failure.on_parked is not None:
            refuse_coroutine(self.failure.on_parked, "on_parked")
        self.on_failure = OwnPolicy.of(self.failure, self.identity)
        self.reprocess_within = horizon(self.limits.retention, self.limits.reprocess_within)
        self._retention = None if self.limits.retention is None else given.to_timedelta(self.limits.retention)
        if self.limits.upkeep and self._retention is not None:
            store.upkeep_turn(name, self._retention)  # refused now where there is none
        self.on_key_conflict: OnKeyConflict = on_key_conflict
        self.decode, self.positions, self.source, self.part = decode, positions, source, part
        self.incarnation, self.query, self.on_batch = incarnation, query, on_batch
        self.max_events = self.limits.max_events_per_transaction or store.default_max_events
        self.scratch = None if self.limits.scratch is None else os.fspath(self.limits.scratch)
        self.destination: Destination | None = None
        self.send_timeout = SECONDS_OF_SENDING
        self._inline: Inline | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._live: Live | None = None
        self._hinted = False
        self._upkeep = self._own_upkeep()
        self._marker = CrashMarker(lambda: self.store.crash_marker(self.name), lambda text: self.store.set_crash_marker(self.name, text))

    def _own_upkeep(self) -> OwnUpkeep | None:
        """What `Limits(upkeep=True)` asks for. No portion of it begins after the end of this object."""
        if not self.limits.upkeep or self._retention is None:
            return None
        made = OwnUpkeep(self.name, partial(self.store.upkeep_turn, self.name, self._retention))
        weakref.finalize(self, made.let_end).atexit = False  # at the end of the process it is waited for
        return made

    def __getstate__(self) -> dict[str, Any]:
        here = ("_live", "_marker", "_hinted", "_upkeep")
        own = {name: value for name, value in self.__dict__.items() if name not in here}
        return {**own, "_inline": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._begin_anew()

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self.store!r})"

    def dispatch_to(self, destination: Destination, *, timeout: given.Duration = SECONDS_OF_SENDING) -> None:
        """Send the messages of `tx.publish` right after each batch: `kafka.Topics("host:9092")`, or `Call(function)`.

        A destination that is away, hangs, or raises whatever error, fails no batch and does not stop the stream. A warning says why. The
        messages wait for the next batch, or for `dedup outbox dispatch`.

        Args:
            timeout: how long a batch waits for sending, as a timedelta or in seconds. A call that takes longer cannot be ended. It goes on
                in its thread, and its messages may arrive in addition to those that are sent again, with the same ids.

        Raises:
            ConfigError: the destination or the time-out has a value that it does not take.
        """
        given.check(DISPATCH_TO, {"destination": destination, "timeout": timeout}, "dispatch_to")
        self.destination, self.send_timeout, self._inline = destination, given.to_seconds(timeout), None

    def _after_batch(self) -> None:
        """Begin a turn of the upkeep that `Limits(upkeep=True)` asks for, where one is due. Returns at once, and raises nothing."""
        if self._upkeep is not None:
            self._upkeep.after_batch()

    def _stop_upkeep(self) -> None:
        """End the upkeep that `Limits(upkeep=True)` does now, within some seconds. A later batch begins it again.

        `run`, and the end of the process, do that by themselves. Crash: each portion is done or not; the next turn goes on.
        """
        if self._upkeep is not None:
            self._upkeep.stop()

    def _tell_retention(self) -> None:
        """Note in the store what `Limits(retention=)` says, where consumers share its tables. Called before the first batch of a start.

        Raises:
            StoreError: the store failed.

        Crash: it is noted or not.
        """
        self.store.tell_retention(self.name, self._retention, upkeep=self.limits.upkeep)

    def send_messages(self) -> None:
        """Send what waits in the outbox to the destination of `dispatch_to`. Raises no error of a destination or of the store."""
        if self.destination is None:
            return
        try:
            self._sending(self.destination).send(lambda: self.store.outbox(self.name))
        except DedupError as error:  # of whatever kind: the batch is committed
            log.warning("%s: the messages of this batch are not sent yet: %s", self.name, error)

    def _sending(self, destination: Destination) -> Inline:
        with _SENDING:
            self._inline = self._inline or Inline(destination, self.send_timeout)
            return self._inline

    @property
    def _patience(self) -> float:
        """Seconds without a sign of life after which another instance is taken over."""
        return given.to_seconds(self.takeover.after)

    @property
    def identity(self) -> reentry.Identity:
        """Tells it from a consumer of the same name on another store."""
        return reentry.identity(self.name, self.store)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that decide which keys and positions are equal; the state is bound to them."""
        return {**self.keys.canonical(), "part": self.part or "", "source": self.source or "", "positions": mapping(self.positions)}

    def __call__(self, batch: Any, batch_id: int) -> Any:
        """Process one batch: a Spark DataFrame (from foreachBatch) or a pyarrow Table.

        Returns its `Report`; the annotation is Any, since `foreachBatch` is declared to take a function that returns nothing. Safe to call
        again with the same batch after any failure.

        Raises:
            ConfigError: the frame cannot be mapped; nothing was written.
            Fenced: a newer instance runs; stop this one.
            CheckpointError: a person has to decide; the message names the command.
            HandlerError: this is called inside the consumer's own handler.
            StoreError: the store failed for longer than `max_outage`, or memory, or with bisect=False one transaction, was not enough
                (BatchTooLarge names the settings); nothing of the running chunk was committed.
            BudgetExceeded: so many events failed in one way, for that long, that none of the running chunk was parked.
            Anything the handler raised that is not the fault of single events, or with bisect=False. What was raised in Spark's
                tasks and cannot travel whole is a `deadletter.failure.Elsewhere`, with its type, message and stack.

        Crash: before a chunk's commit nothing of it is true; after it, all of it is. The next call with the same
        events finds their positions recorded and drops them.
        """
        reentry.refuse(self.identity, "A call")
        opened = open_batch(batch, self.scratch, collect=self.limits.collect)
        return self._told(opened, self._run_of(opened, int(batch_id)))

    def _run_of(self, batch: Batch, batch_id: int) -> Run:
        query = self.query or batch.query_id
        return Run(query or batch.run_key, batch_id, durable=query is not None)

    def process(self, batch: Any) -> Report:
        """Process rows that belong to no stream, in a test or a notebook. They need no batch id.

        Args:
            batch: a Spark DataFrame, a pyarrow Table, a pandas frame, or a list of rows as dicts. It has the columns that the consumer
                expects of its stream (`positions=`). Events with positions or keys that are decided are dropped, as in a stream.

        Raises:
            ConfigError: the batch has another type, or cannot be mapped; nothing was written. And what a call raises.
            Refused: a stream has written this consumer's state, or the frame is a batch of one. Rows by hand would take the place of
                the stream's next batch.

        Crash: as of a call.
        """
        reentry.refuse(self.identity, "A call")
        opened = open_batch(as_batch(batch), self.scratch, collect=self.limits.collect)
        head = self.store.head(self.name)
        return self._told(opened, guards.run_by_hand(head, opened.query_id))

    def _told(self, batch: Batch, run: Run) -> Report:
        with logs.about(consumer=self.name, batch=run.batch_id):
            return self._deliver(batch, run)

    def _deliver(self, batch: Batch, run: Run) -> Report:
        started, job = time.monotonic(), self.job()
        report = self._through_outages(job, batch, run)
        with company.sending(self.name):
            self.send_messages()
        self._after_batch()
        assert self._live is not None
        points = {partition: point.sequence_number for partition, point in self._live.head.checkpoints.items()}
        seconds = time.monotonic() - started
        report = replace(report, consumer=self.name, batch_id=run.batch_id, seconds=seconds, checkpoints=points)
        told = {**report.fields, "epoch": self._live.head.epoch}
        log.info("%s batch %s: %s, %.2f s", self.name, run.batch_id, report, seconds, extra=told)
        if report.dead_lettered:
            log.warning("%s batch %s: parked %d; `dedup dead-letter group` says why", self.name, run.batch_id, report.dead_lettered)
        tell(self.on_batch, report)
        return report

    def _through_outages(self, job: Job, batch: Batch, run: Run) -> Report:
        """Try the batch again, with backoff, while what is wrong is everybody's fault."""
        what, culprits = f"{self.name} batch {run.batch_id}", Culprits()
        with outage.ending_with_its_query(is_over := lambda: batch.is_over, what), outage.naming_limits(what):
            waiting = replace(self.on_failure, sleep=outage.while_wanted(self.on_failure.sleep, is_over))
            retrying = outage.retrying(what, given.to_seconds(self.failure.max_outage), waiting)
            trying = partial(self._process, job, batch, run, culprits)
            report: Report = retrying(outage.with_replanning, trying, CONFLICT_ATTEMPTS, what)
        return report

    def _process(self, job: Job, batch: Batch, run: Run, culprits: Culprits) -> Report:
        tasks = tasks_of(job, batch)
        head, first = self._hold(job, batch, tasks), self._begins()
        with logs.about(epoch=head.epoch), self.store.heartbeat(self.name, head.epoch, every=max(self._patience / 6, 0.1)):
            if tasks is None:
                report, reached = commit_batch(job, batch, head, run, culprits)
            else:
                report, reached = _in_tasks().process(job, batch, tasks, head, run, culprits, first=first)
        self._live = Live(batch.run_key, replace(reached, epoch=head.epoch), begun=True)
        return report

    def _begins(self) -> bool:
        """Whether this is the first try of a query run in this process, or the one after a try that failed."""
        assert self._live is not None
        first, self._live = not self._live.begun, replace(self._live, begun=False)
        return first

    def _hold(self, job: Job, batch: Batch, tasks: Tasks | None) -> Head:
        """The head under the epoch of this query run, which is taken at its first batch."""
        live = self._live  # looked at before the state: another thread's call may commit in between
        head = self.store.head(self.name)
        if live is None or live.run_key != batch.run_key:
            self._check(job, batch, tasks, head)
            live = Live(batch.run_key, take_epoch(self.store, self.name, batch.run_key, self._patience, force=self.takeover.now))
            self._tell_retention()
            self._live = live
            head = self.store.head(self.name)
        guards.refuse_older(head, live.head)
        return replace(head, epoch=live.head.epoch)

    def _check(self, job: Job, batch: Batch, tasks: Tasks | None, head: Head) -> None:
        """Refuse what can be refused before anything is evaluated; log, once, what works and does less than its user may think."""
        batch.check(job.prepare(head))
        if not self._hinted:
            self._hinted = True
            knows = self.incarnation is not None
            for sentence in hints(batch.names, job.prepare(head), head, knows_topic_ids=knows, reads_files=batch.reads_files):
                log.warning("%s: %s", self.name, sentence, extra={"consumer": self.name})
        if tasks is not None:
            _in_tasks().check(job, tasks, head)

    def check(self, frame: Any) -> None:
        """Raise now what the first batch would be refused for. Changes nothing.

        The cases are: no handler; a frame that cannot be mapped; stateful operators upstream; a store that cannot be reached, or was
        written with other settings; a topic that was created again; Spark workers that lack a package (one of each core is asked).

        Logs a warning if only positions will distinguish events (no headers and no `idempotence_key=`), and for a Kafka stream without
        `source=` or `incarnation=`. The first batch does the same.

        Args:
            frame: the streaming DataFrame (or an Arrow table) that the consumer will be given.
        """
        job = self.job()
        head, batch = job.known_head(), open_batch(frame, self.scratch, collect=self.limits.collect)
        self._check(job, batch, tasks_of(job, batch), head)
        guards.refuse_others(head, job.topic_ids(head.checkpoints))

    def run(self, writer: Any) -> None:
        """Check, start `writer.foreachBatch(self)`, wait for its end, and make committed batches visible in Delta sinks.

        Args:
            writer: a DataStreamWriter with its checkpointLocation and trigger set.

        Raises:
            DedupError: what `check` raises, and an error of dedup's that ended the query; its cause is Spark's StreamingQueryException.
            StreamingQueryException: what else ended the query. On Spark Connect, also an error of dedup's: the callback runs elsewhere.
        """
        reentry.refuse(self.identity, "A run")
        self.check(frame_of(writer))
        callback = _Callback(self)
        with outage.naming_limits(self.name):
            query = writer.foreachBatch(callback).start()
            try:
                with company.stopping_at_sigterm():
                    query.awaitTermination()
            except Exception as ended:
                callback.raise_own(ended)
                raise
            finally:
                query.stop()
                self._stop_upkeep()
        self.store.publish(self.name)

    def job(self) -> Job:
        """This consumer as it is now, for everything below. Raises ConfigError without a handler."""
        if self._handler is None:
            raise ConfigError(f"Consumer {self.name!r} has no handler. Write {_DECORATORS} above a function.")
        return Job(
            self.name,
            self.store,
            self._policy(self._handler),
            self._preparation(),
            self.max_events,
            given.to_seconds(self.failure.max_outage),
            read_log=self.read_log,
            take_back=self.take_back,
            identify=self.incarnation,
            takeover_after=self._patience,
            takeover=self.takeover.now,
            reprocess_within=self.reprocess_within,
            scratch=self.scratch,
            collect=self.limits.collect,
            send_messages=self.send_messages,
            tell_retention=self._tell_retention,
            after_batch=self._after_batch,
            stop_upkeep=self._stop_upkeep,
            on_batch=self.on_batch,
        )

    def _policy(self, handler: Handler) -> Policy:
        """What the settings say about a chunk. A function as decode= is the driver's, and stays here."""
        decoder = self.decode if isinstance(self.decode, Decoder) else None
        on_failure, decodes = self.on_failure, self.decode is not None
        return Policy(handler, self.settings, self.on_key_conflict, self.limits.max_body, on_failure, self._marker, decoder, decodes)

    def _preparation(self) -> Prepare:
        """What turns an input into this consumer's events with keys, under an empty state."""
        return Prepare(
            consumer=self.name,
            keys=self.keys,
            columns=self.positions,
            source=self.source,
            part=self.part,
            positions=self.positions is not None,
            decoder=self.decode,
        )

    def known_head(self) -> Head:
        """The state now. Raises SettingsChanged where it was written with other key settings than this consumer has."""
        return known_head(self.store, self.name, self.settings)

    def starting_offsets(self, log: Log, *topics: str, new: New = "earliest") -> str:
        """The next position of each partition, as `startingOffsets` of Spark's Kafka source takes it. Spark's checkpoint comes first.

        Args:
            log: the broker, which is asked for the first and last position of each partition: `kafka.Broker("host:9092")`.
            topics: all topics that the stream subscribes to.
            new: where partitions without a checkpoint begin: "earliest" or "latest".

        Raises:
            PositionGap: retention has passed a checkpoint. IncarnationChanged: a topic was created again, or ends below its checkpoint.
            SourceUnavailable: the broker does not answer.
        """
        head, source = self.known_head(), self.source or KAFKA_SOURCE
        guards.refuse_others(head, guards.ask(self.incarnation, {(source, topic) for topic in topics}))
        return start.spark_json(start.positions(head, source, log, topics, new))


@dataclass
class _Callback:
    """What `foreachBatch` calls: a consumer, whose last error of ours stays here. Spark passes on no more than its text."""

    consumer: Consumer
    raised: DedupError | None = None

    def __call__(self, batch: Any, batch_id: int) -> Any:
        self.raised = None
        try:
            return self.consumer(batch, batch_id)
        except DedupError as error:
            self.raised = error
            raise

    def raise_own(self, ended: Exception) -> None:
        """Raise the error of ours that ended the query, if there is one. Its cause is Spark's error, and the cause of that its own one.

        Args:
            ended: what Spark raised.
        """
        if self.raised is None:
            return
        if ended.__cause__ is None:
            ended.__cause__ = self.raised.__cause__ or self.raised.__context__
        raise self.raised from ended


def tasks_of(job: Job, batch: Batch) -> Tasks | None:
    """Where the handler of this batch runs; None where that is here.

    Raises:
        ConfigError: the handler is to run in tasks, and cannot.
    """
    where: Where | None = getattr(job.policy.handler, "where", None)
    if where is None or where.on == "driver" or batch.tasks is None:
        return None
    if job.preparation.positions:
        return batch.tasks
    if where.on == "executors":
        raise ConfigError(f"Consumer {job.name!r} has positions=None: its handler of events runs on the driver. Take out on='executors'.")
    return None


def _in_tasks() -> ModuleType:
    """What plans a batch for tasks. Only a batch of Spark's has them, so that Spark is there."""
    return importlib.import_module("dedup.spark.tasks")


def as_batch(rows: Any) -> Any:
    """A list of dicts or a pandas frame as a pyarrow Table; anything else as it is. Raises ConfigError where a value has no Arrow type."""
    is_pandas = type(rows).__module__.split(".")[0] == "pandas"
    if not is_pandas and not isinstance(rows, list):
        return rows
    if isinstance(rows, list) and not (rows and all(isinstance(row, Mapping) for row in rows)):
        raise ConfigError("A list of rows holds dicts, at least one: their names are the columns.")
    try:
        return pa.Table.from_pandas(rows, preserve_index=False) if is_pandas else table_of_dicts(rows)
    except (OverflowError, UnicodeEncodeError) as error:
        why = "Arrow holds whole numbers of 64 bits, and text that UTF-8 can write."
        raise ConfigError(f"The rows cannot become columns: {error}. {why}") from error
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"The rows cannot become columns: {error}. Give each column values of one type.") from error
    except ValueError as error:  # pandas: two columns of one name
        raise ConfigError(f"The rows cannot become columns: {error}. Give each column a name of its own.") from error


def open_batch(batch: Any, scratch: str | None, *, collect: bool = True) -> Batch:
    """The feed for a pyarrow Table or a Spark DataFrame, whose rows come to the driver or not. Raises ConfigError for anything else."""
    if isinstance(batch, pa.Table | pa.RecordBatch):
        return ArrowBatch(without_views(batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])))
    if type(batch).__module__.split(".")[0] == "pyspark":
        from dedup.spark.batch import SparkBatch

        return SparkBatch(batch, scratch, collect=collect)
    raise ConfigError(
        f"A batch is a Spark DataFrame or a pyarrow Table, and for consumer.process a pandas frame or a list of dicts as well, "
        f"not {type(batch).__name__}."
    )


def frame_of(writer: Any) -> Any:
    """The streaming DataFrame that a DataStreamWriter of Spark was made of."""
    if hasattr(writer, "_df"):
        return writer._df
    from dedup.spark.batch import connect_frame

    return connect_frame(writer)
