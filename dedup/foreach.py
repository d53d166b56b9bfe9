"""Handlers of single events: one event at a time, in order; what they return is written together, what they raise parks one event.

Called by `Consumer.foreach`, which registers it as the handler of whole batches.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from checkpoint.errors import HandlerError
from dedup.attempts import EventsFailed, is_ours
from dedup.envelope import ENVELOPE, POSITION
from dedup.rows import EventRows
from dedup.tx import Tx

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
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


EventHandler = Callable[[Event, Tx], Row | Sequence[Row] | None]
"""(event, tx) -> a row, several rows, or None for an event that needs nothing."""


Registers = Callable[[EventHandler], EventHandler]
"""A decorator of such handlers."""


@dataclass(frozen=True)
class EachEvent:
    """A handler of batches that calls one of events. Picklable where that is."""

    handler: EventHandler
    into: str | None

    def __call__(self, frame: Any, tx: Tx) -> None:
        """Handle every row of the frame.

        Raises:
            EventsFailed: which events failed, and how; the others are run once more without them.
            HandlerError: the handler returned what is no row.
            Whatever an event raised, where the handler has used `tx.connection`: the event is searched for as in a batch.
        """
        table = frame if isinstance(frame, pa.Table) else frame.toArrow()
        rows: list[Row] = []
        skipped: list[int] = []
        failed: dict[int, BaseException] = {}
        for number, event in enumerate(_events(table)):
            tx.at_event({name: getattr(event, name) for name in POSITION})
            try:
                made = self.handler(event, tx)
                rows += self._rows(made)
            except Exception as error:
                # After a failed statement every other one fails, too: then only a search can tell whose fault it was.
                if tx.lent or is_ours(error):
                    raise
                failed[number] = error
            else:
                if made is None and not tx.published:
                    skipped.append(number)
        if failed:
            raise EventsFailed(_positions(table, list(failed)), list(failed.values()))
        if skipped:
            tx.skip_positions(_positions(table, skipped))
        if rows and self.into:
            tx.write(EventRows(dict(row) for row in rows), self.into)

    def _rows(self, made: Any) -> Sequence[Row]:
        rows = () if made is None else (made,) if isinstance(made, Mapping) else made
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
            raise HandlerError(f"A handler of events returns a dict, a list of dicts, or None, not {type(made).__name__}.")
        if rows and not self.into:
            raise HandlerError("The handler returned rows, and the consumer does not know where to: @consumer.foreach(into='table').")
        return rows


def _events(table: pa.Table) -> Any:
    known = [name for name in (*ENVELOPE.names, "data") if name in table.column_names]
    others = [name for name in table.column_names if name not in known]
    for batch in table.to_batches(max_chunksize=1_000):
        for row in batch.to_pylist():
            yield Event(**{name: row[name] for name in known}, others={name: row[name] for name in others} or None)


def _positions(table: pa.Table, rows: list[int]) -> pa.Table:
    return table.select(list(POSITION)).take(pa.array(rows, pa.int64()))
