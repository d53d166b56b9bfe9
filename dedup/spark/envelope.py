"""The input's columns as envelope columns, in Spark.

Called by dedup/spark/prepare.py; which column is which, dedup/envelope.py has decided.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dedup.envelope import APPENDED, EARLIEST, LATEST, LOG_TIME, Expression, Layout, Named, Origin, does_not_fit
from dedup.spark.selects import Selects, named

PROPERTIES = "array<struct<key:string,value:binary>>"

TYPES = {
    "source": "string",
    "topic": "string",
    "partition": "int",
    "sequence_number": "bigint",
    "part": "bigint",
    "offset": "string",
    "enqueued_time": "timestamp",
    "key": "binary",
    "body": "binary",
    "properties": PROPERTIES,
}
"""Spark's types of the ENVELOPE columns."""

TEXT = (T.StringType, T.CharType, T.VarcharType)

_WANTED = {
    "int": "an integer",
    "bigint": "an integer",
    "timestamp": "a timestamp with time zone",
    PROPERTIES: "a map or an array of (key, value)",
}
_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)


def envelope(selects: Selects, plan: Layout) -> None:
    """Go on with the ENVELOPE columns and the ones that pass through. A position that does not fit its type becomes null.

    Raises:
        ConfigError: an expression does not resolve, or a column's type cannot become its envelope column's.
    """
    types = {name: selects.types[origin.column] for name, origin in plan.envelope.items() if isinstance(origin, Named)}
    computed = {name: origin.sql for name, origin in plan.envelope.items() if isinstance(origin, Expression)}
    if computed:
        asked = selects.ask(lambda: [F.expr(sql) for sql in computed.values()], "columns=")
        types |= dict(zip(computed, asked, strict=True))
    fitted = [_fit(_raw(origin, name), types.get(name), origin, name).alias(name) for name, origin in plan.envelope.items()]
    selects.select(*fitted, *[named(name) for name in plan.extras], _log_time(plan.log_time, selects).alias(LOG_TIME))


def _log_time(said: str | bool, selects: Selects) -> Column:
    if isinstance(said, bool) or not isinstance(selects.types[said], _INTEGRAL):
        return F.lit(said is True)
    return F.coalesce(named(said) == APPENDED, F.lit(False))


def _raw(origin: Origin, name: str) -> Column:
    if isinstance(origin, Named):
        return named(origin.column)
    return F.expr(origin.sql) if isinstance(origin, Expression) else F.lit(origin.value).cast(TYPES[name])


def _fit(column: Column, kind: T.DataType | None, origin: Origin, name: str) -> Column:
    wanted = TYPES[name]
    if wanted == "timestamp" and isinstance(kind, T.TimestampType):
        first, end = (F.timestamp_seconds(F.lit(seconds)) for seconds in (EARLIEST, LATEST + 1))
        return F.when((column >= first) & (column < end), column)
    if kind is None or kind.simpleString() == wanted:
        return column
    if isinstance(kind, T.NullType):
        return column.cast(wanted)
    text, integral = isinstance(kind, TEXT), isinstance(kind, _INTEGRAL)
    if wanted in ("int", "bigint") and (text or integral or (isinstance(kind, T.DecimalType) and kind.scale == 0)):
        return column.try_cast(wanted)
    if (wanted in ("string", "binary") and text) or (name == "offset" and integral):
        return column.cast(wanted)
    if wanted == PROPERTIES and (pairs := _properties(column, kind)) is not None:
        return pairs
    raise does_not_fit(name, _shown(origin), kind.simpleString(), _WANTED.get(wanted, wanted))


def _shown(origin: Origin) -> str:
    if isinstance(origin, Named):
        return repr(origin.column)
    return repr(origin.sql if isinstance(origin, Expression) else origin.value)


def _properties(column: Column, kind: T.DataType) -> Column | None:
    if isinstance(kind, T.MapType):
        column, pair = F.map_entries(column), {"key": kind.keyType, "value": kind.valueType}
    elif isinstance(kind, T.ArrayType) and isinstance(kind.elementType, T.StructType):
        pair = {f.name: f.dataType for f in kind.elementType}
    else:
        return None
    if set(pair) != {"key", "value"} or not isinstance(pair["key"], TEXT) or not isinstance(pair["value"], (*TEXT, T.BinaryType)):
        return None
    return F.transform(column, lambda one: F.struct(one["key"].alias("key"), one["value"].cast("binary").alias("value")))
