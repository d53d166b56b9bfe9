"""Proof from the tables: every position up to the checkpoint is accounted for exactly once, or the contradiction is named.

It reads batch records, checkpoints and letters, page by page and by columns; it cannot see whether a handler forgot to write a row.

What one `verify` has proven can be kept, so that the next one reads only what was decided since: in a file of the person who asks, which
proves nothing to anybody else. It is bound to the state by its last record: where that is not the same any more (purged, restored,
another database), everything is checked again. Called by `dedup verify`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, PublicationStuck, command
from checkpoint.head import Head
from checkpoint.position import KEY_ONLY, Ints, Partition, Ranges, overlapping
from checkpoint.records import RecordFilter
from deadletter.selection import Selection
from dedup.core.index import places
from dedup.core.store import Store

PAGE = 5_000
"""Decisions whose records are read at once."""

LETTER_PAGE = 100_000
"""Letters that are read at once, without their contents."""

LOOKS = 5
"""How often a consumer that goes on deciding is looked at again, so that records and letters are of one moment."""

_LETTER_COLUMNS = ["id", "generation", "source", "topic", "incarnation", "partition", "sequence_number"]

COUNTS = ("delivered", "redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered", "reserved")

_PARTS = ("redelivered", "processed", "duplicate", "skipped_rows", "dead_lettered")

MANY = 100
"""Contradictions of one kind that are told one by one."""

VERSION = 1

_CHANGED = "Somebody changed the record, or this is a defect: keep the tables as they are and report it."
_LETTERS = "Letters were deleted, changed or imported by hand: put them back, or note why they differ."
_ABOVE = "Nothing is lost: what comes again is dropped as a redelivery. If it stays so, somebody set the checkpoint back."

Life = tuple[Partition, int]
"""(partition, incarnation): positions mean something only within one."""


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
    since: int = 0  # decisions up to this one were proven before
    proof: Proof | None = None  # what is proven now, for the next time; None where something contradicts

    @property
    def ok(self) -> bool:
        """Whether the tables prove the bookkeeping."""
        return not self.contradictions


def verify(store: Store, consumer: str, since: Proof | None = None) -> VerifyReport:
    """Check one consumer. Reads only; does not need the stream to stop, but a running one may show as unpublished.

    Args:
        since: what was proven before: only decisions after it are read, and reservations and the order of letters are left alone.
            Where it does not hold any more, or does not add up with what came since, everything is checked: a state that was restored
            and went on may look like the one that was proven.
    """
    if since is None:
        return _everything(store, consumer)
    head = store.head(consumer)
    if since.holds(store, head):
        report = _checked(store, head, since)
        if report.ok:
            return report
    report = _everything(store, consumer)
    what = "is of another state" if report.ok else "does not add up with what is there now"
    report.notes.append(f"the proof of before {what}: everything was checked")
    return report


def _everything(store: Store, consumer: str) -> VerifyReport:
    """All decisions. What contradicts is looked at again: a purge beside it merges records of pages that were read into newer ones."""
    report = _checked(store, store.head(consumer), None)
    return report if report.ok else _checked(store, store.head(consumer), None)


def _checked(store: Store, head: Head, known: Proof | None) -> VerifyReport:
    """What comes behind the proof, or everything."""
    consumer = head.consumer
    tally = Tally.going_on(known) if known else Tally(consumer)
    try:
        letters, head, still = _read(store, tally, head, known.seq if known else 0)
    except PublicationStuck as error:  # letters that are decided and lost: what is there cannot be added up
        return VerifyReport(consumer, [str(error)])
    report = VerifyReport(consumer, tally.contradictions, counts=dict(tally.counts), since=known.seq if known else 0)
    if still:
        report.contradictions.extend(letters.contradictions(tally.lettered))
    else:
        report.notes.append("the consumer goes on deciding: letters were not counted")
    if known is None:
        report.contradictions.extend(store.problems(consumer))
    else:
        report.notes.append(
            f"decisions up to {known.seq} were proven before; reservations and the order of letters were not looked at again"
        )
    _check_coverage(report, head, tally)
    if tally.key_only:
        report.notes.append("key-only batches: coverage of positions is not provable")
    if not report.ok:
        return report
    return replace(report, proof=tally.proof(head.keyspace, head.seq, digest(store, consumer, tally.last)))


def _read(store: Store, tally: Tally, head: Head, after: int) -> tuple[LetterTally, Head, bool]:
    """Take in all records and letters; the letters, the head that they are of, and whether they are of one moment."""
    letters, read = LetterTally(), head
    for _ in range(LOOKS):
        for start in range(after, head.seq, PAGE):
            page = store.batches(head.consumer, RecordFilter(start, min(start + PAGE, head.seq)))
            tally.add(page.filter(pc.greater_equal(page["generation"], head.keyspace)))
        letters = _letters(store, tally, head)
        after, read, head = head.seq, head, store.head(head.consumer)
        if head.seq == after or head.keyspace != read.keyspace:
            break
    return letters, read, head.seq == after  # what was decided after the last look is left to the next call


def _letters(store: Store, tally: Tally, head: Head) -> LetterTally:
    found, last = LetterTally(), None
    while True:
        page = store.letters(Selection(consumer=head.consumer, limit=LETTER_PAGE, after=last), _LETTER_COLUMNS)
        found = found.add(page.filter(pc.greater_equal(page["generation"], head.keyspace)), tally.seen)
        if page.num_rows < LETTER_PAGE:
            return found
        last = page["id"][-1].as_py()


def _check_coverage(report: VerifyReport, head: Head, tally: Tally) -> None:
    """The checkpoint is the highest position seen, or where a person went on; what lies between, never delivered, is absent, and said."""
    lives = {p: life for (p, life) in tally.seen if life == head.incarnations.get((p.source, p.topic), 0) and p != KEY_ONLY}
    for partition in sorted({*(p for p, life in lives.items() if tally.seen[p, life]), *head.checkpoints}):
        life = head.incarnations.get((partition.source, partition.topic), 0)
        seen, point = tally.seen.get((partition, life), Ranges()), head.checkpoints.get(partition)
        number = point.sequence_number if point else None
        behind = _passed(head.passed.get(partition), seen)
        if behind is None:
            report.contradictions.extend(_check_checkpoint(report.consumer, partition, seen, number))
        else:
            report.contradictions.extend(_check_passed(partition, behind, number))
            report.notes.append(f"{partition}: a person went on behind {behind}; positions up to it that no batch has seen are absent")
        if seen or behind is not None:
            absent = seen.gaps(max(_last(seen), behind or 0)) if seen else Ranges()
            report.partitions.append(PartitionProof(partition, life, number, seen, absent))


def _last(seen: Ranges) -> int:
    return int(seen.lasts[-1])


def _passed(passed: int | None, seen: Ranges) -> int | None:
    """Where a person went on, if no batch has seen anything at or behind it since."""
    return None if passed is None or (seen and _last(seen) >= passed) else passed


def _check_passed(partition: Partition, passed: int, checkpoint: int | None) -> list[str]:
    return [] if checkpoint == passed else [f"{partition}: a person went on behind {passed}, but the checkpoint is {checkpoint}"]


def _check_checkpoint(consumer: str, partition: Partition, seen: Ranges, checkpoint: int | None) -> list[str]:
    if not seen:
        return [f"{partition}: checkpoint {checkpoint}, but no batch has seen anything. {_CHANGED}"]
    last = _last(seen)
    if checkpoint is None:
        return [f"{partition}: batches have seen up to {last}, but there is no checkpoint. {_ABOVE}"]
    if checkpoint > last:
        todo = _unseen(consumer, partition, Ranges.of([(last + 1, checkpoint)]))
        return [f"{partition}: positions {last + 1}-{checkpoint} lie below the checkpoint and no batch has seen them. {todo}"]
    if checkpoint < last:
        return [f"{partition}: positions {checkpoint + 1}-{last} were seen above the checkpoint. {_ABOVE}"]
    return []


@dataclass
class Tally:
    """What the records say so far."""

    consumer: str
    contradictions: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    lettered: int = 0  # dead letters at positions, by the records
    key_only: bool = False
    seen: dict[Life, Ranges] = field(default_factory=dict)
    last: int = 0  # the last decision with a record

    @classmethod
    def going_on(cls, proof: Proof) -> Tally:
        """After what was proven."""
        return cls(proof.consumer, [], Counter(proof.counts), proof.lettered, proof.key_only, dict(proof.seen), proof.anchor)

    def add(self, records: pa.Table) -> None:
        """A page of batch records, in the order of their decisions."""
        for name in COUNTS:
            self.counts[name] += pc.sum(records[name]).as_py() or 0
        at_positions = pc.not_equal(records["partition"], KEY_ONLY.partition)
        self.lettered += pc.sum(records["dead_lettered"].filter(at_positions)).as_py() or 0
        self.key_only |= bool(pc.sum(records["delivered"].filter(pc.invert(at_positions))).as_py())
        self.last = max(self.last, pc.max(records["seq"]).as_py() or 0)
        self._check_rows(records)
        self._check_outcomes(records)
        self._add_seen(records)

    def _check_rows(self, records: pa.Table) -> None:
        total = np.sum([records[name].to_numpy() for name in _PARTS], axis=0)
        for row in np.flatnonzero(total != records["delivered"].to_numpy())[:MANY].tolist():
            record = _record(records, row)
            self.contradictions.append(
                f"{_name(record)}: {record['delivered']} rows delivered, {int(total[row])} accounted for. {_CHANGED}"
            )

    def _check_outcomes(self, records: pa.Table) -> None:
        """Outcomes lie in what was seen."""
        lengths = [pc.list_value_length(records[name]).to_numpy() for name in ("duplicates", "skipped", "late")]
        for row in np.flatnonzero(np.sum(lengths, axis=0)).tolist():
            record = _record(records, row)
            for outcome in ("duplicates", "skipped", "late"):
                outside = _ranges(record[outcome]) - _ranges(record["seen"])
                if outside:
                    self.contradictions.append(f"{_name(record)}: {outcome} {outside} were not seen. {_CHANGED}")

    def _add_seen(self, records: pa.Table) -> None:
        """No position is seen twice."""
        parents, firsts, lasts = _flat(records["seen"])
        codes, lives = _lives(records)
        for code, life in enumerate(lives):
            mine = codes[parents] == code
            known = self.seen.get(life, Ranges())
            if overlapping(firsts[mine], lasts[mine]) or known.touched(firsts[mine], lasts[mine]).any():
                self._tell_twice(records, np.flatnonzero(codes == code), known)
            self.seen[life] = known | Ranges.of_columns(firsts[mine], lasts[mine])

    def _tell_twice(self, records: pa.Table, rows: Ints, seen: Ranges) -> None:
        for row in rows.tolist():
            record = _record(records, row)
            mine = _ranges(record["seen"])
            if twice := seen & mine:
                told = _seen_twice(self.consumer, _partition(record), twice)
                self.contradictions.append(f"{_name(record)}: {twice} were seen by an earlier batch as well. {told}")
            seen |= mine

    def proof(self, keyspace: int, seq: int, digest: str) -> Proof:
        """What has been looked at."""
        kept = {life: seen for life, seen in self.seen.items() if seen}
        return Proof(self.consumer, keyspace, seq, self.last, digest, dict(self.counts), self.lettered, self.key_only, kept)


@dataclass(frozen=True)
class LetterTally:
    """The letters so far: how many there are at positions, and where no batch has been."""

    kept: int = 0
    outside: dict[Partition, Ranges] = field(default_factory=dict)

    def add(self, letters: pa.Table, seen: dict[Life, Ranges]) -> LetterTally:
        """With a page of letters."""
        placed = letters.filter(pc.not_equal(letters["partition"], KEY_ONLY.partition))
        outside = dict(self.outside)
        codes, lives = _lives(placed)
        numbers = placed["sequence_number"].to_numpy()
        for code, life in enumerate(lives):
            mine = np.unique(numbers[codes == code])
            lost = mine[~seen.get(life, Ranges()).contains(mine)]
            if len(lost):
                outside[life[0]] = outside.get(life[0], Ranges()) | Ranges.of_numbers(lost)
        return replace(self, kept=self.kept + placed.num_rows, outside=outside)

    def contradictions(self, recorded: int) -> list[str]:
        """Every letter lies at a position that was seen, and there are as many as the records say."""
        found = [f"{partition}: dead letters at {where}, which no batch has seen. {_LETTERS}" for partition, where in self.outside.items()]
        if recorded != self.kept:
            found.append(f"batch records tell of {recorded} dead letters, there are {self.kept}. {_LETTERS}")
        return found


def _flat(ranges: pa.ChunkedArray) -> tuple[Ints, Ints, Ints]:
    """Row, first and last of each range of a column of RANGES."""
    whole = ranges.combine_chunks()
    pairs = pc.list_flatten(whole)
    return pc.list_parent_indices(whole).to_numpy(), pc.struct_field(pairs, "first").to_numpy(), pc.struct_field(pairs, "last").to_numpy()


def _lives(rows: pa.Table) -> tuple[Ints, list[Life]]:
    """The code of each row's life, and the lives by code."""
    partitions, place = places(rows)
    incarnations = rows["incarnation"].to_numpy()
    many = int(incarnations.max(initial=0)) + 1
    lives, codes = np.unique(place * many + incarnations, return_inverse=True)
    return codes, [(partitions[life // many], life % many) for life in lives.tolist()]


def _record(records: pa.Table, row: int) -> dict[str, Any]:
    return dict(records.slice(row, 1).to_pylist()[0])


def _partition(row: dict[str, Any]) -> Partition:
    return Partition(row["source"], row["topic"], row["partition"])


def _ranges(items: list[dict[str, int]]) -> Ranges:
    return Ranges.of((r["first"], r["last"]) for r in items)


def _name(record: dict[str, Any]) -> str:
    return f"batch {record['batch_id']} chunk {record['chunk']} of query {record['query_id']}, {_partition(record)}"


@dataclass(frozen=True)
class Proof:
    """Everything up to one decision adds up."""

    consumer: str
    keyspace: int
    seq: int  # the last decision that was looked at
    anchor: int  # the last one of them with a batch record
    digest: str  # of that record
    counts: dict[str, int] = field(default_factory=dict)  # as in the report, from the beginning
    lettered: int = 0  # of the counts, dead letters at positions
    key_only: bool = False
    seen: dict[Life, Ranges] = field(default_factory=dict)

    def holds(self, store: Store, head: Head) -> bool:
        """Whether the state is the one that was proven, or what became of it since."""
        same = (self.consumer, self.keyspace) == (head.consumer, head.keyspace) and self.seq <= head.seq
        return same and digest(store, self.consumer, self.anchor) == self.digest


def digest(store: Store, consumer: str, seq: int) -> str:
    """Of the batch records of one decision."""
    rows = store.batches(consumer, RecordFilter(after=seq - 1, until=seq)).to_pylist()
    return hashlib.sha256(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest()


def load(path: Path) -> dict[str, Proof]:
    """The proofs of a file, by consumer; none where there is no file. Raises ConfigError where it is no such file, or can be none."""
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ConfigError(f"{path} {why}. Name a file for the proofs.")
    if not path.exists():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["version"] != VERSION:
            return {}
        return {p["consumer"]: _proof(p) for p in told["proofs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of proofs ({error}). Name another one; `dedup verify --proof` writes it.") from error


def _proof(told: dict[str, Any]) -> Proof:
    seen = {
        (Partition(source, topic, partition), life): Ranges(firsts, lasts) for source, topic, partition, life, firsts, lasts in told["seen"]
    }
    return Proof(**{**told, "seen": seen})


def save(path: Path, proofs: dict[str, Proof]) -> None:
    """Write them. Raises ConfigError where that is not possible. Crash: the old file is there, or the new one."""
    told = [
        {**vars(proof), "seen": [[*p, life, s.firsts.tolist(), s.lasts.tolist()] for (p, life), s in sorted(proof.seen.items())]}
        for proof in proofs.values()
    ]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"version": VERSION, "proofs": told}), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"The proofs cannot be written to {path}: {error.strerror}. Name another file.") from error


def _where(partition: Partition, ranges: Ranges) -> list[object]:
    first, last = ranges.items[0].first, ranges.items[-1].last
    return ["--topic", partition.topic, "--partition", partition.partition, "--from", first, "--to", last]


def _seen_twice(consumer: str, partition: Partition, ranges: Ranges) -> str:
    """For positions that two batches decided."""
    replay = command("consumer", "replay", f"MODULE:{consumer}", *_where(partition, ranges))
    return f"Compare the sink at these positions; {replay} replaces their effect."


def _unseen(consumer: str, partition: Partition, ranges: Ranges) -> str:
    """For positions that nobody decided."""
    return (
        f"{command('dead-letter', 'reprocess', f'MODULE:{consumer}', '--from-log', *_where(partition, ranges))}"
        " runs those that the log still has."
    )
