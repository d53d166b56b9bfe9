"""Decoding: what turns a body into the column `data`, and tells apart what does not decode.

`json(schema)`, `avro(schema)`, `confluent_avro` and `azure_avro` make a Decoder where a consumer is made. It is only a description, so it
pickles. dedup/decode/bodies.py follows it wherever the rows are: on the driver, in Spark's tasks, without Spark.
"""

from __future__ import annotations

import json as _json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeGuard

import pyarrow as pa

from checkpoint.errors import ConfigError
from dedup.decode import avro_bodies, json_schemas, schemas, spark_schemas
from dedup.decode.registry import Azure, Confluent, Registry

Schema: TypeAlias = spark_schemas.SparkSchema | pa.Schema | schemas.Json | str
"""What the fields of a body are: a StructType of Spark, DDL text, an Arrow schema, a JSON Schema or an Avro schema.

A StructType, a JSON Schema and an Avro schema may also be their JSON form, as a mapping or as text.
"""


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
    Of a name that occurs twice in an object the last value counts, and in a map the body does not decode. A whole number is written without
    a decimal point and without an exponent: 1.0 does not decode as an integer, although JSON Schema counts it as one.

    Args:
        schema: a StructType, DDL text such as `"id STRING NOT NULL, at TIMESTAMP"`, a pyarrow.Schema, a JSON Schema or an Avro schema.
            Dates and times are strings as in RFC 3339, times with offset (TIMESTAMP_NTZ: without); digits behind microseconds are cut
            off. A decimal is a number, or a string that holds one, and is never rounded: a value with more digits than the column
            has room for does not decode. FLOAT and DOUBLE take the nearest value. A field that is not nullable is required: without
            it the body does not decode. Spark's `from_json` gives null there instead. Of a JSON Schema, types and `required` count;
            constraints on values (enum, pattern, minimum) are not checked.

    Raises:
        ConfigError: the schema has something that columns or JSON cannot hold; names its path, or its JSON pointer in a JSON Schema.
    """
    found = _arrow(schema)
    _refuse_in_json(list(found), "$")
    return Decoder("json", found)


def avro(schema: Schema) -> Decoder:
    """Decode bodies that hold one Avro record in binary encoding, without a header or a schema in front of it.

    A body does not decode when bytes are missing or left over, an enum or a union has a number that the schema does not have, a string is
    not UTF-8, or a decimal has more digits than the schema says. Other bytes that no writer writes are not noticed: any byte but zero is
    true, and a number may take more bytes than it needs.

    Args:
        schema: the Avro schema that the bodies were written with; or another schema, as for `json`, where the writer's is the
            record with the same fields in this order and nullable ones as the union of null and the type.

    Raises:
        ConfigError: the schema has something that columns cannot hold; names its path. Or an array of what takes no bytes; or it is
            not valid Avro; or fastavro is not installed.
    """
    found = _arrow(schema)
    given = schemas.loaded(schema) if _is_json(schema) else {}
    writer = given if schemas.is_avro(given) else schemas.to_avro(found)
    avro_bodies.check(_json.dumps(writer), writer=True)
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
        raise ConfigError(
            "Give one of the two: schema=, the Avro schema that all bodies are read as, or subject=, to take its latest schema."
        )
    given = schemas.loaded(registry.latest(subject) if subject is not None else schema or "")
    if not schemas.is_avro(given):
        raise ConfigError(
            "The schema is not an Avro record. Bodies that name a schema of a registry are read as one: {'type': 'record', ...}."
        )
    found, reader = _arrow(given), _json.dumps(given)
    avro_bodies.check(reader)
    return Decoder("avro", found, registry=registry, reader=reader)


def _arrow(schema: Schema) -> pa.Schema:
    found = _described(schema)
    if not len(found):
        raise ConfigError("The schema has no fields.")
    return schemas.normal(found)


def _described(schema: Schema) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, spark_schemas.SparkSchema):
        return spark_schemas.from_struct(schema)
    if isinstance(schema, str) and not _is_json(schema):
        return spark_schemas.from_ddl(schema)
    given = schemas.loaded(schema)
    if spark_schemas.is_spark(given):
        return spark_schemas.from_json(given)
    return schemas.from_avro(given) if schemas.is_avro(given) else json_schemas.from_json_schema(given)


def _is_json(schema: object) -> TypeGuard[schemas.Json | str]:
    """Whether this is JSON, as a mapping or as text, and no DDL."""
    return isinstance(schema, Mapping) or (isinstance(schema, str) and schema.lstrip()[:1] in ("{", "["))


def _refuse_in_json(fields: list[pa.Field], parent: str) -> None:
    for field in fields:
        path = f"{parent}.{field.name}"
        if pa.types.is_binary(field.type):
            raise ConfigError(
                f"Schema at {path}: JSON has no bytes. Describe the field as a string and decode it in the handler (Spark: unbase64)."
            )
        _refuse_in_json([field.type.field(i) for i in range(field.type.num_fields)], path)
