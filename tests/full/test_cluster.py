"""A Spark standalone cluster: executors that see neither checkout nor driver have the library as users ship it, and die in mid-batch.

PostgreSQL is reached over the network. State and sinks of Delta are in the one folder that all processes share: a Delta table on a local
disk needs one.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fixtures.fix_places import BOTH
from kit.cluster_apps import Applications
from kit.cluster_driver import BAD, DEADLY, FATAL, HANDLERS, NOBODY, SLOW
from kit.orders import assert_proven, batch, event, ids, letters
from kit.paths import ROOT
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.spark_cluster import Cluster, can_hide, running_cluster, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

HIDES = pytest.mark.skipif(not can_hide(), reason="`unshare --mount` is for root: here workers see the files of the driver")

IN_TASKS = ["foreach", "foreach_arrow"]

SMALL_RESULTS = {"spark.driver.maxResultSize": "1m"}
"""A batch of a megabyte is too large for this driver."""

ELASTIC = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "3s",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.task.maxFailures": "4",
    "spark.sql.adaptive.enabled": "true",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A master and two workers."""
    with running_cluster() as one:
        yield one


@pytest.fixture(scope="module")
def applications(cluster: Cluster) -> Iterator[Applications]:
    """What starts drivers."""
    all_of_them = Applications(cluster)
    yield all_of_them
    all_of_them.stop()


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, cluster: Cluster) -> Place:
    """A database, or a folder that all share, with the sink `orders`."""
    delta = request.param == "delta"
    made: Place = DeltaPlace(cluster.shared / uuid.uuid4().hex) if delta else PostgresPlace(request.getfixturevalue("postgres"))
    made.create_sink()
    return made


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Where a test has the files of its stream, and its handlers their notes: all processes share it."""
    made = cluster.shared / uuid.uuid4().hex
    (made / "landing").mkdir(parents=True)
    return made


def order(partition: int, number: int, name: str) -> dict[str, Any]:
    """An event: the same name is the same message."""
    return event(number, name, 1, partition=partition)


def land(folder: Path, *files: list[dict[str, Any]]) -> None:
    """Files of the stream, two of which are a batch."""
    for events in files:
        number = len(list((folder / "landing").iterdir()))
        file = folder / "landing" / f"{number}.parquet"
        pq.write_table(batch(*events), file)
        os.utime(file, (1_000_000_000 + number,) * 2)


def orders(first: int, *names: str, partition: int = 0) -> list[dict[str, Any]]:
    """Events of one partition, from this position on."""
    return [order(partition, first + number, name) for number, name in enumerate(names)]


def land_duplicates(folder: Path, *more: str) -> set[str]:
    """Two batches of three partitions. A message comes twice in a partition, in two partitions and in two batches; `more` come once."""
    second = [*orders(2, *"hia", *more, partition=1), *orders(0, *"jk", partition=2)]
    land(folder, [*orders(0, *"abcdeb"), *orders(0, *"fg", partition=1)], second)
    land(folder, orders(6, *"lmc"), orders(2, *"nof", partition=2))
    return {*"abcdefghijklmno", *more}


def run(driver: Any, place: Place, folder: Path, handler: str, **task: Any) -> Any:
    """Run the stream to its end; returns what the driver answers."""
    return driver.ask(do=task.pop("do", "query"), **_task(place, folder, handler, **task))


def _task(place: Place, folder: Path, handler: str, **more: Any) -> dict[str, Any]:
    assert isinstance(place, DeltaPlace | PostgresPlace)
    return {"kind": place.kind, "place": place.where, "folder": str(folder), "handler": handler, **more}


def assert_once(place: Place, expected: set[str], parked: tuple[str, ...] = ()) -> None:
    """Each row once, these letters and no other, and the tables prove themselves."""
    assert ids(place.read()) == sorted(expected - set(parked))
    assert [letter["idempotence_key"] for letter in letters(place.store())] == list(parked)
    assert_proven(place.store())


@HIDES
def test_tasks_see_neither_the_checkout_nor_a_file_of_the_driver(applications: Applications, cluster: Cluster) -> None:
    """A task on each worker imports dedup from the shipped wheel alone, no module of the tests, and finds no file but shared ones."""
    secret, shared = cluster.home / "secret", cluster.shared / "there"
    for file in (secret, shared):
        file.touch()
    paths = [str(ROOT / "README.md"), str(secret), str(shared)]
    seen = applications.with_wheel().ask(do="look", modules=["dedup", "kit", "conftest"], paths=paths)
    assert len({one["cwd"] for one in seen}) == 2
    assert [one["paths"] for one in seen] == [dict(zip(paths, [False, False, True], strict=True))] * 2
    assert {one["modules"]["dedup"] for one in seen} == {"./dedup_spark.zip/dedup/__init__.py"}
    assert {(one["modules"]["kit"], one["modules"]["conftest"]) for one in seen} == {(None, None)}


@pytest.mark.parametrize("handler", HANDLERS)
def test_each_kind_of_handler_has_each_effect_once(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """Duplicates within a partition, across partitions and across batches, and an event that fails: one row each, and one letter."""
    expected = land_duplicates(folder, BAD)
    assert run(applications.with_wheel(), place, folder, handler)["errors"] == []
    assert_once(place, expected, (BAD,))


@pytest.mark.parametrize("handler", ["foreach", "frames"])
def test_an_environment_in_an_archive_has_the_library_too(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """`spark.archives` with a packed environment, and no `pyFiles`: each effect once."""
    expected = land_duplicates(folder, BAD)
    assert run(applications.packed(**ELASTIC), place, folder, handler)["errors"] == []
    assert_once(place, expected, (BAD,))


def large(first: int, number: int, partition: int = 0) -> list[dict[str, Any]]:
    """Events with large bodies, which do not compress."""
    bodies = (f'{{"id": "{n}", "amount": 1, "more": "{secrets.token_hex(1_000)}"}}'.encode() for n in range(first, first + number))
    return [event(n, partition=partition, body=body) for n, body in enumerate(bodies, first)]


@pytest.mark.parametrize("handler", ["tables", "frames"])
def test_a_batch_too_large_for_the_driver_goes_through_a_shared_folder(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, handler: str
) -> None:
    """A batch above `spark.driver.maxResultSize` is written to `scratch` by executors and read from there; nothing stays in it."""
    scratch = folder / "scratch"
    land(folder, large(0, 500), large(500, 500, partition=1))
    driver = applications.with_wheel(**SMALL_RESULTS)
    answer = run(driver, place, folder, handler, settings={"scratch": str(scratch)})
    assert (answer["errors"], answer["kept"]) == ([], [True])
    assert "using scratch files" in driver.said()
    assert_once(place, {str(n) for n in range(1_000)})
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("handler", IN_TASKS)
def test_rows_of_events_stay_in_a_shared_folder(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """With `scratch` on a path that all share, the rows of each batch are kept there and not shuffled: each effect once."""
    expected = land_duplicates(folder, BAD)
    answer = run(applications.with_wheel(**SMALL_RESULTS), place, folder, handler, settings={"scratch": str(folder / "scratch")})
    assert (answer["errors"], answer["kept"]) == ([], [True, True])
    assert_once(place, expected, (BAD,))


@HIDES
@pytest.mark.parametrize("handler", IN_TASKS)
def test_rows_of_events_come_another_way_where_the_folder_is_not_shared(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, handler: str
) -> None:
    """With `scratch` in a folder of which each machine has its own, the rows are shuffled: each effect once, and the log says why."""
    expected = land_duplicates(folder, BAD)
    driver = applications.with_wheel(**SMALL_RESULTS)
    answer = run(driver, place, folder, handler, settings={"scratch": str(cluster.apart / "scratch")})
    assert (answer["errors"], answer["kept"]) == ([], [False, False])
    assert "tasks could not keep the rows of the batch" in driver.said()
    assert_once(place, expected, (BAD,))


@HIDES
@pytest.mark.parametrize("collect", [True, False])
def test_a_folder_in_which_executors_cannot_write_stops_the_query(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, collect: bool
) -> None:
    """Where a batch has to go through `scratch` and executors cannot write there, the error names the folder, and no event is parked."""
    land(folder, large(0, 500), large(500, 500, partition=1))
    scratch = cluster.home / "scratch"
    driver = applications.with_wheel(**SMALL_RESULTS)
    (error,) = run(driver, place, folder, "frames", settings={"scratch": str(scratch), "collect": collect})["errors"]
    assert str(scratch) in error
    assert (place.read(), letters(place.store())) == ([], [])


@HIDES
@pytest.mark.parametrize("collect", [True, False])
def test_a_folder_of_which_each_machine_has_its_own_loses_no_batch(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, collect: bool
) -> None:
    """Files of executors that the driver does not find are missed before anything is decided; the same batch goes through a shared one."""
    land(folder, large(0, 500), large(500, 500, partition=1))
    driver, apart = applications.with_wheel(**SMALL_RESULTS), str(cluster.apart / "scratch")
    (error,) = run(driver, place, folder, "frames", settings={"scratch": apart, "collect": collect})["errors"]
    assert error.startswith("ConfigError") and "is not one folder" in error and apart in error
    assert (place.read(), letters(place.store())) == ([], [])
    assert run(driver, place, folder, "frames", settings={"scratch": str(folder / "scratch"), "collect": collect})["errors"] == []
    assert len(place.read()) == 1000


@HIDES
@pytest.mark.parametrize("handler", ["foreach", "foreach_arrow", "frames"])
def test_a_sink_of_which_each_machine_has_its_own_decides_nothing(
    applications: Applications, cluster: Cluster, folder: Path, handler: str
) -> None:
    """Files that tasks wrote have to be there for the driver: else keys would be reserved whose rows nobody else can see."""
    place = DeltaPlace(cluster.apart / uuid.uuid4().hex)
    place.create_sink()
    land_duplicates(folder)
    settings = {"collect": False, "scratch": str(folder / "scratch")}
    (error,) = run(applications.with_wheel(**SMALL_RESULTS), place, folder, handler, settings=settings)["errors"]
    assert error.startswith("ConfigError") and "not there for the driver" in error
    assert (place.read(), letters(place.store()), place.store().batches("shop").num_rows) == ([], [], 0)


def test_a_batch_too_large_without_a_folder_is_refused(applications: Applications, place: Place, folder: Path) -> None:
    """On a cluster no folder is shared unless it is named: the error names the setting, and no event is parked."""
    land(folder, large(0, 500), large(500, 500, partition=1))
    (error,) = run(applications.with_wheel(**SMALL_RESULTS), place, folder, "frames")["errors"]
    assert error.startswith("ConfigError") and "Limits(scratch=...)" in error
    assert (place.read(), letters(place.store())) == ([], [])


def until_at_work(folder: Path) -> int:
    """Wait until a handler has the slow order; returns its process."""
    notes = folder / "attempts"
    until(lambda: notes.exists() and notes.read_text().endswith("\n"), lambda: "a handler at work")
    return int(notes.read_text().split()[0])


@pytest.mark.crash
@pytest.mark.parametrize("victim", ["kill_executor", "kill_worker"])
@pytest.mark.parametrize("handler", ["foreach", "foreach_arrow", "frames"])
def test_what_dies_in_the_middle_of_a_batch_loses_and_doubles_nothing(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, handler: str, victim: str
) -> None:
    """SIGKILL of the executor, or of the worker, whose task handles events: each effect once, and no event is parked for it."""
    expected = land_duplicates(folder, SLOW, BAD)
    driver = applications.with_wheel(**SMALL_RESULTS)
    driver.ask(do="executors", executors=2)
    driver.give(do="query", **_task(place, folder, handler, lives=5, settings={"scratch": str(folder / "scratch")}))
    getattr(cluster, victim)(until_at_work(folder))
    answer = driver.answer()
    assert "failed" not in answer, answer
    assert len((folder / "attempts").read_text().split()) > 1 and not (folder / NOBODY).exists()
    assert_once(place, expected, (BAD,))


@pytest.mark.crash
@pytest.mark.parametrize("handler", ["foreach", "foreach_arrow", "frames"])
def test_a_task_that_dies_once_is_tried_again(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """With `spark.task.maxFailures` above one, the death of a Python worker stops no query: each effect once."""
    expected = land_duplicates(folder, DEADLY, BAD)
    assert run(applications.packed(**ELASTIC), place, folder, handler)["errors"] == []
    assert (folder / DEADLY).exists()
    assert_once(place, expected, (BAD,))


@pytest.mark.crash
@pytest.mark.parametrize("handler", ["foreach", "frames"])
def test_an_event_that_takes_its_executor_down_is_parked(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """It alone becomes a letter. Where tasks commit by themselves that takes somebody who starts the query again."""
    expected, restarts = land_duplicates(folder, FATAL), handler == "foreach" and isinstance(place, PostgresPlace)
    settings = {"scratch": str(folder / "scratch")}
    driver = applications.with_wheel(**{"spark.task.maxFailures": "2"})
    answer = run(driver, place, folder, handler, settings=settings, lives=9 if restarts else 1)
    assert "failed" not in answer, answer
    assert_once(place, expected, (FATAL,))


@pytest.mark.parametrize("handler", ["foreach", "foreach_arrow", "frames"])
def test_a_second_attempt_at_a_slow_task_has_no_second_effect(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """Speculation: an event that waits until Spark runs a second attempt at its task has one effect, whichever attempt ends first.

    No key is in two partitions: on PostgreSQL the slice of the other one would wait for the slow one, and no task would be done.
    """
    land(folder, orders(0, *"abca", BAD), orders(0, "d", SLOW, *"efe", partition=1))
    assert run(applications.packed(**ELASTIC), place, folder, handler, do="speculated")["errors"] == []
    assert (folder / "attempts").exists() and not (folder / NOBODY).exists()
    assert_once(place, {*"abcdef", SLOW}, (BAD,))


@pytest.mark.parametrize("handler", ["foreach", "frames"])
def test_executors_come_and_go(applications: Applications, place: Place, folder: Path, handler: str) -> None:
    """Dynamic allocation: a query whose executors have gone gets new ones, which have the library, for its next batches."""
    driver = applications.packed(**ELASTIC)
    expected = land_duplicates(folder, BAD)
    assert run(driver, place, folder, handler)["errors"] == []
    assert driver.ask(do="executors", executors=0) == 0
    land(folder, orders(20, "x", "a"), orders(20, "y", "x", partition=1))
    assert run(driver, place, folder, handler)["errors"] == []
    assert_once(place, expected | {"x", "y"}, (BAD,))


def test_plans_that_adapt_give_each_effect_once(applications: Applications, place: Place, folder: Path) -> None:
    """AQE: what a handler writes comes by a shuffle that Spark joins up again while it runs."""
    expected = land_duplicates(folder, BAD)
    assert run(applications.packed(**ELASTIC), place, folder, "frames", parts=7)["errors"] == []
    assert "AdaptiveSparkPlan" in (folder / "plan").read_text()
    assert_once(place, expected, (BAD,))


@pytest.mark.parametrize("ending", [None, ".whl"])
def test_executors_without_the_library_are_told_before_anything_is_written(
    applications: Applications, cluster: Cluster, place: Place, folder: Path, ending: str | None
) -> None:
    """Nothing shipped, or the wheel under an ending that Spark does not put on the path: the error names it, and the Python."""
    land_duplicates(folder)
    shipped = {} if ending is None else {"spark.submit.pyFiles": str(cluster.wheel)}
    (error,) = run(applications.start(shipped, str(cluster.python)), place, folder, "foreach")["errors"]
    assert error.startswith("ConfigError") and "which lacks dedup" in error and str(cluster.python) in error
    assert place.read() == [] and place.store().consumers() == []
