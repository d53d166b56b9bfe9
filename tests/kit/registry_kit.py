"""Bodies as the producers of registries write them, and batches of them."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pyarrow as pa

from dedup.core.envelope import ENVELOPE


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    """An Avro record: each field is (name, type) or (name, type, default)."""
    made = [{"name": f[0], "type": f[1], **({"default": f[2]} if len(f) > 2 else {})} for f in fields]
    return {"type": "record", "name": name, "fields": made, **more}


def avro(schema: Any, row: dict[str, Any]) -> bytes:
    """One record."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


def confluent(ident: int, schema: Any, row: dict[str, Any]) -> bytes:
    """As Confluent's serialiser writes it."""
    return b"\0" + ident.to_bytes(4, "big") + avro(schema, row)


def content_type(ident: str) -> list[tuple[str, bytes]]:
    """Properties as Azure's encoder sends them."""
    return [("x", b"1"), ("content-type", f"avro/binary+{ident}".encode())]


def events(bodies: list[bytes | None], properties: list[Any] | None = None) -> pa.Table:
    """One event for each body."""
    count = len(bodies)
    columns = {
        "source": ["broker"] * count,
        "topic": ["orders"] * count,
        "partition": [0] * count,
        "sequence_number": list(range(count)),
        "body": bodies,
        "properties": properties or [None] * count,
    }
    return pa.table({name: pa.array(values, ENVELOPE.field(name).type) for name, values in columns.items()})
