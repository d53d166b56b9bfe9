"""Which partition a key belongs to: the hash with which the service spreads keys, so that senders who leave it to the service agree.

Jenkins' lookup3. The same numbers come out of Microsoft's clients for .NET, Java and Rust, whose authors took it from the service's code;
azure-eventhub's own buffered producer differs from them where the hash is negative. Pure. Called by outbox.py.

Source: Azure/azure-sdk-for-net, pull request 25081, and its PartitionResolverTests, read 2026-11-22.
"""

from __future__ import annotations

import struct
from functools import lru_cache

_BITS = 0xFFFFFFFF
_WORDS = struct.Struct("<III")


@lru_cache(65_536)
def partition_of(key: str, partitions: int) -> int:
    """The number of its partition."""
    return abs(hash_code(key)) % partitions


def hash_code(key: str) -> int:
    """16 bits with a sign."""
    data = key.encode()
    a = b = c = (0xDEADBEEF + len(data)) & _BITS
    last = max(0, len(data) - 1) // 12 * 12
    for at in range(0, last, 12):
        a, b, c = _mixed(*_added((a, b, c), data[at : at + 12]))
    if data:
        a, b, c = _final(*_added((a, b, c), data[last:]))
    code = (b ^ c) & 0xFFFF
    return code - 0x10000 if code & 0x8000 else code


def _added(state: tuple[int, int, int], piece: bytes) -> tuple[int, ...]:
    return tuple(have + word & _BITS for have, word in zip(state, _WORDS.unpack(piece.ljust(12, b"\0")), strict=True))


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (4, 6, 8, 16, 19, 4):
        a, b, c = b, c + b & _BITS, (a - c & _BITS) ^ _rotated(c, turn)
    return a, b, c


def _final(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c, a, b = a, b, (c ^ b) - _rotated(b, turn) & _BITS
    return c, a, b  # seven turns of three


def _rotated(word: int, turn: int) -> int:
    return (word << turn | word >> 32 - turn) & _BITS
