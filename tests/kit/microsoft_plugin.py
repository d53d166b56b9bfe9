"""A plugin of pytest that runs Microsoft's tests of event processors and checkpoint stores with our stores in place of theirs.

For a pytest of its own (test_checkpoint_microsoft.py starts it), with DEDUP_MICROSOFT_DSN. What their tests need of Microsoft's test tools,
which are published nowhere, and of a storage account is replaced by nothing; asyncio needs no other plugin.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import psycopg
import pytest

import checkpoint.aio
from checkpoint import PostgresCheckpointStore

DSN = os.environ.get("DEDUP_MICROSOFT_DSN", "")

CANNOT_APPLY = {
    "test_eventprocessor.py::test_partition_processor": "its events have no sequence number, and the checkpoint of one is refused",
    "test_eventprocessor_async.py::test_partition_processor": "its events have no sequence number, and the checkpoint of one is refused",
    "test_in_memory_checkpointstore.py::test_update_checkpoint": "its checkpoint has a key sequencenumber, which no client writes",
}
"""Tests that have to fail, and why; one that passes is an error."""


def _emptied() -> str:
    """The DSN; the tables exist and are empty, as a store in memory is."""
    with psycopg.connect(DSN, autocommit=True) as connection:
        connection.execute("truncate dedup.partition_owner, dedup.processor_checkpoint")
    return DSN


class Threads(PostgresCheckpointStore):
    """In place of their stores for threads, whatever those are made from."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(_emptied())


class Aio(checkpoint.aio.PostgresCheckpointStore):
    """In place of their stores for asyncio."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(_emptied())


class AioWritesBack(Aio):
    """As their store in memory does, and that on Blob does not: a claim is written into the dict that was given."""

    async def claim_ownership(self, ownership_list: Iterable[dict[str, Any]], **named: Any) -> list[dict[str, Any]]:
        """Claim, and write back what was won."""
        asked = list(ownership_list)
        won = list(await super().claim_ownership(asked, **named))
        for answer in won:
            next(o for o in asked if (o["consumer_group"], o["partition_id"]) == (answer["consumer_group"], answer["partition_id"])).update(
                answer
            )
        return won


class NoStorage:
    """In place of a client of Blob storage."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def delete_container(self, name: str) -> None: ...


def no_container(account: str) -> tuple[str, str]:
    """In place of a new container: its account and name."""
    return account, "none"


async def no_container_aio(account: str) -> tuple[str, str]:
    """The same for asyncio."""
    return account, "none"


IN_PLACE: dict[str, dict[str, Any]] = {
    "test_eventprocessor": {"InMemoryCheckpointStore": Threads},
    "test_eventprocessor_async": {"InMemoryCheckpointStore": Aio},
    "test_in_memory_checkpointstore": {"InMemoryCheckpointStore": AioWritesBack},
    "test_storage_blob_partition_manager": {
        "BlobCheckpointStore": Threads,
        "BlobServiceClient": NoStorage,
        "get_live_storage_blob_client": no_container,
    },
    "test_storage_blob_partition_manager_aio": {
        "BlobCheckpointStore": Aio,
        "BlobServiceClient": NoStorage,
        "get_live_storage_blob_client": no_container_aio,
    },
}
"""Names in their modules, and what they mean here."""


def pytest_configure(config: pytest.Config) -> None:
    """Make our tables, and what their modules import."""
    for marker in ("asyncio", "live_test_only", "liveTest"):
        config.addinivalue_line("markers", f"{marker}: Microsoft's")
    tools = ModuleType("devtools_testutils")
    tools.get_credential = lambda **named: None  # type: ignore[attr-defined]
    sys.modules["devtools_testutils"] = tools
    with PostgresCheckpointStore(DSN) as store:
        store.list_ownership("a", "b", "c")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ours in place, and mark what cannot apply."""
    for item in items:
        assert isinstance(item, pytest.Function)
        for name, ours in IN_PLACE[item.module.__name__].items():
            assert hasattr(item.module, name), f"{item.module.__name__} has no {name}"
            setattr(item.module, name, ours)
        if reason := CANNOT_APPLY.get(f"{item.path.name}::{item.name}"):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test for asyncio in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
