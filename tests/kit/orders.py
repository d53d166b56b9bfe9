"""Events, consumers and handlers that fail, of the contract suite: orders as JSON, one row of the sink for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.selection import Selection
from dedup import Consumer, decode
from dedup.core.envelope import ENVELOPE
from dedup.core.store import Store
from dedup.verify import verify
from kit.grouped import grouped

ORDER = pa.schema([("id", pa.string()), ("amount", pa.int64())])


def event(
    number: int, id: str | None = None, amount: int = 1, *, partition: int = 0, body: bytes | None = None, **columns: Any
) -> dict[str, Any]:
    """One delivered event; `body` overrides the order."""
    order = json.dumps({"id": id, "amount": amount}).encode()
    position = {"source": "broker", "topic": "orders", "partition": partition, "sequence_number": number, "offset": f"@{number}"}
    return {**position, "part": 0, "body": order if body is None else body, "properties": [], **columns}


def batch(*events: dict[str, Any]) -> pa.Table:
    """A batch as a source delivers it."""
    return pa.Table.from_pylist(list(events), schema=ENVELOPE)


def orders(numbers: Iterable[int], *, partition: int = 0) -> list[dict[str, Any]]:
    """Events with a key of their own each."""
    return [event(n, f"p{partition}-{n}", n, partition=partition) for n in numbers]


def consumer(store: Store, *, name: str = "shop", **settings: Any) -> Consumer:
    """Writes each order to the sink `orders`; rejects negative amounts."""
    made = Consumer(
        name,
        store,
        **grouped(
            **{
                "idempotence_key": "data.id",
                "decode": decode.json(ORDER),
                "query": "q",
                "takeover_after": 1.0,
                "max_outage": 0.0,
                **settings,
            }
        ),
    )
    made.foreach_batch(write_orders)
    return made


def write_orders(rows: pa.Table, tx: Any) -> None:
    """The handler of most tests."""
    flat = pc.struct_field(rows["data"], "amount")
    good = tx.reject(rows, pc.less(flat, 0), "negative amount")
    tx.write(flatten(good), "orders")


def flatten(rows: pa.Table) -> pa.Table:
    """The order columns of the decoded bodies."""
    return pa.Table.from_arrays([pc.struct_field(rows["data"], n) for n in ORDER.names], names=ORDER.names)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    """The ids of sink rows."""
    return [r["id"] for r in rows]


def letters(store: Store, **selection: Any) -> list[dict[str, Any]]:
    """All dead letters."""
    return store.letters(Selection(**{"limit": None, **selection})).to_pylist()


def assert_proven(store: Store, name: str = "shop") -> None:
    """The tables prove themselves."""
    report = verify(store, name)
    assert report.ok, report.contradictions


class BadOrder(ValueError):
    """What the handler raises."""


def raising(bad: Callable[[str], bool], runs: list[int] | None = None) -> Callable[[pa.Table, Any], None]:
    """A handler that raises for a batch with a bad id in it, and writes the others."""

    def handler(rows: pa.Table, tx: Any) -> None:
        if runs is not None:
            runs.append(rows.num_rows)
        flat = flatten(rows)
        tx.write(flat, "orders")
        wrong = [i for i in flat["id"].to_pylist() if bad(i)]
        if wrong:
            raise BadOrder(f"cannot book order {wrong[0]}")

    return handler


def recorded(*events: dict[str, Any]) -> Callable[..., pa.Table]:
    """A log that has these events."""
    return reader_of(batch(*events))


def reader_of(whole: pa.Table) -> Callable[..., pa.Table]:
    """A log reader over these rows."""

    def read(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
        return whole.filter(
            (pc.field("partition") == partition) & (pc.field("sequence_number") >= first) & (pc.field("sequence_number") <= last)
        )

    return read
