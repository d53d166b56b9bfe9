"""Which process reads which partition, and from where: what azure-eventhub's load balancing asks of a CheckpointStore.

Owning a partition here is advice: it says who should read. Who may commit is decided by the number of the claim, in the consumer's store.
With a PostgresStore owners are rows of its database; with a DeltaStore they are small files in its folder, without a second service. Two
processes that claim a file at the same moment may both believe for a while that they own a partition: the storage compares nothing. That
costs a batch that is refused at its commit, because the ledger's own claims are what fences; it cannot double an effect. Called by the
runner.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs
from azure.eventhub.aio import CheckpointStore

from checkpoint.errors import ConfigError
from checkpoint.processors import After
from dedup.core.store import Store
from dedup.delta.epoch import SmallFile
from dedup.delta.storage import StorageOptions, filesystem, safe_name
from dedup.eventhub.connection import Connection

Named = dict[str, Any]
"""An ownership or a checkpoint as azure-eventhub passes them around."""

FOLDER = "runners"


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
        return FolderOwnership(store.path, store.storage_options, consumer)  # type: ignore[attr-defined]
    raise ConfigError("Give ownership=, a CheckpointStore of azure.eventhub.aio. Processes of the runner share the partitions through it.")


@dataclass
class FolderOwnership(CheckpointStore):
    """One file per partition of a consumer group, below `root`.

    Args:
        root: folder or URI of the store.
        options: its storage options.
        consumer: whose runner processes these are.
    """

    root: str
    options: StorageOptions
    consumer: str

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[dict[str, Any]]:
        """Who owns the partitions of a consumer group."""
        return await asyncio.to_thread(self._list, _group(fully_qualified_namespace, eventhub_name, consumer_group))

    async def claim_ownership(self, ownership_list: Iterable[dict[str, Any]], **kwargs: Any) -> Iterable[dict[str, Any]]:
        """Claim partitions; those that nobody else has claimed since they were listed come back.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        claimed = [await asyncio.to_thread(self._claim, dict(wanted)) for wanted in ownership_list]
        return [one for one in claimed if one is not None]

    async def update_checkpoint(self, checkpoint: dict[str, Any], **kwargs: Any) -> None:
        """Refused: only the consumer's store keeps checkpoints."""
        raise ConfigError("This store keeps the owners of partitions, not checkpoints.")

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[dict[str, Any]]:
        """None: only the consumer's store keeps checkpoints."""
        return []

    def _list(self, group: str) -> list[dict[str, Any]]:
        selector = pafs.FileSelector(FOLDER, allow_not_found=True)
        found = filesystem(self.root, self.options).get_file_info(selector)
        mine = [info for info in found if info.base_name.startswith(self._prefix(group)) and not info.base_name.endswith(".tmp")]
        return [told for info in mine if (told := self._read(info.base_name)) is not None]

    def _claim(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        group = _group(wanted["fully_qualified_namespace"], wanted["eventhub_name"], wanted["consumer_group"])
        name = f"{self._prefix(group)}{int(wanted['partition_id'])}"
        now = self._read(name)
        if now is not None and now["etag"] != wanted.get("etag"):
            return None
        etag = uuid.uuid4().hex
        names = ("fully_qualified_namespace", "eventhub_name", "consumer_group", "partition_id", "owner_id")
        self._note(name).write(json.dumps({**{n: wanted[n] for n in names}, "etag": etag}))
        written = self._read(name)
        return written if written is not None and written["etag"] == etag else None

    def _read(self, name: str) -> dict[str, Any] | None:
        """What the file says, with the time at which the storage took it."""
        text = self._note(name).read()
        if text is None:
            return None
        info = filesystem(self.root, self.options).get_file_info(f"{FOLDER}/{name}")
        if info.type != pafs.FileType.File or info.mtime is None:
            return None
        return {**json.loads(text), "last_modified_time": info.mtime.timestamp()}

    def _note(self, name: str) -> SmallFile:
        return SmallFile(self.root, self.options, FOLDER, name)

    def _prefix(self, group: str) -> str:
        return f"{safe_name(self.consumer)}@{group}@"


def _group(*names: str) -> str:
    """A short name for a consumer group; Event Hubs takes any case for the same."""
    return hashlib.sha256("/".join(names).lower().encode()).hexdigest()[:16]
