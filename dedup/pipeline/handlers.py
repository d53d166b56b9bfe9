"""Handlers of single events: one event at a time, in order. What they return is written together; what they raise parks one event.

An async handler has several events in hand at once; what it records still comes in the order of the positions. A handler of Arrow tables
gets one table for each slice. Called by `Consumer.foreach` and `foreach_arrow`, which register them as handlers of whole batches.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from checkpoint.errors import ConfigError, HandlerError
from checkpoint.position import Ints
from dedup.core.envelope import POSITION
from dedup.core.near import like
from dedup.core.rows import ArrowFrames, arrow_of, copied, named, own_rows
from dedup.pipeline.attempts import HandlerExited, is_ours
from dedup.pipeline.performance import EventsFailed
from dedup.pipeline.tx import Tx, refuse_unknown_name

Row = Mapping[str, Any]


On = Literal["executors", "driver"]


A_TASK = 2
"""Connections of one task: for its transactions, and for what has to outlive them."""


MOST_TASKS = 32
"""Tasks at once, unless more connections are asked for."""

CONCURRENCY = 16
"""Events of coroutines in hand at once, unless another number is asked for."""

log = logging.getLogger("dedup")


@dataclass(frozen=True)
class Where:
    """Where a handler of single events runs, as its decorator said."""

    on: On | None = None  # None: in tasks, where the store can
    connections: int | None = None


class Event(NamedTuple):
    """One event as a handler sees it."""

    source: str
    topic: str
    partition: int
    sequence_number: int
    part: int
    offset: str | None
    enqueued_time: dt.datetime | None
    key: bytes | None  # the broker's partition key
    body: bytes | None
    properties: Sequence[Mapping[str, Any]] | None  # key (str) and value (bytes) of each header, in order
    data: Any = None  # the decoded body, where the consumer decodes
    others: Mapping[str, Any] | None = None  # the input's other columns


def refuse_unknown_field(error: BaseException) -> None:
    """Raise HandlerError where the code of a handler names an attribute that no event has: the handler is wrong, and no event.

    A name that is not in the code itself may come from the event, as in `getattr(event, name)`: then the error is the event's own.
    """
    if type(error) is not AttributeError or not isinstance(error.obj, Event) or error.name is None or hasattr(Event, error.name):
        return
    if error.name in _names_in_code(error):
        raise HandlerError(
            f"An event has no {error.name}{like(error.name, Event._fields)}: it has {', '.join(Event._fields)}. Columns of the body are in "
            "event.data, other columns of the input in event.others."
        ) from error


def _names_in_code(error: BaseException) -> tuple[str, ...]:
    """The names that the code which raised the error uses."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return () if trace is None else trace.tb_frame.f_code.co_names


NAMED = Event._fields[:-1]
"""What a column of the input is under its own name; any other is one of `others`."""

AT_ONCE = 1_000
"""Events that are Python objects before the handler sees the first of them."""

START = dt.datetime.fromtimestamp(0, dt.UTC)

UTC = pa.timestamp("us", tz="UTC")

EventHandler = Callable[[Event, Tx], Any]
"""(event, tx) -> a row, several rows, or None for an event that needs nothing; or a coroutine that returns that."""

SliceHandler = Callable[[pa.Table, Tx], pa.Table | None]
"""(new events of one partition, tx) -> rows for the sink, or None."""


Registers = Callable[[EventHandler], EventHandler]
"""A decorator of such handlers."""


@dataclass(frozen=True)
class EachEvent:
    """A handler of batches that calls a handler of events. Picklable where the handler of events is."""

    handler: EventHandler
    into: str | None
    where: Where = field(default_factory=Where)

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle every row of the frame.

        Raises:
            EventsFailed: which events failed, and how; the others are run once more without them.
            HandlerError: the handler returned what is no row.
            Whatever an event raised, where the handler has used `tx.connection`: the event is searched for as in a batch.
        """
        table, found = table_of(frame, tx), EventsOutcome()
        for number, event in enumerate(events_of(table)):
            tx.at_event(event[: len(POSITION)])
            if (beyond := _beyond_python(event)) is not None:
                found.failed[number] = beyond
                continue
            try:
                made = self.handler(event, tx)
                rows = self.rows(made, event)
            except Exception as error:
                # After a failed statement every other one fails, too: then only a search can tell whose fault it was.
                refuse_unknown_name(error, tx)
                refuse_unknown_field(error)
                if tx.lent or is_ours(error):
                    raise
                found.failed[number] = error
            else:
                found.add(number, rows, tx, skipped=made is None)
        found.hand_over(table, tx, self.into)

    def rows(self, made: Any, event: Event) -> list[dict[str, Any]]:
        """What a handler returned of this event, as rows of ours. Raises HandlerError for anything else, RowsRefused as `own` does."""
        if type(made) is dict and self.into:
            return own_rows((made,))
        if type(made) is not dict:
            made = named(made)
        rows = (made,) if type(made) is dict or isinstance(made, Mapping) else () if made is None else made
        rows = [row if type(row) is dict else named(row) for row in rows] if isinstance(rows, list | tuple) else rows
        if not isinstance(rows, list) or not all(type(row) is dict or isinstance(row, Mapping) for row in rows):
            at = f"{event.source}/{event.topic}/{event.partition} {event.sequence_number}"
            raise HandlerError(f"A handler of events returns a dict, a list of dicts, or None. Of {at} it returned {_kind_of(made)}.")
        if rows and not self.into:
            raise HandlerError("The handler returned rows, but the consumer has no table for them: @consumer.foreach(into='table').")
        return own_rows(rows)


def _kind_of(made: Any) -> str:
    """The type; of a list that of its first item that is no row."""
    if isinstance(made, list | tuple):
        number, wrong = next((n, row) for n, row in enumerate(made) if not isinstance(row, Mapping))
        return f"a {type(made).__name__} whose item {number} is of type {type(wrong).__name__}"
    return type(made).__name__


@dataclass
class EventsOutcome:
    """What became of the events of one run of the handler."""

    written: list[dict[str, Any]] = field(default_factory=list)
    by: list[Any] = field(default_factory=list)  # `Tx.position` of the event of each row of `written`
    authors: list[int] = field(default_factory=list)  # rows of the run that have an effect
    skipped: list[int] = field(default_factory=list)  # rows of the run
    failed: dict[int, BaseException] = field(default_factory=dict)  # row -> what it raised

    def add(self, number: int, rows: Sequence[dict[str, Any]], tx: Tx, *, skipped: bool) -> None:
        """Note that the event passed. With `skipped`, it counts as skipped if it recorded nothing."""
        if rows:
            self.written += rows
            self.by += (tx.position,) * len(rows)
        if rows or tx.wrote:
            self.authors.append(number)
        if skipped and not tx.recorded:
            self.skipped.append(number)

    def hand_over(self, table: pa.Table, tx: Tx, into: str | None) -> None:
        """Record it.

        Raises:
            EventsFailed: where events did; then nothing of the run counts.
            HandlerError: the handler has parked an event that has an effect.
        """
        if self.failed:
            raise EventsFailed(_positions(table, list(self.failed)), list(self.failed.values()))
        tx.refuse_parked(_positions(table, self.authors))
        if self.skipped:
            tx.skip_positions(_positions(table, self.skipped))
        if self.written and into:
            tx.returns(self.written, into, self.by)


@dataclass(frozen=True)
class EachSlice:
    """A handler of Arrow tables, whatever the batch came as. Picklable where that is."""

    handler: SliceHandler
    into: str | None
    where: Where = field(default_factory=Where)

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle all rows at once. Raises HandlerError where something else than a table is returned, or nobody said where to."""
        tx.take(ArrowFrames())
        made = self.handler(table_of(frame, tx), tx)
        if made is None:
            return
        if not isinstance(made, pa.Table):
            raise HandlerError(f"A handler of Arrow tables returns a pyarrow.Table or None, not {type(made).__name__}.")
        if not self.into:
            raise HandlerError("The handler returned rows, but the consumer has no table for them: foreach_arrow(into='table').")
        tx.returns(made, self.into)


def table_of(frame: Any, tx: Tx) -> pa.Table:
    """The rows of the handler's frame, in the order of their positions."""
    return frame if isinstance(frame, pa.Table) else tx.in_order(arrow_of(frame))


def events_of(table: pa.Table) -> Iterator[Event]:
    """The rows as events, made as they are asked for. `_beyond_python` says of which there is no object."""
    others = [name for name in table.column_names if name not in NAMED]
    for start in range(0, table.num_rows, AT_ONCE):
        rows = table.slice(start, AT_ONCE)
        columns = [_values(rows, name) for name in NAMED]
        yield from map(Event._make, zip(*columns, _held(rows.select(others), _rows, "others") if others else repeat(None), strict=False))


def _beyond_python(event: Event) -> OverflowError | None:
    """Why the event's values cannot be objects of Python; None where they are. The handler cannot be called with such an event."""
    for values in (event.data, event.others):
        if isinstance(values, OverflowError):
            return values
    return None


def _values(rows: pa.Table, name: str) -> Iterable[Any]:
    if name not in rows.column_names:
        return repeat(None)
    column = rows[name]
    return _held(column, _moments if pa.types.is_timestamp(column.type) else _python, name)


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.to_pylist()
    return found


Part = TypeVar("Part", pa.Table, pa.ChunkedArray)


def _held(part: Part, make: Callable[[Part], Iterable[Any]], path: str) -> list[Any]:
    """What `make` makes of the values; in place of one that Python has no object for an OverflowError that names the field."""
    try:
        return list(make(part))
    except OverflowError:
        return [_held_alone(part.slice(at, 1), make, path) for at in range(len(part))]


def _held_alone(part: Part, make: Callable[[Part], Iterable[Any]], path: str) -> Any:
    try:
        return next(iter(make(part)))
    except OverflowError:
        whole = part.to_struct_array() if isinstance(part, pa.Table) else part
        field, kind = _culprit(pa.concat_arrays(whole.chunks), f"event.{path}")
        what = (
            "time outside the years 1 to 9999" if pa.types.is_temporal(kind) and not pa.types.is_duration(kind) else f"value of type {kind}"
        )
        return OverflowError(
            f"{field} is a {what}, which Python cannot hold, so the handler is not called. Handle such events with foreach_batch or "
            "foreach_arrow, or let decode= describe the field as a text or a number."
        )


def _culprit(value: pa.Array, path: str) -> tuple[str, pa.DataType]:
    """Path and type of a field of this one value that Python cannot hold."""
    for step, inner in _parts(value):
        try:
            inner.to_pylist()
        except OverflowError:
            return _culprit(inner, path + step)
    return path, value.type


def _parts(value: pa.Array) -> list[tuple[str, pa.Array]]:
    kind = value.type
    if pa.types.is_struct(kind):
        return [(f".{part.name}", inner) for part, inner in zip(kind, value.flatten(), strict=True)]
    if pa.types.is_map(kind):
        start, *_, end = value.offsets.to_pylist()
        return [(".*", part.slice(start, end - start)) for part in (value.keys, value.items)]
    return [("[]", value.flatten())] if pa.types.is_list(kind) or pa.types.is_large_list(kind) else []


def _moments(column: pa.ChunkedArray) -> Iterator[dt.datetime | None]:
    """In UTC. Arrow itself looks the time zone up for every value."""
    since = column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.duration("us"))
    return (None if at is None else START + at for at in since.to_pylist())


def _python(column: pa.ChunkedArray) -> Iterable[Any]:
    """The values as `to_pylist` makes them, of structs with moments in UTC quicker."""
    kind = column.type
    if kind == UTC:
        return _moments(column)
    if not pa.types.is_struct(kind) or UTC not in [part.type for part in kind]:
        return list(column.to_pylist())
    names, there = [part.name for part in kind], column.is_valid().to_pylist()
    made = zip(*map(_python, column.flatten()), strict=True)
    return (dict(zip(names, values, strict=True)) if valid else None for values, valid in zip(made, there, strict=True))


def _positions(table: pa.Table, rows: list[int]) -> pa.Table:
    return table.select(list(POSITION)).take(pa.array(rows, pa.int64()))


Numbered = tuple[int, Event]
"""Row of the run, event."""

Rows = list[dict[str, Any]] | None
"""What the handler of an event returned; None where it returned nothing."""


def each_event(handler: EventHandler, into: str | None, where: Where, concurrency: int | None) -> EachEvent:
    """The handler of batches around one of events, which may be a coroutine. Raises ConfigError for a `concurrency` that cannot be."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - of an object whose class defines it
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        return EachEventAsync(handler, into, where, concurrency or CONCURRENCY)
    if concurrency is not None:
        raise ConfigError("concurrency= is for a handler that is an `async def`: another one takes one event after the other.")
    return EachEvent(handler, into, where)


AsyncCall = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of `Tx`, and what it was called with."""


_OF_COROUTINES = ("write", "merge", "publish", "dead_letter")


class AsyncTx:
    """What an async handler may do for one event: kept back, and recorded when all events are through, in the order of their positions."""

    def __init__(self) -> None:
        self.calls: list[AsyncCall] = []
        self._closed = False

    @property
    def connection(self) -> Any:
        """None of several events at once can have it."""
        raise HandlerError("An async handler has no tx.connection: several events are in hand at once. Return rows, or use tx.write.")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _OF_COROUTINES:
            raise AttributeError(f"An async handler has tx.write, tx.merge, tx.publish and tx.dead_letter, and no tx.{name}.")
        return lambda *given, **named: self._keep(name, given, named)

    def close(self) -> None:
        """The handler has returned: what a task that it left behind records now would belong to nothing."""
        self._closed = True

    def _keep(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._closed:
            raise HandlerError("The handler has returned, and its tx is closed: await what it starts before it returns.")
        self.calls.append((name, copied(given), copied(named)))


@dataclass(frozen=True)
class EachEventAsync(EachEvent):
    """A handler of batches that has several events in hand at once. Picklable where the handler is."""

    concurrency: int = CONCURRENCY

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle every row of the frame; raises as `EachEvent` does, and HandlerError where events got no answer."""
        table = table_of(frame, tx)
        run = _LanesRun(self, _lanes(table, tx.lanes))
        on_loop(run.all())
        if not run.failed and len(run.passed) != table.num_rows:
            raise HandlerError(f"{table.num_rows - len(run.passed)} events got no answer: the handler cancels the task that it runs in.")
        found = EventsOutcome(failed=dict(sorted(run.failed.items())))
        for number, (event, calls, rows) in sorted(run.passed.items()):
            self._record(number, event, calls.calls, rows, tx, found)
        found.hand_over(table, tx, self.into)

    def _record(self, number: int, event: Event, calls: Sequence[AsyncCall], rows: Rows, tx: Tx, found: EventsOutcome) -> None:
        tx.at_event(event[: len(POSITION)])
        try:
            for name, given, named in calls:
                getattr(tx, name)(*given, **named)
        except Exception as error:
            if is_ours(error):
                raise
            found.failed[number] = error
        else:
            found.add(number, rows or (), tx, skipped=rows is None)


@dataclass
class _LanesRun:
    """One run of the handler over the lanes."""

    each: EachEventAsync
    lanes: Iterator[list[Numbered]]
    passed: dict[int, tuple[Event, AsyncTx, Rows]] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)

    async def all(self) -> None:
        """Start as many workers as events may be in hand at once. Each works on one lane at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.each.concurrency):
                group.create_task(self._work())

    async def _work(self) -> None:
        for lane in self.lanes:
            for number, event in lane:
                if not await self._passes(number, event):
                    break  # what stands behind it in its sequence has to wait for it

    async def _passes(self, number: int, event: Event) -> bool:
        mine = AsyncTx()
        if (beyond := _beyond_python(event)) is not None:
            self.failed[number] = beyond
            return False
        try:
            made = await self.each.handler(event, mine)  # type: ignore[arg-type]
            rows = self.each.rows(made, event)
        except SystemExit as left:  # it would end the loop
            self.failed[number] = HandlerExited(f"the handler called sys.exit({left.code!r})")
            return False
        except asyncio.CancelledError:  # of something that it awaited; a task group would not even notice
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self.failed[number] = HandlerExited("what the handler awaited was cancelled")
            return False
        except Exception as error:
            refuse_unknown_name(error, mine, _OF_COROUTINES)
            refuse_unknown_field(error)
            if is_ours(error):
                raise
            self.failed[number] = error
            return False
        finally:
            mine.close()
        self.passed[number] = (event, mine, None if made is None else rows)
        return True


def _lanes(table: pa.Table, sequences: Ints) -> Iterator[list[Numbered]]:
    """Events that must come one after the other; without a sequence each one is alone."""
    numbered = enumerate(events_of(table))
    if not (sequences >= 0).any():
        yield from ([one] for one in numbered)
        return
    events = list(numbered)
    alone = np.flatnonzero(sequences < 0)
    yield from ([events[number]] for number in alone.tolist())
    order = np.argsort(sequences, kind="stable")[len(alone) :]
    for lane in np.split(order, np.flatnonzero(np.diff(sequences[order])) + 1):
        yield [events[number] for number in lane.tolist()]


_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_starting = threading.Lock()


def on_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it on the loop of this process, in a thread of its own. Raises what it raises; of a group the first one."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _the_loop())
    try:
        future.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    except BaseException:
        future.cancel()
        raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for as long as the process lives: sys.exit in a task that a handler has started ends `run_forever`, too.

    Whoever awaits that task gets the SystemExit, once the loop goes on.
    """
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as left:
            log.warning("a task that a handler of events has started raised %r", left)


def _the_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None or _loop[0] != os.getpid():  # a fork has no threads
            loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name="dedup handlers", daemon=True).start()
            _loop = (os.getpid(), loop)
        return _loop[1]


def refuse_handler(handler: Callable[..., Any], takes: str, usage: str = "@consumer.foreach(into='table')") -> None:
    """Raise ConfigError for a handler that cannot be called with two arguments: else every event would fail by itself.

    Args:
        usage: the decorator, as one writes it above a handler.
    """
    if not callable(handler):
        raise ConfigError(
            f"The handler is {handler!r:.80} ({type(handler).__name__}); it has to be a function that takes {takes}. "
            f"Write {usage} above `def handler{takes}:`."
        )
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigError(f"The handler is a generator: calling it with {takes} would run nothing of it. Take out `yield`.")
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"The handler has to take two arguments, {takes}. It takes {inspect.signature(handler)}.") from error
    except ValueError:  # what is built in does not tell
        return


def refuse_coroutine(handler: Callable[..., Any], what: str = "The handler") -> None:
    """Raise ConfigError for an `async def` where nobody would await it."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - of an object whose class defines it
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        raise ConfigError(f"{what} is an `async def`, which only handlers of single events may be: @consumer.foreach.")
