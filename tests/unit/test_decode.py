"""Decoding: which bodies decode, and to what; and the same in Spark's tasks."""

from __future__ import annotations

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
from dedup.decode.prepare import Prepare
from fixtures.variants import of_which
from kit.decoding import AVRO, SCHEMA, decoded, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


@pytest.mark.full
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


@pytest.mark.parametrize("kind", of_which(1, ["json", "avro"]))
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
