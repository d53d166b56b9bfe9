"""Messages that leave: who publishes them, who receives them, and what is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dedup import Consumer
from dedup.core.messages import MESSAGES, Chosen, Messages, lanes, random_ids
from dedup.core.store import Store
from dedup.outbox import Call, Dispatcher, Message
from kit.orders import consumer, flatten
from kit.places import Place


class Receiver:
    """What arrives, in order; refuses bodies in `refused`, with the error given for them."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.refused: dict[bytes, Exception] = {}

    def __call__(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (message.body or b"") in self.refused:
                raise self.refused[message.body or b""]
        self.got += messages

    def bodies(self, key: bytes | None = None) -> list[bytes | None]:
        """Of one key, or of all."""
        return [m.body for m in self.got if key is None or m.key == key]


def publisher(store: Store, **settings: Any) -> Consumer:
    """Writes each order and publishes it: key is the amount."""
    made = consumer(store, **settings)
    made._handler = None

    @made.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        rest = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative")
        tx.write(flatten(rest), "orders")
        tx.publish(outgoing(rest), "out", key="to", order="n")

    return made


def outgoing(rows: pa.Table) -> pa.Table:
    """Messages of orders, with the events' positions."""
    data = flatten(rows)
    return (
        rows.select(["source", "topic", "partition", "sequence_number", "part"])
        .append_column("body", data["id"])
        .append_column("to", data["amount"].cast(pa.string()))
        .append_column("n", pa.array([0] * rows.num_rows))
    )


def dispatcher(place: Place, receiver: Any, **options: Any) -> Dispatcher:
    """One that hands its messages to this receiver."""
    return Dispatcher(place.store().outbox("shop"), Call(receiver), **options)


def states(place: Place) -> dict[str, int]:
    """How many messages are in which state."""
    found = [e.state.name for e in place.store().outbox("shop").entries(Chosen(limit=None))]
    return {name: found.count(name) for name in sorted(set(found))}


def made(count: int, keys: int, size: int = 1, headers: list[Any] | None = None) -> Messages:
    """Messages whose bodies begin with their place."""
    of_key = pa.array([b"%d" % (n % keys) for n in range(count)])
    bodies = pa.array([b"%06d" % n + b"x" * size for n in range(count)])
    given = pa.array(headers or [None] * count, MESSAGES.field("headers").type)
    rows = pa.table([random_ids(count), of_key, bodies, given, lanes("t", of_key)], schema=MESSAGES)
    return Messages("t", rows, derived=False)
