"""What users register on a consumer: its handler, what reads the log again, what takes an effect back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from checkpoint.errors import ConfigError, DestinationUnavailable, Fenced, StoreError
from dedup.executors import On, Where
from dedup.foreach import EachSlice, EventHandler, Registers, SliceHandler
from dedup.foreach_async import each_event
from dedup.outbox import Destination, Dispatcher
from dedup.settings import refuse_coroutine, refuse_handler
from dedup.store import Store
from dedup.tx import Handler, LogReader, Undo

log = logging.getLogger("dedup")

_SENDING = threading.Lock()
"""A runner's partitions are threads of one process, and share what sends."""


class Registered:
    """The part of `Consumer` that holds the user's functions."""

    name: str
    store: Store

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self.read_log: LogReader | None = None
        self.take_back: Undo | None = None
        self.destination: Destination | None = None
        self._dispatcher: Dispatcher | None = None

    def foreach_batch(self, handler: Handler) -> Handler:
        """Register the handler: called with a frame of new events only, and a `Tx`. Usable as a decorator."""
        if self._handler is not None:
            raise ConfigError(f"Consumer {self.name!r} has a handler already. Use one consumer per handler.")
        refuse_handler(handler, "(frame, tx)")
        refuse_coroutine(handler)
        self._handler = handler
        return handler

    def foreach(
        self, into: str | None = None, *, on: On | None = None, connections: int | None = None, concurrency: int | None = None
    ) -> Registers:
        """Register a handler of single events: called with an `Event` and a `Tx`, in the order of their positions.

        It returns a row (a dict), several, or None: nothing is to be done for this event (skipped). If it raises, that event is parked.
        It may be an `async def`: then several events are in hand at once; those of one sequence key still come one after the other.

        Args:
            into: the sink of the rows it returns.
            on: "executors" or "driver". Default: in Spark's tasks, with either store. See docs/foreach.md.
            connections: how many the tasks of the whole cluster may have at once, two for each task. Default: two a core, at most 64.
            concurrency: events that an async handler has in hand at once, in each slice. Default 16.
        """
        where = Where(on, connections)

        def register(handler: EventHandler) -> EventHandler:
            refuse_handler(handler, "(event, tx)")
            self.foreach_batch(each_event(handler, into, where, concurrency))
            return handler

        return register

    def foreach_arrow(
        self, into: str | None = None, *, on: On | None = None, connections: int | None = None
    ) -> Callable[[SliceHandler], SliceHandler]:
        """Register a handler of Arrow tables: called with the new events of one slice, in the order of their positions, and a `Tx`.

        It returns a table of rows for `into`, or None. If it raises, the slice is searched for the guilty events as a batch is.

        Args:
            into, on, connections: as for `foreach`. Where it runs on the driver, a table may hold events of several partitions.
        """
        where = Where(on, connections)

        def register(handler: SliceHandler) -> SliceHandler:
            refuse_handler(handler, "(table, tx)")
            refuse_coroutine(handler)
            self.foreach_batch(EachSlice(handler, into, where))
            return handler

        return register

    def log(self, read: LogReader) -> LogReader:
        """Register what reads a range of the log in a batch: called with source, topic, partition, first and last sequence number.

        Returns a DataFrame or Arrow table like the stream's. Needed where events have to be read again. Usable as a decorator. Where it has
        an attribute `first_kept`, called with source, topic and partition, positions above that one which it does not give are no loss;
        `absent`, called like the function, says whether positions that a new query leaves out never were events.
        """
        self.read_log = read
        return read

    def dispatch_to(self, destination: Destination) -> None:
        """Send what the handler publishes right after each batch has committed: `kafka.Topics("host:9092")`, or `Call(function)`.

        A destination that is away fails no batch: the messages wait for the next one, or for `dedup outbox dispatch`.
        """
        self.destination = destination

    def send_messages(self) -> None:
        """Send what waits in the outbox, where `dispatch_to` has said where to. Raises no error of a destination or of the store."""
        if self.destination is None:
            return
        try:
            with _SENDING:
                self._dispatcher = self._dispatcher or Dispatcher(self.store.outbox(self.name), self.destination)
                self._dispatcher.once()
        except (DestinationUnavailable, StoreError, Fenced) as error:
            self._dispatcher = None
            log.warning("%s: the messages of this batch wait: %s", self.name, error)

    def undo(self, take_back: Undo) -> Undo:
        """Register what takes back the effect of processed events before `replay` repeats them. Usable as a decorator.

        Called with a pyarrow table (source, topic, partition, sequence_number, part, idempotence_key) and a `Tx`.
        """
        self.take_back = take_back
        return take_back
