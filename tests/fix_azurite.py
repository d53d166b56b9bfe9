"""Real Blob storage for tests: `azurite` once per run, `blobs` a container of the test's own.

DEDUP_TEST_BLOB holds the connection string of an account to use in place of Azurite.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import azurite_server
import pytest

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the server as `azurite`."""
    for item in items:
        if "azurite" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.azurite)


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The connection string of a storage account."""
    if given := os.environ.get("DEDUP_TEST_BLOB"):
        yield given
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
