"""Proof from the tables: every position up to the checkpoint is accounted for exactly once, or the contradiction is named.

It reads batch records, checkpoints and letters; it cannot see whether a handler forgot to write a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow.compute as pc

from checkpoint import advice
from checkpoint.errors import PublicationStuck
from checkpoint.position import Partition, Ranges
from dedup.books import Books, LetterBooks
from dedup.index import KEY_ONLY
from dedup.proof import Proof, digest
from dedup.store import Head, Selection, Store
from dedup.wanted import Wanted


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


PAGE = 5_000
"""Decisions whose records are read at once."""

LETTER_PAGE = 100_000
"""Letters that are read at once, without their contents."""

LOOKS = 5
"""How often a consumer that goes on deciding is looked at again, so that records and letters are of one moment."""

_LETTER_COLUMNS = ["id", "generation", "source", "topic", "incarnation", "partition", "sequence_number"]


def verify(store: Store, consumer: str, since: Proof | None = None) -> VerifyReport:
    """Check one consumer. Reads only; does not need the stream to stop, but a running one may show as unpublished.

    Args:
        since: what was proven before: only decisions after it are read, and reservations and the order of letters are left alone.
            Where it does not hold any more, or does not add up with what came since, everything is checked: a state that was restored
            and went on may look like the one that was proven.
    """
    head = store.head(consumer)
    if since is None:
        return _checked(store, head, None)
    if since.holds(store, head):
        report = _checked(store, head, since)
        if report.ok:
            return report
    report = _checked(store, store.head(consumer), None)
    what = "is of another state" if report.ok else "does not add up with what is there now"
    report.notes.append(f"the proof of before {what}: everything was checked")
    return report


def _checked(store: Store, head: Head, known: Proof | None) -> VerifyReport:
    """What comes behind the proof, or everything."""
    consumer = head.consumer
    books = Books.going_on(known) if known else Books(consumer)
    try:
        letters, head, still = _read(store, books, head, known.seq if known else 0)
    except PublicationStuck as error:  # letters that are decided and lost: what is there cannot be added up
        return VerifyReport(consumer, [str(error)])
    report = VerifyReport(consumer, books.contradictions, counts=dict(books.counts), since=known.seq if known else 0)
    if still:
        report.contradictions.extend(letters.contradictions(books.lettered))
    else:
        report.notes.append("the consumer goes on deciding: letters were not counted")
    if known is None:
        report.contradictions.extend(store.problems(consumer))
    else:
        report.notes.append(
            f"decisions up to {known.seq} were proven before; reservations and the order of letters were not looked at again"
        )
    _check_coverage(report, head, books)
    if books.key_only:
        report.notes.append("key-only batches: coverage of positions is not provable")
    if not report.ok:
        return report
    return replace(report, proof=books.proof(head.keyspace, head.seq, digest(store, consumer, books.last)))


def _read(store: Store, books: Books, head: Head, after: int) -> tuple[LetterBooks, Head, bool]:
    """Take in all records and letters; the letters, the head that they are of, and whether they are of one moment."""
    for _ in range(LOOKS):
        for start in range(after, head.seq, PAGE):
            page = store.batches(head.consumer, Wanted(start, min(start + PAGE, head.seq)))
            books.add(page.filter(pc.greater_equal(page["generation"], head.keyspace)))
        letters = _letters(store, books, head)
        after, now = head.seq, store.head(head.consumer)
        if now.seq == after or now.keyspace != head.keyspace:
            return letters, head, now.seq == after
        head = now
    return letters, head, False


def _letters(store: Store, books: Books, head: Head) -> LetterBooks:
    found, last = LetterBooks(), None
    while True:
        page = store.letters(Selection(consumer=head.consumer, limit=LETTER_PAGE, after=last), _LETTER_COLUMNS)
        found = found.add(page.filter(pc.greater_equal(page["generation"], head.keyspace)), books.seen)
        if page.num_rows < LETTER_PAGE:
            return found
        last = page["id"][-1].as_py()


def _check_coverage(report: VerifyReport, head: Head, books: Books) -> None:
    """The checkpoint is the highest position seen, or where a person went on; what lies between, never delivered, is absent, and said."""
    lives = {p: life for (p, life) in books.seen if life == head.incarnations.get((p.source, p.topic), 0) and p != KEY_ONLY}
    for partition in sorted({*(p for p, life in lives.items() if books.seen[p, life]), *head.checkpoints}):
        life = head.incarnations.get((partition.source, partition.topic), 0)
        seen, point = books.seen.get((partition, life), Ranges()), head.checkpoints.get(partition)
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
        return [f"{partition}: checkpoint {checkpoint}, but no batch has seen anything. {advice.CHANGED}"]
    last = _last(seen)
    if checkpoint is None:
        return [f"{partition}: batches have seen up to {last}, but there is no checkpoint. {advice.ABOVE}"]
    if checkpoint > last:
        todo = advice.unseen(consumer, partition, Ranges.of([(last + 1, checkpoint)]))
        return [f"{partition}: positions {last + 1}-{checkpoint} lie below the checkpoint and no batch has seen them. {todo}"]
    if checkpoint < last:
        return [f"{partition}: positions {checkpoint + 1}-{last} were seen above the checkpoint. {advice.ABOVE}"]
    return []
