"""Avro bodies: types that are used by their names, and bytes that no writer of the schema writes."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup import decode
from dedup.decode import avro_bodies, avro_guards, bodies, schemas
from dedup.decode.values import FAILURES, Read, Unreadable
from kit.registry_kit import avro, record


def reader(written: Any, wanted: Any) -> Read:
    """What reads records of one schema as the other."""
    return avro_bodies.reader("1", json.dumps(written), json.dumps(wanted))


def stamp(unit: str, **named: Any) -> dict[str, Any]:
    """A record that holds a time."""
    return {**record(("at", {"type": "long", "logicalType": f"timestamp-{unit}"}), name="Stamp"), **named}


DEFINED = {
    "inherited": ({}, "Stamp"),
    "inherited, used in full": ({}, "shop.Stamp"),
    "in full, used in short": ({"name": "shop.Stamp"}, "Stamp"),
    "in another namespace": ({"namespace": "time"}, "time.Stamp"),
    "in another one, in full": ({"name": "time.Stamp", "namespace": "shop"}, "time.Stamp"),
}


@pytest.mark.parametrize(("named", "used"), DEFINED.values(), ids=DEFINED)
@pytest.mark.parametrize("outer", [{"namespace": "shop"}, {"name": "shop.Order"}], ids=["namespace", "full name"])
def test_units_are_compared_by_whatever_name_a_type_is_used(named: dict[str, Any], used: str, outer: dict[str, Any]) -> None:
    """Milliseconds are never read as microseconds: a name means the same type however much of it is written."""
    written = record(("created", stamp("millis", **named)), ("paid", used), **outer)
    wanted = record(("paid", stamp("micros")), name="Order")
    with pytest.raises(Unreadable, match=r"paid\.at is written as timestamp-millis and wanted as timestamp-micros"):
        reader(written, wanted)(b"\2\2")
    assert reader(written, record(("paid", stamp("millis")), name="Order"))(b"\2\4") == {"paid": {"at": 2}}


@pytest.mark.parametrize(("named", "used"), DEFINED.values(), ids=DEFINED)
@pytest.mark.parametrize("outer", [{"namespace": "shop"}, {"name": "shop.Order"}], ids=["namespace", "full name"])
def test_a_schema_of_ours_may_use_a_type_by_any_of_its_names(named: dict[str, Any], used: str, outer: dict[str, Any]) -> None:
    """Whatever is valid Avro becomes columns, for bodies of Avro and of JSON."""
    schema = record(("created", stamp("millis", **named)), ("paid", used), **outer)
    for made in (decode.avro, decode.json):
        assert made(schema).schema.field("paid").type == made(schema).schema.field("created").type


def test_a_short_name_is_that_of_its_own_namespace() -> None:
    """Two types may differ by their namespace alone: a field has the columns, and the units, of the one it means."""
    schema = record(
        ("a", stamp("millis", namespace="a")), ("b", record(("own", stamp("micros")), ("again", "Stamp"), name="b.Inner")), ("c", "a.Stamp")
    )
    found = schemas.from_avro(schema)
    assert (
        found.field("c").type
        == found.field("a").type
        != found.field("b").type.field("own").type
        == found.field("b").type.field("again").type
    )
    with pytest.raises(Unreadable, match=r"c\.at is written as timestamp-millis"):
        reader(schema, record(("c", stamp("micros"))))(b"")
    inner = record(("again", stamp("micros")), name="Inner")
    assert reader(schema, record(("b", inner)))(b"\2\4\6\2") == {"b": {"again": {"at": 3}}}


def test_a_type_may_be_called_as_a_kind_of_types_is() -> None:
    """A record named `record` is still a record, and its name is found where it is used."""
    schema = record(("a", record(("n", "long"), name="record")), ("b", "shop.record"), namespace="shop")
    assert schemas.from_avro(schema).field("b").type == pa.struct([pa.field("n", pa.int64(), False)])
    body = avro(schema, {"a": {"n": 1}, "b": {"n": 2}})
    assert reader(schema, schema)(body) == {"a": {"n": 1}, "b": {"n": 2}}


def test_an_endless_array_is_found_by_whatever_name_its_items_have() -> None:
    """Items that take no bytes are refused also where they are used by their full name."""
    schema = record(("one", record(name="Nothing")), ("many", {"type": "array", "items": "shop.Nothing"}), namespace="shop")
    with pytest.raises(Unreadable, match="takes no bytes"):
        reader(schema, record(("one", record(name="Nothing"))))(b"\0")


CURRENCY = {"type": "enum", "name": "Currency", "symbols": ["EUR", "USD", "JPY"]}
CHOOSING = record(
    ("c", CURRENCY),
    ("n", ["null", "long"]),
    ("l", {"type": "array", "items": ["null", "Currency"]}),
    ("m", {"type": "map", "values": "Currency"}),
)
"""Enums and unions, by name and inside of others."""

BELOW_ZERO = {
    "enum": ("c", b"\1\0\0\0"),
    "enum, its first": ("c", b"\5\0\0\0"),
    "union": ("n", b"\0\1\2\0\0"),
    "union, its first": ("n", b"\0\3\0\0"),
    "union of a list": ("l", b"\0\0\2\1\0\0\0"),
    "enum of a list": ("l", b"\0\0\2\2\1\0\0"),
    "enum of a map": ("m", b"\0\0\0\2\2k\1\0"),
}


@pytest.mark.parametrize(("field", "body"), BELOW_ZERO.values(), ids=BELOW_ZERO)
def test_a_number_below_zero_is_no_choice(field: str, body: bytes) -> None:
    """A broken enum or union makes the body undecodable, and never counts from the end: dollars do not become yen."""
    decoder = decode.avro(CHOOSING)
    given = pa.array([body], pa.binary())
    assert bodies.decode(given, pa.nulls(1), decoder).to_pylist() == [None]
    assert bodies.reasons(given, pa.nulls(1), decoder)[0].text == f"$.{field} has a number that its enum or union does not have"
    with pytest.raises(IndexError):
        reader(CHOOSING, CHOOSING)(body)


def test_the_branch_of_a_whole_body_is_not_below_zero_either() -> None:
    """A schema may be a union of records: the number in front of the body is one of them."""
    written, order = [record(("id", "long"), name="Customer"), record(("id", "long"))], record(("id", "long"))
    assert reader(written, order)(b"\2\4") == {"id": 2}
    for body in (b"\1\4", b"\4\4", b""):
        with pytest.raises(FAILURES):
            reader(written, order)(body)


NODE = record(
    ("next", ["null", "Node"]), ("all", {"type": "array", "items": "Node"}), ("by", {"type": "map", "values": "Node"}), name="Node"
)
TREE = record(("amount", "long"), ("tree", ["null", NODE]))
"""It contains itself by a union, an array and a map."""

AMOUNT = record(("amount", "long"))


@pytest.mark.parametrize("step", [b"\2", b"\0\2", b"\0\0\2\2k", b"\0\1\2"], ids=["union", "array", "map", "block with its size"])
@pytest.mark.parametrize("end", [b"", b"\0"], ids=["cut", "ended"])
def test_a_body_that_nests_without_end_is_undecodable(step: bytes, end: bytes) -> None:
    """A body of a kilobyte must not end the process while it is decoded, nor while the reason is looked for."""
    body = b"\2\2" + step * 100_000 + end
    with pytest.raises(Unreadable, match=r"the body nests deeper than 1,000 levels") as told:
        reader(TREE, AMOUNT)(body)
    assert avro_bodies.reason(body, told.value, json.dumps(TREE), json.dumps(AMOUNT)) is told.value


def test_a_body_that_nests_deeply_is_read() -> None:
    """A chain of some hundred records in each other, as a tree or a list of a producer's has, decodes like any other body."""
    assert reader(TREE, AMOUNT)(b"\2\2" + b"\2" * 400 + b"\0" + b"\0\0" * 401) == {"amount": 1}
    with pytest.raises(Unreadable, match="the body does not end within its 402 bytes"):
        reader(TREE, AMOUNT)(b"\2\2" + b"\2" * 400)


def boxed(levels: int) -> Any:
    """A record in a record and so on, so many of them; the last may hold the first one again."""
    inner: Any = ["null", "N0"]
    for level in reversed(range(levels)):
        inner = record(("r", inner), name=f"N{level}")
    return inner


@pytest.mark.parametrize("records", [1, 2, 3, 7])
def test_a_body_is_refused_from_the_same_depth_whether_or_not_all_are_looked_at(records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short bodies are not looked at, for they have too few bytes; each size around the border is judged as if all were."""
    schema, looked, guard = boxed(records), list[int](), avro_guards.depth_guard

    def seen(*args: Any) -> Any:
        return lambda body: (looked.append(len(body)), guard(*args)(body))

    named: dict[str, Any] = {}
    always = guard(fastavro.parse_schema(schema, named), named)
    monkeypatch.setattr(avro_guards, "depth_guard", seen)
    read = avro_bodies._read_by(schema, None)
    border = 1_000 // (records + 1)
    for length in range(border - 5, border + 5):
        body = b"\2" * (length - 1) + b"\0"
        looked.clear()
        assert refusal(read, body) == refusal(always, body)
        assert bool(looked) == ((length + 1) * (records + 1) > 1_000)
    assert refusal(read, b"\2" * border + b"\0") and not refusal(read, b"\2" * (border - 3) + b"\0")


def refusal(read: Callable[[bytes], Any], body: bytes) -> str | None:
    """What a reader says of a body that it refuses."""
    try:
        read(body)
    except Unreadable as error:
        return str(error)
    return None


def test_records_that_hold_themselves_are_always_looked_at() -> None:
    """A body of no bytes at all nests without end where a record is a field of its own, also by way of another one."""
    schema = record(("b", record(("a", "A"), name="B")), name="A")
    for body in (b"", b"\0"):
        with pytest.raises(Unreadable, match="nests deeper than 1,000 levels"):
            avro_bodies._read_by(schema, None)(body)


FIXED = {"type": "fixed", "name": "F", "size": 3}


@pytest.mark.parametrize("items", ["boolean", "float", "double", FIXED, record(("x", "double"), ("y", "boolean"), name="P")], ids=str)
@pytest.mark.parametrize("more", [[], [("next", ["null", "Order"])]], ids=["flat", "contains itself"])
def test_a_short_body_that_claims_any_number_of_items_ends(items: Any, more: list[Any]) -> None:
    """Some bytes that say 2^20 items follow are undecodable at once, also where our schema leaves the items out; as 2^60 would be."""
    schema = record(("many", {"type": "array", "items": items}), *more)
    with pytest.raises(Unreadable, match="does not end within its 4 bytes"):
        reader(schema, record())(b"\x80\x80\x80\x01")


def test_why_a_body_does_not_decode_is_found_at_once() -> None:
    """The reason of a mismatch is looked for in parts of the record, which end with the body as the whole does, whatever is left out."""
    written = record(("id", "long"), ("amount", ["null", "long"]), ("many", {"type": "array", "items": "double"}))
    wanted = record(("id", "long"), ("amount", "string"))
    body = b"\2\2\2" + b"\x80" * 8 + b"\x20"  # 2^60 items
    with pytest.raises(Unreadable, match="cannot be read as the schema says") as told:
        reader(written, wanted)(body)
    assert "12 bytes" in avro_bodies.reason(body, told.value, json.dumps(written), json.dumps(wanted)).text


ANY = record(
    ("next", ["null", "Any"]), ("f", {"type": "fixed", "name": "F", "size": 3}), ("e", CURRENCY), ("s", "string"), ("y", "bytes"),
    ("b", "boolean"), ("i", "int"), ("x", "float"), ("d", {"type": "double"}), ("again", "F"), ("nothing", "null"),
    ("l", {"type": "array", "items": {"type": "record", "name": "L", "fields": [{"name": "n", "type": "long"}]}}),
    ("m", {"type": "map", "values": ["Any", "L"]}), name="Any",
)  # fmt: skip
LEAF = {
    "next": None, "f": b"abc", "e": "USD", "s": "\u00e4", "y": b"\xff", "b": True, "i": -5, "x": 0.5, "d": 1.5, "again": b"xyz",
    "nothing": None, "l": [{"n": 2**62}, {"n": -(2**63)}], "m": {},
}  # fmt: skip


NOTHING = fastavro.parse_schema(record(name="Any"))
"""Everything is left out, as far as it can be."""


@settings(deadline=None, max_examples=60)
@given(noise=st.binary(max_size=4), where=st.integers(0, 160), gone=st.integers(0, 4))
def test_nesting_is_measured_of_the_bytes_that_are_read(noise: bytes, where: int, gone: int) -> None:
    """A body that passes the look ahead has all bytes that fastavro asks for, whether it reads or leaves out: it is led nowhere else."""
    whole, named = avro(ANY, {**LEAF, "next": LEAF, "m": {"k": LEAF, "o": {"n": 3}}}), dict[str, Any]()
    parsed = avro_guards.without_negatives(fastavro.parse_schema(ANY, named))
    guard = avro_guards.depth_guard(parsed, named)
    guard(whole)
    body = whole[:where] + noise + whole[where + gone :]
    with contextlib.suppress(Unreadable):
        guard(body)
        for wanted in (None, NOTHING):
            with contextlib.suppress(UnicodeDecodeError, IndexError):  # of a text, of an enum
                fastavro.schemaless_reader(io.BytesIO(body), parsed, wanted)


@pytest.mark.parametrize(("schema", "found"), [(AMOUNT, False), (CHOOSING, False), (TREE, True), (ANY, True)])
def test_only_what_contains_itself_is_looked_at_twice(schema: Any, found: bool) -> None:
    """The look ahead costs time: only bodies that may nest without end pay for it."""
    assert avro_guards.contains_itself(schemas.qualified(schema)) == found
