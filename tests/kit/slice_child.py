"""A task of a batch in a process of its own, without Spark: started by children.py, to be killed, stopped and overtaken.

It runs the slices of a planned batch that the test has pickled, as a Python worker of Spark does, and writes down what it answers.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoint.head import Head, Run
from dedup import Consumer
from dedup.core.store import Store
from dedup.decode.prepare import prepare_events
from dedup.pipeline.handlers import Event
from dedup.spark import committing, tasks
from kit.orders import batch, consumer, event

EVENTS = 30


def log() -> list[dict[str, Any]]:
    """Events of two partitions, with duplicates of good and of failing ones, and some that are skipped."""
    return [event(n, f"p{p}-{n - n % 7 // 6}", n % 5, partition=p) for p in range(2) for n in range(EVENTS)]


def bad(number: int) -> bool:
    """Whether the event fails."""
    return number % 11 in (1, 5)


def handle(event: Event, tx: Any) -> Any:
    """A row and a message for each order; some fail, some need nothing."""
    if event.data["amount"] == 0:
        return None
    if bad(event.sequence_number):
        raise ValueError("never")
    tx.publish({"body": event.data["id"]}, "out")
    return {"id": event.data["id"], "amount": 1}


def orders_consumer(store: Store, **settings: Any) -> Consumer:
    """The consumer whose slices these are; both bodies of one id are the same message to it."""
    made = consumer(store, payload="data.id", max_events_per_transaction=8, budget=None, **settings)
    made._handler = None
    made.foreach(into="orders")(handle)
    return made


def plan(made: Consumer, head: Head, batch_id: int, path: Path, events: list[dict[str, Any]]) -> Path:
    """What the driver would send to the tasks, as a file."""
    rows = prepare_events(batch(*events), made.job().prepare(head))
    path.write_bytes(pickle.dumps((tasks.slice_job(made.job(), head, Run("q", batch_id, durable=True), frozenset()), rows)))
    return path


def main(task: dict[str, Any]) -> None:
    """Run the slices, or die, or wait, at the n-th time that a step is reached."""
    from dedup.postgres import PostgresStore, epoch

    work, rows = pickle.loads(Path(task["work"]).read_bytes())
    left = task.get("nth", 1)
    epoch.TELL_SECONDS, epoch.MARGIN_SECONDS = 0.1, task.get("margin", 0.1)

    def on_step(name: str) -> None:
        nonlocal left
        left -= name == task.get("at")
        if name != task.get("at") or left != 0:
            return
        if "resume" not in task:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(task["reached"]).touch()
        while not Path(task["resume"]).exists():
            time.sleep(0.01)

    store = PostgresStore(task["place"], on_step=on_step).in_tasks()
    answers = pa.Table.from_batches(committing.run(rows.to_batches(max_chunksize=11), work, store), committing.OUTCOMES).to_pylist()
    said = [{"states": a["states"], "error": a["error"] and type(pickle.loads(a["error"])).__name__} for a in answers]
    Path(task["said"]).write_text(json.dumps(said))
