"""What every test can ask for: one Spark session, the real input, and (from fix_postgres) a real PostgreSQL."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from kit import cheap
from kit.paths import ROOT, environment
from kit.real_input import ONLINE_RETAIL, REAL_INPUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Run = Callable[..., tuple[int, str, str]]
"""Runs `dedup` with a line of arguments, at a place with a store or without: exit code, output, errors."""

settings.register_profile("dedup", deadline=None)  # how long an example takes decides nothing
settings.load_profile("dedup")

gc.disable()  # until the tests are collected
cheap.use_memory()
cheap.compile_quickly()
cheap.use_one_thread()

PLUGINS = (
    "variants",
    "rooms",
    "fix_postgres",
    "fix_places",
    "fix_delta",
    "fix_kafka",
    "fix_eventhubs",
    "fix_azurite",
    "fix_object_storage",
    "fix_registry",
)
pytest_plugins = [f"fixtures.{name}" for name in PLUGINS]


@pytest.fixture(scope="session")
def online_retail() -> Path:
    """The folder with the real input; without it the test is skipped and the run's last line says so."""
    if not ONLINE_RETAIL.exists():
        pytest.skip(f"no {ONLINE_RETAIL.name} in DEDUP_TEST_DATA ({REAL_INPUT})")
    return REAL_INPUT


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import benchmarks` finds what is beside the tests, and not in the package; an installed package has none."""
    root = ROOT
    if not (root / "benchmarks").is_dir():
        pytest.skip("an installed package has no benchmarks")
    monkeypatch.setattr(sys, "path", [*sys.path, str(root)])


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The one Spark session of the run; it has Spark's Kafka source."""
    from dedup.spark.session import local_session
    from fixtures.rooms import is_fast
    from kit import maven

    if os.environ.get("DEDUP_TEST_SPARK") == "connect":
        from kit import spark_connect

        yield from spark_connect.session()
        return
    conf = cheap.INTERPRETED if is_fast(request.config) else {}
    session = local_session("dedup tests", **{"spark.jars": maven.spark_kafka(), **conf})
    if os.environ.get("DEDUP_TEST_SPARK") == "managed":
        from kit import managed

        managed.limit()
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


def pytest_configure() -> None:
    """Every process that a test starts imports what this one does: the product and the kits of this checkout."""
    os.environ.update(environment())


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage."""
    cheap.keep_what_is_collected()


def pytest_unconfigure() -> None:
    """The last line of a run without the real input says so."""
    if not ONLINE_RETAIL.exists():
        print("REAL INPUT NOT RUN")
