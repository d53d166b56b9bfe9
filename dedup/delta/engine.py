"""The engines that read and commit Delta tables: delta-rs, or Spark where only Spark has access to the storage.

Promises that the code above uses both in the same way. Both give a snapshot with those methods of delta-rs's DeltaTable that are used here:
version, metadata, schema, protocol, history, transaction_version. Called by the store's parts.

Spark is needed where delta-rs gets no credentials for the storage of tables: Unity Catalog gives it none. Only the public API of Spark is
used, so classic Spark, Spark Connect and clusters without access to the JVM behave the same. Spark appends to its own newest snapshot, but
it refuses, or silently skips, a transaction id whose number was written before. Spark has no call that lists a table's transaction ids;
our commits repeat theirs in the history.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import RemoveAction

from checkpoint.errors import ConfigError
from checkpoint.position import Ranges
from dedup.delta import compaction, tables
from dedup.delta.files import Add, FileWriter, indexed_columns
from dedup.delta.fit import sql_type
from dedup.delta.storage import DELTA_RS, SPARK, StorageOptions, absolute, is_local, missing

if TYPE_CHECKING:
    from dedup.delta.erasure import Blank

MINE = "dedup.engine"
"""Property of a ledger that is committed to by Spark. Only one engine may: each one's compare-and-swap does not see the other's."""

log = logging.getLogger("dedup")

BLANKED = "dedup.blanked"
"""What a commit tells that wrote files anew without what was erased: how many rows."""

WINDOW = 200
"""Commits of a table's history that a first look reads; all of them only where an id is asked for that these do not tell."""

KEPT_BYTES = 64 * 1024 * 1024
"""Size up to which rows of a version are kept for the next question."""

_MANY = 5_000
"""Rows above which they are not asked for one by one."""

_RANGES = 50
"""Ranges of decisions at most in which rows are looked for: a few old ones do not ask for all that lies between."""


class Handle(Protocol):
    """One table looked at again and again. Not picklable, not for two threads."""

    def look(self) -> DeltaTable | None:
        """The table as of now, or None where there is none. Raises StoreUnavailable where that cannot be told."""

    def forget(self) -> None:
        """Read everything anew next time."""


class Engine(Protocol):
    """Reads and commits tables. Picklable."""

    name: str

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why sinks take the row path whatever they are; empty where they need not."""

    @property
    def skips(self) -> bool:
        """Whether a commit of a number that was taken before goes through silently, and changes nothing: then look what is there."""

    @property
    def hidden(self) -> frozenset[str]:
        """Writer features by which columns may have rules that this engine does not get to see."""

    def side(self) -> Any:
        """Spark's view of tables. Raises ConfigError where there is no Spark session and none may be started."""

    def handle(self, uri: str) -> Handle:
        """For the table there."""

    def create(self, uri: str, schema: pa.Schema, name: str, properties: Mapping[str, str], partition_by: Sequence[str] = ()) -> None:
        """The table, where it is not there yet. Raises StoreUnavailable. Crash: it is there or not."""

    def append(self, table: DeltaTable, rows: pa.Table, transactions: Mapping[str, int]) -> None:
        """Commit rows unless another commit with one of these ids, or a later version of one, came first.

        Raises:
            What `tables.FAILED` names; the outcome has to be read back.

        Crash: the rows are there, with the ids, or nothing is.
        """

    def transactions(self, table: DeltaTable) -> tuple[Mapping[str, frozenset[int]], bool]:
        """App id -> all versions that commits in the table's log have, and whether the log is kept from its beginning.

        Raises StoreUnavailable.
        """

    @property
    def tells_files(self) -> bool:
        """Whether `listed` tells the files of a snapshot."""

    def listed(self, table: DeltaTable) -> frozenset[str]:
        """Paths of the files of the snapshot; none where the engine does not tell. Raises StoreUnavailable."""

    def as_of(self, table: DeltaTable, version: int) -> DeltaTable | None:
        """An older snapshot; None where its log is gone, or the engine does not show it. Raises StoreUnavailable."""

    def gone(self, table: DeltaTable, paths: Sequence[str]) -> list[str]:
        """Those of these files of the table that are not there. Raises StoreUnavailable."""

    def took(self, table: DeltaTable, app: str, version: int) -> None:
        """Spark has appended or merged with this id to a sink, or found it there."""

    def delete(self, table: DeltaTable, where: str) -> None:
        """Delete rows. Raises what `tables.FAILED` names. Crash: all of them are gone, or none."""

    def blank(self, table: DeltaTable, blank: Blank) -> int:
        """Write the files anew that hold rows to be blanked; returns how many rows. Raises what `tables.FAILED` names.

        Crash: the old files or the new ones are in the table.
        """

    def blanked_at(self, table: DeltaTable) -> dt.datetime | None:
        """When files were last written anew by `blank`, as far as the log is kept; None where that was never. Raises StoreUnavailable."""

    def compact(self, table: DeltaTable, target_size: int, row_group: int) -> None:
        """Few large files for many small ones. Crash: each row is in an old file or in a new one, never in both."""

    def vacuum(self, table: DeltaTable, *, full: bool, at_once: bool = False) -> None:
        """Delete files that left the table, or with `full` never came into it. Crash: some are deleted.

        Args:
            at_once: also those that left it just now, if the engine can do that.
        """

    def deletable(self, table: DeltaTable) -> bool:
        """Whether there are files that a full `vacuum` would delete now."""


class DeltaRs:
    """Commits by delta-rs, with credentials that it gets from the same options as the files."""

    name = DELTA_RS
    reasons: tuple[str, ...] = ()
    skips = False
    tells_files = True
    hidden: frozenset[str] = frozenset()

    def __init__(self, options: StorageOptions) -> None:
        self._options = options

    def side(self) -> Any:
        """That of this process's session, for sinks that only Spark may write. Raises ConfigError where there is none."""
        side = spark_side()
        if side is None:
            raise ConfigError(
                "This sink can only be written by Spark, and there is no Spark session in this process. Run it where Spark runs."
            )
        return side

    def handle(self, uri: str) -> Handle:
        """For the table there."""
        return tables.Handle(uri, self._options)

    def create(self, uri: str, schema: pa.Schema, name: str, properties: Mapping[str, str], partition_by: Sequence[str] = ()) -> None:
        """Create the table where it is not there yet; of several creators one wins.

        delta-rs must not try again: a second try of `create` puts its metadata, with another table id, over those of the winner (1.6.6).

        Crash: it is there or not.
        """
        try:
            DeltaTable.create(
                uri,
                schema,
                mode="ignore",
                name=name[:250],
                partition_by=list(partition_by),
                configuration=dict(properties),
                storage_options=dict(self._options) if self._options else None,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except tables.FAILED:
            if tables.open_table(uri, self._options) is None:
                raise

    def append(self, table: DeltaTable, rows: pa.Table, transactions: Mapping[str, int]) -> None:
        """Against the very snapshot that `table` is. Crash: the rows are there, with the ids, or nothing is."""
        # As the table says: logs outlive the files, and bounds of texts would be there when the texts are erased.
        indexed = indexed_columns(table.metadata().configuration)
        adds = FileWriter(table.table_uri, self._options, rows.schema, table.table_uri, indexed=indexed).write(rows)
        tables.commit(table, adds, transactions, exact=True)

    def transactions(self, table: DeltaTable) -> tuple[Mapping[str, frozenset[int]], bool]:
        """Read from the log itself, which delta-rs does not show."""
        return tables.transactions_in_log(table, self._options)

    def listed(self, table: DeltaTable) -> frozenset[str]:
        """From the snapshot."""
        return tables.listed(table)

    def as_of(self, table: DeltaTable, version: int) -> DeltaTable | None:
        """Opened anew."""
        return tables.open_version(table.table_uri, version, self._options)

    def gone(self, table: DeltaTable, paths: Sequence[str]) -> list[str]:
        """One request for each."""
        return missing(absolute(table.table_uri), self._options, paths)

    def took(self, table: DeltaTable, app: str, version: int) -> None:
        """Nothing to keep: the table is asked."""

    def delete(self, table: DeltaTable, where: str) -> None:
        """Crash: all of them are gone, or none."""
        table.delete(where)

    def blank(self, table: DeltaTable, blank: Blank) -> int:
        """One file after another, each of them in memory. delta-rs's UPDATE would leave texts of a type that Arrow cannot push a filter to.

        Crash: the old files or the new ones are in the table; new ones that no commit names are invisible, and VACUUM takes them.
        """
        adds: list[Add] = []
        removes: list[RemoveAction] = []
        total, now = 0, int(time.time() * 1000)
        writer = FileWriter(table.table_uri, self._options, _schema(table), table.table_uri, indexed=blank.indexed, codec=blank.codec)
        for fragment in tables.dataset(table).get_fragments(filter=blank.needed):
            if not fragment.count_rows(filter=blank.needed):
                continue
            rows, count = blank.apply(fragment.to_table(schema=writer.schema))
            adds += writer.write(rows)
            removes.append(RemoveAction(fragment.path, True, now, None, {}))
            total += count
        if removes:
            # Exact: delta-rs takes a compaction that came between for no conflict, and the rows would be there twice (tried, 1.6.6).
            tables.commit(table, adds, {}, removes=removes, exact=True, note={BLANKED: total})
        return total

    def blanked_at(self, table: DeltaTable) -> dt.datetime | None:
        """From the commits' own notes."""
        times = [entry["timestamp"] for entry in tables.history_of(table, None) if BLANKED in entry]
        return dt.datetime.fromtimestamp(max(times) / 1000, dt.UTC) if times else None

    def compact(self, table: DeltaTable, target_size: int, row_group: int) -> None:
        """Laid out as the files were in the first place: one letter must not cost reading a million bodies. Crash: as Engine says."""
        compaction.compact(table, self._options, target_size, row_group)

    def vacuum(self, table: DeltaTable, *, full: bool, at_once: bool = False) -> None:
        """Crash: some are deleted."""
        table.vacuum(0 if at_once else None, dry_run=False, enforce_retention_duration=not at_once, full=full)

    def deletable(self, table: DeltaTable) -> bool:
        """It lists the folder."""
        with tables.reading(table.table_uri):
            return bool(table.vacuum(dry_run=True, full=True))


def _schema(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


class SparkEngine:
    """The session of this process is used, and started where there is none. Picklable: sessions stay where they are."""

    name = SPARK
    reasons: tuple[str, ...] = ("the store's engine is Spark",)
    skips = True
    tells_files = False
    hidden: frozenset[str] = frozenset({"generatedColumns", "identityColumns", "allowColumnDefaults"})

    def __init__(self) -> None:
        self._took: dict[tuple[str, str], int] = {}

    @classmethod
    def at(cls, path: str) -> SparkEngine:
        """For the state in this folder; on a local disk with a warning."""
        if is_local(path):
            log.warning("%s: on a local disk Delta's Spark writer is safe inside one JVM only; run one process, or leave out engine=", path)
        return cls()

    def __getstate__(self) -> dict[str, Any]:
        return {"_took": {}}

    def side(self) -> Any:
        """Tables as Spark has them."""
        return importlib.import_module("dedup.spark.delta").session_tables()

    def handle(self, uri: str) -> Handle:
        """For the table there."""
        return SparkHandle(uri, self)

    def create(self, uri: str, schema: pa.Schema, name: str, properties: Mapping[str, str], partition_by: Sequence[str] = ()) -> None:
        """The table, where it is not there yet. Crash: it is there or not."""
        self.side().create(uri, schema, [sql_type(f.type) for f in schema], name, properties, partition_by)

    def append(self, table: Any, rows: pa.Table, transactions: Mapping[str, int]) -> None:
        """Against Spark's newest snapshot, unless that has the first of these ids. Crash: as Engine says."""
        (app, version), *_ = transactions.items()
        self.side().append_rows(table.table_uri, rows, f"{app}/{table.metadata().id}", version, transactions)

    def delete(self, table: Any, where: str) -> None:
        """Crash: all of them are gone, or none."""
        side = self.side()
        side.run(f"DELETE FROM {side.sql_name(table.table_uri)} WHERE {where}", f"Rows of {table.table_uri} could not be deleted")

    def blank(self, table: Any, blank: Blank) -> int:
        """Crash: as Engine says."""
        count = int(table.to_table(columns=["seq" if "seq" in table.names() else "number"], filter=blank.needed).num_rows)
        if count:
            side = self.side()
            statement = f"UPDATE {side.sql_name(table.table_uri)} SET {blank.assignments} WHERE {blank.where}"
            side.run(statement, f"Rows of {table.table_uri} could not be written anew")
        return count

    def blanked_at(self, table: Any) -> dt.datetime | None:
        """We update rows for nothing else."""
        times = [c.timestamp for c in self.side().history(table.table_uri) or () if c.operation == "UPDATE"]
        return max(times) if times else None

    def compact(self, table: Any, target_size: int, row_group: int) -> None:
        """Crash: the old files or the new ones are in the table."""
        side = self.side()
        side.run(f"OPTIMIZE {side.sql_name(table.table_uri)}", f"{table.table_uri} could not be compacted")

    def vacuum(self, table: Any, *, full: bool, at_once: bool = False) -> None:
        """Spark deletes nothing at once unless its session switches a check off for all tables. Crash: some are deleted."""
        self.side().vacuum(table.table_uri, "FULL" if full else "LITE")

    def deletable(self, table: Any) -> bool:
        """It lists the folder."""
        return bool(self.side().vacuum(table.table_uri, "FULL DRY RUN"))

    def transactions(self, table: Any) -> tuple[Mapping[str, frozenset[int]], bool]:
        """From the history, where commits of ours repeat their ids."""
        found: dict[str, set[int]] = {}
        commits = list(self.side().history(table.table_uri) or ())
        for commit in commits:
            for app, version in _notes(commit).items():
                found.setdefault(app, set()).add(version)
        return {app: frozenset(versions) for app, versions in found.items()}, bool(commits) and commits[-1].version == 0

    def listed(self, table: Any) -> frozenset[str]:
        """Spark has no public way to tell."""
        return frozenset()

    def as_of(self, table: Any, version: int) -> Any:
        """Spark does not tell which ids an old version shows."""
        return None

    def gone(self, table: Any, paths: Sequence[str]) -> list[str]:
        """Spark has no public way to tell."""
        return []

    def took(self, table: Any, app: str, version: int) -> None:
        """Spark has just written this id, or found it written; it tells the second by silence alone."""
        key = (table.metadata().id, app)
        self._took[key] = max(version, self._took.get(key, version))

    def known(self, table_id: str, app: str) -> int | None:
        """What `took` was told."""
        return self._took.get((table_id, app))


class SparkHandle:
    """One table looked at again and again. Not picklable, not for two threads."""

    def __init__(self, uri: str, engine: SparkEngine) -> None:
        self.uri, self._engine = uri, engine
        self._table: SparkTable | None = None
        self._stamp: tuple[int, Any] | None = None

    def look(self) -> Any:
        """The table as of now, or None where there is none. The same object as before where nothing has changed.

        Raises:
            StoreUnavailable: that cannot be told.
        """
        side = self._engine.side()
        found = side.history(self.uri, 5)
        if not found:
            self.forget()
            return None
        if self._stamp != (stamp := tuple(found[0][:2])):
            self._table, self._stamp = self._read(side, found), stamp
        return self._table

    def forget(self) -> None:
        """Read everything anew next time."""
        self._table = self._stamp = None

    def _read(self, side: Any, found: list[Any]) -> SparkTable:
        old, fresh = self._table, found
        if old is not None and any(c[:2] == self._stamp for c in found):
            fresh = [c for c in found if c.version > old.version()]
            past = Past(_noted(old.past.notes, fresh), (*fresh, *old.past.commits)[:WINDOW], old.past.whole)
            if all(_notes(c) for c in fresh):  # of ours, which change rows and nothing else
                return SparkTable(self.uri, self._engine, old.detail, old.columns, past)
        else:
            found = side.history(self.uri, WINDOW) or found
            past = Past(_noted({}, found), tuple(found), found[-1].version == 0)
        return SparkTable(self.uri, self._engine, side.detail(self.uri), side.schema_json(self.uri), past)


class Past(NamedTuple):
    """What is known of a table's history."""

    notes: dict[str, int]  # app id -> highest version
    commits: tuple[Any, ...]  # newest first
    whole: bool  # whether the notes are those of all commits


def _notes(commit: Any) -> dict[str, int]:
    """The ids that a commit of ours tells of; none for those of others."""
    try:
        return dict(json.loads(commit.note)["dedup"])
    except (TypeError, ValueError, KeyError):
        return {}


def _noted(known: Mapping[str, int], commits: Iterable[Any]) -> dict[str, int]:
    """By app id the highest version that these commits tell of."""
    notes = dict(known)
    for commit in commits:
        for app, version in _notes(commit).items():
            notes[app] = max(version, notes.get(app, version))
    return notes


class SparkTable:
    """One snapshot, with those methods of delta-rs's DeltaTable that the store uses."""

    def __init__(self, uri: str, engine: SparkEngine, detail: Mapping[str, Any], columns: str, past: Past) -> None:
        self.table_uri, self._engine = uri, engine
        self.detail, self.columns, self.past = detail, columns, past
        self._rows: pa.Table | None = None

    def version(self) -> int:
        """Of the snapshot."""
        return int(self.past.commits[0].version)

    def size(self) -> int:
        """Bytes of its files."""
        return int(self.detail["sizeInBytes"] or 0)

    def metadata(self) -> Any:
        """id, configuration, partition_columns."""
        told = self.detail
        return SimpleNamespace(id=told["id"], configuration=told["properties"] or {}, partition_columns=told["partitionColumns"])

    def schema(self) -> Any:
        """Something with `to_json`."""
        return SimpleNamespace(to_json=lambda: self.columns)

    def protocol(self) -> Any:
        """min_writer_version, writer_features."""
        return SimpleNamespace(min_writer_version=self.detail["minWriterVersion"], writer_features=self.detail["tableFeatures"])

    def transaction_version(self, app: str) -> int | None:
        """The highest version of that id, as the history and this process know."""
        if app not in self.past.notes and not self.past.whole:
            found = self._engine.side().history(self.table_uri) or ()
            self.past = self.past._replace(notes=_noted(self.past.notes, found), whole=True)
        told = [v for v in (self.past.notes.get(app), self._engine.known(self.detail["id"], app)) if v is not None]
        return max(told, default=None)

    def history(self, limit: int) -> list[dict[str, Any]]:
        """The newest commits: `operation`."""
        known = self.past.commits
        found = known[:limit] if len(known) >= limit else self._engine.side().history(self.table_uri, limit) or ()
        return [{"operation": c.operation} for c in found]

    def update_incremental(self) -> None:
        """Become the snapshot of now."""
        if (now := SparkHandle(self.table_uri, self._engine).look()) is not None:
            self.__dict__ = now.__dict__

    def to_pyarrow_dataset(self, **_: Any) -> SparkTable:
        """Something with `to_table`."""
        return self

    def to_table(self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None) -> pa.Table:
        """Rows. Large columns are read for those rows only that the filter, which must not ask for them, has chosen."""
        names = self.names() if columns is None else list(columns)
        rows = self._light() if filter is None else self._light().filter(filter)
        if not tables.BLOBS & set(names):
            return rows.select(names)
        whole = self._engine.side().read(self.table_uri, self.version(), self.names(), _among(rows))
        return (whole if filter is None else whole.filter(filter)).select(names)

    def names(self) -> list[str]:
        """Of the columns."""
        return [f["name"] for f in json.loads(self.columns)["fields"]]

    def _light(self) -> pa.Table:
        if self._rows is not None:
            return self._rows
        rows = self._engine.side().read(self.table_uri, self.version(), [n for n in self.names() if n not in tables.BLOBS])
        if rows.nbytes <= KEPT_BYTES:
            self._rows = rows
        return rows


def _among(rows: pa.Table) -> str:
    """What finds at least these rows."""
    found = Ranges.of_numbers(rows["seq"].drop_null().to_numpy())
    if not found:
        return "false"
    ranges = f"({' OR '.join(f'seq BETWEEN {first} AND {last}' for first, last in found.at_most(_RANGES).items)})"
    if rows.num_rows > _MANY or "id" not in rows.column_names:
        return ranges
    ids = ", ".join("'" + i.replace("\\", "\\\\").replace("'", "\\'") + "'" for i in rows["id"].drop_null().unique().to_pylist())
    return f"{ranges} AND id IN ({ids})" if ids else ranges


def spark_side() -> Any | None:
    """That of the session which this process has, if any."""
    # Importing Spark in order to find out would cost seconds, and fail where it is not installed.
    return importlib.import_module("dedup.spark.delta").active() if "pyspark" in sys.modules else None
