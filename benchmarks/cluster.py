"""`python -m benchmarks.cluster`: handlers of events on a Spark cluster of two workers with one core each, beside one worker, the same job.

The cluster is the tests' standalone one: workers are processes with their own view of the file system, and have dedup as users ship it. An
application is a process of its own, as `python -m benchmarks.cluster --application JOB`: it takes all cores that it asks for, so the two
take turns. Handlers of single events and of Arrow tables take 50 microseconds of Python for each event. The sinks are verified.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import delta, postgres, report
from benchmarks.events import KAFKA_DDL
from benchmarks.foreach import calibrated
from benchmarks.objectstore import with_tests
from benchmarks.ours import SINK, bare_consumer
from benchmarks.run import database, server
from benchmarks.scale_events import Orders
from benchmarks.stream import Seconds
from dedup import DeltaStore, Limits, PostgresStore

SINGLE, ARROW = "foreach", "foreach_arrow"

PARTITIONS = 4
"""Of the topic; a batch has a file of each."""

CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "768m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

ANSWER = "answer "
"""Before what an application tells: its JVM writes to the same output."""


class Scaling(NamedTuple):
    """How much is measured; tests make it tiny.

    Args:
        batches: of each handler and application, `warm` of which do not count.
        rounds: applications of one core, and of two.
    """

    events: int = 50_000
    batches: int = 8
    warm: int = 3
    rounds: int = 2


def compare(stores: list[str], sizes: Scaling) -> tuple[list[report.Measure], Seconds]:
    """Two measures of each store. Verified; and the seconds of every batch."""
    with_tests()
    from kit.spark_cluster import running_cluster

    taken = defaultdict[str, list[float]](list)
    with running_cluster() as cluster, server() as dsn:
        orders, topic = Orders(PARTITIONS), cluster.shared / "topic"
        for number in range(sizes.batches):
            _land(orders.batch(sizes.events), topic / str(number))
        given = {"topic": str(topic), "batches": sizes.batches, "loops": calibrated()}
        for turn in range(sizes.rounds):
            for workers in ((1, 2), (2, 1))[turn % 2]:
                with _places(stores, cluster.shared / f"{turn}-{workers}", dsn, orders) as jobs:
                    told = _application(cluster, workers, {**given, "jobs": jobs})
                for job, seconds in told.items():
                    taken[f"{job}, {workers} workers"] += seconds[sizes.warm :]
    return [_measure(store, handler, taken, sizes.events) for store in stores for handler in (SINGLE, ARROW)], dict(taken)


def _measure(store: str, handler: str, taken: Seconds, events: int) -> report.Measure:
    name = f"cluster/scaling_{store}{'_arrow' if handler == ARROW else ''}"
    two, one = (taken[f"{store}, {handler}, {workers} workers"] for workers in (2, 1))
    return report.throughput(name, two, one, events)


def _land(rows: pa.Table, folder: Path) -> None:
    """A file for each partition."""
    folder.mkdir(parents=True)
    for partition in range(PARTITIONS):
        pq.write_table(rows.filter(pa.compute.equal(rows["partition"], partition)), folder / f"{partition}.parquet")


@contextmanager
def _places(stores: list[str], folder: Path, dsn: str, orders: Orders) -> Iterator[dict[str, str]]:
    """A new place for each job; in the end it has each order once."""
    with ExitStack() as stack:
        jobs = dict[str, str]()
        for handler in (SINGLE, ARROW):
            if "delta" in stores:
                delta.create_tables(folder / handler)
                jobs[f"delta, {handler}"] = str(folder / handler)
            if "postgres" in stores:
                jobs[f"postgres, {handler}"] = own = stack.enter_context(database(dsn))
                postgres.create_sinks(own)
        yield jobs
        for job, place in jobs.items():
            if job.startswith("delta"):
                delta.verify(Path(place) / SINK, orders.facts, once=True)
            else:
                postgres.verify(place, SINK, orders.facts, once=True)


def _application(cluster: Any, workers: int, job: dict[str, Any]) -> dict[str, list[float]]:
    """Run it on so many workers; returns the seconds of each job's batches."""
    from kit.foreach_kit import classic
    from kit.paths import environment
    from kit.spark_cluster import MARK

    shipped = cluster.home / "dedup_spark.zip"
    shutil.copy(cluster.wheel, shipped)
    conf = {**CONF, "spark.master": cluster.url, "spark.cores.max": str(workers), "spark.submit.pyFiles": str(shipped)}
    around = {**classic(), "PYTHONPATH": environment()["PYTHONPATH"], "PYSPARK_PYTHON": str(cluster.python), MARK: str(cluster.folder)}
    line = [sys.executable, "-m", "benchmarks.cluster", "--application", json.dumps({**job, "conf": conf, "workers": workers})]
    around |= {"TMPDIR": str(cluster.home / "tmp"), "SPARK_LOCAL_DIRS": str(cluster.home / "tmp")}
    root = Path(__file__).parent.parent
    done = subprocess.run(line, cwd=root, env=around, stdout=subprocess.PIPE, text=True, check=True)
    (told,) = [line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    found: dict[str, list[float]] = json.loads(told)
    return found


def application(asked: dict[str, Any]) -> None:
    """Play the batches of each job, one job after the other, and print what each batch took."""
    from kit.cluster_driver import await_executors, session

    spark = session(asked["conf"])
    await_executors(spark, {"executors": asked["workers"]})
    taken = {job: _played(spark, job, place, asked) for job, place in asked["jobs"].items()}
    spark.stop()
    print(ANSWER + json.dumps(taken), flush=True)


def _played(spark: Any, job: str, place: str, asked: dict[str, Any]) -> list[float]:
    store, handler = job.split(", ")
    taken = list[float]()
    with closing(DeltaStore(place, tables={SINK: f"{place}/{SINK}"}) if store == "delta" else PostgresStore(place)) as opened:
        made = bare_consumer(opened, limits=Limits(scratch=f"{asked['topic']}-scratch"))
        act = {SINGLE: book, ARROW: load}[handler]
        getattr(made, handler)(into=SINK)(partial(act, loops=asked["loops"]))
        for number in range(asked["batches"]):
            batch = spark.read.schema(KAFKA_DDL).parquet(f"{asked['topic']}/{number}")
            began = time.perf_counter()
            made(batch, number)
            taken.append(time.perf_counter() - began)
    return taken


def book(event: Any, tx: Any, loops: int) -> Any:
    """The row of one event, after so many turns of an empty loop."""
    for _ in range(loops):
        pass
    return event.data


def load(events: pa.Table, tx: Any, loops: int) -> pa.Table:
    """The rows of a slice, after so many turns for each of its events."""
    for _ in range(loops * events.num_rows):
        pass
    return pa.Table.from_struct_array(events["data"])


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("stores", nargs="*", metavar="store", help="postgres, delta; default: both")
    for name, default in Scaling._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--application", metavar="JOB", help="play this job's batches")
    parser.add_argument("--keep", action="store_true", help="put the numbers into latest.json")
    asked = vars(parser.parse_args())
    if job := asked.pop("application"):
        return application(json.loads(job))
    stores, keep = asked.pop("stores") or ["postgres", "delta"], asked.pop("keep")
    told, spread = compare(stores, Scaling(**asked))
    report.show(told, spread, Console())
    if keep:
        report.merge(told, Path(__file__).parent / "latest.json")


if __name__ == "__main__":
    main()
