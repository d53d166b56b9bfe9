"""azure-eventhub's CheckpointStore on PostgreSQL, for clients of `azure.eventhub`: `from checkpoint import PostgresCheckpointStore`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from azure.eventhub import CheckpointStore

from checkpoint import processors
from checkpoint.errors import DedupError
from checkpoint.given import Duration
from checkpoint.postgres.session import TIMEOUT, Place, Session
from checkpoint.processors import Group, Ownership, Position


class PostgresCheckpointStore(CheckpointStore):
    """Ownerships and checkpoints of event processors as rows of one database, many hubs and consumer groups in one table.

    What BlobCheckpointStore does, and more: a checkpoint never goes back, and `owner_number` in each ownership rises whenever a partition
    changes hands. May be shared by threads; for clients of azure.eventhub.aio there is checkpoint.aio.

    Args:
        dsn: of PostgreSQL 14 or newer.
        schema: where the tables are; that of a PostgresStore may be shared.
        auto_migrate: create or upgrade the tables at first use, if the role may; else `dedup migrate` is asked for.
        timeout: how long a call may take, as a timedelta or in seconds, with waiting for other calls, connecting and trying again
            (connecting alone may take 2 s per server). Three times this and 2.4 times the client's `load_balancing_interval` should stay
            below its `partition_ownership_expiration_interval`: then one renewal may fail, and the next one is in time.

    Raises:
        ConfigError: the DSN or the schema's name cannot be one, or the timeout.
    """

    def __init__(self, dsn: str, schema: str = "dedup", *, auto_migrate: bool = True, timeout: Duration = TIMEOUT) -> None:
        place = Place(dsn, schema, auto_migrate, timeout)
        self._owners, self._checkpoints = Session(place), Session(place)  # a renewal must not wait for a checkpoint

    def __repr__(self) -> str:
        return f"PostgresCheckpointStore({self._owners.place})"

    def list_ownership(self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any) -> Iterable[Ownership]:
        """Who owns the partitions of a consumer group. Raises StoreError."""
        return self._owners.ask(processors.owners(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    def claim_ownership(self, ownership_list: Iterable[Ownership], **kwargs: Any) -> Iterable[Ownership]:
        """Claim partitions; those that were won come back with a new etag, in the order in which they were asked for.

        Where no ownership names an owner, the partitions are given back. That raises nothing: the client has no guard around it. If the
        store cannot do it the answer is empty, a warning says why, and the partitions expire.

        Raises:
            StoreError: the store cannot claim now. azure's client goes on with what it owns, and asks again.

        Crash: each partition is claimed or not; a claim that nobody renews expires.
        """
        wanted = list(ownership_list)
        try:
            won = [ownership for call in processors.claims(wanted) for ownership in self._owners.ask(call)]
        except DedupError as error:
            if not processors.gives_back(wanted):
                raise
            return processors.not_given_back(wanted, error)
        return processors.in_order(wanted, won)

    def update_checkpoint(self, checkpoint: Position, **kwargs: Any) -> None:
        """Move a checkpoint forward; one that is not beyond what is kept changes nothing and is logged.

        Raises:
            StoreError: the store cannot move it now. Where this leaves the handler, azure's client closes the partition, claims it
                again, and begins behind the last checkpoint.
            ConfigError: the checkpoint has no sequence number.

        Crash: the checkpoint is moved or not.
        """
        self._checkpoints.ask(processors.advance(processors.group_of(checkpoint), [checkpoint]))

    def list_checkpoints(
        self, fully_qualified_namespace: str, eventhub_name: str, consumer_group: str, **kwargs: Any
    ) -> Iterable[Position]:
        """Where a consumer group resumes. Raises StoreError."""
        return self._checkpoints.ask(processors.checkpoints(Group(fully_qualified_namespace, eventhub_name, consumer_group)))

    def set_checkpoint(
        self, group: Group, partition: str, number: int, *, seen: int | None, offset: str | None = None, by: str, reason: str
    ) -> bool:
        """Set a checkpoint as a person decided, also back; whether it still stood at `seen` (None: there was none). Raises StoreError.

        Crash: it is set or not.
        """
        return self._checkpoints.ask(processors.put(group, partition, number, offset, seen=seen, by=by, reason=reason))

    def import_checkpoints(
        self, group: Group, positions: Iterable[Position], *, by: str | None = None, reason: str | None = None
    ) -> list[str]:
        """Take over checkpoints that are further on than ours; returns the partitions that moved. Raises StoreError.

        Args:
            by: who does that, and why (`reason`): both are kept with the checkpoints that move.

        Crash: all of them or none.
        """
        return self._checkpoints.ask(processors.advance(group, positions, by=by, reason=reason))

    def close(self) -> None:
        """Let go of the connections. The store can be used again."""
        self._owners.close()
        self._checkpoints.close()

    def __enter__(self) -> PostgresCheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
