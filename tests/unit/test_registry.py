"""Bodies that name their schema in a registry: what they decode to, which do not decode, and what a registry that is away does."""

from __future__ import annotations

import json
import logging
import pickle
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError, RegistryUnavailable
from dedup import decode
from dedup.decode import avro_bodies
from dedup.decode import registry as registries
from dedup.decode.prepare import Prepare, prepare_events
from dedup.decode.registry import Azure, Confluent
from dedup.decode.values import Unreadable
from kit.registry_kit import avro, confluent, content_type, events, record
from kit.registry_server import AVRO, OTHERS, RegistryServer

READER = record(("id", "string"), ("amount", "long"))
OLD = record(("id", "string"), ("amount", "int"), ("note", "string"))
"""Before `amount` grew and `note` went away."""
SECRET = "hunter2-token"


class Credential:
    """What azure-identity's credentials look like."""

    def get_token(self, *scopes: str) -> Any:
        """A token for Event Hubs."""
        assert scopes == ("https://eventhubs.azure.net/.default",)
        return type("Token", (), {"token": SECRET})


def read(table: pa.Table, decoder: decode.Decoder) -> tuple[list[Any], list[bool]]:
    """`data`, and which bodies do not decode."""
    found = prepare_events(table, Prepare("c", decoder=decoder))
    return found["data"].to_pylist(), found["_undecodable"].to_pylist()


def test_each_body_is_read_by_the_schema_it_names(registry: RegistryServer) -> None:
    """A batch of several schemas has one type: added fields have their default, removed ones are gone, promoted ones are wider."""
    old = registry.register("orders-value", OLD)
    new_schema = record(("id", "string"), ("amount", "long"), ("shop", "string", "main"))
    new = registry.register("orders-value", new_schema)
    bodies = [
        confluent(old, OLD, {"id": "a", "amount": 7, "note": "n"}),
        confluent(new, new_schema, {"id": "b", "amount": 2**40, "shop": "south"}),
        None,
    ]
    data, wrong = read(events(bodies), decode.confluent_avro(registry.url, subject="orders-value"))
    assert data == [{"id": "a", "amount": 7, "shop": "main"}, {"id": "b", "amount": 2**40, "shop": "south"}, None]
    assert wrong == [False, False, False]


PROMOTED = {"long": ["int", "long"], "float": ["int", "long", "float"], "double": ["int", "long", "float", "double"]}
VALUES: dict[str, Any] = {
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "boolean": st.booleans(),
}
DEFAULTS: dict[str, Any] = {"long": -1, "float": 0.5, "double": 1.5, "string": "dflt", "bytes": "\u00ff\u0001", "boolean": True}


@st.composite
def evolved(draw: st.DrawFn) -> tuple[Any, Any, list[Any]]:
    """A reader's schema, a writer's that differs from it, and rows of the writer's."""
    kinds = draw(st.lists(st.sampled_from(sorted(DEFAULTS)), min_size=1, max_size=5))
    wanted = [(f"f{i}", kind, DEFAULTS[kind]) for i, kind in enumerate(kinds)]
    kept = [(name, draw(st.sampled_from(PROMOTED.get(kind, [kind])))) for name, kind, _ in wanted if draw(st.booleans())]
    extra = [(f"gone{i}", kind) for i, kind in enumerate(draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=2)))]
    fields = draw(st.permutations([*kept, *extra]))
    optional = {name for name, _ in fields if draw(st.booleans())}
    nullable = [(name, ["null", kind]) if name in optional else (name, kind) for name, kind in fields]
    readers = [(name, ["null", kind], None) if name in optional else (name, kind, default) for name, kind, default in wanted]
    one = st.fixed_dictionaries({name: st.none() | VALUES[kind] if name in optional else VALUES[kind] for name, kind in fields})
    return record(*readers), record(*nullable), draw(st.lists(one, min_size=1, max_size=4))


def expected(body: bytes, writer: Any, reader: Any) -> dict[str, Any]:
    """What fastavro says; defaults of bytes as Avro means them, floats in the width of the column."""
    row = fastavro.schemaless_reader(BytesIO(body), fastavro.parse_schema(writer), fastavro.parse_schema(reader))
    assert isinstance(row, dict)
    kinds = {f["name"]: f["type"] for f in reader["fields"]}
    wide = {name: value.encode("latin-1") if kinds[name] == "bytes" and isinstance(value, str) else value for name, value in row.items()}
    return {n: pa.scalar(v, pa.float32()).as_py() if "float" in (kinds[n], kinds[n][-1]) and v is not None else v for n, v in wide.items()}


@pytest.mark.full
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=evolved(), framing=st.sampled_from(["confluent", "content type", "prefix"]))
def test_decoded_values_are_those_of_fastavro(registry: RegistryServer, case: tuple[Any, Any, list[Any]], framing: str) -> None:
    """Whatever a writer's schema lost, gained or promoted, and however the body names it, the values are those of Avro's own rules."""
    reader, writer, rows = case
    registries.forget()
    plain = [avro(writer, row) for row in rows]
    if framing == "confluent":
        table = events([confluent(registry.register("s", writer), writer, row) for row in rows])
        decoder = decode.confluent_avro(registry.url, schema=reader)
    else:
        ident = registry.register_azure("g/s", writer)
        decoder = decode.azure_avro(Azure(registry.url, Credential), schema=reader)
        table = events(plain, [content_type(ident)] * len(rows))
        if framing == "prefix":
            table = events([b"\0\0\0\0" + ident.encode() + body for body in plain])
    data, wrong = read(table, decoder)
    assert not any(wrong)
    assert data == [expected(body, writer, reader) for body in plain]


def test_what_does_not_decode(registry: RegistryServer) -> None:
    """No framing, an unknown id, an id that cannot be one, bytes missing or left over, a schema that is not Avro's: undecodable."""
    ident = registry.register("s", READER)
    other = registry.register("p", 'syntax = "proto3";', schemaType="PROTOBUF")
    broken = registry.register("b", '{"type": "record"}')
    good = confluent(ident, READER, {"id": "a", "amount": 1})
    bodies = [
        b"",
        b"\0\0\0",
        b"\1" + good[1:],
        b"\0" + (99).to_bytes(4, "big") + good[5:],
        b"\0\xff\xff\xff\xff" + good[5:],
        good[:-1],
        good + b"\0",
        b"\0" + other.to_bytes(4, "big") + good[5:],
        b"\0" + broken.to_bytes(4, "big") + good[5:],
        b"\0" + ident.to_bytes(4, "big") + b"\2\xff\2",
    ]
    data, wrong = read(events([*bodies, good]), decode.confluent_avro(registry.url, schema=READER))
    assert wrong == [True] * len(bodies) + [False]
    assert data == [None] * len(bodies) + [{"id": "a", "amount": 1}]
    assert not [path for path in registry.asked if "4294967295" in path]


@pytest.mark.full
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.lists(st.binary(max_size=30), min_size=1, max_size=5), where=st.integers(0, 20))
def test_noise_is_undecodable_and_nothing_else(registry: RegistryServer, noise: list[bytes], where: int) -> None:
    """Whatever bytes stand behind an id or inside a record, a body has a verdict: no batch fails because of one."""
    schema = record(("a", "long"), ("b", ["null", "bytes"]), ("c", {"type": "array", "items": "string"}), ("d", "double"))
    registries.forget()  # an id that noise has named before counts as unknown for a while
    ident = registry.register("s", schema)
    good = confluent(ident, schema, {"a": 1, "b": b"x", "c": ["y"], "d": 1.5})
    bodies = [good[:5] + one for one in noise] + [good[:where] + one + good[where:] for one in noise]
    data, wrong = read(events([*bodies, good]), decode.confluent_avro(registry.url, schema=schema))
    assert [one is None for one in data] == wrong and not wrong[-1]


def test_what_azure_framing_does_not_decode(registry: RegistryServer) -> None:
    """Neither content type nor prefix, a content type of something else, an unknown id, a JSON schema: undecodable."""
    ident, known = (
        registry.register_azure("g/j", {"type": "object"}, OTHERS[0]),
        registry.register_azure("g/s", READER),
    )
    body = avro(READER, {"id": "a", "amount": 1})
    given: list[Any] = [
        None,
        [],
        [("content-type", b"application/json")],
        [("content-type", None)],
        content_type(known[:-1]),
        content_type("f" * 32),
        content_type(ident),
        content_type(known),
        content_type(known.upper()),
    ]
    _, wrong = read(events([body] * len(given), given), decode.azure_avro(Azure(registry.url, Credential), schema=READER))
    assert wrong == [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    "unlike",
    [
        record(("id", "string"), ("amount", "string")),
        record(("id", "string")),
        record(("id", "string"), ("amount", "long"), name="Customer"),
        record(("id", "string"), ("amount", {"type": "long", "logicalType": "timestamp-millis"})),
    ],
    ids=["type", "no default", "another record", "unit"],
)
def test_a_schema_that_cannot_be_read_as_ours(registry: RegistryServer, unlike: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its bodies are undecodable, never null or wrong by a factor of a thousand; what the schemas tell already is in the log, by the id."""
    wanted = record(("id", "string"), ("amount", {"type": "long", "logicalType": "timestamp-micros"}))
    ident = registry.register("s", unlike)
    row = {"id": "a", "amount": "x" if unlike["fields"][-1]["type"] == "string" else 5}
    avro_bodies.reader.cache_clear()  # it warns once
    assert read(events([confluent(ident, unlike, row)]), decode.confluent_avro(registry.url, schema=wanted)) == ([None], [True])
    unit = isinstance(unlike["fields"][-1]["type"], dict)
    assert (f"schema {ident} do not decode" in caplog.text and "timestamp-millis" in caplog.text) == unit


def test_a_value_of_another_kind_is_undecodable(registry: RegistryServer) -> None:
    """A decimal where plain bytes are wanted fails its own row, and no other row of the batch."""
    money = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    writer, wanted = record(("m", ["string", money])), record(("m", "bytes"))
    ident = registry.register("s", writer)
    bodies = [confluent(ident, writer, {"m": value}) for value in (Decimal("1.50"), "text")]
    assert read(events(bodies), decode.confluent_avro(registry.url, schema=wanted)) == ([None, {"m": b"text"}], [True, False])


def test_units_agree_under_aliases_and_in_lists() -> None:
    """A field that was renamed, or stands in a list, is compared too."""
    millis, micros = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
    for theirs, ours in (
        (record(("old", millis)), {**record(), "fields": [{"name": "new", "aliases": ["old"], "type": micros}]}),
        (record(("t", {"type": "array", "items": millis})), record(("t", {"type": "array", "items": micros}))),
        (record(("t", ["null", millis])), record(("t", ["null", micros]))),
        (record(("r", record(("t", millis), name="R")), ("s", "R")), record(("s", record(("t", micros), name="R")))),
    ):
        with pytest.raises(Unreadable, match="is written as timestamp-millis and wanted as timestamp-micros"):
            avro_bodies.reader("1", json.dumps(theirs), json.dumps(ours))(b"")
        with pytest.raises((EOFError, IndexError)):
            avro_bodies.reader("1", json.dumps(theirs), json.dumps(theirs))(b"")


def test_a_writer_may_have_what_columns_cannot(registry: RegistryServer) -> None:
    """Unions of many types, records that contain themselves and names used twice do not matter where the reader leaves them out."""
    symbol = {"type": "enum", "name": "E", "symbols": ["A"]}
    writer = record(("id", "string"), ("u", ["null", "int", "string"]), ("next", ["null", "Order"]), ("e", symbol), ("f", "E"))
    inner = {"id": "b", "u": 1, "next": None, "e": "A", "f": "A"}
    body = confluent(registry.register("s", writer), writer, {**inner, "id": "a", "u": "x", "next": inner})
    decoder = decode.confluent_avro(registry.url, schema=record(("id", "string"), ("f", symbol)))
    assert read(events([body]), decoder) == ([{"id": "a", "f": "A"}], [False])


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "record", "name": "Nothing", "fields": []},
        {"type": "record", "name": "Nothings", "fields": [{"name": "n", "type": {"type": "null"}}]},
        {"type": "fixed", "name": "Empty", "size": 0},
    ],
    ids=["null", "record", "record of null", "fixed"],
)
def test_a_short_body_cannot_claim_endless_items(registry: RegistryServer, items: Any, caplog: pytest.LogCaptureFixture) -> None:
    """2^60 items of no bytes would be read for ever: the body is undecodable at once, the log says why, and our own schema is refused."""
    writer = record(("id", "string"), ("many", {"type": "array", "items": items}))
    ident = registry.register("s", writer)
    body = b"\0" + ident.to_bytes(4, "big") + b"\x02a" + b"\x80" * 8 + b"\x20" + b"\0"
    avro_bodies.reader.cache_clear()
    decoder = decode.confluent_avro(registry.url, schema=record(("id", "string")))
    assert read(events([body]), decoder) == ([None], [True])
    assert f"schema {ident} do not decode" in caplog.text and "takes no bytes" in caplog.text
    with pytest.raises(ConfigError):
        decode.avro(writer)


def test_items_that_have_bytes_are_read(registry: RegistryServer) -> None:
    """A union has its number and a record its fields, also by their names; a record that holds a list of itself is no endless one."""
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": ["null", "int"]}]}
    writer = record(
        ("id", "string"), ("a", {"type": "array", "items": inner}), ("b", {"type": "array", "items": "Inner"}),
        ("c", {"type": "array", "items": ["null", "int"]}), ("d", {"type": "array", "items": "Order"}),
    )  # fmt: skip
    body = confluent(registry.register("s", writer), writer, {"id": "a", "a": [{"n": 1}], "b": [], "c": [None], "d": []})
    assert read(events([body]), decode.confluent_avro(registry.url, schema=record(("id", "string")))) == ([{"id": "a"}], [False])


def test_defaults_are_values(registry: RegistryServer) -> None:
    """Defaults of bytes, decimals and records, which stand in a schema as text, come as what they mean."""
    money = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    inner = record(("raw", "bytes", "\u00ff"), ("n", "int", 3), name="Inner")
    wanted = record(
        ("id", "string"), ("m", money, "\u0001\u0000"), ("r", inner, {}), ("l", {"type": "array", "items": "bytes"}, ["\u00fe"])
    )
    writer = record(("id", "string"))
    body = confluent(registry.register("s", writer), writer, {"id": "a"})
    (row,), _ = read(events([body]), decode.confluent_avro(registry.url, schema=wanted))
    assert row == {"id": "a", "m": Decimal("2.56"), "r": {"raw": b"\xff", "n": 3}, "l": [b"\xfe"]}


def test_times_and_decimals(registry: RegistryServer) -> None:
    """Logical types come as columns of their own: times in microseconds, decimals with their scale."""
    schema = record(
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("day", {"type": "int", "logicalType": "date"}),
        ("paid", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
    )
    ident = registry.register("s", schema)
    plain = record(("at", "long"), ("day", "int"), ("paid", "bytes"))
    body = confluent(ident, plain, {"at": 1_700_000_000_123, "day": 19_000, "paid": b"\x04\xd2"})
    found = prepare_events(events([body]), Prepare("c", decoder=decode.confluent_avro(registry.url, subject="s")))["data"]
    row = found.to_pylist()[0]
    assert (row["at"].isoformat(), row["day"].isoformat(), row["paid"]) == (
        "2023-11-14T22:13:20.123000+00:00",
        "2022-01-08",
        Decimal("12.34"),
    )


def test_a_schema_is_asked_for_once(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bodies and batches name it; one that is not known is asked for again after a while, not with each batch."""
    ident = registry.register("s", READER)
    decoder = decode.confluent_avro(registry.url, schema=READER)
    good = confluent(ident, READER, {"id": "a", "amount": 1})
    later = confluent(ident + 1, READER, {"id": "b", "amount": 2})
    assert registry.asked == []
    for _ in range(3):
        assert read(events([good, good, later] * 5), pickle.loads(pickle.dumps(decoder)))[1] == [False, False, True] * 5
    assert sorted(registry.asked) == [f"/schemas/ids/{ident}", f"/schemas/ids/{ident + 1}"]
    assert registry.register("s", READER) == ident + 1
    monkeypatch.setattr(registries, "UNKNOWN_SECONDS", 0.0)
    assert read(events([later]), decoder)[1] == [True]
    registries._unknown.clear()
    assert read(events([later]), decoder)[1] == [False]


def test_unknown_ids_are_forgotten_by_the_clock(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time no request is made; behind it one is, and the schema that has come since is used."""
    clock = [1000.0]
    monkeypatch.setattr(registries.time, "monotonic", lambda: clock[0])
    target = Confluent(registry.url)
    assert registries.schema_of(target, "1") is None
    registry.register("s", READER)
    clock[0] += registries.UNKNOWN_SECONDS - 1
    assert registries.schema_of(target, "1") is None and len(registry.asked) == 1
    clock[0] += 2
    assert registries.schema_of(target, "1") is not None and len(registry.asked) == 2


def test_noise_does_not_fill_the_memory(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that name any number of ids leave a bounded number of them behind."""
    monkeypatch.setattr(registries, "MOST_IDS", 5)
    for _ in range(12):
        registry.register("s", READER)
    for ident in range(100):
        registries.schema_of(Confluent(registry.url), str(ident))
    assert len(registries._unknown) <= 5 and len(registries._known) <= 5


@pytest.mark.parametrize("status", [301, 401, 403, 404, 429, 500, 503, 200])
def test_an_answer_that_is_none_decides_nothing(registry: RegistryServer, status: int) -> None:
    """Whatever a gateway, a login or a wrong address answers is no verdict about a body: it raises, and the next try asks again."""
    ident = registry.register("s", READER)
    decoder = decode.confluent_avro(registry.url, schema=READER)
    table = events([confluent(ident, READER, {"id": "a", "amount": 1})])
    registry.status = status
    with pytest.raises(RegistryUnavailable, match=str(status)):
        read(table, decoder)
    assert "/elsewhere" not in registry.asked
    registry.status = None
    assert read(table, decoder)[1] == [False]


SCHEMA = json.dumps(READER).encode()


def http(body: bytes, *, kind: str = AVRO, status: str = "200 OK", length: int | None = None) -> bytes:
    """An answer as it is sent; `length` is what it says about its body."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n" + (f"Content-Length: {length}\r\n" if length is not None else "")
    return head.encode() + b"\r\n" + body


FOREIGN = {
    "cut": http(SCHEMA[:30], length=len(SCHEMA)),
    "cut without a length": http(SCHEMA[:30]),
    "cut within a page": http(b"<html>", kind="text/html", length=60),
    "a page": http(b"<html>hello</html>", kind="text/html"),
    "a text": http(b"OK", kind=OTHERS[1]),
    "a page as Avro": http(b"<html>hello</html>"),
    "not UTF-8": http(b'{"a": "\xff"}'),
    "JSON that is no schema": http(b"null"),
    "JSON of nobody's": http(b"{}", kind="application/json"),
    "cut where there is no such schema": http(b'{"error":{"code":"ItemNotFound"}}', status="404 Not Found", length=60),
}


@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("azure", [True, False], ids=["azure", "confluent"])
def test_an_answer_that_is_cut_or_foreign_is_not_kept(registry: RegistryServer, answer: bytes, azure: bool) -> None:
    """A connection that breaks within an answer, or a gateway's page with status 200, decides nothing: the next try asks again."""
    if azure:
        decoder = decode.azure_avro(Azure(registry.url, Credential), schema=READER)
        table = events([avro(READER, {"id": "a", "amount": 5})], [content_type(registry.register_azure("g/s", READER))])
    else:
        decoder = decode.confluent_avro(registry.url, schema=READER)
        table = events([confluent(registry.register("s", READER), READER, {"id": "a", "amount": 5})])
    registry.raw = answer
    with pytest.raises(RegistryUnavailable, match="Nothing was decided"):
        read(table, decoder)
    registry.raw = None
    assert read(table, decoder) == ([{"id": "a", "amount": 5}], [False])


def test_an_answer_that_is_too_large_is_not_kept(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of an answer has a limit, and the beginning of a schema is none."""
    monkeypatch.setattr(registries, "MOST_BYTES", len(SCHEMA) - 1)
    ident = registry.register_azure("g/s", READER)
    with pytest.raises(RegistryUnavailable, match="more than"):
        registries.schema_of(Azure(registry.url, Credential), ident)
    monkeypatch.setattr(registries, "MOST_BYTES", len(SCHEMA))
    assert registries.schema_of(Azure(registry.url, Credential), ident) == SCHEMA.decode()


@pytest.mark.parametrize("kind", OTHERS)
def test_a_schema_of_azure_that_is_not_avro_is_a_verdict(registry: RegistryServer, kind: str) -> None:
    """Where the registry itself says that the schema is of another kind the body is undecodable, and the batch goes on."""
    ident = registry.register_azure("g/s", {"type": "object"}, kind)
    assert registries.schema_of(Azure(registry.url, Credential), ident) == registries.NOT_AVRO


def test_a_registry_that_is_away_decides_nothing(registry: RegistryServer) -> None:
    """Refused connections raise; what was known before stays readable."""
    first, second = registry.register("s", READER), registry.register("s", OLD)
    decoder = decode.confluent_avro(registry.url, schema=READER)
    known = events([confluent(first, READER, {"id": "a", "amount": 1})])
    asked = events([confluent(second, OLD, {"id": "b", "amount": 2, "note": ""})])
    assert read(known, decoder)[1] == [False]
    registry.stop()
    assert read(known, decoder)[1] == [False]
    with pytest.raises(RegistryUnavailable, match="cannot be reached"):
        read(asked, decoder)
    registry.start()
    assert read(asked, decoder)[1] == [False]


def test_a_wrong_path_is_not_an_unknown_id(registry: RegistryServer) -> None:
    """Only the registry's own code says that there is no such schema; else one wrong address would park a whole stream."""
    with pytest.raises(RegistryUnavailable, match="Is the address right"):
        read(events([b"\0\0\0\0\1x"]), decode.confluent_avro(registry.url + "/api", schema=READER))


def test_the_latest_schema_is_asked_for_when_the_decoder_is_made(registry: RegistryServer) -> None:
    """A version that comes later changes nothing for this decoder and its pickled copies; a new decoder has it."""
    first = registry.register("s", READER)
    decoder = decode.confluent_avro(registry.url, subject="s")
    wider = record(("id", "string"), ("amount", "long"), ("shop", "string", "main"))
    second = registry.register("s", wider)
    table = events([confluent(second, wider, {"id": "a", "amount": 1, "shop": "x"}), confluent(first, READER, {"id": "b", "amount": 2})])
    assert read(table, pickle.loads(pickle.dumps(decoder)))[0] == [{"id": "a", "amount": 1}, {"id": "b", "amount": 2}]
    assert read(table, decode.confluent_avro(registry.url, subject="s"))[0][0] == {"id": "a", "amount": 1, "shop": "x"}


def test_the_latest_schema_of_azure(registry: RegistryServer) -> None:
    """The subject is group/name, and its highest version counts."""
    registry.register_azure("shop/Order", READER)
    ident = registry.register_azure("shop/Order", OLD)
    registry.login = f"Bearer {SECRET}"
    decoder = decode.azure_avro(Azure(registry.url, Credential), subject="shop/Order")
    body = avro(OLD, {"id": "a", "amount": 1, "note": "n"})
    assert read(events([body], [content_type(ident)]), decoder)[0] == [{"id": "a", "amount": 1, "note": "n"}]
    assert all("?api-version=" in path for path in registry.asked)


def test_schemas_that_refer_to_others(registry: RegistryServer) -> None:
    """A schema whose types are defined in other subjects, and theirs in others again, is read with them, by whichever name it uses."""
    money = record(("units", "long"), name="Money", namespace="shop.types")
    deep = record(("a", "shop.types.Money"), name="Line", namespace="shop")
    order = record(("id", "string"), ("net", "shop.types.Money"), ("line", "Line"), ("total", "shop.types.Money"), namespace="shop")
    registry.register("money", money)
    refers = [{"name": "shop.types.Money", "subject": "money", "version": 1}]
    registry.register("line", deep, references=refers)
    ident = registry.register("orders", order, references=[{"name": "shop.Line", "subject": "line", "version": 1}, *refers])
    whole = record(("id", "string"), ("net", money), ("line", deep), ("total", "shop.types.Money"), namespace="shop")
    row = {"id": "x", "net": {"units": 3}, "line": {"a": {"units": 1}}, "total": {"units": 2}}
    table = events([confluent(ident, whole, row)])
    assert read(table, decode.confluent_avro(registry.url, schema=whole)) == ([row], [False])
    assert read(table, decode.confluent_avro(registry.url, subject="orders")) == ([row], [False])


def test_a_reference_without_a_namespace(registry: RegistryServer) -> None:
    """A name is looked for in the namespace it is used in, and then without one, as the producers' own library does."""
    money = record(("units", "long"), name="Money")
    order = record(("id", "string"), ("net", "Money"), ("gross", "Money"), namespace="shop")
    registry.register("money", money)
    ident = registry.register("orders", order, references=[{"name": "Money", "subject": "money", "version": 1}])
    whole = record(("id", "string"), ("net", money), ("gross", "Money"), namespace="shop")
    row = {"id": "x", "net": {"units": 1}, "gross": {"units": 2}}
    assert read(events([confluent(ident, whole, row)]), decode.confluent_avro(registry.url, subject="orders")) == ([row], [False])


@pytest.mark.parametrize(
    ("login", "options"),
    [("Basic dXNlcjpodW50ZXIyLXRva2Vu", {"user": "user", "password": SECRET}), (f"Bearer {SECRET}", {"token": SECRET})],
)
def test_credentials_are_sent_and_never_shown(
    registry: RegistryServer, login: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They log in; no representation, log line or error holds them, nor that of a pickled copy."""
    caplog.set_level(logging.DEBUG)
    registry.login = login
    ident = registry.register("s", READER)
    made = Confluent(registry.url, **options)
    decoder = pickle.loads(pickle.dumps(decode.confluent_avro(made, subject="s")))
    assert read(events([confluent(ident, READER, {"id": "a", "amount": 1})]), decoder)[1] == [False]
    registries.forget()
    registry.status = 401
    with pytest.raises(RegistryUnavailable) as told:
        read(events([confluent(ident, READER, {"id": "a", "amount": 1})]), decoder)
    shown = " ".join([repr(made), repr(decoder), repr(Prepare("c", decoder=decoder)), str(told.value), repr(told.value), caplog.text])
    assert SECRET not in shown and login.split()[1] not in shown


def test_a_credential_that_fails_decides_nothing(registry: RegistryServer) -> None:
    """Where no token can be had nothing is undecodable, and the message does not repeat what the credential said."""

    class Broken:
        def get_token(self, *_: str) -> Any:
            raise OSError(SECRET)

    with pytest.raises(RegistryUnavailable, match="gives no token") as told:
        read(events([b"x"], [content_type("0" * 32)]), decode.azure_avro(Azure(registry.url, Broken), schema=READER))
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda url: Confluent(f"http://user:{SECRET}@host"), "must not hold credentials"),
        (lambda url: Confluent("host:8081"), "begins with"),
        (lambda url: Confluent("file:///etc/passwd"), "begins with"),
        (lambda url: Azure("shop.servicebus.windows.net", Credential()), "makes a token credential"),
        (lambda url: decode.confluent_avro(url), "one of the two: schema="),
        (lambda url: decode.confluent_avro(url, schema=READER, subject="s"), "one of the two: schema="),
        (lambda url: decode.confluent_avro(url, subject="none"), "no subject 'none'"),
        (lambda url: decode.azure_avro(Azure(url, Credential), subject="g/none"), "no schema 'g/none'"),
        (lambda url: decode.confluent_avro(url, schema={"type": "string"}), "'record'"),
        (lambda url: decode.confluent_avro(url, schema=record(("u", ["int", "string"]))), "union"),
        (lambda url: decode.confluent_avro(url, schema=record(("u", "int", "x"))), "Default"),
    ],
)
def test_what_cannot_work_is_refused_at_once(registry: RegistryServer, make: Any, message: str) -> None:
    """Wrong addresses, missing subjects and schemas without columns are errors where they are written, without the secret."""
    with pytest.raises(ConfigError, match=message) as told:
        make(registry.url)
    assert SECRET not in str(told.value)
