"""The ledger table of one consumer: what is in it, how it is read, and the one commit that decides.

Sections, so that old days of one can be dropped by metadata alone: `log` (headers, batch records, summaries of seen positions), `keys`
(reservations), `held` (reservations of keys that a dead letter holds, and which keys were freed), `order` (blocked sequences). The header
is one JSON document per decision: it is the decision. Batch records are documents beside it.

Promises that a header of a state version that this library does not know how to go on with is refused, and that a header read back equals
the one written. Called by the consumer state.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable

from checkpoint.errors import CommitConflict, ConfigError, SchemaOutdated, StateTooNew, StoreUnavailable
from checkpoint.head import Checkpoint, Head, Holder
from checkpoint.position import Partition
from deadletter import policy
from dedup.core.steps import Merge
from dedup.delta import objects, tables
from dedup.delta.engine import MINE, Engine
from dedup.delta.features import is_on
from dedup.delta.files import Add, FileWriter
from dedup.delta.ledger_files import DecisionSpan, dated, reading_file, rows_of
from dedup.delta.objects import AT_ONCE
from dedup.delta.storage import DELTA_RS, StorageOptions, by_objects, filesystem
from dedup.delta.tables import version_of

LOG, KEYS, HELD, ORDER = "log", "keys", "held", "order"
HEADER, BATCH, SUMMARY, STRETCH, RESERVATION, FREED = "header", "batch", "summary", "stretch", "reservation", "freed"

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

LOG_COLUMNS = ("kind", "source", "topic", "partition", "doc")
"""Of the section `log`, beside `seq`."""

LogRow = tuple[str, str | None, str | None, int | None, str]
"""kind, source, topic, partition, doc"""

WHOLE_BYTES = 16 * 1024 * 1024
"""Files on object storage up to which they are read by one request; of larger ones, ranges."""

STATE_VERSION = 5
"""Version of everything this package keeps: ledger columns, headers, dead letter events."""

OLDEST_STATE = 4
"""This library works on what versions from this one on have written."""

COMPATIBLE_WITH = 5
"""Libraries that know this version work on what this one writes. A version that only adds names to the header's document leaves it: an
older library carries them on from decision to decision (`Header.later`). Whatever else changes raises it: it stops them (StateTooNew)."""

_PLAIN_OF_HEADER = (
    *("kind", "attempt", "after", "follows", "generation_since", "keyspace_since", "summary", "purged_before", "purged_on"),
    *("reserved", "freed", "by", "reason"),
)

_PLAIN = ("consumer", "seq", "epoch", "generation", "keyspace", "query_id", "batch_id", "gap_accepted")

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

DELETE, DELETED = "delete", "deleted"
"""Kinds of decisions: the consumer is being deleted, and only `DELETED` may follow; it is gone, and whoever takes the epoch begins anew."""

LETTERS_SINK = "dedup.dead_letters"
"""Name under which headers list the table of dead letter events."""

OUTBOX_SINK = "dedup.outbox"
"""Name under which headers list the table of messages."""


class LedgerFile(NamedTuple):
    """One data file of the current snapshot."""

    path: str
    section: str
    day: dt.date
    first: int  # lowest and highest seq in it
    last: int
    rows: int
    size: int = 0  # bytes, where files are read one by one


class Ledger:
    """The table, and nothing about what its rows mean."""

    def __init__(self, uri: str, options: StorageOptions, consumer: str, engine: Engine) -> None:
        self.uri, self.consumer = uri, consumer
        self._options, self._engine = options, engine
        self._handle = engine.handle(uri)
        self._written: dict[str, pa.Table] = {}  # files of the running decision, which need no reading

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
        except tables.FAILED as error:  # Spark's engine raises where another creator wins
            if (table := self.open()) is None:
                raise StoreUnavailable(f"The ledger {self.uri} cannot be created: {error}") from error
            return table
        table = self.open()
        if table is None:
            raise StoreUnavailable(f"The ledger {self.uri} was created, but cannot be found.")
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
        if is_on(settings, "delta.enableDeletionVectors"):
            raise ConfigError(
                f"Deletion vectors are on for the ledger {self.uri}. Run ALTER TABLE delta.`{self.uri}` "
                "SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'false'), then REORG TABLE ... APPLY (PURGE)."
            )

    def files(self, table: DeltaTable, after: int = 0) -> list[LedgerFile]:
        """The data files of a snapshot, in order of their first seq; all with a seq > `after`, perhaps others. Raises StoreUnavailable."""
        if after and (put := put_by_us(table)) and after >= put[0].first - 1:
            return put  # what lies before is known: the log needs no reading
        with tables.reading(self.uri):
            actions = pa.table(table.get_add_actions(flatten=True))
        if not actions.num_rows:
            return []
        names = ("path", "partition.section", "partition.day", "min.seq", "max.seq", "num_records", "size_bytes")
        rows = zip(*(actions[n].to_pylist() for n in names), strict=True)
        return sorted((LedgerFile(*row) for row in rows), key=lambda f: (f.first, f.last))

    def files_now(self) -> list[LedgerFile]:
        """Those of the current snapshot; none where there is no ledger. Raises as `open`."""
        table = self.open()
        return [] if table is None else self.files(table)

    def read(self, files: Sequence[LedgerFile], columns: Sequence[str], after: int, until: int | None = None) -> pa.Table:
        """Rows with seq > `after` of these files. `seq` is always among the columns.

        Args:
            columns: of FILE_SCHEMA, and `day`.
            until: rows with a higher seq are left out; None: none are.

        Raises:
            StoreUnavailable: a file is not there, or the storage does not answer. StoreError: a file is damaged.
        """
        names = ["seq", *(c for c in columns if c not in ("seq", "day"))]
        schema = pa.schema([SCHEMA.field(n) for n in [*names, *(["day"] if "day" in columns else [])]])
        if not files:
            return schema.empty_table()
        span, contents = DecisionSpan(after, until), self._contents([f for f in files if f.path not in self._written])
        table = pa.concat_tables([dated(self._rows_of(f.path, contents, names, span).select(names), schema, f.day) for f in files])
        return table if all(span.has_all(f.first, f.last) for f in files) else span.of(table)

    def _contents(self, files: Sequence[LedgerFile]) -> Iterator[Any]:
        """Something to read Parquet from, for each of these files: small ones whole and several at once where each read is a request."""
        system, whole = filesystem(self.uri, self._options), by_objects(self.uri, self._options)
        for number in range(0, len(files), AT_ONCE):
            some = files[number : number + AT_ONCE]
            small = [f.path for f in some if whole and f.size <= WHOLE_BYTES]
            got = dict(zip(small, objects.gets(self.uri, self._options, small), strict=True))
            for file in some:
                if (content := got.pop(file.path, None)) is not None:
                    yield pa.BufferReader(content)
                    continue
                with system.open_input_file(file.path) as opened:
                    yield opened

    def _rows_of(self, path: str, contents: Iterator[Any], names: list[str], span: DecisionSpan) -> pa.Table:
        if path in self._written:
            return self._written[path]
        with reading_file(path, self.uri, self.consumer):
            return rows_of(next(contents), names, span)

    def write_all(self, day: dt.date, sections: Sequence[tuple[str, pa.Table]]) -> list[Add]:
        """`write` for each of these sections; at once where each file is a request.

        Crash: as `write`.
        """
        if not by_objects(self.uri, self._options):
            return [add for section, rows in sections for add in self.write(section, day, rows)]
        written = objects.at_once(lambda one: self.write(one[0], day, one[1]), sections)
        return [add for adds in written for add in adds]

    def write(self, section: str, day: dt.date, rows: pa.Table) -> list[Add]:
        """Write rows (any subset of the columns) as one file that no commit names yet; none for no rows.

        Crash: the file stays invisible, and a full VACUUM removes it.
        """
        if not rows.num_rows:
            return []
        codec = {"compression": "zstd"} if section in (LOG, ORDER) else {"compression": "none", "use_dictionary": ["kind", "seq"]}
        writer = FileWriter(self.uri, self._options, FILE_SCHEMA, self.uri, indexed=1, codec=codec)
        adds = [add._replace(partition_values={"section": section, "day": day.isoformat()}) for add in writer.write(rows)]
        if section != LOG or by_objects(self.uri, self._options):
            self._written |= {add.path: rows for add in adds}
        return adds

    def forget_written(self) -> None:
        """Let go of the rows of the last decision."""
        self._written = {}

    def commit(self, table: DeltaTable, adds: Sequence[Add], transactions: Mapping[str, int]) -> None:
        """Make what was written true, against the very snapshot that `table` is.

        Args:
            transactions: `app` -> version (tables.py); the first one is that of the decision.

        Raises:
            What `tables.FAILED` names; the outcome has to be read back.

        Crash: all of it is in the table, or nothing.
        """
        tables.commit(table, adds, transactions, exact=True)

    def count_reservations(self, before: dt.date) -> int:
        """How many `drop_reservations` would remove."""
        return sum(f.rows for f in self.files_now() if f.section == KEYS and f.day < before)

    def reserved_since(self) -> dt.date | None:
        """The first day of the section `keys`."""
        return min((f.day for f in self.files_now() if f.section == KEYS), default=None)

    def drop_reservations(self, before: dt.date) -> None:
        """Remove whole days of the section `keys`, by metadata alone.

        Raises CommitConflict where others commit all the time, StoreUnavailable.

        Crash: they are there, or all gone.
        """
        table = self.open()
        if table is None:
            return
        try:
            self._engine.delete(table, f"section = '{KEYS}' and day < '{before.isoformat()}'")
        except tables.FAILED as error:
            kind = CommitConflict if tables.lost_race(error) else StoreUnavailable
            raise kind(f"Old reservations of {self.uri} could not be dropped: {error}. The next purge drops them.") from error
        finally:
            self.forget()

    def app(self, table: DeltaTable, generation: int) -> str:
        """The application id whose transaction version is the last seq of a generation."""
        return f"{self.consumer}/{table.metadata().id}/{generation}"


def put_by_us(table: DeltaTable) -> list[LedgerFile]:
    """The files of commits that this process has put, and that delta-rs has not read; in order of their first seq."""
    found = (_file_of(add) for own in getattr(table, "ahead", ()) for add in own.adds)
    return sorted(found, key=lambda f: (f.first, f.last))


def _file_of(add: Add) -> LedgerFile:
    stats, values = json.loads(add.stats), add.partition_values
    first, last = stats["minValues"]["seq"], stats["maxValues"]["seq"]
    return LedgerFile(add.path, str(values["section"]), dt.date.fromisoformat(str(values["day"])), first, last, add.rows, add.size)


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


@dataclass(frozen=True)
class SinkFiles:
    """What one decision adds to one sink."""

    name: str  # as the handler calls it
    uri: str
    table_id: str  # of the table that the rows were checked against
    mode: str  # "files": the adds are files of the sink; "rows": staged files below the store, which Spark appends
    fingerprint: str  # of the sink's schema then
    adds: tuple[Add, ...]
    version: int | None = None  # of the sink's table when it was first looked at; None in headers of the time before this was kept
    merge: Merge | None = None  # staged files, and how they are merged; None: they are appended
    part: int = 0  # one decision may write several times to a sink: 0, 1, ... in the order of the calls
    parts: int = 1

    @property
    def rows(self) -> int:
        """How many rows."""
        return sum(add.rows for add in self.adds)

    @property
    def is_last(self) -> bool:
        """Whether it is the last write of its decision to its sink."""
        return self.part == self.parts - 1

    @property
    def staged(self) -> bool:
        """Whether the files lie below the store's folder."""
        return self.mode == "rows" or self.merge is not None


@dataclass(frozen=True)
class Mark:
    """How far one sink shows the ledger, as of the last publication."""

    seq: int  # of that publication
    table_id: str
    version: int  # of the sink's table: a RESTORE since then may have taken rows back (restores.py)
    uri: str = ""
    generation: int = 0  # of that publication
    shown: int | None = None  # transaction version that the sink showed after it; None: none that counts
    accepted: int = 0  # seq at which a person accepted another table under this name; decisions up to it may go there


@dataclass(frozen=True)
class Header:
    """One decision: the head it leads to, and what belongs to it alone."""

    kind: str  # "epoch", "join", "leave", "claim", "batch", "letters", "amend", "accept-sink", "purge", "delete", "deleted"
    attempt: str  # tells whose commit this is when the answer was lost
    head: Head
    committed_at: dt.datetime
    after: int = 0  # seq of the decision that this one was planned on
    follows: str = ""  # its attempt: a header that follows another one belongs to another history
    holder: Holder | None = None  # of the epoch
    held_since: dt.datetime | None = None  # when the epoch was taken
    members: tuple[Holder, ...] | None = None  # the processes that share the epoch; None: `holder` has it alone
    claims: Mapping[Partition, int] = field(default_factory=dict)  # partitions that were claimed: the number of the last claim
    generation_since: int = 0  # seq of the decision that began the generation; damage before it was accepted
    keyspace_since: int = 0  # seq of the decision that began the keyspace; reservations and batch records above it count
    summary: int = 0  # seq of the newest summary of seen positions at or before this one, 0 for none
    order_since: int = 0  # seq of the newest decision that has all sequences blocked then in `order`, 0 for none
    sinks: tuple[SinkFiles, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)
    pending: tuple[int, ...] = ()  # earlier seqs that were not known to be published when this was decided
    dropped: tuple[tuple[int, str], ...] = ()  # (seq, sink) that a person gave up
    purged_before: str | None = None  # ISO date: reservations decided on earlier days are gone
    purged_on: str | None = None  # ISO date: when that was decided
    purged_in: int = 0  # seq of that decision: what was reserved later counts, whatever its day; 0 in headers of the time before this
    reserved: int = 0  # reservation rows of this decision
    freed: int = 0  # keys that it freed
    by: str = ""
    reason: str = ""
    later: Mapping[str, Any] = field(default_factory=dict)  # what a newer library has added, as it stands in the document

    @property
    def seq(self) -> int:
        """Number of the decision."""
        return self.head.seq

    @property
    def version(self) -> int:
        """The transaction version by which a table shows this decision."""
        return version_of(self.seq, self.attempt)

    def to_json(self) -> str:
        """The document."""
        return json.dumps(_encode(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """The inverse of `to_json`. Raises StateTooNew, SchemaOutdated."""
        value = json.loads(text)
        _require_version(value["v"], value.get("compatible_with", value["v"]), value["head"]["consumer"])
        return _decode(value)

    def following(self, kind: str, attempt: str, now: dt.datetime, **changes: Any) -> Header:
        """The header after this one: everything that lasts stays, what belongs to one decision alone is cleared."""
        alone: dict[str, Any] = {"sinks": (), "reserved": 0, "freed": 0, "by": "", "reason": ""}
        told = {"kind": kind, "attempt": attempt, "committed_at": now, "follows": self.attempt}
        return replace(self, **(alone | told | changes))


def _require_version(version: int, compatible_with: int, consumer: str) -> None:
    told = f"The ledger of consumer {consumer!r} was written with state version {version}; this library knows {STATE_VERSION}."
    if compatible_with > STATE_VERSION:
        raise StateTooNew(f"{told} Upgrade this installation of dedup.")
    if version < OLDEST_STATE:
        raise SchemaOutdated(
            f"{told} The versions are incompatible, and there is no conversion. "
            "Use a new store folder and a new consumer, or the older version of dedup that wrote it."
        )


def first_header(consumer: str) -> Header:
    """What stands before the first decision."""
    return Header("", "", Head(consumer), dt.datetime.fromtimestamp(0, dt.UTC))


def _encode(h: Header) -> dict[str, Any]:
    return {
        **h.later,
        "v": STATE_VERSION,
        "compatible_with": COMPATIBLE_WITH,
        "kind": h.kind,
        "attempt": h.attempt,
        "after": h.after,
        "follows": h.follows,
        "head": _encode_head(h.head),
        "committed_at": _micros(h.committed_at),
        "holder": None if h.holder is None else vars(h.holder),
        "held_since": _micros(h.held_since),
        "members": None if h.members is None else [vars(m) for m in h.members],
        "claims": [[*p, number] for p, number in h.claims.items()],
        "generation_since": h.generation_since,
        "keyspace_since": h.keyspace_since,
        "summary": h.summary,
        "order_since": h.order_since,
        "sinks": [{**vars(s), "adds": [a._asdict() for a in s.adds], "merge": s.merge and vars(s.merge)} for s in h.sinks],
        "marks": {name: vars(mark) for name, mark in h.marks.items()},
        "pending": h.pending,
        "dropped": h.dropped,
        "purged_before": h.purged_before,
        "purged_on": h.purged_on,
        "purged_in": h.purged_in,
        "reserved": h.reserved,
        "freed": h.freed,
        "by": h.by,
        "reason": h.reason,
    }


def _decode(value: dict[str, Any]) -> Header:
    plain = {name: value[name] for name in _PLAIN_OF_HEADER}
    committed_at = _moment(value["committed_at"])
    assert committed_at is not None
    return Header(
        **plain,
        head=_decode_head(value["head"]),
        committed_at=committed_at,
        holder=Holder(**value["holder"]) if value["holder"] else None,
        held_since=_moment(value["held_since"]),
        members=None if value["members"] is None else tuple(Holder(**m) for m in value["members"]),
        claims={Partition(s, t, p): number for s, t, p, number in value["claims"]},
        sinks=tuple(map(_decode_sink, value["sinks"])),
        marks={name: Mark(**mark) for name, mark in value["marks"].items()},
        pending=tuple(value["pending"]),
        purged_in=value.get("purged_in", 0),
        order_since=value.get("order_since", 0),
        dropped=tuple((int(seq), name) for seq, name in value["dropped"]),
        later={name: told for name, told in value.items() if name not in _NAMES},
    )


def _decode_sink(value: dict[str, Any]) -> SinkFiles:
    merge = value["merge"]
    how = Merge(**{**merge, "keys": tuple(merge["keys"])}) if merge else None
    return SinkFiles(**{**value, "adds": tuple(Add(**a) for a in value["adds"]), "merge": how})


def _encode_head(head: Head) -> dict[str, Any]:
    return {
        **{name: getattr(head, name) for name in _PLAIN},
        "batch_ended": head.batch_ended,
        "spent": policy.to_json(head.spent),
        "settings": None if head.settings is None else dict(head.settings),
        "floors": [[*p, floor] for p, floor in head.floors.items()],
        "passed": [[*p, number] for p, number in head.passed.items()],
        "checkpoints": [
            [*p, c.sequence_number, c.offset, _micros(c.enqueued_time), c.query_id, c.log_time] for p, c in head.checkpoints.items()
        ],
        "incarnations": [[*topic, life] for topic, life in head.incarnations.items()],
        "incarnation_ids": [[*topic, told] for topic, told in head.incarnation_ids.items()],
    }


def _decode_head(value: dict[str, Any]) -> Head:
    return Head(
        **{name: value[name] for name in _PLAIN},
        batch_ended=value["batch_ended"],
        spent=policy.from_json(value["spent"]),
        settings=value["settings"],
        floors={Partition(s, t, p): floor for s, t, p, floor in value["floors"]},
        passed={Partition(s, t, p): number for s, t, p, number in value["passed"]},
        checkpoints={
            Partition(s, t, p): Checkpoint(n, offset, _moment(at), query_id, log_time)
            for s, t, p, n, offset, at, query_id, log_time in value["checkpoints"]
        },
        incarnations={(s, t): life for s, t, life in value["incarnations"]},
        incarnation_ids={(s, t): told for s, t, told in value["incarnation_ids"]},
    )


def _micros(moment: dt.datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // dt.timedelta(microseconds=1)


def _moment(micros: int | None) -> dt.datetime | None:
    return None if micros is None else _EPOCH + dt.timedelta(microseconds=micros)


_NAMES = frozenset(_encode(first_header("")))
"""Of the header's document, as this version knows it."""
