"""What people do with the state of publishers: look, copy and restore, give up events, forget ids.

Promises that whatever changes the state of a group raises its owner level in the same transaction, so that a publisher that runs is fenced.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from psycopg.rows import dict_row

from checkpoint.advice import command
from checkpoint.errors import ConfigError
from checkpoint.postgres import migrate
from checkpoint.postgres.dsn import Connection, checked, checked_schema
from checkpoint.postgres.errors import translating
from checkpoint.postgres.sqlfiles import Statements
from dedup.postgres.connect import connect

FORMAT = 1
"""Of a copy."""

ROWS_AT_ONCE = 1_000

Row = dict[str, Any]


class Publishers:
    """The producer groups in one database, for one call at a time.

    Every method raises StoreError for what the database says.
    """

    def __init__(self, dsn: str, schema: str = "dedup") -> None:
        self._sql = Statements(checked_schema(schema))
        with translating("Connecting to PostgreSQL"):
            self._connection: Connection = connect(checked(dsn))
        migrate.ensure(self._connection, schema, auto=False)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def everything(self) -> list[Row]:
        """All groups: source, topic, group, owner_level, partitions, host, pid, taken_at, set_by, set_reason, waiting, waiting_since."""
        return self._rows("publishers")

    def one(self, group: str, topic: str = "", source: str = "") -> Row:
        """The group of this name. Raises ConfigError where there is none, or one at several destinations."""
        named = [row for row in self.everything() if row["group"] == group]
        found = [row for row in named if topic in ("", row["topic"]) and source in ("", row["source"])]
        places = ", ".join(f"--source {row['source']} --topic {row['topic']}" for row in named)
        if len(found) != 1:
            raise ConfigError(
                f"There is not one producer group {group!r} of that place, but {len(found)}. It is at: {places or 'no place'}."
            )
        return found[0]

    def lanes(self, group: Row) -> list[Row]:
        """Per partition: next_sequence, confirmed, waiting_since."""
        return self._rows("publisher_lanes", id=group["id"])

    def waiting(self, group: Row, partition: int | None = None, sequence: int | None = None, most: int = 20) -> list[Row]:
        """The oldest events that are not confirmed."""
        return self._rows("waiting_of_publisher", id=group["id"], partition=partition, sequence=sequence, most=most)

    def spread(self, group: Row, partitions: int, by: str, reason: str) -> None:
        """Spread keys over so many partitions from now on.

        Raises:
            ConfigError: events wait in a partition that is not among them.

        Crash: done or not.
        """
        if not self._rows("spread_publisher", id=group["id"], partitions=partitions, by=by, reason=reason):
            raise ConfigError(
                f"Events of producer group {group['group']!r} wait in partitions from {partitions} on. Send them, or "
                f"{command('publishers', 'discard', group['group'])} gives them up."
            )

    def discard(self, group: Row, partition: int | None, sequence: int | None, by: str, reason: str) -> int:
        """Give up events that wait; returns how many. Crash: all of them or none."""
        rows = self._rows("discard_events", id=group["id"], partition=partition, sequence=sequence, by=by, reason=reason)
        return int(rows[0]["discarded"])

    def purge(self, before: dt.datetime) -> int:
        """Forget ids published before this time; returns how many. Crash: all of them or none."""
        return len(self._rows("purge_published_ids", before=before))

    def purgeable(self, before: dt.datetime) -> int:
        """How many ids `purge` would forget."""
        return int(self._rows("count_purgeable_ids", before=before)[0]["ids"])

    def copy(self, group: Row) -> Iterator[str]:
        """The state of a group, a line of JSON for each of its rows, in one snapshot."""
        head = {name: group[name] for name in ("source", "topic", "group", "owner_level", "partitions")}
        yield json.dumps({"dedup_publisher": FORMAT, **head})
        with translating("Copying a publisher"), self._connection.transaction(), self._connection.cursor("copy") as cursor:
            cursor.execute(self._sql["copy_publisher"], {"id": group["id"]})
            for kind, row in cursor:
                yield json.dumps({kind: row})

    def restore(self, lines: Iterable[str], by: str, reason: str) -> Mapping[str, int]:
        """Put a copy in the place of what the group has; returns how many rows of each kind.

        Crash: all of it or nothing.
        """
        counts = dict.fromkeys(("lane", "event", "id"), 0)
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


_RESTORE = {"lane": "restore_lanes", "event": "restore_events", "id": "restore_ids"}


def read_copy(lines: Iterable[str]) -> tuple[Row, Iterator[tuple[str, Row]]]:
    """The head of a copy, and (kind, row) of each line behind it. Raises ConfigError for another file."""
    each = iter(lines)
    try:
        head = json.loads(next(each, "{}"))
    except ValueError:
        head = {}
    if not isinstance(head, dict) or head.pop("dedup_publisher", None) != FORMAT:
        raise ConfigError("This file is no copy of a publisher's state, or one of a newer version of dedup.")
    return head, ((kind, row) for line in each for kind, row in json.loads(line).items())
