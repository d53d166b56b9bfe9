"""Handlers of single events: one event at a time, in order; what they return is written together, what they raise parks one event.

And of Arrow tables, one for each slice. Called by `Consumer.foreach` and `foreach_arrow`, which register them as handlers of whole batches.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa

from checkpoint.errors import HandlerError
from dedup.arrow_frames import ArrowFrames
from dedup.attempts import is_ours
from dedup.envelope import POSITION
from dedup.executors import Where
from dedup.failed import EventsFailed
from dedup.rows import named, own
from dedup.tx import Tx

Row = Mapping[str, Any]


class Event(NamedTuple):
    """One event as a handler sees it. The first fields are POSITION."""

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
    """A handler of batches that calls one of events. Picklable where that is."""

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
        table, found = table_of(frame, tx), Found()
        for number, event in enumerate(events_of(table)):
            tx.at_event(event[: len(POSITION)])
            try:
                made = self.handler(event, tx)
                rows = self.rows(made)
            except Exception as error:
                # After a failed statement every other one fails, too: then only a search can tell whose fault it was.
                if tx.lent or is_ours(error):
                    raise
                found.failed[number] = error
            else:
                found.add(number, rows, tx, skipped=made is None)
        found.hand_over(table, tx, self.into)

    def rows(self, made: Any) -> list[dict[str, Any]]:
        """What a handler returned, as rows of ours: as they are now. Raises HandlerError for anything else, RowsRefused as `own` does."""
        if type(made) is not dict:
            made = named(made)
        rows = (made,) if type(made) is dict or isinstance(made, Mapping) else () if made is None else made
        rows = [row if type(row) is dict else named(row) for row in rows] if isinstance(rows, list | tuple) else rows
        if not isinstance(rows, list) or not all(type(row) is dict or isinstance(row, Mapping) for row in rows):
            raise HandlerError(f"A handler of events returns a dict, a list of dicts, or None, not {type(made).__name__}.")
        if rows and not self.into:
            raise HandlerError("The handler returned rows, and the consumer does not know where to: @consumer.foreach(into='table').")
        return own(rows)


@dataclass
class Found:
    """What became of the events of one run of the handler."""

    written: list[dict[str, Any]] = field(default_factory=list)
    by: list[Any] = field(default_factory=list)  # `Tx.position` of the event of each row of `written`
    authors: list[int] = field(default_factory=list)  # rows of the run that have an effect
    skipped: list[int] = field(default_factory=list)  # rows of the run
    failed: dict[int, BaseException] = field(default_factory=dict)  # row -> what it raised

    def add(self, number: int, rows: Sequence[dict[str, Any]], tx: Tx, *, skipped: bool) -> None:
        """The event passed. Nothing was to be done for it where it did not say anything either."""
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
            raise HandlerError("The handler returned rows, and the consumer does not know where to: foreach_arrow(into='table').")
        tx.returns(made, self.into)


def table_of(frame: Any, tx: Tx) -> pa.Table:
    """The rows of the handler's frame, in the order of their positions."""
    return frame if isinstance(frame, pa.Table) else tx.in_order(frame.toArrow())


def events_of(table: pa.Table) -> Iterator[Event]:
    """The rows as events, made as they are asked for."""
    others = [name for name in table.column_names if name not in NAMED]
    for start in range(0, table.num_rows, AT_ONCE):
        rows = table.slice(start, AT_ONCE)
        columns = [_values(rows, name) for name in NAMED]
        yield from map(Event._make, zip(*columns, rows.select(others).to_pylist() if others else repeat(None), strict=False))


def _values(rows: pa.Table, name: str) -> Iterable[Any]:
    if name not in rows.column_names:
        return repeat(None)
    column = rows[name]
    return _moments(column) if pa.types.is_timestamp(column.type) else _python(column)


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
