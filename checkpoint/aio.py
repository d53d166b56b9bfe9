"""azure-eventhub's CheckpointStore on PostgreSQL for asyncio: `from checkpoint.aio import PostgresCheckpointStore`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from azure.eventhub.aio import CheckpointStore

from checkpoint import processors
from checkpoint.postgres.session import AsyncSession, Place
from checkpoint.processors import Group, Ownership, Position


class PostgresCheckpointStore(CheckpointStore):
    """checkpoint.PostgresCheckpointStore for asyncio: the same tables, arguments and promises. Both may be used at once."""

    def __init__(self, dsn: str, schema: str = "dedup", *, auto_migrate: bool = True) -> None:
        self._session = AsyncSession(Place(dsn, schema, auto_migrate))

    def __repr__(self) -> str:
        return f"PostgresCheckpointStore({self._session.place})"

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Ownership]:
        """Who owns the partitions of a consumer group. Raises StoreError."""
        return await self._session.ask(processors.owners(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    async def claim_ownership(self, ownership_list: Iterable[Ownership], **kwargs: Any) -> Iterable[Ownership]:
        """Claim partitions; those that were won come back, with a new etag. Raises StoreError.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        return [won for call in processors.claims(ownership_list) for won in await self._session.ask(call)]

    async def update_checkpoint(self, checkpoint: Position, **kwargs: Any) -> None:
        """Move a checkpoint forward; one that is not beyond what is kept changes nothing and is logged. Raises StoreError.

        Crash: the checkpoint is moved or not.
        """
        await self._session.ask(processors.advance(processors.group_of(checkpoint), [checkpoint]))

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Position]:
        """Where a consumer group resumes. Raises StoreError."""
        return await self._session.ask(processors.checkpoints(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    async def close(self) -> None:
        """Let go of the connection. The store can be used again."""
        await self._session.close()

    async def __aenter__(self) -> PostgresCheckpointStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
