"""A Spark driver in a process of its own, whose tasks are tried again and which then waits to be killed.

`python -m kit.foreach_driver PLACE FOLDER [delta]`. Batch 0: every task is killed right after its first commit (on Delta: after its first
file), and Spark tries it again. Batch 1: a handler says that it is there, and waits.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def events(batch_id: int) -> list[dict[str, Any]]:
    """Two partitions of 20 events a batch."""
    from kit.orders import orders

    return [e for p in range(2) for e in orders(range(20 * batch_id, 20 * batch_id + 20), partition=p)]


def die(folder: Path) -> None:
    """As the first attempt at a task of batch 0."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is not None and task.attemptNumber() == 0 and not (folder / "tried").exists():
        (folder / f"killed {task.partitionId()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_after_a_file(folder: Path) -> None:
    """From now on this process of tasks does."""
    from dedup.delta.files import FileWriter

    write = FileWriter.write

    def written(self: Any, rows: Any) -> Any:
        done = write(self, rows)
        die(folder)
        return done

    FileWriter.write = written  # type: ignore[method-assign]


def main(place: str, folder: Path, kind: str = "postgres") -> None:
    """Both batches."""
    from pyspark import cloudpickle

    from dedup.core.rows import frame_of
    from dedup.spark.session import local_session
    from kit.orders import batch, consumer
    from kit.places import place_of

    def book(event: Any, tx: Any) -> Any:
        if kind == "delta" and event.sequence_number == 0:
            die_after_a_file(folder)
        if event.sequence_number == 35:
            (folder / "reached").touch()
            while not (folder / "resume").exists():
                time.sleep(0.01)
        return {"id": event.data["id"], "amount": 1}

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    spark = local_session("foreach driver", **{"spark.master": "local[2,4]"})
    store = place_of(kind, place).store(**({"on_step": lambda name: name == "committed" and die(folder)} if kind == "postgres" else {}))
    made = consumer(store, max_events_per_transaction=8 if kind == "postgres" else None)
    made._handler = None
    made.foreach(into="orders")(book)
    for batch_id in range(2):
        report = made(frame_of(spark, batch(*events(batch_id))).repartition(3), batch_id)
        (folder / "tried").write_text(f"{report.processed} {report.redelivered}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
