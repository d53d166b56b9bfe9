"""The crash kit tells each way in which a job breaks its promises, and nothing of a job that keeps them."""

from __future__ import annotations

import datetime as dt
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from dedup import Consumer, DeltaStore, FailurePolicy, decode
from dedup.testing import Faults, Job, check, deliver, kit, plan
from dedup.testing.dying import Death, Died
from dedup.testing.kit import Life
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = pa.table({"id": [f"o{n}" for n in range(24)], "amount": list(range(24))})
ORDER = pa.schema([("id", pa.string()), ("amount", pa.int64())])

Function = Callable[[Any, int, dict[str, Any]], None]


def job(function: Function) -> Callable[[Path], Job]:
    """A plain foreachBatch function over a sink in memory, which holds rows by key."""

    def make(place: Path) -> Job:
        memory: dict[str, dict[Any, Any]] = {"orders": {}}
        return _job(function, memory)

    return make


def _job(function: Function, memory: dict[str, dict[Any, Any]]) -> Job:
    def run(batch: Any, number: int) -> None:
        function(batch, number, memory)

    run.__wrapped__ = function  # type: ignore[attr-defined]  # the lines and the clock of the user's function
    return Job(run, lambda: {name: list(rows.values()) for name, rows in memory.items()})


def valid(row: dict[str, Any]) -> bool:
    return row["id"] is not None


def upserts(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    """Keeps every promise."""
    for row in filter(valid, batch.to_pylist()):
        memory["orders"][row["id"]] = row


def appends(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in filter(valid, batch.to_pylist()):
        memory["orders"][len(memory["orders"])] = row


def inserts(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in filter(valid, batch.to_pylist()):
        if row["id"] in memory["orders"]:
            raise ValueError(f"duplicate key {row['id']}")
        memory["orders"][row["id"]] = row


def remembers_batches(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    """Skips a batch number it has begun before: what a death left undone is never done."""
    if ("begun", number) in memory["orders"]:
        return
    memory["orders"]["begun", number] = {"id": f"batch {number}"}
    upserts(batch, number, memory)


def tells_the_day(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in filter(valid, batch.to_pylist()):
        memory["orders"][row["id"]] = {**row, "day": dt.date.today().isoformat(), "at": time.time()}


def draws(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in filter(valid, batch.to_pylist()):
        memory["orders"][row["id"]] = {**row, "lot": random.random()}


def sums(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    whole = [row["id"] for row in batch.to_pylist() if valid(row)]
    memory["orders"][min(whole, default="")] = {"first": min(whole, default=""), "rows": len(whole)}


def takes_the_last(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in filter(valid, batch.to_pylist()):
        memory["orders"]["last"] = row


def needs_an_id(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    for row in batch.to_pylist():
        memory["orders"][row["id"].upper()] = row


def fails(batch: pa.Table, number: int, memory: dict[str, Any]) -> None:
    raise LookupError("no such table")


@pytest.mark.parametrize(
    ("function", "broken"),
    [
        (upserts, set()),
        (appends, {kit.DOUBLED, kit.STAYS}),
        (inserts, {kit.TWICE, kit.DEATH, kit.STAYS}),
        (remembers_batches, {kit.DEATH, kit.STAYS, kit.PART}),
        (tells_the_day, {kit.CLOCK}),
        (draws, {kit.CHANCE}),
        (sums, {kit.PART}),
        (takes_the_last, {kit.ORDER}),
        (needs_an_id, {kit.POISON}),
        (fails, {kit.CLEAN_INPUT}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_kit_names_what_a_plain_function_breaks(function: Function, broken: set[str]) -> None:
    """Without any store: a function that foreachBatch would call is told its broken promises, and only those."""
    found = check(job(function), ROWS)
    assert broken <= found.broken, str(found)
    assert found.broken <= broken | ({kit.DOUBLED, kit.TWICE, kit.ORDER} if function in (sums, takes_the_last) else set()), str(found)


def changes_its_frame(batch: Any, number: int, memory: dict[str, Any]) -> None:
    batch["amount"] = batch["amount"].fillna(0)
    batch["seen"] = number
    for row in batch.dropna().to_dict("records"):
        memory["orders"][row["id"]] = {"id": row["id"], "amount": int(row["amount"])}


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.delta
def test_a_handler_of_events_is_watched_on_spark_too(spark: SparkSession, tmp_path: Path) -> None:
    """It runs where the kit sees it, whatever the job holds: in a task a change of its event, or a death, would be somebody else's."""
    DeltaTable.create(str(tmp_path / "orders"), schema=ORDER)
    store = DeltaStore(str(tmp_path / "state"), tables={"orders": str(tmp_path / "orders")})
    consumer, lock = Consumer("shop", store, idempotence_key="data.id", decode=decode.json(ORDER)), threading.Lock()

    @consumer.foreach(into="orders")
    def book(event: Any, tx: Any) -> Any:
        with lock:  # cannot be pickled
            row = dict(event.data)
            event.data["amount"] = 0
            return row

    life = Life(Job(consumer, lambda: {"orders": DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()}))
    (batch,) = deliver(ROWS, batches=1)
    with pytest.raises(Died):
        life.batch(spark.createDataFrame(batch), 0, Death(line=(book.__code__.co_filename, book.__code__.co_firstlineno + 3), visit=1))
    assert not life.changed_input and not life.effect()["orders"]
    life.batch(spark.createDataFrame(batch), 0)
    assert life.changed_input and sum(life.effect()["orders"].values()) == ROWS.num_rows


def test_a_frame_that_is_changed_is_told() -> None:
    """What a function does to the frame it was given is seen: the same frame may be given again."""
    found = check(job(changes_its_frame), ROWS, frame=pa.Table.to_pandas)
    assert found.broken == {kit.INPUT}, str(found)


Handler = Callable[[pa.Table, Any], None]


def flat(rows: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([pc.struct_field(rows["data"], n) for n in ORDER.names], names=ORDER.names)


def writes(rows: pa.Table, tx: Any) -> None:
    """Keeps every promise."""
    good = tx.reject(rows, pc.equal(pc.struct_field(rows["data"], "amount"), 5), "unlucky")
    tx.write(flat(good), "orders")


OUTSIDE: list[dict[str, Any]] = []


def writes_elsewhere(rows: pa.Table, tx: Any) -> None:
    OUTSIDE.extend(flat(rows).to_pylist())
    writes(rows, tx)


def needs_it_new(rows: pa.Table, tx: Any) -> None:
    for row in flat(rows).to_pylist():
        if row in OUTSIDE:
            raise ConnectionError("409 conflict: this order is known")
        OUTSIDE.append(row)
    writes(rows, tx)


def changes_its_event(event: Any, tx: Any) -> dict[str, Any]:
    event.data["amount"] += 1
    return dict(event.data)


def consumer_job(handler: Handler, *, single: bool = False) -> Callable[[Path], Job]:
    """A Consumer on Delta; the handler may also write to OUTSIDE, which `read` shows."""
    from deltalake import DeltaTable

    def make(place: Path) -> Job:
        OUTSIDE.clear()
        DeltaTable.create(str(place / "orders"), schema=ORDER)
        store = DeltaStore(str(place / "state"), tables={"orders": str(place / "orders")})
        made = Consumer(
            "shop", store, idempotence_key="data.id", decode=decode.json(ORDER), failure=FailurePolicy(max_outage=0.0), query="q"
        )
        made.foreach(into="orders")(handler) if single else made.foreach_batch(handler)
        return Job(made, lambda: {"orders": DeltaTable(str(place / "orders")).to_pyarrow_table(), "outside": list(OUTSIDE)})

    return make


@pytest.mark.delta
@pytest.mark.parametrize(
    ("handler", "broken"),
    [
        pytest.param(writes, set(), marks=pytest.mark.full),
        pytest.param(writes_elsewhere, {kit.OUTSIDE, kit.DOUBLED}, marks=pytest.mark.full),
        pytest.param(needs_it_new, {kit.OUTSIDE, kit.DEATH}, marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_kit_names_what_a_handler_breaks(handler: Handler, broken: set[str]) -> None:
    """A Consumer dies at every step of its store and every line of its handler; what stays outside of tx is told, and nothing else."""
    found = check(consumer_job(handler), ROWS, batches=1 if handler is writes_elsewhere else 2)
    assert found.broken == broken, str(found)
    assert {"dies right before the step 'commit'", "dies right before the step 'publish'"} <= set(found.tried)


@pytest.mark.full
@pytest.mark.delta
def test_a_sound_consumer_is_not_accused_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The damaged events stay within the default budget, which a sample of thousands of rows fills with a tenth of them."""
    monkeypatch.setattr(kit._Kit, "run", kit._Kit._poison)  # the other schedules take minutes with so many rows
    rows = pa.table({"id": [f"o{n}" for n in range(2000)], "amount": list(range(2000))})
    found = check(consumer_job(writes), rows, as_events=True)
    assert found.ok and "bad events among them" in found.tried, str(found)


@pytest.mark.delta
def test_an_event_that_a_handler_changes_is_seen(tmp_path: Path) -> None:
    """A handler of single events gets the same event again after a retry: that it has changed one is seen in its first batch."""
    life = Life(consumer_job(changes_its_event, single=True)(tmp_path))
    (batch,) = deliver(ROWS.slice(0, 2), batches=1)
    life.batch(batch, 0)
    assert life.changed_input and sum(life.effect()["orders"].values()) == 2
    life.close()


@pytest.mark.full
@pytest.mark.delta
def test_an_event_that_a_handler_changes_is_told() -> None:
    """Of all schedules of such a handler the verdict says that it changes its input."""
    found = check(consumer_job(changes_its_event, single=True), ROWS.slice(0, 8), batches=1)
    assert kit.INPUT in found.broken, str(found)


def test_the_same_seed_tries_the_same() -> None:
    """A verdict can be had again by its seed."""
    one, other = (check(job(appends), ROWS, seed=3) for _ in range(2))
    assert str(one) == str(other) and one.tried == other.tried


def test_a_delivery_loses_nothing_and_keeps_the_order_of_partitions() -> None:
    """Every event is delivered at least once, first in the order of its partition; a seed gives the same delivery."""
    faults = Faults(duplicated=0.2, duplicate_lag=5, rebalanced=0.8, lagging=True)
    planned = plan(500, 7, 9, faults)
    event = planned.log["event"].to_numpy()
    first = planned.log.filter(pc.invert(planned.log["redelivered"]))["event"]
    assert sorted(first.to_pylist()) == list(range(planned.topic.num_rows)) and len(event) > len(first)
    delivered = planned.topic.take(first)
    for p in range(4):
        numbers = delivered.filter(pc.equal(delivered["partition"], p))["sequence_number"].to_pylist()
        assert numbers == sorted(set(numbers))
    assert plan(500, 7, 9, faults) == planned and plan(500, 8, 9, faults) != planned
    assert set(planned.topic["row"].to_pylist()) == set(range(500)) and planned.duplicates > 50 and planned.redelivered > 50


def test_clean_rows_become_events_or_stay_rows() -> None:
    """Rows of any kind of frame are delivered, as JSON bodies in the envelope or as they are."""
    as_rows = pa.concat_tables(deliver(ROWS.to_pandas(), as_events=False))
    assert set(as_rows["id"].to_pylist()) == set(ROWS["id"].to_pylist()) and as_rows.column_names == ["id", "amount"]
    bodies = pa.concat_tables(deliver(ROWS.to_pylist()))["body"].to_pylist()
    assert {json.loads(body)["id"] for body in bodies} == set(ROWS["id"].to_pylist())


def test_rows_that_lack_columns_are_delivered_whole() -> None:
    """Of a list of dicts each name is a column, not those of the first row alone."""
    bodies = pa.concat_tables(deliver([{"id": 1}, {"id": 2, "note": "x"}]))["body"].to_pylist()
    notes = {json.loads(body)["id"]: json.loads(body).get("note") for body in bodies}
    assert notes == {1: None, 2: "x"}


PLUGIN = """
def test_job(crash_kit):
    from dedup.testing import Job
    def make(place):
        rows = []
        return Job(lambda batch, number: rows.extend(batch.to_pylist()), lambda: {"orders": rows})
    crash_kit(make, [{"id": n} for n in range(9)])

def test_idle():
    import sys
    assert "dedup.testing.kit" not in sys.modules
"""


@pytest.mark.full
def test_the_fixture_fails_a_test_in_plain_words(tmp_path: Path) -> None:
    """`crash_kit` in a user's test tells the broken promise; a run that does not ask for it imports nothing of the kit."""
    (tmp_path / "test_user.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "dedup.testing.plugin", "-q", "test_user.py", "-k"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "job"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and kit.DOUBLED in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command, "idle"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
