"""Which events of a run failed, where that is known without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from checkpoint.errors import ValuesRefused
from dedup.envelope import POSITION

Column = tuple[str, str]
"""(sink, column)"""

Misfits = Mapping[str, tuple[str, int]]
"""Column -> what is wrong with one of its values, and how many are."""


class EventsFailed(Exception):
    """A handler of single events knows by itself which of them failed: the others need no search."""

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
        """A call whose rows all fit."""
        self.fitting |= {(table, name) for row in rows for name, value in row.items() if value is not None}
        self.rows[table] = self.rows.get(table, 0) + len(rows)

    def error(self) -> EventsFailed | ValuesRefused:
        """What to raise."""
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
