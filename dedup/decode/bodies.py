"""Bodies to the column `data`: JSON and Avro, also Avro that names its schema in a registry.

The same on the driver, in Spark's tasks and without Spark. A batch names few schemas, so each is resolved once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from checkpoint.errors import RegistryUnavailable
from dedup.decode import Decoder, avro_bodies, hashing, json_bodies, values
from dedup.decode.registry import Registry, schema_of
from dedup.decode.values import FAILURES, WHOLE, Read, Unreadable

log = logging.getLogger("dedup")

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


def reasons(bodies: pa.Array, properties: pa.Array, decoder: Decoder) -> list[Unreadable]:
    """Why each of these bodies does not decode. A second look, one by one: for bodies that `decode` has found, of which none is null.

    Does not raise: where the reason cannot be found, as while a registry does not answer, it says no more than that.
    """
    look = _second_look(decoder)
    return [_looked(look, body, kind) for body, kind in zip(bodies.to_pylist(), _kinds(properties, decoder), strict=True)]


Look = Callable[[bytes, bytes | None], Unreadable]
"""(body, content type) -> why it does not decode."""


def _second_look(decoder: Decoder) -> Look:
    if decoder.registry is not None:
        return partial(_why_named, decoder=decoder)
    if decoder.format == "json":
        read = json_bodies.reader(decoder.schema)
        return lambda body, _: _why(body, read, json_bodies.reason, decoder.type, decoder.type)
    writer = decoder.writer or ""
    own, kind = avro_bodies.own_reader(writer)
    reason = partial(avro_bodies.reason, written=writer)
    return lambda body, _: _why(body, own, reason, kind, decoder.type)


def _looked(look: Look, body: bytes, content_type: bytes | None) -> Unreadable:
    try:
        return look(body, content_type)
    except Exception as error:  # noqa: BLE001 - the verdict stands; a batch must not fail for a reason that nobody finds
        log.warning("cannot tell why a body does not decode: %s: %s", type(error).__name__, error)
        return UNKNOWN


def _why(
    body: bytes, read: Read, reason: Callable[[bytes, BaseException], Unreadable], kind: pa.DataType, final: pa.DataType
) -> Unreadable:
    if not body:
        return Unreadable(WHOLE, "is empty")
    try:
        row = read(body)
    except FAILURES as error:
        return reason(body, error)
    return values.misfit(row, kind, final) or UNKNOWN


UNKNOWN = Unreadable(WHOLE, "does not decode")
"""What is said where the second look finds nothing wrong: a schema was not known before, and is by now."""


def _why_named(body: bytes, content_type: bytes | None, decoder: Decoder) -> Unreadable:
    registry, wanted = _registry(decoder)
    framed = registry.framed(body, content_type)
    if framed is None:
        return Unreadable(WHOLE, "is empty" if not body else registry.unframed)
    ident, start = framed
    try:
        written = schema_of(registry, ident)
    except RegistryUnavailable:
        return UNKNOWN
    read = _reader(ident, written, wanted)
    reason = partial(avro_bodies.reason, written=written or "", wanted=wanted)
    return _why(body[start:], read, reason, avro_bodies.kind(wanted), decoder.type)


def _named(bodies: pa.Array, properties: pa.Array, decoder: Decoder) -> pa.Array:
    """As `decode`, for bodies that name their schema.

    A body does not decode where it names no schema, one that the registry does not know or that is not Avro's, one that cannot be
    read as the decoder's, or where its bytes are not a record of it.
    """
    registry, wanted = _registry(decoder)
    given, kinds = bodies.to_pylist(), _kinds(properties, decoder)
    framed = [None if body is None else registry.framed(body, kind) for body, kind in zip(given, kinds, strict=True)]
    readers = {ident: _reader(ident, schema_of(registry, ident), wanted) for ident in sorted({one[0] for one in framed if one is not None})}
    pairs = [None if one is None else (readers[one[0]], body[one[1] :]) for one, body in zip(framed, given, strict=True)]
    return values.column(pairs, lambda pair: pair[0](pair[1]), avro_bodies.kind(wanted), decoder.type)


def _registry(decoder: Decoder) -> tuple[Registry, str]:
    """The registry, and JSON text of the schema that all bodies are read as."""
    if decoder.registry is None or decoder.reader is None:
        raise ValueError("The decoder has no registry.")
    return decoder.registry, decoder.reader


def _kinds(properties: pa.Array, decoder: Decoder) -> Sequence[bytes | None]:
    """The content type of each event, where the registry looks at it."""
    if decoder.registry is None or not decoder.registry.content_type:
        return [None] * len(properties)
    found: Sequence[bytes | None] = hashing.first_property(properties, CONTENT_TYPE).to_pylist()
    return found


def _reader(ident: str, written: str | None, wanted: str) -> Read:
    if written is None:
        return avro_bodies.refusing(f"names schema {ident}, which the registry does not know")
    return avro_bodies.reader(ident, written, wanted)
