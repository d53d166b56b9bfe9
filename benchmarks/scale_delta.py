"""Constants of the Delta store for docs/explanation/scale.md: requests on an emulator of S3, files and bytes on disk, memory of a start.

What uses the emulator runs in a process of its own, as `python -m benchmarks.scale_delta PLACE`: each line of its standard input is a step,
each line of its output says that it is done. A proxy between the two counts. How long anything takes does not matter here.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from benchmarks import delta, restart
from benchmarks.events import ORDER
from benchmarks.objectstore import tools
from benchmarks.ours import SINK, arrow_consumer
from benchmarks.reserved import NAME, keys, reserve
from benchmarks.scale_events import Orders
from benchmarks.scale_keys import reserved
from dedup import DeltaStore
from dedup.core.bloom import Bloom
from dedup.core.keys import Words, key_words
from dedup.delta.keys import FLUSH_ROWS
from dedup.delta.ledger import KEYS

KEYS_FOLDER = "keys"
"""Of a store on disk."""

KINDS = ("write", "read", "delete")

Values = dict[str, tuple[float, str]]
"""Constant -> value and unit."""


class Amounts(NamedTuple):
    """How much is measured; tests make it tiny.

    Args:
        partitions: of the topic; each is measured.
        batches: small ones, whose requests are counted: one compaction of the ledger, and two checkpoints of each table's log.
        small: events of each partition in a small batch.
        large: large batches, whose bytes are counted: with `events` they are a million events.
        events: of a large batch.
        reserved: keys that are there before, and at a restart.
        starts: whose memory is looked at.
        ledger: keys that a start reads from the ledger.
        large_index: keys in one table on PostgreSQL, of whose index a batch changes a part.
    """

    partitions: Sequence[int] = (1, 10, 100)
    batches: int = 100
    small: int = 2
    large: int = 20
    events: int = 50_000
    reserved: int = 6_000_000
    starts: int = 3
    ledger: int = 24_000_000
    large_index: int = 4_000_000


def kinds(requests: Sequence[Any]) -> Counter[str]:
    """How many write or list, read, delete: services have a price for each of these."""
    return Counter(map(_kind, requests))


def _kind(request: Any) -> str:
    if request.method == "DELETE" or request.path.endswith("?delete"):
        return "delete"
    listed = request.method == "GET" and "list-type=" in request.path
    return "write" if listed or request.method in ("PUT", "POST") else "read"


def requests(folder: Path, amounts: Amounts) -> Values:
    """Of a batch, with what checkpoints and a compaction take, and of the first batch after a restart. Verified."""
    kit, found = tools(), Values()
    with kit.s3_server.running_s3() as server, kit.http_proxy.proxied(server) as proxy:
        settings = kit.object_storage.through(kit.object_storage.s3(server), proxy.address)
        for partitions in amounts.partitions:
            storage = _Storage(proxy, settings, kit.object_storage.prefix("s3"), folder / f"{partitions}", partitions)
            found |= _requests_of(storage, amounts)
    return found


class _Storage(NamedTuple):
    """A store behind the proxy."""

    proxy: Any
    settings: dict[str, str]
    place: str
    home: Path
    partitions: int

    def compacted(self, most: int) -> set[str]:
        """The names of the ledger's files that have keys of several batches: more than `most`."""
        table = DeltaTable(f"{self.place}/state/ledger/{NAME}", storage_options=self.settings)
        adds = pa.table(table.get_add_actions(flatten=True)).select(["path", "num_records", "partition.section"]).to_pylist()
        return {add["path"].rpartition("/")[2] for add in adds if add["partition.section"] == KEYS and add["num_records"] > most}

    @contextmanager
    def process(self, keys_folder: str = "kept") -> Iterator[Any]:
        """Gives what does a step in a process of its own, and tells the requests of it."""
        line = [sys.executable, "-m", "benchmarks.scale_delta", self.place, str(self.home / keys_folder), str(self.partitions)]
        root = Path(__file__).parent.parent
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **self.settings}, cwd=root
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            given, told = child.stdin, child.stdout

            def do(**step: Any) -> list[Any]:
                self.proxy.taken()
                print(json.dumps(step), file=given, flush=True)
                assert told.readline() == "done\n", f"{step} failed"
                return list(self.proxy.taken())

            try:
                yield do
            finally:
                given.close()
                child.wait(60)


def _requests_of(storage: _Storage, amounts: Amounts) -> Values:
    events, usual = amounts.small * storage.partitions, list[Counter[str]]()
    with storage.process() as do:
        do(step="create")
        do(step="reserve", count=amounts.reserved, each=amounts.events)
    with storage.process() as do:
        do(step="batch", events=events)
        usual += [kinds(do(step="batch", events=events)) for _ in range(amounts.batches)]
        for _ in range(amounts.batches // 2):  # to the middle between two checkpoints of the sink's log
            do(step="batch", events=events)
        do(step="verify")
    compacted = storage.compacted(max(events, amounts.events))
    with storage.process() as do:
        files = do(step="batch", events=events)
    with storage.process("none") as do:
        ledger = do(step="batch", events=events)
    partitions = storage.partitions
    return _of_batch(partitions, usual) | _of_start(partitions, usual, files) | _of_files(partitions, compacted, ledger)


def _of_batch(partitions: int, usual: list[Counter[str]]) -> Values:
    """The mean of all of them."""
    total = sum((one for one in usual), Counter[str]())
    return {f"delta/batch_{kind}s_{partitions}p": (round(total[kind] / len(usual), 1), "requests") for kind in KINDS}


def _of_start(partitions: int, usual: list[Counter[str]], first: list[Any]) -> Values:
    """The first batch without what a batch takes."""
    batch = {kind: statistics.median(one[kind] for one in usual) for kind in KINDS}
    return {f"delta/restart_{kind}s_{partitions}p": (kinds(first)[kind] - batch[kind], "requests") for kind in KINDS[:2]}


def _of_files(partitions: int, compacted: set[str], first: list[Any]) -> Values:
    """Of each file of keys that a compaction has made, and that only a start without files of keys reads."""
    read = [name for name in (one.path.split("?")[0].rpartition("/")[2] for one in first) if name in compacted]
    assert read and set(read) == compacted, f"{len(compacted)} files were compacted, {len(set(read))} of them were read"
    return {f"delta/compacted_reads_{partitions}p": (round(len(read) / len(set(read)), 1), "requests of a file")}


def size(folder: Path, amounts: Amounts) -> Values:
    """Files and bytes that a large batch adds, by what they are for. Verified."""
    found = Values()
    for partitions in amounts.partitions:
        home, orders = folder / f"{partitions}", Orders(partitions)
        delta.create_tables(home)
        with closing(delta.store(home)) as store:
            made = arrow_consumer(store)
            made(orders.batch(amounts.events), 0)
            before = _disk(home)
            for number in range(amounts.large):
                made(orders.batch(amounts.events), 1 + number)
        delta.verify(home / SINK, orders.facts, once=True)
        found |= _per_batch(partitions, before, _disk(home), amounts)
    return found


def _disk(home: Path) -> dict[str, list[int]]:
    """Sizes of the ledger's files of keys, of the rows of the sink, and of everything else but the folder of keys."""
    ledger = home / "state" / "ledger" / NAME
    adds = pa.table(DeltaTable(str(ledger)).get_add_actions(flatten=True)).to_pylist()
    of_keys = {str(ledger / add["path"]) for add in adds if add["partition.section"] == KEYS}
    found: dict[str, list[int]] = {"keys": [], "sink": [], "record": []}
    for file in (path for path in home.rglob("*") if path.is_file() and KEYS_FOLDER not in path.parts):
        is_row = file.suffix == ".parquet" and file.parent == home / SINK
        found["sink" if is_row else "keys" if str(file) in of_keys else "record"].append(file.stat().st_size)
    return found


def _per_batch(partitions: int, before: dict[str, list[int]], after: dict[str, list[int]], amounts: Amounts) -> Values:
    added = {of: (sum(after[of]) - sum(before[of])) / amounts.large for of in after}
    files = sum(len(after[of]) - len(before[of]) for of in after) / amounts.large
    return {
        f"delta/batch_files_{partitions}p": (round(files, 1), "files"),
        f"delta/record_bytes_{partitions}p": (round(added["record"]), "bytes of a batch"),
        f"delta/key_bytes_{partitions}p": (round(added["keys"] / amounts.events, 1), "bytes of a key"),
        f"delta/sink_bytes_{partitions}p": (round(added["sink"] / amounts.events, 1), "bytes of an event"),
    }


def start(folder: Path, amounts: Amounts) -> Values:
    """What a process has in memory that knows its keys, beside what files of keys take by `scale_keys`. Verified by `restart`.

    All keys are in files; then keys for nearly one file more are in the ledger alone, as many as a start ever reads there.
    """
    memory, each, whole, newest = [], FLUSH_ROWS // 10, 2 * FLUSH_ROWS, FLUSH_ROWS * 9 // 10
    with closing(DeltaStore(str(folder))) as store:
        for done, count in ((0, whole), (whole, newest)):
            reserve(store, count, step=each, seed=1 + done)
            told = [restart.started(folder, each) for _ in range(amounts.starts)]
            assert {one["reserved"] for one in told} == {done + count}, "keys are missing"
            memory.append(statistics.median(one["mb"] for one in told) - reserved(whole, each).memory / 2**20)
    return {"delta/process_mb": (round(memory[0], 1), "MiB"), "delta/newest_mb": (round(memory[1] - memory[0], 1), "MiB")}


def ledger(folder: Path, amounts: Amounts) -> Values:
    """Memory of a start that reads all keys from the ledger: at most, and what of it is in use then. Verified by `restart`."""
    each = min(amounts.ledger, FLUSH_ROWS)
    with closing(DeltaStore(str(folder))) as store:
        reserve(store, amounts.ledger, step=each)
    shutil.rmtree(folder / KEYS_FOLDER, ignore_errors=True)
    told = restart.started(folder, each)
    assert told["reserved"] == amounts.ledger, f"{told['reserved']} keys are known"
    return {"delta/ledger_start_mb": (round(told["mb"]), "MiB"), "delta/ledger_start_used_mb": (round(told["used"]), "MiB")}


def filtered(amounts: Amounts) -> Values:
    """The share of unknown keys that a full filter of a file lets through: for each of them a page is read."""
    bloom, known, others = full_filter(max(amounts.reserved // 6, 1000))
    assert bloom.may_have(*known).all(), "a known key is not known"
    return {"delta/filter_lets_through": (round(float(bloom.may_have(*others).mean()), 6), "of unknown keys")}


def full_filter(count: int) -> tuple[Bloom, tuple[Words, Words], tuple[Words, Words]]:
    """A filter with as many keys as it is made for, these keys, and as many others."""
    known, others = (key_words(keys(count, seed)["key"]) for seed in (1, 2))
    bloom = Bloom(count)
    bloom.add(*known)
    return bloom, known, others


def main(place: str, keys_folder: str, partitions: int) -> None:
    """Do what the standard input says."""
    orders, number = Orders(partitions), 0
    with ExitStack() as stack:
        store = stack.enter_context(closing(DeltaStore(f"{place}/state", tables={SINK: f"{place}/{SINK}"}, keys_folder=keys_folder)))
        made = arrow_consumer(store)
        for line in sys.stdin:
            step = json.loads(line)
            if step["step"] == "create":
                DeltaTable.create(f"{place}/{SINK}", schema=ORDER)
            elif step["step"] == "batch":
                made(orders.batch(step["events"]), number)
                number += 1
            elif step["step"] == "reserve":
                reserve(store, step["count"], step=step["each"])
            elif step["step"] == "verify":
                delta.verify(f"{place}/{SINK}", orders.facts, once=True)
            print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
