"""Rows without Spark: an Arrow table, or dicts, behind the `Rows` interface of store.py."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.errors import RowsRefused
from dedup.value_plain import is_flat


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are already here."""

    table: pa.Table
    in_tasks: ClassVar[bool] = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return self.table.schema

    def arrow(self) -> pa.Table:
        """The rows themselves."""
        return self.table

    def plain(self) -> None:
        """They have types."""

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """`write` run once over all rows, in this process."""
        return list(write(iter(self.table.select(columns).to_batches())))


@dataclass(frozen=True)
class PlainRows:
    """Rows of Python objects. Their types are those of the sink, which converts them: see dedup/typed.py."""

    rows: Sequence[Mapping[str, Any]]
    authors: list[Any] | None = None  # of rows of single events: the values of POSITION of each one's event
    in_tasks: ClassVar[bool] = False

    @cached_property
    def names(self) -> list[str]:
        """All columns, in the order in which they come first."""
        return list(dict.fromkeys(chain.from_iterable(self.rows)))

    @cached_property
    def schema(self) -> pa.Schema:
        """What the first values of each column look like: for messages, not to write by."""
        return pa.schema([pa.field(str(name), _looks(self.column(name))) for name in self.names])

    def column(self, name: str) -> list[Any]:
        """The values of one column; null where a row does not name it."""
        try:
            return [row[name] for row in self.rows]
        except KeyError:
            return [row.get(name) for row in self.rows]

    def plain(self) -> PlainRows:
        """Themselves."""
        return self

    def arrow(self) -> pa.Table:
        """As Arrow takes them together: for rows that no sink gives types to. Raises pyarrow's errors where it finds none."""
        return pa.Table.from_pydict({name: self.column(name) for name in self.names})

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """As `arrow`, written at once."""
        return list(write(iter(self.arrow().select(columns).to_batches())))


def alike(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[int]]:
    """The numbers of rows with the same columns, together: what one row lacks is not NULL because another one has it."""
    first = rows[0].keys() if rows else None
    if all(row.keys() == first for row in rows):
        return [range(len(rows))]
    found: dict[frozenset[str], list[int]] = {}
    of_names: dict[tuple[str, ...], list[int]] = {}
    for number, names in enumerate(map(tuple, rows)):
        if names not in of_names:
            of_names[names] = found.setdefault(frozenset(names), [])
        of_names[names].append(number)
    return list(found.values())


_LOOKED_AT = 100
"""Values by which a message guesses the type of a column."""


def _looks(values: Sequence[Any]) -> pa.DataType:
    try:
        return pa.array(list(islice(filter(is_flat, (value for value in values if value is not None)), _LOOKED_AT)) or [""]).type
    except Exception:  # noqa: BLE001 - Arrow asks the values, which may be of any class
        return pa.string()


def table_of(rows: Sequence[Mapping[str, Any]], fields: pa.StructType) -> pa.Table:
    """A table of these rows; what a row does not name is null. `Table.from_pylist` takes several times as long for few rows."""
    return pa.Table.from_struct_array(pa.array(rows, fields))


def picked(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """These rows, in this order. Rows that stand one after another are not copied."""
    first = int(rows[0]) if len(rows) else 0
    if (rows == np.arange(first, first + len(rows))).all():
        return table.slice(first, len(rows))
    return table.take(pa.array(rows))


def for_spark(table: pa.Table) -> pa.Table:
    """The same rows without empty pieces: `createDataFrame` of Spark 4.2 takes one for the end and drops what comes behind it (tried)."""
    pieces = [piece for piece in table.to_batches() if piece.num_rows]
    return pa.Table.from_batches(pieces or [pa.RecordBatch.from_pylist([], table.schema)])


def named(row: Any) -> Any:
    """A Row of Spark's that has names of fields as a dict by them; anything else as it is."""
    fields = getattr(row, "__fields__", None) if isinstance(row, tuple) else None
    return dict(zip(fields, row, strict=True)) if fields else row


def own(rows: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Rows that a handler gave, as they are now: it may use one dict, list or array for all of its events.

    Raises:
        RowsRefused: a row has no columns, the name of one is no text, or a value holds itself or is nested too deeply.
    """
    return list(map(_own, rows))


def _own(row: Mapping[Any, Any]) -> dict[str, Any]:
    if not row:
        raise RowsRefused("A row has no columns. Give every row its columns; return None, or write nothing, where there is no row.")
    made = {}
    for name, value in row.items():
        if type(name) is not str and not isinstance(name, str):
            raise RowsRefused(f"Column {name!r:.80} of a row is a {type(name).__name__}: names of columns are texts.")
        try:
            made[name] = value if type(value) in _PLAIN else copied(value)
        except _TooDeep as error:
            raise RowsRefused(f"Column {name!r}: its value ({type(value).__name__}) holds itself, or is nested {_DEEPEST} deep.") from error
    return made


class _TooDeep(ValueError):
    """A value is nested too deeply, or holds itself."""


_DEEPEST = 200
"""Containers inside one another."""


def copied(value: Any, depth: int = 0) -> Any:
    """The value as it is now. Mappings and Rows of Spark become dicts. Raises ValueError for what holds itself."""
    if type(value) in _PLAIN:
        return value
    if depth > _DEEPEST:
        raise _TooDeep(f"a value holds itself, or is nested {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {name: copied(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [copied(inner, depth + 1) for inner in value]
    if isinstance(value, tuple):
        return _copied_tuple(value, depth)
    if isinstance(value, np.ndarray):
        return _copied_array(value, depth)
    return bytes(value) if isinstance(value, bytearray) else value


def _copied_tuple(value: tuple[Any, ...], depth: int) -> Any:
    """Of its own class, so that a namedtuple keeps the names of its fields; a Row of Spark's becomes a dict by them."""
    items = [copied(inner, depth + 1) for inner in value]
    if type(value) is tuple:
        return tuple(items)
    if fields := getattr(value, "__fields__", None):
        return dict(zip(fields, items, strict=True))
    made: tuple[Any, ...] = tuple.__new__(type(value), items)
    getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return made


def _copied_array(value: np.ndarray[Any, Any], depth: int) -> np.ndarray[Any, Any]:
    made = value.copy()
    if made.dtype == object:
        for place in np.ndindex(made.shape):
            made[place] = copied(value[place], depth + 1)
    return made


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Decimal, dt.datetime, dt.date})
"""What cannot change, and is most of what rows hold."""
