"""Which process reads which partition, and from where: the CheckpointStore that azure-eventhub's load balancing needs.

Ownership here is advice: it says which process should read. The number of the claim in the consumer's store decides which process may
commit. With a PostgresStore owners are rows of its database. With a DeltaStore they are small files in its folder, without a second
service. The storage does not compare before it writes, so two processes that claim a file at the same moment may both believe that they own
the partition. One of them then loses a batch at its commit, because the claims of the ledger fence it. No effect is doubled. The runner
calls this module.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
from azure.eventhub.aio import CheckpointStore

from checkpoint.errors import ConfigError
from checkpoint.processors import After
from dedup.core.store import Store
from dedup.delta.epoch import SmallFile
from dedup.delta.storage import StorageOptions, filesystem, safe_name, stats
from dedup.eventhub.connection import Connection

if TYPE_CHECKING:
    from checkpoint.aio import PostgresCheckpointStore

Named = dict[str, Any]
"""An ownership or a checkpoint as azure-eventhub passes them around."""

FOLDER = "runners"


class Leases(CheckpointStore):
    """A CheckpointStore that keeps ownership in another one, and resumes at the consumer's own checkpoints.

    Args:
        owners: the CheckpointStore that keeps the owners. Its checkpoints are not used.
        store: the consumer's.
        source: the name of this namespace in the consumer's checkpoints.
    """

    def __init__(self, owners: CheckpointStore, store: Store, consumer: str, source: str, connection: Connection) -> None:
        self._owners, self._store, self._consumer = owners, store, consumer
        self._source, self._connection = source, connection

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Return the owners of the partitions, as objects that the client may change."""
        found = await self._owners.list_ownership(fully_qualified_namespace, eventhub_name, consumer_group, **kwargs)
        return [dict(ownership) for ownership in found]

    async def claim_ownership(self, ownership_list: Iterable[Named], **kwargs: Any) -> Iterable[Named]:
        """Claim partitions. Return those that were won."""
        return await self._owners.claim_ownership(ownership_list, **kwargs)

    async def update_checkpoint(self, checkpoint: Named, **kwargs: Any) -> None:
        """Refuse: a checkpoint commits only with its batch."""
        raise ConfigError("The runner commits checkpoints with their batches. Do not call update_checkpoint.")

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Return where to resume: behind the sequence number in the consumer's store, never at an offset."""
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
    """Return the default place of ownership, which is beside the consumer's state.

    Raises:
        ConfigError: this store has no such place; give `ownership=`.
    """
    kinds = {kind.__module__.split(".")[1] for kind in type(store).__mro__ if kind.__module__.startswith("dedup.")}
    if "postgres" in kinds:
        from checkpoint.aio import PostgresCheckpointStore

        return ConsumersOwn(PostgresCheckpointStore(store.dsn, store.schema), consumer)  # type: ignore[attr-defined]
    if "delta" in kinds:
        return FolderOwnership(store.path, store.storage_options, consumer)  # type: ignore[attr-defined]
    raise ConfigError("Give ownership=, a CheckpointStore of azure.eventhub.aio. Processes of the runner share the partitions through it.")


class ConsumersOwn(CheckpointStore):
    """The owners of one consumer's partitions, in tables that event processors and other consumers use, too.

    Whoever shares a consumer group in these tables shares out the partitions. So this keeps the owners under a group of the consumer's own.
    The client asks with the plain group, and is answered with it.
    """

    def __init__(self, owners: PostgresCheckpointStore, consumer: str) -> None:
        self._owners, self._suffix = owners, f"@{_apart(consumer)}"

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Return who of this consumer's processes owns the partitions."""
        found = await self._owners.list_ownership(fully_qualified_namespace, eventhub_name, consumer_group + self._suffix)
        return self._told(found)

    async def claim_ownership(self, ownership_list: Iterable[Named], **kwargs: Any) -> Iterable[Named]:
        """Claim partitions. Return those that were won.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        wanted = [{**ownership, "consumer_group": ownership["consumer_group"] + self._suffix} for ownership in ownership_list]
        return self._told(await self._owners.claim_ownership(wanted))

    async def update_checkpoint(self, checkpoint: Named, **kwargs: Any) -> None:
        """Refuse: only the consumer's store keeps checkpoints."""
        raise ConfigError("This store keeps the owners of partitions, not checkpoints.")

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Named]:
        """Return no checkpoints: only the consumer's store keeps them."""
        return []

    async def close(self) -> None:
        """Let go of the connections."""
        await self._owners.close()

    def _told(self, owners: Iterable[Named]) -> list[Named]:
        return [{**owner, "consumer_group": owner["consumer_group"].removesuffix(self._suffix)} for owner in owners]


def _apart(consumer: str) -> str:
    """A name that stays the consumer's own in lower case, as the tables keep groups: "Shop" is another consumer than "shop"."""
    small = consumer.lower()
    return small if small == consumer else f"{small}~{hashlib.sha256(consumer.encode()).hexdigest()[:8]}"


@dataclass
class FolderOwnership(CheckpointStore):
    """Ownership as one file for each partition of a consumer group, below `root`.

    Args:
        root: folder or URI of the store.
        options: its storage options.
        consumer: the name of the consumer.
    """

    root: str
    options: StorageOptions
    consumer: str

    async def list_ownership(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[dict[str, Any]]:
        """Return the owners of the partitions of a consumer group."""
        return await asyncio.to_thread(self._list, _group(fully_qualified_namespace, eventhub_name, consumer_group))

    async def claim_ownership(self, ownership_list: Iterable[dict[str, Any]], **kwargs: Any) -> Iterable[dict[str, Any]]:
        """Claim partitions. Return those that no other process has claimed since they were listed.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        claimed = [await asyncio.to_thread(self._claim, dict(wanted)) for wanted in ownership_list]
        return [one for one in claimed if one is not None]

    async def update_checkpoint(self, checkpoint: dict[str, Any], **kwargs: Any) -> None:
        """Refuse: only the consumer's store keeps checkpoints."""
        raise ConfigError("This store keeps the owners of partitions, not checkpoints.")

    async def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[dict[str, Any]]:
        """Return no checkpoints: only the consumer's store keeps them."""
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
        (stat,) = stats(self.root, self.options, [f"{FOLDER}/{name}"])
        return None if stat is None else {**json.loads(text), "last_modified_time": stat.modified}

    def _note(self, name: str) -> SmallFile:
        return SmallFile(self.root, self.options, FOLDER, name)

    def _prefix(self, group: str) -> str:
        return f"{safe_name(self.consumer)}@{group}@"


def _group(*names: str) -> str:
    """A short name for a consumer group; Event Hubs takes any case for the same."""
    return hashlib.sha256("/".join(names).lower().encode()).hexdigest()[:16]
