"""One chunk, or some letters, on the way into the ledger: collect what belongs together, then decide and publish it.

Promises that nothing of it is visible before the ledger commit. Changes of letters are collected step by step. At the commit they become
events, reservations and sequences: then the first letter by position of each touched sequence is OPEN, and each other one is blocked by the
one before it. Called by the pipeline, through the store.
"""

from __future__ import annotations

import datetime as dt
import functools
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.head import Head
from checkpoint.position import Partition, Ranges
from deadletter.letter import CONTENTS, ERASED, HISTORY, LETTERS
from deadletter.plans import edits
from deadletter.policy import Budget
from deadletter.selection import Selection
from deadletter.store import KEYS, Change, Commit, Erase, Free, Note, Park
from dedup.core.messages import Messages
from dedup.core.rows import Rows
from dedup.core.steps import Advance, Merge, Record, Step
from dedup.core.store import Meanwhile, TaskFiles
from dedup.delta import letters, sequences, upkeep
from dedup.delta.commit import Decision, SinkPublisher, commit_decision
from dedup.delta.ledger import Header
from dedup.delta.letters import ALL_LETTERS, PLACE, Letters
from dedup.delta.outbox import MessageWrites
from dedup.delta.sequences import LASTS, chained, lasts_of, waiting, with_columns
from dedup.delta.state import ConsumerState
from dedup.delta.verify import letters_now
from dedup.delta.writing import Context, SinkWrites

_KEY = LETTERS.get_field_index("key")
_LIGHT = [n for n in ALL_LETTERS.names if n not in letters.HEAVY]
_CHAIN = pa.schema([LETTERS.field(n).with_nullable(True) for n in (*PLACE, "sequence", "status", "blocked_by", "kind")])

MOST_BLOCKED = 10_000
"""Blocked sequences that a summary repeats, half a megabyte. While more are blocked, a start reads from the summary before."""


@dataclass
class _CollectedSteps:
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
        self._collected = _CollectedSteps()
        self._publisher = SinkPublisher(state, context.root, context.options, context.spark)
        self._writes = SinkWrites(state, context, self._attempt)
        self._messages = MessageWrites(state, self._writes)
        self._letters = LetterChanges(self.head, functools.cache(lambda: letters_now(state, self._publisher)), state.sequences)

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

    def enqueue(self, messages: Messages) -> None:
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

        Crash: as `commit.commit_decision` and `SinkPublisher.publish` say.
        """
        collected = self._collected
        if isinstance(step, Park):
            self._letters.park(step)
        elif isinstance(step, Change):
            self._letters.change(step)
        elif isinstance(step, Erase):
            self._letters.erase(step)
        elif isinstance(step, Free):
            self._free(step.keys)
        elif isinstance(step, Note):
            self._letters.duplicates.append(step.duplicates)
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
        lasts = self._letters.put_in_order()
        keys, held = self._reservations()
        freed = self._collected.freed
        self._write_events(held)
        header = self._header(len(keys) + len(held), len(freed))
        commit_decision(self._state, Decision(header, self._collected.batches, keys, held, freed, lasts), self._context.on_step)
        if self._collected.tried and self._kind == "batch":
            self._context.committed()
        self._context.on_step("publish")
        replace(self._publisher, just_written=self._attempt).publish()
        self._context.on_step("published")
        own = (self._state.ledger.uri, self._context.letters, *self._state.outbox_uris())
        upkeep.after_decision(header.seq, own, self._state.sinks.engine)

    def _header(self, reserved: int, freed: int) -> Header:
        state, seq = self._state, self.head.seq + 1
        now = dt.datetime.now(dt.UTC)
        head = replace(self.head, **self._collected.head)
        header = state.following(self._kind, self._attempt, now, head, follows=self._planned_on)
        own: dict[str, Any] = {"sinks": self._writes.entries(), "reserved": reserved, "freed": freed}
        if state.summary_due(seq):
            own |= {"summary": seq, "order_since": seq if len(state.sequences) <= MOST_BLOCKED else header.order_since}
        return replace(header, **own)

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
        rows = self._letters.rows(self.head.seq + 1, lambda duplicates: self._held_duplicates(duplicates, held))
        if not rows.num_rows:
            return
        sink = letters.letters_sink(self._state.sinks, self._context.letters, self.head.consumer)
        self._writes.require_same(sink)
        self._writes.own(sink, rows, {"compression": "snappy", "row_group_size": letters.ROW_GROUP})

    def _held_duplicates(self, duplicates: pa.Table, held: pa.Table) -> pa.Table:
        return duplicates.filter(pc.or_(pa.array(self._state.held(duplicates["key"])), _in(duplicates["key"], held["key"])))


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
    if not len(among) or not len(keys):  # the usual case; to look into nothing, or for nothing, would still hash every key
        return pa.chunked_array([np.zeros(len(keys), dtype=bool)])
    return pc.is_in(keys.cast(pa.binary()), value_set=among.cast(pa.binary()).combine_chunks())


@dataclass
class LetterChanges:
    """The letters of one transaction.

    Args:
        letters: gives the letters as of the head.
        blocked: the blocked sequences as of the head.
    """

    head: Head
    letters: Callable[[], Letters]
    blocked: sequences.Sequences
    parked: pa.Table = field(default_factory=LETTERS.empty_table)
    history: list[pa.Table] = field(default_factory=list)
    duplicates: list[pa.Table] = field(default_factory=list)
    _locked: pa.Table = field(default_factory=ALL_LETTERS.empty_table)  # as they are after the steps so far
    _changed: set[str] = field(default_factory=set)
    _edited: set[str] = field(default_factory=set)  # also in columns that are kept apart

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """ALL_LETTERS of these ids, in position order."""
        found = self._read(ids)
        known = self._locked.filter(pc.is_in(self._locked["id"], value_set=found["id"].combine_chunks()))
        fresh = found.filter(pc.invert(pc.is_in(found["id"], value_set=known["id"].combine_chunks())))
        self._locked = pa.concat_tables([self._locked, fresh])
        return found

    def park(self, step: Park) -> None:
        """Keep these letters and their history."""
        self.parked = pa.concat_tables([self.parked, step.letters.select(LETTERS.names).cast(LETTERS)])
        self.history.append(step.history)

    def change(self, step: Change) -> None:
        """Change columns of letters, and append to their history."""
        self.history.append(step.history)
        given = step.letters
        missing = given["id"].filter(pc.invert(pc.is_in(given["id"], value_set=self._locked["id"].combine_chunks())))
        if len(missing):
            self._locked = pa.concat_tables([self._locked, self._read(missing.to_pylist())])
        rows = self._locked.num_rows
        at = pc.index_in(self._locked["id"], value_set=given["id"].combine_chunks())
        pick = pc.if_else(at.is_valid(), pc.add(at.cast(pa.int64()), rows), pa.array(range(rows), pa.int64()))
        names = [n for n in given.column_names if n != "id"]
        new = {n: pa.chunked_array([*self._locked[n].chunks, *given[n].cast(LETTERS.field(n).type).chunks]).take(pick) for n in names}
        self._locked = with_columns(self._locked, new).cast(ALL_LETTERS)
        ids = set(given["id"].to_pylist())
        self._changed |= ids
        self._edited |= ids if letters.HEAVY & set(names) else set()

    def erase(self, step: Erase) -> None:
        """Blank all columns that hold what the event said; rows of before say it until `scrub`."""
        count = step.letters.num_rows
        blank = {name: pa.nulls(count, LETTERS.field(name).type) for name in CONTENTS}
        self.change(Change(pa.table({"id": step.letters["id"], **blank, "reason": pa.repeat(ERASED, count)}), step.history))

    def keys_held(self) -> pa.Table:
        """KEYS (with repeats) that parked or changed letters hold. Of changed ones those that edits replaced were held before."""
        both = [self.parked, self._of(self._changed), self._earlier()]
        held = [t.filter(pc.and_(t["holds_key"], t["key"].is_valid())).select(["key", "payload_hash"]) for t in both]
        return pa.concat_tables(
            [KEYS.empty_table(), *(pa.table([t["key"], pc.fill_null(t["payload_hash"], 0)], schema=KEYS) for t in held)]
        )

    def _earlier(self) -> pa.Table:
        """Parked letters once more, with each key that an edit replaced: an import has such letters."""
        past = edits(pa.concat_tables([HISTORY.empty_table(), *self.history]))
        at = pc.index_in(past["letter_id"], value_set=self.parked["id"].combine_chunks())
        return self.parked.take(at.drop_null()).set_column(_KEY, LETTERS.field(_KEY), past["key"].filter(at.is_valid()))

    def outdated(self) -> pa.ChunkedArray:
        """Keys of changed letters from before the last reset: where they are not reserved, they count no longer."""
        changed = self._of(self._changed)
        return changed["key"].filter(pc.less(changed["generation"], self.head.keyspace)).drop_null()

    def put_in_order(self) -> pa.Table:
        """Put the chains in order, once after all steps; returns LASTS of all sequences that were touched."""
        touched = [self._of(self._changed)["sequence"], waiting(self.parked)["sequence"]]
        names = pa.chunked_array([c for t in touched for c in t.cast(pa.binary()).drop_null().chunks], pa.binary()).unique()
        if not len(names):
            return LASTS.empty_table()
        chain = chained(self._members(names.cast(pa.binary(16))))
        self._take_chain(chain)
        return lasts_of(chain, names.cast(pa.binary(16)))

    def rows(self, seq: int, counted: Callable[[pa.Table], pa.Table]) -> pa.Table:
        """EVENTS of the decision.

        Args:
            counted: of duplicates (key, count) those whose key a letter holds.
        """
        edited, light = self._of(self._edited), self._of(self._changed - self._edited)
        parts = [
            letters.parked_rows(self.parked, seq),
            letters.changed_rows(edited, True, self.head, seq),
            letters.changed_rows(light, False, self.head, seq),
            *(letters.history_rows(t, self.head, seq) for t in self.history),
            *(letters.duplicate_rows(counted(t), self.head, seq) for t in self.duplicates),
        ]
        return letters.together([p for p in parts if p.num_rows])

    def reserved(self) -> int:
        """What the history of this decision says about keys."""
        return sum(pc.sum(t["reserved"]).as_py() or 0 for t in self.history)

    def _members(self, names: pa.Array) -> pa.Table:
        """The letters that wait in these sequences after the steps, as far as they can matter: of a sequence that only grew at its end,
        the last one of before stands for all.
        """
        late = self._late(names)
        kept = self._waiting_in(late)
        mine = pa.concat_tables([_links(self._of(self._changed)), _links(self.parked)])
        others = kept.filter(pc.invert(pc.is_in(kept["id"], value_set=mine["id"].combine_chunks())))
        fresh = others.filter(pc.invert(pc.is_in(others["id"], value_set=self._locked["id"].combine_chunks())))
        blank = {n: pa.nulls(fresh.num_rows, LETTERS.field(n).type) for n in letters.HEAVY}
        self._locked = pa.concat_tables([self._locked, with_columns(fresh, blank).select(ALL_LETTERS.names).cast(ALL_LETTERS)])
        return pa.concat_tables([waiting(mine), _links(others), self._lasts(names, late)])

    def _waiting_in(self, names: pa.Array) -> pa.Table:
        asked = Selection(sequences=tuple(names.to_pylist()), statuses=sequences.WAITING, limit=None)
        return self.letters().select(asked, _LIGHT) if len(names) else pa.schema([ALL_LETTERS.field(n) for n in _LIGHT]).empty_table()

    def _late(self, names: pa.Array) -> pa.Array:
        """Sequences of which all waiting letters have to be read: one of them changed, or something came in before its last one."""
        changed = self._of(self._changed)["sequence"].cast(pa.binary())
        lasts = self.blocked.find(names)
        at = pc.index_in(self.parked["sequence"].cast(pa.binary()), value_set=lasts["sequence"].cast(pa.binary()).combine_chunks())
        before, equal = pa.chunked_array([pa.repeat(False, len(at))]), pa.chunked_array([pa.repeat(True, len(at))])
        for name, theirs in zip(sequences.PLACE, (*LASTS.names[3:], "letter"), strict=True):
            last = lasts[theirs].take(at)
            before = pc.or_(before, pc.and_(equal, pc.fill_null(pc.less(self.parked[name], last), False)))
            equal = pc.and_(equal, pc.fill_null(pc.equal(self.parked[name], last), False))
        inside = self.parked["sequence"].cast(pa.binary()).filter(pc.or_(before, equal))
        return pa.chunked_array([*changed.chunks, *inside.chunks], pa.binary()).drop_null().unique().cast(pa.binary(16))

    def _lasts(self, names: pa.Array, late: pa.Array) -> pa.Table:
        """Stand-ins for the chains that need no reading."""
        lasts = self.blocked.find(names)
        lasts = lasts.filter(pc.invert(pc.is_in(lasts["sequence"].cast(pa.binary()), value_set=late.cast(pa.binary()))))
        known = {"id": lasts["letter"], **{n: lasts[n] for n in ("sequence", *LASTS.names[2:])}}
        return pa.table([known.get(f.name, pa.nulls(lasts.num_rows, f.type)) for f in _CHAIN], schema=_CHAIN)

    def _take_chain(self, chain: pa.Table) -> None:
        """Give letters the status that their place in the chain asks for."""
        self.parked, _ = _rechained(self.parked, chain)
        self._locked, moved = _rechained(self._locked, chain)
        self._changed |= set(moved.to_pylist())

    def _read(self, ids: Sequence[str]) -> pa.Table:
        return self.letters().select(Selection(ids=tuple(ids), limit=None), ALL_LETTERS.names)

    def _of(self, ids: set[str]) -> pa.Table:
        return self._locked.filter(pc.is_in(self._locked["id"], value_set=pa.array(sorted(ids), pa.string())))


def _links(letters: pa.Table) -> pa.Table:
    return letters.select(_CHAIN.names).cast(_CHAIN)


def _rechained(rows: pa.Table, chain: pa.Table) -> tuple[pa.Table, pa.ChunkedArray]:
    """The rows with status and blocked_by of the chain, and the ids of those that had others."""
    at = pc.index_in(rows["id"], value_set=chain["id"].combine_chunks())
    new = {n: pc.if_else(at.is_valid(), chain[n].take(at), rows[n]) for n in ("status", "blocked_by")}
    differs = [pc.invert(pc.equal(pc.fill_null(new[n], ""), pc.fill_null(rows[n], ""))) for n in new]
    moved = rows["id"].filter(pc.or_(*differs))
    return with_columns(rows, new).cast(rows.schema), moved
