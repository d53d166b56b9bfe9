"""One chunk on its way into the ledger: collects what becomes true together, then decides and publishes.

Promises that nothing of it is visible before the ledger commit. Called by the flow, through the store.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import Partition, Ranges
from deadletter.budget import Budget
from dedup.delta import events, maintain
from dedup.delta.audit import letters as letters_now
from dedup.delta.changes import LetterChanges
from dedup.delta.decide import Decision, decide
from dedup.delta.header import Header
from dedup.delta.outbox import MessageWrites
from dedup.delta.publish import Publisher
from dedup.delta.state import ConsumerState
from dedup.delta.writing import Context, SinkWrites
from dedup.outbox.message import Messages
from dedup.steps import Advance, Change, Commit, Free, Merge, Note, Park, Record, Step
from dedup.store import KEYS, Head, Meanwhile, Rows
from dedup.task_files import TaskFiles


@dataclass
class _Collected:
    """What becomes true with the commit."""

    freed: pa.Table = field(default_factory=KEYS.empty_table)
    batches: pa.Table | None = None
    head: dict[str, Any] = field(default_factory=dict)
    tried: bool = False  # whether there was anything for the handler


class DeltaTransaction:
    """The transaction of one chunk. Use it inside `DeltaStore.begin`."""

    def __init__(self, state: ConsumerState, context: Context, kind: str = "batch") -> None:
        self._state, self._context, self._kind = state, context, kind
        self.head: Head = state.header.head
        self._attempt, self._planned_on = uuid.uuid4().hex, state.header.attempt
        self._new = KEYS.empty_table()
        self._collected = _Collected()
        self._publisher = Publisher(state, context.root, context.options, context.spark)
        self._writes = SinkWrites(state, context, self._attempt)
        self._messages = MessageWrites(state, self._writes)
        self._letters = LetterChanges(self.head, lambda: letters_now(state, self._publisher), state.sequences)

    @property
    def connection(self) -> Any:
        """There is none: AttributeError with advice."""
        raise AttributeError("DeltaStore has no tx.connection: Delta has no transaction that a statement could join. Use tx.write.")

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """Positions in [first, last] that batch records of this generation's incarnations hold as seen."""
        return self._state.seen(spans)

    def ask(self, keys: pa.Array) -> None:
        """The known keys are in memory: there is nothing to begin."""

    def reserve(self, keys: pa.Table, meanwhile: Meanwhile | None = None) -> pa.Table:
        """Reserve the new ones of these distinct keys; returns the known ones. There is nothing to wait for.

        Crash: before the commit nothing is reserved.
        """
        free = _in(keys["key"], self._collected.freed["key"])
        known, new = self._state.split(keys.filter(pc.invert(free)))
        self._new = pa.concat_tables([self._new, new, keys.filter(free)])
        return known

    def known(self, keys: pa.Table) -> pa.Table:
        """The known ones of these keys, without reserving any."""
        return self._state.split(keys)[0]

    def attempt(self) -> AbstractContextManager[None]:
        """What is written inside vanishes if the block raises: its files are never named by a commit, and VACUUM takes them."""
        return self._writes.attempt()

    def write(self, table: str, rows: Rows) -> int:
        """Append rows to a sink with the commit; returns their number.

        Raises:
            SinkMismatch: the sink is missing, or the rows do not fit. No file was committed.
            RowsRefused: some rows break a rule of the sink.
            PublicationStuck: the sink was replaced or restored.
            StoreRestored: the sink shows a decision that the ledger does not have, or has another one for.
            ConfigError: the name cannot be resolved, or the sink needs Spark and there is none.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        return self._writes.append(table, rows)

    def task_files(self, table: str) -> TaskFiles:
        """What writes rows of this sink in Spark's tasks. Raises as `write` does.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        return self._writes.task_files(table)

    def adopt(self, table: str, files: Sequence[str]) -> int:
        """Append what tasks have written with the commit; returns the number of rows. Raises RowsRefused.

        Crash: as `write`.
        """
        return self._writes.adopt(table, files)

    def apart(self, tables: Collection[str]) -> bool:
        """Whether these are different tables: each gets its rows by itself."""
        return self._writes.apart(tables)

    def merge(self, table: str, rows: Rows, merge: Merge) -> int:
        """Insert, update or delete by key with the commit; returns the number of rows. Raises as `write` does.

        An older row (by `newer_by`) changes nothing; of a row that was deleted nothing is known any more, so an older one that comes later
        inserts it again.

        Crash: staged files that no commit names are deleted after some days.
        """
        return self._writes.merge(table, rows, merge)

    def publish(self, messages: Messages) -> None:
        """Send messages after the commit.

        Crash: files that no commit names are invisible; VACUUM takes them.
        """
        self._context.on_step("files")
        self._messages.add(messages)

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """LETTERS + duplicates of these letters, in position order. That nobody else changes them is judged by the commit."""
        return self._letters.lock(ids)

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """Which of these distinct sequences are blocked (SEQUENCES). That none is released meanwhile is judged by the commit."""
        return self._state.sequences.blocked(sequences)

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
            collected.batches, collected.tried = step.batches, step.tried
            collected.head |= _recorded(step, self.head) if step.stream else {}
        elif isinstance(step, Advance):
            collected.head["checkpoints"] = {**self.head.checkpoints, **step.checkpoints}
            collected.head["incarnation_ids"] = {**self.head.incarnation_ids, **step.incarnation_ids}
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
        if self._collected.tried and self._kind == "batch":
            self._context.committed()
        self._context.on_step("publish")
        self._publisher.publish()
        self._context.on_step("published")
        maintain.after_decision(header.seq, (self._state.ledger.uri, self._context.letters), self._state.sinks.engine)

    def _header(self, reserved: int, freed: int) -> Header:
        state, seq = self._state, self.head.seq + 1
        now = dt.datetime.now(dt.UTC)
        head = replace(self.head, **self._collected.head)
        header = state.following(self._kind, self._attempt, now, head, follows=self._planned_on)
        summary = seq if state.summary_due(seq) else header.summary
        return replace(header, sinks=self._writes.entries(), summary=summary, reserved=reserved, freed=freed)

    def _reservations(self) -> tuple[pa.Table, pa.Table]:
        """Newly reserved keys: those that stay with their effect, and those that a letter of this transaction holds."""
        letters = self._letters.keys_held()
        # A letter whose key nobody has reserved yet holds it from now on.
        current = letters.filter(pc.invert(_in(letters["key"], self._letters.outdated())))
        unreserved = self._state.split(current.filter(pc.invert(_in(current["key"], self._new["key"]))))[1]
        again = letters.filter(_in(letters["key"], self._collected.freed["key"]))
        holds = _in(self._new["key"], letters["key"])
        held = pa.concat_tables([self._new.filter(holds), unreserved, again.filter(pc.invert(_in(again["key"], self._new["key"])))])
        return self._new.filter(pc.invert(holds)), held

    def _write_events(self, held: pa.Table) -> None:
        """What becomes of letters, as one file of the consumer's table of dead letter events."""
        rows = self._letters.rows(self.head.seq + 1, lambda copies: self._held_copies(copies, held))
        if not rows.num_rows:
            return
        sink = events.letters_sink(self._state.sinks, self._context.letters, self.head.consumer)
        self._writes.require_same(sink)
        self._writes.own(sink, rows, {"compression": "snappy", "row_group_size": events.ROW_GROUP})

    def _held_copies(self, copies: pa.Table, held: pa.Table) -> pa.Table:
        return copies.filter(pc.or_(pa.array(self._state.held(copies["key"])), _in(copies["key"], held["key"])))


def _recorded(step: Record, head: Head) -> dict[str, Any]:
    """What a batch of the stream changes in the head."""
    run = step.run
    return {
        "query_id": run.query_id,
        "batch_id": run.batch_id,
        "batch_ended": run.ends,
        "settings": dict(step.settings),
        "spent": (step.budget or Budget()).spend(head.spent, step.used),
        **({} if run.joined else {"gap_accepted": False}),
    }


def _in(keys: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    if not len(among):  # the usual case; to look into nothing would still hash every key
        return pa.chunked_array([np.zeros(len(keys), dtype=bool)])
    return pc.is_in(keys.cast(pa.binary()), value_set=among.cast(pa.binary()).combine_chunks())
