"""What the tables say about a range of positions: processed, parked, duplicate, skipped, or never delivered.

Called by reprocess, its from_log, and replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from checkpoint.errors import ConfigError
from checkpoint.position import LAST, Partition, Range, Ranges
from deadletter.selection import Selection
from dedup.store import Head, Store
from dedup.wanted import Wanted

log = logging.getLogger("dedup")

MERGED = -1
"""The batch id of a record that a purge has made of several (sql/postgres, merge_batches)."""


@dataclass(frozen=True)
class Coverage:
    """The positions of one partition within a range, up to its checkpoint."""

    partition: Partition
    asked: Ranges  # the range, cut at the checkpoint
    processed: Ranges
    lettered: Ranges
    duplicates: Ranges
    skipped: Ranges
    absent: Ranges  # below the checkpoint, never delivered
    forgotten: Ranges = field(default_factory=Ranges)  # a purge has merged their records: duplicates and skipped ones count as processed


def partitions_of(head: Head, selection: Selection) -> list[Partition]:
    """The partitions that a selection of positions means.

    Raises:
        ConfigError: the selection names no topic, or asks for something that only letters have; no partition of the consumer matches; the
            range is empty, or lies above every checkpoint.
    """
    _refuse_what_letters_have(selection)
    if selection.topic is None:
        raise ConfigError("Positions are selected by topic, and partition and range if need be: give --topic.")
    found = matching(head, selection)
    if not found:
        known = ", ".join(map(str, sorted(head.checkpoints))) or "none"
        raise ConfigError(f"Consumer {head.consumer!r} has no checkpoint in such a partition. It has: {known}.")
    _refuse_nothing(head, selection, found)
    _tell_of_undecided(head, selection.last, found)
    return found


def _refuse_what_letters_have(selection: Selection) -> None:
    plain = Selection(selection.consumer, selection.source, selection.topic, selection.partition, selection.first, selection.last)
    asked = [f.name for f in fields(plain) if f.name != "limit" and getattr(selection, f.name) != getattr(plain, f.name)]
    if asked:
        raise ConfigError(f"Positions of the log have no {', '.join(asked)}. Select them by source, topic, partition and range.")


def _refuse_nothing(head: Head, selection: Selection, found: Sequence[Partition]) -> None:
    first, last = selection.first, selection.last
    if first is not None and last is not None and first > last:
        raise ConfigError(f"There is no position from {first} to {last}.")
    if first is not None and all(first > head.checkpoints[p].sequence_number for p in found):
        ends = ", ".join(f"{p} at {head.checkpoints[p].sequence_number}" for p in found)
        raise ConfigError(f"Positions from {first} on were not decided yet: the stream brings them. The checkpoint stands: {ends}.")


def _tell_of_undecided(head: Head, last: int | None, found: Sequence[Partition]) -> None:
    for partition in found:
        point = head.checkpoints[partition].sequence_number
        if last is not None and last > point:
            log.warning("%s: positions %d to %d were not decided yet and are left out: the stream brings them", partition, point + 1, last)


def matching(head: Head, selection: Selection) -> list[Partition]:
    """The partitions with a checkpoint that fit."""
    wanted = {"source": selection.source, "topic": selection.topic, "partition": selection.partition}
    return [p for p in sorted(head.checkpoints) if all(v is None or getattr(p, n) == v for n, v in wanted.items())]


def coverage(store: Store, head: Head, partition: Partition, selection: Selection) -> Coverage:
    """What was decided about the positions of a partition that the selection's range names.

    Positions above the checkpoint are the stream's, and not part of it.
    """
    life = head.incarnations.get((partition.source, partition.topic), 0)
    mine = [b for b in store.batches(head.consumer, _window(partition, selection)).to_pylist() if _is_of(b, partition, life, head)]
    seen = _union(mine, "seen")
    lowest = seen.items[0].first if seen.items else head.passed.get(partition, -1) + 1
    first = lowest if selection.first is None else selection.first
    last = min(LAST if selection.last is None else selection.last, head.checkpoints[partition].sequence_number)
    asked = Ranges.of([Range(first, last)]) if first <= last else Ranges()
    duplicates, skipped = _union(mine, "duplicates") & asked, _union(mine, "skipped") & asked
    lettered = _lettered(store, head, partition, life, first, last) & asked
    processed = (seen & asked) - duplicates - skipped - lettered
    forgotten = _union([b for b in mine if b["batch_id"] == MERGED], "seen") & asked
    return Coverage(partition, asked, processed, lettered, duplicates, skipped, asked - seen, forgotten)


def _window(partition: Partition, selection: Selection) -> Wanted:
    """The records that the answer depends on: where no first position is named, the lowest one that was seen counts."""
    if selection.first is None:
        return Wanted(partition=partition)
    return Wanted(partition=partition, first=selection.first, last=LAST if selection.last is None else selection.last)


def _is_of(batch: dict[str, Any], partition: Partition, life: int, head: Head) -> bool:
    where = Partition(batch["source"], batch["topic"], batch["partition"])
    return where == partition and batch["incarnation"] == life and batch["generation"] >= head.keyspace


def _union(batches: Iterable[dict[str, Any]], name: str) -> Ranges:
    return Ranges.of((r["first"], r["last"]) for batch in batches for r in batch[name])


def _lettered(store: Store, head: Head, partition: Partition, life: int, first: int, last: int) -> Ranges:
    asked = Selection(head.consumer, *partition, first=first, last=last, limit=None)
    letters = store.letters(asked, ["sequence_number", "incarnation", "generation", "status"]).to_pylist()
    numbers = [x["sequence_number"] for x in letters if x["incarnation"] == life and x["generation"] >= head.keyspace]
    return Ranges.of((n, n) for n in numbers)
