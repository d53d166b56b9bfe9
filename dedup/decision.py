"""From a settled chunk to the steps a store executes: letters, notes, batch record, checkpoints, commit. Pure."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import Partition, Ranges
from deadletter.letter import HOLDS_NO_KEY, LETTERS, Kind, fingerprint, letter_id
from dedup.index import KEY_ONLY, Bools, Index, Ints, key_bytes
from dedup.planning import DUPLICATE, LETTER_KINDS, NEW, REDELIVERED, SKIPPED, Settled
from dedup.steps import Advance, Commit, Note, Park, Record, Step
from dedup.store import BATCHES, Checkpoint, Head, Run

TOO_LARGE_KEPT = 64 * 1024
"""Bytes kept of a body above `max_body`."""

REASONS = {
    Kind.UNDECODABLE: "the body does not decode",
    Kind.NO_KEY: "every part of the idempotence key is null",
    Kind.KEY_CONFLICT: "the idempotence key was decided before with another payload",
}


def letter_rows(settled: Settled) -> Ints:
    """Rows of the chunk that become letters, in position order."""
    return np.flatnonzero(np.isin(settled.state, list(LETTER_KINDS)))


def make_letters(
    settled: Settled,
    content: pa.Table,
    reasons: Mapping[int, str],
    head: Head,
    run: Run,
    now: dt.datetime,
    max_body: int,
) -> pa.Table:
    """LETTERS for `letter_rows(settled)`.

    Args:
        content: the materialised rows of `letter_rows`, in that order, with the envelope and key columns.
        reasons: for rejected rows of the chunk, what the handler gave as the reason.
        max_body: bytes; of a longer body the digest and the first 64 kB are kept, and the letter's kind is TOO_LARGE.
    """
    rows = letter_rows(settled)
    kinds = [LETTER_KINDS[int(s)] for s in settled.state[rows]]
    why = [reasons.get(int(r)) or REASONS.get(Kind(k), "rejected by the handler") for r, k in zip(rows, kinds, strict=True)]
    bodies = content["body"].combine_chunks().cast(pa.large_binary())
    sizes = pc.binary_length(bodies)
    too_large = pc.fill_null(pc.greater(sizes, max_body), False).to_pylist()
    shown = ["TOO_LARGE" if large else k for k, large in zip(kinds, too_large, strict=True)]
    holds = [Kind(k) not in HOLDS_NO_KEY for k in kinds]
    count = len(rows)
    columns: dict[str, Any] = {
        "id": _ids(settled, rows, kinds, head, run),
        "consumer": [head.consumer] * count,
        "generation": [head.generation] * count,
        "incarnation": [
            head.incarnations.get((s, t), 0) for s, t in zip(*(content[c].to_pylist() for c in ("source", "topic")), strict=True)
        ],
        "sequence_number": np.where(content["partition"].to_numpy() == KEY_ONLY.partition, -1, settled.index.numbers[rows]),
        "event_key": content["key"],
        "key": pc.if_else(
            pa.array(holds, pa.bool_()), key_bytes(settled.index.high[rows], settled.index.low[rows]), pa.scalar(None, pa.binary(16))
        ),
        "holds_key": holds,
        "idempotence_key": content["_key_text"],
        "payload_hash": settled.index.payload[rows],
        "body": pc.if_else(
            pa.array(too_large, pa.bool_()), pc.binary_slice(bodies.cast(pa.binary()), 0, TOO_LARGE_KEPT), bodies.cast(pa.binary())
        ),
        "body_size": sizes,
        "body_sha256": [hashlib.sha256(b).digest() if large else None for b, large in zip(bodies.to_pylist(), too_large, strict=True)],
        "kind": shown,
        "reason": why,
        "fingerprint": [fingerprint(k, w) for k, w in zip(shown, why, strict=True)],
        "attempts": [1] * count,
        "first_failed_at": [now] * count,
        "last_failed_at": [now] * count,
        "status": ["OPEN"] * count,
    }
    return pa.table([_column(f, columns, content, count) for f in LETTERS], schema=LETTERS)


def _column(field: pa.Field, columns: Mapping[str, Any], content: pa.Table, count: int) -> pa.ChunkedArray | pa.Array:
    value = columns.get(field.name, content[field.name] if field.name in content.column_names else None)
    if value is None:
        return pa.nulls(count, field.type)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value.cast(field.type)
    return pa.array(value, field.type)


def _ids(settled: Settled, rows: Ints, kinds: list[str], head: Head, run: Run) -> list[str]:
    index, copies = settled.index, Counter[tuple[object, ...]]()
    found = []
    for row, kind in zip(rows.tolist(), kinds, strict=True):
        where = _where(index, row, head)
        if where is None and Kind(kind) not in HOLDS_NO_KEY:
            where = ("key", int(index.high[row]), int(index.low[row]))
        elif where is None:  # nothing but its batch and its payload tells this delivery from another
            same = ("delivery", run.query_id, run.batch_id, run.chunk, kind, int(index.payload[row]))
            copies[same] += 1
            where = (*same, copies[same])
        found.append(letter_id(head.consumer, head.generation, *where))
    return found


def _where(index: Index, row: int, head: Head) -> tuple[object, ...] | None:
    p = index.partition_of(row)
    if p == KEY_ONLY:
        return None
    life = head.incarnations.get((p.source, p.topic), 0)
    return (p.source, p.topic, life, p.partition, int(index.numbers[row]), int(index.parts[row]))


def decide(
    settled: Settled,
    letters: pa.Table,
    head: Head,
    run: Run,
    settings: Mapping[str, str],
    marks: Mapping[Partition, Checkpoint],
) -> tuple[Step, ...]:
    """Everything that has to become true together, in the order of execution.

    Args:
        marks: for each partition of the chunk, the checkpoint that its highest row would make.
    """
    steps: list[Step] = []
    if letters.num_rows:
        steps.append(Park(letters))
    copies = _copies(settled)
    if copies.num_rows:
        steps.append(Note(copies))
    steps.append(Record(batch_record(settled, head, run), run, settings))
    moved = {p: c for p, mark in marks.items() if (c := _advanced(head.checkpoints.get(p), mark, run)) is not None}
    if head.gap_accepted:  # for the whole query: also for partitions and chunks that come later
        moved = {p: replace(c, query_id=run.query_id) for p, c in head.checkpoints.items()} | moved
    if moved:
        steps.append(Advance(moved))
    return (*steps, Commit())


def _advanced(point: Checkpoint | None, mark: Checkpoint, run: Run) -> Checkpoint | None:
    """The checkpoint to write, or None where nothing changes; never one below `point`."""
    if point is None or mark.sequence_number > point.sequence_number:
        return mark
    if point.query_id != run.query_id:  # this query has shown that it begins at or below the checkpoint: no gap
        return Checkpoint(point.sequence_number, point.offset, point.enqueued_time, run.query_id)
    return None


def _copies(settled: Settled) -> pa.Table:
    """How many duplicates each key has in this chunk: key binary(16), count int64."""
    rows = np.flatnonzero(settled.state == DUPLICATE)
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
    return pa.Table.from_pylist(records, schema=BATCHES)


def _reserved_by(settled: Settled, groups: list[tuple[Partition, Ints]]) -> list[int]:
    """Keys reserved, by the partition of the row that won: rows that are neither dropped nor without a key of their own."""
    winners = ~np.isin(settled.state, [REDELIVERED, DUPLICATE, *(k for k, v in LETTER_KINDS.items() if Kind(v) in HOLDS_NO_KEY)])
    return [int(winners[rows].sum()) for _, rows in groups]


def _partition_record(settled: Settled, head: Head, run: Run, partition: Partition, rows: Ints) -> dict[str, Any]:
    state, numbers = settled.state[rows], settled.index.numbers[rows]

    def ranges(chosen: Bools, without: Bools) -> list[dict[str, int]]:
        found = Ranges() if partition == KEY_ONLY else Ranges.of_numbers(numbers[chosen]) - Ranges.of_numbers(numbers[without])
        return [r._asdict() for r in found.items]

    fresh = state != REDELIVERED
    none = np.zeros(len(rows), dtype=bool)
    duplicate, skipped = state == DUPLICATE, state == SKIPPED
    lettered = np.isin(state, list(LETTER_KINDS))
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
