"""Messages as the service sees them: sections that are looked into, a batch taken apart, an event stamped with where it stands."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from kit.eventhubs.codec import Described, Millis, Sym, ULong, decode, encode

HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = range(0x70, 0x79)
BATCH = 0x80013700
"""Message format of a batch: each data section is a message."""


def sections(raw: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(code, begin, begin of the value, end) of each section."""
    at = 0
    while at < len(raw):
        begin = at
        code, value = decode(raw, at + 1)
        at = _end(raw, value)
        yield int(code), begin, value, at


def _end(raw: bytes, at: int) -> int:
    kind = raw[at]
    if kind == 0xA0:
        return at + 2 + raw[at + 1]
    if kind == 0xB0:
        return at + 5 + int(struct.unpack_from(">I", raw, at + 1)[0])
    return decode(raw, at)[1]


def read(raw: bytes, *wanted: int) -> dict[int, Any]:
    """The values of these sections, where they are there."""
    return {code: decode(raw, value)[0] for code, _, value, _ in sections(raw) if code in wanted}


def unpack(raw: bytes) -> list[bytes]:
    """The messages of a batch."""
    return [decode(raw, value)[0] for code, _, value, _ in sections(raw) if code == DATA]


def stamped(raw: bytes, sequence_number: int, offset: str, enqueued: int, key: Any) -> bytes:
    """The message as the service hands it out, with the annotations that say where it stands."""
    head, annotations, rest = b"", dict[Any, Any](), bytearray()
    for code, begin, value, end in sections(raw):
        if code == HEADER:
            head = raw[begin:end]
        elif code == ANNOTATIONS:
            annotations = {Sym(name): item for name, item in (decode(raw, value)[0] or {}).items()}
        elif code != DELIVERY_ANNOTATIONS:
            rest += raw[begin:end]
    if key is not None:
        annotations.setdefault(Sym("x-opt-partition-key"), key)
    annotations[Sym("x-opt-sequence-number")] = sequence_number
    annotations[Sym("x-opt-offset")] = offset
    annotations[Sym("x-opt-enqueued-time")] = Millis(enqueued)
    return bytes(head) + section(ANNOTATIONS, annotations) + bytes(rest)


def section(code: int, value: Any) -> bytes:
    """One section."""
    return encode(Described(ULong(code), value))
