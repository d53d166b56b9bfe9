"""A batch that is too large for a limit of Spark passes by another way, or ends with an error that names the limit; it is never parked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from checkpoint.errors import BatchTooLarge
from kit import limits_child
from kit.orders import batch, consumer, letters, orders
from kit.places import DeltaPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EACH_STORE = pytest.mark.parametrize("kind", [pytest.param(k, marks=getattr(pytest.mark, k)) for k in ("delta", "postgres")])


def child(request: pytest.FixtureRequest, kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """What limits_child.py prints."""
    where = str(folder / "place") if kind == "delta" else request.getfixturevalue("postgres")
    command = [sys.executable, "-m", "kit.limits_child", kind, where, mode, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"it did not end: {_in_short((late.stderr or b'').decode())}")
    assert done.returncode == 0, _in_short(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _in_short(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if not line.startswith("\tat "))[-3000:]


@pytest.mark.spark
@EACH_STORE
def test_more_than_a_job_may_return_is_halved_or_names_the_limit(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    """A batch goes through scratch files, what handlers write is written in parts; one event's stops the query, and parks nothing."""
    told = child(request, kind, "results", tmp_path)
    assert (told["batch"], told["written"]) == (64, 64)
    for name in ("one", "whole"):
        assert "spark.driver.maxResultSize" in told[name] and "maxOffsetsPerTrigger" in told[name], told
    assert told["sink"] == [[0, 10, 64], [1, 40_000, 64]], "64 rows of each size, by their ids"
    assert (told["letters"], told["contradictions"]) == (0, [])


@pytest.mark.spark
@pytest.mark.delta
def test_a_jvm_that_runs_out_of_memory_names_the_limit(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Where tasks run in the driver's JVM, that ends it: the process that lost it says why, and at once; nothing is true."""
    told = child(request, "delta", "heap", tmp_path)
    assert "spark.driver.memory" in told["heap"] and "java.lang.OutOfMemoryError" in told["heap"] and "has ended" in told["heap"]
    assert (told["sink"], told["letters"], told["contradictions"]) == ([], 0, [])


@pytest.mark.delta
def test_a_jvm_that_goes_on_without_memory_names_the_limit(spark: SparkSession, tmp_path: Path) -> None:
    """As a cluster's driver does: the error is the JVM's own, it parks nothing, and the batch passes later."""
    from py4j.protocol import Py4JJavaError

    place = DeltaPlace(tmp_path)
    place.create_sink()
    run = consumer(place.store())
    inner = run._handler

    def hungry(rows: Any, tx: Any) -> None:
        assert spark._jvm is not None
        raise Py4JJavaError(
            "An error occurred while calling o1.collectToPython.\n", spark._jvm.java.lang.OutOfMemoryError("Java heap space")
        )

    run._handler = hungry
    with pytest.raises(BatchTooLarge, match=r"spark\.driver\.memory.*maxOffsetsPerTrigger.*max_events_per_transaction") as told:
        run(batch(*orders(range(3))), 0)
    assert "has ended" not in str(told.value) and place.read() == [] and letters(place.store()) == []
    run._handler = inner
    assert run(batch(*orders(range(3))), 0).processed == 3


@pytest.mark.spark
@EACH_STORE
@pytest.mark.parametrize("heap", ["1g", "4g"])
def test_a_gigabyte_passes_or_names_the_limit(request: pytest.FixtureRequest, kind: str, heap: str, tmp_path: Path) -> None:
    """With Spark's default heap the JVM is not enough for it, and the error says so; with four times as much all of it is written."""
    told = child(request, kind, heap, tmp_path)
    print(told)
    assert (told["letters"], told["contradictions"]) == (0, [])
    if "error" in told:
        assert heap == "1g" and "spark.driver.memory" in told["error"] and told["sink"] == []
    else:
        assert told["processed"] == limits_child.EVENTS and told["sink"] == [limits_child.EVENTS, limits_child.EVENTS // 64, 64]
