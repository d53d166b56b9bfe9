"""SHA-256 of whole columns by DataFusion: a fifth of the CPU that a loop of hashlib takes, and without Python's lock.

Optional (`dedup[fast]`). The digests are the same ones. Called by dedup/arrow_keys.py.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

ENOUGH = 2_000
"""Values from which on it pays: a plan is made for each call, which takes about a millisecond."""


def can_hash(count: int) -> bool:
    """Whether so many values should be hashed here.

    Not in a forked child of the process that began: DataFusion's threads stay with the parent, and a child would wait for them.
    """
    return count >= ENOUGH and _installed() and os.getpid() == _home()


def sha256(column: pa.Array) -> bytes:
    """The digests of these binary values one after another, 32 bytes each, in their order. None of them may be null."""
    context, digest = _engine()
    rows = context.from_arrow(pa.table({"value": column}))
    hashed = rows.select(digest).to_arrow_table()[0].combine_chunks()
    assert len(hashed) == len(column) and not hashed.null_count
    return bytes(hashed.cast(pa.binary(32)).buffers()[1])


@cache
def _installed() -> bool:
    return find_spec("datafusion") is not None


@cache
def _home() -> int:
    """The process that hashed first."""
    return os.getpid()


@cache
def _engine() -> tuple[Any, Any]:
    from datafusion import SessionConfig, SessionContext, col, functions

    # One partition: of several the one that is ready first would come first.
    return SessionContext(SessionConfig().with_target_partitions(1)), functions.sha256(col("value"))
