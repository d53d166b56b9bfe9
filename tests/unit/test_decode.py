"""Decoding: which bodies decode, to what; schemas to columns; and the same in Spark's tasks."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from dedup import decode
from dedup.core.rows import arrow_of, frame_of
from dedup.decode import json_bodies, values
from dedup.decode.bodies import reasons
from dedup.decode.prepare import Prepare, prepare_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.string()),
        ("c", pa.struct([("d", pa.float64())])),
        ("e", pa.list_(pa.int64())),
        ("t", UTC),
        ("n", pa.timestamp("us")),
        ("day", pa.date32()),
        ("i", pa.int32()),
        ("short", pa.int16()),
        ("tiny", pa.int8()),
        ("single", pa.float32()),
        ("money", pa.decimal128(10, 2)),
        ("yes", pa.bool_()),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("names", pa.map_(pa.string(), pa.string())),
        ("times", pa.list_(UTC)),
        ("items", pa.list_(pa.struct([pa.field("id", pa.string(), nullable=False), ("q", pa.int64())]))),
        ("full", pa.list_(pa.field("item", pa.int64(), nullable=False))),
        ("sure", pa.struct([pa.field("k", pa.int64(), nullable=False)])),
    ]
)

LOOKALIKES = (b"12345", b"-0", b"1.5E-3", b"1e400", b"true", b"false", b"null", b"NaN", b"-Infinity", b"{}", b"[1]", b'\\"x\\"', b"{")
"""Text that reads as another JSON value."""

GOOD: list[bytes] = [
    b"{}",
    b'{"a":1}',
    b' \t{"a":1}\r\n',
    b'{"a":null,"b":null,"c":null,"t":null,"items":null}',
    b'{"A":1,"":2,"other":{"a":"x"},"v":{"a":2},"corrupt":"x"}',
    b'{"a":1,"a":2}',
    b'{"b":5,"b":"x"}',
    b'{"a":-9223372036854775808}',
    b'{"b":"\\u0000\\"\\/\\ud83d\\ude00 \xc3\xa9 \xf0\x9f\x98\x80\x7f"}',
    b'{"c":{"d":1},"e":[1,null],"yes":true}',
    b'{"c":{"d":-0.0}}',
    b'{"e":[null,1],"other":[null,1],"times":[null]}',
    b'{"t":"2020-01-01T00:00:00Z"}',
    b'{"t":"2020-01-01 00:00:00.123456789+05:30"}',
    b'{"t":"0001-01-01T00:00:00+18:00"}',
    b'{"t":"1500-01-01T00:00:00.5-00:30"}',
    b'{"n":"2024-03-10T02:30:00"}',
    b'{"day":"1500-02-28"}',
    b'{"tiny":-128,"short":32767,"i":-2147483648,"single":0.1}',
    b'{"money":1.55}',
    b'{"money":1.5500}',
    b'{"money":15.5e-1}',
    b'{"money":"1000.5"}',
    b'{"money":-0}',
    b'{"counts":{"x":1,"y":null},"names":{"x":"y"}}',
    b'{"times":["2020-01-01T00:00:00Z",null]}',
    b'{"items":[{"id":"x"},null],"full":[1],"sure":{"k":1}}',
    *(b'{"b":"%s"}' % text for text in LOOKALIKES),
    b'{"b":1.5,"b":"1.5"}',
    b'{"b":"","t":null,"c":{"d":1}}',
    b'{"b":"}","a":1}',
    b'{"names":{"x":"1","y":"{}"},"items":[{"id":"-7"}]}',
    b'{"zip":12345,"b":"\\u00e9\\uD83D\\uDE00"}',
]
"""Bodies that decode."""

BAD: list[bytes] = [
    b"",
    b" ",
    b"null",
    b"true",
    b"123",
    b'"x"',
    b"[]",
    b'[{"a":1}]',
    b"nul",
    b'{"a":1',
    b'{"a":1}xyz',
    b'{"a":1}}',
    b'{"a":1}]',
    b'{"a":1} {"a":2}',
    b'{"a":1},{"a":2}',
    b'{"a":1},"a":2',
    b'{"a":1},"v":{"a":2}',
    b'null,"v":{"a":1}',
    b'{"a":1}null{"a":2}',
    b"{}null{}",
    b"{} null ",
    b'{"a":1}\x00',
    b"{'a':1}",
    b"{a:1}",
    b'{"a":1,}',
    b'{"a":01}',
    b'{"a":+1}',
    b'{/**/"a":1}',
    b'\xef\xbb\xbf{"a":1}',
    '{"a":1}'.encode("utf-16"),
    b'{"b":"\xff"}',
    b'{"b":"\xed\xa0\x80"}',
    b'{"b":"\xc0\x80"}',
    b'{"b":"\\ud800"}',
    b'{"b":"\\x"}',
    b'{"b":"x\x00y"}',
    b'{"b":"x\ny"}',
    b'{"other":NaN}',
    b'{"other":{"x":[}}',
    b'{"other":%s}' % (b"1" * 1001),
    b'{"a":"1"}',
    b'{"a":1.0}',
    b'{"a":1e3}',
    b'{"a":true}',
    b'{"a":9223372036854775808}',
    b'{"a":"x","a":1}',
    b'{"b":5}',
    b'{"b":true}',
    b'{"b":{"x":1}}',
    b'{"c":5}',
    b'{"c":[]}',
    b'{"c":""}',
    b'{"c":{"d":"1.5"}}',
    b'{"c":{"d":NaN}}',
    b'{"c":{"d":"NaN"}}',
    b'{"c":{"d":1e400}}',
    b'{"e":5}',
    b'{"e":[1,"x"]}',
    b'{"t":5}',
    b'{"t":""}',
    b'{"t":"2020-01-01"}',
    b'{"t":"2020-01-01T00:00:00"}',
    b'{"t":"2020-01-01T00:00:00+18:01"}',
    b'{"t":"2020-02-30T00:00:00Z"}',
    b'{"t":"2020-01-01T24:00:00Z"}',
    b'{"t":"2020-01-01T00:00:00Z\\n"}',
    b'{"n":"2020-01-01T00:00:00Z"}',
    b'{"day":"2020-1-1"}',
    b'{"day":"2021-02-29"}',
    b'{"day":"2020-01-01T00:00:00Z"}',
    b'{"day":18000}',
    b'{"i":2147483648}',
    b'{"short":32768}',
    b'{"tiny":128}',
    b'{"single":1e39}',
    b'{"money":"x"}',
    b'{"money":1.555}',
    b'{"money":1e-400}',
    b'{"money":"1,000.5"}',
    b'{"money":"1,5"}',
    b'{"money":1e999999999999999999999}',
    b'{"money":123456789}',
    b'{"yes":1}',
    b'{"yes":"true"}',
    b'{"counts":{"x":"y"}}',
    b'{"counts":5}',
    b'{"names":{"x":5}}',
    b'{"names":{"x":"a","x":"b"}}',
    b'{"times":["2020"]}',
    b'{"items":[{}]}',
    b'{"items":[{"id":null}]}',
    b'{"items":[{"id":5}]}',
    b'{"full":[1,null]}',
    b'{"sure":{}}',
    *(b'{"a":1,"b":%s}' % value for value in (b"12345", b"-0", b"1.5E-3", b"1e400", b"true", b"false", b"{}", b"[1]", b'{"b":"x"}')),
    b'{"b":"12345","b":12345}',
    b'{"other":{"b":"12345"},"b":12345}',
    b'{"b":"x"},{"b":"x"}',
    b'{"b":"x"},"a":1',
    b'{"b":"x"}}',
    b'{"b":"x"} x',
    b'{"b":"x\\uD800"}',
    b'{"names":{"x":"1","y":1}}',
    b'{"items":[{"id":"x"},{"id":false}]}',
]
"""Bodies that do not."""

AVRO = {
    "type": "record",
    "name": "order",
    "namespace": "shop",
    "fields": [
        {"name": "a", "type": "long"},
        {"name": "b", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "kind", "type": {"type": "enum", "name": "kind", "symbols": ["A", "B"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "inner", "type": ["null", {"type": "record", "name": "inner", "fields": [{"name": "kind", "type": "kind"}]}]},
    ],
}
"""An Avro schema with a bit of everything."""


def table_of(bodies: list[bytes | None]) -> pa.Table:
    """Events with these bodies, in this order."""
    size = len(bodies)
    head = {
        "source": ["s"] * size,
        "topic": ["t"] * size,
        "partition": pa.array([0] * size, pa.int32()),
        "sequence_number": list(range(size)),
    }
    return pa.table(head | {"body": pa.array(bodies, pa.binary())})


def decoded(bodies: list[bytes | None], decoder: decode.Decoder) -> pa.Table:
    """Body, data and verdict."""
    return prepare_events(table_of(bodies), Prepare("c", decoder=decoder)).select(["body", "data", "_undecodable"])


@pytest.mark.parametrize("body", GOOD, ids=repr)
def test_a_body_that_fits_decodes(body: bytes) -> None:
    """What the schema describes is not sent to the dead letters."""
    found = decoded([body], decode.json(SCHEMA))
    assert found["data"].null_count == 0
    assert found["_undecodable"].to_pylist() == [False]


@pytest.mark.parametrize("body", BAD, ids=repr)
def test_a_body_that_does_not_fit_is_undecodable(body: bytes) -> None:
    """What is no JSON object of the schema never reaches a handler as if it were one with nulls."""
    row = decoded([body], decode.json(SCHEMA)).to_pylist()[0]
    assert row == {"body": body, "data": None, "_undecodable": True}
    assert reasons(pa.array([body], pa.binary()), pa.nulls(1), decode.json(SCHEMA))[0].text != "the body does not decode"


PLAIN = pa.schema([f for f in SCHEMA if f.name not in ("single", "money", "counts", "names")])
"""What pyarrow's own reader is asked for."""


def alone(bodies: list[bytes]) -> pa.StructArray:
    """What the decoder of single bodies says."""
    decoder = decode.json(PLAIN)
    return values.column(bodies, json_bodies.reader(PLAIN), decoder.type, decoder.type)


@pytest.mark.parametrize("body", [*GOOD, *BAD], ids=repr)
def test_a_body_read_by_columns_is_what_it_is_by_itself(body: bytes) -> None:
    """The quick reader answers as the exact one does, or not at all."""
    found = json_bodies.together(pa.array([body], pa.binary()), PLAIN)
    assert found is None or found.equals(alone([body]))


def test_an_integer_zero_has_no_sign() -> None:
    """-0 is the integer 0 whatever its neighbours are, and -0.0 is not: what a sink gets does not depend on how a batch was cut."""
    found = decoded([b'{"c":{"d":-0}}', b'{"c":{"d":-0.0}}', b'{"c":{"d":0}}'], decode.json(PLAIN))
    assert [repr(row["c"]["d"]) for row in found["data"].to_pylist()] == ["0.0", "-0.0", "0.0"]


def test_ordinary_bodies_are_read_by_columns() -> None:
    """The quick reader is not given up for fields it does not know, line breaks, long bodies, nulls or nested values."""
    bodies = [
        b'{"a":1,"b":"x","c":{"d":1.5},"e":[1,2],"t":"2020-01-01T00:00:00.123Z","n":"2020-01-01T00:00:00","day":"2020-02-29"}',
        b'{\n  "a": 2,\n  "other": {"x": [1, {"y": null}]},\n  "yes": true\n}',
        b'{"b":"%s","items":[{"id":"x","q":1}],"sure":{"k":1},"times":["2020-01-01T00:00:00+01:00",null]}' % (b"x" * 5_000),
        b"{}",
    ]
    found = json_bodies.together(pa.array(bodies, pa.binary()), PLAIN)
    assert found is not None
    assert found.equals(alone(bodies))


BROKEN = [*(b'{ } " , : [ ] \\ NaN Infinity null - 1'.split(b" ")), b"\n", b'{"a":1}', b'{"a":', b'{"e":[', b"\xff"]
PIECES = [*GOOD, *BROKEN]


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join), min_size=1, max_size=4), st.randoms())
def test_bodies_read_together_are_what_they_are_alone(bodies: list[bytes], draw: random.Random) -> None:
    """No body takes its end, its start or a value from its neighbours, whatever was cut or put together wrongly."""
    cut = [body[: draw.randrange(1, len(body) + 1)] if draw.random() < 0.3 else body for body in bodies]
    found = json_bodies.together(pa.array(cut, pa.binary()), PLAIN)
    assert found is None or found.equals(alone(cut))


def test_a_bad_body_does_not_hide_its_neighbours() -> None:
    """Among thousands of bodies those that do not decode are told, and no others."""
    bodies = [b'{"a":%d}' % n if n % 997 else b'{"a":"%d"}' % n for n in range(5_000)]
    found = decoded([*bodies, None], decode.json(PLAIN))
    assert [n for n, bad in enumerate(found["_undecodable"].to_pylist()) if bad] == list(range(0, 5_000, 997))
    assert [row and row["a"] for row in found["data"].to_pylist()] == [n if n % 997 else None for n in range(5_000)] + [None]


def test_a_null_body_is_not_undecodable() -> None:
    """A tombstone is an event like any other; an empty body is not null."""
    assert decoded([None, b""], decode.json(SCHEMA))["_undecodable"].to_pylist() == [False, True]


def test_a_body_decodes_to_its_values() -> None:
    """Values arrive exactly: instants in UTC, decimals at their scale, the last of repeated names."""
    body = b'{"a":1,"a":2,"b":"x","t":"2020-01-01T00:00:00.1234567+01:00","money":1.5600,"counts":{"x":1}}'
    data = decoded([body], decode.json(SCHEMA))["data"].to_pylist()[0]
    found = {name: str(value) for name, value in data.items() if value is not None}
    assert found == {"a": "2", "b": "x", "t": "2019-12-31 23:00:00.123456+00:00", "money": "1.56", "counts": "[('x', 1)]"}


@pytest.mark.parametrize(
    ("body", "row"),
    [
        (b'{"a":1,"a":2}', {"a": 2, "b": None}),
        (b'{"a":null,"a":2,"b":"x"}', {"a": 2, "b": "x"}),
        (b'{"a":1,"a":null}', {"a": None, "b": None}),
        (b'{"b":5,"b":"y"}', {"a": None, "b": "y"}),
        (b'{"a":"x","a":2}', None),
        (b'{"other":1,"a":2,"other":"x"}', {"a": 2, "b": None}),
    ],
)
def test_of_a_name_that_occurs_twice_the_last_value_counts(body: bytes, row: dict[str, Any] | None) -> None:
    """Whether the body is read alone, or in one pass of pyarrow's reader with many others."""
    schema = decode.json("a BIGINT, b STRING")
    alone, *others = decoded([body] + [b'{"a":7}'] * 2_000, schema)["data"].to_pylist()
    assert alone == row == decoded([body], schema)["data"].to_pylist()[0]
    assert others == [{"a": 7, "b": None}] * 2_000


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([1.5, [], {}])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from("abcd"), VALUES))
def test_a_required_field_decides(value: dict[str, Any]) -> None:
    """A body decodes exactly when every field is of its type and the required ones are there."""
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
    }
    body = json.dumps(value).encode()
    fits = type(value.get("a")) is int and -(2**63) <= value["a"] < 2**63
    fits = fits and (value.get("b") is None or type(value["b"]) is str) and (value.get("c") is None or type(value["c"]) is bool)
    row = decoded([body], decode.json(schema)).to_pylist()[0]
    assert row["_undecodable"] is not fits
    assert (row["data"] is not None) is fits


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


def test_a_decoder_travels() -> None:
    """Spark moves the consumer to other processes; its decoder arrives as it was."""
    for decoder in (decode.json(SCHEMA), decode.avro(AVRO)):
        assert pickle.loads(pickle.dumps(decoder)) == decoder


def avro_bodies() -> list[bytes | None]:
    """Avro records, whole, cut, too long, empty, random, and one with a string that is no UTF-8."""
    fastavro = pytest.importorskip("fastavro")
    writer, stream, whole = fastavro.parse_schema(AVRO), io.BytesIO(), []
    rows = [
        {"a": 5, "b": "é", "at": 1577836800000, "kind": "B", "tags": ["x", ""], "price": b"\x01\x00", "inner": {"kind": "A"}},
        {"a": 0, "b": None, "at": 0, "kind": "A", "tags": [], "price": b"\x00", "inner": None},
    ]
    for row in rows:
        stream.seek(0)
        stream.truncate()
        fastavro.schemaless_writer(stream, writer, row | {"price": Decimal(int.from_bytes(row["price"], "big")).scaleb(-2)})
        whole.append(stream.getvalue())
    first, second = whole
    return [
        first,
        second,
        first[:-1],
        first[:3],
        first + b"zz",
        second + b"\xe0",
        b"",
        b"\xff" * 30,
        first.replace("é".encode(), b"\xff\xff"),
        None,
    ]


def test_avro_that_is_cut_or_too_long_is_undecodable() -> None:
    """Bytes that are missing, left over or impossible are no record; a record of nulls is one."""
    verdicts = decoded(avro_bodies(), decode.avro(AVRO))["_undecodable"].to_pylist()
    assert verdicts == [False, False, True, True, True, True, True, True, True, False]


def test_avro_by_an_arrow_schema() -> None:
    """An Arrow schema stands for the record with the same fields, nullable ones as a union with null."""
    some, all_ = (
        pa.schema([("a", pa.int64()), pa.field("b", pa.string(), nullable=False)]),
        pa.schema([("a", pa.int64()), ("b", pa.string())]),
    )
    assert decoded([b"\x02\x02\x02x"], decode.avro(some))["data"].to_pylist() == [{"a": 1, "b": "x"}]
    assert decoded([b"\x02\x02\x02x"], decode.avro(all_))["_undecodable"].to_pylist() == [True]
    assert decoded([b"\x02\x02\x02\x02x"], decode.avro(all_))["data"].to_pylist() == [{"a": 1, "b": "x"}]


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_spark_keeps_what_was_decoded(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Data of every type, and verdicts, come out of Spark's tasks as without Spark, in a session of another zone."""
    from dedup.spark.prepare import prepare_columns

    given: list[bytes | None] = [*GOOD, *BAD, None] if kind == "json" else avro_bodies()
    decoder = decode.json(SCHEMA) if kind == "json" else decode.avro(AVRO)
    pq.write_table(table_of(given), tmp_path / "bodies.parquet")
    before, names = spark.conf.get("spark.sql.session.timeZone"), ["sequence_number", "body", "data", "_undecodable"]
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        events = prepare_columns(spark.read.parquet(str(tmp_path / "bodies.parquet")), Prepare("c", decoder=decoder))
        found = arrow_of(events.select(*names)).sort_by("sequence_number")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    expected = decoded(given, decoder)
    found = found.select(expected.column_names).cast(expected.schema)
    assert [row for row in range(len(given)) if found.slice(row, 1) != expected.slice(row, 1)] == []


def test_a_column_function_decodes(spark: SparkSession) -> None:
    """A function of the body makes `data`; where it answers null for a body that is there, the body does not decode."""
    from pyspark.sql import functions as F

    from dedup.spark.prepare import prepare_columns

    frame = frame_of(spark, table_of([b"5", b"x", None]))
    prepared = prepare_columns(
        frame, Prepare("c", decoder=lambda b: F.when(b.cast("string").rlike("^[0-9]+$"), b.cast("string").cast("int")))
    )
    found = arrow_of(prepared.orderBy("sequence_number"))
    assert found["data"].to_pylist() == [5, None, None]
    assert found["_undecodable"].to_pylist() == [False, True, False]
    with pytest.raises(ConfigError, match="decode= does not resolve"):
        prepare_columns(frame, Prepare("c", decoder=lambda body: F.col("nope")))
