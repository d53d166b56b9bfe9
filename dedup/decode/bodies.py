"""Bodies to the column `data`: JSON and Avro, also Avro that names its schema in a registry.

The same on the driver, in Spark's tasks and without Spark. A batch names few schemas, so each is resolved once.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dedup.decode import Decoder, avro_bodies, hashing, json_bodies, values
from dedup.decode.registry import Framed, Registry, schema_of
from dedup.decode.values import Read

CONTENT_TYPE = ("content-type",)
"""Names of the property that holds the content type, in AMQP and in the headers of Azure's clients for Kafka."""


def decode(bodies: pa.Array, properties: pa.Array, decoder: Decoder) -> pa.Array:
    """`data` for each body; null where there is none, and where it does not decode.

    Raises:
        RegistryUnavailable: a schema is needed that is not known yet, and the registry cannot be asked.
    """
    if decoder.registry is not None:
        return _named(bodies, properties, decoder)
    if decoder.format == "avro":
        return values.column(bodies.to_pylist(), *avro_bodies.own_reader(decoder.writer or ""), decoder.type)
    return json_bodies.decode(bodies, decoder.schema)


def _named(bodies: pa.Array, properties: pa.Array, decoder: Decoder) -> pa.Array:
    """As `decode`, for bodies that name their schema.

    A body does not decode where it names no schema, one that the registry does not know or that is not Avro's, one that cannot be
    read as the decoder's, or where its bytes are not a record of it.
    """
    registry, wanted = decoder.registry, decoder.reader
    if registry is None or wanted is None:
        raise ValueError("The decoder has no registry.")
    given = bodies.to_pylist()
    framed = _framed(given, properties, registry)
    readers = _readers({one[0] for one in framed if one is not None}, registry, wanted)
    pairs = [None if one is None else (readers[one[0]], body[one[1] :]) for one, body in zip(framed, given, strict=True)]
    return values.column(pairs, lambda pair: pair[0](pair[1]), avro_bodies.kind(wanted), decoder.type)


def _framed(bodies: Sequence[bytes | None], properties: pa.Array, registry: Registry) -> list[Framed | None]:
    given: Sequence[bytes | None] = [None] * len(bodies)
    if registry.content_type:
        given = hashing.first_property(properties, CONTENT_TYPE).to_pylist()
    return [None if body is None else registry.framed(body, kind) for body, kind in zip(bodies, given, strict=True)]


def _readers(idents: set[str], registry: Registry, wanted: str) -> dict[str, Read]:
    found = {ident: schema_of(registry, ident) for ident in sorted(idents)}
    return {ident: avro_bodies.never if text is None else avro_bodies.reader(ident, text, wanted) for ident, text in found.items()}
