"""Which process reads which partition, and from where: what azure-eventhub's load balancing asks of a CheckpointStore.

Owning a partition here is advice: it says who should read. Who may commit is decided by the number of the claim, in the consumer's store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from azure.eventhub.aio import CheckpointStore

from checkpoint.errors import ConfigError
from checkpoint.processors import After
from dedup.eventhub.settings import Connection
from dedup.store import Store

Named = dict[str, Any]
"""An ownership or a checkpoint as azure-eventhub passes them around."""


class Leases(CheckpointStore):
    """Ownership in another CheckpointStore, resume positions from the consumer's own checkpoints.

    Args:
        owners: keeps who owns which partition; its checkpoints are not used.
        store: the consumer's.
        source: under which the consumer keeps the events of this hub.
    """

    def __init__(self, owners: CheckpointStore, store: Store, consumer: str, source: str, connection: Connection) -> None:
        self._owners, self._store, self._consumer = owners, store, consumer
        self._source, self._connection = source, connection

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Who owns the partitions; the client changes what it is given."""
        found = await self._owners.list_ownership(fully_qualified_namespace, eventhub_name, consumer_group, **kwargs)
        return [dict(ownership) for ownership in found]

    async def claim_ownership(self, ownership_list: Iterable[Named], **kwargs: Any) -> Iterable[Named]:
        """Claim partitions; those that were won come back."""
        return await self._owners.claim_ownership(ownership_list, **kwargs)

    async def update_checkpoint(self, checkpoint: Named, **kwargs: Any) -> None:
        """Refused: a checkpoint commits with its batch, and in no other way."""
        raise ConfigError("The runner commits checkpoints with their batches. Do not call update_checkpoint.")

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Where to resume: behind the sequence number that the consumer's store holds, never by an offset."""
        names = {
            "fully_qualified_namespace": fully_qualified_namespace,
            "eventhub_name": eventhub_name,
            "consumer_group": consumer_group,
        }
        head = await asyncio.to_thread(self._store.head, self._consumer)
        mine = {p: c for p, c in head.checkpoints.items() if (p.source, p.topic) == (self._source, self._connection.hub)}
        return [
            {**names, "partition_id": str(p.partition), "sequence_number": c.sequence_number, "offset": After(c.sequence_number)}
            for p, c in mine.items()
        ]


def owners_beside(store: Store, consumer: str) -> CheckpointStore:
    """Where ownership is kept if nothing else is said: beside the consumer's state.

    Raises:
        ConfigError: this store has no such place; give `ownership=`.
    """
    kinds = {kind.__module__.split(".")[1] for kind in type(store).__mro__ if kind.__module__.startswith("dedup.")}
    if "postgres" in kinds:
        from checkpoint.aio import PostgresCheckpointStore

        return PostgresCheckpointStore(store.dsn, store.schema)  # type: ignore[attr-defined]
    if "delta" in kinds:
        from dedup.eventhub.lease_folder import FolderOwnership

        return FolderOwnership(store.path, store.storage_options, consumer)  # type: ignore[attr-defined]
    raise ConfigError("Say where runner processes agree on who reads what: ownership=, any CheckpointStore of azure.eventhub.aio.")
