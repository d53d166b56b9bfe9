"""What one decision does to letters: collected step by step, and turned into events, reservations and sequences at its commit.

Promises that after the decision each sequence that it touched has one open letter, its first by position, and each other one blocked by
the one before. Nothing is written here. Called by the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.letter import LETTERS
from dedup.delta import events, sequences
from dedup.delta.letters import ALL_LETTERS, PLACE, Letters
from dedup.delta.sequences import LASTS, chained, lasts_of, waiting, with_columns
from dedup.steps import Change, Park
from dedup.store import KEYS, Head, Selection

_LIGHT = [n for n in ALL_LETTERS.names if n not in events.HEAVY]
_CHAIN = pa.schema([LETTERS.field(n).with_nullable(True) for n in (*PLACE, "sequence", "status", "blocked_by", "kind")])


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
    copies: list[pa.Table] = field(default_factory=list)
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
        self._edited |= ids if events.HEAVY & set(names) else set()

    def keys_held(self) -> pa.Table:
        """KEYS (with repeats) that parked or changed letters hold."""
        both = [self.parked, self._of(self._changed)]
        held = [t.filter(pc.and_(t["holds_key"], t["key"].is_valid())).select(["key", "payload_hash"]) for t in both]
        return pa.concat_tables(
            [KEYS.empty_table(), *(pa.table([t["key"], pc.fill_null(t["payload_hash"], 0)], schema=KEYS) for t in held)]
        )

    def outdated(self) -> pa.ChunkedArray:
        """Keys of changed letters from before the last reset: where they are not reserved, they count no longer."""
        changed = self._of(self._changed)
        return changed["key"].filter(pc.less(changed["generation"], self.head.keyspace)).drop_null()

    def settle(self) -> pa.Table:
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
            counted: of copies (key, count) those whose key a letter holds.
        """
        edited, light = self._of(self._edited), self._of(self._changed - self._edited)
        parts = [
            events.parked_rows(self.parked, seq),
            events.changed_rows(edited, True, self.head, seq),
            events.changed_rows(light, False, self.head, seq),
            *(events.history_rows(t, self.head, seq) for t in self.history),
            *(events.duplicate_rows(counted(t), self.head, seq) for t in self.copies),
        ]
        return events.together([p for p in parts if p.num_rows])

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
        blank = {n: pa.nulls(fresh.num_rows, LETTERS.field(n).type) for n in events.HEAVY}
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
