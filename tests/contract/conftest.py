"""Every test of this folder runs on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Nursery
from places import DeltaPlace, Place, PostgresPlace


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("delta", marks=pytest.mark.delta)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place with the sink `orders`."""
    made: Place = PostgresPlace(request.getfixturevalue("postgres")) if request.param == "postgres" else DeltaPlace(tmp_path)
    made.create_sink()
    return made


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Makes processes that may be killed."""
    one = Nursery(tmp_path_factory.mktemp("children"))
    yield one
    one.close()
