"""Rows of Python objects as rows of a sink: column by column, by values.py. Called by both stores once they know the sink. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from checkpoint.errors import ValuesRefused
from dedup.envelope import POSITION
from dedup.rows import PlainRows
from dedup.steps import Merge
from dedup.store import Rows
from dedup.values import Fault, Faults, Target, convert

_PLACES = {
    name: Target("text", pa.string(), "a text")
    if name in ("source", "topic")
    else Target("int", pa.int32() if name == "partition" else pa.int64(), "a whole number")
    for name in POSITION
}
"""The position columns, where a sink has none."""

Alter = Callable[[str, pa.DataType], str]
"""(column, Arrow type) -> the statement that makes the column take it."""


class SinkColumns(Protocol):
    """The columns of a sink, as its store knows them."""

    @property
    def shown(self) -> str:
        """The sink, for messages."""

    def targets(self) -> dict[str, Target]:
        """By column."""

    def require(self, names: Sequence[str], rows: PlainRows) -> None:
        """Raise RowsMisfit for columns of the rows that the sink lacks, and for those that it requires and that are not among them."""

    def alter(self, column: str, wanted: pa.DataType) -> str:
        """The statement that makes the column take this type; empty where there is none."""


def given_rows(sink: SinkColumns, rows: Rows, how: Merge | None = None) -> pa.Table:
    """The rows as a table: Python objects with the types of the sink, others as they are.

    Args:
        how: they are to be merged, and may have columns of the merge that the sink lacks.

    Raises:
        RowsMisfit: they have other columns than the sink.
        ValuesRefused: values do not fit their columns.
    """
    plain = rows.plain()
    if plain is None:
        return rows.arrow()
    own, targets = {*POSITION, how.delete_when} if how is not None else set(), sink.targets()
    sink.require([name for name in plain.names if name in targets or name not in own], plain)
    return typed(plain, targets if how is None else with_merge(targets, how), sink.shown, sink.alter)


def typed(rows: PlainRows, targets: Mapping[str, Target], table: str, alter: Alter) -> pa.Table:
    """The rows with the types of the sink.

    Args:
        targets: by column; the rows have no others.
        table: for messages.

    Raises:
        ValuesRefused: some values do not fit, or are null where the sink forbids it.
    """
    arrays, wrong = {}, {}
    for name in rows.names:
        arrays[name], wrong[name] = convert(rows.column(name), targets[name], name)
    if any(wrong.values()):
        raise refusal(rows, wrong, lambda fault: told(fault, table, alter))
    return pa.table(arrays)


def refusal(rows: PlainRows, wrong: Mapping[str, Faults], tell: Callable[[Fault], str]) -> ValuesRefused:
    """The error about these faults, by column and row: of each row the first of its columns that is wrong."""
    by_row: dict[int, Fault] = {}
    for name in reversed(rows.names):
        by_row |= wrong[name]
    made = ValuesRefused(tell(by_row[min(by_row)]))
    made.by_row = {row: tell(fault) for row, fault in sorted(by_row.items())}
    made.fitting = frozenset(name for name in rows.names if _some_fits(rows.column(name), wrong[name]))
    none = {name: faults for name, faults in wrong.items() if faults and name not in made.fitting}
    made.misfits = {name: (tell(next(iter(faults.values()))), len(faults)) for name, faults in none.items()}
    return made


def each_typed(numbers: Sequence[Sequence[int]], parts: Sequence[PlainRows], given: Callable[[PlainRows], pa.Table]) -> list[pa.Table]:
    """What `given` makes of each part of some rows.

    Args:
        numbers: of each part the numbers of its rows.

    Raises:
        ValuesRefused: some values do not fit, in all parts together.
    """
    tables, refused = [], {}
    for at, part in enumerate(parts):
        try:
            tables.append(given(part))
        except ValuesRefused as error:
            refused[at] = error
    if refused:
        raise _joined(tables, [(numbers[at], error) for at, error in refused.items()])
    return tables


def _joined(fitting: Sequence[pa.Table], refused: Sequence[tuple[Sequence[int], ValuesRefused]]) -> ValuesRefused:
    by_row = {numbers[row]: why for numbers, error in refused for row, why in error.by_row.items()}
    made = ValuesRefused(by_row[min(by_row)])
    made.by_row = dict(sorted(by_row.items()))
    values = {name for table in fitting for name in table.column_names if table[name].null_count < table.num_rows}
    made.fitting = frozenset(values.union(*(error.fitting for _, error in refused)))
    misfits: dict[str, tuple[str, int]] = {}
    for name, (why, count) in (misfit for _, error in refused for misfit in error.misfits.items()):
        first, before = misfits.get(name, (why, 0))
        misfits[name] = (first, before + count)
    made.misfits = {name: misfit for name, misfit in misfits.items() if name not in made.fitting}
    return made


def _some_fits(values: Sequence[Any], faults: Faults) -> bool:
    return any(value is not None and row not in faults for row, value in enumerate(values))


def told(fault: Fault, table: str, alter: Alter) -> str:
    """What is wrong, and what to do."""
    statement = alter(fault.path, fault.wanted) if fault.wanted is not None and "." not in fault.path else ""
    change = f", or {statement.rstrip(';')}" if statement else ""
    return f"{table}: {fault}. Convert it in the handler{change}."


def with_merge(targets: Mapping[str, Target], merge: Merge) -> dict[str, Target]:
    """With the columns that a merge goes by and that the sink may lack: positions, and what says that a row is deleted."""
    own = {name: place for name, place in _PLACES.items() if name not in targets}
    if merge.delete_when and merge.delete_when not in targets:
        own[merge.delete_when] = Target("bool", pa.bool_(), "a yes or no")
    return {**targets, **own}
