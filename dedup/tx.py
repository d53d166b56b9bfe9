"""The handler's side of a transaction: `Tx` records what the handler wants; the flow evaluates it once, afterwards (dedup/said.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.errors import HandlerError, RowsMisfit, RowsRefused
from dedup.envelope import POSITION
from dedup.frames import Frames
from dedup.index import Index, Ints
from dedup.outbox.recording import Names, of_event
from dedup.rows import named, own
from dedup.said import Call, Performance, Publication, Said
from dedup.steps import Merge
from dedup.store import Rows, Transaction

Handler = Callable[[Any, "Tx"], None]
"""(frame of new events, tx) -> nothing."""

Undo = Callable[[pa.Table, "Tx"], None]
"""(positions and keys of events whose effect is taken back, tx) -> nothing."""

LogReader = Callable[[str, str, int, int, int], Any]
"""(source, topic, partition, first, last) -> DataFrame or Arrow table with those positions of the log."""


class Tx:
    """What a handler may do. Everything it records is in the same transaction, or nothing of it is.

    Only `connection` acts at once; what `write` recorded is not visible to it.
    """

    def __init__(self, frames: Frames, index: Index, given: Ints, transaction: Transaction, lanes: Ints | None = None) -> None:
        self._frames, self._index, self._transaction = frames, index, transaction
        self.lanes = np.full(len(given), -1) if lanes is None else lanes  # of each given row the number of its sequence; -1: none
        self._given = np.zeros(len(index), dtype=bool)
        self._given[given] = True
        self._closed = False
        self.lent = False  # whether the handler has had the connection: an error may have spoilt what it does next
        self._said = Said()
        self._outcomes: dict[bool, dict[int, str]] = {True: {}, False: {}}  # rejected?, row -> reason
        self.position: tuple[Any, ...] | None = None  # of the event in hand, in a handler of single events: the values of POSITION
        self._published = 0  # messages of the event in hand
        self.of_events = False  # whether the handler is one of single events
        self.wrote = False  # whether the event in hand has written, merged or published
        self._asked = False  # whether it has had the connection

    @property
    def connection(self) -> Any:
        """The store's own connection, inside this transaction (PostgreSQL: psycopg). COMMIT and ROLLBACK are refused."""
        self._require_open()
        self.lent = self._asked = True
        return self._transaction.connection

    def write(self, rows: Any, table: str) -> None:
        """Append rows to a sink table, matched by column name.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts.
            table: PostgreSQL: `table` or `schema.table`; Delta: a path, a catalog name or a name from the store's `tables`.
        """
        self._require_open()
        self._record(table, rows, None)

    def merge(self, rows: Any, table: str, keys: str | Sequence[str], newer_by: str | None = None, delete_when: str | None = None) -> None:
        """Insert or update by key: afterwards the sink holds the last row of each key.

        Of two rows of one key in a batch the last by position counts, where the rows have their position columns, else the last in
        their order; with `newer_by` the one with the greatest value. Position columns that the sink does not have are left out.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts.
            table: as for `write`. PostgreSQL: it needs a unique index on exactly these keys.
            keys: columns that name a row of the sink; a null in one of them is an error of that event.
            newer_by: a column: a row whose value is not greater than the sink's changes nothing, also when it is reprocessed late.
            delete_when: a boolean column of `rows`: true deletes the sink's row. Nothing is left of it, not even its `newer_by`: an older
                event that is reprocessed later inserts it again. Mark rows as deleted in a column of your own where that matters.
        """
        self._require_open()
        names = (keys,) if isinstance(keys, str) else tuple(keys)
        if not names:
            raise HandlerError("tx.merge needs keys=: the columns that name a row of the sink.")
        self._record(table, rows, Merge(names, newer_by, delete_when))

    def publish(
        self,
        rows: Any,
        topic: str,
        *,
        key: str | None = None,
        id: str | None = None,
        body: str = "body",
        headers: str | None = None,
        order: str | None = None,
    ) -> None:
        """Send messages once this transaction has committed: they are stored with it, and `dedup outbox dispatch` sends them.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts; their order is the order of the messages of one key.
            topic: topic or event hub.
            key: column with the destination key (bytes or text): messages of one key keep their order. Without one no order is kept.
            id: column with the message id, by which the receiver tells copies. Without one it is made of the incoming key and `order`,
                where the rows have their position columns and order= is given, and in a handler of events; else it is random.
            body: column with the message itself, bytes or text.
            headers: column with a list of {"key": text, "value": bytes}, as `properties`.
            order: column with whole numbers that tell the messages of one event apart.

        Raises RowsRefused for a topic that is none; the event is at fault, because topics may come from events.
        """
        self._require_open()
        if not isinstance(topic, str) or not topic or "\0" in topic:
            raise RowsRefused(f"tx.publish: a topic is a text without NUL, not {topic!r:.80}.")
        names = Names(key, id, body, headers, order)
        if self.position is not None:
            rows, names = of_event(rows, names, dict(zip(POSITION, self.position, strict=True)), self._published), names.own()
            self._published += len(rows)
            self.wrote |= bool(rows)
            self._said.publish_of_event(Publication(topic, rows, names))
        elif not _is_empty(rows):
            self._said.messages.append(Publication(topic, _own(rows), names))

    def reject(self, rows: Any, condition: Any, reason: str) -> Any:
        """Park the events for which `condition` is true as dead letters; returns the rest. NULL counts as not rejected.

        The condition is evaluated once, here, and the decision is kept as data: a condition that would answer differently
        the next time cannot put an event on both sides or on neither.

        Args:
            rows: rows that still have their position columns.
            condition: Spark: SQL text or Column; Arrow: a boolean array or a pyarrow expression.
            reason: what the letter says.
        """
        return self._settle_rows(rows, condition, reason, rejected=True)

    def skip(self, rows: Any, condition: Any) -> Any:
        """Say that nothing is to be done for the events for which `condition` is true; returns the rest."""
        return self._settle_rows(rows, condition, "", rejected=False)

    def dead_letter(self, rows: Any, reason: str) -> None:
        """Park all events of `rows`, which must have their position columns; in a handler of single events: the event."""
        self._mark(_position_of(rows) if isinstance(rows, tuple) else self._positions(rows, None), reason, rejected=True)

    def _record(self, table: str, rows: Any, how: Merge | None) -> None:
        if _is_empty(rows):
            return
        self.wrote = True
        given = _own(rows)
        if self.position is not None and isinstance(given, list):
            self._said.write_of_event(Call(table, given, how, [self.position] * len(given)))
        else:
            self._said.writes.append(Call(table, given, how))

    def _settle_rows(self, rows: Any, condition: Any, reason: str, *, rejected: bool) -> Any:
        positions = self._positions(rows, condition)
        self._mark(positions, reason, rejected=rejected)
        return self._frames.without(rows, positions) if positions.num_rows else rows

    def _positions(self, rows: Any, condition: Any | None) -> pa.Table:
        self._require_open()
        missing = [c for c in POSITION if c not in self._frames.columns(rows)]
        if missing:
            raise HandlerError(
                f"tx.reject, tx.skip and tx.dead_letter need the position columns; missing: {', '.join(missing)}. "
                f"Call them before selecting `data.*`."
            )
        return self._frames.positions(rows, condition, list(POSITION))

    def _mark(self, positions: pa.Table, reason: str, *, rejected: bool) -> None:
        found = self._index.locate(positions)
        valid = (found >= 0) & self._given[np.maximum(found, 0)]
        if not valid.all():
            raise HandlerError("The handler rejected or skipped a position that it was not given.")
        chosen = self._outcomes[rejected]
        for row in found.tolist():
            chosen.setdefault(row, reason)

    def _require_open(self) -> None:
        if self._closed:
            raise HandlerError("The handler has returned, and its tx is closed: what it records now would belong to nothing.")

    # The flow's side.

    def close(self) -> None:
        """The handler has returned: from now on its tx refuses everything."""
        self._closed = True

    def take(self, frames: Frames) -> None:
        """The handler's frames are of this kind, whatever the batch's are."""
        self._frames = frames

    def at_event(self, position: tuple[Any, ...]) -> None:
        """From now on `publish`, `recorded` and `wrote` are about the event at this position (values of POSITION)."""
        self.position, self._published, self.of_events, self.wrote, self._asked = position, 0, True, False, False

    @property
    def recorded(self) -> bool:
        """Whether the event in hand has written, merged, published, or had the connection."""
        return self.wrote or self._asked

    def in_order(self, rows: pa.Table) -> pa.Table:
        """The handler's rows in the order of their positions, where Spark may have kept none."""
        found = self._index.locate(rows.select(list(POSITION)))
        return rows if bool((found[1:] > found[:-1]).all()) else rows.take(pa.array(np.argsort(found, kind="stable")))

    def returns(self, rows: Any, table: str, authors: list[Any] | None = None) -> None:
        """What the handler returned: it comes behind everything that was recorded.

        Args:
            authors: of rows of single events, the `position` of each one's event.
        """
        self._said.returned = Call(table, rows, None, authors)

    def adopt_rows(self, table: str, rows: list[Any], how: Merge | None, authors: list[Any] | None) -> None:
        """Rows of Python objects that handlers have written in tasks."""
        self._said.writes.append(Call(table, rows, how, authors))

    @property
    def given(self) -> Ints:
        """Rows of the chunk that the handler was given, ascending."""
        return np.flatnonzero(self._given)

    def events(self) -> Index:
        """Positions and keys of those rows: what tasks need to handle them."""
        return self._index.travelling(self.given)

    def adopt(self, rejected: Mapping[int, str], skipped: Iterable[int]) -> None:
        """What tasks decided about rows of the chunk."""
        self._outcomes[True].update(rejected)
        self._outcomes[False].update(dict.fromkeys(skipped, ""))

    def adopt_files(self, table: str, files: Sequence[str]) -> None:
        """Files that tasks have written for this sink: they come behind everything that was recorded for it."""
        self._said.files = (table, files)

    @property
    def transaction(self) -> Transaction:
        """For what is written while the handler runs."""
        self._require_open()
        return self._transaction

    def refuse_parked(self, positions: pa.Table) -> None:
        """Raise HandlerError where one of these positions was parked: what was said for it is about to become true."""
        if self.rejected and (both := [row for row in self._index.locate(positions).tolist() if row in self.rejected]):
            raise HandlerError(
                f"The handler has parked {self._index.describe(both[0])} and returned rows of it, written or published: it can have an "
                "effect or a letter, not both. Return None there, and say nothing else through tx."
            )

    def skip_positions(self, positions: pa.Table) -> None:
        """Skip the events at these positions (columns of POSITION)."""
        self._mark(positions, "", rejected=False)

    @property
    def rejected(self) -> dict[int, str]:
        """Row of the chunk -> reason, of what the handler parked."""
        return self._outcomes[True]

    @property
    def skipped(self) -> Ints:
        """Rows of the chunk that the handler skipped and did not park."""
        return np.array(sorted(set(self._outcomes[False]) - set(self.rejected)), dtype=np.int64)

    def perform_writes(self, returned: Callable[[str, Rows], Any] | None = None) -> None:
        """Evaluate and hand over what was recorded, each once, in the order of the calls.

        Args:
            returned: takes the rows that the handler returned; else they are written as others are.

        Raises:
            EventsFailed: values of rows that single events made do not fit their columns.
            SinkMismatch: rows do not fit a table, or break a rule of it.
        """
        parked = np.array(sorted(self.rejected), dtype=np.int64)
        performance = Performance(self._frames, self._index, self.given, parked, self._transaction, self.position is not None)
        try:
            performance.perform(self._said, returned or self._transaction.write)
        except RowsMisfit as misfit:
            if self.of_events:  # columns and types are values of single events
                raise RowsRefused(str(misfit)) from misfit
            raise


def _position_of(event: Any) -> pa.Table:
    return pa.table({name: [getattr(event, name)] for name in POSITION})


def _is_empty(rows: Any) -> bool:
    """No row at all. A dict without columns is one, and refused."""
    return isinstance(rows, list) and not rows


def _own(rows: Any) -> Any:
    """Dicts as they are now; other rows, which nothing changes, themselves. Raises RowsRefused as `own` does."""
    if type(rows) is not dict:
        rows = named(rows)
    if type(rows) is dict or isinstance(rows, Mapping):
        return own((rows,))
    rows = list(map(named, rows)) if isinstance(rows, list) else rows
    return own(rows) if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows) else rows
