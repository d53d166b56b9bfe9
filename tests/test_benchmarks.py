"""The benchmarks run and check what they time; no number is asserted here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import delta, report
from benchmarks.stream import Sizes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATEST = Path(__file__).parent.parent / "benchmarks" / "latest.json"
KEYS = {"measure", "ours", "other", "unit", "ratio", "better"}


@pytest.mark.delta
def test_the_contests_on_delta_run_and_verify_what_they_wrote(spark: SparkSession, tmp_path: Path) -> None:
    """Tiny sizes: each way writes what it promises, and the result has the keys that readers of latest.json expect."""
    measures, seconds = delta.compare_appends(spark, tmp_path, Sizes(events=200, batches=3, warm=1))
    assert {m.measure for m in measures} == {"delta/append", "delta/append_txn"} and seconds
    report.save(measures, tmp_path / "latest.json")
    assert all(set(m) == KEYS for m in json.loads((tmp_path / "latest.json").read_text()))


def test_the_committed_numbers_are_those_of_the_table() -> None:
    """benchmarks/README.md shows the ratios of latest.json."""
    text = (LATEST.parent / "README.md").read_text().split("## The last run")[1]
    for m in json.loads(LATEST.read_text()):
        assert set(m) == KEYS
        assert m["measure"] in text and f"{m['ratio']:.2f}" in text, m
