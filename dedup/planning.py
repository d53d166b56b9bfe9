"""What a batch means: pure functions from (head, events) to what has to be written.

No driver, clock, randomness or I/O: the stores execute what is decided here, the simulation runs this very code.
The order is: guard -> chunks -> sift (positions) -> settle (keys) -> handler -> decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.advice import command
from checkpoint.errors import KeyConflict, PositionGap, SettingsChanged, StoreRestored
from checkpoint.position import Partition, Range, Ranges
from deadletter.letter import HOLDS_NO_KEY, Kind
from dedup.index import KEY_ONLY, Bools, Index, Ints, first_of_each_key
from dedup.sorting import key_bytes
from dedup.store import Checkpoint, Head, Run

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


def guard(head: Head, run: Run, settings: Mapping[str, str], firsts: Mapping[Partition, int]) -> None:
    """Refuse a batch that the state contradicts, before anything of it is written.

    Args:
        firsts: lowest sequence number of each partition in the batch; empty in key-only mode.

    Raises:
        SettingsChanged, StoreRestored, PositionGap: each names the command to go on.
    """
    if head.settings is not None and dict(head.settings) != dict(settings):
        raise SettingsChanged(_settings_message(head, settings))
    ours = head.batch_id if head.query_id == run.query_id and run.durable else None
    if ours is not None and run.batch_id > ours + head.batch_ended:  # Spark goes on when all of a batch is decided
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} is at batch {run.batch_id}, our state at batch {ours}: "
            f"the state was restored to an older time. Find out what is missing, then run "
            f"{command('consumer', 'accept-restore', head.consumer)}."
        )
    if run.durable and run.batch_id > 0 and _begins(head) and not head.gap_accepted:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} is at batch {run.batch_id}, and the store has no state of it: it was "
            f"lost, or the query ran without this consumer until now. What was decided before is not recognised. Bring the state back, or "
            f"start a new query that reads all again, or run {command('consumer', 'accept-gap', head.consumer)} to begin at this batch."
        )
    if _is_stranger(head, run) and not head.gap_accepted:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: Spark query {run.query_id} goes on at batch {run.batch_id}, and the state knows nothing of it: "
            f"it was restored to before the query began, a restore was accepted since, or other queries went on with all of its "
            f"partitions. What it decided before may be missing. Start a new query at the checkpoint; or, where you know that nothing is "
            f"missing, run {command('consumer', 'accept-gap', head.consumer)} to let it go on."
        )
    found = gaps(head, run, firsts)
    if found:
        raise PositionGap(
            f"Consumer {head.consumer!r}: positions would be left out: {', '.join(f'{p} {span}' for p, span in found.items())}. Start the "
            f"query at the checkpoint, or run {command('consumer', 'accept-gap', head.consumer)} to go on without them."
        )


def _begins(head: Head) -> bool:
    """Whether no batch was ever decided; a reset was a person's decision, and is none."""
    return head.settings is None and head.query_id is None and not 0 < head.generation == head.keyspace


def is_older(head: Head, known: Head) -> bool:
    """Whether this state lacks what `known` had: the store failed over to an older copy of itself, or a person moved a checkpoint back."""
    points = head.checkpoints
    return head.seq < known.seq or any(
        p not in points or points[p].sequence_number < c.sequence_number for p, c in known.checkpoints.items()
    )


def refuse_older(head: Head, known: Head) -> None:
    """Raise StoreRestored where this process has seen later decisions than the state has."""
    if head.seq < known.seq:
        raise StoreRestored(
            f"Consumer {head.consumer!r}: the state is at decision {head.seq}, this copy has seen decision {known.seq}: the state was "
            f"restored to an older time. Find out what is missing, run "
            f"{command('consumer', 'accept-restore', head.consumer)}, and start again."
        )


def reached(known: Head, index: Index, run: Run, *, decided: bool) -> Head:
    """What the state cannot be behind once this chunk is through."""
    points = dict(known.checkpoints)
    for partition, (_, last) in index.spans.items():
        if partition != KEY_ONLY and (partition not in points or points[partition].sequence_number < last):
            points[partition] = Checkpoint(last, query_id=run.query_id)
    return replace(known, seq=known.seq + decided, checkpoints=points)


def gaps(head: Head, run: Run, firsts: Mapping[Partition, int]) -> dict[Partition, Range]:
    """Positions between a checkpoint and the first one of this batch, where another query comes and nobody has accepted them."""
    found = {} if head.gap_accepted else {p: _gap(head, run, p, first) for p, first in sorted(firsts.items())}
    return {partition: span for partition, span in found.items() if span is not None}


def _gap(head: Head, run: Run, partition: Partition, first: int) -> Range | None:
    point = head.checkpoints.get(partition)
    if point is None or point.query_id == run.query_id or first <= point.sequence_number + 1:
        return None  # the same query may jump: transaction markers and compaction leave gaps
    return Range(point.sequence_number + 1, first - 1)


def _is_stranger(head: Head, run: Run) -> bool:
    """Whether a query goes on, and no position that was decided is of it. Let through once, it would pass for known in each partition."""
    known = {head.query_id, *(point.query_id for point in head.checkpoints.values())}
    return run.durable and run.batch_id > 0 and bool(head.checkpoints) and run.query_id not in known


def _settings_message(head: Head, settings: Mapping[str, str]) -> str:
    old = dict(head.settings or {})
    changed = [f"{k}: was {old.get(k)!r}, now {settings.get(k)!r}" for k in sorted({*old, *settings}) if old.get(k) != settings.get(k)]
    return (
        f"Consumer {head.consumer!r}: its state was written with other key settings ({'; '.join(changed)}). "
        f"With the new ones old keys would not be recognised. Go back to the old settings, use another consumer name, "
        f"or start over with {command('consumer', 'reset', head.consumer)}."
    )


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
    """Tell new keys from copies and conflicts: the first position of an unknown key wins.

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
    copies = ~is_first[rows]
    conflict = copies & (index.payload[rows] != reference[group])
    if on_conflict == "error" and conflict.any():
        raise KeyConflict(f"Same idempotence key, another payload at {', '.join(index.describe(r) for r in rows[conflict][:5])}.")
    state[rows[copies]] = DUPLICATE
    if on_conflict == "dead_letter":
        state[rows[conflict]] = KEY_CONFLICT
    return Settled(index, state, sifted.late, int((at < 0).sum()))


def apply_outcomes(settled: Settled, outcomes: Mapping[int, Ints]) -> Settled:
    """The chunk with what became of its new rows: state -> rows."""
    state = settled.state.copy()
    for outcome, rows in outcomes.items():
        state[rows] = outcome
    return replace(settled, state=state)
