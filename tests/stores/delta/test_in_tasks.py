"""Handlers of single events in tasks do what they do on the driver. The tasks here are a double for Spark's: one after the other, in this
process; test_foreach_files.py has the real ones.
"""

from __future__ import annotations

import datetime as dt
import enum
import os
import pickle
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle

from checkpoint.errors import ConfigError, HandlerError, SinkMismatch, StoreError, StoreUnavailable
from dedup import Consumer, DeltaStore
from dedup.outbox import Call, Dispatcher, Message
from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import Tasks, run_in
from kit.orders import batch, event, letters, orders
from kit.places import DeltaPlace
from kit.value_sinks import create

pytestmark = pytest.mark.delta

MERGED = ("id", "name", "mail")


def made_of(place: DeltaPlace, calls: list[list[tuple[str, str, int]]]) -> Consumer:
    """A consumer whose n-th event makes these calls: what, whose row, number."""
    made, people = bare(place.store()), place.path("people")

    @made.foreach(into=people)
    def book(event: Event, tx: Any) -> None:
        for what, key, number in calls[event.data["amount"]]:
            if what == "write":
                tx.write({"id": key, "amount": number}, "audit")
            elif what == "own":
                tx.write({"id": key, "name": str(number)}, people)
            elif what == "gone":
                tx.merge({"id": key, "gone": True}, people, keys="id", delete_when="gone")
            elif what in MERGED:
                tx.merge({"id": key, what: str(number)}, people, keys="id")
            else:
                tx.publish({"body": str(number), "key": key, "name": f"{event.data['id']}-{number}"}, "out", key="key", **ID[what])

    return made


ID: dict[str, dict[str, Any]] = {"send": {}, "send by id": {"id": "name"}}

CALLS = st.tuples(st.sampled_from(["write", "own", "gone", "name", "mail", *ID]), st.sampled_from("ab"), st.integers(0, 99))


def became(place: DeltaPlace) -> dict[str, Any]:
    """The sinks, and what was sent for each key, in order."""
    sent: list[Message] = []
    Dispatcher(place.store().outbox("shop"), Call(sent.extend)).once()
    return {
        "people": place.read_text("people", MERGED).sort_by([(n, "ascending") for n in MERGED]).to_pylist(),
        "audit": sorted((r["id"], r["amount"]) for r in place.read("audit")),
        "sent": {key: [m.body for m in sent if m.key == key] for key in (b"a", b"b")},
    }


@pytest.mark.full
@settings(max_examples=5, deadline=None)
@given(st.lists(st.lists(CALLS, max_size=4), min_size=1, max_size=12), st.booleans())
def test_tasks_do_what_the_driver_does(calls: list[list[tuple[str, str, int]]], split: bool) -> None:
    """Merges of several kinds and columns, writes and messages of every order: the sinks and what is sent are the same."""
    rows = batch(*(event(n, f"e{n}", n, partition=int(split and n > len(calls) // 2)) for n in range(len(calls))))
    found = []
    for tasks in (None, Tasks(rows), Tasks(rows, keeps=False)):
        with TemporaryDirectory() as folder:
            place = DeltaPlace(Path(folder))
            place.create_sink("audit")
            place.create_text_sink("people", MERGED)
            report = run_in(tasks, made_of(place, calls), rows)
            assert (report.processed, report.skipped) == (sum(map(bool, calls)), sum(not c for c in calls))
            found.append(became(place))
    assert found[0] == found[1] == found[2]


@pytest.fixture
def lake(tmp_path: Path) -> DeltaPlace:
    """A folder with the sink `orders`."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    return place


def test_rows_of_the_sink_come_behind_what_was_merged_into_it(lake: DeltaPlace) -> None:
    """A handler that merges into the sink of its own rows: the driver takes the returned ones last, and so do tasks."""
    made = bare(lake.store())

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        tx.merge({"id": event.data["id"], "amount": -1}, "orders", keys="id")
        return {"id": event.data["id"], "amount": 1}

    run_in(Tasks(batch(*orders(range(2)))), made, batch(*orders(range(2))))
    assert sorted((r["id"], r["amount"]) for r in lake.read()) == [("p0-0", -1), ("p0-0", 1), ("p0-1", -1), ("p0-1", 1)]


@pytest.mark.parametrize("keeps", [True, False, None], ids=["kept", "shuffled", "driver"])
@pytest.mark.parametrize("linked", of_which(1, [False, True]))
def test_one_sink_by_two_names_is_refused_where_the_order_counts(lake: DeltaPlace, keeps: bool | None, linked: bool) -> None:
    """Calls keep their order by name, and a merge needs it: nothing is committed. Rows that are only appended have no order."""
    rows, other, how = batch(*orders(range(2))), lake.path("orders"), {"keys": "id"}
    if linked:
        other = lake.path("link")
        Path(other).symlink_to(lake.path("orders"))
    names = ["orders", other, "orders"]
    store = lake.store()
    made = bare(store)

    @made.foreach(into=None)
    def book(event: Event, tx: Any) -> None:
        for number, name in enumerate(names):
            (tx.merge if how else tx.write)({"id": event.data["id"], "amount": number}, name, **how)

    with pytest.raises(HandlerError, match=r"in 2 ways, '/.*/(orders|link)' and 'orders', and merges"):
        run_in(None if keeps is None else Tasks(rows, keeps=keeps), made, rows)
    assert lake.read() == [] and letters(store) == []
    how.clear()
    assert run_in(None if keeps is None else Tasks(rows, keeps=keeps), made, rows).processed == 2
    assert sorted((row["id"], row["amount"]) for row in lake.read()) == [(f"p0-{n}", number) for n in range(2) for number in range(3)]


def test_events_that_do_not_come_back_from_tasks_stop_the_batch(lake: DeltaPlace) -> None:
    """Whatever loses rows between the driver and the tasks: none of them counts as processed."""
    made = bare(lake.store())
    made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1})
    with pytest.raises(StoreError, match="Of 5 events that Spark's tasks were given, 3 came back"):
        run_in(Tasks(lost=2), made, batch(*orders(range(5))))
    assert lake.read() == [] and letters(lake.store()) == []
    assert run_in(Tasks(batch(*orders(range(5)))), made, batch(*orders(range(5)))).processed == 5


@pytest.mark.parametrize("zone", of_which(1, ["GMT+02:00", "-08", "PST", "Z"]))
@pytest.mark.parametrize("keeps", [True, False])
def test_a_zone_that_only_java_knows_harms_no_event(lake: DeltaPlace, zone: str, keeps: bool) -> None:
    """Spark hands times over in its session's zone, in columns and inside them: handlers get them in UTC, as on the driver."""
    rows, noon = batch(*orders(range(3))), dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
    there, made = pa.timestamp("us", tz=zone), bare(lake.store())
    rows = rows.append_column("at", pa.array([noon] * 3, pa.timestamp("us", tz="UTC")).cast(there))
    rows = rows.append_column("in", pa.StructArray.from_arrays([rows["at"].combine_chunks()], ["at"]))

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        hour = event.others["at"].hour + event.others["in"]["at"].hour
        return {"id": event.data["id"], "amount": hour}

    report = run_in(Tasks(rows, keeps=keeps), made, rows)
    assert (report.processed, report.dead_lettered) == (3, 0)
    assert [row["amount"] for row in lake.read()] == [24, 24, 24]


def test_a_name_that_tx_does_not_have_stops_the_stream(lake: DeltaPlace) -> None:
    """As on the driver: the handler is wrong, and no event."""
    made, rows = bare(lake.store()), batch(*orders(range(3)))
    made.foreach_arrow(into="orders")(lambda events, tx: tx.wirte(events, "orders"))
    with pytest.raises(HandlerError, match="tx has no wirte"):
        run_in(Tasks(rows), made, rows)
    assert letters(lake.store()) == []


def test_tables_of_other_types_are_not_written_as_one(lake: DeltaPlace) -> None:
    """A decimal that is no double exactly is refused, whatever the rows of another partition are."""
    create(lake, "exact", {"id": pa.string(), "n": pa.float64()})
    kinds = [pa.array([Decimal("0.1234567890123456789")], pa.decimal128(38, 19)), pa.array([0.5], pa.float64())]
    made, rows = bare(lake.store()), batch(*orders([0]), *orders([0], partition=1))

    @made.foreach_arrow
    def book(events: pa.Table, tx: Any) -> None:
        tx.write(pa.table({"id": ["x"], "n": kinds[events["partition"][0].as_py()]}), lake.path("exact"))

    with pytest.raises(SinkMismatch, match="without loss"):
        run_in(Tasks(rows), made, rows)
    assert letters(lake.store()) == []


@pytest.mark.full
def test_a_task_that_makes_no_rows_says_nothing_of_a_column(lake: DeltaPlace) -> None:
    """No value of the first batch fits: the sink's column is wrong, and no event, although another partition has none to write."""
    made, rows = bare(lake.store()), batch(*orders(range(3)), *orders(range(3), partition=1))

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        return None if event.partition == 1 else {"id": event.data["id"], "amount": "no number"}

    with pytest.raises(SinkMismatch, match="amount"):
        run_in(Tasks(rows), made, rows)
    assert letters(lake.store()) == []


@pytest.mark.parametrize(("others", "parked"), [(None, 0), (7, 3)])
def test_a_partition_without_values_says_nothing_of_a_column(lake: DeltaPlace, others: int | None, parked: int) -> None:
    """Where all values that there are do not fit, the sink's column is wrong; one that fits says that the events are."""
    made, rows = bare(lake.store(), budget=None), batch(*orders(range(3)), *orders(range(3), partition=1))

    @made.foreach(into="orders")
    def book(event: Event, tx: Any) -> Any:
        return {"id": event.data["id"], "amount": others if event.partition == 1 else "no number"}

    with nullcontext() if parked else pytest.raises(SinkMismatch, match="amount"):
        run_in(Tasks(rows), made, rows)
    assert (len(letters(lake.store())), len(lake.read())) == (parked, parked)


def test_values_of_classes_that_no_module_has_come_back(lake: DeltaPlace) -> None:
    """A handler of a notebook travels with its classes: what it writes is not the events' fault."""

    class Status(enum.Enum):
        OPEN = 7

    made, rows = bare(lake.store()), batch(*orders(range(3)))

    @made.foreach
    def book(event: Event, tx: Any) -> None:
        tx.write({"id": event.data["id"], "amount": Status.OPEN}, "orders")

    assert run_in(Tasks(rows), made, rows).dead_lettered == 0
    assert [row["amount"] for row in lake.read()] == [7, 7, 7]


def test_options_of_a_function_do_not_travel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to tasks has the function and no credential; the store, its copies and the tasks work with what it returns."""
    asked: list[int] = []
    monkeypatch.setenv("SOME_KEY", "SECRET-17")

    def options() -> dict[str, str]:
        asked.append(1)
        return {"some_key": os.environ["SOME_KEY"]}

    class Watching(Tasks):
        sent: ClassVar[list[bytes]] = []

        def pack(self, what: object) -> bytes:
            """And keep it."""
            self.sent.append(super().pack(what))
            return self.sent[-1]

    place = DeltaPlace(folder)
    place.create_sink()
    store = DeltaStore(str(folder / "state"), tables={"orders": place.path("orders")}, storage_options=options)
    made = bare(store)
    made.foreach(into="orders")(lambda event, tx: dict(event.data))
    rows = batch(*orders(range(3)))
    assert run_in(Watching(rows), made, rows, 0).processed == 3
    assert Watching.sent and not any(b"SECRET-17" in one for one in Watching.sent)
    assert b"SECRET-17" not in cloudpickle.dumps(store) and dict(store.storage_options or {}) == {"some_key": "SECRET-17"}
    copy = pickle.loads(cloudpickle.dumps(store))
    assert len(asked) >= 1 and dict(copy.storage_options) == {"some_key": "SECRET-17"}
    plain = DeltaStore(str(folder / "state"), storage_options=options())
    assert b"SECRET-17" in cloudpickle.dumps(plain)


@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda: {"a": 5}, lambda: None])
def test_a_function_that_gives_no_options_is_told(folder: Path, wrong: Any) -> None:
    """One that raises is an outage; one that returns something else is a wrong setting."""
    store = DeltaStore(str(folder / "state"), storage_options=wrong)
    with pytest.raises((StoreUnavailable, ConfigError), match="storage_options="):
        store.storage_options and dict(store.storage_options)
