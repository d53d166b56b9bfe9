"""The canonical encoding: pinned by vectors, and the same in the reference, in Arrow and in Spark's tasks."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import random
import re
from decimal import Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from dedup.core.envelope import ENVELOPE
from dedup.core.keys import INTERNAL, KeySettings, encode_parts
from dedup.core.rows import arrow_of
from dedup.decode.hashing import canonical
from dedup.decode.prepare import Prepare, prepare_events
from kit import key_reference as reference
from kit.paths import ROOT, TESTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTORS = json.loads((TESTS / "kit/key_vectors.json").read_text())
NAMES = [vector["name"] for vector in VECTORS]

TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "short": pa.int16(),
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "naive": pa.timestamp("us"),
    "money": pa.decimal128(10, 2),
    "whole": pa.decimal128(38, 0),
    "small": pa.decimal128(38, 38),
    "wide": pa.decimal128(38, 18),
}


def values(name: str) -> st.SearchStrategy[Any]:
    """Values of one of TYPES, extreme ones included."""
    kind = TYPES[name]
    if pa.types.is_decimal(kind):
        return st.integers(-(10**kind.precision) + 1, 10**kind.precision - 1).map(
            lambda n: Decimal(n).scaleb(-kind.scale, REFERENCE_CONTEXT)
        )
    if pa.types.is_integer(kind):
        return st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    if pa.types.is_timestamp(kind):
        return st.datetimes().map(lambda t: t.replace(tzinfo=dt.UTC) if kind.tz else t)
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    return {"string": texts, "binary": st.binary(max_size=12), "boolean": st.booleans(), "date": st.dates()}[name]


REFERENCE_CONTEXT = Context(prec=60)


def value_of(column: dict[str, Any]) -> Any:
    """A vector's value in Python."""
    kind, value = column["type"], column["value"]
    if value is None:
        return None
    if kind == "binary":
        return bytes.fromhex(value)
    if kind.startswith("decimal"):
        return Decimal(value)
    if kind == "date":
        return dt.date.fromisoformat(value)
    return dt.datetime.fromisoformat(value) if kind.startswith("timestamp") else value


def settings_of(vector: dict[str, Any]) -> KeySettings:
    """A vector's key settings."""
    given = vector["settings"]
    return KeySettings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def spec_of(vector: dict[str, Any]) -> Prepare:
    """A vector as the order to `prepare`."""
    place = (vector["event"]["source"], vector["event"]["topic"])
    known = {place: vector["incarnation"], ("other", place[1]): 9}
    return Prepare(vector["consumer"], settings_of(vector), keyspace=vector["keyspace"], incarnations=known)


def row_of(vector: dict[str, Any]) -> dict[str, Any]:
    """A vector's event with its own columns."""
    event = dict(vector["event"])
    event["body"] = None if event["body"] is None else bytes.fromhex(event["body"])
    event["properties"] = [{"key": k, "value": None if v is None else bytes.fromhex(v)} for k, v in event["properties"]]
    return event | {column["name"]: value_of(column) for column in vector["columns"]}


def table_of(vector: dict[str, Any]) -> pa.Table:
    """A vector as an input of one row."""
    types = {name: ENVELOPE.field(name).type for name in vector["event"]}
    types |= {column["name"]: reference.arrow_type(column["type"]) for column in vector["columns"]}
    row = row_of(vector)
    return pa.table({name: pa.array([row[name]], kind) for name, kind in types.items()})


def expected(vector: dict[str, Any]) -> tuple[bytes | None, int]:
    """What the vector pins."""
    return (None if vector["key"] is None else bytes.fromhex(vector["key"])), vector["payload_hash"]


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_reference_gives_the_pinned_vectors(vector: dict[str, Any]) -> None:
    """The pinned keys follow from the written encoding and not from the implementation."""
    row, chosen = row_of(vector), settings_of(vector)
    key = reference.key(vector["consumer"], chosen, row, vector["keyspace"], vector["incarnation"])
    assert (key, reference.payload_hash(chosen, row)) == expected(vector)


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_pyarrow_gives_the_pinned_vectors(vector: dict[str, Any]) -> None:
    """An event has the key that was pinned for it."""
    found = prepare_events(table_of(vector), spec_of(vector)).to_pylist()[0]
    assert (found["_key"], found["_payload_hash"]) == expected(vector)


def test_vectors_that_should_differ_differ() -> None:
    """Null, the empty string, the split of a composite, scope, keyspace, consumer and incarnation all tell keys apart."""
    keys = [vector["key"] for vector in VECTORS if vector["key"] is not None and not vector.get("same_as")]
    assert len(set(keys)) == len(keys)


def test_vectors_that_should_be_equal_are() -> None:
    """The same value in another type or another scale is the same key."""
    pinned = {vector["name"]: vector["key"] for vector in VECTORS}
    same = [(vector["key"], pinned[vector["same_as"]]) for vector in VECTORS if vector.get("same_as")]
    assert same and all(left == right for left, right in same)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.none() | st.binary(max_size=5), max_size=4), min_size=2, max_size=6))
def test_no_two_lists_of_parts_encode_alike(lists: list[list[bytes | None]]) -> None:
    """Parts that contain separators, lengths or tags cannot imitate another split."""
    different = {tuple(parts) for parts in lists}
    assert len({encode_parts(parts) for parts in different}) == len(different)


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """A table of events with a few typed columns, and which of them make the key and the payload."""
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3, unique=True))
    size = draw(st.integers(0, 4))
    columns = {f"c_{name}": pa.array([draw(st.none() | values(name)) for _ in range(size)], TYPES[name]) for name in names}
    ids = st.lists(
        st.tuples(st.sampled_from(["message_id", "message-id", "Message_id", "x"]), st.none() | st.binary(max_size=3)), max_size=3
    )
    pairs = [
        None if (found := draw(st.none() | ids)) is None else [dict(zip(("key", "value"), p, strict=True)) for p in found]
        for _ in range(size)
    ]
    head = {
        "source": pa.array([draw(st.sampled_from(["s", "S1"])) for _ in range(size)], pa.string()),
        "topic": pa.array([draw(st.sampled_from(["t", "tt"])) for _ in range(size)], pa.string()),
        "partition": pa.array([draw(st.integers(0, 3)) for _ in range(size)], pa.int32()),
        "sequence_number": pa.array([draw(st.integers(0, 2**62)) for _ in range(size)], pa.int64()),
        "part": pa.array([draw(st.integers(0, 3)) for _ in range(size)], pa.int64()),
        "body": pa.array([draw(st.none() | st.binary(max_size=9)) for _ in range(size)], pa.binary()),
        "properties": pa.array(pairs, ENVELOPE.field("properties").type),
    }
    chosen = draw(st.lists(st.sampled_from([*columns, "message_id", "body"]), max_size=3, unique=True))
    payload = draw(st.lists(st.sampled_from([*columns, "part"]), max_size=2, unique=True))
    return pa.table(head | columns), tuple(chosen), tuple(payload)


@pytest.mark.full
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables(), st.sampled_from(["topic", "consumer"]), st.sampled_from(["dead_letter", "position"]), st.integers(0, 3))
def test_pyarrow_agrees_with_the_reference(made: Any, scope: Any, null_key: Any, keyspace: int) -> None:
    """Any table, any choice of key: the columnar encoding equals the one written out value by value."""
    table, columns, payload = made
    chosen = KeySettings(columns, payload, scope, null_key)
    known = {("s", "t"): 1, ("S1", "tt"): 2}
    found = prepare_events(table, Prepare("c", chosen, keyspace=keyspace, incarnations=known))
    for row, key, hashed in zip(table.to_pylist(), found["_key"].to_pylist(), found["_payload_hash"].to_pylist(), strict=True):
        incarnation = known.get((row["source"], row["topic"]), 0)
        assert key == reference.key("c", chosen, row, keyspace, incarnation)
        assert hashed == reference.payload_hash(chosen, row)


def events(**columns: pa.Array) -> pa.Table:
    """A small input with these extra columns."""
    size = len(next(iter(columns.values())))
    head = {
        "source": ["s"] * size,
        "topic": ["t"] * size,
        "partition": [0] * size,
        "sequence_number": list(range(size)),
        "body": [b""] * size,
    }
    return pa.table(head | columns)


def keys_of(table: pa.Table, *columns: str, **spec: Any) -> list[bytes | None]:
    """Keys by these columns."""
    found: list[bytes | None] = prepare_events(table, Prepare("c", KeySettings(columns), **spec))["_key"].to_pylist()
    return found


def test_a_composite_key_is_null_only_if_all_its_parts_are() -> None:
    """One null among the parts is a value like any other; only nothing at all is no key."""
    table = events(a=pa.array(["x", None, None, ""]), b=pa.array([None, "x", None, None], pa.string()))
    keys = keys_of(table, "a", "b")
    assert keys[2] is None and None not in (keys[0], keys[1], keys[3])
    assert len(set(keys)) == 4


def test_null_keys_are_never_one_message() -> None:
    """Events without a key have no key, or each its own position's: never one that they share."""
    table = events(a=pa.nulls(3, pa.string()))
    assert keys_of(table, "a") == [None] * 3
    by_position = prepare_events(table, Prepare("c", KeySettings(("a",), null_key="position")))["_key"].to_pylist()
    assert len(set(by_position)) == 3 and None not in by_position


def test_a_chosen_key_never_equals_a_position() -> None:
    """Business values that spell a position are not that position's key."""
    table = events(a=pa.array(["0"]), b=pa.array(["0"]), c=pa.array(["0"]), d=pa.array(["0"]))
    assert keys_of(table, "a", "b", "c", "d") != keys_of(table)


def test_the_part_tells_the_rows_of_one_event_apart() -> None:
    """Rows of one exploded event have keys of their own once part= names what tells them apart."""
    table = events(line=pa.array([1, 2])).set_column(3, "sequence_number", pa.array([7, 7]))
    assert len(set(keys_of(table))) == 1
    assert len(set(keys_of(table, part="line"))) == 2


def test_a_column_called_message_id_wins_over_the_property() -> None:
    """The name message_id means the column where there is one, and the producer's property where there is none."""
    properties = pa.array([[("message_id", b"p")]], pa.map_(pa.string(), pa.binary()))
    by_column = keys_of(events(message_id=pa.array(["p2"]), properties=properties), "message_id")
    by_property = keys_of(events(properties=properties), "message_id")
    assert by_column != by_property == keys_of(events(other=pa.array(["p"])), "other")


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.float32(), pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())]
)
@pytest.mark.parametrize("use", ["key", "payload"])
def test_a_type_without_one_canonical_form_is_refused(kind: pa.DataType, use: str) -> None:
    """Floating-point numbers and nested values cannot silently become different keys on different machines."""
    chosen = KeySettings(("x",)) if use == "key" else KeySettings(payload=("x",))
    with pytest.raises(ConfigError, match=r"'x' is of type .* cannot be part of .*(cast|string)"):
        prepare_events(events(x=pa.nulls(1, kind)), Prepare("c", chosen))


@pytest.mark.parametrize(
    ("unit", "values", "texts"),
    [
        (
            "ns",
            [1_700_000_000_000_000_100, 1_000, 0, -1, 1, -999, -1_500, None],
            ["1700000000000000.1", "1", "0", "-0.001", "0.001", "-0.999", "-1.5"],
        ),
        ("ns", [1_000, -2_000, None], ["1", "-2"]),
        ("s", [9_223_372_036_855, 1, None], ["9223372036855000000", "1000000"]),
        ("ms", [2**62, -1, None], ["4611686018427387904000", "-1000"]),
        ("us", [1, -1, None], ["1", "-1"]),
    ],
)
def test_no_timestamp_of_a_key_is_cut(unit: str, values: list[int | None], texts: list[str]) -> None:
    """Two times that differ are two keys, whatever the unit; equal times in two units are one."""
    column = pa.array([7, *values], pa.int64()).cast(pa.timestamp(unit)).slice(1)
    assert canonical("at", column).to_pylist() == [*(text.encode() for text in texts), None]


def test_missing_key_columns_are_one_error_that_names_them() -> None:
    """A key that names what is not there is told once, with everything that is missing and everything that is there."""
    with pytest.raises(ConfigError, match=r"'nope', 'data\.id'.* they have source, topic"):
        keys_of(events(a=pa.array([1])), "a", "nope", "data.id")


def test_the_readable_key_is_for_people() -> None:
    """Parts are joined, bytes that are no text are shown in hex, NUL is left out, and long keys are cut."""
    table = events(a=pa.array([b"\xff\x01", b"x\x00y", None]), b=pa.array(["é" * 300, "z", "w"]))
    shown = prepare_events(table, Prepare("c", KeySettings(("a", "b"))))["_key_text"].to_pylist()
    assert shown == ["ff01|" + "é" * 195, "xy|z", "|w"]


def test_settings_are_stored_as_one_stable_mapping() -> None:
    """What a consumer's state is bound to does not change unless the settings do."""
    chosen = KeySettings(("a", "data.b"), ("c",), "consumer", "position")
    assert chosen.canonical() == {
        "key_encoding": "1",
        "key_columns": '["a", "data.b"]',
        "key_payload": '["c"]',
        "key_scope": "consumer",
        "null_key": "position",
    }
    assert KeySettings().canonical() != chosen.canonical()


@pytest.mark.parametrize("wrong", [{"scope": "broker"}, {"null_key": "drop"}, {"columns": "a"}, {"columns": ("",)}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """A misspelt setting is told when the consumer is made."""
    with pytest.raises(ConfigError):
        KeySettings(**wrong)


def random_table(rows: int, seed: int) -> pa.Table:
    """Random values of every type, with nulls, NUL characters, extreme numbers and old dates; always the same for one seed."""
    rng = random.Random(seed)
    columns = {
        name: pa.array([None if rng.random() < 0.2 else random_value(rng, name) for _ in range(rows)], TYPES[name]) for name in TYPES
    }
    head = events(n=pa.array(range(rows)))
    ids = [[{"key": rng.choice(["message_id", "message-id", "x"]), "value": rng.choice([None, b"", b"\xff", b"id"])}] for _ in range(rows)]
    properties = pa.array([None if rng.random() < 0.3 else found * rng.randint(0, 2) for found in ids], ENVELOPE.field("properties").type)
    return pa.table({name: head[name] for name in head.column_names} | {"properties": properties} | columns)


def random_value(rng: random.Random, name: str) -> Any:
    """One value, often at the edge of its type."""
    kind = TYPES[name]
    if name == "string":
        return "".join(rng.choice(["a", "\x00", "é", "\U0001f600", "\uffff", "|", " ", "\n"]) for _ in range(rng.randint(0, 8)))
    if name == "binary":
        return rng.randbytes(rng.randint(0, 8))
    if name == "boolean":
        return rng.random() < 0.5
    if pa.types.is_decimal(kind):
        top = 10**kind.precision - 1
        number = rng.choice([0, 1, -1, 10, 100, -150, top, -top, rng.randint(-top, top), rng.randint(-999, 999)])
        return Decimal(number).scaleb(-kind.scale, REFERENCE_CONTEXT)
    bits = kind.bit_width
    if name == "date":
        return rng.choice([0, -1, -141428, -719162, 2932896, 2932897, -719163, rng.randint(-719162, 2932896)])
    if name in ("timestamp", "naive"):
        edges = [0, -1, 1, -62135596800000000, 253402300799999999, -12219292800000001, 1711846800000000, -2717650800000000 + 1]
        return rng.choice([*edges, rng.randint(-62135596800000000, 253402300799999999)])
    return rng.choice([0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), rng.randint(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)])


def test_spark_keeps_every_type_of_a_key(spark: SparkSession, tmp_path: Path) -> None:
    """One random frame with every type gets the same keys in Spark's tasks as without Spark, in a session of another zone."""
    from dedup.spark.prepare import prepare_columns

    table = random_table(2_000, seed=20)
    pq.write_table(table, tmp_path / "random.parquet")
    chosen = KeySettings(tuple(TYPES), payload=(*TYPES, "message_id"), null_key="position")
    spec = Prepare("c", chosen, keyspace=3, incarnations={("s", "t"): 2})
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        prepared = prepare_columns(spark.read.option("datetimeRebaseMode", "CORRECTED").parquet(str(tmp_path / "random.parquet")), spec)
        found = arrow_of(prepared.select("n", *INTERNAL)).sort_by("n")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    expected = prepare_events(table, spec).select(["n", *INTERNAL])
    differ = [row for row, (a, b) in enumerate(zip(found.to_pylist(), expected.to_pylist(), strict=True)) if a != b]
    assert differ == []


def test_the_documented_vectors_are_the_pinned_ones() -> None:
    """Whoever implements the encoding from docs/explanation/keys.md gets our keys."""
    text = (ROOT / "docs" / "explanation" / "keys.md").read_text()
    rows = re.findall(r"\| `(dedup1\S+)` \| `([0-9a-f]{32})` \|", text)
    assert len(rows) == 3
    assert all(hashlib.sha256(encoded.encode()).hexdigest()[:32] == key for encoded, key in rows)
    assert {key for _, key in rows} <= {vector["key"] for vector in VECTORS}
    assert f"`{VECTORS[0]['payload_hash']}`" in text
