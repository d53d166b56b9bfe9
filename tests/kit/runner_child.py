"""A runner process of its own, to be stopped and killed: started by the nursery of the contract suite."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dedup import Consumer, decode
from kit import retail
from kit.grouped import grouped
from kit.orders import ORDER, write_orders

NAME = "shop"


def consumer(store: Any, **settings: Any) -> Consumer:
    """Each order into the sink `orders`, negative amounts parked."""
    made = Consumer(NAME, store, idempotence_key="data.id", decode=decode.json(ORDER), **grouped(**{"takeover_after": 2.0, **settings}))
    made.foreach_batch(write_orders)
    return made


def retail_consumer(store: Any, **settings: Any) -> Consumer:
    """Order lines of Online Retail: the whole row is the key; bad ones are parked."""
    keys = [f"data.{name}" for name in retail.COLUMNS]
    made = Consumer(
        retail.CONSUMER, store, idempotence_key=keys, decode=decode.json(retail.ROW), **grouped(**{"takeover_after": 2.0, **settings})
    )
    made.foreach_batch(write_lines)
    return made


def write_lines(rows: pa.Table, tx: Any) -> None:
    """Each check in its turn, as in the Spark stream of the same input."""
    for reason, check in LINE_CHECKS.items():
        rows = tx.reject(rows, check(pa.Table.from_struct_array(rows["data"])), reason)
    tx.write(pa.Table.from_struct_array(rows["data"]), retail.SINK)


LINE_CHECKS: dict[str, Callable[[pa.Table], Any]] = {
    "no description": lambda t: pc.is_null(t["Description"]),
    "negative quantity": lambda t: pc.and_(pc.less(t["Quantity"].cast(pa.int32()), 0), pc.invert(pc.starts_with(t["InvoiceNo"], "C"))),
    "no order": lambda t: pc.starts_with(t["InvoiceNo"], "A"),
    "negative price": lambda t: pc.less(t["UnitPrice"].cast(pa.float64()), 0),
}
"""Reason -> which lines."""


def main(task: dict[str, Any]) -> None:
    """Run until a signal comes."""
    from dedup.eventhub import run
    from kit.places import place_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("azure").setLevel(logging.ERROR)
    place = place_of(task["kind"], task["place"])
    made = (retail_consumer if task.get("retail") else consumer)(place.store(), **task.get("settings", {}))
    if "pause" in task:
        handle = made._handler
        assert handle is not None

        def slow(rows: pa.Table, tx: Any) -> None:
            Path(task["entered"] + f".{os.getpid()}").touch()
            time.sleep(task["pause"])
            handle(rows, tx)

        made._handler = slow
    if "deadly" in task:
        handle = made._handler
        assert handle is not None

        def deadly(rows: pa.Table, tx: Any) -> None:
            if task["deadly"] in [data["id"] for data in rows["data"].to_pylist()]:
                os.kill(os.getpid(), signal.SIGKILL)
            handle(rows, tx)

        made._handler = deadly
    quick = {"balance_every": 0.5, "expire_after": 3.0, "max_events": 300, "max_wait": 0.1, "retry_backoff_factor": 0.1}
    run(made, task["connection"], task["hub"], **{**quick, **task.get("options", {})})
