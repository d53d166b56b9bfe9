"""The storage of Delta tables goes away for a while: in the middle of writing files, and between the decision and its publication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError, DeltaError

from checkpoint.errors import StoreUnavailable
from dedup.delta import storage, tables
from dedup.delta.storage import is_away
from kit.orders import assert_proven, batch, consumer, ids, letters, orders
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

AWAY = "Generic MicrosoftAzure error: Error after 10 retries in 3.2s, source:HTTP status server error (503 Service Unavailable)"
"""What object storage says through delta-rs."""


class Outage:
    """The next calls fail."""

    def __init__(self, real: Any, error: Exception, when: Any) -> None:
        self.real, self.error, self.when, self.left, self.failed = real, error, when, 0, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left and self.when(*args):
            self.left, self.failed = self.left - 1, self.failed + 1
            raise self.error
        return self.real(*args, **options)


def outages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outage]:
    """Of writing files, and of commits to sinks."""
    put = Outage(storage.put, OSError(AWAY), lambda *_: True)
    inside = Outage(tables.commit, CommitFailedError(AWAY), lambda table, *_: "sinks" in table.table_uri)
    monkeypatch.setattr("dedup.delta.storage.filesystem", _failing_open(put))
    monkeypatch.setattr(tables, "commit", inside)
    return {"files": put, "publication": inside}


def _failing_open(outage: Outage) -> Any:
    from dedup.delta import storage

    real = storage.filesystem

    class Away:
        def __init__(self, system: Any) -> None:
            self._system = system

        def open_output_stream(self, path: str) -> Any:
            return Outage.__call__(outage, path)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._system, name)

    def filesystem(*where: Any) -> Any:
        system = real(*where)
        outage.real = system.open_output_stream
        return Away(system)

    return filesystem


@pytest.mark.parametrize("what", ["files", "publication"])
def test_storage_that_is_away_is_waited_for_and_parks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """With patience the batch is tried until it passes; without, it ends with StoreUnavailable, and the next run goes on."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run = consumer(place.store(), max_outage=60.0)
    run(batch(*orders(range(5))), 0)
    found = outages(monkeypatch)[what]
    found.left = 7
    run(batch(*orders(range(5, 10))), 1)
    assert found.failed == 7
    found.left = 100
    impatient = consumer(place.store(), max_outage=0.0)
    with pytest.raises(StoreUnavailable, match="503"):
        impatient(batch(*orders(range(10, 15))), 2)
    found.left = 0
    impatient(batch(*orders(range(10, 15))), 2)
    assert letters(place.store()) == []
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(15))
    assert_proven(place.store())


SPARK = (
    "Job aborted due to stage failure: Task 0 in stage 7.0 failed 4 times: ExecutorLostFailure (executor 3 exited caused by Lost worker)"
)


@pytest.mark.parametrize(("words", "away"), [(SPARK, True), ("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint small", False)])
def test_what_spark_says_of_its_executors_is_no_fault_of_the_sink(words: str, away: bool) -> None:
    """Lost executors pass, and nobody has to repair a table; a rule that is broken does not pass by itself."""
    pyspark = pytest.importorskip("pyspark.errors")
    error = StoreUnavailable("Spark cannot append")
    error.__cause__ = pyspark.PySparkException(words)
    assert is_away(error) is away


@pytest.mark.parametrize(
    ("words", "away"),
    [
        (AWAY, True),
        ("Generic LocalFileSystem error: Unable to open file: Too many open files", True),
        ("Generic DeltaTable error: Parquet error: External: Generic S3 error: Error after 10 retries", True),
        ("Kernel error: Error interacting with object store: Generic S3 error: 503", True),
        ("Generic DeltaTable error: No space left on device (os error 28)", True),
        ("Generic DeltaTable error: Arrow error: Cast error: Can't cast value 2000000000000 to type Int32", False),
        ("Generic DeltaTable error: External error: Generic DeltaTable error: Schema error: No field named t.id", False),
        ("Generic DeltaTable error: External error: Invalid data found: 1 rows failed validation check.", False),
    ],
)
def test_what_delta_rs_cannot_compute_is_no_outage(words: str, away: bool) -> None:
    """Both have much the same words: storage that does not answer passes by itself, rows that cannot be merged do not."""
    assert is_away(DeltaError(words)) is away
