"""What a handler has said through its `Tx`: recorded call by call, and handed over to the transaction once it has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from checkpoint.errors import HandlerError
from dedup.checked import Checked
from dedup.envelope import POSITION
from dedup.frames import Frames
from dedup.index import Index, Ints
from dedup.outbox.ahead import Ahead
from dedup.outbox.message import Messages
from dedup.outbox.recording import Names, messages_of, rows_of
from dedup.reduce import last_per_key
from dedup.rows import ArrowRows
from dedup.steps import Merge
from dedup.store import Rows, Transaction


class Call(NamedTuple):
    """Rows for a table, appended or merged."""

    table: str
    rows: Any
    how: Merge | None = None

    def takes(self, later: Call) -> bool:
        """Whether the rows of a later call can be written together with these: one table, one way, the same columns."""
        first = self.rows[0] if type(self.rows) is list and self.table == later.table and self.how == later.how else None
        return isinstance(first, dict) and all(isinstance(row, dict) and row.keys() == first.keys() for row in later.rows)

    def alike(self) -> Iterator[Call]:
        """Rows that are dicts, those with the same columns together: what one of them lacks is not NULL because another one has it."""
        if type(self.rows) is not list:
            yield self
            return
        found: dict[frozenset[str], list[Any]] = {}
        for row in self.rows:
            found.setdefault(frozenset(row), []).append(row)
        yield from (self._replace(rows=rows) for rows in found.values())


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

    def perform(self, said: Said, returned: Callable[[str, Rows], Any]) -> None:
        """Evaluate everything once, and hand it over.

        Args:
            returned: takes the rows that the handler returned.
        """
        with Ahead() as ahead:
            made = [ahead.begin(rows.num_rows, job) for rows, job in self._outgoing(said.messages)]
            for call in said.writes:
                self._write(call, self.transaction.write)
            for call in said.returned.alike() if said.returned is not None else ():
                self._write(call, returned)
            if said.files is not None:
                self.transaction.adopt(*said.files)  # type: ignore[attr-defined]
            for messages in made:
                self.transaction.publish(messages())

    def _write(self, call: Call, append: Callable[[str, Rows], Any]) -> None:
        table, given, merge = call
        rows = self._checked(given, table)
        if merge is None:
            append(table, rows)
            return
        if merge.newer_by is None and rows.in_tasks and not set(POSITION) <= set(rows.schema.names):
            raise HandlerError(
                "In a batch as large as this Spark keeps no order of rows: let the rows of tx.merge carry their position columns, "
                "or name a column with newer_by=."
            )
        self.transaction.merge(table, ArrowRows(last_per_key(rows.arrow(), merge)), merge)

    def _outgoing(self, published: Sequence[Publication]) -> Iterator[tuple[pa.Table, Callable[[], Messages]]]:
        """The rows that were published, and what makes messages of them."""
        for topic, given, names in published:
            rows = rows_of(given) if self.by_event else self._checked(given, topic).arrow()
            if rows.num_rows:
                yield rows, partial(messages_of, topic, rows, names, self.index, self.given)

    def _checked(self, rows: Any, table: str) -> Checked:
        return Checked(self.frames.rows(rows), self.index, self.parked, table)
