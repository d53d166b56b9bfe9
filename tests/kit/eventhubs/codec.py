"""AMQP 1.0 types as bytes, both ways; and frames.

pyamqp reads performatives by index without looking at their length, so each one sent here carries all its fields.
"""

from __future__ import annotations

import struct
import uuid
from typing import Any

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
FIELDS = {OPEN: 10, BEGIN: 8, ATTACH: 14, FLOW: 11, TRANSFER: 11, DISPOSITION: 6, DETACH: 3, END: 1, CLOSE: 1}
"""Performative -> how many fields it has."""

SASL, AMQP = 1, 0
"""Frame types."""


class Sym(str):
    """A symbol."""


class UByte(int):
    """8 bits."""


class UInt(int):
    """32 bits."""


class ULong(int):
    """64 bits."""


class Millis(int):
    """A timestamp."""


class Described:
    """A value with a descriptor."""

    __slots__ = ("descriptor", "value")

    def __init__(self, descriptor: Any, value: Any) -> None:
        self.descriptor, self.value = descriptor, value


def encode(value: Any) -> bytes:
    """One value, with its constructor."""
    if value is None:
        return b"\x40"
    if isinstance(value, bool):
        return b"\x41" if value else b"\x42"
    if isinstance(value, Described):
        return b"\x00" + encode(value.descriptor) + encode(value.value)
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(bytes(value), b"\xa0", b"\xb0")
    if isinstance(value, str):
        return _sized(value.encode(), *((b"\xa3", b"\xb3") if isinstance(value, Sym) else (b"\xa1", b"\xb1")))
    if isinstance(value, uuid.UUID):
        return b"\x98" + value.bytes
    if isinstance(value, float):
        return b"\x82" + struct.pack(">d", value)
    if isinstance(value, dict):
        body = b"".join(encode(key) + encode(item) for key, item in value.items())
        return b"\xd1" + struct.pack(">II", len(body) + 4, 2 * len(value)) + body
    body = b"".join(map(encode, value))
    return b"\xd0" + struct.pack(">II", len(body) + 4, len(value)) + body


def _integer(value: int) -> bytes:
    if isinstance(value, UByte):
        return b"\x50" + bytes((value,))
    if isinstance(value, UInt):
        return b"\x43" if value == 0 else b"\x70" + struct.pack(">I", value)
    if isinstance(value, ULong):
        return b"\x53" + bytes((value,)) if value < 256 else b"\x80" + struct.pack(">Q", value)
    if isinstance(value, Millis):
        return b"\x83" + struct.pack(">q", value)
    return b"\x55" + struct.pack(">b", value) if -128 <= value < 128 else b"\x81" + struct.pack(">q", value)


def _sized(body: bytes, short: bytes, long: bytes) -> bytes:
    return (short + bytes((len(body),)) if len(body) < 256 else long + struct.pack(">I", len(body))) + body


def symbols(items: list[str]) -> bytes:
    """An array of symbols."""
    body = b"".join(struct.pack(">I", len(item)) + item.encode() for item in items)
    return b"\xf0" + struct.pack(">II", len(body) + 5, len(items)) + b"\xb3" + body


_FIXED = {0x50: "B", 0x51: "b", 0x52: "B", 0x53: "B", 0x54: "b", 0x55: "b", 0x60: "H", 0x61: "h", 0x70: "I", 0x71: "i"}
_FIXED |= {0x72: "f", 0x80: "Q", 0x81: "q", 0x82: "d", 0x83: "q"}
_CONSTANT: dict[int, Any] = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}


def decode(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The value that begins here, and where it ends."""
    kind = data[at]
    if kind == 0x00:
        descriptor, at = decode(data, at + 1)
        value, at = decode(data, at)
        return Described(descriptor, value), at
    return _body(kind, data, at + 1)


def _body(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in _CONSTANT:
        return _CONSTANT[kind], at
    if kind == 0x45:
        return [], at
    if kind == 0x56:
        return bool(data[at]), at + 1
    if kind == 0x98:
        return uuid.UUID(bytes=bytes(data[at : at + 16])), at + 16
    if kind in _FIXED:
        layout = ">" + _FIXED[kind]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    wide, family = bool(kind & 0x10), kind & 0xE0
    size, at = (struct.unpack_from(">I", data, at)[0], at + 4) if wide else (data[at], at + 1)
    if family == 0xA0:
        return _text(kind, bytes(data[at : at + size])), at + size
    end = at + size
    count, at = (struct.unpack_from(">I", data, at)[0], at + 4) if wide else (data[at], at + 1)
    return (_array(data, at, count) if family == 0xE0 else _compound(kind, data, at, count)), end


def _text(kind: int, value: bytes) -> Any:
    return value if kind & 0x0F == 0 else value.decode() if kind & 0x0F == 1 else Sym(value.decode("ascii"))


def _compound(kind: int, data: bytes, at: int, count: int) -> Any:
    items = []
    for _ in range(count):
        item, at = decode(data, at)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)) if kind & 1 else items


def _array(data: bytes, at: int, count: int) -> list[Any]:
    kind, at, items = data[at], at + 1, []
    for _ in range(count):
        item, at = _body(kind, data, at)
        items.append(item)
    return items


def frame(channel: int, code: int, fields: list[Any], payload: bytes = b"", kind: int = AMQP) -> bytes:
    """A whole frame, its performative padded with nulls."""
    padded = [*fields, *[None] * (FIELDS.get(code, 0) - len(fields))]
    body = b"\x00\x53" + bytes((code,)) + encode(padded) + payload
    return struct.pack(">IBBH", len(body) + 8, 2, kind, channel) + body


def performative(body: bytes, offset: int) -> tuple[int, list[Any], bytes]:
    """Code, fields (padded with nulls) and payload of a frame's body."""
    body = body[(offset - 2) * 4 :]
    code, at = decode(body, 1)
    fields, at = decode(body, at)
    return int(code), [*fields, *[None] * (14 - len(fields))], body[at:]


_TRANSFER = struct.Struct(">IBBH4sIIBIBIBBI8s")
_SETTLED, _MORE = b"\x43\x41\x42\x40\x40\x40\x40\x40", b"\x43\x41\x41\x40\x40\x40\x40\x40"
_OVERHEAD = _TRANSFER.size


def transfer(channel: int, handle: int, delivery: int, tag: int, message: bytes, limit: int) -> bytes:
    """A settled delivery of an encoded message, in as many frames as the limit asks for."""
    room = limit - _OVERHEAD
    if len(message) <= room:
        return _transfer_head(channel, handle, delivery, tag, len(message), _SETTLED) + message
    cuts = range(0, len(message), room)
    pieces = [message[at : at + room] for at in cuts]
    flags = [_MORE] * (len(pieces) - 1) + [_SETTLED]
    return b"".join(_transfer_head(channel, handle, delivery, tag, len(p), f) + p for p, f in zip(pieces, flags, strict=True))


def _transfer_head(channel: int, handle: int, delivery: int, tag: int, size: int, flags: bytes) -> bytes:
    return _TRANSFER.pack(
        _OVERHEAD + size, 2, AMQP, channel, b"\x00\x53\x14\xd0", 28, 11, 0x70, handle, 0x70, delivery, 0xA0, 4, tag, flags
    )
