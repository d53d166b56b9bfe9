"""What every test can ask for: one Spark session, the real input, and (from fix_postgres) a real PostgreSQL.

Tests that need Spark run last, so that the rest is told first and the JVM starts once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cheap
import pytest
from hypothesis import settings
from real_input import ONLINE_RETAIL, REAL_INPUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run = Callable[..., tuple[int, str, str]]
"""Runs `dedup` with a line of arguments, at a place with a store or without: exit code, output, errors."""

settings.register_profile("dedup", deadline=None)  # how long an example takes decides nothing
settings.load_profile("dedup")

cheap.use_memory()
cheap.compile_quickly()

pytest_plugins = ["fix_kafka", "fix_postgres", "fix_eventhubs", "fix_azurite", "fix_registry", "variants"]


@pytest.fixture(scope="session")
def online_retail() -> Path:
    """The folder with the real input; without it the test is skipped and the run's last line says so."""
    if not ONLINE_RETAIL.exists():
        pytest.skip(f"no {ONLINE_RETAIL.name} in DEDUP_TEST_DATA ({REAL_INPUT})")
    return REAL_INPUT


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import benchmarks` finds what is beside the tests, and not in the package; an installed package has none."""
    root = Path(__file__).parent.parent
    if not (root / "benchmarks").is_dir():
        pytest.skip("an installed package has no benchmarks")
    monkeypatch.setattr(sys, "path", [*sys.path, str(root)])


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of the run; it has Spark's Kafka source."""
    import maven

    from dedup.spark.session import local_session

    if os.environ.get("DEDUP_TEST_SPARK") == "connect":
        import spark_connect

        yield from spark_connect.session()
        return
    session = local_session("dedup tests", **{"spark.jars": maven.spark_kafka()})
    yield session
    session.stop()


@pytest.fixture
def dedup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command as the shell would; gives its exit code, output and errors."""
    from dedup.cli import main

    for name in ("DEDUP_STORE", "DEDUP_SCHEMA", "DEDUP_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str, place: Any = None) -> tuple[int, str, str]:
        arguments = [*shlex.split(line), *(["--store", place.url] if place else [])]
        monkeypatch.setattr(sys, "argv", ["dedup", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the session as `spark`, and put it last: before that a process has none, and several processes go on that way."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
        if item.get_closest_marker("xdist_group") is None:  # else a part of its file that goes to any process by itself
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}{' spark' if item.get_closest_marker('spark') else ''}"))
    items.sort(key=lambda item: item.get_closest_marker("spark") is not None)


def pytest_unconfigure() -> None:
    """The last line of a run without the real input says so."""
    if not ONLINE_RETAIL.exists():
        print("REAL INPUT NOT RUN")
