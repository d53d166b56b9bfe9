"""Rows that a handler wrote, looked through for events that it rejected in the same run. Called by dedup/said.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from checkpoint.errors import HandlerError
from dedup.envelope import POSITION
from dedup.index import Index, Ints
from dedup.rows import PlainRows
from dedup.store import Rows


class Checked:
    """Rows that must not carry a parked position, where they carry positions at all."""

    def __init__(self, rows: Rows, index: Index, parked: Ints, table: str) -> None:
        self._rows, self._table = rows, table
        self.in_tasks = rows.in_tasks
        carries = len(parked) > 0 and set(POSITION) <= set(rows.schema.names)
        self._forbidden = _PositionSet(index.travelling(parked)) if carries else None

    @property
    def schema(self) -> pa.Schema:
        """As that of the rows."""
        return self._rows.schema

    def arrow(self) -> pa.Table:
        """The rows, looked through. Raises HandlerError for a parked one."""
        table = self._rows.arrow()
        if self._forbidden is not None:
            self._forbidden.check(table, self._table)
        return table

    def plain(self) -> PlainRows | None:
        """The rows where they are Python objects, looked through. Raises HandlerError for a parked one."""
        rows = self._rows.plain()
        if rows is not None and self._forbidden is not None:
            carrying = PlainRows([row for row in rows.rows if row.keys() >= set(POSITION)])
            self._forbidden.check(pa.table({name: carrying.column(name) for name in POSITION}), self._table)
        return rows

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """The results of `write`, in tasks that look the rows through; a parked one fails the task."""
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
