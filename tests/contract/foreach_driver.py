"""A Spark driver in a process of its own: `python foreach_driver.py DSN FOLDER`. Its tasks are tried again, then it waits to be killed.

Batch 0: every task is killed right after its first commit, and Spark tries it again. Batch 1: a handler says that it is there, and waits.
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
    from orders import orders

    return [e for p in range(2) for e in orders(range(20 * batch_id, 20 * batch_id + 20), partition=p)]


def main(dsn: str, folder: Path) -> None:
    """Both batches."""
    from orders import batch, consumer

    from dedup.postgres import PostgresStore
    from dedup.spark.session import local_session

    def on_step(name: str) -> None:
        from pyspark import TaskContext

        task = TaskContext.get()
        if name == "committed" and task is not None and task.attemptNumber() == 0 and not (folder / "tried").exists():
            (folder / f"killed {task.partitionId()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def book(event: Any, tx: Any) -> Any:
        if event.sequence_number == 35:
            (folder / "reached").touch()
            while not (folder / "resume").exists():
                time.sleep(0.01)
        return {"id": event.data["id"], "amount": 1}

    spark = local_session("foreach driver", **{"spark.master": "local[2,4]"})
    made = consumer(PostgresStore(dsn, on_step=on_step), max_events_per_transaction=8)
    made._handler = None
    made.foreach(into="orders")(book)
    for batch_id in range(2):
        report = made(spark.createDataFrame(batch(*events(batch_id))).repartition(3), batch_id)
        (folder / "tried").write_text(f"{report.processed} {report.redelivered}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
