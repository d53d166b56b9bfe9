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


class EventsFailed(Exception):
    """A handler of single events knows by itself which of them failed: the others need no search."""

    def __init__(self, positions: pa.Table, errors: Sequence[BaseException], misfits: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{len(errors)} events failed")
        self.positions, self.errors = positions, errors
        self.misfits = dict(misfits or {})
        """Column of a sink in which no row of the run fits -> what is wrong."""


@dataclass
class Refusals:
    """What values of rows of single events are refused for, over all calls of one run: all of it is known before it is told."""

    why: dict[tuple[Any, ...], str] = field(default_factory=dict)  # position (POSITION) of the event -> what is wrong with its first row
    misfits: dict[Column, str] = field(default_factory=dict)  # column in which no value of a call fits
    fitting: set[Column] = field(default_factory=set)

    def add(self, table: str, refused: ValuesRefused, authors: Sequence[tuple[Any, ...]]) -> None:
        """Of one call.

        Args:
            authors: the values of POSITION of the event that each row is of.
        """
        for row, why in refused.by_row.items():
            self.why.setdefault(authors[row], why)
        self.misfits |= {(table, name): why for name, why in refused.misfits.items() if (table, name) not in self.misfits}
        self.fitting |= {(table, name) for name in refused.fitting}

    def add_fitting(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A call whose rows all fit."""
        self.fitting |= {(table, name) for row in rows for name, value in row.items() if value is not None}

    def error(self) -> EventsFailed:
        """What to raise."""
        positions = pa.table({name: [at[i] for at in self.why] for i, name in enumerate(POSITION)})
        misfits = {f"{table}.{name}": why for (table, name), why in self.misfits.items() if (table, name) not in self.fitting}
        return EventsFailed(positions, [ValuesRefused(why) for why in self.why.values()], misfits)
