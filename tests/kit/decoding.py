"""Schemas with a bit of everything, and bodies that are decoded by them."""

from __future__ import annotations

import pyarrow as pa

from dedup import decode
from dedup.decode.prepare import Prepare, prepare_events

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

"""Each kind of column."""

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
