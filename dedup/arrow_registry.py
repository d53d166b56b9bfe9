"""Decoding bodies that name their schema in a registry: a batch has few schemas, so each is resolved once.

The same function decodes without Spark, on the driver, and in Spark's tasks (dedup/spark/registry.py). Called by dedup/arrow.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from dedup import arrow_keys, arrow_rows, avro_resolve, schema_cache
from dedup.arrow_rows import Read
from dedup.decode import Decoder
from dedup.registry import Framed, Registry

CONTENT_TYPE = ("content-type",)
"""Names of the property that holds the content type, in AMQP and in the headers of Azure's clients for Kafka."""


def decode(bodies: pa.Array, properties: pa.Array, decoder: Decoder) -> tuple[pa.Array, pa.Array]:
    """`data` for each body, null where there is none, and whether a body is there and does not decode.

    A body does not decode where it names no schema, one that the registry does not know or that is not Avro's, one that cannot be
    read as the decoder's, or where its bytes are not a record of it.

    Raises:
        RegistryUnavailable: a schema is needed that is not known yet, and the registry cannot be asked.
    """
    registry, wanted = decoder.registry, decoder.reader
    if registry is None or wanted is None:
        raise ValueError("The decoder has no registry.")
    values = bodies.to_pylist()
    framed = _framed(values, properties, registry)
    readers = _readers({one[0] for one in framed if one is not None}, registry, wanted)
    pairs = [None if one is None else (readers[one[0]], body[one[1] :]) for one, body in zip(framed, values, strict=True)]
    data = arrow_rows.column(pairs, lambda pair: pair[0](pair[1]), avro_resolve.kind(wanted), decoder.type)
    return data, pc.and_(bodies.is_valid(), data.is_null())


def _framed(bodies: Sequence[bytes | None], properties: pa.Array, registry: Registry) -> list[Framed | None]:
    given: Sequence[bytes | None] = [None] * len(bodies)
    if registry.content_type:
        given = arrow_keys.first_property(properties, CONTENT_TYPE).to_pylist()
    return [None if body is None else registry.framed(body, kind) for body, kind in zip(bodies, given, strict=True)]


def _readers(idents: set[str], registry: Registry, wanted: str) -> dict[str, Read]:
    found = {ident: schema_cache.written(registry, ident) for ident in sorted(idents)}
    return {ident: avro_resolve.never if text is None else avro_resolve.reader(ident, text, wanted) for ident, text in found.items()}
