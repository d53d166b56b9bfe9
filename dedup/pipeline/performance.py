"""Perform what a handler recorded: look its rows through for events that the same run rejected, and hand them over to the transaction.

`Recorded` is what `Tx` notes while the handler runs. `Performance` evaluates it once, afterwards, in the order of the calls.
`Checked` refuses rows of rejected events. What is wrong with rows of single events is gathered over all calls (`Refusals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from checkpoint.errors import HandlerError, RowsRefused, ValuesRefused
from checkpoint.position import Ints
from dedup.core.envelope import POSITION
from dedup.core.index import Index
from dedup.core.messages import Messages
from dedup.core.rows import PlainRows, Rows, alike, with_values
from dedup.core.steps import Merge
from dedup.core.store import Frames, Transaction
from dedup.outbox.recording import Ahead, Names, arrow_of, messages_of, require_told_apart, rows_of

Column = tuple[str, str]
"""(sink, column)"""

Misfits = Mapping[str, tuple[str, int]]
"""Column -> what is wrong with one of its values, and how many are."""


class EventsFailed(Exception):
    """Some events of a handler of single events failed. It names them, so that no search is needed."""

    def __init__(
        self, positions: pa.Table, errors: Sequence[BaseException], misfits: Misfits | None = None, fitting: Iterable[str] = ()
    ) -> None:
        super().__init__(f"{len(errors)} events failed")
        self.positions, self.errors = positions, errors
        self.misfits = dict(misfits or {})
        """By column of a sink in which no row of the run fits."""
        self.fitting = frozenset(fitting)
        """Columns of sinks in which some row has a value that fits."""


@dataclass
class Refusals:
    """What values of rows of single events are refused for, over all calls of one run: all of it is known before it is told."""

    why: dict[tuple[Any, ...], ValuesRefused] = field(default_factory=dict)  # by position (POSITION) of the event: of its first row
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
                self.why.setdefault(authors[row], _of_one(why, refused.briefs.get(row, "")))
        for name, (why, count) in refused.misfits.items():
            told, before = self.misfits.get((table, name), (why, 0))
            self.misfits[table, name] = (told, before + count)
        self.fitting |= {(table, name) for name in refused.fitting}
        self.rows[table] = self.rows.get(table, 0) + rows

    def add_fitting(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a call whose rows all fit."""
        self.fitting |= {(table, name) for name in with_values(PlainRows(rows))}
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
        fitting = (f"{table}.{name}" for table, name in self.fitting)
        return EventsFailed(positions, list(self.why.values()), named, fitting)


def _of_one(why: str, brief: str) -> ValuesRefused:
    made = ValuesRefused(why)
    made.brief = brief
    return made


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
            told = [messages() for messages in made]
            if not self.by_event:  # whose messages are numbered over all calls
                require_told_apart(told)
            for messages in told:
                self.transaction.enqueue(messages)

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
    def ordered(self) -> bool:
        """Whether the rows are in an order that the handler knows."""
        return self._rows.ordered

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
