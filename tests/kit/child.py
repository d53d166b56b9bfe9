"""A consumer in a process of its own, to be killed: started by children.py.

Reads batches of a generated log as a Spark query would (planned batches replay until they are finished; progress is a
file), and kills itself right before the n-th occurrence of a named step, or tells a file that it got there and waits.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kit.local_tasks import Told, run_in
from kit.orders import batch, consumer, event, flatten

LENGTH, PARTITIONS = 24, 2

MANY = [(0, 6), (6, 12), (12, 18), (18, LENGTH)], 8
"""The events of each batch, of every partition, and how many a transaction takes: two transactions a batch."""

FEW = [(0, 4), (4, 16), (16, LENGTH)], 16
"""The same for `kit.places.SLOW`: two transactions in one batch, and one in the others. Whoever died at the first goes on through three."""


def log(partition: int) -> list[dict[str, Any]]:
    """A third of the events repeat a key; some are bad, keyless or undecodable."""
    dice = random.Random(partition)
    events = []
    for n in range(LENGTH):
        kind = dice.random()
        key = f"k{dice.randrange(PARTITIONS * LENGTH)}" if kind > 0.1 else None
        body = b"junk%d" % n if kind > 0.95 else None
        events.append(event(2 * n, key, 1, partition=partition, body=body))
    return events


def planned(first: int, end: int) -> pa.Table:
    """The events of one batch."""
    return batch(*[e for p in range(PARTITIONS) for e in log(p)[first:end]])


def handle(rows: pa.Table, tx: Any) -> None:
    """Answers differently each time: a tenth of the events is rejected at random."""
    rest = tx.reject(rows, pa.array([random.random() < 0.1 for _ in range(rows.num_rows)]), "coin")
    tx.write(flatten(rest), "orders")
    tx.publish(rest.select([]).append_column("body", pc.struct_field(rest["data"], "id")), "out", key="body")
    tx.write(
        rest.select([]).append_column("id", pc.struct_field(rest["data"], "id")).append_column("amount", pa.array([1] * rest.num_rows)),
        "audit",
    )


def main(task: dict[str, Any]) -> None:
    """Run to the end of the log, or die on the way."""
    from kit.places import SLOW, place_of

    place = place_of(task["kind"], task["place"])
    progress, left = Path(task["progress"]), {"n": task.get("nth", 1)}

    def on_step(name: str) -> None:
        if name == task.get("die_at"):
            left["n"] -= 1
            if left["n"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if name == task.get("wait_at"):
            Path(task["reached"]).touch()
            while not Path(task["resume"]).exists():
                time.sleep(0.01)

    batches, most = FEW if place.kind in SLOW else MANY
    run = consumer(
        place.store(on_step=on_step), query=task.get("query", "q"), max_events_per_transaction=most, takeover_after=task.get("after", 1.0)
    )
    run._handler = None
    (run.foreach_arrow() if task.get("in_tasks") else run.foreach_batch)(handle)
    done = int(progress.read_text()) if progress.exists() else 0
    while done < len(batches):
        rows = planned(*batches[done])
        if task.get("in_tasks"):
            run_in(Told(rows, on_step), run, rows, done)
        else:
            run(rows, done)
        done += 1
        progress.with_suffix(".new").write_text(str(done))
        progress.with_suffix(".new").rename(progress)
