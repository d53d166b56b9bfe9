"""The state of publishers in PostgreSQL: owner levels, sequence numbers, events that are not confirmed, ids that are known.

Every writer here is one statement, and so one transaction that needs nothing more of its client: a process that is stopped or cut off
holds no lock, and a takeover never waits for it.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from checkpoint.errors import CommitUnknown, ConfigError, Fenced, StoreRestored, StoreUnavailable
from checkpoint.postgres import migrate
from checkpoint.postgres.dsn import Connection, checked, checked_schema, redacted
from checkpoint.postgres.errors import is_lost, translate, translating
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.connect import Pool
from dedup.postgres.fence import refuse_lazy_commit
from dedup.process import is_alive, this_process
from dedup.publish.events import Owner, Stored

PAGE_EVENTS = 1_000


@dataclass(frozen=True)
class Known:
    """What is known of an id at a destination."""

    payload_hash: int
    publisher: int  # id of its producer group
    partition: int
    sequence: int
    confirmed: bool


@dataclass(frozen=True)
class Lane:
    """Where a producer group is in one partition."""

    next: int  # sequence number that is given next
    confirmed: int  # last one that the broker has
    waiting_since: dt.datetime | None  # when the oldest event that is not confirmed was stored


class PublisherState:
    """The tables of publishers, for one user at a time.

    Args:
        dsn, schema, auto_migrate: as of PostgresStore.

    Every method raises StoreError for what the database says.
    """

    def __init__(self, dsn: str, schema: str = "dedup", auto_migrate: bool = True) -> None:
        self.dsn, self.schema, self.auto_migrate = checked(dsn), checked_schema(schema), auto_migrate
        self._sql, self._pool, self._ready = Statements(schema), Pool(dsn), False

    def __repr__(self) -> str:
        return f"PublisherState({redacted(self.dsn)!r}, schema={self.schema!r})"

    def open(self, source: str, topic: str, group: str, partitions: int) -> Owner:
        """Become the owner of a producer group: at once, and whoever was it before cannot store or confirm any more.

        Raises:
            ConfigError: synchronous_commit is off.

        Crash: the owner level is raised or not; the next to open the group raises it again.
        """
        run, here = uuid.uuid4().hex[:16], this_process()
        names = {"source": source, "topic": topic, "name": group, "partitions": partitions, "run": run, **here._asdict()}
        row = self._rows("open_publisher", f"Opening publisher {group!r}", **names)[0]
        refuse_lazy_commit(row["synchronous_commit"])
        return Owner(row["id"], row["destination_id"], group, run, row["epoch"], row["partitions"])

    def close(self, owner: Owner | None) -> None:
        """Nobody owns the group any more, unless a newer owner does. Connections are let go.

        Crash: the process counts as the owner until it is seen to be gone.
        """
        if owner is not None:
            self._rows("close_publisher", "Closing a publisher", id=owner.id, epoch=owner.level)
        self._pool.close()

    def check(self, owner: Owner) -> None:
        """Raises Fenced where somebody else has opened the group."""
        rows = self._rows("publisher_epoch", "Looking at a publisher", id=owner.id)
        if not rows or rows[0]["epoch"] != owner.level:
            raise _fenced(owner, rows)

    def is_gone(self, publisher: int) -> bool:
        """Whether nobody owns this group, or its owner's process has provably ended."""
        rows = self._rows("publisher_epoch", "Looking at a publisher", id=publisher)
        host, pid, started = (rows[0][name] for name in ("host", "pid", "started")) if rows else (None, 0, "")
        return host is None or is_alive(host, pid, started) is False

    def name_of(self, publisher: int) -> str:
        """The name of a producer group."""
        return str(self._rows("publisher_name", "Looking at a publisher", id=publisher)[0]["name"])

    def lanes(self, owner: Owner) -> Mapping[int, Lane]:
        """partition -> where the group is in it."""
        rows = self._rows("publisher_lanes", "Reading the lanes of a publisher", id=owner.id)
        return {row["partition"]: Lane(row["next_sequence"], row["confirmed"], row["waiting_since"]) for row in rows}

    def known(self, owner: Owner, ids: Sequence[str]) -> Mapping[str, Known]:
        """id -> what is known of it; ids that are new are left out."""
        rows = self._rows("known_ids", "Looking up ids", destination=owner.destination, ids=list(ids)) if ids else []
        return {
            row["message_id"]: Known(row["payload_hash"], row["publisher_id"], row["partition"], row["sequence"], row["confirmed"])
            for row in rows
        }

    def store(self, owner: Owner, events: Sequence[Stored], hashes: Mapping[str, int]) -> bool:
        """Store events before they are sent. False: somebody else stored one of the ids in the meantime, and nothing was stored.

        Args:
            hashes: id -> payload hash, of those that callers gave.

        Raises:
            Fenced: somebody else has opened the group. StoreRestored: the state does not stand where this process left it.
            CommitUnknown: the connection broke; all of it is stored, or nothing.

        Crash: all of it is stored or nothing. What is stored is sent by the next to open the group.
        """
        ids = [event.message_id for event in events]
        columns = {
            "partitions": [event.partition for event in events],
            "sequences": [event.sequence for event in events],
            "message_ids": ids,
            "chosen": [i in hashes for i in ids],
            "hashes": [hashes.get(i) for i in ids],
            "keys": [event.key for event in events],
            "content_types": [event.content_type for event in events],
            "properties": [event.properties for event in events],
            "bodies": [event.body for event in events],
        }
        try:
            self._judge(owner, 1, self._write("store_events", id=owner.id, epoch=owner.level, **columns))
        except psycopg.errors.UniqueViolation as error:
            if (error.diag.table_name or "") == "published_id":
                return False
            raise _restored(owner) from error
        except psycopg.errors.DeadlockDetected:
            return False
        except psycopg.Error as error:
            if is_lost(error):
                raise CommitUnknown(
                    "The database went away while events were stored: all of them are, or none. Publish again with the same ids."
                ) from error
            raise translate(error, "Storing events to be published") from error
        return True

    def waiting(self, owner: Owner, partition: int, after: int, most_bytes: int) -> list[Stored]:
        """A page of what is stored behind a number and not confirmed, in order."""
        page = {"partition": partition, "after": after, "most": PAGE_EVENTS, "bytes": most_bytes}
        return [Stored(**row) for row in self._rows("waiting_events", "Reading events to be sent", id=owner.id, **page)]

    def confirm(self, owner: Owner, numbers: Mapping[int, int]) -> None:
        """The broker has everything up to these numbers (partition -> sequence number).

        Raises:
            Fenced, StoreRestored: as `store`. StoreUnavailable: it is not known whether this was kept; confirm again.

        Crash: confirmed or not; what is not is sent again, as it was.
        """
        if numbers:
            places = {"partitions": list(numbers), "sequences": list(numbers.values())}
            with translating("Confirming what was sent"):
                row = self._write("confirm_events", id=owner.id, epoch=owner.level, **places)
            self._judge(owner, len(numbers), row)

    def _judge(self, owner: Owner, wanted: int, row: dict[str, Any]) -> None:
        if row["owned"] != 1:
            raise _fenced(owner, self._rows("publisher_epoch", "Looking at a publisher", id=owner.id))
        if row["fitted"] != wanted:
            raise _restored(owner)

    def _write(self, statement: str, **parameters: Any) -> dict[str, Any]:
        """Run it once; psycopg's own errors come through."""
        with self._connected() as connection:
            row: dict[str, Any] | None = _run(connection, self._sql[statement], parameters)[0]
        assert row is not None
        return row

    def _rows(self, statement: str, doing: str, **parameters: Any) -> list[dict[str, Any]]:
        with translating(doing), self._connected() as connection:
            return _run(connection, self._sql[statement], parameters)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._pool.borrow() as connection:
            if not self._ready:
                migrate.ensure(connection, self.schema, auto=self.auto_migrate)
                self._ready = True
            yield connection


def _run(connection: Connection, sql: bytes, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def _fenced(owner: Owner, rows: Sequence[Mapping[str, Any]]) -> Fenced:
    now = rows[0] if rows else None
    by = f"host {now['host']}, process {now['pid']}, at {now['taken_at']:%Y-%m-%d %H:%M:%S %Z}" if now and now["host"] else "nobody now"
    return Fenced(
        f"Producer group {owner.group!r} was opened by a newer publisher ({by}; owner level {now['epoch'] if now else 'gone'}, ours is "
        f"{owner.level}). This one sends nothing more. Run one publisher of a group at a time, or give each a group of its own."
    )


def _restored(owner: Owner) -> StoreRestored:
    return StoreRestored(
        f"The state of producer group {owner.group!r} does not stand where this publisher left it: the database was restored to an older "
        f"state, or changed by hand. Nothing more is sent by this publisher. Open a new one; publish again, with the same ids, what was "
        f"published since that copy and may be missing."
    )


__all__ = ["ConfigError", "Known", "Lane", "PublisherState", "StoreUnavailable"]
