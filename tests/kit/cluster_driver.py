"""The driver of a cluster's application: `python -m kit.cluster_driver CONF` reads tasks, a line of JSON each, and answers each.

What runs in executors travels by value, as what stands in a user's program does: executors have the library and none of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

ANSWER = "answer "
"""Before what is an answer: the JVM has the same stdout."""

BAD = "bad"
"""The id of the order that no handler takes."""

SLOW, DEADLY, FATAL = "slow", "deadly", "fatal"
"""The ids of the order that waits for somebody, of one whose first attempt kills its process, and of one that kills its executor."""


PATIENCE, NOBODY = 300.0, "nobody came"
"""Seconds after which the slow order fails, and the file that says so."""


def meet(order: str, folder: Path) -> None:
    """What a handler does with this order before anything else: fails, waits, or dies, as its id says."""
    if order == BAD:
        raise ValueError("cannot book it")
    if order == DEADLY and not (folder / DEADLY).exists():
        (folder / DEADLY).touch()
        os.kill(os.getpid(), 9)
    if order == FATAL:  # the parent of a worker is the daemon that forks them
        status = Path(f"/proc/{os.getppid()}/status").read_text()
        os.kill(int(status.partition("PPid:")[2].split()[0]), 9)
        time.sleep(PATIENCE)
    if order == SLOW:
        with (folder / "attempts").open("a") as out:
            out.write(f"{os.getpid()}\n")
        first, end = (folder / "attempts").read_text().count("\n") == 1, time.monotonic() + PATIENCE
        while first and not (folder / "resume").exists():
            if time.monotonic() > end:
                (folder / NOBODY).touch()
                raise ValueError("nobody came")
            time.sleep(0.05)


def each(event: Any, tx: Any, folder: Path) -> Any:
    """A handler of single events."""
    meet(event.data["id"], folder)
    return {"id": event.data["id"], "amount": event.data["amount"]}


def columns(events: pa.Table, tx: Any, folder: Path) -> pa.Table:
    """A handler of Arrow tables."""
    for order in events["data"].to_pylist():
        meet(order["id"], folder)
    return pa.Table.from_struct_array(events["data"])


def tables(orders: Any, tx: Any, folder: Path) -> None:
    """A handler of batches that works on Arrow tables."""
    found = orders.select("data.id", "data.amount").toArrow()
    for order in found["id"].to_pylist():
        meet(order, folder)
    tx.write(found, "orders")


def frames(orders: Any, tx: Any, folder: Path) -> None:
    """A handler of batches that works on DataFrames, with a shuffle, and Python code in executors."""

    def met(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for order in batch.column(0).to_pylist():
                meet(order, folder)
            yield batch

    flat = orders.select("data.id", "data.amount").repartition(5, "id")
    (folder / "plan").write_text(flat._jdf.queryExecution().executedPlan().toString())
    tx.write(flat.mapInArrow(met, flat.schema), "orders")


HANDLERS: dict[str, Any] = {"tables": tables, "frames": frames, "foreach": each, "foreach_arrow": columns}


def consumer(task: dict[str, Any]) -> Any:
    """As the task says: its `kind` of store, `place`, `handler` and `settings`."""
    from kit import orders
    from kit.places import place_of

    made = orders.consumer(place_of(task["kind"], task["place"]).store(), query=None, budget=None, **task.get("settings", {}))
    made._handler = None
    handler = partial(HANDLERS[task["handler"]], folder=Path(task["folder"]))
    if task["handler"].startswith("foreach"):
        getattr(made, task["handler"])(into="orders")(handler)
    else:
        made.foreach_batch(handler)
    return made


def query(spark: Any, task: dict[str, Any]) -> dict[str, Any]:
    """A query that reads its files to the end, two a batch. Started again where it fails, as often as `lives` says."""
    from dedup.demo.input import ENVELOPE_DDL

    errors: list[str] = []
    folder, kept = Path(task["folder"]), kept_batches()
    for _ in range(task.get("lives", 1)):
        events = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 2).parquet(str(folder / "landing"))
        events = events.repartition(task["parts"]) if "parts" in task else events
        made = consumer(task)
        try:
            made.run(events.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True))
            return {"errors": errors, "kept": kept}
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(f"{type(error).__name__}: {error}")
        finally:
            made.store.close()
    return {"errors": errors, "failed": True}


def kept_batches() -> list[bool]:
    """Of each batch of events from now on, whether its rows were kept in files."""
    from dedup.spark import keeping

    found, ask = list[bool](), getattr(keeping, "asked", keeping._all_here)

    def asked(pieces: pa.Table) -> bool:
        found.append(ask(pieces))
        return found[-1]

    keeping.asked, keeping._all_here = ask, asked  # type: ignore[attr-defined]
    return found


def look(spark: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    """What a task sees, one on each executor: of modules, files and itself."""
    await_executors(spark, task)
    modules, paths = task["modules"], task["paths"]

    def seen(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import importlib.util
        import platform
        import sys

        for _ in numbers:
            time.sleep(1)  # so that each executor gets a task
            found = {name: getattr(importlib.util.find_spec(name), "origin", None) for name in modules}
            opened = {path: os.path.exists(path) for path in paths}
            told = {"modules": found, "paths": opened, "cwd": os.getcwd(), "path": sys.path, "python": platform.python_version()}
            yield pa.RecordBatch.from_pydict({"told": [json.dumps(told)]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(seen, "told string").collect()
    return [json.loads(row.told) for row in rows]


def executors(spark: Any) -> int:
    """How many there are."""
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


def await_executors(spark: Any, task: dict[str, Any]) -> int:
    """Wait until there are as many as the task says."""
    end = time.monotonic() + 180
    while executors(spark) != task.get("executors", 2):
        if time.monotonic() > end:
            raise TimeoutError(f"{executors(spark)} executors")
        time.sleep(0.1)
    return executors(spark)


def watch_attempts(spark: Any, resume: Path) -> None:
    """Let the slow order go on when Spark runs a second attempt at its task."""
    tracker = spark.sparkContext.statusTracker()
    while not resume.exists():
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numActiveTasks + info.numCompletedTasks > info.numTasks:
                resume.touch()
        time.sleep(0.05)


def speculated(spark: Any, task: dict[str, Any]) -> dict[str, Any]:
    """A query whose slow order goes on when a second attempt runs."""
    threading.Thread(target=watch_attempts, args=(spark, Path(task["folder"]) / "resume"), daemon=True).start()
    return query(spark, task)


TASKS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "query": query,
    "look": look,
    "executors": await_executors,
    "speculated": speculated,
}


def session(conf: dict[str, str]) -> Any:
    """Of a cluster: everything else than the settings is Spark's default."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("dedup on a cluster")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main() -> None:
    """One task after the other, until nobody gives one."""
    spark = session(json.loads(sys.argv[1]))
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = TASKS[task["do"]](spark, task)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = {"errors": [f"{type(error).__name__}: {error}"], "failed": True}
        print(ANSWER + json.dumps(answer), flush=True)
    with suppress(Exception):
        spark.stop()


if __name__ == "__main__":
    main()
