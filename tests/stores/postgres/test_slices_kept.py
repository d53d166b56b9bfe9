"""Slices whose rows tasks have kept as files: the same as slices whose rows come by a shuffle. The tasks are a double (local_tasks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.changes import reset
from checkpoint.errors import PositionGap, StoreUnavailable
from dedup.decode.prepare import Prepare
from dedup.spark import keeping
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import Tasks, run_in
from kit.orders import assert_proven, batch, event, ids, letters, orders
from kit.places import PostgresPlace

pytestmark = pytest.mark.postgres

EITHER = pytest.mark.parametrize("keeps", [True, False], ids=["kept", "shuffled"])


@pytest.fixture
def base(postgres: str) -> PostgresPlace:
    """A database with the sink `orders`."""
    place = PostgresPlace(postgres)
    place.create_sink()
    return place


class NoShuffle(Tasks):
    """Tasks whose rows must not come by a shuffle, nor be evaluated a second time."""

    def firsts(self, prepare: Prepare) -> Any:
        """Nobody asks."""
        raise AssertionError("evaluated again")

    def run(self, *given: Any) -> pa.Table:
        """Nobody asks."""
        raise AssertionError("shuffled")


def tasks(rows: pa.Table, keeps: bool) -> Tasks:
    """Tasks that keep the rows, or cannot."""
    return NoShuffle(rows) if keeps else Tasks(rows, keeps=False)


@pytest.mark.parametrize("keeps", of_which(1, [True, False]), ids=["kept", "shuffled"])
def test_every_outcome_is_the_same_however_rows_come(base: PostgresPlace, keeps: bool) -> None:
    """New, repeated, failing, keyless and undecodable events of two partitions, chunk by chunk; letters say keys and bodies in full."""
    made, calls = bare(base.store(), max_events_per_transaction=5, sequence_key="data.id"), base.store().batches

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        numbers = events["sequence_number"].to_pylist()
        if numbers != sorted(numbers) or len(set(events["partition"].to_pylist())) > 1 or "_key" in events.column_names:
            raise KeyError(f"{numbers} {events.column_names}")
        if "p0-3" in [order["id"] for order in events["data"].to_pylist()]:
            raise ValueError("not three")
        return pa.Table.from_struct_array(events["data"])

    odd = [event(12, None, 1), event(13, "x", 1, body=b"junk"), event(14, "p0-1", 1)]
    rows = batch(*orders(range(12)), *odd, *orders(range(8), partition=1))
    report = run_in(tasks(rows, keeps), made, rows)
    assert (report.processed, report.duplicates, report.dead_lettered) == (19, 1, 3)
    found = letters(base.store())
    assert [(x["kind"], x["idempotence_key"]) for x in found] == [("HANDLER_ERROR", "p0-3"), ("NO_KEY", None), ("UNDECODABLE", None)]
    assert found[2]["body"] == b"junk" and all(x["body"] for x in found)
    assert sorted(ids(base.read())) == sorted([*(f"p0-{n}" for n in range(12) if n != 3), *(f"p1-{n}" for n in range(8))])
    assert [(r["partition"], r["chunk"]) for r in calls("shop").to_pylist() if r["partition"] == 0] == [(0, 0), (0, 1), (0, 2)]
    assert run_in(tasks(rows, keeps), made, rows).redelivered == 23
    assert_proven(base.store())


@EITHER
def test_a_gap_is_refused_before_any_slice_begins(base: PostgresPlace, keeps: bool) -> None:
    """Another query that leaves out positions of one partition commits nothing of the other, also in a later batch."""
    for query, numbers, others in (("first", range(3), range(3)), ("later", range(3, 5), range(9, 11)), ("later", range(3, 5), range(0))):
        made = bare(base.store(), query=query)
        made.foreach(into="orders")(lambda event, tx: dict(event.data))
        rows = batch(*orders(numbers), *orders(others, partition=1))
        if 9 in others:
            with pytest.raises(PositionGap, match=r"orders/1 .*3-8"):
                run_in(Tasks(rows, keeps=keeps), made, rows)
        else:
            run_in(Tasks(rows, keeps=keeps), made, rows)
    late = batch(*orders(range(9, 11), partition=1))
    with pytest.raises(PositionGap, match=r"orders/1 .*3-8"):
        run_in(Tasks(late, keeps=keeps), made, late, 1)
    assert len(base.read()) == 8
    assert_proven(base.store())


def test_keys_of_a_life_that_ended_meanwhile_do_not_count(base: PostgresPlace) -> None:
    """A person resets the consumer while tasks prepare rows, and a gap has the driver look again: in the new life these keys are new."""

    class Reset(Tasks):
        def keep(self, prepare: Prepare, folder: str) -> Any:
            """The consumer is reset, once, as soon as the rows are there."""
            found = super().keep(prepare, folder)
            if not base.store().head("shop").keyspace:
                base.store().amend("shop", reset, by="ann", reason="again")
            return found

    repeated = batch(event(9, "p0-0", 0), event(10, "p0-1", 1))
    for query, tasks_of, rows in (("first", Tasks, batch(*orders(range(3)))), ("later", Reset, repeated)):
        made = bare(base.store(), query=query)
        made.foreach(into="orders")(lambda event, tx: dict(event.data))
        run_in(tasks_of(rows), made, rows)
    assert sorted(ids(base.read())) == ["p0-0", "p0-0", "p0-1", "p0-1", "p0-2"]


def test_a_file_that_is_gone_decides_nothing_and_the_next_try_is_shuffled(
    base: PostgresPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removes a file between the two jobs: no slice of its task begins, and the rows come another way from then on."""

    class Emptied(Tasks):
        def spread(self, task: Any, parts: int, answers: pa.Schema) -> pa.Table:
            """Tasks that find nothing."""
            for path in Path(str(self.root)).glob(f"{keeping.PREFIX}*/*"):
                path.unlink()
            return super().spread(task, parts, answers)

    monkeypatch.setattr(keeping, "_not_shared", set())
    made, rows = bare(base.store()), batch(*orders(range(5)), *orders(range(5), partition=1))
    made.foreach(into="orders")(lambda event, tx: dict(event.data))
    gone = Emptied(rows, root=str(tmp_path))
    with pytest.raises(StoreUnavailable, match="Kept rows of the batch are gone"):
        run_in(gone, made, rows)
    assert base.read() == [] and base.store().head("shop").checkpoints == {}
    assert gone.folder() is None
    assert run_in(gone, made, rows).processed == 10
    assert_proven(base.store())
