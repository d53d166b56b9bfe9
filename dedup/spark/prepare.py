"""From an input DataFrame to events with keys: envelope, decode, keys, in a lazy chain of selects without any job.

Works on classic Spark and Spark Connect alike. Called by the consumer with each micro-batch before anything is decided.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from checkpoint.errors import ConfigError
from dedup import keys
from dedup.decode import Decoder
from dedup.envelope import ENVELOPE, Prepare, layout
from dedup.spark import decode as spark_decode
from dedup.spark import keys as spark_keys
from dedup.spark import registry
from dedup.spark.envelope import TEXT, envelope
from dedup.spark.selects import Columns, Selects, kept, named

_PARSED = "__dedup_parsed"
_READ = "__dedup_read"
_PART = "__dedup_part_"
_KEY, _KEY_TEXT, _PAYLOAD_HASH, _UNDECODABLE = keys.INTERNAL

_worked_out: dict[Hashable, tuple[Columns, ...]] = {}


def prepare(df: DataFrame, spec: Prepare) -> DataFrame:
    """The input's rows as events with keys; lazy, so nothing is read here.

    Schema:
        ENVELOPE columns, the input's other columns, `data` (with a decoder), `_log_time`, `_key`, `_key_text`, `_payload_hash`,
        `_undecodable`;
        one row per row of the input. A position that is null or does not fit its type is null: `envelope.check_positions`
        tells once the rows are there.

    Raises:
        ConfigError: the input is not recognised, or a column is missing or of a type that cannot fit.
    """
    schema = df.schema
    ident = identity(df, schema, spec)
    steps = kept(_worked_out, ident, lambda: _work_out(df, schema.names, spec))
    return reduce(lambda frame, columns: frame.select(*columns), steps, df)


def identity(df: DataFrame, schema: T.StructType, spec: Prepare) -> Hashable:
    """What the columns depend on: the input's schema, the order, and whether columns are Spark Connect's."""
    incarnations = tuple(sorted(spec.incarnations.items()))
    settings = (spec.consumer, spec.keys, spec.columns, spec.source, spec.part, spec.positions, spec.decoder, spec.keyspace)
    return type(df), schema.json(), settings, incarnations


def _work_out(df: DataFrame, names: Sequence[str], spec: Prepare) -> tuple[Columns, ...]:
    plan, selects = layout(names, spec), Selects(df)
    envelope(selects, plan)
    _decode(selects, spec)
    _keys(selects, spec)
    added = ["data"] if spec.decoder is not None else []
    selects.select(*[named(name) for name in (*ENVELOPE.names, *plan.extras, *added, *spec.keys.internal)])
    return tuple(selects.steps)


def _decode(selects: Selects, spec: Prepare) -> None:
    decoder, body = spec.decoder, F.col("body")
    if decoder is None:
        return selects.add(F.lit(False).alias(_UNDECODABLE))
    if not isinstance(decoder, Decoder):
        function = decoder
        selects.ask(lambda: [function(body)], "decode=")
        selects.add(function(body).alias("data"))
        return selects.add((body.isNotNull() & F.col("data").isNull()).alias(_UNDECODABLE))
    if decoder.registry is not None:
        selects.add(registry.decoded(body, F.col("properties"), decoder).alias(_READ))
        return selects.add(F.col(_READ)["wrong"].alias(_UNDECODABLE), F.col(_READ)["data"].alias("data"))
    given, parsed = decoder, F.col(_PARSED)
    selects.ask(lambda: [spark_decode.parsed(body, given)], "decode=")
    # Each step is a select of its own: Spark keeps them apart, so that nothing is computed twice.
    selects.add(spark_decode.parsed(body, given).alias(_PARSED))
    selects.add(spark_decode.read(parsed, given).alias(_READ))
    selects.add((body.isNotNull() & ~spark_decode.decodes(body, parsed, F.col(_READ), given)).alias(_UNDECODABLE))
    selects.add(F.when(body.isNotNull() & ~F.col(_UNDECODABLE), F.col(_READ)).alias("data"))


def _keys(selects: Selects, spec: Prepare) -> None:
    settings = spec.keys
    named_parts, key_columns = _parts(selects, settings.columns or (keys.MESSAGE_ID,), "idempotence_key", f"{_PART}key_")
    payload, payload_columns = _parts(selects, settings.payload or ("body",), "payload", f"{_PART}payload_")
    selects.add(*key_columns, *payload_columns)
    values = [value for value, _ in payload]
    encoded = spark_keys.join(spark_keys.parts(values))
    if settings.payload:  # where they are all null, as in what does not decode, only the body tells events apart
        encoded = F.when(spark_keys.all_null(values), spark_keys.join(spark_keys.parts([F.col("body")]))).otherwise(encoded)
    hashed = spark_keys.payload_hash(encoded)
    if settings.sequence:
        _sequence(selects, spec)
    key, shown = _key(named_parts, spec)
    selects.add(key.alias(_KEY), shown.alias(_KEY_TEXT), hashed.alias(_PAYLOAD_HASH))


def _sequence(selects: Selects, spec: Prepare) -> None:
    parts, columns = _parts(selects, spec.keys.sequence, "sequence_key", f"{_PART}sequence_")
    selects.add(*columns)
    values = [value for value, _ in parts]
    named_by = spark_keys.parts([*_place(keys.SEQUENCE_PLACE, spec), *values])
    encoded = [keys.prefix(spec.consumer, spec.keyspace), keys.SEQUENCE_KEY, *named_by]
    absent = spark_keys.all_null(values)
    hashed, shown = F.when(~absent, spark_keys.key_hash(spark_keys.join(encoded))), F.when(~absent, spark_keys.text(parts))
    selects.add(hashed.alias(keys.SEQUENCE[0]), shown.alias(keys.SEQUENCE[1]))


def _key(parts: list[tuple[Column, bool]], spec: Prepare) -> tuple[Column, Column]:
    """The key and its readable form; both null where there is no key."""
    values = [value for value, _ in parts]
    before: list[spark_keys.Piece] = [keys.prefix(spec.consumer, spec.keyspace), *spark_keys.parts(_place(spec.keys.scope_columns, spec))]
    encoded, shown = spark_keys.join([*before, keys.USER_KEY, *spark_keys.parts(values)]), spark_keys.text(parts)
    absent = spark_keys.all_null(values)
    if not (spec.keys.falls_back and spec.positions):
        return F.when(~absent, spark_keys.key_hash(encoded)), F.when(~absent, shown)
    place = _place(spec.keys.position_columns, spec)
    instead = spark_keys.join([*before, keys.POSITION_KEY, *spark_keys.parts(place)])
    readable = spark_keys.text([(value, True) for value in place])
    return spark_keys.key_hash(F.when(absent, instead).otherwise(encoded)), F.when(absent, readable).otherwise(shown)


def _place(names: Sequence[str], spec: Prepare) -> list[Column]:
    found = [spark_keys.incarnation(spec.incarnations) if name == "incarnation" else F.col(name) for name in names]
    return [column.cast("string").cast("binary") for column in found]


def _parts(selects: Selects, names: Sequence[str], what: str, alias: str) -> tuple[list[tuple[Column, bool]], list[Column]]:
    """The parts as binary columns, by the aliases that the second list gives them; and whether each is ASCII for sure."""
    _refuse_missing(list(selects.types), names, what)
    own = [name for name in names if name not in selects.types and name != keys.MESSAGE_ID]
    computed = dict(zip(own, selects.ask(lambda: [F.expr(name) for name in own], what) if own else [], strict=True))
    kinds = [selects.types.get(name) or computed.get(name) or T.BinaryType() for name in names]
    binary = [spark_keys.canonical(name, _part(selects, name), kind) for name, kind in zip(names, kinds, strict=True)]
    aliases = [f"{alias}{i}" for i in range(len(names))]
    ascii = [not isinstance(kind, (*TEXT, T.BinaryType)) for kind in kinds]
    return [(F.col(a), plain) for a, plain in zip(aliases, ascii, strict=True)], [c.alias(a) for c, a in zip(binary, aliases, strict=True)]


def _part(selects: Selects, name: str) -> Column:
    if name in selects.types:
        return named(name)
    return spark_keys.message_id(F.col("properties")) if name == keys.MESSAGE_ID else F.expr(name)


def _refuse_missing(columns: Sequence[str], names: Sequence[str], what: str) -> None:
    known = {column.lower() for column in columns} | {keys.MESSAGE_ID}
    paths = [name for name in names if name not in columns and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name)]
    missing = [name for name in paths if name.split(".")[0].lower() not in known]
    if missing:
        shown = ", ".join(column for column in columns if not column.startswith("_"))
        raise ConfigError(f"{what} names {', '.join(map(repr, missing))}, which the events do not have; they have {shown}.")
