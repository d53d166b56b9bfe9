"""The handlers of docs/how-to/handlers.md do what the page says of them, and its links lead somewhere."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dedup import Consumer, FailurePolicy, PostgresStore, decode
from dedup.core.messages import Chosen
from dedup.pipeline.tx import Tx
from kit.paths import ROOT
from kit.pg_run import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (ROOT / "docs/how-to/handlers.md").read_text()
ORDER = pa.schema([("id", pa.string()), ("customer", pa.string()), ("amount", pa.int64()), ("status", pa.string()), ("seen", pa.int64())])
ORDERS: list[dict[str, Any]] = [
    {"id": "a", "customer": "ann", "amount": 1, "seen": 1},
    {"id": "b", "customer": "ann", "amount": 2, "seen": 2},
    {"id": "c", "customer": "bob", "amount": 3, "seen": 3, "status": "draft"},
    {"id": "d", "customer": "bob", "amount": -4, "seen": 4, "status": "sent"},
    {"id": "e", "amount": 5, "seen": 5, "status": "sent"},
]


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.parametrize("number", [0, 1])
def test_the_handlers_run(spark: SparkSession, postgres: str, number: int) -> None:
    """Skipped, rejected, parked, written, merged and published as the page says; the handler of single events skips and parks the same."""
    run(postgres, "create table orders (id text, customer text, amount bigint)")
    run(postgres, "create table customers (customer text primary key, seen bigint)")
    store = PostgresStore(postgres)
    consumer = Consumer("shop", store, idempotence_key="data.id", decode=decode.json(ORDER), query="q", failure=FailurePolicy(budget=None))
    orders = [{"status": "open", **order} for order in ORDERS]
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number], {"consumer": consumer})
    consumer(_events(spark, orders if number == 0 else orders[:4]), 0)
    reasons = {row["idempotence_key"]: row["reason"] for row in _letters(store)}
    assert sorted(run(postgres, "select id, amount from orders")) == [("a", 1), ("b", 2)]
    assert sum(record["skipped_rows"] for record in store.batches("shop").to_pylist()) == 1
    if number == 0:
        assert reasons == {"d": "negative amount", "e": "no customer"}
        assert run(postgres, "select * from customers") == [("ann", 2)]
        assert [entry.topic for entry in store.outbox("shop").entries(Chosen())] == ["shipments", "shipments"]
    else:
        assert list(reasons) == ["d"], reasons
        assert "negative amount" in reasons["d"]


def _events(spark: SparkSession, orders: list[dict[str, Any]]) -> Any:
    rows = spark.createDataFrame([(n, json.dumps(order)) for n, order in enumerate(orders)], "sequence_number bigint, text string")
    return rows.selectExpr("'hub' source", "'orders' topic", "0 partition", "sequence_number", "cast(text as binary) body")


def _letters(store: PostgresStore) -> list[dict[str, Any]]:
    from deadletter.selection import Selection

    found: list[dict[str, Any]] = store.letters(Selection()).to_pylist()
    return found


def test_the_table_names_what_tx_has() -> None:
    """Every public method of tx is a row of the table, with its parameters."""
    methods = {name: f for name, f in inspect.getmembers(Tx, inspect.isfunction) if f"tx.{name}(" in PAGE}
    rows = dict(re.findall(r"^\| `tx\.(\w+)\((.*?)\)`", PAGE, re.MULTILINE))
    assert rows.keys() == methods.keys() == {"write", "merge", "publish", "reject", "skip", "dead_letter"}
    for name, parameters in rows.items():
        told = re.findall(r"(\w+)(?:=\w*)?(?:, |$)", parameters)
        assert set(told) <= set(inspect.signature(methods[name]).parameters), name


@pytest.mark.parametrize("page", ["docs/how-to/handlers.md", "docs/tutorial/start.md"])
def test_links_lead_to_pages(page: str) -> None:
    """Each link names a file that is there."""
    links = re.findall(r"\]\(([\w./-]+)\)", (ROOT / page).read_text())
    assert links and all(((ROOT / page).parent / link).exists() for link in links)
