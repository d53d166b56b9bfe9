"""From a decided chunk to the steps that a store executes: letters, notes, batch record, checkpoints, commit. Pure.

`require` also judges what the chunk uses of the budget of each kind of dead letter, and raises the error if it is too much. The budget is
judged before the handler runs, while it runs (attempts.py), and once more by a store whose transactions commit side by side. Called by
pipeline/commit.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.errors import BudgetExceeded, command
from checkpoint.head import Checkpoint, Head, Run, Spent, Topic
from checkpoint.position import KEY_ONLY, Bools, Ints, Partition, Ranges
from checkpoint.records import BATCHES
from deadletter.letter import Kind, table_of
from deadletter.plans import REASONS
from deadletter.policy import Budget, Excess, Used
from deadletter.store import Commit, Note, Park
from dedup.core.index import Index
from dedup.core.keys import key_bytes
from dedup.core.letters import Undecodable
from dedup.core.planning import DUPLICATE, KEY_CONFLICT, LETTERED, NEW, NO_KEY, REDELIVERED, SKIPPED, UNDECODABLE, WITHOUT_KEY, Settled
from dedup.core.steps import Advance, Record, Step

_RECORD = pa.struct(list(BATCHES))
_NO_DUPLICATES = pa.table({"key": pa.array([], pa.binary(16)), "count": pa.array([], pa.int64())})

_BEFORE_THE_HANDLER = ((UNDECODABLE, Kind.UNDECODABLE), (NO_KEY, Kind.NO_KEY), (KEY_CONFLICT, Kind.KEY_CONFLICT))
"""States in the order in which an event may come into them."""

_CAUSES = {
    Kind.HANDLER_ERROR: "a bug or an outage",
    Kind.UNDECODABLE: "a bad deploy of a producer or of a schema",
    Kind.NO_KEY: "a bad deploy of a producer, or a wrong idempotence_key=",
    Kind.KEY_CONFLICT: "a producer that sends changed messages under old keys, or an idempotence_key= that does not name the message",
    Kind.REJECTED: "a bug",
}

WIDELY = 10
"""Windows that the advice lifts the budget for."""


def decide(
    settled: Settled,
    parked: Park | None,
    record: Record,
    head: Head,
    run: Run,
    marks: Mapping[Partition, Checkpoint],
    ids: Mapping[Topic, str] = MappingProxyType({}),
) -> tuple[Step, ...]:
    """The steps that must become true together, in the order of execution.

    Args:
        marks: for each partition of the chunk, the checkpoint that its highest row would make.
        ids: the broker's ids of topics that have none yet.
    """
    steps: list[Step] = []
    if parked is not None:
        steps.append(parked)
    duplicates = _duplicates(settled)
    if duplicates.num_rows:
        steps.append(Note(duplicates))
    steps.append(record)
    moved = {p: c for p, mark in marks.items() if (c := _advanced(head.checkpoints.get(p), mark, run)) is not None}
    if head.gap_accepted and record.stream and not run.joined:  # for the whole query: also for partitions and chunks that come later
        moved = {p: replace(c, query_id=run.query_id) for p, c in head.checkpoints.items()} | moved
    if moved or ids:
        steps.append(Advance(moved, ids))
    return (*steps, Commit())


def _advanced(point: Checkpoint | None, mark: Checkpoint, run: Run) -> Checkpoint | None:
    """The checkpoint to write, or None where nothing changes; never one below `point`."""
    if point is None or mark.sequence_number > point.sequence_number:
        return mark
    if point.query_id != run.query_id:  # this query has shown that it begins at or below the checkpoint: no gap
        return replace(point, query_id=run.query_id)
    return None


def _duplicates(settled: Settled) -> pa.Table:
    """How many duplicates each key has in this chunk: key binary(16), count int64."""
    rows = np.flatnonzero(settled.state == DUPLICATE)
    if not len(rows):
        return _NO_DUPLICATES
    group, first = settled.index.groups(rows)
    counts = np.bincount(group, minlength=len(first)).astype(np.int64)
    return pa.table({"key": key_bytes(settled.index.high[first], settled.index.low[first]), "count": pa.array(counts)})


def batch_record(settled: Settled, head: Head, run: Run) -> pa.Table:
    """BATCHES for one chunk. An empty chunk gives a row too, so that the batch id is known."""
    index = settled.index
    groups = list(index.by_partition()) or [(KEY_ONLY, np.arange(len(index)))]
    everything = np.arange(len(index))
    if index.partitions == (KEY_ONLY,):
        groups = [(KEY_ONLY, everything)]
    records = [_partition_record(settled, head, run, p, rows) for p, rows in groups]
    reserved = _reserved_by(settled, groups)
    for record, count in zip(records, reserved, strict=True):
        record["reserved"] = count
    return table_of(records, _RECORD)


def _reserved_by(settled: Settled, groups: list[tuple[Partition, Ints]]) -> list[int]:
    """Keys reserved, by the partition of the row that won: rows that are neither dropped nor without a key of their own."""
    winners = ~(WITHOUT_KEY[settled.state] | (settled.state == REDELIVERED) | (settled.state == DUPLICATE))
    return [int(winners[rows].sum()) for _, rows in groups]


def _partition_record(settled: Settled, head: Head, run: Run, partition: Partition, rows: Ints) -> dict[str, Any]:
    state, numbers = settled.state[rows], settled.index.numbers[rows]

    def ranges(chosen: Bools, without: Bools) -> list[dict[str, int]]:
        if partition == KEY_ONLY or not chosen.any():
            return []
        found = Ranges.of_numbers(numbers[chosen]) - Ranges.of_numbers(numbers[without])
        return [r._asdict() for r in found.items]

    fresh = state != REDELIVERED
    none = np.zeros(len(rows), dtype=bool)
    duplicate, skipped = state == DUPLICATE, state == SKIPPED
    lettered = LETTERED[state]
    return {
        "source": partition.source,
        "topic": partition.topic,
        "incarnation": head.incarnations.get((partition.source, partition.topic), 0),
        "partition": partition.partition,
        "query_id": run.query_id,
        "batch_id": run.batch_id,
        "chunk": run.chunk,
        "seen": ranges(fresh, none),
        "duplicates": ranges(duplicate, fresh & ~duplicate),
        "skipped": ranges(skipped, fresh & ~skipped),
        "late": ranges(settled.late[rows], none),
        "delivered": len(rows),
        "redelivered": int((~fresh).sum()),
        "processed": int((state == NEW).sum()),
        "duplicate": int(duplicate.sum()),
        "skipped_rows": int(skipped.sum()),
        "dead_lettered": int(lettered.sum()),
    }


def before_handler(settled: Settled) -> dict[Kind, Used]:
    """What a chunk uses of the budget before the handler runs: events that do not decode, have no key, or have a conflicting one."""
    among, used = settled.state != REDELIVERED, {}
    for state, kind in _BEFORE_THE_HANDLER:
        failed = settled.state == state
        used[kind] = _used(settled.index, among, failed, REASONS[kind])
        among = among & ~failed
    return used


def _used(index: Index, among: Bools, failed: Bools, why: str) -> Used:
    if not failed.any():
        return Used(int(np.count_nonzero(among)))
    first = int(np.argmax(failed))
    return Used(int(np.count_nonzero(among)), np.cumsum(among)[failed].tolist(), f"{index.describe(first)}: {why}")


def explained(used: Mapping[Kind, Used], settled: Settled, why: Mapping[int, Undecodable]) -> dict[Kind, Used]:
    """The same, with the reason of the first event that does not decode. Errors go to logs: without the value."""
    first, found = int(np.argmax(settled.state == UNDECODABLE)), dict(used)
    if first in why and Kind.UNDECODABLE in used:
        its = used[Kind.UNDECODABLE]
        found[Kind.UNDECODABLE] = replace(its, example=f"{its.example}: {why[first].brief}")
    return found


def require(
    consumer: str, budget: Budget | None, before: Mapping[str, Spent], used: Mapping[Kind, Used], also: str = "", what: str = "batch"
) -> None:
    """Raise BudgetExceeded if the chunk brings one of these kinds over its limits.

    Args:
        also: words for whose failures are counted with its own. what: of which nothing is parked.
    """
    excess = None if budget is None else budget.excess(before, used)
    if excess:
        raise BudgetExceeded(_message(consumer, excess, also, what))


def _message(consumer: str, excess: Excess, also: str, what: str) -> str:
    kind, window = excess.kind, excess.window
    return (
        f"Consumer {consumer!r}: {also}{excess.failed} of {window} events in a row are {kind} ({excess.failed / window:.0%}), "
        f"{excess.allowed} may be ({excess.allowed / window:.0%}): {_CAUSES[kind]}, not bad events. None of this {what} was parked. "
        f"One of them is {excess.example}. Repair the cause; or, if these events are known to be bad, "
        f"{command('budget', 'lift', consumer, '--kind', kind, '--events', WIDELY * window)}."
    )
