"""The Consumer: one handler around which every batch is one exactly-once effect.

`consumer(batch, batch_id)` is what `foreachBatch` calls. The flow of a batch is `_process`; of a chunk, `flow.commit_chunk`.
Picklable: settings travel, connections and epochs do not.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from checkpoint import given
from checkpoint.errors import CommitConflict, ConfigError
from checkpoint.position import Partition
from deadletter.budget import Budget
from deadletter.classify import Rule
from deadletter.policy import Retry
from dedup import company, executors, flow, incarnation, on_driver, outage, planning, reentry, starting
from dedup.care import Care
from dedup.claims import Slicing
from dedup.decode.prepare import Prepare
from dedup.envelope import Columns
from dedup.epoch import Live, take_epoch
from dedup.executors import Tasks
from dedup.feed import Feed, frame_of, open_feed
from dedup.hints import hints
from dedup.incarnation import Witness
from dedup.keys import KeySettings
from dedup.planning import OnKeyConflict
from dedup.registered import Registered
from dedup.report import Report
from dedup.settings import CONSUMER, horizon, mapping, names_of
from dedup.starting import Log, New
from dedup.store import Head, Run, Store, Topic
from dedup.trial import Trials

log = logging.getLogger("dedup")

CONFLICT_ATTEMPTS = 5
"""How often a batch is planned again after another commit of the same epoch came first."""


class Consumer(Registered):
    """A named application that handles every event of its topics with an exactly-once effect.

    Args:
        name: names the state. One Spark query per name.
        store: PostgresStore or DeltaStore; keeps the state beside the sinks.
        idempotence_key: what makes two deliveries the same message: a column (`data.order_id`), several, or, on Spark,
            a SQL expression. Default: the message id, else the position. **It names the message, not the entity.**
        payload: columns whose change makes a KEY_CONFLICT of an equal key. Default: the body.
        key_scope: "topic": a key counts within (consumer, source, topic); "consumer": across all its topics.
        null_key: "dead_letter" parks an event whose every key part is null as NO_KEY; "position" uses its position.
        on_key_conflict: "dead_letter", "duplicate" (first payload wins, silently counted) or "error" (the batch fails).
        decode: `decode.json(schema)`, `decode.avro(schema)` or a function Column -> Column; adds the column `data`.
        positions: "auto" recognises Spark's Kafka source and the eventhubs schema; `Columns(...)` maps anything else;
            None is the key-only mode: keys dedupe, no checkpoint, nothing to prove.
        source: which broker, where the frame does not say. Two topics of one name on two brokers are two topics.
        incarnation: tells which life of its topics a broker serves, such as `kafka.Broker(...).topic_ids`: a topic that was deleted and
            created again is refused then, whatever it holds.
        part: column that numbers the rows one event was exploded into.
        max_events_per_transaction: rows of one commit: a larger batch is cut into chunks, and the handler called for each. What a batch
            takes of the driver's memory it does not bound. Default: the store's.
        max_body: bytes of a body that a dead letter keeps whole.
        sequence_key: columns of the event: within a partition, events that have the same one keep their order. Those behind a dead
            letter wait as dead letters too, until it is reprocessed or discarded.
        retry: how often and how long a transient error of the handler is tried again before an event is parked.
        budget: for each kind of dead letter, how many of the last events may become one before that counts as a bug, an outage or a bad
            deploy, and nothing is parked any more. None: all.
        bisect: False for a handler that does not mean the same on a part of a batch, as one that aggregates: it gets the whole batch (in
            Spark's tasks on PostgreSQL the whole slice of a partition) or BatchTooLarge, and what it raises fails the batch.
        errors: rules (exception type or predicate, ErrorClass) that come before the shipped ones, first match first.
        max_outage: seconds of trying a batch again, with backoff, while everything fails or the store is away. Then the query stops.
            `math.inf`: never.
        handler_timeout: seconds of one run of the handler and of what it writes; then the process ends with its stacks on stderr.
        retention: a timedelta: the age at which you purge reservations; None: never. `reprocess_within`, the same: how old a letter may be
            that is reprocessed.
        query: a name for the query where Spark gives no id (Spark Connect); without one the restored-store guard is off there.
        takeover_after: seconds without a sign of life after which another copy is taken over.
        takeover: take over a live copy at once.
        scratch: folder that driver and executors share, for batches too large for the driver. `collect=False`: for all.

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
        incarnation: Witness | None = None,
        part: str | None = None,
        max_events_per_transaction: int | None = None,
        max_body: int = 20 * 1024 * 1024,
        sequence_key: str | Sequence[str] | None = None,
        retry: Retry | None = None,
        budget: Budget | Literal["default"] | None = "default",
        bisect: bool = True,
        errors: Sequence[Rule] = (),
        max_outage: float = 300.0,
        handler_timeout: float | None = None,
        retention: dt.timedelta | None = None,
        reprocess_within: dt.timedelta | None = None,
        query: str | None = None,
        takeover_after: float = 60.0,
        takeover: bool = False,
        scratch: str | os.PathLike[str] | None = None,
        collect: bool = True,
    ) -> None:
        given.check(CONSUMER, locals())
        super().__init__()
        if positions is None and (idempotence_key is None or null_key == "position"):
            raise ConfigError(
                "Without positions every event needs an idempotence key: give idempotence_key= and leave null_key='dead_letter'."
            )
        self.name, self.store = name, store
        names = {"columns": idempotence_key, "payload": payload, "sequence": sequence_key}
        self.keys = KeySettings(scope=key_scope, null_key=null_key, **{name: names_of(value) for name, value in names.items()})
        limits = Budget() if budget == "default" else budget
        limit = None if handler_timeout is None else float(handler_timeout)
        self.care = Care(retry or Retry(), limits, bisect, tuple(errors), self.identity, limit)
        self.max_outage = float(max_outage)
        self.reprocess_within = horizon(retention, reprocess_within)
        self.on_key_conflict: OnKeyConflict = on_key_conflict
        self.decode, self.positions, self.source, self.part = decode, positions, source, part
        self.incarnation = incarnation
        self.max_events = max_events_per_transaction or store.default_max_events
        self.max_body, self.query, self.collect = max_body, query, collect
        self.scratch = None if scratch is None else os.fspath(scratch)
        self.takeover_after, self.takeover = float(takeover_after), takeover
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._live: Live | None = None
        self._hinted = False
        self._calls = reentry.Calls()
        self._trials = Trials(lambda: self.store.trial(self.name), lambda text: self.store.set_trial(self.name, text))
        self._culprits: dict[tuple[int, int], set[int]] = {}  # (batch, chunk) -> rows that halves found

    def __getstate__(self) -> dict[str, Any]:
        here = ("_live", "_calls", "_trials", "_culprits", "_hinted")
        own = {name: value for name, value in self.__dict__.items() if name not in here}
        return {**own, "_inline": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._begin_anew()

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self.store!r})"

    @property
    def identity(self) -> reentry.Identity:
        """Tells it from a consumer of the same name on another store."""
        return reentry.identity(self.name, self.store)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that decide which keys and positions are equal; the state is bound to them."""
        return {**self.keys.canonical(), "part": self.part or "", "source": self.source or "", "positions": mapping(self.positions)}

    def __call__(self, batch: Any, batch_id: int) -> Report:
        """Process one batch: a Spark DataFrame (from foreachBatch) or a pyarrow Table.

        Returns what became of its rows. Safe to call again with the same batch after any failure.

        Raises:
            ConfigError: the frame cannot be mapped; nothing was written.
            Fenced: a newer copy runs; stop this one.
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
        self.policy()
        with self._calls.one(self.identity):
            started, feed = time.monotonic(), open_feed(batch, self.scratch, collect=self.collect)
            report = self._through_outages(feed, int(batch_id))
            with company.sending(self.name):
                self.send_messages()
        log.info("%s batch %s: %s, %.2f s", self.name, batch_id, report, time.monotonic() - started)
        if report.dead_lettered:
            log.warning("%s batch %s: parked %d; `dedup dead-letters groups` says why", self.name, batch_id, report.dead_lettered)
        return report

    def check(self, frame: Any) -> None:
        """Refuse now what the first batch would be refused for: no handler, a frame that cannot be mapped, stateful operators
        upstream, a store that cannot be reached or was written with other settings, a topic that was created again. Changes nothing.

        Logs a warning where events will be known by their positions alone (no headers and no `idempotence_key=`), and for a Kafka stream
        without `source=` or `incarnation=`. So does the first batch.

        Args:
            frame: the streaming DataFrame (or an Arrow table) that the consumer will be given.
        """
        self.policy()
        head = self.known_head()
        feed = open_feed(frame, self.scratch, collect=self.collect)
        feed.check(self.prepare(head))
        self._hint(feed, head)
        if (tasks := executors.tasks_of(self, feed)) is not None:
            executors.check(self, tasks, head)
        incarnation.refuse_others(head, self.told(head.checkpoints))

    def run(self, writer: Any) -> None:
        """Check, start `writer.foreachBatch(self)`, wait for its end, and publish what is decided.

        Args:
            writer: a DataStreamWriter with its checkpointLocation and trigger set.

        Raises:
            What `check` raises, and what ended the query.
        """
        reentry.refuse(self.identity, "A run")
        self.check(frame_of(writer))
        with outage.naming_limits(self.name):
            query = writer.foreachBatch(self).start()
            try:
                with company.stopping_at_sigterm():
                    query.awaitTermination()
            finally:
                query.stop()
        self.store.publish(self.name)

    def _through_outages(self, feed: Feed, batch_id: int) -> Report:
        """Try the batch again, with backoff, while what is wrong is everybody's fault."""
        self._culprits = {}
        what = f"{self.name} batch {batch_id}"
        with outage.naming_limits(what):
            return outage.retrying(what, self.max_outage, self.care)(self._with_replanning, feed, batch_id)

    def _with_replanning(self, feed: Feed, batch_id: int) -> Report:
        for _ in range(CONFLICT_ATTEMPTS - 1):
            try:
                return self._process(feed, batch_id)
            except CommitConflict:
                log.warning("%s batch %s: another commit came first; planning again", self.name, batch_id)
        return self._process(feed, batch_id)

    def _process(self, feed: Feed, batch_id: int) -> Report:
        tasks = executors.tasks_of(self, feed)
        head, first = self._hold(feed, tasks), self._begins()
        query = self.query or feed.query_id
        run = Run(query or feed.run_key, batch_id, durable=query is not None)
        with self.store.heartbeat(self.name, head.epoch, every=max(self.takeover_after / 6, 0.1)):
            if tasks is not None and isinstance(self.store, Slicing):
                report, reached = executors.process(self, tasks, head, run, first=first)
            else:
                report, reached = on_driver.process(self, feed, head, run, executors.policy_in(self, tasks), self._culprits)
        self._live = Live(feed.run_key, replace(reached, epoch=head.epoch), begun=True)
        return report

    def _begins(self) -> bool:
        """Whether this is the first try of a query run in this process, or the one after a try that failed."""
        assert self._live is not None
        first, self._live = not self._live.begun, replace(self._live, begun=False)
        return first

    def _hold(self, feed: Feed, tasks: Tasks | None) -> Head:
        """The head under the epoch of this query run, which is taken at its first batch."""
        head = self.store.head(self.name)
        if self._live is None or self._live.run_key != feed.run_key:
            feed.check(self.prepare(head))
            self._hint(feed, head)
            if tasks is not None:
                executors.check(self, tasks, head)
            self._live = Live(feed.run_key, take_epoch(self.store, self.name, feed.run_key, self.takeover_after, force=self.takeover))
            head = self.store.head(self.name)
        planning.refuse_older(head, self._live.head)
        return replace(head, epoch=self._live.head.epoch)

    def _hint(self, feed: Feed, head: Head) -> None:
        """Log, once, what works and does less than its user may think."""
        if not self._hinted:
            self._hinted = True
            for sentence in hints(feed.names, self.prepare(head), head, witnessed=self.incarnation is not None):
                log.warning("%s: %s", self.name, sentence)

    def prepare(self, head: Head) -> Prepare:
        """What turns an input into this consumer's events with keys, under this head."""
        return Prepare(
            consumer=self.name,
            keys=self.keys,
            columns=self.positions,
            source=self.source,
            part=self.part,
            positions=self.positions is not None,
            decoder=self.decode,
            keyspace=head.keyspace,
            incarnations=dict(head.incarnations),
        )

    def told(self, partitions: Iterable[Partition]) -> dict[Topic, str]:
        """What their broker says now of the topics of these partitions, where `incarnation=` can ask it. Raises SourceUnavailable."""
        return incarnation.ask(self.incarnation, {(p.source, p.topic) for p in partitions})

    def starting_offsets(self, log: Log, *topics: str, new: New = "earliest") -> str:
        """Where a stream without a Spark checkpoint goes on, as `startingOffsets` of Spark's Kafka source takes it.

        Args:
            log: asks from where to where the partitions reach: `kafka.Broker("host:9092")`.
            topics: all that the stream subscribes to.
            new: where partitions begin that have no checkpoint.

        Raises:
            PositionGap: retention has passed a checkpoint. IncarnationChanged: a topic was created again, or ends below its checkpoint.
            SourceUnavailable: the broker does not answer.
        """
        head = self.known_head()
        incarnation.refuse_others(head, self.told(Partition(starting.source_of(self), topic, 0) for topic in topics))
        return starting.spark_json(starting.positions(head, starting.source_of(self), log, topics, new))

    def known_head(self) -> Head:
        """The state now. Raises SettingsChanged where it was written with other key settings than this consumer has."""
        head = self.store.head(self.name)
        planning.guard(head, Run("", 0), self.settings, {})
        return head

    def policy(self) -> flow.Policy:
        """What this consumer's settings say about a chunk. Raises ConfigError without a handler."""
        if self._handler is None:
            raise ConfigError(f"Consumer {self.name!r} has no handler. Register one with @consumer.foreach_batch.")
        return flow.Policy(self._handler, self.settings, self.on_key_conflict, self.max_body, self.care, self._trials)
