"""The decorators by which functions of a user's become a consumer's: its handler, its log reader, and what takes effects back.

What could not be called, or would run nothing when it is called, is refused where it is registered: else every event would fail by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

from checkpoint import given
from checkpoint.errors import ConfigError
from dedup.core.settings import FOREACH
from dedup.pipeline.commit import Compensate, LogReader
from dedup.pipeline.handlers import (
    EachSlice,
    EventHandler,
    On,
    Registers,
    SliceHandler,
    Where,
    each_event,
    refuse_coroutine,
    refuse_handler,
)
from dedup.pipeline.tx import Handler


class Registered:
    """What users register with a consumer by its decorators. The base of `Consumer`.

    Args:
        name: of the consumer, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._handler: Handler | None = None
        self.read_log: LogReader | None = None
        self.take_back: Compensate | None = None

    @overload
    def foreach_batch(self, handler: Handler) -> Handler: ...
    @overload
    def foreach_batch(self, handler: None = None) -> Callable[[Handler], Handler]: ...
    def foreach_batch(self, handler: Handler | None = None) -> Any:
        """Register the handler of batches: called with a frame of new events, and a `Tx`. A decorator, with or without parentheses.

        It is called for each chunk: a whole batch, or a part of a batch above `max_events_per_transaction`. With bisect=False such a batch
        is refused.

        Raises:
            ConfigError: there is a handler already, or this object cannot be a handler.
        """
        if handler is None:
            return self.foreach_batch
        if self._handler is not None:
            raise ConfigError(f"Consumer {self.name!r} has a handler already. Use one consumer per handler.")
        refuse_handler(handler, "(frame, tx)", "@consumer.foreach_batch")
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

        It returns a row (a dict), several rows, or None, which skips the event. If it raises by the event's own fault, this event becomes a
        dead letter. It may be an `async def`: then several events are handled at once; those of one sequence key come one after the other.

        Args:
            into: the sink of the returned rows. `@consumer.foreach` without parentheses is for a handler that returns no rows.
            on: "executors" or "driver". Default: in Spark's tasks, with either store. See docs/how-to/foreach.md.
            connections: to PostgreSQL, of all tasks of the cluster together, two for each task. Default: two for each core, at most 64.
            concurrency: events that an async handler handles at once, in each slice. Default 16.

        Raises:
            ConfigError: an argument has a value that it does not take, there is a handler already, or this object cannot be a handler.
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

        It returns a table of rows for `into`, or None. If it raises, dedup halves the table to find the events at fault.

        Args:
            into: as for `foreach`.
            on: as for `foreach`. On the driver a table may hold events of several partitions.
            connections: as for `foreach`.

        Raises:
            ConfigError: as `foreach`.
        """
        sink = None if callable(into) else into
        given.check(FOREACH, {"into": sink, "on": on, "connections": connections, "concurrency": None}, "foreach_arrow")
        where = Where(on, connections)

        def register(handler: SliceHandler) -> SliceHandler:
            refuse_handler(handler, "(table, tx)", "@consumer.foreach_arrow(into='table')")
            refuse_coroutine(handler)
            self.foreach_batch(EachSlice(handler, sink, where))
            return handler

        return register(into) if callable(into) else register

    @overload
    def register_log_reader(self, read: LogReader) -> LogReader: ...
    @overload
    def register_log_reader(self, read: None = None) -> Callable[[LogReader], LogReader]: ...
    def register_log_reader(self, read: LogReader | None = None) -> Any:
        """Register the function that reads a range of the log again. A decorator, with or without parentheses.

        It is called with source, topic, partition, first and last sequence number. It returns a DataFrame or Arrow table like the stream's.
        `replay`, `reprocess(from_log=True)` and letters above `max_body` need it.

        Two attributes of the function are optional. `first_kept`, called with source, topic and partition, returns
        the first position that the log still has: missing positions above it are no loss. `absent`, called like the function, says whether
        positions that a new query leaves out never were events.

        Raises:
            ConfigError: it cannot be called with these five arguments.
        """
        if read is None:
            return self.register_log_reader
        refuse_function("register_log_reader", read, ("source", "topic", "partition", "first", "last"))
        self.read_log = read
        return read

    @overload
    def compensate(self, take_back: Compensate) -> Compensate: ...
    @overload
    def compensate(self, take_back: None = None) -> Callable[[Compensate], Compensate]: ...
    def compensate(self, take_back: Compensate | None = None) -> Any:
        """Register the function that takes back the effect of processed events before `replay` repeats them. A decorator.

        It is called with a pyarrow table (source, topic, partition, sequence_number, part, idempotence_key) and a `Tx`.

        Raises:
            ConfigError: it cannot be called with these two arguments.
        """
        if take_back is None:
            return self.compensate
        refuse_function("compensate", take_back, ("table", "tx"))
        self.take_back = take_back
        return take_back


def refuse_function(decorator: str, function: Callable[..., Any], takes: Sequence[str]) -> None:
    """Raise ConfigError for what this decorator of a consumer cannot call, or what would run nothing when it is called."""
    lazy = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if lazy or not given.takes(function, len(takes)):
        shown = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"@consumer.{decorator} registers a plain function that takes {len(takes)} arguments, ({', '.join(takes)}), not {shown:.80} "
            f"({type(function).__name__}). Write it without arguments above `def {decorator}({', '.join(takes)}):`."
        )
