"""Read ranges of one partition. A read returns each event of the range once, in order, and nothing beyond it. No read waits for ever.

One client of azure-eventhub receives a partition in a thread of its own. It goes on while Spark plans, up to a bound. If a link breaks, the
reader opens it again at the next sequence number. If an event does not come, an error names its position. The client repeats events after a
reconnect, and its keep-alive thread can deliver one too late; the reader loses no event in either case.

Readers stay open between the tasks of one Python worker. Each process has its own; nothing is shared after a fork. Only exclusive readers
(with an owner level) stay open, because an idle reader without a level counts against the five that the service allows per partition and
consumer group. The source, log.py and the runner call this module.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from azure.eventhub import EventHubConsumerClient

from checkpoint import given
from checkpoint.errors import IncarnationChanged, PositionsMissing, ReceiverStolen, SourceUnavailable
from dedup.core.settings import RECEIVE
from dedup.eventhub import rows
from dedup.eventhub.connection import Connection
from dedup.eventhub.namespace import Namespace, condition, explained
from dedup.eventhub.rows import NONE, SCHEMA, numbers

log = logging.getLogger("dedup")

STOLEN, NO_SUCH_POSITION = "link:stolen", "argument-error"
POLL = 0.25
"""Seconds between two looks at what is missing."""

AHEAD = 32 * 1024 * 1024
"""Bytes of events that wait for the reader, one batch more at most; then the client waits."""

Position = int | str | dt.datetime

PATIENCE = 2.0
"""Seconds that an event may come later than one behind it."""

MOST_EARLY = 50_000
"""Events kept while one before them is missing; more and the wait is over."""

IDLE_SECONDS = 30.0

_idle: dict[Key, tuple[PartitionReader, float]] = {}
_lock = threading.Lock()
_owner = os.getpid()
_sweeper: threading.Thread | None = None


@dataclass(frozen=True)
class Receive:
    """The settings with which a partition is received."""

    prefetch: int = 1000
    """Events that the service sends ahead, and the most in one batch. Memory: three times as many, and 32 MB that wait."""
    timeout: float = 60.0
    """Seconds without an event that should be there, after which reading is given up."""
    level: int | None = None
    """Owner level: the service ends receivers of a lower or the same one in the same consumer group. None reads beside others."""
    fail_on_data_loss: bool = True
    """False: positions that are not in the log any more are left out, with a warning."""

    def __post_init__(self) -> None:
        given.check_fields(RECEIVE, self)


class PartitionReader:
    """Read one range after another. The link stays open between ranges that follow each other. One thread may use it at a time."""

    def __init__(self, connection: Connection, partition: int, options: Receive) -> None:
        self.connection, self.partition, self.options = connection, partition, options
        self._namespace = Namespace(connection)
        self._receiver: Receiver | None = None
        self._order = InOrder(0)
        self._rest = NONE  # in order, beyond the range that was read
        self._proven = False  # the hub behind this link is the one whose positions are read
        self._fresh = True  # nothing in order came since the link was opened
        self._kept = False  # the link is from a range before; while it was idle, others might take the partition
        self._attempt, self._trouble = 0, "the link is open and silent"

    @property
    def next(self) -> int | None:
        """The sequence number that the open link delivers next; None if a link must be opened."""
        if self._receiver is None or self._receiver.broken:
            return None
        return int(numbers(self._rest)[0]) if len(self._rest) else self._order.next

    def read(self, first: int, last: int, created: str | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the events from `first` to `last`, both included, in pieces: rows of rows.SCHEMA.

        Args:
            first: sequence number.
            last: sequence number.
            created: when the hub of these positions was created; None: do not check.

        Raises:
            PositionsMissing: the log does not have some of them.
            IncarnationChanged: the hub was created again, or ends before `last`.
            ReceiverStolen: another receiver of the consumer group took over.
            SourceUnavailable: no event came for `timeout` seconds.
            ConfigError: the service refuses.
        """
        self._kept = self.next == first
        if not self._kept:
            self._open(first)
        events, progress = self._rest, time.monotonic()
        while True:
            piece, self._rest = _split(events, last)
            if len(events):
                progress = time.monotonic()
            if len(piece):
                yield piece
            if len(self._rest) or self._order.next > last:
                return
            events = self._more(last, created, progress)

    def close(self) -> None:
        """Close the link."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._rest = None, NONE

    def _open(self, first: int) -> None:
        self.close()
        self._order, self._fresh, self._proven = InOrder(first), True, False
        self._receiver = Receiver(self.connection, self.partition, first, self.options.prefetch, self.options.level)

    def _more(self, last: int, created: str | None, progress: float) -> pa.RecordBatch:
        """What is next in order; nothing, where one has to look again."""
        assert self._receiver is not None
        try:
            events = self._receiver.get(POLL)
            if events is not None:
                self._prove(created)
        except Broken as broken:
            self._again(broken.error, created)
            events = None
        now = time.monotonic()
        if events is not None and len(ready := self._order.add(events, now)):
            self._fresh, self._attempt, self._trouble = False, 0, "the link is open and silent"
            return ready
        behind = self._order.hole(now)
        if behind is not None:
            return self._gap(min(behind, last + 1))
        if now - progress > self.options.timeout:
            return self._silence(last, created)
        return NONE

    def _prove(self, created: str | None) -> None:
        """Asked once events of a link came, so that the answer is about them: another hub of the same name has numbers like these."""
        if self._proven or created is None:
            return
        try:
            self._namespace.check(created)
        except SourceUnavailable as away:
            raise Broken(away) from away  # what came is asked for again
        self._proven = True

    def _again(self, error: Exception, created: str | None) -> None:
        """Open the link again where it broke, unless that cannot help."""
        self.close()
        if condition(error) == STOLEN and not self._kept:
            raise ReceiverStolen(
                f"{self._here}: another receiver of consumer group {self.connection.group!r} has this partition (our owner level: "
                f"{self.options.level}). Stop one of the two, or give each a consumer group of its own."
            )
        if condition(error) == NO_SUCH_POSITION:
            self._ends_early(created)
        known = error if isinstance(error, SourceUnavailable) else explained(error, self.connection, f", partition {self.partition}")
        if not isinstance(known, SourceUnavailable):
            raise known
        self._trouble = str(known)
        log.warning("%s: %s; opening the link again", self._here, known)
        backoff(self._attempt)
        self._attempt, self._kept = self._attempt + 1, False
        self._open(self._order.next)

    def _gap(self, behind: int) -> pa.RecordBatch:
        """Events came, but not the next one. A link that was just opened for it tells the truth."""
        if self.options.fail_on_data_loss and not self._fresh:
            self._open(self._order.next)
            return NONE
        return self._lost(behind - 1)

    def _silence(self, last: int, created: str | None) -> pa.RecordBatch:
        if created is not None:
            self._namespace.check(created)
        span = self._namespace.span(self.partition)
        if span.first > self._order.next:
            return self._lost(min(span.first - 1, last))
        if span.end <= last:
            self._ends_early(created)
        self.close()
        raise SourceUnavailable(
            f"{self._here}: no event came for {self.options.timeout:g} seconds, but the log goes on to {span.end - 1}: {self._trouble}. "
            "Nothing was decided; run it again."
        )

    def _lost(self, upto: int) -> pa.RecordBatch:
        """Positions up to this one are not in the log any more."""
        what = f"positions {self._order.next}-{upto} are not in the log any more (retention or compaction)"
        if self.options.fail_on_data_loss:
            where = self._here
            self.close()
            raise PositionsMissing(f"{where}: {what}. Find out what is lost. Then set failOnDataLoss=false to go on without them.")
        log.warning("%s: %s; going on without them", self._here, what)
        return self._order.skip_to(upto + 1)

    def _ends_early(self, created: str | None) -> None:
        where = self._here
        self.close()
        if created is not None:
            self._namespace.check(created)
        raise IncarnationChanged(
            f"{where}: the log ends before this position. The hub was deleted and created again, or this is another hub."
        )

    @property
    def _here(self) -> str:
        return f"{self.connection.source}/{self.connection.hub}, partition {self.partition}, position {self._order.next}"


def _split(events: pa.RecordBatch, last: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Those up to this position, and the rest."""
    count = int(np.searchsorted(numbers(events), last, side="right"))
    return (events, NONE) if count == len(events) else (events.slice(0, count), events.slice(count))


class Broken(Exception):
    """The client gave up; `error` is its error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Receiver:
    """One link that receives a partition. It begins at once, and its maker must close it.

    Args:
        connection: of the hub.
        partition: its id.
        first: the sequence number of the first event.
        prefetch: how many events the service may send ahead, and the most of one batch.
        level: the owner level; None: read beside other receivers.
    """

    def __init__(self, connection: Connection, partition: int, first: Position, prefetch: int, level: int | None) -> None:
        self._waiting = _Waiting()
        self._place = (connection.source, connection.hub, partition)
        self._closed = threading.Event()
        self.broken = False
        self._client = connection.client(retry_total=0)  # a retry of its own would begin at an offset, ours at a sequence number
        options = {
            "on_event_batch": self._take,
            "on_error": self._fail,
            "partition_id": str(partition),
            "starting_position": first,
            "starting_position_inclusive": True,
            "prefetch": prefetch,
            "max_batch_size": prefetch,
            "owner_level": level,
        }
        self._thread = threading.Thread(target=_run, args=(self._client, options, self), daemon=True, name=f"eventhub-{partition}")
        self._thread.start()

    def get(self, seconds: float) -> pa.RecordBatch | None:
        """Return the next batch, rows of rows.SCHEMA, or None if none comes within so many seconds. Raises Broken."""
        found = self._waiting.get(seconds)
        if isinstance(found, Exception):
            raise Broken(found)
        return found

    def close(self) -> None:
        """Begin to close the link, which takes the client a second. `wait_closed` waits for the end."""
        self._closed.set()
        threading.Thread(target=_end, args=(self._client, self._thread), daemon=True).start()

    def wait_closed(self, seconds: float) -> None:
        """Wait until the link is closed."""
        self._thread.join(seconds)

    def _take(self, context: Any, events: list[Any]) -> None:
        self._put(rows.batch(events, *self._place))  # at once: rows take a tenth of the memory

    def _fail(self, context: Any, error: Exception) -> None:
        self.broken = True
        self._put(error)
        self.close()  # the client would try again, and spin until then

    def _put(self, item: pa.RecordBatch | Exception) -> None:
        while not self._closed.is_set():
            if self._waiting.put(item, 0.2):
                return


class _Waiting:
    """Batches, first in, first out, bounded by their bytes."""

    def __init__(self) -> None:
        self._items: deque[tuple[pa.RecordBatch | Exception, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def put(self, item: pa.RecordBatch | Exception, seconds: float) -> bool:
        """False if there was no room for so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._bytes < AHEAD, seconds):
                return False
            size = 0 if isinstance(item, Exception) else item.nbytes
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def get(self, seconds: float) -> pa.RecordBatch | Exception | None:
        """None if there was nothing for so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, seconds):
                return None
            item, size = self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item


def _run(client: EventHubConsumerClient, options: dict[str, Any], receiver: Receiver) -> None:
    try:
        client.receive_batch(**options)
    except Exception as error:  # noqa: BLE001 - it is the reader's thread that raises it
        receiver._fail(None, error)


def _end(client: EventHubConsumerClient, thread: threading.Thread) -> None:
    while thread.is_alive():  # one that has not begun yet would not notice the first time
        with contextlib.suppress(Exception):
            client.close()
        thread.join(1.0)


def backoff(attempt: int) -> None:
    """Wait before the next attempt."""
    time.sleep(pause_after(attempt))


def pause_after(attempt: int) -> float:
    """Return for how many seconds to wait before the next attempt: 0.1, doubled each time, at most 5. The first attempt is 0."""
    return min(5.0, 0.1 * 2.0 ** min(attempt, 10))


class InOrder:
    """A buffer that returns each event once, in order, from `first` on. Events are rows of rows.SCHEMA."""

    def __init__(self, first: int) -> None:
        self.next = first
        """Sequence number of the next event that is given."""
        self._early: dict[int, tuple[pa.RecordBatch, float]] = {}  # one row each

    def add(self, events: pa.RecordBatch, now: float) -> pa.RecordBatch:
        """Take the events that came at `now` (seconds). Return those that are in order."""
        found = numbers(events)
        if not self._early and np.array_equal(found, np.arange(self.next, self.next + len(found))):
            self.next += len(found)
            return events
        for row in np.flatnonzero(found >= self.next).tolist():
            self._early.setdefault(int(found[row]), (events.slice(row, 1), now))
        return self._ready()

    def hole(self, now: float, patience: float = PATIENCE) -> int | None:
        """Return the sequence number of the first event behind a gap that has lasted long enough, or None."""
        if not self._early:
            return None
        first = min(self._early)
        return first if len(self._early) > MOST_EARLY or now - self._early[first][1] >= patience else None

    def holes(self) -> list[tuple[int, int]]:
        """Return the first and the last position of each gap before an event that waits, however short it has lasted."""
        waiting = sorted(self._early)
        return [(before + 1, behind - 1) for before, behind in pairwise([self.next - 1, *waiting]) if behind > before + 1]

    def skip_to(self, number: int) -> pa.RecordBatch:
        """Stop waiting for events below this number. Return those that are then in order."""
        self.next = max(self.next, number)
        return self._ready()

    def _ready(self) -> pa.RecordBatch:
        ready: list[pa.RecordBatch] = []
        while self.next in self._early:
            ready.append(self._early.pop(self.next)[0])
            self.next += 1
        return pa.Table.from_batches(ready, SCHEMA).combine_chunks().to_batches()[0] if ready else NONE


Key = tuple[Connection, int, Receive]


@contextmanager
def borrowed(connection: Connection, partition: int, options: Receive) -> Iterator[PartitionReader]:
    """Lend a reader of this partition: the one that an earlier task left open, or a new one. It stays open if no error occurs."""
    key = (connection, partition, options)
    reader = _take(key) or PartitionReader(connection, partition, options)
    try:
        yield reader
    except BaseException:
        reader.close()
        raise
    if options.level is None:
        reader.close()
    else:
        _keep(key, reader)


def close_all() -> None:
    """Close the idle readers of this process."""
    with _lock:
        readers = [reader for reader, _ in _idle.values()]
        _idle.clear()
    for reader in readers:
        reader.close()


def _take(key: Key) -> PartitionReader | None:
    _after_fork()
    with _lock:
        return _idle.pop(key, (None, 0.0))[0]


def _keep(key: Key, reader: PartitionReader) -> None:
    global _sweeper
    with _lock:
        before = _idle.pop(key, None)
        _idle[key] = (reader, time.monotonic() + IDLE_SECONDS)
        if _sweeper is None:
            _sweeper = threading.Thread(target=_sweep, daemon=True, name="eventhub-idle")
            _sweeper.start()
    if before is not None:
        before[0].close()


def _after_fork() -> None:
    """A child has its parent's readers without their threads: it forgets them."""
    global _owner, _sweeper, _lock
    if _owner != os.getpid():
        _owner, _sweeper, _lock = os.getpid(), None, threading.Lock()
        _idle.clear()


def _sweep() -> None:
    while True:
        time.sleep(IDLE_SECONDS / 6)
        now = time.monotonic()
        with _lock:
            old = [key for key, (_, until) in _idle.items() if until < now]
            readers = [_idle.pop(key)[0] for key in old]
        for reader in readers:
            reader.close()
