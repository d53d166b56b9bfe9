"""One chunk on its way into the ledger: collects what becomes true together, then decides and publishes.

Promises that nothing of it is visible before the ledger commit. Called by the flow, through the store.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import SinkMismatch
from checkpoint.position import Partition, Ranges
from dedup.delta import events, maintain
from dedup.delta.audit import letters as letters_now
from dedup.delta.changes import LetterChanges
from dedup.delta.decide import Decision, decide
from dedup.delta.files import Add, FileWriter
from dedup.delta.fit import check_schema
from dedup.delta.header import Header, SinkFiles
from dedup.delta.publish import Publisher
from dedup.delta.sink import Sink, require_same
from dedup.delta.state import ConsumerState
from dedup.delta.storage import Options, join, safe_name
from dedup.steps import Advance, Change, Commit, Free, Merge, Note, Park, Record, Step
from dedup.store import KEYS, Head, Rows


@dataclass(frozen=True)
class Context:
    """What a transaction needs of its store."""

    root: str
    options: Options
    resolve: Callable[[str], str]  # sink name -> absolute URI
    letters: str  # URI of the consumer's table of dead letter events
    spark: Callable[[], Any]
    on_step: Callable[[str], None]
    committed: Callable[[], None]  # called once a batch of the stream is decided


@dataclass
class _Collected:
    """What becomes true with the commit."""

    sinks: dict[str, SinkFiles] = field(default_factory=dict)
    freed: pa.Table = field(default_factory=KEYS.empty_table)
    batches: pa.Table | None = None
    head: dict[str, Any] = field(default_factory=dict)


class DeltaTransaction:
    """The transaction of one chunk. Use it inside `DeltaStore.begin`."""

    def __init__(self, state: ConsumerState, context: Context, kind: str = "batch") -> None:
        self._state, self._context, self._kind = state, context, kind
        self.head: Head = state.header.head
        self._attempt = uuid.uuid4().hex
        self._new = KEYS.empty_table()
        self._collected = _Collected()
        self._publisher = Publisher(state, context.root, context.options, context.spark)
        self._letters = LetterChanges(self.head, lambda: letters_now(state, self._publisher), state.sequences)

    @property
    def connection(self) -> Any:
        """There is none: AttributeError with advice."""
        raise AttributeError("DeltaStore has no tx.connection: Delta has no transaction that a statement could join. Use tx.write.")

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """Positions in [first, last] that batch records of this generation's incarnations hold as seen."""
        return self._state.seen(spans)

    def reserve(self, keys: pa.Table) -> pa.Table:
        """Reserve the new ones of these distinct keys; returns the known ones.

        Crash: before the commit nothing is reserved.
        """
        free = _in(keys["key"], self._collected.freed["key"])
        known, new = self._state.split(keys.filter(pc.invert(free)))
        self._new = pa.concat_tables([self._new, new, keys.filter(free)])
        return known

    def known(self, keys: pa.Table) -> pa.Table:
        """The known ones of these keys, without reserving any."""
        return self._state.split(keys)[0]

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What is written inside vanishes if the block raises: its files are never named by a commit, and VACUUM takes them."""
        before = dict(self._collected.sinks)
        try:
            yield
        except Exception:
            self._collected.sinks = before
            raise

    def write(self, table: str, rows: Rows) -> int:
        """Append rows to a sink with the commit; returns their number.

        Raises:
            SinkMismatch: the sink is missing, or the rows do not fit. No file was committed.
            PublicationStuck: the sink was replaced or restored.
            ConfigError: the name cannot be resolved, or the sink needs Spark and there is none.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        context = self._context
        given = None if rows.in_tasks else rows.arrow()
        context.on_step("check")
        uri = context.resolve(table)
        sink = self._state.sinks.open(table, uri, rows.schema)
        self._require_same(sink)
        columns = check_schema(rows.schema, sink.schema, table, sink.computed)
        if brought := sorted(sink.always & set(columns)):
            raise SinkMismatch(f"{table!r} numbers {', '.join(brought)} itself (GENERATED ALWAYS AS IDENTITY). Leave it out of the rows.")
        spark = context.spark() if sink.special else None
        context.on_step("files")
        writer = self._writer(sink, columns)
        written = map(Add.from_json, rows.files(writer, columns)) if given is None else writer.write(given.select(columns))
        adds = tuple(written)
        if spark is not None and adds:
            self._check_constraints(sink, spark, adds)
        self._add(SinkFiles(table, uri, sink.table_id, sink.mode, sink.fingerprint, adds, sink.table.version()))
        return sum(add.rows for add in adds)

    def _require_same(self, sink: Sink) -> None:
        if mark := self._state.marks.get(sink.name):
            require_same(sink, self.head.consumer, mark.table_id, mark)

    def _writer(self, sink: Sink, columns: list[str]) -> FileWriter:
        context = self._context
        if not sink.special:
            return FileWriter(sink.uri, context.options, sink.schema, sink.name, sink.partition_by, sink.indexed)
        # Staged rows keep only what the handler gave: a missing generated column must stay missing for Spark to compute it.
        schema = pa.schema([f for f in sink.schema if f.name in columns or f.name not in sink.computed])
        prefix = f"staged/{safe_name(self.head.consumer)}/{self._attempt}/"
        return FileWriter(context.root, context.options, schema, sink.name, prefix=prefix, indexed=0)

    def _check_constraints(self, sink: Sink, spark: Any, adds: tuple[Add, ...]) -> None:
        files = [join(self._context.root, add.path) for add in adds]
        for name, count in spark.violations(files, sink.constraints, sink.generated).items():
            raise SinkMismatch(
                f"{count} of {sum(add.rows for add in adds)} rows violate {name} of {sink.name!r}: {sink.constraints[name]}. "
                f"Reject them in the handler, or change the table (ALTER TABLE <{sink.name}> DROP CONSTRAINT ...)."
            )

    def _add(self, entry: SinkFiles) -> None:
        if not entry.adds:
            return
        old = self._collected.sinks.get(entry.name)
        if old and (old.table_id, old.fingerprint) != (entry.table_id, entry.fingerprint):
            raise SinkMismatch(f"The sink {entry.name!r} was changed between two writes of one transaction. Run the batch again.")
        self._collected.sinks[entry.name] = replace(entry, adds=(*old.adds, *entry.adds)) if old else entry

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """LETTERS + duplicates of these letters, in position order. That nobody else changes them is judged by the commit."""
        return self._letters.lock(ids)

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """Which of these distinct sequences are blocked (SEQUENCES). That none is released meanwhile is judged by the commit."""
        return self._state.sequences.blocked(sequences)

    def merge(self, table: str, rows: Rows, merge: Merge) -> int:
        """Not there yet."""
        raise NotImplementedError

    def execute(self, step: Step) -> None:
        """Collect a step; Commit decides and publishes.

        Crash: as `ConsumerState.decide` and `Publisher.publish` say.
        """
        collected = self._collected
        if isinstance(step, Park):
            self._letters.park(step)
        elif isinstance(step, Change):
            self._letters.change(step)
        elif isinstance(step, Free):
            self._free(step.keys)
        elif isinstance(step, Note):
            self._letters.copies.append(step.copies)
        elif isinstance(step, Record):
            collected.batches = step.batches
            collected.head |= _recorded(step) if step.stream else {}
        elif isinstance(step, Advance):
            collected.head["checkpoints"] = {**self.head.checkpoints, **step.checkpoints}
        elif isinstance(step, Commit):
            self._commit(step)
        else:
            raise NotImplementedError

    def _free(self, keys: pa.Table) -> None:
        """Forget reservations: those of earlier decisions, and those of this transaction."""
        asked = pa.table([keys["key"].cast(pa.binary(16)), pa.nulls(keys.num_rows, pa.int64()).fill_null(0)], schema=KEYS)
        there = self._state.split(asked)[0]
        fresh = there.filter(pc.invert(_in(there["key"], self._collected.freed["key"])))
        self._collected.freed = pa.concat_tables([self._collected.freed, fresh])
        self._new = self._new.filter(pc.invert(_in(self._new["key"], asked["key"])))

    def _commit(self, _step: Commit) -> None:
        lasts = self._letters.settle()
        keys, held = self._reservations()
        freed = self._collected.freed
        self._write_events(held)
        header = self._header(len(keys) + len(held), len(freed))
        decide(self._state, Decision(header, self._collected.batches, keys, held, freed, lasts), self._context.on_step)
        if self._kind == "batch":
            self._context.committed()
        self._context.on_step("publish")
        self._publisher.publish(fresh=header.seq)
        self._context.on_step("published")
        maintain.after_decision(header.seq, (self._state.ledger.uri, self._context.letters), self._context.options)

    def _header(self, reserved: int, freed: int) -> Header:
        state, seq = self._state, self.head.seq + 1
        now = dt.datetime.now(dt.UTC)
        header = state.following(self._kind, self._attempt, now, replace(self.head, **self._collected.head))
        summary = seq if state.summary_due(seq) else header.summary
        return replace(header, sinks=tuple(self._collected.sinks.values()), summary=summary, reserved=reserved, freed=freed)

    def _reservations(self) -> tuple[pa.Table, pa.Table]:
        """Newly reserved keys: those that stay with their effect, and those that a letter of this transaction holds."""
        letters = self._letters.keys_held()
        # A letter whose key nobody has reserved yet holds it from now on.
        unreserved = self._state.split(letters.filter(pc.invert(_in(letters["key"], self._new["key"]))))[1]
        again = letters.filter(_in(letters["key"], self._collected.freed["key"]))
        holds = _in(self._new["key"], letters["key"])
        held = pa.concat_tables([self._new.filter(holds), unreserved, again.filter(pc.invert(_in(again["key"], self._new["key"])))])
        return self._new.filter(pc.invert(holds)), held

    def _write_events(self, held: pa.Table) -> None:
        """What becomes of letters, as one file of the consumer's table of dead letter events."""
        rows = self._letters.rows(self.head.seq + 1, lambda copies: self._held_copies(copies, held))
        if not rows.num_rows:
            return
        sink = events.letters_sink(self._state.sinks, self._context.letters, self.head.consumer, self._context.options)
        self._require_same(sink)
        codec = {"compression": "snappy", "row_group_size": events.ROW_GROUP}
        adds = tuple(FileWriter(sink.uri, self._context.options, sink.schema, sink.name, codec=codec).write(rows))
        self._add(SinkFiles(sink.name, sink.uri, sink.table_id, sink.mode, sink.fingerprint, adds, sink.table.version()))

    def _held_copies(self, copies: pa.Table, held: pa.Table) -> pa.Table:
        return copies.filter(pc.or_(pa.array(self._state.held(copies["key"])), _in(copies["key"], held["key"])))


def _recorded(step: Record) -> dict[str, Any]:
    """What a batch of the stream changes in the head."""
    run, budget = step.run, {"decided": step.decided, "failures": step.failures}
    return {"query_id": run.query_id, "batch_id": run.batch_id, "gap_accepted": False, "settings": dict(step.settings), **budget}


def _in(keys: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.is_in(keys.cast(pa.binary()), value_set=among.cast(pa.binary()).combine_chunks())
