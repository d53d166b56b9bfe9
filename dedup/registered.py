"""What users register on a consumer: its handler, what reads the log again, what takes an effect back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, overload

from checkpoint import given
from checkpoint.errors import ConfigError, DestinationUnavailable, Fenced, StoreError
from dedup.executors import On, Where
from dedup.foreach import EachSlice, EventHandler, Registers, SliceHandler
from dedup.foreach_async import each_event
from dedup.outbox import Destination
from dedup.outbox.inline import Inline
from dedup.settings import DISPATCH_TO, FOREACH, SECONDS_OF_SENDING, refuse_coroutine, refuse_function, refuse_handler
from dedup.store import Store
from dedup.tx import Handler, LogReader, Undo

log = logging.getLogger("dedup")

_SENDING = threading.Lock()
"""A runner's partitions are threads of one process: they make what sends once."""


class Registered:
    """The part of `Consumer` that holds the user's functions."""

    name: str
    store: Store

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self.read_log: LogReader | None = None
        self.take_back: Undo | None = None
        self.destination: Destination | None = None
        self.send_timeout = SECONDS_OF_SENDING
        self._inline: Inline | None = None

    @overload
    def foreach_batch(self, handler: Handler) -> Handler: ...
    @overload
    def foreach_batch(self, handler: None = None) -> Callable[[Handler], Handler]: ...
    def foreach_batch(self, handler: Handler | None = None) -> Any:
        """Register the handler: called with a frame of new events only, and a `Tx`. Usable as a decorator, with parentheses or without.

        Called for each chunk: a whole batch, or a part of one above `max_events_per_transaction`, which bisect=False refuses.

        Raises:
            ConfigError: there is a handler already, or this is none.
        """
        if handler is None:
            return self.foreach_batch
        if self._handler is not None:
            raise ConfigError(f"Consumer {self.name!r} has a handler already. Use one consumer per handler.")
        refuse_handler(handler, "(frame, tx)")
        refuse_coroutine(handler)
        self._handler = handler
        return handler

    @overload
    def foreach(self, into: EventHandler) -> EventHandler: ...
    @overload
    def foreach(
        self, into: str | None = None, *, on: On | None = None, connections: int | None = None, concurrency: int | None = None
    ) -> Registers: ...
    def foreach(
        self,
        into: str | EventHandler | None = None,
        *,
        on: On | None = None,
        connections: int | None = None,
        concurrency: int | None = None,
    ) -> Any:
        """Register a handler of single events: called with an `Event` and a `Tx`, in the order of their positions.

        It returns a row (a dict), several, or None: nothing is to be done for this event (skipped). If it raises, that event is parked.
        It may be an `async def`: then several events are in hand at once; those of one sequence key still come one after the other.

        Args:
            into: the sink of the rows it returns. `@consumer.foreach` without parentheses is for a handler that returns none.
            on: "executors" or "driver". Default: in Spark's tasks, with either store. See docs/foreach.md.
            connections: how many the tasks of the whole cluster may have at once, two for each task. Default: two a core, at most 64.
            concurrency: events that an async handler has in hand at once, in each slice. Default 16.

        Raises:
            ConfigError: one of these is none of its values, there is a handler already, or this is none.
        """
        sink = None if callable(into) else into
        given.check(FOREACH, {"into": sink, "on": on, "connections": connections, "concurrency": concurrency}, "foreach")
        where = Where(on, connections)

        def register(handler: EventHandler) -> EventHandler:
            refuse_handler(handler, "(event, tx)")
            self.foreach_batch(each_event(handler, sink, where, concurrency))
            return handler

        return register(into) if callable(into) else register

    @overload
    def foreach_arrow(self, into: SliceHandler) -> SliceHandler: ...
    @overload
    def foreach_arrow(
        self, into: str | None = None, *, on: On | None = None, connections: int | None = None
    ) -> Callable[[SliceHandler], SliceHandler]: ...
    def foreach_arrow(self, into: str | SliceHandler | None = None, *, on: On | None = None, connections: int | None = None) -> Any:
        """Register a handler of Arrow tables: called with the new events of one slice, in the order of their positions, and a `Tx`.

        It returns a table of rows for `into`, or None. If it raises, the slice is searched for the guilty events as a batch is.

        Args:
            into, on, connections: as for `foreach`. Where it runs on the driver, a table may hold events of several partitions.

        Raises:
            ConfigError: as `foreach`.
        """
        sink = None if callable(into) else into
        given.check(FOREACH, {"into": sink, "on": on, "connections": connections, "concurrency": None}, "foreach_arrow")
        where = Where(on, connections)

        def register(handler: SliceHandler) -> SliceHandler:
            refuse_handler(handler, "(table, tx)")
            refuse_coroutine(handler)
            self.foreach_batch(EachSlice(handler, sink, where))
            return handler

        return register(into) if callable(into) else register

    @overload
    def log(self, read: LogReader) -> LogReader: ...
    @overload
    def log(self, read: None = None) -> Callable[[LogReader], LogReader]: ...
    def log(self, read: LogReader | None = None) -> Any:
        """Register what reads a range of the log in a batch: called with source, topic, partition, first and last sequence number.

        Returns a DataFrame or Arrow table like the stream's. Needed where events have to be read again. Usable as a decorator. Where it has
        an attribute `first_kept`, called with source, topic and partition, positions above that one which it does not give are no loss;
        `absent`, called like the function, says whether positions that a new query leaves out never were events.

        Raises:
            ConfigError: it cannot be called with these five arguments.
        """
        if read is None:
            return self.log
        refuse_function("log", read, ("source", "topic", "partition", "first", "last"))
        self.read_log = read
        return read

    def dispatch_to(self, destination: Destination, *, timeout: float = SECONDS_OF_SENDING) -> None:
        """Send what the handler publishes right after each batch has committed: `kafka.Topics("host:9092")`, or `Call(function)`.

        A destination that is away, or hangs, fails no batch and does not stop the stream: the messages wait for the next one, or for
        `dedup outbox dispatch`.

        Args:
            timeout: seconds that a batch waits for sending. A call that takes longer cannot be ended: it goes on alone, in its thread, and
                what it sends may arrive although it is sent again. It comes at least once, with one id.

        Raises:
            ConfigError: this is no destination, or no time-out.
        """
        given.check(DISPATCH_TO, {"destination": destination, "timeout": timeout}, "dispatch_to")
        self.destination, self.send_timeout, self._inline = destination, float(timeout), None

    def send_messages(self) -> None:
        """Send what waits in the outbox, where `dispatch_to` has said where to. Raises no error of a destination or of the store."""
        if self.destination is None:
            return
        try:
            self._sending(self.destination).send(lambda: self.store.outbox(self.name))
        except (DestinationUnavailable, StoreError, Fenced) as error:
            log.warning("%s: the messages of this batch wait: %s", self.name, error)

    def _sending(self, destination: Destination) -> Inline:
        with _SENDING:
            self._inline = self._inline or Inline(destination, self.send_timeout)
            return self._inline

    @overload
    def undo(self, take_back: Undo) -> Undo: ...
    @overload
    def undo(self, take_back: None = None) -> Callable[[Undo], Undo]: ...
    def undo(self, take_back: Undo | None = None) -> Any:
        """Register what takes back the effect of processed events before `replay` repeats them. Usable as a decorator.

        Called with a pyarrow table (source, topic, partition, sequence_number, part, idempotence_key) and a `Tx`.

        Raises:
            ConfigError: it cannot be called with these two arguments.
        """
        if take_back is None:
            return self.undo
        refuse_function("undo", take_back, ("table", "tx"))
        self.take_back = take_back
        return take_back
