"""The state of publishers in PostgreSQL: owner levels, sequence numbers, events that are not confirmed, known ids.

Each write is one statement, which is one transaction. So a process that is stopped or cut off holds no lock, and a takeover never waits for
it. People look at groups, copy and restore them, give up events and delete ids. Each such change of a group raises its owner level in the
same transaction, which fences a running publisher. The publisher and `dedup publisher` call this module.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg
from psycopg.rows import dict_row

from checkpoint.errors import CommitUnknown, ConfigError, Fenced, Refused, StoreRestored, command
from checkpoint.holders import is_alive, this_process
from checkpoint.postgres import sql
from checkpoint.postgres.connection import Connection, checked, checked_schema, connecting, is_lost, redacted, translate, translating
from checkpoint.postgres.sql import Statements
from dedup.postgres.connection import Pool, connect
from dedup.postgres.epoch import refuse_lazy_commit
from dedup.publishing.events import Owner, Stored

PAGE_EVENTS = 1_000

FORMAT = 2
"""Of a copy."""

KINDS = ("lane", "event", "id")
"""Of rows of a copy. Its last line has the number of each."""

FIRST_ROW = 2
"""Line of a copy."""

ROWS_AT_ONCE = 1_000

Row = dict[str, Any]

_RESTORE = {"lane": "restore_lanes", "event": "restore_events", "id": "restore_ids"}


@dataclass(frozen=True)
class Known:
    """What the state holds of an id at a destination."""

    payload_hash: int
    publisher: int  # id of its producer group
    partition: int
    sequence: int
    confirmed: bool


@dataclass(frozen=True)
class Lane:
    """The numbers of a producer group in one partition."""

    next: int  # sequence number that is given next
    confirmed: int  # last one that the broker has
    waiting_since: dt.datetime | None  # when the oldest event that is not confirmed was stored


class PublisherState:
    """The tables of publishers. One thread may use it at a time.

    Args:
        dsn, schema, auto_migrate: as of PostgresStore.

    Each method raises StoreError for an error of the database.
    """

    def __init__(self, dsn: str, schema: str = "dedup", auto_migrate: bool = True) -> None:
        self.dsn, self.schema, self.auto_migrate = checked(dsn), checked_schema(schema), auto_migrate
        self._sql, self._pool, self._ready = Statements(schema), Pool(dsn), False

    def __repr__(self) -> str:
        return f"PublisherState({redacted(self.dsn)!r}, schema={self.schema!r})"

    def open(self, source: str, topic: str, group: str, partitions: int) -> Owner:
        """Become the owner of a producer group at once. The owner before it can neither store nor confirm from then on.

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
        """Give up the group, unless a newer owner has it, and close the connections.

        Crash: the process stays the owner until another one sees that it has ended.
        """
        if owner is not None:
            self._rows("close_publisher", "Closing a publisher", id=owner.id, epoch=owner.level)
        self._pool.close()

    def check(self, owner: Owner) -> None:
        """Raise Fenced if another process has opened the group."""
        rows = self._rows("publisher_epoch", "Looking at a publisher", id=owner.id)
        if not rows or rows[0]["epoch"] != owner.level:
            raise _fenced(owner, rows)

    def is_gone(self, publisher: int) -> bool:
        """Return whether nobody owns this group, or the process of its owner has provably ended."""
        rows = self._rows("publisher_epoch", "Looking at a publisher", id=publisher)
        host, pid, started = (rows[0][name] for name in ("host", "pid", "started")) if rows else (None, 0, "")
        return host is None or is_alive(host, pid, started) is False

    def name_of(self, publisher: int) -> str:
        """The name of a producer group."""
        return str(self._rows("publisher_name", "Looking at a publisher", id=publisher)[0]["name"])

    def lanes(self, owner: Owner) -> Mapping[int, Lane]:
        """Return the numbers of the group by partition."""
        rows = self._rows("publisher_lanes", "Reading the lanes of a publisher", id=owner.id)
        return {row["partition"]: Lane(row["next_sequence"], row["confirmed"], row["waiting_since"]) for row in rows}

    def known(self, owner: Owner, ids: Sequence[str]) -> Mapping[str, Known]:
        """Return what the state holds of each id. New ids are left out."""
        rows = self._rows("known_ids", "Looking up ids", destination=owner.destination, ids=list(ids)) if ids else []
        return {
            row["message_id"]: Known(row["payload_hash"], row["publisher_id"], row["partition"], row["sequence"], row["confirmed"])
            for row in rows
        }

    def store(self, owner: Owner, events: Sequence[Stored], hashes: Mapping[str, int]) -> bool:
        """Store events before they are sent. Return False, and store nothing, if another process has stored one of the ids in the meantime.

        Args:
            hashes: id -> payload hash, of those that callers gave.

        Raises:
            Fenced: another process has opened the group. StoreRestored: the state is not the one that this process left.
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
        """Return one page of the events behind a number that are not confirmed, in order."""
        page = {"partition": partition, "after": after, "most": PAGE_EVENTS, "bytes": most_bytes}
        return [Stored(**row) for row in self._rows("waiting_events", "Reading events to be sent", id=owner.id, **page)]

    def confirm(self, owner: Owner, numbers: Mapping[int, int]) -> None:
        """Note that the broker has all events up to these numbers (partition -> sequence number).

        Raises:
            Fenced, StoreRestored: as `store`. StoreUnavailable: it is not known whether the note was stored; confirm again.

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
                sql.ensure(connection, self.schema, auto=self.auto_migrate)
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


class Publishers:
    """The producer groups in one database, for people's commands. One call may run at a time.

    Each method raises StoreError for an error of the database.
    """

    def __init__(self, dsn: str, schema: str = "dedup") -> None:
        self._sql = Statements(checked_schema(schema))
        dsn = checked(dsn)
        with connecting(dsn):
            self._connection: Connection = connect(dsn)
        sql.ensure(self._connection, schema, auto=False)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def everything(self) -> list[Row]:
        """Return all groups.

        A row has source, topic, group, owner_level, partitions, host, pid, taken_at, set_by, set_reason, waiting and waiting_since.
        """
        return self._rows("publishers")

    def one(self, group: str, topic: str = "", source: str = "") -> Row:
        """Return the group of this name. Raises ConfigError for an unknown name, or a name that several destinations have."""
        named = [row for row in self.everything() if row["group"] == group]
        found = [row for row in named if topic in ("", row["topic"]) and source in ("", row["source"])]
        places = ", ".join(f"--source {row['source']} --topic {row['topic']}" for row in named)
        if len(found) != 1:
            raise ConfigError(
                f"{len(found)} producer groups have the name {group!r} and send to that place; name exactly one. "
                f"There are: {places or 'none'}."
            )
        return found[0]

    def lanes(self, group: Row) -> list[Row]:
        """Return next_sequence, confirmed and waiting_since of each partition."""
        return self._rows("publisher_lanes", id=group["id"])

    def waiting(self, group: Row, partition: int | None = None, sequence: int | None = None, most: int = 20) -> list[Row]:
        """Return the oldest events that are not confirmed."""
        return self._rows("waiting_of_publisher", id=group["id"], partition=partition, sequence=sequence, most=most)

    def spread(self, group: Row, partitions: int, by: str, reason: str) -> None:
        """Spread keys over another number of partitions.

        Raises:
            ConfigError: events wait in a partition that is not among them.

        Crash: done or not.
        """
        if not self._rows("spread_publisher", id=group["id"], partitions=partitions, by=by, reason=reason):
            raise Refused(
                f"Events of producer group {group['group']!r} wait in partition {partitions} or above. Send them, or give them up with "
                f"{command('publisher', 'discard', group['group'])}."
            )

    def discard(self, group: Row, partition: int | None, sequence: int | None, by: str, reason: str) -> int:
        """Give up events that are not confirmed. Return how many. Crash: all of them are given up or none."""
        rows = self._rows("discard_events", id=group["id"], partition=partition, sequence=sequence, by=by, reason=reason)
        return int(rows[0]["discarded"])

    def purge(self, before: dt.datetime) -> int:
        """Delete ids that were published before this time. Return how many. Crash: all of them are deleted or none."""
        return len(self._rows("purge_published_ids", before=before))

    def purgeable(self, before: dt.datetime) -> int:
        """Return how many ids `purge` would delete."""
        return int(self._rows("count_purgeable_ids", before=before)[0]["ids"])

    def copy(self, group: Row) -> Iterator[str]:
        """Yield the state of a group in one snapshot, as a line of JSON for each of its rows. The last line says that it is whole."""
        counts = dict.fromkeys(KINDS, 0)
        head = {name: group[name] for name in ("source", "topic", "group", "owner_level", "partitions")}
        yield json.dumps({"dedup_publisher": FORMAT, **head})
        with translating("Copying a publisher"), self._connection.transaction(), self._connection.cursor("copy") as cursor:
            cursor.execute(self._sql["copy_publisher"], {"id": group["id"]})
            for kind, row in cursor:
                counts[kind] += 1
                yield json.dumps({kind: row})
        yield json.dumps({"end": counts})

    def restore(self, lines: Iterable[bytes], by: str, reason: str) -> Mapping[str, int]:
        """Replace the state of the group by a copy. Return the number of rows of each kind.

        Raises:
            ConfigError: this is no copy, or not a whole one.

        Crash: all of it or nothing.
        """
        counts = dict.fromkeys(KINDS, 0)
        head, rows = read_copy(lines)
        with translating("Restoring a publisher"), self._connection.transaction():
            place = self._rows("restore_publisher", **head, by=by, reason=reason)[0]
            ids = {"id": place["id"], "destination": place["destination_id"]}
            self._rows("empty_publisher", **ids)
            while some := list(islice(rows, ROWS_AT_ONCE)):
                for kind in counts:
                    chosen = [row for its, row in some if its == kind]
                    counts[kind] += len(chosen)
                    if chosen:
                        self._rows(_RESTORE[kind], **ids, rows=json.dumps(chosen))
        return counts

    def _rows(self, statement: str, **parameters: Any) -> list[Row]:
        with translating("Working on publishers"), self._connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(self._sql[statement], parameters)
            return cursor.fetchall() if cursor.description else []


def read_copy(lines: Iterable[bytes]) -> tuple[Row, Iterator[tuple[str, Row]]]:
    """Return the head of a copy, and (kind, row) of each line behind it.

    Raises ConfigError for another file. The rows raise it for a line that is damaged, and behind the last row of a copy that is not whole.
    """
    each = iter(lines)
    try:
        head = json.loads(next(each, b"{}"))
    except ValueError:
        head = {}
    if not isinstance(head, dict) or head.pop("dedup_publisher", None) != FORMAT:
        raise ConfigError("This file is not an export of a publisher's state, or another version of dedup wrote it.")
    return head, _rows_of(each)


def _rows_of(lines: Iterator[bytes]) -> Iterator[tuple[str, Row]]:
    """(kind, row) of each line between the first and the last. Raises ConfigError as `read_copy` says."""
    counts, end = dict.fromkeys(KINDS, 0), None
    for number, line in enumerate(lines, FIRST_ROW):
        kind, row = _parsed(number, line)
        if end is not None or kind not in (*KINDS, "end"):
            raise _damaged(number)
        if kind == "end":
            end = row
        else:
            counts[kind] += 1
            yield kind, row
    if end is None:
        raise ConfigError("This copy is not whole: its last line is missing. Nothing is imported. Take another copy.")
    if end != counts:
        raise ConfigError(f"This copy is not whole: it has {counts}, and its last line says {end}. Nothing is imported. Take another copy.")


def _parsed(number: int, line: bytes) -> tuple[str, Row]:
    """(kind, row) of this line. Raises ConfigError where it is not one object in another."""
    try:
        ((kind, row),) = json.loads(line).items()
        return kind, {**row}
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(number) from error


def _damaged(line: int) -> ConfigError:
    return ConfigError(f"This copy is damaged at line {line}. Nothing is imported. Take another copy.")
