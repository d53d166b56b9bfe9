"""Delta tables on object storage: how many requests a batch takes, and how long, beside plain appends of delta-rs to the same storage.

An emulator of S3 keeps objects in memory. A proxy before it counts the requests and adds 30 ms each way, as if the storage were a network
away. No Spark: batches are Arrow tables. Ours run in a process of their own, as `python -m benchmarks.objectstore PLACE`: each line of its
standard input is a step, each line of its output the seconds that it took.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.delta import verify
from benchmarks.events import ORDER, Facts, Topic
from benchmarks.ours import SINK, arrow_consumer
from benchmarks.report import Measure, throughput
from benchmarks.stream import Seconds, Sizes
from dedup import DeltaStore
from dedup.decode.json_bodies import decode

DELAY = 0.03
"""Seconds to the storage, and back."""

PLAIN = "plain"

SMALL = 5
"""Events of a small batch."""

ROUNDS = 5
"""Small batches that are counted; and twice that many come first."""


def compare(spark: Any, folder: Path, dsn: str, sizes: Sizes) -> tuple[list[Measure], Seconds]:
    """Requests of a small batch, then batches in turns. Verified; and the seconds of every batch."""
    del spark, dsn
    kit = tools()
    with kit.s3_server.running_s3() as server, kit.http_proxy.proxied(server, delay=DELAY) as proxy:
        settings = kit.object_storage.through(kit.object_storage.s3(server), proxy.address)
        requests = _requests(kit, proxy, settings, kit.object_storage.prefix("s3"))
        place = kit.object_storage.prefix("s3")
        with _child(settings, place) as do:
            do({"step": "create"})
            taken: Seconds = {"ours": [], PLAIN: []}
            for number in range(sizes.batches):
                for way in sorted(taken, reverse=bool(number % 2)):
                    taken[way].append(do({"step": way, "number": number, "events": sizes.events}))
            do({"step": "verify"})
    counted = {name: values[sizes.warm :] for name, values in taken.items()}
    append = throughput("objectstore/append", counted["ours"], counted[PLAIN], sizes.events)
    return [requests, append], {f"object storage, {name}": values for name, values in counted.items()}


def _requests(kit: Any, proxy: Any, settings: dict[str, str], place: str) -> Measure:
    """How many requests of a small batch wait for one another, and those of a plain append; all of them are printed by step."""
    chains: dict[str, list[int]] = {"ours": [], PLAIN: []}
    with _child(settings, place) as do:
        do({"step": "create"})
        for number in range(3 * ROUNDS):
            for way, chain in chains.items():
                proxy.taken()
                do({"step": way, "number": number, "events": SMALL})
                found = proxy.taken()
                chain.append(kit.http_proxy.one_after_another(found))
                if number == 3 * ROUNDS - 1:
                    print(f"      {way}: {len(found)} requests, {chain[-1]} one after another", file=sys.stderr)
        do({"step": "verify"})
    with _child(settings, place) as do:
        for number, what in ((3 * ROUNDS, "the first batch after a restart"), (3 * ROUNDS + 1, "the second one")):
            proxy.taken()
            do({"step": "ours", "number": number, "events": SMALL})
            found = proxy.taken()
            print(f"      {what}: {len(found)} requests, {kit.http_proxy.one_after_another(found)} one after another", file=sys.stderr)
    ours, other = (statistics.median(chain[2 * ROUNDS :]) for chain in chains.values())
    return Measure("objectstore/requests_small_batch", ours, other, "requests one after another", round(ours / other, 2), "lower")


@contextmanager
def _child(settings: dict[str, str], place: str) -> Iterator[Any]:
    """Gives what does a step in another process: delta-rs may keep the threads of its own from running while it waits for an answer."""
    line = [sys.executable, "-m", "benchmarks.objectstore", place]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}, cwd=root
    ) as child:

        def do(step: dict[str, Any]) -> float:
            """Seconds of a step."""
            assert child.stdin is not None and child.stdout is not None
            print(json.dumps(step), file=child.stdin, flush=True)
            return float(child.stdout.readline())

        try:
            yield do
        finally:
            child.kill()


def main(place: str) -> None:
    """Do what the standard input says."""
    tables, topic, seen = {name: f"{place}/{name}" for name in (SINK, PLAIN)}, Topic(), dict[int, pa.Table]()
    with closing(DeltaStore(f"{place}/state", tables=tables)) as store:
        made = arrow_consumer(store)
        for line in sys.stdin:
            step = json.loads(line)
            rows = _batch(topic, seen, step) if "number" in step else None
            begun = time.perf_counter()
            if step["step"] == "create":
                for uri in tables.values():
                    DeltaTable.create(uri, schema=ORDER)
            elif step["step"] == "ours":
                made(rows, step["number"])
            elif step["step"] == PLAIN:
                write_deltalake(tables[PLAIN], rows, mode="append")
            elif step["step"] == "verify":
                _verify(tables, topic.facts)
            print(time.perf_counter() - begun, flush=True)


def _batch(topic: Topic, seen: dict[int, pa.Table], step: dict[str, Any]) -> pa.Table:
    """The events of a batch; for a plain append as the rows that they decode to, which costs it nothing."""
    while step["number"] not in seen:
        last = max(seen, default=-1)
        seen.pop(last, None)
        seen[last + 1] = pa.concat_tables(topic.batch(step["events"]))
    events = seen[step["number"]]
    if step["step"] != PLAIN:
        return events
    return pa.Table.from_struct_array(decode(events["value"].combine_chunks(), ORDER))


def _verify(tables: dict[str, str], facts: Facts) -> None:
    for name, uri in tables.items():
        verify(uri, facts, once=name == SINK)


def with_tests() -> None:
    """From now on `import kit` finds what the tests have."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))


def tools() -> Any:
    """Servers and the proxy, which the tests have."""
    with_tests()
    from types import SimpleNamespace

    from kit import http_proxy, object_storage, s3_server

    return SimpleNamespace(http_proxy=http_proxy, object_storage=object_storage, s3_server=s3_server)


if __name__ == "__main__":
    main(sys.argv[1])
