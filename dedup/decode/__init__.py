"""Decoding: what turns a body into the column `data`, and tells apart what does not decode.

`json(schema)`, `avro(schema)`, `confluent_avro` and `azure_avro` make a Decoder where a consumer is made. It is only a description, so it
pickles. dedup/decode/bodies.py follows it wherever the rows are: on the driver, in Spark's tasks, without Spark.
"""

from __future__ import annotations

import json as _json
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from checkpoint.errors import ConfigError
from dedup.decode import avro_bodies, schemas
from dedup.decode.registry import Azure, Confluent, Registry

Schema: TypeAlias = schemas.Json | str | pa.Schema
"""A JSON Schema or an Avro schema, as a mapping or as JSON text, or an Arrow schema."""


@dataclass(frozen=True)
class Decoder:
    """How bodies decode. Made by `json`, `avro`, `confluent_avro` and `azure_avro`."""

    format: Literal["json", "avro"]
    schema: pa.Schema
    """Of `data`. A field that is not nullable must be there: without it the body does not decode."""
    writer: str | None = None
    """JSON text of the Avro schema that bodies were written with."""
    registry: Registry | None = None
    """Where the schemas are that bodies name."""
    reader: str | None = None
    """With a registry: JSON text of the Avro schema that all bodies are read as."""

    @property
    def type(self) -> pa.DataType:
        """Type of the column `data`: the schema, every field of it nullable."""
        return schemas.data_type(self.schema)


def json(schema: Schema) -> Decoder:
    """Decode bodies that hold one JSON object, in UTF-8.

    A body does not decode when it is empty, no JSON, not an object, has anything behind the object, lacks a required field, or has
    a value of another type than the schema says. Fields the schema does not name are ignored; null and missing are the same.

    Args:
        schema: a JSON Schema, an Avro schema or an Arrow schema. Dates and times are strings as in RFC 3339, times with offset.

    Raises:
        ConfigError: the schema has something that columns cannot hold; names its path.
    """
    found = _arrow(schema)
    _refuse_in_json(found.types, "$")
    return Decoder("json", found)


def avro(schema: Schema) -> Decoder:
    """Decode bodies that hold one Avro record in binary encoding, without a header or a schema in front of it.

    A body does not decode when bytes are missing, left over or impossible, or a string in it is not UTF-8.

    Args:
        schema: the Avro schema that the bodies were written with; or a JSON Schema or an Arrow schema, where the writer's is the
            record with the same fields in this order and nullable ones as the union of null and the type.

    Raises:
        ConfigError: the schema has something that columns cannot hold; names its path. Or an array of what takes no bytes.
    """
    found = _arrow(schema)
    given = None if isinstance(schema, pa.Schema) else schemas.loaded(schema)
    writer = given if given is not None and schemas.is_avro(given) else schemas.to_avro(found)
    try:
        avro_bodies.refuse_endless(writer)
    except ValueError as error:
        raise ConfigError(f"The schema has {error}.") from error
    return Decoder("avro", found, _json.dumps(writer))


def confluent_avro(registry: Confluent | str, *, schema: schemas.Json | str | None = None, subject: str | None = None) -> Decoder:
    """Decode bodies as Confluent's serialisers write them: a zero byte, the schema's id in four bytes, one Avro record.

    Each body is read by the schema it names, resolved to one schema for all (Avro's rules: promoted types, defaults, aliases).
    An id that the registry does not know makes the body UNDECODABLE; while the registry does not answer, nothing is decided.

    Args:
        registry: `registry.Confluent(...)`, or its address.
        schema: the Avro schema that all bodies are read as.
        subject: in its place: the latest schema of this subject, asked for once, now; pickled copies keep what it was.

    Raises:
        ConfigError: not exactly one of schema and subject, there is no such subject, or its schema has something that columns
            cannot hold; fastavro is not installed.
        RegistryUnavailable: the subject cannot be asked for.
    """
    return _registered(Confluent(registry) if isinstance(registry, str) else registry, schema, subject)


def azure_avro(registry: Azure, *, schema: schemas.Json | str | None = None, subject: str | None = None) -> Decoder:
    """Decode bodies as the clients of Azure's schema registry write them: one Avro record, its id in the content type or before it.

    The content type, `avro/binary+<id>`, is looked for among the events' `properties`; all else is as in `confluent_avro`.

    Args:
        registry: `registry.Azure(...)`.
        schema: the Avro schema that all bodies are read as.
        subject: in its place, as `group/name`: the latest version of this schema, asked for once, now; pickled copies keep what it was.

    Raises:
        ConfigError: not exactly one of schema and subject, there is no such subject, or its schema has something that columns
            cannot hold; fastavro is not installed.
        RegistryUnavailable: the subject cannot be asked for.
    """
    return _registered(registry, schema, subject)


def _registered(registry: Registry, schema: schemas.Json | str | None, subject: str | None) -> Decoder:
    if (schema is None) == (subject is None):
        raise ConfigError("Give either schema=, the Avro schema that all bodies are read as, or subject=, whose latest one it is.")
    given = schemas.loaded(registry.latest(subject) if subject is not None else schema or "")
    if not schemas.is_avro(given):
        raise ConfigError("Bodies of a registry are read as an Avro record: its schema has the type 'record'.")
    found, reader = _arrow(given), _json.dumps(given)
    avro_bodies.check(reader)
    return Decoder("avro", found, registry=registry, reader=reader)


def _arrow(schema: Schema) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        found = schema
    else:
        given = schemas.loaded(schema)
        found = schemas.from_avro(given) if schemas.is_avro(given) else schemas.from_json_schema(given)
    if not len(found):
        raise ConfigError("The schema has no fields.")
    return schemas.normal(found)


def _refuse_in_json(kinds: list[pa.DataType], path: str) -> None:
    for kind in kinds:
        if pa.types.is_binary(kind):
            raise ConfigError("JSON has no bytes; describe the field as a string and decode it in the handler (Spark: unbase64).")
        _refuse_in_json([kind.field(i).type for i in range(kind.num_fields)], path)
