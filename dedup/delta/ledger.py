"""The ledger table of one consumer: what is in it, how it is read, and the one commit that decides.

Sections, so that old days of one can be dropped by metadata alone: `log` (headers, batch records, summaries of seen positions), `keys`
(reservations), `held` (reservations of keys that a dead letter holds, and which keys were freed), `order` (blocked sequences).
Called by the consumer state.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable

from checkpoint.errors import ConfigError, StoreUnavailable
from dedup.delta import tables
from dedup.delta.engine import MINE, Engine
from dedup.delta.files import Add, FileWriter
from dedup.delta.storage import DELTA_RS, Options, filesystem

LOG, KEYS, HELD, ORDER = "log", "keys", "held", "order"
HEADER, BATCH, SUMMARY, RESERVATION, FREED = "header", "batch", "summary", "reservation", "freed"

SCHEMA = pa.schema(
    [
        pa.field("section", pa.string()),
        pa.field("day", pa.date32()),  # UTC day of the decision
        pa.field("seq", pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("payload_hash", pa.int64()),
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("doc", pa.string()),  # JSON: the header, the rest of the batch record, or seen ranges
    ]
)

FILE_SCHEMA = pa.schema([f for f in SCHEMA if f.name not in ("section", "day")])
"""What is in a data file: the partition columns are in the log."""

PROPERTIES = {
    "delta.enableDeletionVectors": "false",  # files are read whole
    "delta.checkpointInterval": "50",
    "delta.dataSkippingNumIndexedCols": "4",
    "delta.logRetentionDuration": "interval 7 days",
}

FORBIDDEN = "delta.setTransactionRetentionDuration"
"""Would forget who decided last; Delta drops the transaction ids that everything here rests on."""


LogRow = tuple[str, str | None, str | None, int | None, str]
"""kind, source, topic, partition, doc"""


class LedgerFile(NamedTuple):
    """One data file of the current snapshot."""

    path: str
    section: str
    day: dt.date
    first: int  # lowest and highest seq in it
    last: int
    rows: int


class Ledger:
    """The table, and nothing about what its rows mean."""

    def __init__(self, uri: str, options: Options, consumer: str, engine: Engine) -> None:
        self.uri, self.consumer = uri, consumer
        self._options, self._engine = options, engine
        self._handle = engine.handle(uri)
        self._written: dict[str, pa.Table] = {}  # reservation files of the running decision, which need no reading

    def open(self) -> DeltaTable | None:
        """The current snapshot; None where the consumer has none yet.

        Raises:
            ConfigError: somebody set a property that the protocol cannot live with.
            StoreUnavailable: it cannot be read.
        """
        table = self._handle.look()
        if table is not None:
            self._check_properties(table)
        return table

    def forget(self) -> None:
        """Read everything anew at the next `open`."""
        self._handle.forget()

    def create(self) -> DeltaTable:
        """The table, created if it is not there; of two creators one wins, both get the same table.

        Crash: the table exists and is empty, or does not exist.
        """
        try:
            self._engine.create(self.uri, SCHEMA, f"dedup ledger of {self.consumer}", self._properties(), ("section", "day"))
        except tables.FAILED as error:
            if (table := self.open()) is None:
                raise StoreUnavailable(f"The ledger {self.uri} cannot be created: {error}") from error
            return table
        table = self.open()
        if table is None:
            raise StoreUnavailable(f"The ledger {self.uri} was created and is not there.")
        return table

    def _properties(self) -> dict[str, str]:
        return PROPERTIES if self._engine.name == DELTA_RS else {**PROPERTIES, MINE: self._engine.name}

    def _check_properties(self, table: DeltaTable) -> None:
        settings = table.metadata().configuration
        if (theirs := settings.get(MINE, DELTA_RS)) != self._engine.name:
            raise ConfigError(
                f"The ledger {self.uri} is written with engine={theirs!r}, this store has engine={self._engine.name!r}: neither would see "
                f"the other's decisions. Open it with DeltaStore(..., engine={theirs!r})."
            )
        if FORBIDDEN in settings:
            raise ConfigError(
                f"{FORBIDDEN} is set on the ledger {self.uri}: Delta would forget which decisions were made. "
                f"Run ALTER TABLE delta.`{self.uri}` UNSET TBLPROPERTIES ('{FORBIDDEN}')."
            )
        if settings.get("delta.enableDeletionVectors") == "true":
            raise ConfigError(
                f"Deletion vectors are on for the ledger {self.uri}. Run ALTER TABLE delta.`{self.uri}` "
                "SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'false'), then REORG TABLE ... APPLY (PURGE)."
            )

    def files(self, table: DeltaTable, after: int = 0) -> list[LedgerFile]:
        """The data files of a snapshot, in order of their first seq; all that hold a seq > `after`, and perhaps others."""
        actions = pa.table(table.get_add_actions(flatten=True))
        if not actions.num_rows:
            return []
        names = ("path", "partition.section", "partition.day", "min.seq", "max.seq", "num_records")
        rows = zip(*(actions[n].to_pylist() for n in names), strict=True)
        return sorted((LedgerFile(*row) for row in rows), key=lambda f: (f.first, f.last))

    def read(self, files: Sequence[LedgerFile], columns: Sequence[str], after: int) -> pa.Table:
        """Rows with seq > `after` of these files. `seq` is always among the columns. Raises StoreUnavailable."""
        names = ["seq", *(c for c in columns if c != "seq")]
        schema = pa.schema([SCHEMA.field(n) for n in names])
        if not files:
            return schema.empty_table()
        system = filesystem(self.uri, self._options)
        try:
            found = [self._rows_of(system, f.path, names).select(names).cast(schema) for f in files]
        except OSError as error:
            raise StoreUnavailable(f"A file of the ledger {self.uri} cannot be read: {error}") from error
        table = pa.concat_tables(found)
        return table if all(f.first > after for f in files) else table.filter(pc.greater(table["seq"], after))

    def _rows_of(self, system: pafs.FileSystem, path: str, names: list[str]) -> pa.Table:
        if path in self._written:
            return self._written[path]
        with system.open_input_file(path) as file:
            return pq.ParquetFile(file).read(columns=names)

    def write(self, section: str, day: dt.date, rows: pa.Table) -> list[Add]:
        """Write rows (any subset of the columns) as one invisible file; none for no rows."""
        if not rows.num_rows:
            return []
        codec = {"compression": "zstd"} if section in (LOG, ORDER) else {"compression": "none", "use_dictionary": ["kind", "seq"]}
        writer = FileWriter(self.uri, self._options, FILE_SCHEMA, self.uri, indexed=1, codec=codec)
        adds = [add._replace(partition_values={"section": section, "day": day.isoformat()}) for add in writer.write(rows)]
        if section != LOG:
            self._written |= {add.path: rows for add in adds}
        return adds

    def forget_written(self) -> None:
        """Let go of the rows of the last decision."""
        self._written = {}

    def commit(self, table: DeltaTable, adds: Sequence[Add], transactions: Mapping[str, int]) -> None:
        """Make what was written true, against the very snapshot that `table` is.

        Args:
            transactions: `app` -> version (lineage.py); the first one is that of the decision.

        Raises:
            What `tables.FAILED` names; the outcome has to be read back.

        Crash: all of it is in the table, or nothing.
        """
        tables.commit(table, adds, transactions, exact=True)

    def drop_reservations(self, before: dt.date) -> None:
        """Remove whole days of the section `keys`, by metadata alone. Crash: they are there, or all gone."""
        table = self.open()
        if table is None:
            return
        try:
            self._engine.delete(table, f"section = '{KEYS}' and day < '{before.isoformat()}'")
        except tables.FAILED as error:
            raise StoreUnavailable(f"Old reservations of {self.uri} could not be dropped: {error}") from error
        finally:
            self.forget()

    def app(self, table: DeltaTable, generation: int) -> str:
        """The application id whose transaction version is the last seq of a generation."""
        return f"{self.consumer}/{table.metadata().id}/{generation}"


def reservations(seq: int, keys: pa.Array, payload: pa.Array) -> pa.Table:
    """Rows of the sections `keys` and `held`."""
    count = len(keys)
    return pa.table(
        {
            "seq": pa.repeat(pa.scalar(seq, pa.int64()), count),
            "kind": pa.repeat(RESERVATION, count),
            "key": keys.cast(pa.binary()),
            "payload_hash": payload,
        }
    )


def freed_rows(seq: int, keys: pa.ChunkedArray) -> pa.Table:
    """Rows of the section `held` that say: reservations of these keys by earlier decisions count no more.

    In `held`, which no purge drops: a freed key must not come back.
    """
    rows = reservations(seq, keys, pa.nulls(len(keys), pa.int64()))
    return rows.set_column(rows.schema.get_field_index("kind"), "kind", pa.repeat(FREED, len(keys)))


def log_rows(seq: int, rows: Iterable[LogRow]) -> pa.Table:
    """Rows of the section `log`."""
    names = ("kind", "source", "topic", "partition", "doc")
    columns = list(zip(*rows, strict=True))
    data = {n: pa.array(c, SCHEMA.field(n).type) for n, c in zip(names, columns, strict=True)}
    return pa.table({"seq": pa.repeat(pa.scalar(seq, pa.int64()), len(columns[0])), **data})
