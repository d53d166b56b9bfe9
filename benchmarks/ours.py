"""Our side: a consumer as anybody would write it, and the same one for filling tables without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from benchmarks.events import ORDER
from dedup import Consumer, decode
from dedup.pipeline.tx import Handler

SINK = "orders"


def load(orders: Any, tx: Any) -> None:
    """Append all orders to a sink."""
    tx.write(orders.select("data.*"), SINK)


def consumer(store: Any, handler: Handler = load, **options: Any) -> Consumer:
    """Decode the body, one effect for each order id, append to a sink, or whatever this handler does."""
    made = bare_consumer(store, **options)
    made.foreach_batch(handler)
    return made


def arrow_consumer(store: Any) -> Consumer:
    """The same consumer for batches that are Arrow tables."""
    made = bare_consumer(store)

    @made.foreach_batch
    def copy(orders: pa.Table, tx: Any) -> None:
        """Write the decoded rows to the sink."""
        tx.write(pa.Table.from_struct_array(orders["data"]), SINK)

    return made


def fill(store: Any, batches: Iterable[pa.Table]) -> None:
    """Let the same consumer process these batches as Arrow tables."""
    made = arrow_consumer(store)
    for number, batch in enumerate(batches):
        made(batch, number)


def bare_consumer(store: Any, **options: Any) -> Consumer:
    """The consumer without a handler."""
    return Consumer("benchmark", store=store, idempotence_key="data.order_id", decode=decode.json(ORDER), **options)
