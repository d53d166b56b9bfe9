"""A consumer with a few reserved keys and their files, and what a test asks of them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoint.holders import take_epoch
from deadletter.store import KEYS, Commit
from dedup.delta import DeltaStore, key_files
from dedup.delta.key_objects import KeyObjects
from dedup.delta.ledger import KEYS as RESERVATIONS
from dedup.delta.ledger import Ledger
from kit import delta_kit as kit
from kit.delta_kit import open_store

TINY = {"flush_rows": 4, "run_rows": 24}


def key(number: int) -> bytes:
    """Keys in no order, from the lowest to the highest; some share their first half."""
    return (number * 7919 % 13 * (2**64 // 13)).to_bytes(8, "big") + (number * 104729 % 2**64).to_bytes(8, "big")


def column(numbers: Any) -> pa.Array:
    """Of keys."""
    return pa.array([key(number) for number in numbers], pa.binary(16))


def decide(store: DeltaStore, number: int, some: Any) -> None:
    """One decision that reserves these."""
    with store.begin(kit.NAME, number) as transaction:
        asked = pa.table([column(some), pa.array(list(some), pa.int64())], schema=KEYS)
        transaction.ask(asked["key"])
        transaction.reserve(asked)
        transaction.execute(Commit())


def known(store: DeltaStore, most: int = 100) -> list[int]:
    """Which of these the store knows now."""
    with store._states.caught_up(kit.NAME) as state:
        return np.flatnonzero(state.probe(column(range(most)))[0]).tolist()


def filled(folder: Path, decisions: int = 9, **options: Any) -> DeltaStore:
    """A store with five keys of each decision."""
    store = open_store(folder, **options)
    number = take_epoch(store, kit.NAME, "filling", 1.0, force=True).epoch
    for first in range(0, 5 * decisions, 5):
        decide(store, number, range(first, first + 5))
    assert known(store) == list(range(5 * decisions)) and wrong(store) == []
    return store


def wrong(store: DeltaStore) -> list[str]:
    """What `problems` says of keys; these decisions have no batch records."""
    return [told for told in store.problems(kit.NAME) if "reserved keys" in told or "more than once" in told]


def key_tables(folder: Path) -> list[Path]:
    """The ledger's files with reservations, the oldest first."""
    files = (folder / "state" / "ledger").rglob("*.parquet")
    return sorted((p for p in files if "reservation" in pq.read_table(p)["kind"].to_pylist()), key=lambda p: p.stat().st_mtime_ns)


def list_of(folder: Path) -> Path:
    """The list of the consumer's files."""
    return folder / "state" / "keys" / kit.NAME / key_files.LIST


def folder_of(keys_folder: Path) -> Path:
    """That of the consumer, where one store uses it."""
    (found,) = keys_folder.glob(f"{kit.NAME}@*")
    return found


def tomorrow() -> dt.date:
    """In UTC."""
    return (dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).date()


def copies_of(store: DeltaStore) -> KeyObjects:
    """The copies of the consumer's files beside the ledger."""
    found = store._states.of(kit.NAME).keys.copies
    assert found is not None
    return found


def copied(store: DeltaStore) -> DeltaStore:
    """The store, once everything is copied."""
    assert copies_of(store).wait(30.0)
    return store


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the last decision of each file of reservations that is read from a ledger."""
    found, read = list[int](), Ledger.read

    def noted(ledger: Ledger, files: Any, *rest: Any) -> Any:
        found.extend(file.last for file in files if file.section == RESERVATIONS)
        return read(ledger, files, *rest)

    monkeypatch.setattr(Ledger, "read", noted)
    return found
