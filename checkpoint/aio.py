"""azure-eventhub's CheckpointStore on PostgreSQL for asyncio: `from checkpoint.aio import PostgresCheckpointStore`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from azure.eventhub.aio import CheckpointStore

from checkpoint import processors
from checkpoint.errors import DedupError
from checkpoint.given import Duration
from checkpoint.postgres.session import TIMEOUT, AsyncSession, Place
from checkpoint.processors import Group, Ownership, Position


class PostgresCheckpointStore(CheckpointStore):
    """checkpoint.PostgresCheckpointStore for asyncio: the same tables, arguments and promises. Both may be used at once.

    May be shared by event loops; each has its own connections.
    """

    def __init__(self, dsn: str, schema: str = "dedup", *, auto_migrate: bool = True, timeout: Duration = TIMEOUT) -> None:
        place = Place(dsn, schema, auto_migrate, timeout)
        self._owners, self._checkpoints = AsyncSession(place), AsyncSession(place)  # a renewal must not wait for a checkpoint

    def __repr__(self) -> str:
        return f"PostgresCheckpointStore({self._owners.place})"

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Ownership]:
        """Who owns the partitions of a consumer group. Raises StoreError."""
        return await self._owners.ask(processors.owners(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    async def claim_ownership(self, ownership_list: Iterable[Ownership], **kwargs: Any) -> Iterable[Ownership]:
        """Claim partitions; those that were won come back with a new etag, in the order in which they were asked for.

        Where no ownership names an owner, the partitions are given back. That raises nothing: the client has no guard around it. If the
        store cannot do it the answer is empty, a warning says why, and the partitions expire.

        Raises:
            StoreError: the store cannot claim now. azure's client goes on with what it owns, and asks again.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        wanted = list(ownership_list)
        try:
            won = [ownership for call in processors.claims(wanted) for ownership in await self._owners.ask(call)]
        except DedupError as error:
            if not processors.gives_back(wanted):
                raise
            return processors.not_given_back(wanted, error)
        return processors.in_order(wanted, won)

    async def update_checkpoint(self, checkpoint: Position, **kwargs: Any) -> None:
        """Move a checkpoint forward; one that is not beyond what is kept changes nothing and is logged.

        Raises:
            StoreError: the store cannot move it now. Where this leaves the handler, azure's client closes the partition, claims it
                again, and begins behind the last checkpoint.
            ConfigError: the checkpoint has no sequence number.

        Crash: the checkpoint is moved or not.
        """
        await self._checkpoints.ask(processors.advance(processors.group_of(checkpoint), [checkpoint]))

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Position]:
        """Where a consumer group resumes. Raises StoreError."""
        return await self._checkpoints.ask(processors.checkpoints(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    async def close(self) -> None:
        """Let go of this loop's connections. The store can be used again, also in another loop."""
        await self._owners.close()
        await self._checkpoints.close()

    async def __aenter__(self) -> PostgresCheckpointStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
