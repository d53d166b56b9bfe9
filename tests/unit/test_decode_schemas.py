"""Schemas of decoders: JSON Schema, Avro, Arrow and Spark's become columns, and what cannot is refused by its path."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from dedup import decode
from kit.decoding import UTC, decoded


def test_a_json_schema_becomes_columns() -> None:
    """Objects, arrays, maps, null unions, references, dates and times have the Arrow types one expects; required is not null."""
    schema = {
        "type": "object",
        "required": ["id", "maybe"],
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        "properties": {
            "id": {"type": "integer"},
            "maybe": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
            "at": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"},
            "mail": {"type": "string", "format": "email"},
            "list": {"type": "array", "items": {"type": "number"}},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            "place": {"$ref": "#/$defs/place"},
            "kind": {"enum": ["A", "B", None]},
            "one": {"const": 1},
        },
    }
    expected = {
        "id": pa.int64(),
        "maybe": pa.string(),
        "any": pa.bool_(),
        "at": UTC,
        "day": pa.date32(),
        "mail": pa.string(),
        "list": pa.list_(pa.field("item", pa.float64(), nullable=False)),
        "map": pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
        "place": pa.struct([("lat", pa.float64())]),
        "kind": pa.string(),
        "one": pa.int64(),
    }
    found = decode.json(json.dumps(schema)).schema
    assert {f.name: f.type for f in found} == expected
    assert [f.name for f in found if not f.nullable] == ["id"]


def _of(node: Any) -> dict[str, Any]:
    """A JSON Schema whose field `a` is this."""
    return {"type": "object", "properties": {"a": node}}


DEFS = {"$defs": {"x": {"type": "object", "properties": {"b": {"type": "string"}}}}}
"""What the schemas of some tests refer to."""


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "StructType of Spark, DDL text, a pyarrow.Schema, or a JSON Schema or Avro schema, not list"),
        (5, "StructType of Spark, DDL text, .* not int"),
        ({"type": "array", "items": {"type": "string"}}, "must describe an object"),
        ({"type": "object"}, "at #: an object needs properties"),
        (_of({}), "at #/properties/a: it has no type"),
        (_of(True), "at #/properties/a: True is not a schema; give an object"),
        (_of({"type": ["string", "integer"]}), "at #/properties/a: the type is"),
        (_of({"enum": ["A", 1]}), "at #/properties/a: the type is"),
        (_of({"enum": [{}]}), "at #/properties/a: {} is an object or an array"),
        (_of({"type": "array"}), "at #/properties/a: an array needs items"),
        (_of({"type": "array", "items": {"oneOf": []}}), "at #/properties/a/items/oneOf: 'oneOf'"),
        (_of({"anyOf": [{"type": "null"}, {"type": "time"}]}), "at #/properties/a/anyOf/1: the type 'time' is not known"),
        (_of({"type": "object", "properties": {"x/y~": {"not": {}}}}), "at #/properties/a/properties/x~1y~0/not: 'not'"),
        (_of({"type": "object", "additionalProperties": {"type": []}}), "at #/properties/a/additionalProperties: it has no type"),
        ({**_of({"type": "string"}), "additionalProperties": {"type": "string"}}, "at #/additionalProperties: an object has either"),
        (_of({"$ref": "#/x"}), r"at #/properties/a: \$ref '#/x' does not point"),
        (_of({"$ref": "#/properties/a"}), r"at #/properties/a: \$ref '#/properties/a' contains itself"),
        ({**_of({"type": "string"}), "required": ["b"]}, "at #/required: b is required"),
        (_of({"$ref": "#/$defs/x", "required": ["b"]}) | DEFS, "at #/properties/a/required: 'required' beside '\\$ref' would not count"),
        (_of({"$ref": "#/$defs/x", "properties": {}}) | DEFS, "at #/properties/a/properties: 'properties' beside '\\$ref'"),
        (_of({"$ref": "#/$defs/x", "type": ["object", "null"]}) | DEFS, "at #/properties/a/type: 'type' beside '\\$ref'"),
        (_of({"anyOf": [{"type": "null"}, {"type": "string"}], "type": "string"}), "at #/properties/a/type: 'type' beside 'anyOf'"),
        (
            _of({"type": "object", "additionalProperties": {"type": "string"}, "required": ["b"]}),
            "at #/properties/a/required: a map has no required names",
        ),
        (_of({"type": 5}), "at #/properties/a/type: 5 is not a type"),
        (_of({"type": ["string", 5]}), r"at #/properties/a/type: \['string', 5\] is not a type"),
        (_of({"type": {}}), "at #/properties/a/type: {} is not a type"),
        (_of({"type": None}), "at #/properties/a/type: None is not a type"),
        (_of([{"type": "string"}]), r"at #/properties/a: \[{'type': 'string'}\] is not a schema; give an object"),
        ({"type": "object", "properties": ["a"]}, r"at #/properties: \['a'\] is not an object"),
        ({"type": "object", "properties": []}, r"at #/properties: \[\] is not an object"),
        ({"type": "object", "properties": {5: {"type": "string"}}}, "at #/properties: 5 is not the name of a field; give text"),
        ({**_of({"type": "string"}), "required": "a"}, "at #/required: 'a' is not an array of names"),
        ({**_of({"type": "string"}), "required": [5]}, r"at #/required: \[5\] is not an array of names"),
        (_of({"$ref": 5}), r"at #/properties/a/\$ref: 5 is not text"),
        (_of({"$ref": "#/properties/a/type/b"}), r"at #/properties/a: \$ref '#/properties/a/type/b' does not point"),
        (_of({"type": "string", "format": ["date"]}), r"at #/properties/a/format: \['date'\] is not text"),
        (_of({"enum": 5}), "at #/properties/a/enum: 5 is not an array"),
        (_of({"anyOf": {"type": "null"}}), "at #/properties/a/anyOf: {'type': 'null'} is not an array"),
        (_of({"type": "array", "items": [{"type": "string"}]}), "at #/properties/a/items: .* is not a schema; give an object"),
        (_of({"type": "object", "additionalProperties": 5}), "at #/properties/a: an object needs properties"),
        ({"type": "object", "properties": {"a": {"type": "string"}, "A": {"type": "string"}}}, "A, a differ only by case"),
        (pa.schema([("a", pa.time64("us"))]), r"\$\.a: the Arrow type time64"),
        (pa.schema([("a", pa.list_(pa.struct([("b", pa.binary())])))]), r"at \$\.a\.\w+\.b: JSON has no bytes"),
        (pa.schema([]), "no fields"),
    ],
)
def test_a_schema_without_columns_is_refused_by_path(schema: Any, said: str) -> None:
    """What cannot become columns is told when the consumer is made, with the place in the schema."""
    with pytest.raises(ConfigError, match=said):
        decode.json(schema)


def test_what_says_the_same_beside_a_reference_is_taken() -> None:
    """Annotations and the same type stand beside `$ref` in many schemas, and change nothing."""
    place = {"$ref": "#/$defs/x", "type": "object", "description": "where", "default": None}
    maybe = {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "title": "Where", "default": None}
    found = decode.json({"type": "object", "properties": {"a": place, "b": maybe}} | DEFS).schema
    assert found.field("a").type == found.field("b").type == pa.struct([("b", pa.string())])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 40) | st.sampled_from(["", "x", "string", "null", "object", "#/$defs/x", "record"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "properties", "items", "name"]), inner, max_size=2)
    ),
    max_leaves=4,
)
WHOLE_SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {"type": ["string", "null"], "format": "date"},
            "b": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"enum": ["x"]}]}},
            "c": {"$ref": "#/$defs/x"},
            "d": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "$defs": {"x": {"type": "object", "properties": {"b": {"const": 1}}}},
    },
    {
        "type": "struct",
        "fields": [
            {"name": "a", "type": "decimal(5,2)", "nullable": False, "metadata": {"comment": "x"}},
            {"name": "b", "type": {"type": "array", "elementType": "string", "containsNull": True}, "nullable": True, "metadata": {}},
            {"name": "c", "type": {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}},
        ],
    },
    {
        "type": "record",
        "name": "r",
        "fields": [
            {"name": "a", "type": ["null", {"type": "array", "items": "string"}]},
            {"name": "b", "type": {"type": "map", "values": {"type": "fixed", "name": "f", "size": 2}}},
            {"name": "c", "type": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}},
            {"name": "d", "type": {"type": "enum", "name": "e", "symbols": ["A"]}},
            {"name": "e", "type": {"type": "record", "name": "s", "fields": [{"name": "x", "type": "e"}]}},
        ],
    },
]
"""A JSON Schema, a schema of Spark and one of Avro, with a bit of everything."""


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a schema but the whole."""
    steps = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for step, value in steps for found in [(*path, step), *_places(value, (*path, step))]]


@pytest.mark.full
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(WHOLE_SCHEMAS), st.data())
def test_a_schema_with_a_wrong_value_in_it_is_a_config_error(schema: dict[str, Any], data: st.DataObject) -> None:
    """Wherever a schema has a value of another type than it should: the user reads a sentence, never a stack."""
    broken = json.loads(json.dumps(schema))
    *parents, last = data.draw(st.sampled_from(_places(schema)))
    node = broken
    for step in parents:
        node = node[step]
    node[last] = data.draw(JSON_VALUES)
    for made in (decode.json, decode.avro):
        with contextlib.suppress(ConfigError):
            made(broken)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (["string", "long"], r"\$\.x: a union"),
        ({"type": "array"}, r"\$\.x: it has no 'items'"),
        ({"type": "record", "name": "s", "fields": 5}, r"\$\.x: 'fields' is 5; give an array of fields"),
        ({"type": "record", "name": "s", "fields": [{"type": "string"}]}, r"\$\.x: {'type': 'string'} is not a field"),
        (5, r"\$\.x: 5 is not a type"),
        ({"type": "int", "logicalType": "time-millis"}, r"\$\.x: the logical type 'time-millis'"),
        ({"type": "fixed", "name": "d", "size": 12, "logicalType": "duration"}, r"\$\.x: the logical type 'duration'"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 50}, r"\$\.x: decimal\(50, 0\)"),
        ({"type": "array", "items": "nothing"}, r"\$\.x\[\]: the type 'nothing' is not known"),
        ("r", r"\$\.x: the type 'r' is not known \(or the record contains itself\)"),
    ],
)
def test_an_avro_schema_without_columns_is_refused_by_path(kind: Any, said: str) -> None:
    """As for JSON Schema."""
    with pytest.raises(ConfigError, match=said):
        decode.avro({"type": "record", "name": "r", "fields": [{"name": "x", "type": kind}]})


DDL = (
    "id STRING NOT NULL COMMENT 'of the message', small TINYINT, n BIGINT, price DECIMAL(10, 2), at TIMESTAMP, `no zone`: timestamp_ntz, "
    "day date, tags ARRAY<STRING>, counts MAP<STRING, INT>, place STRUCT<lat: DOUBLE NOT NULL, f: FLOAT, yes BOOLEAN>, s SMALLINT"
)
ARROW = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        ("small", pa.int8()),
        ("n", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("at", UTC),
        ("no zone", pa.timestamp("us")),
        ("day", pa.date32()),
        ("tags", pa.list_(pa.string())),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("place", pa.struct([pa.field("lat", pa.float64(), nullable=False), ("f", pa.float32()), ("yes", pa.bool_())])),
        ("s", pa.int16()),
    ]
)
"""What the DDL describes."""


def struct_type() -> Any:
    """The StructType of the same."""
    T = pytest.importorskip("pyspark.sql.types")
    place = T.StructType(
        [T.StructField("lat", T.DoubleType(), False), T.StructField("f", T.FloatType()), T.StructField("yes", T.BooleanType())]
    )
    fields = {
        "small": T.ByteType(),
        "n": T.LongType(),
        "price": T.DecimalType(10, 2),
        "at": T.TimestampType(),
        "no zone": T.TimestampNTZType(),
        "day": T.DateType(),
        "tags": T.ArrayType(T.StringType()),
        "counts": T.MapType(T.StringType(), T.IntegerType()),
        "place": place,
        "s": T.ShortType(),
    }
    id_ = T.StructField("id", T.StringType(), False, {"comment": "of the message"})
    return T.StructType([id_, *(T.StructField(name, kind) for name, kind in fields.items())])


def test_a_schema_of_spark_is_taken_in_each_of_its_forms() -> None:
    """A StructType, its JSON form and DDL make one decoder, as an Arrow schema does; a field that is not nullable is required."""
    whole = struct_type()
    nested = f"struct<{DDL}>"
    forms = [whole, whole.jsonValue(), whole.json(), DDL, DDL.lower().replace("not null", "NOT NULL"), nested, ARROW]
    assert {decode.json(form) for form in forms} == {decode.json(ARROW)}
    assert decode.json(whole.simpleString().replace("no zone", "`no zone`")).type == decode.json(ARROW).type


def test_the_same_events_decode_alike_by_every_form_of_a_schema() -> None:
    """What a consumer gets does not depend on how its user writes the schema down."""
    T = pytest.importorskip("pyspark.sql.types")
    fields = [T.StructField("id", T.StringType(), False), T.StructField("n", T.LongType()), T.StructField("day", T.DateType())]
    items = T.StructField("items", T.ArrayType(T.StructType([T.StructField("at", T.TimestampType())])))
    item = {"type": ["object", "null"], "properties": {"at": {"type": "string", "format": "date-time"}}}
    json_schema = {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "string"},
            "n": {"type": ["integer", "null"]},
            "day": {"type": "string", "format": "date"},
            "items": {"type": "array", "items": item},
        },
    }
    arrow = pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            ("n", pa.int64()),
            ("day", pa.date32()),
            ("items", pa.list_(pa.struct([("at", UTC)]))),
        ]
    )
    bodies: list[bytes | None] = [
        b'{"id":"a","n":1,"day":"2020-01-31","items":[{"at":"2020-01-01T00:00:00+01:00"},{},null]}',
        b'{"id":"a"}',
        b'{"n":1}',
        b'{"id":null}',
        b'{"id":"a","n":"1"}',
        b'{"id":"a","day":"2020-01-32"}',
    ]
    ddl = "id STRING NOT NULL, n BIGINT, day DATE, items ARRAY<STRUCT<at: TIMESTAMP>>"
    found = [decoded(bodies, decode.json(form)) for form in (T.StructType([*fields, items]), ddl, arrow, json_schema)]
    assert found[0]["_undecodable"].to_pylist() == [False, False, True, True, True, True]
    assert all(one == found[0] for one in found)


def test_a_byte_has_its_range() -> None:
    """A number that TINYINT does not hold makes the body undecodable; it is not wrapped."""
    found = decoded([b'{"b":127}', b'{"b":-128}', b'{"b":128}', b'{"b":-129}', b'{"b":1.5}'], decode.json("b TINYINT"))
    assert found["_undecodable"].to_pylist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("a STRUCT<b: ARRAY<VARCHAR(5)>>", r"at \$\.a\.b\[\]: the type VARCHAR\(5\) has no lossless counterpart"),
        ("a CHAR(3)", r"at \$\.a: the type CHAR\(3\)"),
        ("a MAP<STRING, INTERVAL DAY TO SECOND>", r"at \$\.a\.\*: the type INTERVAL DAY TO SECOND"),
        ("a VARIANT", r"at \$\.a: the type VARIANT"),
        (
            "a ARRAY<STRUCT<b: TEXT>>",
            r"at \$\.a\[\]\.b: TEXT is not a type. Types are STRING, .* STRUCT<name: \.\.\.>\.",
        ),
        ("a DATETIME", r"at \$\.a: DATETIME is not a type. Types are "),
        ("a INT(10)", r"at \$\.a: INT\(10\) is not a type"),
        ("a DECIMAL(x, 2)", r"at \$\.a: DECIMAL\(X,2\) is not a type"),
        ("a ARRAY", r"at \$\.a: ARRAY is not a type. Types are .* ARRAY<\.\.\.>"),
        ({"type": "struct", "fields": [{"name": "a", "type": "text"}]}, r"at \$\.a: text is not a type"),
        ("a VOID", r"at \$\.a: the type VOID"),
        ("a TIME(6)", r"at \$\.a: the type TIME\(6\)"),
        ("a STRING COLLATE UTF8_LCASE", r"at \$\.a: the type STRING COLLATE UTF8_LCASE"),
        ("a MAP<INT, STRING>", r"at \$\.a: the keys of a JSON object are strings"),
        ("a DECIMAL(39)", r"at \$\.a: decimal\(39,0\) does not fit"),
        ("a DECIMAL(5, -2)", r"at \$\.a: decimal\(5,-2\) does not fit"),
        ("a BINARY", r"at \$\.a: JSON has no bytes"),
        ("a INT, A STRING", "A, a differ only by case"),
        ("", "neither JSON nor DDL: the name of a field is expected where 'the end' stands"),
        ("orders.json", r"neither JSON nor DDL: a type is expected where '\.json' stands"),
        ("a INT b INT", "neither JSON nor DDL"),
        ("a INT NOT b", "NULL behind NOT is expected where 'b' stands"),
        ("a ARRAY<INT", "'>' is expected where 'the end' stands"),
        ("a MAP<STRING>", "a comma and the type of the values"),
        ("a DECIMAL(5", r"'\)' is expected"),
        ("STRUCT<a INT> x", "a comma or the end is expected where 'x' stands"),
        ({"type": "struct", "fields": [{"name": "a", "type": {"type": "udt", "class": "x"}}]}, r"at \$\.a: the type 'udt'"),
        ({"type": "struct", "fields": [{"name": "a"}]}, "is not what StructType.json"),
        ({"type": "struct"}, "is not what StructType.json"),
        (
            {"type": "struct", "fields": [{"name": "a", "type": "string", "metadata": {"__COLLATIONS": {"a": "spark.UTF8_LCASE"}}}]},
            r"at \$\.a: a string with a collation",
        ),
    ],
)
def test_a_schema_of_spark_that_cannot_be_decoded_is_refused_by_path(schema: Any, said: str) -> None:
    """A type that would lose something is told when the consumer is made, with the path of the field."""
    with pytest.raises(ConfigError, match=said):
        decode.json(schema)


def test_another_type_of_spark_is_no_schema() -> None:
    """A body is an object: LongType(), a StructField or the class StructType is refused in one sentence."""
    T = pytest.importorskip("pyspark.sql.types")
    for wrong in (T.LongType(), T.StructField("a", T.LongType()), T.StructType, T.ArrayType(T.LongType())):
        with pytest.raises(ConfigError, match="A Spark schema is a StructType, not "):
            decode.json(wrong)
