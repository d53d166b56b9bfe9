"""Why a body does not decode: the field and the reason, found by a second look at the bodies that failed; and what a letter shows of it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given as settled_by
from hypothesis import settings
from hypothesis import strategies as st

from dedup import decode
from dedup.decode import avro_bodies, bodies
from dedup.decode import registry as registries
from dedup.decode.bodies import reasons
from dedup.reprocessing.dead_letters import is_json
from kit.registry_kit import avro, confluent, content_type, events, record
from kit.registry_server import RegistryServer

DIGITS = "it must have at most 2 digits behind the decimal point"
INT = "it must be a whole number from -2147483648 to 2147483647"
PLAIN = "it must be a whole number without a decimal point or an exponent"
TIME = "it must be a time with its offset, as 2026-01-31T14:00:00Z"
LOCAL = "it must be a time without an offset, as 2026-01-31T14:00:00"
"""What stands behind the value of several fields."""

ORDER = decode.json(
    "id STRING NOT NULL, n INT, small TINYINT, price DECIMAL(5, 2), yes BOOLEAN, at TIMESTAMP, plain TIMESTAMP_NTZ, day DATE, "
    "x DOUBLE, f FLOAT, items ARRAY<STRUCT<sku: STRING NOT NULL, price: DECIMAL(10, 2)>>, counts MAP<STRING, INT>, tags ARRAY<STRING>"
)


def said(body: bytes, decoder: decode.Decoder = ORDER) -> str:
    """The reason of one body."""
    return reasons(*_one(body), decoder)[0].text


def _one(body: bytes) -> tuple[pa.Array, pa.Array]:
    return pa.array([body], pa.binary()), pa.nulls(1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is empty"),
        (b" ", "the body is not JSON: Expecting value, at character 1 of 1"),
        (b"<order/>", "the body is not JSON: Expecting value, at character 0 of 8"),
        (b'{"id":"a"', "the body is not JSON: Expecting ',' delimiter, at character 9 of 9"),
        (b'{"id":"a"}}', "the body is not JSON: Extra data, at character 10 of 11"),
        (b"\xef\xbb\xbf{}", "the body begins with a byte order mark, which JSON does not have"),
        (b"\0\0\0\0\x01\x02a", "the body is not JSON: it begins with a zero byte, as Avro of a schema registry does"),
        (b'{"id":"\xff"}', "the body is not UTF-8: byte 0xff at position 7"),
        (b'{"id":NaN}', "the body is not JSON: it has NaN, which is no number of JSON"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"other":%s}' % (b"1" * 1001), "the body has a number of more than 1,000 digits"),
        (b"[1]", "the body is an array; it must be an object"),
        (b"null", "the body is null; it must be an object"),
        (b"{}", "$.id is missing; the schema requires it"),
        (b'{"id":null}', "$.id is null; the schema requires it"),
        (b'{"id":5}', "$.id is 5; it must be a string"),
        (b'{"id":"\\ud800"}', "$.id has half of a surrogate pair, which is no character"),
        (b'{"id":"a","n":"5"}', f'$.n is "5"; {INT}'),
        (b'{"id":"a","n":3000000000}', f"$.n is 3000000000; {INT}"),
        (b'{"id":"a","n":1.0}', f"$.n is 1.0; {PLAIN}"),
        (b'{"id":"a","n":1e3}', f"$.n is 1e3; {PLAIN}"),
        (b'{"id":"a","small":128}', "$.small is 128; it must be a whole number from -128 to 127"),
        (b'{"id":"a","price":12.345}', f"$.price is 12.345; {DIGITS}"),
        (b'{"id":"a","price":1e-9}', f"$.price is 1e-9; {DIGITS}"),
        (b'{"id":"a","price":"12.345"}', f'$.price is "12.345"; {DIGITS}'),
        (b'{"id":"a","price":1000}', "$.price is 1000; it must have at most 3 digits before the decimal point"),
        (
            b'{"id":"a","price":1e99999999999999999}',
            "$.price is 1e99999999999999999; it must have at most 3 digits before the decimal point",
        ),
        (b'{"id":"a","price":"1,50"}', '$.price is "1,50"; it must be a number'),
        (b'{"id":"a","price":true}', "$.price is true; it must be a number"),
        (b'{"id":"a","yes":1}', "$.yes is 1; it must be true or false"),
        (
            b'{"id":"a","at":"2026-01-31T14:00:00"}',
            f'$.at is "2026-01-31T14:00:00"; {TIME}',
        ),
        (
            b'{"id":"a","at":"2026-02-30T14:00:00Z"}',
            f'$.at is "2026-02-30T14:00:00Z"; {TIME}',
        ),
        (
            b'{"id":"a","plain":"2026-01-31T14:00:00Z"}',
            f'$.plain is "2026-01-31T14:00:00Z"; {LOCAL}',
        ),
        (b'{"id":"a","day":"31.01.2026"}', '$.day is "31.01.2026"; it must be a date, as 2026-01-31'),
        (b'{"id":"a","day":"2026-02-30"}', '$.day is "2026-02-30"; it must be a date, as 2026-01-31'),
        (b'{"id":"a","x":"1.5"}', '$.x is "1.5"; it must be a number'),
        (b'{"id":"a","x":1e400}', "$.x is 1e400; it must be a number that DOUBLE can hold"),
        (b'{"id":"a","f":1e39}', "$.f is 1e39; it must be a number that FLOAT can hold"),
        (b'{"id":"a","items":{}}', "$.items is an object; it must be an array"),
        (b'{"id":"a","items":[{"sku":"x"},{}]}', "$.items[].sku is missing; the schema requires it"),
        (
            b'{"id":"a","items":[{"sku":"x","price":0.001}]}',
            f"$.items[].price is 0.001; {DIGITS}",
        ),
        (b'{"id":"a","counts":{"k":"v"}}', f'$.counts.* is "v"; {INT}'),
        (b'{"id":"a","counts":{"k":1,"k":2}}', "$.counts has a name twice"),
        (b'{"id":"a","tags":["x",["y"]]}', "$.tags[] is an array; it must be a string"),
        (b'{"id":"a","day":"' + b"x" * 100 + b'"}', '$.day is "' + "x" * 57 + "...; it must be a date, as 2026-01-31"),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else "",
)
def test_a_reason_names_the_field_and_what_it_must_be(body: bytes, text: str) -> None:
    """Whoever reads a letter sees which field to repair, what stands there and what may."""
    assert said(body) == text


def test_reasons_of_one_kind_have_one_name() -> None:
    """Letters are grouped by the field and by what is wrong with it, not by the values that came."""
    given = [b'{"id":"a","n":"x"}', b'{"id":"b","n":true}', b'{"id":"a","small":"x"}', b"{", b'{"id":', b'{"id":1}', b"{}"]
    found = reasons(pa.array(given, pa.binary()), pa.nulls(len(given)), ORDER)
    names = [(why.path, why.what) for why in found]
    assert names[0] == names[1] and len(set(names)) == len(names) - 1


MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}


def test_a_reason_of_avro_names_the_field_where_the_record_breaks() -> None:
    """A record that is cut says where; bytes behind it, text that is none and decimals without room say so."""
    pytest.importorskip("fastavro")
    schema = record(("id", "string"), ("n", "long"), ("paid", MONEY), ("note", ["null", "string"]))
    plain = record(("id", "string"), ("n", "long"), ("paid", "bytes"), ("note", ["null", "string"]))
    decoder = decode.avro(schema)
    whole = avro(plain, {"id": "a", "n": 300, "paid": b"\x04\xd2", "note": "x"})
    assert said(b"", decoder) == "the body is empty"
    assert said(b'{"id":"a"}', decoder) == "the body is JSON, not Avro"
    assert said(whole[:3], decoder) == "$.n does not end within the 3 bytes of the record"
    assert said(whole[:-1], decoder) == "$.note does not end within the 9 bytes of the record"
    assert said(whole + b"xy", decoder) == "the body has 2 bytes behind the record"
    assert said(whole.replace(b"\x02a", b"\x02\xff"), decoder) == "$.id is not UTF-8: byte 0xff at position 0"
    large = avro(plain, {"id": "a", "n": 1, "paid": (123_456_789).to_bytes(4, "big"), "note": None})
    assert said(large, decoder) == "$.paid is 1234567.89; it does not fit decimal128(5, 2)"


@pytest.mark.full
@settings(deadline=None, max_examples=200)
@settled_by(st.lists(st.binary(max_size=12), max_size=4))
def test_a_second_look_never_fails(noise: list[bytes]) -> None:
    """Whatever bytes come: a letter is made of every body, with or without a reason."""
    pytest.importorskip("fastavro")
    schema = record(("a", "long"), ("b", ["null", "bytes"]), ("e", {"type": "enum", "name": "E", "symbols": ["A"]}), ("d", MONEY))
    for decoder in (ORDER, decode.avro(schema)):
        found = reasons(pa.array(noise, pa.binary()), pa.nulls(len(noise)), decoder)
        verdicts = bodies.decode(pa.array(noise, pa.binary()), pa.nulls(len(noise)), decoder)
        assert [why is bodies.UNKNOWN for why in found] == verdicts.is_valid().to_pylist()


def test_a_decimal_of_avro_is_never_rounded() -> None:
    """fastavro rounds to the writer's precision; here the value is whole, or the body does not decode."""
    pytest.importorskip("fastavro")
    wide = record(("paid", {**MONEY, "precision": 20}))
    for unscaled, found in ((123_456_789, Decimal("1234567.89")), (-5, Decimal("-0.05"))):
        body = avro(record(("paid", "bytes")), {"paid": unscaled.to_bytes(5, "big", signed=True)})
        assert avro_bodies.reader("1", _text(record(("paid", MONEY))), _text(wide))(body) == {"paid": found}


def test_a_decimal_of_a_finer_scale_is_undecodable(registry: RegistryServer) -> None:
    """A writer that counts in thousandths does not become one of hundredths by rounding."""
    writer, wanted = record(("paid", {**MONEY, "precision": 9, "scale": 3})), record(("paid", {**MONEY, "precision": 9}))
    ident, decoder = registry.register("s", writer), decode.confluent_avro(registry.url, schema=wanted)
    given = pa.array([confluent(ident, writer, {"paid": Decimal(text)}) for text in ("1.555", "1.550")], pa.binary())
    assert bodies.decode(given, pa.nulls(2), decoder).to_pylist() == [None, {"paid": Decimal("1.55")}]
    assert reasons(given, pa.nulls(2), decoder)[0].text == "$.paid is 1.555; it does not fit decimal128(9, 2)"


def _text(schema: Any) -> str:
    return json.dumps(schema)


def test_a_reason_says_what_is_wrong_with_the_schema_that_a_body_names(registry: RegistryServer) -> None:
    """No framing, an unknown id, another format and a schema that does not resolve are four reasons, each with what it is about."""
    ours, unlike = record(("id", "string"), ("n", "long")), record(("id", "string"), ("n", "string"))
    ident, other = registry.register("s", ours), registry.register("u", unlike)
    proto = registry.register("p", 'syntax = "proto3";', schemaType="PROTOBUF")
    good = confluent(ident, ours, {"id": "a", "n": 1})
    given = [
        good[5:],
        b"\0" + (99).to_bytes(4, "big") + good[5:],
        b"\0" + proto.to_bytes(4, "big") + good[5:],
        confluent(other, unlike, {"id": "a", "n": "x"}),
        good[:-1],
    ]
    decoder = decode.confluent_avro(registry.url, schema=ours)
    found = [why.text for why in reasons(pa.array(given, pa.binary()), pa.nulls(len(given)), decoder)]
    assert found[0] == "the body does not begin with a zero byte and the id of a schema in four bytes"
    assert found[1] == "the body names schema 99, which the registry does not know"
    assert found[2].startswith(f"the body names schema {proto}, which cannot be read as 'Order': it is not Avro's")
    assert found[3] == "$.n was written as another type: Schema mismatch: string is not long"
    assert found[4] == "$.n does not end within the 2 bytes of the record"


@pytest.mark.parametrize("written", ['"string"', '["null", "string"]', '{"type": "map", "values": "long"}'])
def test_a_schema_that_is_no_record_has_a_reason_too(registry: RegistryServer, written: str) -> None:
    """A producer may register any schema under an id: its bodies do not decode, whatever they hold."""
    ident, wanted = registry.register("s", written), record(("id", "string"))
    given = pa.array([b"\0" + ident.to_bytes(4, "big") + rest for rest in (b"", b"\x02", b"\x02a", b"\x04\xff\xff")], pa.binary())
    decoder = decode.confluent_avro(registry.url, schema=wanted)
    assert bodies.decode(given, pa.nulls(4), decoder).null_count == 4
    assert all(why.path == "the body" for why in reasons(given, pa.nulls(4), decoder))


def test_a_fault_of_the_second_look_is_no_fault_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict stands already: where looking for the reason fails, the letter has none."""
    monkeypatch.setattr(bodies.json_bodies, "reason", lambda body, error: 1 / 0)
    assert said(b"{") == "the body does not decode"


def test_a_reason_of_azure_says_that_the_content_type_names_no_schema(registry: RegistryServer) -> None:
    """The body may be good: what is missing is beside it."""

    class Credential:
        def get_token(self, *scopes: str) -> Any:
            return type("Token", (), {"token": "t"})

    schema = record(("id", "string"))
    decoder = decode.azure_avro(registries.Azure(registry.url, Credential), schema=schema)
    table = events([avro(schema, {"id": "a"})], [content_type("x" * 32)])
    found = reasons(table["body"].combine_chunks(), table["properties"].combine_chunks(), decoder)
    assert found[0].text == "the body has no content type avro/binary+<id of a schema>, and does not begin with such an id"


def test_a_registry_that_is_away_leaves_the_reason_open(registry: RegistryServer) -> None:
    """The verdict stands already: the second look does not wait for the registry, and never fails."""
    decoder = decode.confluent_avro("http://127.0.0.1:9", schema=record(("id", "string")))
    given = pa.array([b"\0\0\0\0\1x", b"x"], pa.binary())
    found = reasons(given, pa.nulls(2), decoder)
    assert [why.text for why in found] == [
        "the body does not decode",
        "the body does not begin with a zero byte and the id of a schema in four bytes",
    ]


@pytest.mark.parametrize(
    ("body", "size", "reason", "json"),
    [
        (b' {"a": 1}', 9, "negative", True),
        (b"[1]", 3, "negative", True),
        (b"5", 1, "negative", False),
        (b'{"a": ', 6, "the body does not decode", False),
        (b'{"a": ', 6, "the body is not JSON: Expecting value, at character 6 of 6", True),
        (b'{"a": ', 100_000, "the body has 100,000 bytes, the limit is 64,000: negative", True),
        (b"\x00\x00", 100_000, "negative", False),
        (None, None, "negative", False),
    ],
)
def test_a_letter_shows_whether_its_body_is_decoded_as_json(body: bytes | None, size: int | None, reason: str, json: bool) -> None:
    """An object, a list, the beginning of one that is kept in part, or what the decoder of JSON has refused."""
    assert is_json({"body": body, "body_size": size, "reason": reason}) == json
