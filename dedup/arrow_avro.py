"""Reading Avro without Spark: one record at a time, by fastavro. Called by dedup/arrow_decode.py and dedup/arrow_registry.py."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from checkpoint.errors import ConfigError
from dedup import schemas
from dedup.arrow_rows import Read, Wrong

if TYPE_CHECKING:
    from dedup.decode import Decoder


def reader(decoder: Decoder) -> tuple[Read, pa.DataType]:
    """What reads a body as the record that `decoder.writer` describes, and the type of its answers. Raises ConfigError."""
    written = schemas.loaded(decoder.writer or "")
    return read_by(library().parse_schema(plain(written)), None), record_type(written)


def read_by(writer: Any, wanted: Any) -> Read:
    """What reads bytes that hold one record and nothing behind it.

    Args:
        writer: the schema the bytes were written with, as fastavro parsed it.
        wanted: the schema to resolve it to, parsed; None: its own.
    """
    fastavro = library()
    mismatch = fastavro.read.SchemaResolutionError

    def whole(body: bytes) -> Any:
        stream = io.BytesIO(body)
        try:
            row = fastavro.schemaless_reader(stream, writer, wanted)
        except mismatch as error:
            raise Wrong from error
        if stream.read(1):
            raise Wrong
        return row

    return whole


def record_type(schema: schemas.Json) -> pa.DataType:
    """The type of the rows that are read by this schema, each field nullable. Raises ConfigError."""
    return schemas.nullable(pa.struct(list(schemas.from_avro(schema))))


def library() -> Any:
    """fastavro. Raises ConfigError where it is missing."""
    try:
        import fastavro
    except ImportError as error:
        raise ConfigError("Decoding Avro without Spark, or by a schema registry, needs fastavro: pip install 'dedup[avro]'.") from error
    return fastavro


def plain(node: Any) -> Any:
    """The schema without logical types of times and dates: their numbers fit Arrow as they are, and Python's types are narrower."""
    if isinstance(node, list):
        return [plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    keep = {key: plain(value) for key, value in node.items() if key != "logicalType"}
    return keep | ({"logicalType": "decimal"} if node.get("logicalType") == "decimal" else {})
