"""Who reads and commits Delta tables: delta-rs, or Spark where only Spark gets to the storage.

Promises that everything above asks the same of both. A table is looked at as a snapshot with the methods of delta-rs's DeltaTable that are
used here: version, metadata, schema, protocol, history, transaction_version. Called by the store's parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
from deltalake import DeltaTable, WriterProperties

from checkpoint.errors import ConfigError
from dedup.delta import tables
from dedup.delta.files import FileWriter
from dedup.delta.names import spark_side
from dedup.delta.storage import DELTA_RS, Options, absolute, missing

MINE = "dedup.engine"
"""Property of a ledger that is committed to by Spark. Only one engine may: each one's compare-and-swap does not see the other's."""


class Handle(Protocol):
    """One table looked at again and again. Not picklable, not for two threads."""

    def look(self) -> DeltaTable | None:
        """The table as of now, or None where there is none. Raises StoreUnavailable where that cannot be told."""

    def forget(self) -> None:
        """Read everything anew next time."""


class Engine(Protocol):
    """What the store asks of whoever commits. Picklable."""

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

    def compact(self, table: DeltaTable, target_size: int, row_group: int) -> None:
        """Few large files for many small ones. Crash: the old ones or the new ones are in the table."""

    def vacuum(self, table: DeltaTable, *, full: bool) -> None:
        """Delete files that left the table, or with `full` never came into it. Crash: some are deleted."""


class DeltaRs:
    """Commits by delta-rs, with credentials that it gets from the same options as the files."""

    name = DELTA_RS
    reasons: tuple[str, ...] = ()
    skips = False
    hidden: frozenset[str] = frozenset()

    def __init__(self, options: Options) -> None:
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
        """The table, where it is not there yet. Crash: it is there or not."""
        DeltaTable.create(
            uri,
            schema,
            mode="ignore",
            name=name[:250],
            partition_by=list(partition_by),
            configuration=dict(properties),
            storage_options=dict(self._options) if self._options else None,
        )

    def append(self, table: DeltaTable, rows: pa.Table, transactions: Mapping[str, int]) -> None:
        """Against the very snapshot that `table` is. Crash: the rows are there, with the ids, or nothing is."""
        adds = FileWriter(table.table_uri, self._options, rows.schema, table.table_uri).write(rows)
        tables.commit(table, adds, transactions, exact=True)

    def transactions(self, table: DeltaTable) -> tuple[Mapping[str, frozenset[int]], bool]:
        """Read from the log itself, which delta-rs does not show."""
        return tables.transactions_in_log(table, self._options)

    def listed(self, table: DeltaTable) -> frozenset[str]:
        """From the snapshot."""
        with tables.reading(table.table_uri):
            return frozenset(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())

    def as_of(self, table: DeltaTable, version: int) -> DeltaTable | None:
        """Opened anew."""
        return tables.open_version(table.table_uri, version, self._options)

    def gone(self, table: DeltaTable, paths: Sequence[str]) -> list[str]:
        """One request for each."""
        return missing(absolute(table.table_uri), self._options, paths) if paths else []

    def took(self, table: DeltaTable, app: str, version: int) -> None:
        """Nothing to keep: the table is asked."""

    def delete(self, table: DeltaTable, where: str) -> None:
        """Crash: all of them are gone, or none."""
        table.delete(where)

    def compact(self, table: DeltaTable, target_size: int, row_group: int) -> None:
        """Laid out as the files were in the first place: one letter must not cost reading a million bodies. Crash: as Engine says."""
        layout = WriterProperties(max_row_group_size=row_group, compression="SNAPPY")
        table.optimize.compact(target_size=target_size, writer_properties=layout)

    def vacuum(self, table: DeltaTable, *, full: bool) -> None:
        """Crash: some are deleted."""
        table.vacuum(dry_run=False, full=full)
