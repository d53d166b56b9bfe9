"""What a handler writes, as rows of a sink: an Arrow table or dicts behind the interface `Rows`, and Arrow tables as frames.

Rows of Python objects are converted column by column (values.py), once the sink is known. Frames are what a handler is given where there
is no Spark. Pure. Called by pipeline/tx.py, by both stores and by spark/.
"""

from __future__ import annotations

import datetime as dt
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, HandlerError, RowsRefused, ValuesRefused
from dedup.core.envelope import POSITION
from dedup.core.steps import Merge
from dedup.core.value_rules import is_flat
from dedup.core.values import Fault, Faults, Target, convert

_LOOKED_AT = 100
"""Values by which a message guesses the type of a column."""

_DEEPEST = 200
"""Containers inside one another."""

FEW = 100
"""Rows up to which a loop in Python is quicker than to call for columns."""

LARGEST = 2**31 - 1
"""Bytes of a column in one piece: pyarrow takes rows of a table from one piece alone (pyarrow 26: "offset overflow")."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Decimal, dt.datetime, dt.date})
"""What cannot change, and is most of what rows hold."""

_TEXT: frozenset[type] = frozenset({str})

OF_AN_EVENT = " In a handler of single events call tx.dead_letter(event, reason), or return None to skip the event."
"""Behind the refusal of what is no frame."""

_PLACES = {
    name: Target("text", pa.string(), "a text")
    if name in ("source", "topic")
    else Target("int", pa.int32() if name == "partition" else pa.int64(), "a whole number")
    for name in POSITION
}
"""The position columns, where a sink has none."""

Alter = Callable[[str, pa.DataType], str]
"""(column, Arrow type) -> the statement that makes the column take it."""


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are already here."""

    table: pa.Table
    ordered: bool = True
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
    """Rows of Python objects. Their types are those of the sink, which converts them: see dedup/core/rows.py."""

    rows: Sequence[Mapping[str, Any]]
    authors: list[Any] | None = None  # of rows of single events: the values of POSITION of each one's event
    ordered: ClassVar[bool] = True
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


def with_values(rows: Rows) -> Iterator[str]:
    """The columns in which some row has a value."""
    plain = rows.plain()
    if plain is not None:
        return (name for name in plain.names if any(row.get(name) is not None for row in plain.rows))
    table = rows.arrow()
    return (name for name in table.column_names if table[name].null_count < table.num_rows)


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


def _looks(values: Sequence[Any]) -> pa.DataType:
    try:
        return pa.array(list(islice(filter(is_flat, (value for value in values if value is not None)), _LOOKED_AT)) or [""]).type
    except Exception:  # noqa: BLE001 - Arrow asks the values, which may be of any class
        return pa.string()


def picked(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """These rows, in this order. Rows that stand one after another are not copied."""
    first = int(rows[0]) if len(rows) else 0
    if (rows == np.arange(first, first + len(rows))).all():
        return table.slice(first, len(rows))
    return taken(table, rows)


def taken(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """These rows, in this order, however large the table is."""
    if fits_in_one_piece(table):
        return table.take(pa.array(rows))
    wanted, back = np.unique(rows, return_inverse=True)
    chosen = np.zeros(table.num_rows, dtype=bool)
    chosen[wanted] = True
    table = table.filter(pa.array(chosen))  # keeps the pieces
    if len(rows) == table.num_rows and bool((back[1:] > back[:-1]).all()):
        return table
    half = len(rows) // 2
    return pa.concat_tables([taken(table, back[:half]), taken(table, back[half:])])


def fits_in_one_piece(table: pa.Table) -> bool:
    """Whether Arrow takes rows from it: no column is larger than one piece can be."""
    return bool(max((column.nbytes for column in table.columns), default=0) + table.num_rows < LARGEST)


def without_views(table: pa.Table) -> pa.Table:
    """The same rows with texts and bytes of plain layout: Arrow can neither take nor compare views of them."""
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return _cast(table, lambda kind: plain.get(kind, kind))


def in_utc(table: pa.Table) -> pa.Table:
    """The same times in UTC. Tasks get them in the zone of Spark's session, and Java knows names of zones that Python does not."""
    return _cast(table, lambda kind: pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind)


def with_equal_nan(table: pa.Table) -> pa.Table:
    """The same rows with texts for floating-point numbers: as a number NaN does not equal itself."""
    return _cast(table, lambda kind: pa.string() if pa.types.is_floating(kind) else kind)


def _cast(table: pa.Table, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    kinds = [_nested(kind, leaf) for kind in table.schema.types]
    if kinds == table.schema.types:
        return table
    fields = [field.with_type(kind) for field, kind in zip(table.schema, kinds, strict=True)]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _nested(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with other types of single values."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([field.with_type(_nested(field.type, leaf)) for field in kind])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_nested(kind.value_type, leaf)))
    if types.is_map(kind):
        return pa.map_(_nested(kind.key_type, leaf), _nested(kind.item_type, leaf))
    return leaf(kind)


def table_of_dicts(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Dicts as columns, of all names that any of them has: Arrow alone would take those of the first one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def for_spark(table: pa.Table) -> pa.Table:
    """The same rows without empty pieces: `createDataFrame` of Spark 4.2 takes one for the end and drops what comes behind it (tried)."""
    pieces = [piece for piece in table.to_batches() if piece.num_rows]
    return pa.Table.from_batches(pieces or [pa.RecordBatch.from_pylist([], table.schema)])


def frame_of(session: Any, table: pa.Table) -> Any:
    """These rows as a DataFrame of this session of Spark's."""
    return importlib.import_module("dedup.spark.features").create(session, table)


def arrow_of(frame: Any) -> pa.Table:
    """The rows of a DataFrame of Spark's, on the driver."""
    return frame.toArrow() if hasattr(frame, "toArrow") else importlib.import_module("dedup.spark.features").to_arrow(frame)


def named(row: Any) -> Any:
    """A Row of Spark's that has names of fields as a dict by them; anything else as it is."""
    fields = getattr(row, "__fields__", None) if isinstance(row, tuple) else None
    return dict(zip(fields, row, strict=True)) if fields else row


def own_rows(rows: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Rows that a handler gave, as they are now: it may use one dict, list or array for all of its events.

    Raises:
        RowsRefused: a row has no columns, the name of one is no text, or a value holds itself or is nested too deeply.
    """
    return list(map(_own, rows))


def _own(row: Mapping[Any, Any]) -> dict[str, Any]:
    if not row:
        raise RowsRefused("A row has no columns. Give every row its columns; return None, or write nothing, where there is no row.")
    if _PLAIN.issuperset(map(type, row.values())) and _TEXT.issuperset(map(type, row)):
        return dict(row)
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


class ArrowFrames:
    """Implements `dedup.core.store.Frames` for pa.Table."""

    def columns(self, rows: pa.Table) -> list[str]:
        """Column names. Raises HandlerError for anything else than a table."""
        if not isinstance(rows, pa.Table | pa.RecordBatch):
            raise HandlerError(f"tx.reject, tx.skip and tx.dead_letter take a pyarrow.Table here, not {type(rows).__name__}.{OF_AN_EVENT}")
        return list(rows.column_names)

    def positions(self, rows: pa.Table, condition: Any | None, columns: list[str]) -> pa.Table:
        """These columns where the condition (boolean array or expression) is true. Raises HandlerError for another condition."""
        rows = _whole(rows)
        if isinstance(condition, pc.Expression):
            rows = rows.filter(condition)
        elif condition is not None:
            rows = rows.filter(_mask(condition, rows.num_rows), null_selection_behavior="drop")
        return rows.select(columns)

    def without(self, rows: pa.Table, positions: pa.Table) -> pa.Table:
        """Rows whose position is not among `positions`, in their order."""
        rows, keys = _whole(rows), positions.column_names
        if rows.num_rows <= FEW:  # a join starts threads
            gone = {at for at in _tuples(positions, keys) if None not in at}
            return picked(rows, np.array([row for row, at in enumerate(_tuples(rows, keys)) if at not in gone], dtype=np.int64))
        numbered = rows.select(keys).append_column("", pa.array(range(rows.num_rows), pa.int64()))
        kept = numbered.join(positions.group_by(keys).aggregate([]), keys=keys, join_type="left anti")
        return rows.take(kept[""].sort())

    def answering(self) -> AbstractContextManager[None]:
        """Tables are here."""
        return nullcontext()

    def rows(self, rows: Any) -> Rows:
        """A table, a dict or a list of dicts as rows for the store."""
        return rows_of(rows)


def _whole(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """A batch as a table: of a batch Arrow neither joins nor groups rows."""
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


def _mask(condition: Any, rows: int) -> Any:
    """The condition, which has to be a boolean array with a value for each of so many rows. Raises HandlerError for any other."""
    try:
        mask = condition if isinstance(condition, pa.Array | pa.ChunkedArray) else pa.array(condition)
    except (pa.ArrowException, TypeError):
        mask = None
    if mask is not None and pa.types.is_boolean(mask.type) and len(mask) == rows:
        return mask
    found = f"{type(condition).__name__}" if mask is None else f"an array of {len(mask)} values of type {mask.type}"
    raise HandlerError(
        f"The condition of tx.reject and tx.skip is a boolean array with a value for each of the {rows} rows, or an expression of "
        f"pyarrow.compute, not {found}. For example: pc.less(rows['amount'], 0)."
    )


def _tuples(rows: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in names), strict=True)


def rows_of(rows: Any) -> Rows:
    """A table or a record batch as it is; a dict or a list of dicts as Python objects. Raises ConfigError for anything else."""
    if isinstance(rows, pa.Table):
        return ArrowRows(rows)
    if isinstance(rows, pa.RecordBatch):
        return ArrowRows(pa.Table.from_batches([rows]))
    if isinstance(rows, Mapping):
        return PlainRows([rows])
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        return PlainRows(rows)
    kind, is_pandas = f"{type(rows).__module__}.{type(rows).__qualname__}", type(rows).__module__.partition(".")[0] == "pandas"
    hint = " Write pa.Table.from_pandas(frame, preserve_index=False)." if is_pandas else ""
    raise ConfigError(f"tx.write takes a DataFrame of Spark, an Arrow table, a dict or a list of dicts, not {kind}.{hint}")


class SinkColumns(Protocol):
    """The columns of a sink, as its store knows them."""

    @property
    def shown(self) -> str:
        """The sink, for messages."""

    def targets(self) -> dict[str, Target]:
        """By column."""

    def require(self, names: Sequence[str], rows: PlainRows, *, deleted: bool) -> None:
        """Raise RowsMisfit for columns of the rows that the sink lacks, and for those that it requires and that are not among them.

        Args:
            deleted: all rows only delete, and may lack what the sink requires.
        """

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
    wanted = targets if how is None else with_merge(targets, how)
    gone = set[int]() if how is None else _deletions(plain, wanted, how)
    sink.require([name for name in plain.names if name in targets or name not in own], plain, deleted=0 < len(gone) == len(plain.rows))
    free = {} if how is None else dict.fromkeys(set(plain.names) - {*how.keys, how.newer_by, how.delete_when}, gone)
    return typed(plain, wanted, sink.shown, sink.alter, free)


def _deletions(rows: PlainRows, targets: Mapping[str, Target], how: Merge) -> set[int]:
    """The numbers of the rows that only delete."""
    name = how.delete_when
    if name is None or name not in rows.names or targets[name].kind not in ("bool", "int"):
        return set()
    found = convert(rows.column(name), targets[name], name)[0].cast(pa.bool_())
    return {row for row, gone in enumerate(found.to_pylist()) if gone}


def typed(
    rows: PlainRows, targets: Mapping[str, Target], table: str, alter: Alter, free: Mapping[str, Collection[int]] = MappingProxyType({})
) -> pa.Table:
    """The rows with the types of the sink.

    Args:
        targets: by column; the rows have no others.
        table: for messages.
        free: column -> rows whose value there does not count; one that does not fit is null.

    Raises:
        ValuesRefused: some values do not fit, or are null where the sink forbids it.
    """
    arrays, wrong = {}, {}
    for name in rows.names:
        arrays[name], faults = convert(rows.column(name), targets[name], name)
        wrong[name] = {row: fault for row, fault in faults.items() if row not in free[name]} if faults and name in free else faults
    if any(wrong.values()):
        raise refusal(rows, wrong, table, lambda fault: told(fault, table, alter))
    return pa.table(arrays)


def refusal(rows: PlainRows, wrong: Mapping[str, Faults], table: str, tell: Callable[[Fault], str]) -> ValuesRefused:
    """The error about these faults, by column and row: of each row the first of its columns that is wrong."""
    by_row: dict[int, Fault] = {}
    for name in reversed(rows.names):
        by_row |= wrong[name]
    made = values_refused(
        {row: tell(fault) for row, fault in sorted(by_row.items())}, {row: f"{table} {fault.brief}" for row, fault in by_row.items()}
    )
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
    briefs = {numbers[row]: brief for numbers, error in refused for row, brief in error.briefs.items()}
    made = values_refused(dict(sorted(by_row.items())), briefs)
    values = {name for table in fitting for name in with_values(ArrowRows(table))}
    made.fitting = frozenset(values.union(*(error.fitting for _, error in refused)))
    misfits: dict[str, tuple[str, int]] = {}
    for name, (why, count) in (misfit for _, error in refused for misfit in error.misfits.items()):
        first, before = misfits.get(name, (why, 0))
        misfits[name] = (first, before + count)
    made.misfits = {name: misfit for name, misfit in misfits.items() if name not in made.fitting}
    return made


def values_refused(by_row: Mapping[int, str], briefs: Mapping[int, str] = MappingProxyType({})) -> ValuesRefused:
    """The error about these rows, whose text is that of the first one."""
    first = min(by_row)
    made = ValuesRefused(by_row[first])
    made.by_row, made.briefs, made.brief = by_row, briefs, briefs.get(first, "")
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


class Rows(Protocol):
    """What `tx.write` recorded: rows of one sink, evaluated exactly once by one of the three methods."""

    @property
    def in_tasks(self) -> bool:
        """Whether they are too many for the driver: use files()."""

    @property
    def ordered(self) -> bool:
        """Whether `arrow` has them in an order that the handler knows: Spark's may be chance."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows, known without evaluating them."""

    def plain(self) -> PlainRows | None:
        """The rows where they are Python objects, which have no types before the sink's are known; None for others."""

    def arrow(self) -> pa.Table:
        """The rows, on this machine."""

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """The results of `write(iterator of record batches)` -> iterator of str, run where the rows are (Spark tasks)."""
