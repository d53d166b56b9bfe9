"""Decoding as Spark columns: the parsed body, whether it decodes, and `data`, in one columnar pass that does not throw.

from_json alone is too lenient to be a verdict: it ignores what stands behind the object, takes any JSON for a string and reads a
time without offset in the session's zone. So the body is parsed wrapped in `{"v": ...}` (then what follows it is inside the document),
strings and times are parsed as variants, which remember their JSON type, and its own corrupt-record column says the rest.
from_avro ignores bytes behind the record and answers nulls for one that does not decode: a marker behind the body tells both.
Called by dedup/spark/prepare.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dedup.arrow_decode import is_text
from dedup.arrow_json import DATE, MAX_DIGITS, OFFSET, TIME
from dedup.decode import Decoder

_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": "corrupt",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
_MARKER = bytes(range(0xE0, 0xF0))
"""Follows the record in what from_avro reads. No end of it is its beginning, so nothing that is left over can pass for it."""

_SCALARS: dict[pa.DataType, T.DataType] = {
    pa.bool_(): T.BooleanType(),
    pa.int16(): T.ShortType(),
    pa.int32(): T.IntegerType(),
    pa.int64(): T.LongType(),
    pa.float32(): T.FloatType(),
    pa.float64(): T.DoubleType(),
}


def parsed(body: Column, decoder: Decoder) -> Column:
    """The body as parsed: a struct with the value `v` and what tells whether it decoded. Null bodies give anything."""
    return _parsed_json(body, decoder) if decoder.format == "json" else _parsed_avro(body, decoder)


def read(found: Column, decoder: Decoder) -> Column:
    """`data` as far as it could be read from what `parsed` answered; right only where `decodes` says so."""
    return found["v"] if decoder.format == "avro" else _read(found["v"], pa.struct(list(decoder.schema)))


def decodes(body: Column, found: Column, data: Column, decoder: Decoder) -> Column:
    """Whether a body that is not null decodes; never null. `found` is what `parsed` answered, `data` what `read` did."""
    root = pa.struct(list(decoder.schema))
    if decoder.format == "avro":
        # A struct of nulls is what from_avro answers for bytes that do not decode, so null alone says nothing.
        good = [F.coalesce(found["marker"] == F.lit(_MARKER), F.lit(False)), *_negated(_not_utf8(data, root))]
    else:
        clean = F.is_valid_utf8(body.cast("string")) & found["corrupt"].isNull() & data.isNotNull()
        good = [clean, _alone(body), *_negated(_wrong(found["v"], data, root))]
    return reduce(lambda left, right: left & right, good)


def _alone(body: Column) -> Column:
    """Whether nothing stands behind the object that a body begins with; never null."""
    # Behind it can stand neither `,"x":1` nor `]` (the array form refuses, or ends early) nor `}` or `,{}`: together, nothing.
    in_array = F.json_array_length(F.concat(F.lit("["), body.cast("string"), F.lit("]"))) == 1
    # That parses the body once more, and minds numbers of more than a thousand digits in fields that from_json leaves out.
    # What begins with `{` ends with `}`: if the only one is the last byte, nothing is behind it.
    size = F.octet_length(body)
    before = F.substring(body, F.lit(1), size - 1).cast("string")
    edges = (F.substring(body, 1, 1) == F.lit(b"{")) & (F.substring(body, -1, 1) == F.lit(b"}"))
    flat = edges & (size <= MAX_DIGITS) & ~F.contains(before, F.lit("}"))
    return F.when(flat, F.lit(True)).otherwise(F.coalesce(in_array, F.lit(False)))


def _negated(wrong: Column | None) -> list[Column]:
    return [] if wrong is None else [~wrong]


def _parsed_json(body: Column, decoder: Decoder) -> Column:
    wire = T.StructType([T.StructField("v", _wire(pa.struct(list(decoder.schema)))), T.StructField("corrupt", T.StringType())])
    return F.from_json(F.concat(F.lit('{"v":'), body.cast("string"), F.lit("}")), wire, _OPTIONS)


def _wire(kind: pa.DataType) -> T.DataType:
    """What from_json is asked for."""
    if pa.types.is_struct(kind):
        return T.StructType([T.StructField(f.name, _wire(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return T.ArrayType(_wire(kind.value_type))
    if pa.types.is_map(kind):
        return T.MapType(T.StringType(), _wire(kind.item_type))
    if pa.types.is_decimal(kind):
        return T.DecimalType(kind.precision, kind.scale)
    return _SCALARS.get(kind, T.VariantType())


def _has_text(kind: pa.DataType) -> bool:
    return is_text(kind) or any(_has_text(child) for child in _children(kind))


def _children(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.item_type]
    return [kind.field(i).type for i in range(kind.num_fields)]


def _read(value: Column, kind: pa.DataType) -> Column:
    """The parsed value in its final type."""
    if is_text(kind):
        return _text_read(value.cast("string"), kind)
    if not _has_text(kind):
        return value
    if pa.types.is_struct(kind):
        return F.when(value.isNotNull(), F.struct(*[_read(value[f.name], f.type).alias(f.name) for f in kind]))
    if pa.types.is_list(kind):
        return F.transform(value, lambda one: _read(one, kind.value_type))
    return F.transform_values(value, lambda _, one: _read(one, kind.item_type))


def _text_read(text: Column, kind: pa.DataType) -> Column:
    # The cast alone takes more than RFC 3339, and without an offset the session's zone; what does not match is '', which it does not take.
    if pa.types.is_timestamp(kind):
        shape = TIME + (OFFSET if kind.tz else "")
        return _matched(text, shape).try_cast("timestamp" if kind.tz else "timestamp_ntz")
    return _matched(text, DATE).try_cast("date") if pa.types.is_date32(kind) else text


def _matched(text: Column, shape: str) -> Column:
    return F.regexp_extract(text, rf"\A{shape}\z", 0)


def _wrong(value: Column, data: Column, kind: pa.DataType) -> Column | None:
    """Whether a value that from_json took is not what the schema says; never null itself. None: it cannot be.

    Args:
        value: as parsed.
        data: the same as read.
    """
    if is_text(kind):
        missing = F.lit(False) if pa.types.is_string(kind) else data.isNull()
        json_type = F.coalesce(F.schema_of_variant(value), F.lit("VOID"))
        return (json_type != "VOID") & ((json_type != "STRING") | missing)
    if kind in (pa.float32(), pa.float64()):
        return F.coalesce(F.abs(value) == float("inf"), F.lit(False))
    if pa.types.is_struct(kind):
        return _any([_field_wrong(value[f.name], data[f.name], f) for f in kind])
    if pa.types.is_list(kind):
        return _some(value, lambda one: _field_wrong(one, _read(one, kind.value_type), kind.value_field))
    if pa.types.is_map(kind):
        names = F.map_keys(value)
        twice = F.coalesce(F.size(names) != F.size(F.array_distinct(names)), F.lit(False))
        inside = _some(F.map_values(value), lambda one: _field_wrong(one, _read(one, kind.item_type), kind.item_field))
        return _any([twice, inside])
    return None


def _field_wrong(value: Column, data: Column, field: pa.Field) -> Column | None:
    wrong = _wrong(value, data, field.type)
    if not field.nullable:
        return _any([data.isNull(), wrong])
    return wrong if wrong is None or not pa.types.is_struct(field.type) else data.isNotNull() & wrong


def _some(values: Column, wrong: Callable[[Column], Column | None]) -> Column | None:
    """Whether one of the values of an array is wrong. None: none can be."""
    if wrong(F.lit(None)) is None:
        return None
    return F.coalesce(F.exists(values, lambda one: _surely(wrong(one))), F.lit(False))


def _surely(condition: Column | None) -> Column:
    return F.lit(False) if condition is None else condition


def _any(conditions: list[Column | None]) -> Column | None:
    given = [condition for condition in conditions if condition is not None]
    return reduce(lambda left, right: left | right, given) if given else None


def _parsed_avro(body: Column, decoder: Decoder) -> Column:
    marker = {"type": "fixed", "name": "dedup_marker", "size": len(_MARKER)}
    fields = [{"name": "v", "type": json.loads(decoder.writer or "")}, {"name": "marker", "type": marker}]
    schema = json.dumps({"type": "record", "name": "dedup_body", "fields": fields})
    options = F.create_map(F.lit("mode"), F.lit("PERMISSIVE"), F.lit("datetimeRebaseMode"), F.lit("CORRECTED"))
    return F.call_function("from_avro", F.concat(body, F.lit(_MARKER)), F.lit(schema), options)


def _not_utf8(value: Column, kind: pa.DataType) -> Column | None:
    """Whether a string in an Avro value is not UTF-8. None: there are no strings."""
    if pa.types.is_string(kind):
        return F.coalesce(~F.is_valid_utf8(value), F.lit(False))
    if pa.types.is_struct(kind):
        return _any([_not_utf8(value[f.name], f.type) for f in kind])
    if pa.types.is_list(kind):
        return _some(value, lambda one: _not_utf8(one, kind.value_type))
    if pa.types.is_map(kind):
        inside = _some(F.map_values(value), lambda one: _not_utf8(one, kind.item_type))
        return _any([_some(F.map_keys(value), lambda one: _not_utf8(one, pa.string())), inside])
    return None
