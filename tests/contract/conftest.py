"""Every test of this folder runs on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from children import Nursery
from places import LEAN, DeltaPlace, Place, PostgresPlace, SparkPlace
from variants import in_ci, of_store, possible

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = [
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("delta", marks=pytest.mark.delta),
    pytest.param("delta-spark", marks=[pytest.mark.delta, pytest.mark.spark]),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place with the sink `orders`."""
    made = _place(request, tmp_path)
    made.create_sink()
    return made


def _place(request: pytest.FixtureRequest, folder: Path) -> Place:
    if request.param == "postgres":
        return PostgresPlace(request.getfixturevalue("postgres"))
    if request.param == "delta":
        return DeltaPlace(folder)
    request.getfixturevalue("lean_spark")
    return SparkPlace(folder)


@pytest.fixture
def lean_spark(spark: SparkSession) -> Iterator[None]:
    """The session, with settings that make small actions cheap while the test runs."""
    before = {name: spark.conf.get(name) for name in LEAN}
    for name, value in LEAN.items():
        spark.conf.set(name, value)
    yield
    for name, found in before.items():
        spark.conf.set(name, found)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the store whose commits Spark makes, `make test` runs a selection; `make slow` runs the others. Reports say which store it was."""
    config.hook.pytest_deselected(items=[item for item in items if not possible(item)])
    items[:] = filter(possible, items)
    for item in items:
        store = of_store(item)
        if store is not None:
            item.user_properties.append(("store", store))
        if store == "delta-spark" and not in_ci(item):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path_factory.mktemp("children"))
    yield one
    one.close()
