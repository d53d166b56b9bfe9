"""Every test of this folder runs on every store."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import DeltaPlace, Place, PostgresPlace


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("delta", marks=pytest.mark.delta)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place with the sink `orders`."""
    made: Place = PostgresPlace(request.getfixturevalue("postgres")) if request.param == "postgres" else DeltaPlace(tmp_path)
    made.create_sink()
    return made
