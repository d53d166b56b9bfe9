"""Positions read again from the log, and run where they were never delivered, as those of an accepted gap.

The log is read through what the user registered as `consumer.register_log_reader`. What the tables say about a range of positions decides:
processed, parked, duplicate, skipped, or never delivered. Called by letters.py (reprocess with from_log) and replay.py.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint import guards
from checkpoint.errors import ConfigError, DedupError, IncarnationChanged, PositionsMissing, SourceUnavailable, StoreError, command
from checkpoint.head import Head, Run
from checkpoint.position import KEY_ONLY, LAST, Partition, Range, Ranges
from checkpoint.records import RecordFilter, union
from deadletter import hiding
from deadletter.outage import with_replanning
from deadletter.parked import ParkedGroup, tell_parked
from deadletter.selection import Selection
from dedup.consumer import Consumer, open_batch
from dedup.core.envelope import check_positions
from dedup.core.index import Index
from dedup.core.letters import others_of
from dedup.core.store import Store, Transaction
from dedup.pipeline import commit, company
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.commit import Job, LogReader
from dedup.pipeline.report import Report
from dedup.reprocessing.options import ReprocessOptions

WINDOW = 10_000
"""Positions that are read at once. Those of them that were asked for are decided at once."""

log = logging.getLogger("dedup")

MERGED = -1
"""The batch id of a record that a purge has made of several (sql/postgres, merge_batches)."""


@dataclass
class Filled:
    """What became of absent positions."""

    absent: int = 0  # positions in the range that nothing is known of
    ran: Report = field(default_factory=Report)
    lost: Ranges = field(default_factory=Ranges)  # not in the log any more, recorded as LOST
    dry_run: bool = False


def fill(selection: Selection, consumer: Consumer, *, dry_run: bool = False, options: ReprocessOptions | None = None) -> Filled:
    """Run the absent positions of the selected range, up to the checkpoint, through the consumer's handler, as late events.

    Raises:
        ConfigError: no topic is selected, or what is no position; a limit or rate; nothing is registered with
            `consumer.register_log_reader`.
        IncarnationChanged: the log holds another event than was decided right beside absent positions: the topic was created again.
        PositionsMissing: the log does not have some of them any more; without `options.skip_missing`. The windows before theirs are done.

    Crash: each window of positions is decided or not; a second call goes on with what is absent then.
    """
    how, store = options or ReprocessOptions(), consumer.store
    if how.limit is not None or how.rate is not None:
        raise ConfigError("--limit and --rate are for letters. With --from-log give a shorter range; a second call continues after it.")
    head = consumer.known_head()
    covers = [coverage(store, head, p, selection) for p in partitions_of(head, selection)]
    filled, job = Filled(sum(len(c.absent) for c in covers), dry_run=dry_run), consumer.job()
    if filled.absent:
        require_reader(job)
    if not dry_run:
        run = f"from-log:{uuid.uuid4().hex}"
        for cover in covers:
            _fill_partition(job, cover, how, run, filled)
    return filled


def _fill_partition(job: Job, cover: Coverage, options: ReprocessOptions, run: str, filled: Filled) -> None:
    for number, asked in enumerate(windows(cover.absent)):
        missing = with_replanning(partial(_fill_window, job, cover.partition, asked, Run(run, 0, number), options, filled))
        if missing:
            reason = f"LOST {cover.partition} {missing}: not in the log any more" + (f"; {options.reason}" if options.reason else "")
            job.store.amend(job.name, lambda head: head, by=options.by, reason=reason)
            filled.lost |= missing
        options.on_progress(filled.ran.delivered, filled.absent)


def _fill_window(job: Job, partition: Partition, asked: Ranges, run: Run, options: ReprocessOptions, filled: Filled) -> Ranges:
    """Decide these positions in one transaction; returns those that the log has lost.

    The positions right beside them are read with them where they were decided: they tell a topic that was created again.
    """
    parked: tuple[ParkedGroup, ...] = ()
    with (
        company.taken(job.name),
        job.store.begin_letters(job.name, positions=True) as transaction,
        read_again(job, partition, _with_neighbours(asked, partition, transaction), transaction.head) as (rows, index),
    ):
        missing = lost(job, partition, asked - Ranges.of_numbers(index.numbers))
        if missing and not options.skip_missing:
            raise PositionsMissing(
                f"{partition} {missing} are not in the log. Run the others with --skip-missing, which records these as LOST."
            )
        if len(index):
            chunk = commit.Chunk(rows, index, run, transaction.head, stream=False)
            state, parked = commit.decide_chunk(chunk, job.store, transaction, job.policy.unwatched())
            filled.ran += Report.of(state[asked.contains(index.numbers)])
    tell_parked(job.policy.on_failure.on_parked, parked)
    return missing


def _with_neighbours(asked: Ranges, partition: Partition, transaction: Transaction) -> Ranges:
    """With the positions before and behind each range that were decided: as redeliveries they are compared with that, and dropped."""
    wide = Ranges.of_columns(asked.firsts - 1, asked.lasts + 1)
    seen = transaction.seen({partition: span_of(wide)}).get(partition, Ranges())
    return asked | (wide & seen)


def no_reader(consumer: str) -> str:
    """Why a consumer without a log reader cannot read positions again, and what to do."""
    return (
        f"Consumer {consumer!r} cannot read the log again. Register a function (source, topic, partition, first, last) -> "
        "DataFrame with @consumer.register_log_reader."
    )


def require_reader(job: Job) -> LogReader:
    """What is registered with `consumer.register_log_reader`. Raises ConfigError where nothing is."""
    if job.read_log is None:
        raise ConfigError(no_reader(job.name))
    return job.read_log


def read(job: Job, partition: Partition, span: Range) -> Any:
    """Whatever `consumer.register_log_reader` gives for these positions. Raises ConfigError where nothing is registered."""
    return require_reader(job)(*partition, span.first, span.last)


@contextmanager
def read_again(job: Job, partition: Partition, asked: Ranges, head: Head) -> Iterator[tuple[EvaluatedBatch, Index]]:
    """The events of these positions that the log still has, prepared like a batch of the stream, and their index.

    What lies between them is read with them, and is not in the index.
    """
    with open_batch(read(job, partition, span_of(asked)), job.scratch, collect=job.collect).evaluate(job.prepare(head)) as rows:
        guards.refuse_others(head, job.topic_ids([partition]))
        check_positions(rows.index)
        index = Index.of(rows.index, rows.payload_hashes)
        place = index.partitions.index(partition) if partition in index.partitions else -1
        inside = (index.place == place) & asked.contains(index.numbers)
        yield rows, index.only(np.flatnonzero(inside))


def lost(job: Job, partition: Partition, missing: Ranges) -> Ranges:
    """Those of these positions, which the log did not give, that are lost.

    A reader that says where its log begins (`first_kept`) tells them from what never was an event: markers, aborted messages, what was
    compacted. Of any other reader all count as lost.
    """
    first_kept = getattr(job.read_log, "first_kept", None)
    if first_kept is None or not missing:
        return missing
    border = first_kept(*partition)
    return missing & Ranges.of([(missing.items[0].first, border - 1)]) if border > missing.items[0].first else Ranges()


def windows(ranges: Ranges) -> Iterator[Ranges]:
    """The ranges in pieces that fit into memory: at most WINDOW positions lie from the first one of a piece to its last one.

    Each duplicate, each letter and each transaction of Kafka cuts a range in two: a read and a transaction for each would be far too many.
    """
    window: list[Range] = []
    for span in _cut(ranges):
        if window and span.last - window[0].first >= WINDOW:
            yield Ranges.of(window)
            window = []
        window.append(span)
    if window:
        yield Ranges.of(window)


def _cut(ranges: Ranges) -> Iterator[Range]:
    for span in ranges.items:
        for first in range(span.first, span.last + 1, WINDOW):
            yield Range(first, min(first + WINDOW - 1, span.last))


def span_of(ranges: Ranges) -> Range:
    """From the first position to the last one; `ranges` is not empty."""
    return Range(int(ranges.firsts[0]), int(ranges.lasts[-1]))


NOWHERE = "It keeps no more than a part of its event, and has no position at which the log could be read."
"""Why a letter without a position is not run that is masked, or was too large."""


@dataclass(frozen=True)
class WholeEvent:
    """What the log has of a letter's event."""

    body: bytes | None
    properties: Any
    columns: Mapping[str, Any]  # the input's other columns: name -> an array of one value


@dataclass
class Bodies:
    """What the log has of letters that keep only a part of their events; each by the letter's id."""

    whole: dict[str, WholeEvent] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # not in the log any more
    unread: dict[str, str] = field(default_factory=dict)  # could not be read, and why
    away: str = ""  # what a broker said that does not answer


def read_bodies(job: Job, letters: pa.Table, away: str = "") -> Bodies:
    """Read the events of these letters from the log again; their bodies are compared by length and SHA-256.

    Letters of positions next to each other are read at once. An error of one letter is kept with it, and the next one is read. A broker
    that does not answer is not asked again.

    Args:
        letters: LETTERS that are masked, or keep only the beginning of their bodies; of one life of one topic. No column of their
            contents is needed: those of many letters are large.
        away: what a broker has said that does not answer; then it is not asked.

    Raises:
        StoreError: whatever the store raises.
    """
    bodies, head = Bodies(away=away), job.store.head(job.name)
    for some in _side_by_side(letters.to_pylist()):
        _read_bodies(job, some, head, bodies)
    return bodies


def _side_by_side(letters: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """These letters, in position order, in runs between whose positions there is no other: nothing else has to be read with them."""
    some: list[Mapping[str, Any]] = []
    for letter in letters:
        last = some[-1] if some else letter
        near = letter["partition"] == last["partition"] and 0 <= letter["sequence_number"] - last["sequence_number"] <= 1
        if some and not near:
            yield some
            some = []
        some.append(letter)
    if some:
        yield some


def _read_bodies(job: Job, some: Sequence[Mapping[str, Any]], head: Head, bodies: Bodies) -> None:
    """Read the events of these letters at once; where that fails each by itself, so that an error is of the letter that has it."""
    found: dict[str, WholeEvent | None] = {}
    try:
        found = {} if bodies.away else _events_of(job, some, head)
    except (StoreError, MemoryError):
        raise
    except SourceUnavailable as error:
        bodies.away = str(error)
    except Exception as error:  # noqa: BLE001  the reader is the user's function
        if len(some) == 1:
            bodies.unread[some[0]["id"]] = _why_unread(error)
        else:
            for one in some:
                _read_bodies(job, [one], head, bodies)
        return
    bodies.unread |= {letter["id"]: bodies.away for letter in some if bodies.away}
    bodies.gone |= {letter for letter, event in found.items() if event is None}
    bodies.whole |= {letter: event for letter, event in found.items() if event is not None}


def _why_unread(error: Exception) -> str:
    return str(error) if isinstance(error, DedupError) else f"the log reader raised {type(error).__name__}: {error}"


def _events_of(job: Job, some: Sequence[Mapping[str, Any]], head: Head) -> dict[str, WholeEvent | None]:
    """Letter -> the whole event; None where the log does not have it any more."""
    if some[0]["partition"] == KEY_ONLY.partition:
        raise PositionsMissing(NOWHERE)
    partition = Partition(some[0]["source"], some[0]["topic"], some[0]["partition"])
    with read_again(job, partition, Ranges.of_numbers([letter["sequence_number"] for letter in some]), head) as (rows, index):
        return {letter["id"]: _event_of(job, letter, head, rows, index) for letter in some}


def _event_of(job: Job, letter: Mapping[str, Any], head: Head, rows: EvaluatedBatch, index: Index) -> WholeEvent | None:
    mine = index.order[(index.numbers == letter["sequence_number"]) & (index.parts == letter["part"])]
    if not len(mine):
        return None
    content = rows.content(mine[:1])
    body, others = content["body"][0].as_py(), others_of(job.policy.undecoded(content)).combine_chunks()
    if _is_of(letter, body):
        columns = dict(zip(others.column_names, others.columns, strict=True))
        return WholeEvent(body, content["properties"][0].as_py(), columns)
    if letter["incarnation"] == head.incarnations.get((letter["source"], letter["topic"]), 0):
        raise IncarnationChanged(_other_body(job.name, letter, body))
    return None


def _is_of(letter: Mapping[str, Any], body: bytes | None) -> bool:
    size = None if body is None else len(body)
    return bool(size == letter["body_size"] and hiding.digest(body) == letter["body_sha256"])


def _other_body(consumer: str, letter: Mapping[str, Any], body: bytes | None) -> str:
    source, topic = letter["source"], letter["topic"]
    there = "no body" if body is None else f"a body of {len(body)} bytes"
    return (
        f"Consumer {consumer!r}: the log holds another event at {source}/{topic}/{letter['partition']} {letter['sequence_number']} than "
        f"dead letter {letter['id'][:12]}, whose body has {letter['body_size']} bytes: there is {there}, with another SHA-256. Nothing was "
        f"changed. Correct what `consumer.register_log_reader` reads; or, if topic {topic!r} was deleted and created again: "
        f"{command('consumer', 'accept-incarnation', consumer, '--source', source, '--topic', topic)}."
    )


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
        raise ConfigError(f"Positions from {first} on were not decided yet: the stream brings them. The checkpoints: {ends}.")


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
    mine = [b for b in store.batches(head.consumer, _window(partition, selection)).to_pylist() if _is_letter_of(b, partition, life, head)]
    seen = union(mine, "seen")
    lowest = seen.items[0].first if seen.items else head.passed.get(partition, -1) + 1
    first = lowest if selection.first is None else selection.first
    last = min(LAST if selection.last is None else selection.last, head.checkpoints[partition].sequence_number)
    asked = Ranges.of([Range(first, last)]) if first <= last else Ranges()
    duplicates, skipped = union(mine, "duplicates") & asked, union(mine, "skipped") & asked
    lettered = _lettered(store, head, partition, life, first, last) & asked
    processed = (seen & asked) - duplicates - skipped - lettered
    forgotten = union([b for b in mine if b["batch_id"] == MERGED], "seen") & asked
    return Coverage(partition, asked, processed, lettered, duplicates, skipped, asked - seen, forgotten)


def _window(partition: Partition, selection: Selection) -> RecordFilter:
    """The records that the answer depends on: where no first position is named, the lowest one that was seen counts."""
    if selection.first is None:
        return RecordFilter(partition=partition)
    return RecordFilter(partition=partition, first=selection.first, last=LAST if selection.last is None else selection.last)


def _is_letter_of(batch: dict[str, Any], partition: Partition, life: int, head: Head) -> bool:
    where = Partition(batch["source"], batch["topic"], batch["partition"])
    return where == partition and batch["incarnation"] == life and batch["generation"] >= head.keyspace


def _lettered(store: Store, head: Head, partition: Partition, life: int, first: int, last: int) -> Ranges:
    asked = Selection(head.consumer, *partition, first=first, last=last, limit=None)
    letters = store.letters(asked, ["sequence_number", "incarnation", "generation", "status"]).to_pylist()
    numbers = [x["sequence_number"] for x in letters if x["incarnation"] == life and x["generation"] >= head.keyspace]
    return Ranges.of((n, n) for n in numbers)
