"""The plain runner: a Consumer on an event hub without Spark, in as many processes as you like.

Each process owns some partitions, gathers batches of them, and commits each batch in one transaction with its checkpoint. azure-eventhub's
event processor receives; the consumer's batches run in a thread.

If a callback raises, the client delivers the batch again for ever. So the runner judges each error itself: it leaves a lost partition,
tries again from the checkpoint after an error that may pass, and ends the process after any other error.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from azure.eventhub.aio import CheckpointStore, EventHubConsumerClient
from azure.eventhub.exceptions import EventHubError

from checkpoint import changes, given, start
from checkpoint.errors import ConfigError, Fenced, PartitionLost, PositionGap, StillHeld, command
from checkpoint.head import Checkpoint, Head, Topic
from checkpoint.position import Partition, Ranges
from deadletter import outage
from deadletter.redact import redact
from dedup import logs
from dedup.consumer import Consumer
from dedup.core.settings import RUNNER
from dedup.eventhub import rows
from dedup.eventhub.client import aio_client
from dedup.eventhub.connection import DEFAULT_GROUP, Connection, hidden
from dedup.eventhub.leases import Leases, owners_beside
from dedup.eventhub.namespace import KnownEnds, Namespace, Span, explained, refuse_spelling
from dedup.eventhub.reader import InOrder
from dedup.pipeline.commit import Job
from dedup.pipeline.member import Assignment, Member

log = logging.getLogger("dedup")

WAY = (
    "auth_timeout",
    "connection_verify",
    "custom_endpoint_address",
    "http_proxy",
    "socket_timeout",
    "ssl_context",
    "transport_type",
    "user_agent",
)
"""Arguments of the client that say how to reach the service. Questions about the hub go the same way as its events come."""

Start = Literal["earliest", "latest"] | dt.datetime

RENEWALS = 3
"""So often `expire_after` has to hold `balance_every`. The client renews up to a fifth late, and one renewal may fail or take its time."""

LOOK_SECONDS = 60.0
"""Between two looks at which partitions there are."""


def run(consumer: Consumer, connection: Connection | str, hub: str | None = None, group: str = DEFAULT_GROUP, **options: Any) -> None:
    """Run the consumer on an event hub until SIGTERM or SIGINT. Start as many processes as you like: they share the partitions.

    On either signal it finishes the batch in hand, gives the partitions back and returns.

    Args:
        consumer: a consumer with a handler. Handlers get Arrow tables, or events one by one.
        connection: `Connection.of(...)`, `Connection.entra(...)`, or a connection string.
        hub: name of the event hub, if the connection string names none.
        group: consumer group.
        options: as for `run_async`.

    Raises:
        ConfigError: a setting is wrong, the hub or the consumer group does not exist, access is denied, or the consumer's state has the hub
            in another spelling.
        SourceUnavailable: Event Hubs does not answer at the start. StoreUnavailable: the store does not.
        StillHeld: a Spark query runs this consumer.
        Fenced: a Spark query took it over.
        CheckpointError: a person has to decide (PositionGap, IncarnationChanged); the message names the command.
        DedupError: any other error that ends a batch after `max_outage`.

    Crash: committed batches stay. The process that claims the partitions next reads all others again.
    """
    asyncio.run(_until_signal(lambda stop: run_async(consumer, connection, hub, group, stop=stop, **options)))


async def run_async(
    consumer: Consumer,
    connection: Connection | str,
    hub: str | None = None,
    group: str = DEFAULT_GROUP,
    *,
    stop: asyncio.Event | None = None,
    ownership: CheckpointStore | None = None,
    start: Start = "earliest",
    max_events: int = 5_000,
    max_bytes: int = 16 * 1024 * 1024,
    max_wait: given.Duration = 0.5,
    prefetch: int = 1_000,
    balance_every: given.Duration = 10.0,
    expire_after: given.Duration = 60.0,
    **client: Any,
) -> None:
    """Do what `run` does inside a running event loop. The caller handles signals.

    Args:
        stop: an event that ends the run when it is set, as a signal ends `run`.
        ownership: any CheckpointStore of azure.eventhub.aio, with which processes share the partitions. Default: one beside the
            consumer's state.
        start: where partitions without a checkpoint begin. It counts until their first commit.
        max_events: the most events of one batch; not above the consumer's `max_events_per_transaction`.
        max_bytes: about the most bytes of the bodies of one batch.
        max_wait: how long the first event of a batch waits for others.
        prefetch: how many events of a partition the service sends ahead. Memory holds at most twice as many, and two batches.
        balance_every: how often the processes balance the partitions.
        expire_after: after how long a process that does not renew its partitions loses them; at least three times `balance_every`.
        client: further arguments of EventHubConsumerClient.
    """
    given.check(RUNNER, locals())
    if isinstance(connection, str):
        connection = Connection.of(connection, hub, group)
    bounds = Bounds(min(max_events, consumer.max_events), max_bytes, given.to_seconds(max_wait))
    balancing = _balancing(given.to_seconds(balance_every), given.to_seconds(expire_after))
    owners = ownership or owners_beside(consumer.store, consumer.name)
    runner = Runner(consumer.job(), connection, owners, bounds, start, prefetch, {**balancing, **client})
    try:
        with logs.about(consumer=consumer.name):
            await runner.run(stop or asyncio.Event())
    finally:
        if ownership is None and hasattr(owners, "close"):
            await owners.close()


def _balancing(every: float, expire: float) -> dict[str, float]:
    """The options of the client. Raises ConfigError where processes would lose partitions that they read, and take them from each other."""
    if expire < (least := round(RENEWALS * every, 6)):
        raise ConfigError(
            f"expire_after={expire:g} is too short for balance_every={every:g}: one late renewal, and another process takes the partition. "
            f"Set expire_after to at least {least:g} seconds, or lower balance_every."
        )
    return {"load_balancing_interval": every, "partition_ownership_expiration_interval": expire}


async def _until_signal(body: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        await body(stop)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set it, where this is the main thread."""
    loop = asyncio.get_running_loop()
    chosen = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in chosen:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in chosen:
            loop.remove_signal_handler(number)


class Stopping(Exception):
    """The process was asked to stop while it waited. Nothing of the batch is committed."""


class NotClaimed(Exception):
    """The claim of the partition failed. The client gives the partition up, and a process claims it again."""


class Runner:
    """One process of the runner. Use it once."""

    def __init__(
        self,
        job: Job,
        connection: Connection,
        owners: CheckpointStore,
        bounds: Bounds,
        start: Start,
        prefetch: int,
        client: dict[str, Any],
    ) -> None:
        self._stopping = threading.Event()
        self._member = Member(job, sleep=self._sleep)
        self._job, self._connection, self._bounds = job, connection, bounds
        self._start, self._prefetch, self._options = start, prefetch, client
        self._source = job.preparation.source or connection.source
        self._leases = Leases(owners, job.store, job.name, self._source, connection)
        self._namespace = Namespace(connection, **{name: value for name, value in client.items() if name in WAY})
        self._owned: dict[str, Gathered] = {}
        self._ends: dict[str, int] = {}  # partition -> sequence number after its newest event, as the process began
        self._doubted: dict[str, set[tuple[int, int]]] = {}  # partition -> holes that were seen since its last commit
        self._links: Counter[str] = Counter()  # of the client: partition -> links so far
        self._worker = ThreadPoolExecutor(1, "dedup-batch")  # one transaction at a time
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, or an error ends it."""
        watching = asyncio.create_task(self._stop_with(stop))
        spans = (await asyncio.to_thread(self._namespace.look)).spans
        partitions, self._ends = set(spans), {str(number): span.end for number, span in spans.items()}
        try:
            with contextlib.suppress(Stopping):
                await asyncio.to_thread(self._member.join)
                with self._member.beating():
                    while not self._ended.is_set():
                        partitions = await self._receive(partitions)
        finally:
            watching.cancel()
            await asyncio.to_thread(self._leave)
        if self._failure is not None:
            raise self._failure

    def _leave(self) -> None:
        self._worker.shutdown()
        self._job.stop_upkeep()
        try:
            if self._member.epoch:
                self._member.leave()
        except Exception as error:  # noqa: BLE001 - what ended the run is worth more
            log.warning("%s: could not record that this process has stopped: %s", self._member.name, error)

    async def _stop_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        log.info("%s: stopping after the current batch", self._member.name)
        self._stopping.set()
        self._ended.set()
        await asyncio.to_thread(self._member.stop)  # who loses patience and kills has not been killed by an event

    def _sleep(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise Stopping

    async def _receive(self, partitions: set[int]) -> set[int]:
        """Receive until the run ends, or there are other partitions; returns those that there are."""
        client = aio_client(self._connection, **{**self._options, "checkpoint_store": self._leases})
        self._links = client.links
        receiving = asyncio.create_task(
            client.receive_batch(
                self._on_batch,
                on_error=self._on_error,
                on_partition_initialize=self._on_claimed,
                on_partition_close=self._on_closed,
                max_batch_size=self._prefetch,
                max_wait_time=max(self._bounds.wait, 0.05),
                prefetch=self._prefetch,
                starting_position=self._beginnings(),
                # As Spark's startingTime. The client takes it for checkpoints, too: the event at one comes again, and is dropped.
                starting_position_inclusive=isinstance(self._start, dt.datetime),
            )
        )
        looking = asyncio.create_task(self._look(client, partitions))
        ending = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({receiving, looking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and not self._ended.is_set():
                receiving.result()
            return looking.result() if looking.done() else partitions
        finally:
            await client.close()  # waits for the batch in hand, and gives the partitions back
            for task in (receiving, looking, ending):
                task.cancel()
            await asyncio.gather(receiving, looking, ending, return_exceptions=True)

    def _beginnings(self) -> Any:
        """Where partitions without a checkpoint begin, for the client.

        The latest is where they ended when this process began: the client itself would look again with each link that it opens, and leave
        out what came before. Partitions that are added later begin at their first event.
        """
        if self._start == "latest":
            return {number: end - 1 if end else "-1" for number, end in self._ends.items()}
        return "-1" if self._start == "earliest" else self._start

    async def _look(self, client: EventHubConsumerClient, partitions: set[int]) -> set[int]:
        """Return when there are other partitions than these: the client itself asks only once. Return, too, if an error ends the run."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                found = {int(number) for number in await client.get_partition_ids()}
                await asyncio.to_thread(self._forget_gap)
            except Exception as error:  # noqa: BLE001 - the broker or the store is away: the next look tells
                if self._ends_run(error):
                    return partitions
                log.warning("%s: cannot look at the partitions: %s", self._member.name, self._shown(error))
                continue
            if found != partitions:
                log.info("%s: %d partitions instead of %d", self._member.name, len(found), len(partitions))
                return found

    def _forget_gap(self) -> None:
        """A gap that a person accepted counts for every partition that has one, and no longer.

        This runner knows one hub. With checkpoints of another one it leaves the gap alone: it may be there.

        Crash: the gap is closed, and empty partitions are moved behind theirs, or nothing is done; the next look does it.
        """
        head, here = self._job.store.head(self._member.name), (self._source, self._connection.hub)
        if head.gap_accepted and not {(p.source, p.topic) for p in head.checkpoints} - {here}:
            spans = self._namespace.look().spans
            close = partial(_closed, here=here, spans=spans)
            with contextlib.suppress(PositionGap):
                start.positions(close(head), self._source, KnownEnds(spans), [self._connection.hub])
                self._job.store.amend(self._member.name, close, by="runner", reason="no partition has a gap any more")

    async def _on_claimed(self, context: Any) -> None:
        """The client has got a partition: claim it for commits, too, and find out where it goes on."""
        try:
            self._owned[context.partition_id] = await asyncio.to_thread(self._claim, int(context.partition_id))
        except Exception as error:
            if not (isinstance(error, StillHeld) or outage.may_pass(error, self._job.policy.on_failure)):
                self._fail(error)
            log.warning("%s: partition %s is not claimed: %s", self._member.name, context.partition_id, self._shown(error))
            raise

    def _claim(self, number: int) -> Gathered:
        """One after another: claim, then the checkpoint, so that nobody moves it any more, then the log."""
        assignment = self._member.claim(Partition(self._source, self._connection.hub, number))
        created = self._namespace.created()
        assignment.topic_ids = {(self._source, self._connection.hub): created}
        head = self._job.known_head()
        first = self._first(head, number, self._namespace.span(number))
        log.info("%s: partition %d claimed (number %d), from %s", self._member.name, number, assignment.claim.number, first or self._start)
        return Gathered(assignment, self._bounds, first, doubted=frozenset(self._doubted.get(str(number), ())))

    def _first(self, head: Head, number: int, span: Span) -> int | None:
        """Which event comes first; None where there is no checkpoint. Raises PositionGap, IncarnationChanged, ConfigError."""
        place = (self._connection.hub, number)
        refuse_spelling(head, self._source, self._connection.hub)
        found = start.positions(head, self._source, KnownEnds({number: span}), [place[0]])[place]
        return found if isinstance(found, int) else None

    async def _on_batch(self, context: Any, events: list[Any]) -> None:
        part = self._owned.get(context.partition_id)
        if part is None:
            raise NotClaimed(f"partition {context.partition_id}")
        if events and (part.link == 0 or part.link != self._links[context.partition_id]):
            await self._ask_life(part, self._links[context.partition_id])
        now = time.monotonic()
        try:
            part.add(events, now)
        except Exception as error:  # the client would deliver what cannot be read again for ever
            self._fail(error)
            raise
        if missing := part.hole(now):
            await self._judge(context.partition_id, part, *missing)
        if part.running is not None and part.running.done():
            await self._await_batch(context.partition_id, part)
        while part.due(time.monotonic()):
            await self._await_batch(context.partition_id, part)
            part.running = asyncio.get_running_loop().run_in_executor(self._worker, self._process, part, part.take())

    async def _ask_life(self, part: Gathered, link: int) -> None:
        """Behind a new link the hub may be another one, whose numbers began anew: asked after events came, so that the answer is theirs."""
        told = await asyncio.to_thread(self._namespace.created)
        part.assignment.topic_ids, part.link = {(self._source, self._connection.hub): told}, link

    async def _await_batch(self, partition: str, part: Gathered) -> None:
        """Wait for the batch that is in the store: the next one is gathered meanwhile, and no more. Raises what it ended with."""
        running = part.running
        if running is None:
            return
        await asyncio.wait({running})
        part.running, error = None, running.exception()
        if error is not None:
            self._note(partition, part, error)
            raise error
        self._doubted.pop(partition, None)

    async def _judge(self, partition: str, part: Gathered, first: int, last: int) -> None:
        """Positions did not come: lost to retention, to the link, or never there (compaction)."""
        span = await asyncio.to_thread(self._namespace.span, int(partition))
        head = await asyncio.to_thread(self._job.store.head, self._member.name)
        if span.first > first and not head.gap_accepted:
            error = PositionGap(
                f"Consumer {self._member.name!r}: retention has passed the reader; positions {first}-{min(last, span.first - 1)} of "
                f"partition {partition} cannot be had any more. Run "
                f"{command('consumer', 'accept-gap', self._member.name)} to go on without them."
            )
            self._fail(error)
            raise error
        if span.first <= first and (first, last) not in part.doubted:
            # A compacted log may have thousands: reading it again shows all that are in sight, where it would show one at a time.
            self._doubted.setdefault(partition, set()).update({(first, last), *part.holes()})
            raise NotClaimed(f"positions {first}-{last} of partition {partition} did not come: read again from the checkpoint")
        behind = min(last + 1, span.first) if span.first > first else last + 1  # retention took nothing above its border
        self._leave_out(partition, part, first, behind)
        while (more := part.hole(time.monotonic())) in part.doubted and more[0] >= span.first:
            self._leave_out(partition, part, more[0], more[1] + 1)

    def _leave_out(self, partition: str, part: Gathered, first: int, behind: int) -> None:
        log.warning("%s: positions %d-%d of partition %s are not in the log", self._member.name, first, behind - 1, partition)
        part.skip_to(behind, time.monotonic())

    def _process(self, part: Gathered, events: pa.Table) -> None:
        if self._ended.is_set():
            raise Stopping
        where, started = part.assignment.partition, time.monotonic()
        report = self._member.process(part.assignment, events)
        told = {**report.fields, "epoch": self._member.epoch}
        log.info("%s %s: %s, %.2f s", self._member.name, where, report, time.monotonic() - started, extra=told)

    def _note(self, partition: str, part: Gathered, error: BaseException) -> None:
        """What a batch ended with: a lost partition is left, anything else ends the run."""
        if isinstance(error, Stopping):
            return
        if self._owned.get(partition) is part:  # and not claimed again meanwhile
            del self._owned[partition]
        if isinstance(error, PartitionLost):
            log.warning("%s: %s", self._member.name, error)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the run with this error: the client itself would deliver the batch again for ever."""
        if self._failure is None:
            self._failure = error
        self._stopping.set()
        self._ended.set()

    async def _on_closed(self, context: Any, reason: Any) -> None:
        """The client lets go of a partition, and gives it back after this: the batch in the store is waited for."""
        part = self._owned.get(context.partition_id)
        if part is not None:
            with contextlib.suppress(Exception):  # noted
                await self._await_batch(context.partition_id, part)
            self._owned.pop(context.partition_id, None)

    async def _on_error(self, context: Any, error: Exception) -> None:
        if not isinstance(error, NotClaimed | Stopping | Fenced) and not self._ends_run(error):
            what = f"partition {context.partition_id}" if context else "balancing"
            log.warning("%s: %s: %s", self._member.name, what, self._shown(error))

    def _ends_run(self, error: Exception) -> bool:
        """End the run with an error that no waiting mends. Return whether it is one."""
        known = explained(error, self._connection) if isinstance(error, EventHubError) else error
        if not isinstance(known, ConfigError):
            return False
        self._fail(known)
        return True

    def _shown(self, error: Exception) -> str:
        return hidden(redact(f"{type(error).__name__}: {error}"), self._connection).split("\n")[0]


def _closed(head: Head, here: Topic, spans: Mapping[int, Span]) -> Head:
    """The head in which a gap is an error again.

    Empty partitions are moved behind their gaps. No event would do that for long, and an open gap accepts those of other partitions, too.
    """
    found = [_passing(head, Partition(*here, number), span.end) for number, span in spans.items() if span.first == span.end]
    return changes.close_gap(changes.moved(head, filter(None, found)))


def _passing(head: Head, partition: Partition, end: int) -> changes.Move | None:
    """The move of a checkpoint to the end of an empty partition; None if it is there."""
    point = head.checkpoints.get(partition)
    if point is None or point.sequence_number >= end - 1:
        return None
    now = point.sequence_number
    return changes.Move(partition, now, Checkpoint(end - 1), Ranges.of([(now + 1, end - 1)]))


@dataclass(frozen=True)
class Bounds:
    """The bounds of a batch. The first one that is reached makes the batch due."""

    events: int
    size: int  # bytes of their bodies
    wait: float  # seconds since its first event came


@dataclass
class Gathered:
    """The events of one partition that are in hand and not committed. They are kept as rows, which take a tenth of the memory.

    Args:
        first: the sequence number that must come first; None: any.
    """

    assignment: Assignment
    bounds: Bounds
    first: int | None
    order: InOrder | None = None
    doubted: frozenset[tuple[int, int]] = frozenset()  # holes that were seen before: the log was read again since then
    events: list[pa.RecordBatch] = field(default_factory=list)
    count: int = 0  # of these events
    size: int = 0  # bytes of their bodies
    since: float = 0.0
    link: int = 0  # of the client, behind which the hub was last asked which one it is
    running: asyncio.Future[None] | None = None  # the batch that is in the store

    def __post_init__(self) -> None:
        self.order = None if self.first is None else InOrder(self.first)

    def add(self, events: Sequence[Any], now: float) -> None:
        """Take events. Those that came before are dropped; those that come early wait for the ones before them."""
        if not events:
            return
        came = rows.batch(events, *self.assignment.partition)
        if self.order is None:
            self.order = InOrder(int(rows.numbers(came).min()))
        self._keep(self.order.add(came, now), now)

    def skip_to(self, number: int, now: float) -> None:
        """Stop waiting for events below this position."""
        assert self.order is not None
        self._keep(self.order.skip_to(number), now)

    def hole(self, now: float) -> tuple[int, int] | None:
        """Return the first and the last missing position, once they have been missing for long enough."""
        behind = self.order.hole(now) if self.order else None
        return None if behind is None or self.order is None else (self.order.next, behind - 1)

    def holes(self) -> list[tuple[int, int]]:
        """Return the first and the last position of all that is missing now."""
        return self.order.holes() if self.order else []

    def due(self, now: float) -> bool:
        """Return whether the events in hand are a batch."""
        if not self.events:
            return False
        if self.assignment.hold is not None and rows.numbers(self.events[-1])[-1] < self.assignment.hold:
            return False  # another process died in this batch: it has to be tried with the same rows
        full = self.count >= self.bounds.events or self.size >= self.bounds.size
        return full or now - self.since >= self.bounds.wait

    def take(self) -> pa.Table:
        """Return the batch. Events beyond its bound stay in hand."""
        whole = pa.Table.from_batches(self.events, rows.SCHEMA)
        batch = whole if self.assignment.hold is not None else whole.slice(0, self.bounds.events)
        self.events = whole.slice(batch.num_rows).to_batches()
        self.count, self.size = whole.num_rows - batch.num_rows, sum(map(_size, self.events))
        return batch

    def _keep(self, ready: pa.RecordBatch, now: float) -> None:
        if not len(ready):
            return
        if not self.events:
            self.since = now
        self.events.append(ready)
        self.count, self.size = self.count + len(ready), self.size + _size(ready)


def _size(events: pa.RecordBatch) -> int:
    return int(events.column("body").nbytes)
