"""Real Blob storage for tests: `azurite` once per run, `blobs` a container of the test's own.

In this order: DEDUP_TEST_BLOB (the connection string of an account), a container engine that answers (engine.py), npm (azurite_server.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import azurite_server
import engine
import pytest

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the server as `azurite`."""
    for item in items:
        if "azurite" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.azurite)


@pytest.fixture(scope="session")
def azurite(request: pytest.FixtureRequest) -> Iterator[str]:
    """The connection string of a storage account."""
    if given := os.environ.get("DEDUP_TEST_BLOB"):
        yield given
        return
    if engine.answers():
        os.environ["DEDUP_TEST_AZURITE_KEY"] = key = azurite_server.new_key()
        yield azurite_server.connection_string(engine.address(request, "azurite", 10_000), key)
        return
    with azurite_server.running_azurite() as started:
        yield started


@pytest.fixture
def blobs(azurite: str) -> Iterator[ContainerClient]:
    """An empty container, removed afterwards."""
    from azure.storage.blob import ContainerClient

    with ContainerClient.from_connection_string(azurite, f"dedup-{uuid.uuid4().hex[:12]}") as container:
        container.create_container()
        yield container
        container.delete_container()
