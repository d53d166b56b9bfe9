"""Plan a batch: pure functions from (head, events) to what has to be written.

The order is: guard -> chunks -> sift (positions) -> redeliveries -> settle (keys) -> handler -> decide. No driver, clock, randomness or
I/O: the simulation runs this very code. checkpoint/guards.py guards, decision.py decides.

A position that was seen before must hold the event that was decided there. A topic that was created again starts at sequence number 0;
without this check its events would be dropped as redeliveries. `Order` keeps the order of a sequence, also behind a dead letter. A
sequence is the events of one partition with one sequence key. Called by the pipeline, by spark/committing.py and by reprocessing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import IncarnationChanged, KeyConflict, command
from checkpoint.head import Checkpoint, Head, Run
from checkpoint.position import KEY_ONLY, Bools, Ints, Partition, Ranges
from checkpoint.records import RecordFilter, union
from deadletter.letter import HOLDS_NO_KEY, SEQUENCES, Kind
from dedup.core.index import Index, first_of_each_key
from dedup.core.keys import key_bytes

OnKeyConflict = Literal["dead_letter", "duplicate", "error"]

NEW, REDELIVERED, DUPLICATE, UNDECODABLE, NO_KEY, KEY_CONFLICT, REJECTED, SKIPPED, FAILED, CRASHED, WAITING = range(11)
"""What became of a row. Rows that stay NEW after the handler were processed."""

STATES = 11

LETTER_KINDS = {
    UNDECODABLE: Kind.UNDECODABLE,
    NO_KEY: Kind.NO_KEY,
    KEY_CONFLICT: Kind.KEY_CONFLICT,
    REJECTED: Kind.REJECTED,
    FAILED: Kind.HANDLER_ERROR,
    CRASHED: Kind.CRASHED,
    WAITING: Kind.HANDLER_ERROR,  # where nothing says the kind of the letter it waits behind
}
"""States whose rows become letters."""

LETTERED = np.isin(np.arange(STATES), list(LETTER_KINDS))
"""By state, whether its rows become letters."""

WITHOUT_KEY = np.isin(np.arange(STATES), [state for state, kind in LETTER_KINDS.items() if kind in HOLDS_NO_KEY])
"""By state, whether its rows become letters that hold no key."""

_SEQUENCE, _NO_TAILS = pa.binary(16), SEQUENCES.empty_table()

_NEVER = np.iinfo(np.int64).max


def reached(known: Head, index: Index, run: Run, *, decided: bool) -> Head:
    """The least head that the state has once this chunk is committed."""
    points = dict(known.checkpoints)
    for partition, (_, last) in index.spans.items():
        if partition != KEY_ONLY and (partition not in points or points[partition].sequence_number < last):
            points[partition] = Checkpoint(last, query_id=run.query_id)
    return replace(known, seq=known.seq + decided, checkpoints=points)


def chunks(index: Index, max_events: int) -> list[slice]:
    """Slices of the position-ordered index of at most `max_events` rows; parts of one position stay together."""
    found, start, total = [], 0, len(index)
    while start < total:
        stop = min(start + max_events, total)
        while stop < total and index.same_event(stop - 1, stop):
            stop += 1
        found.append(slice(start, stop))
        start = stop
    return found or [slice(0, 0)]


@dataclass(frozen=True)
class Sifted:
    """A chunk after its positions were judged; arrays are per row of the chunk."""

    index: Index
    state: npt.NDArray[np.int8]
    late: Bools
    first: Ints  # of each distinct key of new rows the first row, sorted by key
    replayed: Bools  # positions that batch records hold as seen, above the purged ones
    recheck: pa.Table  # KEYS: distinct keys of `replayed` rows

    @property
    def wanted(self) -> pa.Array:
        """The distinct keys of new rows, sorted: binary(16)."""
        return key_bytes(self.index.high[self.first], self.index.low[self.first])

    @property
    def reserve(self) -> pa.Table:
        """KEYS: the same, with the payload of their first row."""
        return self.index.keys_of(self.first)


def sift(index: Index, head: Head, seen: Mapping[Partition, Ranges], repeats: Ints) -> Sifted:
    """Tell redeliveries from new positions, and park what has no usable key.

    Args:
        seen: positions that batch records hold as seen, at least within the span of this chunk.
        repeats: rows whose position an earlier row of this chunk has, with the same content (see `Index.repeated`).
    """
    state = np.zeros(len(index), dtype=np.int8)
    late = np.zeros(len(index), dtype=bool)
    for partition, rows in index.by_partition():
        numbers = index.numbers[rows]
        known = seen.get(partition, Ranges()).contains(numbers)
        state[rows[known]] = REDELIVERED
        point = head.checkpoints.get(partition)
        if point is not None:
            late[rows] = ~known & (numbers <= point.sequence_number)
    replayed = _replayed(index, head, state == REDELIVERED)
    state[repeats] = REDELIVERED
    replayed[repeats] = late[repeats] = False
    fresh = state == NEW
    state[fresh & index.undecodable] = UNDECODABLE
    state[fresh & ~index.undecodable & index.no_key] = NO_KEY
    recheck = index.keys_of(first_of_each_key(index, replayed & ~index.no_key & ~index.undecodable))
    return Sifted(index, state, late, first_of_each_key(index, state == NEW), replayed, recheck)


def _replayed(index: Index, head: Head, redelivered: Bools) -> Bools:
    """Redelivered rows whose decision must still be on record: those above what a purge may have taken."""
    due = redelivered.copy()
    for partition, rows in index.by_partition() if head.floors else ():
        due[rows] &= index.numbers[rows] > head.floors.get(partition, np.iinfo(np.int64).min)
    return due


@dataclass(frozen=True)
class Settled:
    """A chunk after its keys were judged: rows in state NEW go to the handler."""

    index: Index
    state: npt.NDArray[np.int8]
    late: Bools
    reserved: int  # keys reserved by this chunk

    @property
    def new(self) -> Ints:
        """Rows for the handler, in position order."""
        return np.flatnonzero(self.state == NEW)


def settle(sifted: Sifted, known: pa.Table, on_conflict: OnKeyConflict) -> Settled:
    """Tell new keys from duplicates and conflicts: the first position of an unknown key wins.

    Args:
        known: what `reserve` returned: keys decided before, with the payload hash they were decided with.

    Raises:
        KeyConflict: with on_conflict="error", naming positions.
    """
    index, state = sifted.index, sifted.state.copy()
    rows = np.flatnonzero(state == NEW)
    group, first = index.groups(rows)  # rows of one key share a group; `first` is each group's first row
    at, payload = Index.of_keys(known).find_words(index.high[first], index.low[first])
    reference = np.where(at >= 0, payload, index.payload[first])
    is_first = np.zeros(len(index), dtype=bool)
    is_first[first[at < 0]] = True
    duplicates = ~is_first[rows]
    conflict = duplicates & (index.payload[rows] != reference[group])
    if on_conflict == "error" and conflict.any():
        raise KeyConflict(f"Same idempotence key, another payload at {', '.join(index.describe(r) for r in rows[conflict][:5])}.")
    state[rows[duplicates]] = DUPLICATE
    if on_conflict == "dead_letter":
        state[rows[conflict]] = KEY_CONFLICT
    return Settled(index, state, sifted.late, int((at < 0).sum()))


def apply_outcomes(settled: Settled, outcomes: Mapping[int, Ints]) -> Settled:
    """The chunk with what became of its new rows: state -> rows."""
    state = settled.state.copy()
    for outcome, rows in outcomes.items():
        state[rows] = outcome
    return replace(settled, state=state)


def suspects(sifted: Sifted, known: pa.Table, compare_payload: bool) -> Ints:
    """Rows at positions seen before that reservations alone do not explain: no key, an unknown key, or another payload.

    Args:
        known: which of `sifted.recheck` are decided, with their payload hashes.
        compare_payload: False where duplicates with another payload leave no letter (on_key_conflict="duplicate").
    """
    index, replayed = sifted.index, np.flatnonzero(sifted.replayed)
    at, payload = Index.of_keys(known).find_words(index.high[replayed], index.low[replayed])
    explained = (at >= 0) & ~index.no_key[replayed] & ~index.undecodable[replayed]
    if compare_payload:
        explained &= payload == index.payload[replayed]
    return replayed[~explained]


def unexplained(index: Index, rows: Ints, letters: pa.Table, head: Head, edited: Callable[[list[str]], Collection[str]]) -> Ints:
    """Those of the suspects that no letter at their position explains.

    It does so by its payload hash. One whose body was edited has that of the new body, and explains its position whatever is there.

    Args:
        edited: which of these letters have had another body.
    """
    current = _of_this_life(letters, head)
    at, ids = index.locate(current).tolist(), current["id"].to_pylist()
    parked = set(zip(at, current["payload_hash"].to_pylist(), strict=True))
    left = [row for row in rows.tolist() if (row, int(index.payload[row])) not in parked]
    there = dict(zip(at, ids, strict=True))
    others = edited(sorted({there[row] for row in left if row in there}))
    return np.array([row for row in left if there.get(row) not in others], dtype=np.int64)


def _of_this_life(rows: pa.Table, head: Head) -> pa.Table:
    """Letters, or batch records, of the present incarnations of their topics."""
    topics = zip(rows["source"].to_pylist(), rows["topic"].to_pylist(), strict=True)
    lives = [head.incarnations.get(topic, 0) for topic in topics]
    return rows.filter(pa.array([a == b for a, b in zip(rows["incarnation"].to_pylist(), lives, strict=True)], pa.bool_()))


def purged_duplicates(sifted: Sifted, rows: Ints, known: pa.Table, records: pa.Table, head: Head) -> Ints:
    """Those of the suspects that were duplicates of what a purge has taken meanwhile: they have a key that nobody knows any more.

    A batch record says of their position that all of it was a duplicate, or another part of the same event is known.

    Args:
        known: as for `suspects`.
        records: batch records of their partitions.
    """
    index, replayed = sifted.index, np.flatnonzero(sifted.replayed)
    rows = rows[~index.no_key[rows] & ~index.undecodable[rows]]
    rows = rows[Index.of_keys(known).find_words(index.high[rows], index.low[rows])[0] < 0]
    found = np.zeros(len(rows), dtype=bool)
    mine = _of_this_life(records, head)
    for number, partition in enumerate(index.partitions):
        told = union(RecordFilter(partition=partition).placed(mine).to_pylist(), "duplicates")
        here = index.place[rows] == number
        found[here] = told.contains(index.numbers[rows[here]])
    another = (np.diff(index.place) != 0) | (np.diff(index.numbers) != 0)
    event = np.cumsum(np.r_[0, another]) if len(index) else index.place
    sure = np.setdiff1d(replayed, suspects(sifted, known, compare_payload=True))
    return rows[found | np.isin(event[rows], event[sure])]


def check_redeliveries(index: Index, rows: Ints, freed: pa.Table, head: Head) -> None:
    """Raise IncarnationChanged where a position seen before now holds another event than the one decided then.

    A re-created topic starts again at sequence number 0; without this its events would pass for redeliveries and be lost.

    Args:
        rows: the suspects that are `unexplained`.
        freed: KEYS that letters have and hold no more: a person let them go, and a duplicate decided before that is still a redelivery.
    """
    at, payload = Index.of_keys(freed).find_words(index.high[rows], index.low[rows])
    wrong = rows[(at < 0) | (payload != index.payload[rows]) | index.no_key[rows] | index.undecodable[rows]]
    if len(wrong):
        refuse_incarnation(index, wrong.tolist(), head)


def refuse_incarnation(index: Index, wrong: list[int], head: Head) -> NoReturn:
    """Raise IncarnationChanged for rows whose positions were decided for other events."""
    partition = index.partition_of(wrong[0])
    raise IncarnationChanged(
        f"Consumer {head.consumer!r}: positions that are already decided hold other events "
        f"({', '.join(index.describe(r) for r in wrong[:5])}). "
        "If decode, its schema or on_key_conflict were changed, finish this batch with the old ones. A key or payload that depends on the "
        f"clock or on chance also causes this error. Only if topic {partition.topic!r} was deleted and created again: "
        f"{command('consumer', 'accept-incarnation', head.consumer, '--source', partition.source, '--topic', partition.topic)}."
    )


class Order:
    """The sequences of a chunk's rows, and from which row on each of them is blocked."""

    def __init__(self, sequences: pa.Array | pa.ChunkedArray | None, rows: int) -> None:
        if sequences is None:
            sequences = pa.nulls(rows, pa.binary(16))
        whole = sequences.combine_chunks() if isinstance(sequences, pa.ChunkedArray) else sequences
        encoded = (whole if whole.type == _SEQUENCE else whole.cast(_SEQUENCE)).dictionary_encode()
        self.known = encoded.dictionary
        codes = encoded.indices.fill_null(-1) if whole.null_count else encoded.indices
        self._codes: Ints = codes.to_numpy(zero_copy_only=False).astype(np.int64)
        self._from = np.full(len(self.known) + 1, _NEVER, dtype=np.int64)  # the last one is that of rows without a sequence
        self.tails = _NO_TAILS

    def copy(self) -> Order:
        """One whose rows can be blocked without blocking them here."""
        found = copy.copy(self)
        found._from = self._from.copy()
        return found

    @property
    def kept(self) -> bool:
        """Whether there is any order to keep."""
        return len(self.known) > 0

    def lanes(self, rows: Ints) -> Ints:
        """The number of each row's sequence; -1 where it has none."""
        return self._codes[rows]

    def asked(self, rows: Ints) -> pa.Array:
        """The distinct sequences of these rows, sorted."""
        codes = np.unique(self._codes[rows])
        found = self.known.take(pa.array(codes[codes >= 0]))
        return found.sort() if len(found) > 1 else found

    def block_behind_letters(self, tails: pa.Table) -> None:
        """Sequences (SEQUENCES) that are blocked before this chunk: all their rows wait."""
        self.tails = tails
        codes = pc.index_in(tails["sequence"], value_set=self.known)
        self._from[codes.to_numpy()] = -1

    def block_behind(self, rows: Ints) -> None:
        """Later rows of the sequences of these rows wait."""
        codes, at = self._codes[rows], rows[self._codes[rows] >= 0]
        np.minimum.at(self._from, codes[codes >= 0], at)

    def waits(self, rows: Ints) -> Bools:
        """Which of these rows stand behind something that blocks their sequence."""
        waiting: Bools = self._from[self._codes[rows]] < rows
        return waiting
