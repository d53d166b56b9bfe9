"""What a handler has said through its `Tx`: recorded call by call, and handed over to the transaction once it has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from checkpoint.errors import HandlerError, RowsRefused, ValuesRefused
from dedup.checked import Checked
from dedup.envelope import POSITION
from dedup.failed import Refusals
from dedup.frames import Frames
from dedup.index import Index, Ints
from dedup.outbox.ahead import Ahead
from dedup.outbox.message import Messages
from dedup.outbox.recording import Names, arrow_of, messages_of, rows_of
from dedup.rows import PlainRows, alike
from dedup.steps import Merge
from dedup.store import Rows, Transaction


class Call(NamedTuple):
    """Rows for a table, appended or merged."""

    table: str
    rows: Any
    how: Merge | None = None
    authors: Any = None  # of rows of single events: a list with the position of each one's event; else None

    def takes(self, later: Call) -> bool:
        """Whether the rows of a later call can stand behind these: dicts for one table, to be written in one way."""
        own = type(self.rows) is list and self.table == later.table and self.how == later.how and type(self.rows[0]) is dict
        return own and _are_dicts(later.rows)

    def alike(self) -> Iterator[Call]:
        """Appended rows that are dicts, those with the same columns together; merged ones stay in their order (dedup/in_turn.py)."""
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


class Publication(NamedTuple):
    """Rows that become messages for a topic."""

    topic: str
    rows: Any
    names: Names


@dataclass
class Said:
    """In the order of the calls. Rows of single events are lists of dicts, which grow while the next event goes on in the same way."""

    writes: list[Call] = field(default_factory=list)
    messages: list[Publication] = field(default_factory=list)
    returned: Call | None = None  # rows that the handler returned: behind all that it wrote
    files: tuple[str, Sequence[str]] | None = None  # a sink, and the files with its rows that tasks have written

    def write_of_event(self, call: Call) -> None:
        """Rows that one event has written or merged."""
        if self.writes and self.writes[-1].takes(call):
            self.writes[-1].rows.extend(call.rows)
            self.writes[-1].authors.extend(call.authors)
        else:
            self.writes.append(call)

    def publish_of_event(self, made: Publication) -> None:
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
    fitting: list[Call] = field(default_factory=list)  # calls of single events whose rows fit

    def perform(self, said: Said, returned: Callable[[str, Rows], Any]) -> None:
        """Evaluate everything once, and hand it over.

        Args:
            returned: takes the rows that the handler returned.

        Raises:
            EventsFailed: values of rows that single events made do not fit their columns.
            ValuesRefused: those of other rows.
        """
        with Ahead() as ahead:
            made = [ahead.begin(rows.num_rows, job) for rows, job in self._outgoing(said.messages)]
            for call in chain.from_iterable(call.alike() for call in self._gathered(said.writes)):
                self._write(call, self.transaction.write)
            for call in said.returned.alike() if said.returned is not None else ():
                self._write(call, returned)
            self._tell_refusals()
            if said.files is not None:
                self.transaction.adopt(*said.files)  # type: ignore[attr-defined]
            for messages in made:
                self.transaction.publish(messages())

    def _gathered(self, writes: list[Call]) -> list[Call]:
        """The calls; those of single events for one table together, where no other table can see when it gets its rows."""
        tables = {call.table for call in writes}
        if not 2 <= len(tables) < len(writes) or not self.by_event or not self.transaction.apart(tables):
            return writes
        made, last = list[Call](), dict[str, Call]()
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

    def _write(self, call: Call, append: Callable[[str, Rows], Any]) -> None:
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

    def _hand_over(self, call: Call, append: Callable[[str, Rows], Any]) -> None:
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

    def _outgoing(self, published: Sequence[Publication]) -> Iterator[tuple[pa.Table, Callable[[], Messages]]]:
        """The rows that were published, and what makes messages of them."""
        for topic, given, names in published:
            rows = rows_of(given) if self.by_event else arrow_of(self._checked(given, topic), names)
            if rows.num_rows:
                yield rows, partial(messages_of, topic, rows, names, self.index, self.given)

    def _checked(self, rows: Any, table: str, authors: Any = None) -> Checked:
        given = self.frames.rows(rows) if authors is None else PlainRows(rows, authors)
        return Checked(given, self.index, self.parked, table)
