"""What every test can ask for: one Spark session, the real input, and (from fix_postgres) a real PostgreSQL.

Tests that need Spark run last, so that the rest is told first and the JVM starts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["fix_postgres"]

REAL_INPUT = Path(os.environ.get("DEDUP_TEST_DATA") or Path(__file__).parent.parent / "../shared/data").resolve()
ONLINE_RETAIL = REAL_INPUT / "online-retail-by-day.tar.xz"


@pytest.fixture(scope="session")
def online_retail() -> Path:
    """The folder with the real input; without it the test is skipped and the run's last line says so."""
    if not ONLINE_RETAIL.exists():
        pytest.skip(f"no {ONLINE_RETAIL.name} in DEDUP_TEST_DATA ({REAL_INPUT})")
    return REAL_INPUT


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of the run."""
    from dedup.spark.session import local_session

    session = local_session("dedup tests")
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the session as `spark`, and put it last."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
    items.sort(key=lambda item: item.get_closest_marker("spark") is not None)


def pytest_unconfigure() -> None:
    """The last line of a run without the real input says so."""
    if not ONLINE_RETAIL.exists():
        print("REAL INPUT NOT RUN")
