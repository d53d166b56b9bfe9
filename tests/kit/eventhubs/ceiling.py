"""How fast the double itself is: a client that looks at nothing but bytes takes everything it sends."""

from __future__ import annotations

import socket
import struct
import time
import urllib.parse
from base64 import b64encode
from hashlib import sha256
from hmac import HMAC

from kit.eventhubs import codec
from kit.eventhubs.codec import Described, Sym, UByte, UInt, ULong
from kit.eventhubs.control import Double
from kit.eventhubs.messages import APPLICATION, PROPERTIES, VALUE, section
from kit.eventhubs.service import KEY, KEY_NAME

WINDOW = 2**31 - 1


def ceiling(double: Double, hub: str, partition: int, events: int) -> float:
    """Events a second that one connection gets of this partition, from the first on; there must be so many."""
    before = double.stats().get("delivered", 0)
    with socket.create_connection(("127.0.0.1", double.port)) as sock:
        sock.sendall(_hello(double.host))
        _answered(sock, codec.DISPOSITION)
        sock.sendall(_attach(f"{hub}/ConsumerGroups/$Default/Partitions/{partition}"))
        _answered(sock, codec.ATTACH)
        started = time.perf_counter()
        sock.sendall(_credit(2, events))
        _drain(sock, events)
        seconds = time.perf_counter() - started
    assert double.stats()["delivered"] - before == events
    return events / seconds


def _hello(host: str) -> bytes:
    audience, expiry = f"sb://{host}/", str(int(time.time()) + 600)
    signed = f"{urllib.parse.quote_plus(audience)}\n{expiry}".encode()
    signature = b64encode(HMAC(KEY.encode(), signed, sha256).digest()).decode()
    token = "SharedAccessSignature " + urllib.parse.urlencode({"sr": audience, "sig": signature, "se": expiry, "skn": KEY_NAME})
    put = section(PROPERTIES, ["1", *[None] * 12]) + section(APPLICATION, {"operation": "put-token"}) + section(VALUE, token)
    target = Described(ULong(0x29), ["$cbs"])
    return (
        b"AMQP\x03\x01\x00\x00"
        + codec.frame(0, 0x41, [Sym("ANONYMOUS"), None, None], kind=codec.SASL)
        + b"AMQP\x00\x01\x00\x00"
        + codec.frame(0, codec.OPEN, ["ceiling", host, UInt(65_536), 255])
        + codec.frame(0, codec.BEGIN, [None, UInt(0), UInt(WINDOW), UInt(WINDOW)])
        + codec.frame(0, codec.ATTACH, ["cbs", UInt(0), False, UByte(0), UByte(0), Described(ULong(0x28), ["$cbs"]), target])
        + codec.frame(0, codec.TRANSFER, [UInt(0), UInt(0), b"\0\0\0\0", UInt(0), False, False], put)
    )


def _attach(address: str) -> bytes:
    return codec.frame(
        0, codec.ATTACH, ["r", UInt(2), True, UByte(1), UByte(0), Described(ULong(0x28), [address]), Described(ULong(0x29), ["r"])]
    )


def _credit(handle: int, credit: int) -> bytes:
    return codec.frame(0, codec.FLOW, [UInt(0), UInt(WINDOW), UInt(1), UInt(WINDOW), UInt(handle), UInt(0), UInt(credit)])


def _answered(sock: socket.socket, code: int) -> None:
    """Wait for this performative; what is before it does not matter."""
    seen = b""
    while b"\x00\x53" + bytes((code,)) not in seen:
        seen += sock.recv(65_536)


def _drain(sock: socket.socket, events: int) -> None:
    buffer, left = bytearray(), events
    while left:
        buffer += sock.recv(1 << 20)
        at = 0
        while at + 4 <= len(buffer) and at + (size := struct.unpack_from(">I", buffer, at)[0]) <= len(buffer):
            at, left = at + size, left - 1
        del buffer[:at]
