"""Every test of this folder runs on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Nursery
from places import DeltaPlace, Place, PostgresPlace, SparkPlace

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
    request.getfixturevalue("spark")
    return SparkPlace(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the store whose commits Spark makes, CI runs a selection; `make slow` runs all."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("place") == "delta-spark" and item.originalname not in SELECTED:
            item.add_marker(pytest.mark.slow)


SELECTED = frozenset(
    {
        "test_a_batch_is_written_once_and_accounted_for",
        "test_a_replayed_batch_changes_nothing",
        "test_an_older_copy_is_fenced",
    }
)
"""Tests that run in CI on the store whose commits Spark makes: one for each promise that rests on another mechanism there."""


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path_factory.mktemp("children"))
    yield one
    one.close()
