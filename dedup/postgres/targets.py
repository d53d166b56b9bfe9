"""A table's columns as targets of Python values (dedup/values.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from checkpoint.postgres.sqlfiles import quoted
from dedup.postgres import fit
from dedup.postgres.names import type_for
from dedup.postgres.sink import Sink, require_columns
from dedup.rows import PlainRows
from dedup.value_rules import Limits
from dedup.values import Target

_SIMPLE: Mapping[str, tuple[str, pa.DataType]] = {
    "bool": ("bool", pa.bool_()),
    "int2": ("int", pa.int16()),
    "int4": ("int", pa.int32()),
    "int8": ("int", pa.int64()),
    "float4": ("float", pa.float32()),
    "float8": ("double", pa.float64()),
    "json": ("json", pa.string()),
    "jsonb": ("json", pa.string()),
    "bytea": ("bytes", pa.binary()),
    "uuid": ("uuid", pa.binary(16)),
    "date": ("date", pa.date32()),
    "timestamp": ("timestamp", pa.timestamp("us")),
    "timestamptz": ("timestamp", pa.timestamp("us", tz="UTC")),
    "time": ("time", pa.time64("us")),
    "interval": ("interval", pa.duration("us")),
}
"""Base type -> kind of dedup/values.py, and what fit.py takes for it."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table, for rows of Python objects."""

    sink: Sink

    @property
    def shown(self) -> str:
        """Its name, quoted for SQL."""
        return self.sink.name

    def targets(self) -> dict[str, Target]:
        """By column."""
        return {column.name: target_of(column) for column in self.sink.columns}

    def require(self, names: Sequence[str], rows: PlainRows) -> None:
        """Raise RowsMisfit for columns that the table lacks, or requires and the rows lack."""
        require_columns(self.sink, list(map(str, names)), lambda name: rows.schema.field(name).type)

    def alter(self, column: str, wanted: pa.DataType) -> str:
        """The statement that changes the column's type; empty where it has that type already."""
        own = next((own for own in self.sink.columns if own.name == column), None)
        if own is not None and (type_for(wanted) == own.type or (type_for(wanted) == own.base and own.modifier < 0)):
            return ""
        return f"ALTER TABLE {self.sink.name} ALTER COLUMN {quoted(column)} TYPE {type_for(wanted)}"


def target_of(column: fit.Column) -> Target:
    """The target of one column."""
    if column.element is not None and column.base not in _SIMPLE:
        element = fit.element_of(column)
        part = target_of(element)
        if part.kind == "numeric":
            part = replace(part, kind="numeric in a list")
        arrow = pa.list_(pa.field("element", part.arrow))
        return Target("list", arrow, column.type, not column.not_null, parts={"element": part})
    kind, arrow, limits = _kind(column)
    return Target(kind, arrow, column.type, not column.not_null, limits)


def _kind(column: fit.Column) -> tuple[str, pa.DataType, Limits]:
    if column.base in _SIMPLE:
        return (*_SIMPLE[column.base], Limits(nul=False, step=fit.step_of(column)))
    if column.base == "numeric":
        return _number(*fit.size_of(column))
    if column.base in fit.TEXTS:
        return "text", pa.string(), Limits(fit.length_of(column), nul=False)
    if column.base == "timetz":
        return "timetz", pa.string(), Limits(step=fit.step_of(column))
    return "other", pa.string(), Limits(nul=False, size=fit.BYTES.get(column.base), whole=fit.WHOLE.get(column.base))


def _number(precision: int | None, scale: int | None) -> tuple[str, pa.DataType, Limits]:
    if precision is not None and scale is not None and 0 <= scale <= precision <= 38:
        return "decimal", pa.decimal128(precision, scale), Limits()
    return "numeric", pa.string(), Limits(precision=precision, scale=scale)
