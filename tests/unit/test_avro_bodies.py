"""Avro bodies: types that are used by their names, and bytes that no writer of the schema writes."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from dedup import decode
from dedup.decode import avro_bodies, schemas
from dedup.decode.values import Read, Unreadable
from kit.registry_kit import avro, record

pytest.importorskip("fastavro")


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
