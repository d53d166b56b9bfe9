"""A store that uses its filter of known keys for every transaction, and what tests ask of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from deadletter.store import Commit
from dedup.postgres import PostgresStore, key_filter, wire
from dedup.postgres.key_filter import KnownFilter
from kit.pg_help import keys


def filtering(postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    """One that uses its filter for every transaction, and reads it whenever it has none."""
    monkeypatch.setattr(key_filter, "FEW", 0)
    monkeypatch.setattr(key_filter, "_CHEAPER", 10**9)
    made = PostgresStore(postgres)
    yield made
    made.close()


def chunk(store: PostgresStore, first: int, last: int, consumer: str = "shop") -> int:
    """Reserve the keys first..last, and commit; returns how many of them were known. What is being read is read before."""
    read(store)
    with store.begin_letters(consumer) as tx:
        known = tx.reserve(keys(range(first, last + 1))).num_rows
        tx.execute(Commit())
    return known


def read(store: PostgresStore) -> KnownFilter:
    """Wait for the reader; returns the filter."""
    if store.known_filter._reader is not None:
        store.known_filter._reader.join(20)
    return store.known_filter


def has_read(store: PostgresStore) -> bool:
    """Whether there is a filter."""
    return read(store)._whole is not None


def digests(count: int, name: str = "") -> wire.Keys:
    """Keys as they are."""
    return np.frombuffer(b"".join(hashlib.sha256(f"{name}{i}".encode()).digest()[:16] for i in range(count)), dtype="V16")
