"""One snapshot of a table: delta-rs's, and what this process knows beyond it without reading.

Promises the answers of delta-rs's DeltaTable. Two things cost less. Transaction ids that were asked for once are followed commit by commit:
delta-rs reads the log from the last checkpoint on for each question. And a commit that this process has put is known: delta-rs reads the
log again only when somebody asks for more than version, metadata, schema, protocol and transaction ids. Called by `tables`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from dedup.delta import features, objects
from dedup.delta.features import Owed, entry_path
from dedup.delta.files import Add
from dedup.delta.objects import Stat
from dedup.delta.storage import StorageOptions, absolute, by_objects, is_local, read, stats

log = logging.getLogger("dedup")

FOLLOWED = 20
"""Commits up to which they are read one by one; behind more, delta-rs is asked anew."""

MOST_AHEAD = 100
"""Commits that delta-rs has not read."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/=-]+")
"""A path that the log holds as it is: all others are encoded there."""

_INTERVAL = "delta.checkpointInterval"


class Own(NamedTuple):
    """A commit that this process has put, and that delta-rs has not read."""

    version: int
    adds: Sequence[Add]


class Snapshot:
    """A table as of one version. For one thread at a time; whatever it does not have itself is asked of delta-rs's object."""

    def __init__(self, table: DeltaTable, options: StorageOptions) -> None:
        self._base, self._options = table, options
        self.table_uri = str(table.table_uri)
        self.stamp: Stat | None = None  # of the log entry of this version
        self.ahead: list[Own] = []
        self._ids: dict[str, int | None] = {}
        self._ids_at = table.version()
        self._owed: Owed | None = None  # after the last commit of ours

    def __getattr__(self, name: str) -> Any:
        self._settle()
        return getattr(self._base, name)

    def version(self) -> int:
        """Of the snapshot."""
        return int(self._base.version()) + len(self.ahead)

    def metadata(self) -> Any:
        """No commit of ours changes it."""
        return self._base.metadata()

    def schema(self) -> Any:
        """No commit of ours changes it."""
        return self._base.schema()

    def protocol(self) -> Any:
        """No commit of ours changes it."""
        return self._base.protocol()

    def transaction_version(self, app: str) -> int | None:
        """The version of that transaction id; None without one. Raises what delta-rs raises, and OSError."""
        self._follow()
        if app not in self._ids:
            self._settle()
            self._follow()
            self._ids[app] = self._base.transaction_version(app)
        return self._ids[app]

    def update_incremental(self) -> None:
        """Become the snapshot of now. Raises DeltaError where the log lacks what this process has put there."""
        least = self.version()
        self._base.update_incremental()
        self.ahead = []
        if self._base.version() < least:
            raise DeltaError(f"The log of {self.table_uri} ends with version {self._base.version()}; this process has written {least}.")

    def put(self, adds: Sequence[Add], transactions: Mapping[str, int], now: int) -> bool:
        """Commit files as the next version, by one put-if-absent; False where another commit has that version. Raises OSError.

        Crash: the log entry is there or not; there is nothing between. Where the answer is lost it may be there.
        """
        self._follow()
        uri, version, owed = absolute(self.table_uri), self.version() + 1, self._stands()
        after = owed.after(adds, now)
        content = self._entry(adds, transactions, now, owed, after)
        tag = objects.create(uri, self._options, entry_path(version), content)
        if tag is None:
            return False
        self.stamp = stats(uri, None, [entry_path(version)])[0] if is_local(uri) else Stat(len(content), now / 1000, tag)
        self._ids_at, self._owed = version, after
        self._ids |= transactions
        self.ahead.append(Own(version, adds))
        self._write_checkpoint()
        return True

    @property
    def puts(self) -> bool:
        """Whether the storage takes a log entry from us."""
        uri = absolute(self.table_uri)
        return is_local(uri) or by_objects(uri, self._options)

    @property
    def must_put(self) -> bool:
        """Whether delta-rs makes no commit to this table, and we do."""
        return not features.BY_PUT.isdisjoint(self.protocol().writer_features or ())

    def can_put(self, adds: Iterable[Add]) -> bool:
        """Whether such a commit is all there is to do. delta-rs makes those after which a checkpoint is due: it writes that, too."""
        plain = all(_PLAIN_PATH.fullmatch(add.path) for add in adds)
        return plain and not self._due() and by_objects(absolute(self.table_uri), self._options)

    def _due(self) -> bool:
        return len(self.ahead) >= MOST_AHEAD or 0 in ((self.version() + 1) % self._interval, (self.version() + 2) % self._interval)

    @property
    def _interval(self) -> int:
        """Commits from checkpoint to checkpoint."""
        said = str(self.metadata().configuration.get(_INTERVAL, ""))
        return int(said) if said.isdecimal() and int(said) else 100

    def _write_checkpoint(self) -> None:
        """Where one is due and delta-rs commits nothing here. Without it the table is whole, and slower to open: the next one may come.

        Crash: it is there, or only the log.
        """
        if not self.must_put or self.version() % self._interval:
            return
        try:
            self._settle()
            self._base.create_checkpoint()
        except (DeltaError, OSError) as error:
            log.warning("%s: no checkpoint of version %s could be written: %s", self.table_uri, self.version(), error)

    def _stands(self) -> Owed:
        """Where the features of the table stand at this version. Raises OSError."""
        if self._owed is None or self._owed.version != self.version():
            rows, time = features.asks(self.protocol().writer_features or (), self.metadata().configuration)
            self._owed = features.standing(absolute(self.table_uri), self._options, self.version(), rows=rows, time=time)
        return self._owed

    def _settle(self) -> None:
        """Have delta-rs read what this process has put, and no commit of others behind it: nobody has looked at those yet."""
        if self.ahead:
            known = self.version()
            self.update_incremental()
            if self._base.version() > known:
                self._base.load_as_version(known)

    def _follow(self) -> None:
        """Take in the transaction ids of the commits since the last question."""
        first, last = self._ids_at + 1, self.version()
        if first > last:
            return
        if not self._ids or last - first >= FOLLOWED:
            self._ids = {}
        for version in range(first, last + 1) if self._ids else ():
            content = read(absolute(self.table_uri), self._options, entry_path(version))
            if content is None:  # cleaned up, below a checkpoint
                self._ids = {}
                break
            told = dict(transactions_in(content.to_pybytes()))
            self._ids.update({app: told[app] for app in self._ids.keys() & told.keys()})
        self._ids_at = last

    def _entry(self, adds: Sequence[Add], transactions: Mapping[str, int], now: int, owed: Owed, after: Owed) -> bytes:
        """The text of a log entry. Characters are not escaped: arrow, which reads logs for delta-rs, reads some escaped pairs wrongly.

        Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#actions, read 2026-11; and what delta-rs 1.6.6 writes and reads.
        """
        by = json.dumps(list(self.metadata().partition_columns))
        info = {"timestamp": now, "operation": "WRITE", "operationParameters": {"mode": "Append", "partitionBy": by}, "engineInfo": "dedup"}
        in_commit = {} if after.time is None else {"inCommitTimestamp": after.time}
        actions: list[dict[str, Any]] = [{"commitInfo": {**in_commit, **info}}]
        actions += [{"add": {**_add(add), **ids}} for add, ids in zip(adds, features.first_ids(adds, owed), strict=True)]
        actions += features.highest_told(after) if adds else []
        actions += [{"txn": {"appId": app, "version": version, "lastUpdated": now}} for app, version in transactions.items()]
        return "\n".join(json.dumps(action, separators=(",", ":"), ensure_ascii=False) for action in actions).encode()


def transactions_in(entry: bytes) -> list[tuple[str, int]]:
    """(app id, version) of a log entry."""
    return [(one["appId"], one["version"]) for one in features.actions_in(entry, "txn")]


def _add(add: Add) -> dict[str, Any]:
    return {
        "path": add.path,
        "partitionValues": dict(add.partition_values),
        "size": add.size,
        "modificationTime": add.modification_time,
        "dataChange": True,
        "stats": add.stats,
    }
