"""The processes of test_outbox_pipeline.py, to be killed: they run until a file says that it is enough."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoint.position import Partition
from dedup import Consumer, PostgresStore
from dedup.envelope import POSITION
from dedup.outbox import Dispatcher, Patience

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
PAGE = 4_000


def rows_of(events: pa.Table) -> pa.Table:
    """What is written of an event."""
    return pa.table([events["key"].cast(pa.string()), events["body"].cast(pa.string()).cast(pa.int64())], schema=SCHEMA)


def first(events: pa.Table, tx: Any, out: str) -> None:
    """Write each event and send it on."""
    tx.write(rows_of(events), "first")
    tx.publish(events.select([*POSITION, "key", "body"]), out, key="key", order="part")


def consume(task: dict[str, Any]) -> None:
    """A consumer that reads a topic behind its own checkpoints, page by page."""
    from dedup.kafka import Broker, log_reader

    store, broker = PostgresStore(task["dsn"]), Broker(task["servers"])
    consumer = Consumer(task["name"], store, query="q", takeover=True, key_scope="consumer")
    if task["name"] == "first":
        consumer.foreach_batch(lambda events, tx: first(events, tx, task["out"]))
    else:
        consumer.foreach_batch(lambda events, tx: tx.write(rows_of(events), "last"))
    read = log_reader(broker)
    while not Path(task["until"]).exists():
        head = store.head(task["name"])
        points = {p: c.sequence_number for p, c in head.checkpoints.items()}
        pages = []
        for (topic, number), (begin, end) in broker.spans([task["topic"]]).items():
            start = max(points.get(Partition("kafka", topic, number), -1) + 1, begin)
            if start < end:
                pages.append(read.read(topic, number, start, min(end, start + PAGE) - 1))
        if any(page.num_rows for page in pages):
            consumer(pa.concat_tables(pages), 0 if head.batch_id is None else head.batch_id + 1)
        else:
            time.sleep(0.05)


def dispatch(task: dict[str, Any]) -> None:
    """A dispatcher."""
    from dedup.kafka import Topics

    stop = threading.Event()

    def wait() -> None:
        while not Path(task["until"]).exists():
            time.sleep(0.05)
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    outbox = PostgresStore(task["dsn"]).outbox("first")
    Dispatcher(outbox, Topics(task["servers"]), limit=2_000, patience=Patience(most=1.0)).run(stop, every=0.05)


def main(task: dict[str, Any]) -> None:
    """What the task says."""
    {"consume": consume, "dispatch": dispatch}[task["do"]](task)
