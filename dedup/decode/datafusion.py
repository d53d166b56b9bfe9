"""SHA-256 of whole columns by DataFusion: a fifth to a quarter of the CPU of a loop of hashlib, and without Python's lock.

Optional (`dedup-spark[fast]`). The digests are the same ones. Called by dedup/decode/hashing.py.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from types import ModuleType

import pyarrow as pa

log = logging.getLogger("dedup")

ENOUGH = 2_000
"""Values from which on it pays: a plan is made for each call, which takes about a millisecond."""

_SIZE = 32
"""Bytes of a digest."""


def can_hash(count: int) -> bool:
    """Whether so many values should be hashed here.

    Not in a forked child of the process that began: DataFusion has threads, and those stay with the parent.
    """
    return count >= ENOUGH and _module() is not None and os.getpid() == _home()


def digests(column: pa.Array) -> bytes | None:
    """As `sha256`, or None where hashlib should hash: few values, no DataFusion, a forked child, or a failure of DataFusion's."""
    if not can_hash(len(column)):
        return None
    try:
        return sha256(column)
    except Exception as error:  # noqa: BLE001 - hashlib comes to the same digests, or says what is wrong
        log.warning("DataFusion could not hash %d values; hashlib hashes them: %s", len(column), error)
        return None


def sha256(column: pa.Array) -> bytes:
    """The digests of these binary values one after another, 32 bytes each, in their order. None of them may be null."""
    engine = _module()
    assert engine is not None
    # A context of its own, since one keeps the tables that it was given. One partition: of several the quickest would come first.
    context = engine.SessionContext(engine.SessionConfig().with_target_partitions(1))
    rows = context.from_arrow(pa.table({"value": column}))
    hashed = rows.select(engine.functions.sha256(engine.col("value"))).to_arrow_table()[0]
    digests = b"".join(map(_bytes, hashed.chunks))
    if hashed.null_count or len(digests) != _SIZE * len(column):
        raise RuntimeError(f"DataFusion gave {len(digests)} bytes of digests for {len(column)} values.")
    return digests


def _bytes(digests: pa.Array) -> memoryview:
    fixed = digests.cast(pa.binary(_SIZE))
    return memoryview(fixed.buffers()[1])[_SIZE * fixed.offset : _SIZE * (fixed.offset + len(fixed))]


@cache
def _module() -> ModuleType | None:
    try:
        import datafusion
        from datafusion import SessionConfig, SessionContext, col, functions  # noqa: F401 - what is needed of it is there
    except ModuleNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        log.warning("DataFusion cannot be used; hashlib hashes in its place: %s", error)
        return None
    return datafusion


@cache
def _home() -> int:
    """The process that hashed first."""
    return os.getpid()
