"""delta-rs, with its errors translated: opening tables, committing files, and which decision a table shows.

Commits of files and merges are made here, those of files on object storage by one put; engine.py deletes and compacts. Promises that a
commit is tried against exactly the snapshot that was read, unless its caller says otherwise. Called by all modules of this package that
touch a table.

The one transaction id of a commit holds the decision's number and bits of its identity. A number alone is not enough: a ledger that was
copied back gives the same numbers to other decisions. Versions grow with the number, as Spark's idempotent writes require; both engines
read them from the table's newest snapshot.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from checkpoint.errors import SinkMismatch, StoreUnavailable
from dedup.delta.features import entry_path
from dedup.delta.files import Add
from dedup.delta.objects import Stat, at_once
from dedup.delta.snapshot import Snapshot, transactions_in
from dedup.delta.storage import StorageOptions, absolute, explained, filesystem, is_away, is_local, read, stats

COMMIT_REFUSED = CommitFailedError
"""delta-rs says that the commit did not land; still read back, because its own retry may have met its own commit."""

_RACE = re.compile(r"Failed to commit transaction: \d+$|concurrent transaction")
"""What delta-rs says where other commits came first, each time that it tried (crate deltalake-core, TransactionError, 1.6.6)."""

_MANAGED = re.compile("catalog-managed table")
"""What delta-rs says of a table whose commits a catalog keeps (crate delta_kernel, as of deltalake 1.6.6)."""

DELTA_ERRORS = (DeltaError, OSError)
"""Everything else that delta-rs raises about a table or its storage."""

FAILED = (COMMIT_REFUSED, *DELTA_ERRORS, StoreUnavailable)
"""What a change of a table raises, whoever makes it; whether it landed has to be read back."""

BLOBS = frozenset({"body", "properties", "extras", "headers"})
"""Columns that are not read before it is known which rows are wanted."""

_ENTRY = re.compile(r"(?:^|/)\d{20}\.json$")
"""A commit in a table's log."""

ID_BITS = 24
"""Bits of identity beside the number of a decision: another decision under the same number looks alike once in 16.8 million times."""

PART_BITS = 16
"""A decision may write so often to one sink, as a power of two. Each write but the last has a version of its own."""

_PART_ID_BITS = 16


def open_table(uri: str, options: StorageOptions) -> DeltaTable | None:
    """The table as of now, or None where there is none.

    Raises:
        StoreUnavailable: that cannot be told.
        SinkMismatch: a catalog manages it.
    """
    try:
        return _snapshot(DeltaTable(uri, storage_options=dict(options) if options else None), options)
    except TableNotFoundError:
        return None
    except DELTA_ERRORS as error:
        if _MANAGED.search(str(error)):
            raise SinkMismatch(
                f"The Delta table {uri} is managed by its catalog (table feature catalogManaged): only the catalog says which commits "
                "count, and one that is made by the path may look successful and vanish. Write into an external table instead "
                "(CREATE TABLE ... USING delta LOCATION '...'), whose own log decides."
            ) from error
        raise StoreUnavailable(f"The Delta table {uri} cannot be opened: {explained(uri, error)}") from error


def dataset(table: DeltaTable) -> Any:
    """A snapshot for reads by Arrow.

    A local one is read by Arrow's own file system. Behind delta-rs's, which is written in Python, threads of Arrow abort the process where
    they outlive the interpreter ("terminate called without an active exception", exit code 134; deltalake 1.6.6).
    """
    uri = absolute(str(table.table_uri))
    local = {"filesystem": filesystem(uri, None)} if is_local(uri) else {}
    return table.to_pyarrow_dataset(**local)


def rows_where(rows: Any, columns: Sequence[str], condition: ds.Expression | None) -> pa.Table:
    """These columns of the rows that a condition takes, which asks for none of BLOBS.

    DELETE, UPDATE and MERGE of delta-rs write texts as string_view (deltalake 1.6.6). Where all rows of a row group have one text, Arrow
    puts it into the condition with that type, for which it cannot compare (pyarrow 26.0.1). Such files are read piece by piece.

    Args:
        rows: a dataset, or what answers like one.
    """
    try:
        return rows.to_table(columns=list(columns), filter=condition)
    except pa.ArrowNotImplementedError:
        if not isinstance(rows, ds.Dataset):
            raise
        empty = pa.schema([rows.schema.field(name) for name in columns]).empty_table()
        found = [_of_file(file, rows.schema, columns, condition) for file in rows.get_fragments()]
        return pa.concat_tables([empty, *found])


def _of_file(file: Any, schema: pa.Schema, columns: Sequence[str], condition: ds.Expression | None) -> pa.Table:
    try:
        return file.to_table(schema=schema, columns=list(columns), filter=condition)
    except pa.ArrowNotImplementedError:
        names = dict.fromkeys([*columns, *(name for name in schema.names if name not in BLOBS)])
        pieces = (pa.Table.from_batches([piece]) for piece in file.to_batches(schema=schema, columns=list(names)))
        return pa.concat_tables([schema.empty_table().select(columns), *(piece.filter(condition).select(columns) for piece in pieces)])


def listed(table: DeltaTable) -> frozenset[str]:
    """The files of a snapshot. Raises StoreUnavailable."""
    with reading(table.table_uri):
        return frozenset(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())


def open_version(uri: str, version: int, options: StorageOptions) -> DeltaTable | None:
    """The table as it was, or None where its log does not tell. Raises StoreUnavailable where the storage does not answer."""
    try:
        return _snapshot(DeltaTable(uri, version=version, storage_options=dict(options) if options else None), options)
    except DELTA_ERRORS as error:
        if is_away(error):
            raise StoreUnavailable(f"Version {version} of the Delta table {uri} cannot be opened: {explained(uri, error)}") from error
        return None


def _snapshot(table: DeltaTable, options: StorageOptions) -> DeltaTable:
    return cast(DeltaTable, Snapshot(table, options))  # it has all that a DeltaTable has


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Raises StoreUnavailable in place of what delta-rs or Arrow raise where the storage does not answer."""
    try:
        yield
    except DELTA_ERRORS as error:
        raise StoreUnavailable(f"The Delta table {uri} cannot be read: {explained(uri, error)}") from error


def lost_race(error: BaseException | None) -> bool:
    """Whether a commit was refused because others came first: the next one may win."""
    return isinstance(error, COMMIT_REFUSED) and bool(_RACE.search(str(error)))


def transaction_of(table: DeltaTable, app: str) -> int | None:
    """The version of that transaction id, as of the snapshot; None without one. Raises StoreUnavailable."""
    with reading(table.table_uri):
        found: int | None = table.transaction_version(app)
        return found


def transactions_in_log(table: DeltaTable, options: StorageOptions) -> tuple[dict[str, frozenset[int]], bool]:
    """App id -> all versions that the log entries have, and whether the first entry of all is still there. Raises StoreUnavailable."""
    uri = absolute(table.table_uri)
    found: dict[str, set[int]] = {}
    with reading(uri):
        system = filesystem(uri, options)
        entries = [i.path for i in system.get_file_info(pafs.FileSelector("_delta_log")) if _ENTRY.search(i.path)]
        for told in at_once(lambda path: _transactions(uri, options, path), entries):
            for app, version in told:
                found.setdefault(app, set()).add(version)
    return {app: frozenset(versions) for app, versions in found.items()}, any(path.endswith(entry_path(0)) for path in entries)


def _transactions(uri: str, options: StorageOptions, path: str) -> list[tuple[str, int]]:
    content = read(uri, options, path)
    if content is None:
        raise FileNotFoundError(f"{path} was listed and is not there")
    return transactions_in(content.to_pybytes())


def history_of(table: DeltaTable, limit: int | None) -> list[dict[str, Any]]:
    """The newest commits, or all: `operation`. Raises StoreUnavailable."""
    with reading(table.table_uri):
        return table.history(limit)


class Handle:
    """One table looked at again and again: only what is new in its log is read, as long as the log is provably the same.

    The log entry of the known version must still be the very file it was. If it is not, the table may have been re-created, and is opened
    anew, and so it is where the options are others by now: an open table keeps its token. Not picklable, not for two threads.
    """

    def __init__(self, uri: str, options: StorageOptions) -> None:
        self.uri = uri
        self._options = options
        self._given: dict[str, str] = {}
        self._table: DeltaTable | None = None

    def look(self) -> DeltaTable | None:
        """The table as of now, or None where there is none. The same object as before where nothing has changed.

        Raises:
            StoreUnavailable: that cannot be told.
        """
        try:
            self._table = self._look()
        except DELTA_ERRORS as error:
            self.forget()
            raise StoreUnavailable(f"The Delta table {self.uri} cannot be read: {error}") from error
        return self._table

    def forget(self) -> None:
        """Open the table anew next time."""
        self._table = None

    def _look(self) -> DeltaTable | None:
        given, self._given = self._given, dict(self._options or {})
        known = cast(Snapshot | None, self._table)
        if known is not None and known.stamp is not None and given == self._given:
            version = known.version()
            now, following = self._stamps(version, version + 1)
            if known.stamp.same(now):
                if following is not None:
                    known.update_incremental()
                    known.stamp = following if known.version() == version + 1 else self._stamps(known.version())[0]
                return self._table
        table = open_table(self.uri, self._options)
        if table is not None:
            cast(Snapshot, table).stamp = self._stamps(table.version())[0]
        return table

    def _stamps(self, *versions: int) -> list[Stat | None]:
        """Of the log entries of these versions, which are written once and never changed; None for one that is not there."""
        return stats(self.uri, self._options, [entry_path(version) for version in versions])


def commit(
    table: DeltaTable,
    adds: Iterable[Add],
    transactions: Mapping[str, int],
    *,
    removes: Sequence[RemoveAction] = (),
    exact: bool,
    note: Mapping[str, Any] | None = None,
) -> int:
    """Add files to the very snapshot that `table` is, with transaction ids; returns the version that this made, if nobody came between.

    Args:
        transactions: app id -> version.
        note: what the commit tells of itself in the table's history.
        exact: fail if any other commit came first. Otherwise delta-rs puts the commit after foreign ones that do not conflict;
            another commit with one of these app ids always conflicts.

    Raises:
        CommitFailedError, DeltaError, OSError: as delta-rs gives them; the outcome has to be read back.

    Crash: the log entry is there or not; there is nothing between.
    """
    adds, version = list(adds), table.version() + 1
    if isinstance(table, Snapshot) and not removes and (table.must_put or table.can_put(adds)):
        if table.put(adds, transactions, int(time.time() * 1000)):
            return version
        if exact or table.must_put:  # delta-rs would look at the other commit and come behind it, where it commits at all
            raise COMMIT_REFUSED(f"Failed to commit transaction: {version}")
    table.create_write_transaction(
        actions=[*removes, *(_action(add) for add in adds)],
        mode="append",
        schema=table.schema(),
        partition_by=list(table.metadata().partition_columns),
        commit_properties=_properties(transactions, exact=exact, note=note),
    )
    return version


class MergeClauses(NamedTuple):
    """SQL over the sink's row `t` and the given row `s`."""

    delete: str
    update: str
    insert: str
    values: Mapping[str, str]  # column of the sink -> value, both quoted


def merge(table: DeltaTable, rows: pa.Table, match: str, clauses: MergeClauses, transactions: Mapping[str, int]) -> None:
    """Merge rows into the very snapshot that `table` is, with transaction ids; `table` then is the snapshot after it.

    A merge that changes nothing commits nothing.

    Raises:
        CommitFailedError, DeltaError, OSError: as delta-rs gives them; the outcome has to be read back.

    Crash: the log entry is there or not; there is nothing between.
    """
    with computing():
        merger = table.merge(
            rows, match, source_alias="s", target_alias="t", streamed_exec=False, commit_properties=_properties(transactions, exact=True)
        )
        merger = merger.when_matched_delete(clauses.delete).when_matched_update(dict(clauses.values), clauses.update)
        merger.when_not_matched_insert(dict(clauses.values), clauses.insert).execute()


@contextmanager
def computing() -> Iterator[None]:
    """Raises DeltaError in place of what delta-rs raises where a computation fails: a bare Exception, or a ValueError (1.6.6)."""
    try:
        yield
    except (*FAILED, MemoryError):
        raise
    except Exception as error:
        raise DeltaError(str(error)) from error


def _properties(transactions: Mapping[str, int], *, exact: bool, note: Mapping[str, Any] | None = None) -> CommitProperties:
    now = int(time.time() * 1000)  # ids without a time are the first that Delta drops, where a property lets them expire
    return CommitProperties(
        app_transactions=[Transaction(app, version, now) for app, version in transactions.items()],
        max_commit_retries=0 if exact else None,
        custom_metadata=dict(note) if note else None,
    )


def _action(add: Add) -> AddAction:
    return AddAction(add.path, add.size, add.partition_values, add.modification_time, True, add.stats)


def version_of(seq: int, attempt: str) -> int:
    """The transaction version of a whole decision."""
    return seq << ID_BITS | _identity(attempt, ID_BITS)


def part_version(seq: int, attempt: str, part: int) -> int:
    """The transaction version of one write of a decision that is not its last one to that sink."""
    return (seq << _PART_ID_BITS | _identity(attempt, _PART_ID_BITS)) << PART_BITS | part


def seq_of(version: int) -> int:
    """The number of the decision."""
    return version >> ID_BITS


def seq_of_part(version: int) -> int:
    """The same for a version of one write."""
    return version >> (_PART_ID_BITS + PART_BITS)


def reached(shown: int | None, version: int) -> bool:
    """Whether a table that shows the one version has taken the whole decision of the other one, or a later decision."""
    return shown is not None and (shown == version or seq_of(shown) > seq_of(version))


def part_reached(shown: int | None, version: int) -> bool:
    """The same for versions of one write."""
    if shown is None:
        return False
    same = shown >> PART_BITS == version >> PART_BITS
    return (same and shown >= version) or seq_of_part(shown) > seq_of_part(version)


def same_decision(part: int, seq: int, attempt: str) -> bool:
    """Whether the version of one write is of this decision."""
    return part >> PART_BITS == part_version(seq, attempt, 0) >> PART_BITS


def _identity(attempt: str, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(attempt.encode(), digest_size=4).digest()) >> (32 - bits)
