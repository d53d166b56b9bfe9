"""The handler's side of a transaction: `Tx` records what the handler wants; the pipeline evaluates it once, afterwards.

What was recorded (`Recorded`) is looked through for events that the same run rejected (`Checked`), and handed over to the transaction
(`Performance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from checkpoint.errors import HandlerError, RowsMisfit, RowsRefused, ValuesRefused
from checkpoint.position import Ints
from deadletter.redact import redact
from dedup.core.envelope import POSITION
from dedup.core.index import Index
from dedup.core.messages import Messages
from dedup.core.rows import PlainRows, Rows, alike, named, own_rows
from dedup.core.steps import Merge
from dedup.core.store import Frames, Transaction
from dedup.outbox.recording import Ahead, Names, arrow_of, messages_of, of_event, rows_of

Handler = Callable[[Any, "Tx"], None]
"""(frame of new events, tx) -> nothing."""


class Tx:
    """What a handler can do. All that it records is committed in one transaction, or nothing of it is.

    Only `connection` acts at once; what `write` recorded is not visible to it.
    """

    def __init__(self, frames: Frames, index: Index, given: Ints, transaction: Transaction, lanes: Ints | None = None) -> None:
        self._frames, self._index, self._transaction = frames, index, transaction
        self.lanes = np.full(len(given), -1) if lanes is None else lanes  # of each given row the number of its sequence; -1: none
        self._given = np.zeros(len(index), dtype=bool)
        self._given[given] = True
        self._closed = False
        self.lent = False  # whether the handler has had the connection: an error may have spoilt what it does next
        self._calls = Recorded()
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
        """Store messages in this transaction. After the commit `dedup outbox dispatch`, or `consumer.dispatch_to`, sends them.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts; their order is the order of the messages of one key.
            topic: topic or event hub.
            key: column with the destination key (bytes or text): messages of one key keep their order. Without one no order is kept.
            id: column with the message id, by which the receiver recognises duplicates. Without one it is derived from the incoming key and
                `order` if the rows have their position columns and order= is given, and in a handler of events; else it is random.
            body: column with the message itself, bytes or text.
            headers: column with a list of {"key": text, "value": bytes}, as `properties`.
            order: column with whole numbers that distinguish the messages of one event.

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
            self._calls.publish_of_event(RecordedPublication(topic, rows, names))
        elif not _is_empty(rows):
            self._calls.messages.append(RecordedPublication(topic, _own(rows), names))

    def reject(self, rows: Any, condition: Any, reason: str | Exception) -> Any:
        """Park the events for which `condition` is true as dead letters; returns the rest. NULL counts as not rejected.

        The condition is evaluated once, here, and the decision is kept as data: a condition that would answer differently
        the next time cannot put an event on both sides or on neither.

        Args:
            rows: rows that still have their position columns.
            condition: Spark: SQL text or Column; Arrow: a boolean array or a pyarrow expression.
            reason: what the letter says; of an exception its type and text.
        """
        return self._mark_where(rows, condition, _text(reason), rejected=True)

    def skip(self, rows: Any, condition: Any) -> Any:
        """Skip the events for which `condition` is true: they count as decided, without an effect. Returns the rest."""
        return self._mark_where(rows, condition, "", rejected=False)

    def dead_letter(self, rows: Any, reason: str | Exception) -> None:
        """Park all events of `rows`, which must have their position columns; in a handler of single events: the event.

        Args:
            reason: what the letter says; of an exception its type and text.
        """
        self._mark(_position_of(rows) if isinstance(rows, tuple) else self._positions(rows, None), _text(reason), rejected=True)

    def _record(self, table: str, rows: Any, how: Merge | None) -> None:
        if not isinstance(table, str) or not table:
            raise HandlerError(f"tx.{'merge' if how else 'write'} takes the name of a table, not {table!r}.")
        if _is_empty(rows):
            return
        self.wrote = True
        given = _own(rows)
        if self.position is not None and isinstance(given, list):
            self._calls.write_of_event(RecordedWrite(table, given, how, [self.position] * len(given)))
        else:
            self._calls.writes.append(RecordedWrite(table, given, how))

    def _mark_where(self, rows: Any, condition: Any, reason: str, *, rejected: bool) -> Any:
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
            raise HandlerError("The handler has returned, and its tx is closed: it can record nothing more.")

    # The pipeline's side.

    def close(self) -> None:
        """Refuse every call from now on: the handler has returned."""
        self._closed = True

    def take(self, frames: Frames) -> None:
        """Use frames of this kind for the handler, whatever kind the batch has."""
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
        """Record what the handler returned, behind everything that it recorded before.

        Args:
            authors: of rows of single events, the `position` of each one's event.
        """
        self._calls.returned = RecordedWrite(table, rows, None, authors)

    def adopt_rows(self, table: str, rows: list[Any], how: Merge | None, authors: list[Any] | None) -> None:
        """Rows of Python objects that handlers have written in tasks."""
        self._calls.writes.append(RecordedWrite(table, rows, how, authors))

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
        self._calls.files = (table, files)

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
                "effect or a letter, not both. Return None there, and call nothing else on tx."
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
            performance.perform(self._calls, returned or self._transaction.write)
        except RowsMisfit as misfit:
            if self.of_events:  # columns and types are values of single events
                raise RowsRefused(str(misfit)) from misfit
            raise


def _text(reason: Any) -> str:
    if isinstance(reason, str):
        return reason
    if isinstance(reason, Exception):
        return redact(f"{type(reason).__name__}: {reason}")
    raise HandlerError(f"The reason of a dead letter is a text or an exception, not {type(reason).__name__}.")


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
        return own_rows((rows,))
    rows = list(map(named, rows)) if isinstance(rows, list) else rows
    return own_rows(rows) if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows) else rows


Column = tuple[str, str]
"""(sink, column)"""

Misfits = Mapping[str, tuple[str, int]]
"""Column -> what is wrong with one of its values, and how many are."""


class EventsFailed(Exception):
    """Some events of a handler of single events failed. It names them, so that no search is needed."""

    def __init__(self, positions: pa.Table, errors: Sequence[BaseException], misfits: Misfits | None = None) -> None:
        super().__init__(f"{len(errors)} events failed")
        self.positions, self.errors = positions, errors
        self.misfits = dict(misfits or {})
        """By column of a sink in which no row of the run fits."""


@dataclass
class Refusals:
    """What values of rows of single events are refused for, over all calls of one run: all of it is known before it is told."""

    why: dict[tuple[Any, ...], str] = field(default_factory=dict)  # position (POSITION) of the event -> what is wrong with its first row
    misfits: dict[Column, tuple[str, int]] = field(default_factory=dict)  # by column in which no value of a call fits
    fitting: set[Column] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)  # by sink
    first: ValuesRefused | None = None  # of rows that are not of single events

    def __bool__(self) -> bool:
        return bool(self.why) or self.first is not None

    def add(self, table: str, refused: ValuesRefused, authors: Sequence[tuple[Any, ...]] | None, rows: int) -> None:
        """Of one call.

        Args:
            authors: the values of POSITION of the event that each row is of; None: a handler of batches has made them.
            rows: how many the call has.
        """
        if authors is None:
            self.first = self.first or refused
        else:
            for row, why in refused.by_row.items():
                self.why.setdefault(authors[row], why)
        for name, (why, count) in refused.misfits.items():
            told, before = self.misfits.get((table, name), (why, 0))
            self.misfits[table, name] = (told, before + count)
        self.fitting |= {(table, name) for name in refused.fitting}
        self.rows[table] = self.rows.get(table, 0) + rows

    def add_fitting(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a call whose rows all fit."""
        self.fitting |= {(table, name) for row in rows for name, value in row.items() if value is not None}
        self.rows[table] = self.rows.get(table, 0) + len(rows)

    def error(self) -> EventsFailed | ValuesRefused:
        """The error to raise."""
        misfits = {at: misfit for at, misfit in self.misfits.items() if at not in self.fitting}
        if not self.why and self.first is not None:
            kept = {f"{table}.{name}": (why, n) for (table, name), (why, n) in misfits.items() if are_the_columns(n, self.rows[table])}
            self.first.misfits = kept
            return self.first
        positions = pa.table({name: [at[i] for at in self.why] for i, name in enumerate(POSITION)})
        named = {f"{table}.{name}": misfit for (table, name), misfit in misfits.items()}
        return EventsFailed(positions, [ValuesRefused(why) for why in self.why.values()], named)


def are_the_columns(misfits: int, of: int) -> bool:
    """Whether so many misfits, and no value that fits, say that a column is wrong: a single one among others without a value does not."""
    return misfits >= 2 or misfits >= of


class RecordedWrite(NamedTuple):
    """Rows for a table, appended or merged."""

    table: str
    rows: Any
    how: Merge | None = None
    authors: Any = None  # of rows of single events: a list with the position of each one's event; else None

    def takes(self, later: RecordedWrite) -> bool:
        """Whether the rows of a later call can stand behind these: dicts for one table, to be written in one way."""
        own = type(self.rows) is list and self.table == later.table and self.how == later.how and type(self.rows[0]) is dict
        return own and _are_dicts(later.rows)

    def alike(self) -> Iterator[RecordedWrite]:
        """Appended rows that are dicts, those with the same columns together; merged ones stay in their order (dedup/core/merges.py)."""
        parts = alike(self.rows) if self.how is None and type(self.rows) is list and _are_dicts(self.rows) else ()
        if len(parts) < 2:
            yield self
            return
        for numbers in parts:
            authors = None if self.authors is None else [self.authors[number] for number in numbers]
            yield self._replace(rows=[self.rows[number] for number in numbers], authors=authors)


def _are_dicts(rows: Sequence[Any]) -> bool:
    return _DICT.issuperset(map(type, rows))


_DICT: frozenset[type] = frozenset({dict})


class RecordedPublication(NamedTuple):
    """Rows that become messages for a topic."""

    topic: str
    rows: Any
    names: Names


@dataclass
class Recorded:
    """In the order of the calls. Rows of single events are lists of dicts, which grow while the next event goes on in the same way."""

    writes: list[RecordedWrite] = field(default_factory=list)
    messages: list[RecordedPublication] = field(default_factory=list)
    returned: RecordedWrite | None = None  # rows that the handler returned: behind all that it wrote
    files: tuple[str, Sequence[str]] | None = None  # a sink, and the files with its rows that tasks have written

    def write_of_event(self, call: RecordedWrite) -> None:
        """Rows that one event has written or merged."""
        if self.writes and self.writes[-1].takes(call):
            self.writes[-1].rows.extend(call.rows)
            self.writes[-1].authors.extend(call.authors)
        else:
            self.writes.append(call)

    def publish_of_event(self, made: RecordedPublication) -> None:
        """Rows that one event has published."""
        last = self.messages[-1] if self.messages else None
        if made.rows and last and (last.topic, last.names) == (made.topic, made.names):
            last.rows.extend(made.rows)
        elif made.rows:
            self.messages.append(made)


@dataclass(frozen=True)
class Performance:
    """Hands over what a handler has said about some rows of a chunk."""

    frames: Frames
    index: Index  # of the chunk
    given: Ints  # rows of the chunk that the handler was given
    parked: Ints  # those of them that it rejected
    transaction: Transaction
    by_event: bool  # whether published rows are lists of dicts that a handler of single events has made
    refusals: Refusals = field(default_factory=Refusals)
    fitting: list[RecordedWrite] = field(default_factory=list)  # calls of single events whose rows fit

    def perform(self, recorded: Recorded, returned: Callable[[str, Rows], Any]) -> None:
        """Evaluate everything once, and hand it over.

        Args:
            returned: takes the rows that the handler returned.

        Raises:
            EventsFailed: values of rows that single events made do not fit their columns.
            ValuesRefused: those of other rows.
        """
        with Ahead() as ahead:
            made = [ahead.begin(rows.num_rows, job) for rows, job in self._outgoing(recorded.messages)]
            for call in chain.from_iterable(call.alike() for call in self._gathered(recorded.writes)):
                self._write(call, self.transaction.write)
            for call in recorded.returned.alike() if recorded.returned is not None else ():
                self._write(call, returned)
            self._tell_refusals()
            if recorded.files is not None:
                self.transaction.adopt(*recorded.files)  # type: ignore[attr-defined]
            for messages in made:
                self.transaction.enqueue(messages())

    def _gathered(self, writes: list[RecordedWrite]) -> list[RecordedWrite]:
        """The calls; those of single events for one table together, where no other table can see when it gets its rows."""
        tables = {call.table for call in writes}
        if not 2 <= len(tables) < len(writes) or not self.by_event or not self.transaction.apart(tables):
            return writes
        made, last = list[RecordedWrite](), dict[str, RecordedWrite]()
        for call in writes:
            earlier = last.get(call.table)
            if earlier is not None and earlier.authors is not None and call.authors is not None and earlier.takes(call):
                earlier.rows.extend(call.rows)
                earlier.authors.extend(call.authors)
            else:
                made.append(call)
                last[call.table] = call
        return made

    def _tell_refusals(self) -> None:
        if not self.refusals:
            return
        for call in self.fitting:
            self.refusals.add_fitting(call.table, call.rows)
        raise self.refusals.error()

    def _write(self, call: RecordedWrite, append: Callable[[str, Rows], Any]) -> None:
        try:
            self._hand_over(call, append)
        except ValuesRefused as refused:
            self.refusals.add(call.table, refused, call.authors, len(call.rows))
        except RowsRefused:
            if not self.refusals:
                raise
        else:
            if type(call.rows) is list:
                self.fitting.append(call)

    def _hand_over(self, call: RecordedWrite, append: Callable[[str, Rows], Any]) -> None:
        table, merge = call.table, call.how
        rows = self._checked(call.rows, table, call.authors)
        if merge is None:
            append(table, rows)
            return
        if merge.newer_by is None and rows.in_tasks and not set(POSITION) <= set(rows.schema.names):
            raise HandlerError(
                "In a batch as large as this Spark keeps no order of rows: let the rows of tx.merge carry their position columns, "
                "or name a column with newer_by=."
            )
        self.transaction.merge(table, rows, merge)

    def _outgoing(self, published: Sequence[RecordedPublication]) -> Iterator[tuple[pa.Table, Callable[[], Messages]]]:
        """The rows that were published, and what makes messages of them."""
        for topic, given, names in published:
            rows = rows_of(given) if self.by_event else arrow_of(self._checked(given, topic), names)
            if rows.num_rows:
                yield rows, partial(messages_of, topic, rows, names, self.index, self.given)

    def _checked(self, rows: Any, table: str, authors: Any = None) -> Checked:
        given = self.frames.rows(rows) if authors is None else PlainRows(rows, authors)
        return Checked(given, self.index, self.parked, table)


class Checked:
    """Rows that are checked for parked positions, if they have position columns."""

    def __init__(self, rows: Rows, index: Index, parked: Ints, table: str) -> None:
        self._rows, self._table = rows, table
        self.in_tasks = rows.in_tasks
        carries = len(parked) > 0 and set(POSITION) <= set(rows.schema.names)
        self._forbidden = _PositionSet(index.travelling(parked)) if carries else None

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return self._rows.schema

    def arrow(self) -> pa.Table:
        """The rows, checked. Raises HandlerError for a parked position."""
        table = self._rows.arrow()
        if self._forbidden is not None:
            self._forbidden.check(table, self._table)
        return table

    def plain(self) -> PlainRows | None:
        """The rows where they are Python objects, checked. Raises HandlerError for a parked position."""
        rows = self._rows.plain()
        if rows is not None and self._forbidden is not None:
            carrying = PlainRows([row for row in rows.rows if row.keys() >= set(POSITION)])
            self._forbidden.check(pa.table({name: carrying.column(name) for name in POSITION}), self._table)
        return rows

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """The results of `write`, in tasks that check the rows; a parked position fails the task."""
        if self._forbidden is None or not set(POSITION) <= set(columns):
            return self._rows.files(write, columns)
        forbidden, table = self._forbidden, self._table  # what travels to the tasks
        return self._rows.files(lambda batches: write(forbidden.checked(batches, table)), columns)


@dataclass(frozen=True)
class _PositionSet:
    """The parked rows of a chunk, to look written rows up in."""

    parked: Index

    def check(self, table: pa.Table, sink: str) -> None:
        found = self.parked.locate(table.select(list(POSITION)))
        if (found >= 0).any():
            where = self.parked.describe(int(found[found >= 0][0]))
            raise HandlerError(
                f"The event at {where} was rejected and is still written to {sink!r}. Write the rows that tx.reject returned."
            )

    def checked(self, batches: Iterator[pa.RecordBatch], sink: str) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.check(pa.Table.from_batches([batch]), sink)
            yield batch
