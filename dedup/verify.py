"""Proof from the tables: every position up to the checkpoint is accounted for exactly once, or the contradiction is named.

It reads batch records, checkpoints and letters; it cannot see whether a handler forgot to write a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from checkpoint.position import Partition, Ranges
from dedup.index import KEY_ONLY
from dedup.store import Head, Selection, Store


@dataclass(frozen=True)
class PartitionProof:
    """What is known of one partition in its current incarnation."""

    partition: Partition
    incarnation: int
    checkpoint: int | None
    seen: Ranges
    absent: Ranges  # between the first seen position and the checkpoint, never delivered


@dataclass(frozen=True)
class VerifyReport:
    """`ok` where nothing contradicts; `notes` say what could not be proven."""

    consumer: str
    contradictions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partitions: list[PartitionProof] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # rows: delivered, redelivered, processed, duplicate, skipped, dead_lettered

    @property
    def ok(self) -> bool:
        """Whether the tables prove the bookkeeping."""
        return not self.contradictions


COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")

Life = tuple[Partition, int]
"""(partition, incarnation): positions mean something only within one."""


def verify(store: Store, consumer: str) -> VerifyReport:
    """Check one consumer. Reads only; does not need the stream to stop, but a running one may show as unpublished."""
    head = store.head(consumer)
    batches = [b for b in store.batches(consumer).to_pylist() if b["generation"] >= head.keyspace]
    letters = store.letters(Selection(consumer=consumer, limit=None)).select(_LETTER_COLUMNS).to_pylist()
    letters = [row for row in letters if row["generation"] >= head.keyspace]
    report = VerifyReport(consumer, counts={c: sum(b[c] for b in batches) for c in COUNTS})
    report.contradictions.extend(_check_records(batches))
    report.contradictions.extend(_check_letters(batches, letters))
    report.contradictions.extend(store.problems(consumer))
    _check_coverage(report, head, batches)
    if any(_partition(b) == KEY_ONLY and b["delivered"] for b in batches):
        report.notes.append("key-only batches: coverage of positions is not provable")
    return report


_LETTER_COLUMNS = ["generation", "source", "topic", "incarnation", "partition", "sequence_number", "part", "kind", "status"]


def _partition(row: dict[str, Any]) -> Partition:
    return Partition(row["source"], row["topic"], row["partition"])


def _life(row: dict[str, Any]) -> Life:
    return _partition(row), row["incarnation"]


def _ranges(items: Iterable[dict[str, int]]) -> Ranges:
    return Ranges.of((r["first"], r["last"]) for r in items)


def _name(batch: dict[str, Any]) -> str:
    return f"batch {batch['batch_id']} chunk {batch['chunk']} of query {batch['query_id']}, {_partition(batch)}"


def _check_records(batches: list[dict[str, Any]]) -> list[str]:
    """Within a record the counts add up and outcomes lie in what was seen; between records no position is seen twice."""
    found: list[str] = []
    seen: dict[Life, Ranges] = defaultdict(Ranges)
    for batch in batches:
        mine = _ranges(batch["seen"])
        total = batch["redelivered"] + batch["processed"] + batch["duplicate"] + batch["skipped_rows"] + batch["dead_lettered"]
        if total != batch["delivered"]:
            found.append(f"{_name(batch)}: {batch['delivered']} rows delivered, {total} accounted for")
        for outcome in ("duplicates", "skipped", "late"):
            outside = _ranges(batch[outcome]) - mine
            if outside:
                found.append(f"{_name(batch)}: {outcome} {outside} were not seen")
        twice = seen[_life(batch)] & mine
        if twice:
            found.append(f"{_name(batch)}: {twice} were seen by an earlier batch as well")
        seen[_life(batch)] |= mine
    return found


def _check_letters(batches: list[dict[str, Any]], letters: list[dict[str, Any]]) -> list[str]:
    """Every letter lies at a position that was seen, and there are as many as the records say."""
    seen: dict[Life, Ranges] = defaultdict(Ranges)
    for batch in batches:
        seen[_life(batch)] |= _ranges(batch["seen"])
    at: dict[Life, list[tuple[int, int]]] = defaultdict(list)
    for letter in letters:
        at[_life(letter)].append((letter["sequence_number"],) * 2)
    found = []
    for life, numbers in at.items():
        outside = Ranges() if life[0] == KEY_ONLY else Ranges.of(numbers) - seen[life]
        if outside:
            found.append(f"{life[0]}: dead letters at {outside}, which no batch has seen")
    # Without positions a replayed batch parks the same letters again, so the records may tell of more.
    recorded = sum(b["dead_lettered"] for b in batches if _partition(b) != KEY_ONLY)
    kept = sum(_partition(letter) != KEY_ONLY for letter in letters)
    if recorded != kept:
        found.append(f"batch records tell of {recorded} dead letters, there are {kept}")
    return found


def _check_coverage(report: VerifyReport, head: Head, batches: list[dict[str, Any]]) -> None:
    """The checkpoint is the highest position seen, or where a person went on; what lies between, never delivered, is absent, and said."""
    seen: dict[Partition, Ranges] = defaultdict(Ranges)
    for batch in batches:
        partition = _partition(batch)
        if partition != KEY_ONLY and batch["incarnation"] == head.incarnations.get((partition.source, partition.topic), 0):
            seen[partition] |= _ranges(batch["seen"])
    for partition in sorted({*seen, *head.checkpoints}):
        ranges, point = seen[partition], head.checkpoints.get(partition)
        behind = _passed(head.passed.get(partition), ranges)
        if behind is None:
            report.contradictions.extend(_check_checkpoint(partition, ranges, point.sequence_number if point else None))
        else:
            report.contradictions.extend(_check_passed(partition, behind, point.sequence_number if point else None))
            report.notes.append(f"{partition}: a person went on behind {behind}; positions up to it that no batch has seen are absent")
        if ranges or behind is not None:
            absent = Ranges.of([(ranges.items[0].first, max(ranges.items[-1].last, behind or 0))]) - ranges if ranges else ranges
            life = head.incarnations.get((partition.source, partition.topic), 0)
            report.partitions.append(PartitionProof(partition, life, point.sequence_number if point else None, ranges, absent))


def _passed(passed: int | None, seen: Ranges) -> int | None:
    """Where a person went on, if no batch has seen anything at or behind it since."""
    return None if passed is None or (seen and seen.items[-1].last >= passed) else passed


def _check_passed(partition: Partition, passed: int, checkpoint: int | None) -> list[str]:
    return [] if checkpoint == passed else [f"{partition}: a person went on behind {passed}, but the checkpoint is {checkpoint}"]


def _check_checkpoint(partition: Partition, seen: Ranges, checkpoint: int | None) -> list[str]:
    if not seen:
        return [f"{partition}: checkpoint {checkpoint}, but no batch has seen anything"]
    last = seen.items[-1].last
    if checkpoint is None:
        return [f"{partition}: batches have seen up to {last}, but there is no checkpoint"]
    if checkpoint > last:
        return [f"{partition}: positions {last + 1}-{checkpoint} lie below the checkpoint and no batch has seen them"]
    if checkpoint < last:
        return [f"{partition}: positions {checkpoint + 1}-{last} were seen above the checkpoint"]
    return []
