"""One transaction of a model store: it collects, and applies everything at Commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from checkpoint.errors import CommitConflict, Fenced, StoreUnavailable
from checkpoint.head import Head
from checkpoint.position import Partition, Ranges
from deadletter.letter import SEQUENCES, table_of
from deadletter.selection import Selection
from deadletter.store import KEYS, Change, Commit, Free, Note, Park
from dedup.core.rows import Rows
from dedup.core.steps import Advance, Record
from simulation import invariants
from simulation.shared import NAME

if TYPE_CHECKING:
    from simulation.store import SimStore

_KEYS, _SEQUENCES = pa.struct(list(KEYS)), pa.struct(list(SEQUENCES))
_NONE, _FREE = KEYS.empty_table(), SEQUENCES.empty_table()

PATIENCE = 50
"""Turns for which a row lock is waited for. Who waits longer is in a deadlock, and the database ends one."""


class SimTransaction:
    """Row locks are taken in the transactional model; in a ledger the commit is the judge."""

    def __init__(self, store: SimStore, head: Head, *, letters_only: bool = False) -> None:
        self.store, self.head, self.version, self.letters_only = store, head, store.shared.version, letters_only
        self.ended = False
        self.claimed: tuple[Partition, int] | None = None  # of a runner
        self.claims: Mapping[Partition, int] = {}  # the newest ones
        self.locks: set[object] = set()  # ids of letters, sequences, and keys that runners want
        self.new: list[tuple[bytes, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.todo: list[Any] = []

    @property
    def connection(self) -> Any:
        """None here."""
        raise AttributeError

    def _alive(self) -> None:
        if self.ended and not self.store.ledger:
            raise StoreUnavailable

    def lock_checkpoints(self, partition: Partition | None) -> None:
        """All, or that of one partition. After a restore an epoch is given out twice: two instances with the same one come one by one."""
        for p in sorted(self.head.checkpoints) if partition is None else [partition]:
            self._wait_for(("checkpoint", p))
        self.head = self.store.shared.head

    def seen(self, wanted: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """From the batch records."""
        self._alive()
        found: dict[Partition, Ranges] = {}
        for batch in self.store.shared.batches:
            p = Partition(batch["source"], batch["topic"], batch["partition"])
            if p in wanted:
                found[p] = found.get(p, Ranges()) | invariants.spans(batch)
        return found

    def known(self, keys: pa.Table) -> pa.Table:
        """Those that are reserved."""
        self._alive()
        return self._known(keys["key"].to_pylist())

    def _known(self, keys: Sequence[bytes]) -> pa.Table:
        reserved = self.store.shared.reserved
        there = [{"key": k, "payload_hash": reserved[k]} for k in keys if k in reserved]
        return table_of(there, _KEYS) if there else _NONE

    def ask(self, keys: pa.Array) -> None:
        """Nothing to begin."""

    def reserve(self, keys: pa.Table, meanwhile: Any = None) -> pa.Table:
        """Remember the new ones for the commit. As a unique index: who wants what another open transaction reserves waits for its end."""
        self._alive()
        wanted = keys["key"].to_pylist()
        for key in wanted if self.claimed else ():
            self._wait_for(("key", key))
        reserved = self.store.shared.reserved
        self.new = [(k, p) for k, p in zip(wanted, keys["payload_hash"].to_pylist(), strict=True) if k not in reserved]
        return self._known(wanted)

    def _free(self, lock: object) -> bool:
        return not any(lock in other.locks for other in self.store.shared.open if other is not self and not other.ended)

    def _wait_for(self, lock: object) -> None:
        for _ in range(0 if self.store.ledger else PATIENCE):
            self._alive()
            if self._free(lock):
                return self.locks.add(lock)
            self.store.on_step("wait")
        if not self.store.ledger:
            raise CommitConflict("deadlock")

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """Those that nobody else is at work on, as they are now."""
        self.store.on_step("lock")
        mine = [i for i in ids if self.store.ledger or self._free(i)]
        self.locks.update(mine)
        return self.store.letters(Selection(ids=tuple(mine), limit=None))

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """Those with a letter that waits; none of them is released meanwhile."""
        self.store.on_step("blocked")
        rows = []
        for sequence in sequences.to_pylist():
            if self.store.shared.waiting(sequence):
                self._wait_for(sequence)
            if waiting := self.store.shared.waiting(sequence):
                rows.append({"sequence": sequence, "letter": waiting[-1]["id"], "kind": waiting[-1]["kind"]})
        return table_of(rows, _SEQUENCES) if rows else _FREE

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A savepoint."""
        before = len(self.rows)
        try:
            yield
        except Exception:
            del self.rows[before:]
            raise

    def write(self, table: str, rows: Rows) -> int:
        """Keep the rows."""
        self.store.on_step("write")
        self._alive()
        self.rows.extend({**row, "again": self.letters_only} for row in rows.arrow().to_pylist())
        return len(self.rows)

    def execute(self, step: Any) -> None:
        """Collect, or commit."""
        self._alive()
        if isinstance(step, Commit):
            self._commit()
            self.store.on_step("committed")  # dead, or unheard, from here on: it is true all the same
            self.store.publish(NAME)
        else:
            if isinstance(step, Park | Change):
                self._lock_sequences(step.letters["id"].to_pylist(), step.letters)
            self.todo.append(step)

    def _lock_sequences(self, ids: list[str], letters: pa.Table) -> None:
        known = [self.store.shared.letters[i]["sequence"] for i in ids if i in self.store.shared.letters]
        given = letters["sequence"].to_pylist() if "sequence" in letters.column_names else []
        for sequence in sorted({q for q in (*known, *given) if q is not None}):
            self._wait_for(sequence)

    def _commit(self) -> None:
        shared = self.store.shared
        if self.store.ledger and shared.version != self.version:  # somebody else decided this seq
            raise Fenced if shared.head.epoch != self.head.epoch and not self.letters_only else CommitConflict
        points = [p for step in self.todo if isinstance(step, Advance) for p in step.checkpoints]
        if any(shared.head.checkpoints.get(p) != self.head.checkpoints.get(p) for p in points):
            raise CommitConflict  # another transaction was first
        if not self.letters_only:
            newest = self.claimed and (self.claimed[0], self.claims[self.claimed[0]])
            invariants.fenced((self.head.epoch, self.claimed), (shared.head.epoch, newest))
            for step in self.todo:
                if isinstance(step, Record):
                    invariants.accepted(shared, step.run)
                    shared.begun.add(step.run.query_id)
        changes: dict[str, Any] = {}
        for step in self.todo:
            changes |= self._apply(step, shared.head)
        for key, payload in self.new:
            invariants.require(invariants.ONE_EFFECT, key not in shared.reserved, f"key {key.hex()} is reserved twice")
            shared.reserved[key] = payload
        if not self.store.ledger:
            shared.sink.extend(self.rows)
        shared.next(shared.head, self.rows, **changes)
        shared.back_up()
        invariants.in_order(shared, self.rows)
        invariants.decided_up_to(shared, points)

    def _apply(self, step: Any, head: Head) -> dict[str, Any]:
        """Change the tables; what changes of the head."""
        shared = self.store.shared
        match step:
            case Park(letters):
                for letter in letters.to_pylist():
                    shared.letters.setdefault(letter["id"], letter)
            case Change(letters, history):
                shared.history.extend(history.to_pylist())
                for letter in letters.to_pylist():
                    shared.letters[letter["id"]].update(letter)
                    self._link(shared.letters[letter["id"]]["sequence"])
            case Free(keys):
                for key in keys["key"].to_pylist():
                    del shared.reserved[key]
                    shared.freed.add(key)
            case Note(_):
                pass
            case Record(batches, run, settings):
                extra = {"generation": head.generation, "epoch": head.epoch, "seq": shared.head.seq + 1}
                new = [{**b, **extra} for b in batches.to_pylist()]
                shared.batches.extend(new)
                shared.seen.update((b["partition"], n) for b in new for r in b["seen"] for n in range(r["first"], r["last"] + 1))
                last = {"query_id": run.query_id, "batch_id": run.batch_id, "batch_ended": run.ends}
                return {"settings": settings, "gap_accepted": False, **last}
            case Advance(checkpoints):
                return {"checkpoints": {**head.checkpoints, **checkpoints}}
        return {}

    def _link(self, sequence: bytes | None) -> None:
        before = None
        for letter in self.store.shared.waiting(sequence):
            letter.update(status="BLOCKED" if before else "OPEN", blocked_by=before)
            before = letter["id"]
