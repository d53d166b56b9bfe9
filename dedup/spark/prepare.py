"""From an input DataFrame to events with keys: envelope, decode, keys, in one lazy select chain without any job.

Works on classic Spark and Spark Connect alike. Called by the consumer with each micro-batch before anything is decided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from checkpoint.errors import ConfigError
from dedup import keys
from dedup.decode import Decoder
from dedup.envelope import ENVELOPE, Expression, Layout, Named, Origin, Prepare, does_not_fit, layout
from dedup.spark import decode as spark_decode
from dedup.spark import keys as spark_keys

PROPERTIES = "array<struct<key:string,value:binary>>"

_TYPES = {
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
_WANTED = {
    "int": "an integer",
    "bigint": "an integer",
    "timestamp": "a timestamp with time zone",
    PROPERTIES: "a map or an array of (key, value)",
}
_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_TEXT = (T.StringType, T.CharType, T.VarcharType)
_PARSED = "__dedup_parsed"
_PART = "__dedup_part_"


def prepare(df: DataFrame, spec: Prepare) -> DataFrame:
    """The input's rows as events with keys; lazy, so nothing is read here.

    Schema:
        ENVELOPE columns, the input's other columns, `data` (with a decoder), `_key`, `_key_text`, `_payload_hash`, `_undecodable`;
        one row per row of the input. A position that is null or does not fit its type is null: `envelope.check_positions`
        tells once the rows are there.

    Raises:
        ConfigError: the input is not recognised, or a column is missing or of a type that cannot fit.
    """
    plan = layout(df.columns, spec)
    events = _keyed(_decoded(_enveloped(df, plan), spec), spec)
    added = ["data"] if spec.decoder is not None else []
    return events.select(*[_named(name) for name in (*ENVELOPE.names, *plan.extras, *added, *keys.INTERNAL)])


def _named(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _enveloped(df: DataFrame, plan: Layout) -> DataFrame:
    types = _select(df, lambda: [_raw(origin, name).alias(name) for name, origin in plan.envelope.items()], "columns=").schema
    fitted = [_fit(_raw(origin, name), types[name].dataType, origin, name).alias(name) for name, origin in plan.envelope.items()]
    return df.select(*fitted, *[_named(name) for name in plan.extras])


def _raw(origin: Origin, name: str) -> Column:
    if isinstance(origin, Named):
        return _named(origin.column)
    return F.expr(origin.sql) if isinstance(origin, Expression) else F.lit(origin.value).cast(_TYPES[name])


def _fit(column: Column, kind: T.DataType, origin: Origin, name: str) -> Column:
    wanted = _TYPES[name]
    if kind.simpleString() == wanted:
        return column
    if isinstance(kind, T.NullType):
        return column.cast(wanted)
    text, integral = isinstance(kind, _TEXT), isinstance(kind, _INTEGRAL)
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
    if set(pair) != {"key", "value"} or not isinstance(pair["key"], _TEXT) or not isinstance(pair["value"], (*_TEXT, T.BinaryType)):
        return None
    return F.transform(column, lambda one: F.struct(one["key"].alias("key"), one["value"].cast("binary").alias("value")))


def _select(df: DataFrame, columns: Callable[[], Sequence[Column]], what: str) -> DataFrame:
    """A select that is analysed here, so that a name or an expression that does not resolve is told here, and in our words."""
    try:
        selected = df.select(*columns())
        selected.schema  # noqa: B018 - Spark Connect analyses only when asked
    except AnalysisException as error:
        if "AVRO_NOT_LOADED" in (error.getCondition() or ""):
            raise ConfigError(
                "decode.avro needs Spark's Avro package: add org.apache.spark:spark-avro_2.13 in the version of your Spark "
                f"({df.sparkSession.version}) to spark.jars.packages."
            ) from error
        raise ConfigError(f"{what} does not resolve; the input has the columns {', '.join(df.columns)}. Spark says: {error}") from error
    return selected


def _decoded(df: DataFrame, spec: Prepare) -> DataFrame:
    decoder, undecodable, body = spec.decoder, keys.INTERNAL[3], F.col("body")
    if decoder is None:
        return df.withColumn(undecodable, F.lit(False))
    if not isinstance(decoder, Decoder):
        function = decoder
        found = _select(df, lambda: [F.col("*"), function(body).alias("data")], "decode=")
        return found.withColumn(undecodable, body.isNotNull() & F.col("data").isNull())
    given = decoder
    found = _select(df, lambda: [F.col("*"), spark_decode.parsed(body, given).alias(_PARSED)], "decode=")
    found = found.withColumn(undecodable, body.isNotNull() & ~spark_decode.decodes(body, F.col(_PARSED), given))
    good = body.isNotNull() & ~F.col(undecodable)
    return found.withColumn("data", F.when(good, spark_decode.data(F.col(_PARSED), given)))


def _keyed(df: DataFrame, spec: Prepare) -> DataFrame:
    settings = spec.keys
    own = settings.columns or (keys.MESSAGE_ID,)
    named, staged = _parts(df, own, "idempotence_key", "key", spec)
    payload, staged = _parts(staged, settings.payload or ("body",), "payload", "payload", spec)
    values = [value for value, _ in named]
    before: list[spark_keys.Piece] = [keys.prefix(spec.consumer, spec.keyspace), *_place(settings.scope_columns, spec)]
    encoded, shown = spark_keys.join([*before, keys.USER_KEY, *spark_keys.parts(values)]), spark_keys.text(named)
    absent = spark_keys.all_null(values)
    if settings.falls_back and spec.positions:
        place = spark_keys.join([*before, keys.POSITION_KEY, *_place(settings.position_columns, spec)])
        columns = [(value, True) for value in _place_values(settings.position_columns, spec)]
        encoded, shown = F.when(absent, place).otherwise(encoded), F.when(absent, spark_keys.text(columns)).otherwise(shown)
        key = spark_keys.key_hash(encoded)
    else:
        key, shown = F.when(~absent, spark_keys.key_hash(encoded)), F.when(~absent, shown)
    hashed = spark_keys.payload_hash(spark_keys.join(spark_keys.parts([value for value, _ in payload])))
    return staged.select(F.col("*"), *[c.alias(n) for c, n in zip((key, shown, hashed), keys.INTERNAL[:3], strict=True)])


def _place(names: Sequence[str], spec: Prepare) -> list[spark_keys.Piece]:
    return spark_keys.parts(_place_values(names, spec))


def _place_values(names: Sequence[str], spec: Prepare) -> list[Column]:
    found = [spark_keys.incarnation(spec.incarnations) if name == "incarnation" else F.col(name) for name in names]
    return [column.cast("string").cast("binary") for column in found]


def _parts(df: DataFrame, names: Sequence[str], what: str, tag: str, spec: Prepare) -> tuple[list[tuple[Column, bool]], DataFrame]:
    """The parts as binary columns of a frame that has them; and whether each is ASCII for sure."""
    _refuse_missing(df, names, what)
    kinds = _select(df, lambda: [_part(df, name).alias(f"{i}") for i, name in enumerate(names)], what).schema
    binary = [spark_keys.canonical(name, _part(df, name), kind.dataType) for name, kind in zip(names, kinds, strict=True)]
    aliases = [f"{_PART}{tag}_{i}" for i in range(len(names))]
    staged = df.select(F.col("*"), *[column.alias(alias) for column, alias in zip(binary, aliases, strict=True)])
    ascii = [not isinstance(kind.dataType, (*_TEXT, T.BinaryType)) for kind in kinds]
    return [(F.col(alias), plain) for alias, plain in zip(aliases, ascii, strict=True)], staged


def _part(df: DataFrame, name: str) -> Column:
    if name in df.columns:
        return _named(name)
    return spark_keys.message_id(F.col("properties")) if name == keys.MESSAGE_ID else F.expr(name)


def _refuse_missing(df: DataFrame, names: Sequence[str], what: str) -> None:
    known = {column.lower() for column in df.columns} | {keys.MESSAGE_ID}
    paths = [name for name in names if name not in df.columns and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name)]
    missing = [name for name in paths if name.split(".")[0].lower() not in known]
    if missing:
        shown = ", ".join(column for column in df.columns if not column.startswith("_"))
        raise ConfigError(f"{what} names {', '.join(map(repr, missing))}, which the events do not have; they have {shown}.")
