"""What docs/explanation/scale.md computes from constants that were measured: memory, files, requests, bytes, cost. It only reads two files.

A number that was measured as it stands is `Measured`. Python makes a plain float of each sum and product of such numbers: it is computed.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks import scale_keys
from checkpoint.postgres.sql import Statements
from dedup.core.bloom import memory
from dedup.delta.key_objects import PART
from dedup.delta.keys import FLUSH_ROWS
from dedup.delta.upkeep import TARGET_BYTES
from dedup.postgres import PostgresStore
from dedup.postgres.key_filter import _PAGES, _ROOM, _STORED
from dedup.postgres.stored_filter import _AT_ONCE, _LESS, _PART, KIND, StoredFilter, StoredFilters

CONSTANTS, LATEST = (Path(__file__).with_name(name) for name in ("scale.json", "latest.json"))

KEYS, PARTITIONS = (1_000_000, 100_000_000, 1_000_000_000), (1, 10, 100)

EVENTS, BATCH = 1_000_000, 50_000
BATCHES = EVENTS // BATCH

TABLES = 30
"""Of reservations on PostgreSQL: the upkeep begins one in a thirtieth of the retention."""

SEGMENT, MIB, GB = 2**30, 2**20, 1e9

FILTER_MEMORY: int = inspect.signature(PostgresStore).parameters["filter_memory"].default

HEAP_BYTES = 52
"""Of a row of reservations, as `queries.sql` estimates their number; the rest of it is the index."""


FILES, COPIES, NEITHER = "files", "copies", "neither"
"""What a start on Delta has."""


class Measured(float):
    """As it was measured. Arithmetic makes a float of it, which is computed."""


class Constant(NamedTuple):
    """A line of scale.json."""

    constant: str
    value: float
    unit: str
    benchmark: str
    date: str


class Prices(NamedTuple):
    """In USD; the page says where they are from. `write` and `read` are of a thousand requests, the others of a GB and month."""

    write: float = 0.005
    read: float = 0.0004
    objects: float = 0.023
    disk: float = 0.115


PRICES = Prices()


class Case(NamedTuple):
    """A line of a table.

    Args:
        requests: on Delta those that write or list, and those that read; on PostgreSQL calls to the server.
        moved: bytes that are written by events, or read by a start.
        kept: bytes that stay.
    """

    store: str
    keys: int
    partitions: int
    memory: float
    files: float
    requests: tuple[float, ...]
    moved: float
    kept: float
    usd: float


def known(path: Path = CONSTANTS) -> dict[str, Constant]:
    """The constants by name."""
    return {line["constant"]: Constant(**line) for line in json.loads(path.read_text(encoding="utf-8"))}


@cache
def _values() -> dict[str, Measured]:
    found = {name: Measured(one.value) for name, one in known().items()}
    for line in json.loads(LATEST.read_text(encoding="utf-8")):
        found |= {line["measure"]: Measured(line["ours"]), f"{line['measure']}, other": Measured(line["other"])}
    return found


def of(name: str) -> Measured:
    """A constant, or dedup's number of a measure in latest.json; with ", other" that of the other way."""
    return _values()[name]


@cache
def key_files(keys: int) -> scale_keys.KeyFiles:
    """The files of keys of a Delta consumer; simulated."""
    return scale_keys.reserved(keys, BATCH)


@cache
def stored_filters(keys: int) -> tuple[StoredFilter, ...]:
    """Of the packed tables on PostgreSQL."""
    rows = keys // tables(keys)
    words = memory(int(rows * _LESS)) // 16
    width = min(_PART // 8, words)
    return tuple(StoredFilter(str(number), number, KIND, rows, words, 2 * words // width) for number in range(1, tables(keys)))


def halved(keys: int, most: int = FILTER_MEMORY) -> list[int]:
    """How often a process halves each of them, with so many bytes of `filter_memory`."""
    return list(StoredFilters(Statements("dedup"), int(most * _STORED))._times(list(stored_filters(keys))).values())


def loaded(keys: int, most: int = FILTER_MEMORY) -> int:
    """Bytes of the stored filters in a process."""
    return sum(16 * one.words >> times for one, times in zip(stored_filters(keys), halved(keys, most), strict=True))


def filter_of_rows(keys: int, most: int = FILTER_MEMORY) -> int:
    """Bytes of the filter of the table that takes new keys, when it is full; 0 where it does not fit."""
    needed = memory(2 * keys // tables(keys) + _ROOM)
    return needed if needed <= most - loaded(keys, most) else 0


def known_filter(keys: int) -> int:
    """Bytes of all filters of a process on PostgreSQL."""
    return loaded(keys) + filter_of_rows(keys)


def ledger_files(keys: int) -> float:
    """Files of keys in a compacted ledger."""
    return math.ceil(keys * of("delta/key_bytes_1p") / TARGET_BYTES)


def delta_events(keys: int, partitions: int) -> Case:
    """A million new events on object storage, beside so many keys, with files of keys on a disk of the process."""
    files, p = key_files(keys), f"{partitions}p"
    writes, reads = (BATCHES * of(f"delta/batch_{kind}s_{p}") for kind in ("write", "read"))
    writes += EVENTS * files.written / keys * files.disk / keys / PART
    kept = EVENTS * (of(f"delta/sink_bytes_{p}") + of(f"delta/key_bytes_{p}")) + BATCHES * of(f"delta/record_bytes_{p}")
    local = EVENTS * files.written / keys * files.disk / keys
    held = MIB * (of("delta/process_mb") + of("delta/driver_memory_50k")) + files.memory
    usd = _requests(writes, reads) + kept / GB * PRICES.objects
    added = BATCHES * of(f"delta/batch_files_{p}") + 1
    return Case("Delta", keys, partitions, held, added, (writes, reads), kept + EVENTS * of(f"delta/key_bytes_{p}") + local, kept, usd)


def delta_restart(keys: int, partitions: int, start: str) -> Case:
    """A start on object storage, up to the end of what it reads: with files of its own, with copies that it fetches, or with neither."""
    files, p = key_files(keys), f"{partitions}p"
    writes, reads = (float(of(f"delta/restart_{kind}s_{p}")) for kind in ("write", "read"))  # measured beside other numbers of keys
    newest = min(keys, FLUSH_ROWS) * of(f"delta/key_bytes_{p}")
    held = _with_files(keys)
    if start == FILES:
        return Case("Delta", keys, partitions, held, len(files.sizes), (writes, reads), files.opened + newest, 0, _requests(writes, reads))
    if start == COPIES:
        asked, read = reads + 2 + copies(keys), files.disk + newest
        return Case("Delta, copies", keys, partitions, held, len(files.sizes), (writes, asked), read, 0, _requests(writes, asked))
    asked = reads + ledger_files(keys) * of(f"delta/compacted_reads_{p}")
    held, opened, read = _without_files(keys), ledger_files(keys), keys * of(f"delta/key_bytes_{p}")
    return Case("Delta, no files", keys, partitions, held, opened, (writes, asked), read, 0, _requests(writes, asked))


def copies(keys: int) -> int:
    """Objects of the copies of all files of keys."""
    files = key_files(keys)
    return sum(math.ceil(rows * files.disk / keys / PART) for rows in files.sizes)


def _with_files(keys: int) -> float:
    return MIB * (of("delta/process_mb") + of("delta/newest_mb")) + key_files(keys).opened


def _without_files(keys: int) -> float:
    """Beside what a start with files has: what the C library keeps, in proportion to the keys."""
    return _with_files(keys) + keys * kept_by_library()


def kept_by_library() -> float:
    """Bytes of a key that stay with a process that has read it from the ledger."""
    return MIB * (of("delta/restart_100m_mb, other") - of("delta/restart_100m_mb")) / 100_000_000


def tables(keys: int) -> int:
    """Tables of reservations on PostgreSQL; one takes a million keys at least."""
    return min(TABLES, math.ceil(keys / EVENTS))


def index_pages(keys: int) -> float:
    """Pages of the unique index of the table that takes new keys, when it is full."""
    return max(keys / tables(keys), EVENTS) / of("postgres/keys_of_index_page")


def logged(events: int, pages: float) -> float:
    """Bytes of the log of so many events between two checkpoints, where the index has so many pages.

    The first change of a page logs all of it. A random key leaves a page as it was with the probability 1 - 1 / pages.
    """
    changed = pages * -math.expm1(-events / pages)
    return events * of("postgres/wal_bytes") + changed * of("postgres/wal_page_bytes")


def postgres_events(keys: int, partitions: int) -> Case:
    """A million new events, beside so many keys, between two checkpoints of the server."""
    p = f"{partitions}p"
    records = BATCHES * of(f"postgres/record_rows_{p}") * of(f"postgres/record_bytes_{p}")
    kept = EVENTS * (of("postgres/sink_bytes") + of("postgres/bytes_per_reservation")) + records
    log = logged(EVENTS, index_pages(keys)) + records
    held = MIB * (of("postgres/process_mb") + of("postgres/driver_memory_50k")) + known_filter(keys)
    calls = BATCHES * of(f"postgres/calls_{p}")
    return Case("PostgreSQL", keys, partitions, held, math.ceil(kept / SEGMENT), (calls,), log + kept, kept, kept / GB * PRICES.disk)


def postgres_restart(keys: int, partitions: int) -> Case:
    """A start, with the stored filters, and the filter of rows if it fits."""
    rows = keys // tables(keys) if filter_of_rows(keys) else 0
    read = sum(16 * one.words for one in stored_filters(keys)) + 16 * rows
    calls = of(f"postgres/restart_calls_{partitions}p") + _reading_calls(rows, stored_filters(keys))
    held = MIB * of("postgres/process_mb") + known_filter(keys)
    return Case("PostgreSQL", keys, partitions, held, tables(keys), (calls,), read, 0, 0.0)


def _reading_calls(rows: int, filters: Sequence[StoredFilter]) -> float:
    """Of loading filters, some parts at a time, and of reading 8,192 pages of rows at a time."""
    return math.ceil(rows * HEAP_BYTES / 8192 / _PAGES) + sum(math.ceil(one.parts / _AT_ONCE) for one in filters)


class Rest(NamedTuple):
    """The keys of a store between batches.

    Args:
        server: bytes of indexes that the server should have in memory.
    """

    store: str
    keys: int
    files: float
    bytes: float
    server: float
    usd: float


def delta_at_rest(keys: int) -> list[Rest]:
    """The ledger on object storage, the files of keys on a disk, and their copies beside the ledger."""
    files, size = key_files(keys), keys * of("delta/key_bytes_1p")
    return [
        Rest("Delta: ledger", keys, ledger_files(keys), size, 0, size / GB * PRICES.objects),
        Rest("Delta: files of keys", keys, len(files.sizes), files.disk, 0, files.disk / GB * PRICES.disk),
        Rest("Delta: copies of them", keys, copies(keys), files.disk, 0, files.disk / GB * PRICES.objects),
    ]


def postgres_at_rest(keys: int) -> Rest:
    """One table of rows, and all others packed; each file has a gigabyte at most."""
    count, rows = tables(keys), keys / tables(keys)
    heap, index = HEAP_BYTES * rows, rows / of("postgres/keys_of_index_page") * 8192
    packed = rows * of("postgres/bytes_per_packed_key")
    files = sum(math.ceil(size / SEGMENT) for size in (heap, index)) + (count - 1) * (math.ceil(packed / SEGMENT) + 1)
    size = rows * of("postgres/bytes_per_reservation") + (count - 1) * packed
    return Rest("PostgreSQL", keys, files, size, index + (count - 1) * packed, size / GB * PRICES.disk)


def page_reads(keys: int) -> float:
    """Pages of files of keys that a batch of new keys reads: for each file those keys that its filter lets through."""
    return len(key_files(keys).sizes) * BATCH * of("delta/filter_lets_through")


def look_ups(keys: int, most: int = FILTER_MEMORY) -> float:
    """Look-ups in indexes that a batch of new keys needs on PostgreSQL: what filters let through, and all keys where rows have none."""
    let_through = sum(of(f"postgres/filter_lets_through_{times}") for times in halved(keys, most))
    return BATCH * (let_through + (not filter_of_rows(keys, most)))


def _requests(writes: float, reads: float) -> float:
    return (writes * PRICES.write + reads * PRICES.read) / 1000
