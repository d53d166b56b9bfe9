"""A publisher, or a runner that reads what it sends, in a process of its own, to be killed and stopped: started by children.py."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa

from dedup import Consumer, PostgresStore, Takeover
from dedup.eventhub import Sender
from dedup.publishing import OutgoingEvent, Publisher

KEYS = 20


def event(number: int, prefix: str = "") -> OutgoingEvent:
    """OutgoingEvent `number`, with an id of its own and one of the keys."""
    return OutgoingEvent(f"{prefix}{number}".encode(), key=f"k{number % KEYS}", id=f"id-{number}")


def main(task: dict[str, Any]) -> None:
    """Publish the events of the task, all of them, again after each start; or read."""
    logging.getLogger("azure").setLevel(logging.CRITICAL)
    (read if task.get("read") else publish)(task)


def publish(task: dict[str, Any]) -> None:
    """Die or stop at a step, where the task says so; tell how far it came in a file."""
    left = {"n": task.get("nth", 1)}

    def on_step(name: str) -> None:
        if name == task.get("at"):
            left["n"] -= 1
            if left["n"] == 0:
                Path(task["reached"]).touch()
                os.kill(os.getpid(), signal.Signals[task["signal"]])

    to = Sender(task["connection"], task["hub"], retry_backoff_factor=0.05)
    first, last, prefix = task["first"], task["last"], task.get("prefix", "")
    options = {"max_events": task.get("page", 10), "max_outage": 30.0}
    with Publisher(task["group"], PostgresStore(task["place"]), to, on_step=on_step, **options) as publisher:
        done = publisher.publish(event(number, prefix) for number in range(first, last))
        Path(task["result"]).write_text(f"{done.new} {done.known}")


def read(task: dict[str, Any]) -> None:
    """The plain runner with the default key, until a signal comes: bodies, with their positions, into the sink `seen`."""
    from dedup.eventhub import run

    consumer = Consumer("reader", PostgresStore(task["place"]), takeover=Takeover(after=2.0))

    @consumer.foreach_batch
    def write(rows: pa.Table, tx: Any) -> None:
        columns = [rows["partition"], rows["sequence_number"], rows["body"].cast(pa.string())]
        tx.write(pa.Table.from_arrays(columns, names=["partition", "number", "body"]), "seen")

    run(consumer, task["connection"], task["hub"], balance_every=0.5, expire_after=3.0, max_events=500, max_wait=0.1)
