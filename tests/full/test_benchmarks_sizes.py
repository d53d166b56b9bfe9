"""The measures of large tables, shares of duplicates, storage and memory, at tiny sizes: what they compare is what they say.

How long anything takes is not looked at.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


pytestmark = pytest.mark.usefixtures("benchmarks")


def test_the_commit_path_commits_what_copy_writes(postgres: str, tmp_path: Path) -> None:
    """Both tables hold every order once, and ours has a reservation, a checkpoint and a batch record beside it."""
    from benchmarks import commit_path
    from benchmarks.stream import Sizes

    (measure,), seconds = commit_path.compare(None, postgres, tmp_path, Sizes(events=40, batches=3, warm=1))
    assert (measure.measure, measure.better) == ("postgres/commit_path_vs_copy", "higher")
    assert [len(taken) for taken in seconds.values()] == [2, 2]
    with psycopg.connect(postgres) as connection:
        counts = "select (select count(*) from dedup.reservation), (select sum(sequence_number + 1) from dedup.checkpoint)"
        assert connection.execute(counts).fetchone() == (120, 120)


def test_bytes_are_of_reservations_that_are_there(postgres: str, tmp_path: Path) -> None:
    """As many rows on both sides as were asked for, their indexes included: more than their 24 bytes of data."""
    from benchmarks import storage
    from benchmarks.stream import Sizes

    (measure,), _ = storage.compare(None, postgres, tmp_path, Sizes(events=1000, reservations=2500))
    assert (measure.measure, measure.unit, measure.better) == ("postgres/bytes_per_reservation", "bytes", "lower")
    assert 60 < measure.ours < 200


def tables(dsn: str) -> list[int]:
    """Reservations of each table."""
    with psycopg.connect(dsn) as connection:
        return [count for (count,) in connection.execute("select count(*) from dedup.reservation group by tableoid order by tableoid")]


def test_reservations_are_made_in_as_many_tables_as_asked(postgres: str) -> None:
    """Rotation comes before the next key is written, also inside a step, and no key is made twice."""
    from benchmarks.reserved import reserve
    from dedup.postgres import PostgresStore

    store = PostgresStore(postgres)
    reserve(store, 700, step=200, rotate_every=300)
    assert tables(postgres) == [300, 300, 100]
    with pytest.raises(AssertionError, match="100 keys are known"):
        reserve(store, 100, step=100)
    store.close()


def test_reservations_are_generated_in_as_many_tables_as_asked(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a table is no multiple of a step."""
    from benchmarks import reserved

    monkeypatch.setattr(reserved, "STEP", 200)
    reserved.generate(postgres, 700, 300)
    assert tables(postgres) == [300, 300, 100]


IN_TASKS = [f"delta/{name}" for name in ("foreach_arrow_vs_append_50k", "foreach_vs_floor", "foreach_arrow_vs_append")]
IN_TASKS.append(f"{IN_TASKS[-1]}_across")


@pytest.mark.delta
def test_large_tables_and_batches_on_delta_are_verified(spark: SparkSession, tmp_path: Path) -> None:
    """Ten times the events, ten times the keys: sinks hold what they promise, and made orders are counted right."""
    from benchmarks import delta, delta_tasks
    from benchmarks.events import Facts
    from benchmarks.stream import INSIDE, Sizes

    sizes = Sizes(events=40, batches=6, warm=3, large=80, many=2_500)
    large = ["delta/append_500k", "delta/append_500k_in_tasks"]
    for part, names in ((delta.compare_large, large), (delta.compare_merge_many, ["delta/merge_10m"])):
        folder = tmp_path / part.__name__
        folder.mkdir()
        measures, seconds = part(spark, folder, sizes)
        assert [measure.measure for measure in measures] == names
        assert {len(taken) for taken in seconds.values()} == {1}
        assert len([way for way in seconds if INSIDE not in way]) == len(names) + 1
        assert {"rows from Spark to Arrow", "commit", "publish"} <= {way.split(INSIDE)[1] for way in seconds if INSIDE in way}
    for part, names in ((delta_tasks.compare, IN_TASKS[:2]), (delta_tasks.compare_large, IN_TASKS[2:])):
        (folder := tmp_path / f"tasks {len(names)} {part.__name__}").mkdir()
        measures, _ = part(spark, folder, sizes)
        assert [measure.measure for measure in measures] == names
    made = delta.create_tables(tmp_path / "made", "there")["there"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "MADE", 700)
        facts = delta.make_orders(spark, [made], 2_000)
    delta.verify(made, facts, once=True)
    assert facts == Facts(2_000, 2_000, sum(range(2_000)))


def test_handlers_in_tasks_on_postgres_are_verified(
    spark: SparkSession, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow tables and single events beside appends: each sink holds what its way promises. COPY stands in for JDBC's driver."""
    from benchmarks import postgres_tasks
    from benchmarks.events import decoded
    from benchmarks.postgres import copy_rows
    from benchmarks.stream import Sizes

    def by_copy(dsn: str, table: str, make: Any = decoded) -> Any:
        def way(batch: Any, batch_id: int) -> None:
            with psycopg.connect(dsn) as connection:
                copy_rows(connection, table, make(batch).toArrow())

        return way

    monkeypatch.setattr(postgres_tasks, "jdbc", by_copy)
    measures, seconds = postgres_tasks.compare(spark, postgres, tmp_path, Sizes(events=40, batches=2, warm=1, duplicates=0.5))
    assert [measure.measure for measure in measures] == ["postgres/foreach_arrow_vs_jdbc", "postgres/foreach_vs_floor"]
    assert {len(taken) for taken in seconds.values()} == {1} and len(seconds) == 4


def test_every_share_of_duplicates_is_measured(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both contests run with no duplicates and with half of them, and their measures are named by the share."""
    from benchmarks import delta, duplicates
    from benchmarks import postgres as ways
    from benchmarks.report import throughput
    from benchmarks.stream import Sizes

    def contest(name: str) -> Callable[..., Any]:
        return lambda *given: ([throughput(name, [1.0], [1.0], 1 + int(100 * given[-1].duplicates))], {})

    monkeypatch.setattr(ways, "compare", contest("postgres/a"))
    monkeypatch.setattr(delta, "compare_appends", contest("delta/b"))
    measures, _ = duplicates.compare(None, tmp_path, postgres, Sizes())
    wanted = [(f"{name}_duplicates_{n}", 1 + n) for n in (0, 50) for name in ("postgres/a", "delta/b")]
    assert [(m.measure, m.ours) for m in measures] == wanted
    measures, _ = duplicates.compare_large(None, tmp_path, postgres, Sizes())
    assert [(m.measure, m.ours) for m in measures] == [
        ("postgres/a_500k", 2),
        *((name.replace("_duplicates", "_500k_duplicates"), ours) for name, ours in wanted),
    ]


@pytest.mark.delta
def test_memory_is_measured_for_each_size_of_batches(spark: SparkSession, postgres: str, tmp_path: Path) -> None:
    """One measure for each store and size, beside bringing the rows to the driver and nothing else."""
    from benchmarks import memory
    from benchmarks.stream import Sizes

    measures, _ = memory.compare(spark, postgres, tmp_path, replace(Sizes(), large=200))
    assert [m.measure for m in measures] == [f"{store}/driver_memory_{n}" for n in (4, 20, 40, 200) for store in ("postgres", "delta")]
    assert {(m.unit, m.better) for m in measures} == {("MB", "lower")}


def test_the_high_water_mark_sees_what_was_held_and_let_go() -> None:
    """Memory that a way has given back before it returns counts all the same."""
    from benchmarks import memory

    held: list[float] = []
    memory._watched(lambda batch, batch_id: len(b"x" * 64 * 2**20), held)(None, 0)
    assert 60 < held[0] < 200


def test_single_measures_are_put_into_latest_json(tmp_path: Path) -> None:
    """A measure takes the place of the one of its name; the others stay as they are, in their order."""
    from benchmarks import report

    path = tmp_path / "latest.json"
    first, second = report.latency("a", [0.001], [0.001]), report.latency("b", [0.001], [0.001])
    report.save([first, second], path)
    report.merge([report.size("c", 2.0, 1.0), replace(first, ratio=3.0)], path)
    assert [(line["measure"], line["ratio"]) for line in json.loads(path.read_text())] == [("a", 3.0), ("b", 1.0), ("c", 2.0)]
