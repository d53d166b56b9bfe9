"""`registry`: an empty schema registry for one test, and nothing remembered of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from registry_server import RegistryServer, running_registry

from dedup.decode import registry as registries


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    """It answers on a free port until the test ends."""
    registries.forget()
    with running_registry() as server:
        yield server
