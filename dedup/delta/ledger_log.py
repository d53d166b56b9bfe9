"""The log of a ledger, read as a whole or backwards: its batch records, and how far its decisions reach in the logs of the topics.

A day of it may be more than memory has room for, so it is read a day or a portion at a time. Called by verify and the upkeep.
"""

from __future__ import annotations

import bisect
import datetime as dt
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.position import Partition
from checkpoint.records import BATCHES, RecordFilter
from dedup.core.retention import ACTIVE, NEVER, read_to
from dedup.delta.ledger import BATCH, HEADER, LOG, LOG_COLUMNS, Header, Ledger, LedgerFile
from dedup.delta.ledger_files import Portion, portions
from dedup.delta.state import ConsumerState

PORTION = 4000
"""Decisions whose log is in memory at once where a day of it may be too much."""

RECORDS = 1000
"""Batch records that are Python objects at once."""

FUTURE = dt.datetime.max.replace(tzinfo=dt.UTC)

_COLUMNS = ("source", "topic", "partition")
_RANGES = ("seen", "duplicates", "skipped", "late")

ALL_BATCHES = pa.schema(
    [
        *BATCHES,
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""What `Store.batches` returns."""


def batch_docs(batches: pa.Table | None) -> Iterator[tuple[str, str, int, str]]:
    """(source, topic, partition, document) of each batch record; ranges become pairs."""
    for row in batches.to_pylist() if batches is not None else ():
        doc: dict[str, Any] = {k: v for k, v in row.items() if k not in _COLUMNS}
        doc |= {k: [[r["first"], r["last"]] for r in doc[k]] for k in _RANGES}
        yield row["source"], row["topic"], row["partition"], json.dumps(doc, separators=(",", ":"))


def batch_table(rows: Iterable[Mapping[str, Any]], headers: Mapping[int, Header]) -> pa.Table:
    """ALL_BATCHES from ledger rows of kind `batch` and the headers of their decisions, in seq order."""
    found = []
    for row in sorted(rows, key=lambda r: (r["seq"], r["source"], r["topic"], r["partition"])):
        doc, header = json.loads(row["doc"]), headers[row["seq"]]
        doc |= {k: [{"first": first, "last": last} for first, last in doc[k]] for k in _RANGES}
        told = {"generation": header.head.generation, "epoch": header.head.epoch, "seq": header.seq, "committed_at": header.committed_at}
        found.append({**{c: row[c] for c in _COLUMNS}, **doc, **told})
    return pa.Table.from_pylist(found, schema=ALL_BATCHES)


@dataclass(frozen=True)
class LedgerLog:
    """Rows of the section `log` of a ledger: LOG_COLUMNS and seq."""

    rows: pa.Table

    def each_header(self) -> Iterator[Header]:
        """One after the other, repeats included, in no order: a header takes some 10 kB, and its document a third of that."""
        for docs in self.rows.filter(pc.equal(self.rows["kind"], HEADER))["doc"].chunks:
            yield from (Header.from_json(doc.as_py()) for doc in docs)

    def recorded(self) -> Counter[int]:
        """By decision, how many keys its batch records say that it reserved."""
        found = Counter[int]()
        for row in self.each_record():
            found[row["seq"]] += json.loads(row["doc"])["reserved"]
        return found

    def each_record(self) -> Iterator[dict[str, Any]]:
        """Rows of batch records; few of them at a time are Python objects, which take many times as much memory."""
        for rows in self.rows.filter(pc.equal(self.rows["kind"], BATCH)).to_batches(max_chunksize=RECORDS):
            yield from rows.to_pylist()

    def last_batch(self) -> int:
        """The last decision with a batch record; 0 for none."""
        return pc.max(self.rows.filter(pc.equal(self.rows["kind"], BATCH))["seq"]).as_py() or 0

    def times(self, seqs: Sequence[int | None]) -> dict[int, dt.datetime]:
        """When these decisions were committed, as far as their headers are here."""
        chosen = self.rows.filter(pc.is_in(self.rows["seq"], pa.array(seqs, pa.int64())))
        return {header.seq: header.committed_at for header in LedgerLog(chosen).each_header()}

    def batches(self, record_filter: RecordFilter) -> pa.Table:
        """ALL_BATCHES."""
        decided = self.rows.filter(record_filter.decided(self.rows["seq"]))
        records = record_filter.placed(decided.filter(pc.equal(decided["kind"], BATCH)))
        chosen = decided.filter(pc.is_in(decided["seq"], value_set=records["seq"].combine_chunks()))
        headers = {h.seq: h for h in LedgerLog(chosen).each_header()}
        return batch_table((r for r in records.to_pylist() if r["seq"] in headers), headers)


def batches(ledger: Ledger, record_filter: RecordFilter) -> pa.Table:
    """ALL_BATCHES; of the log it reads the files that may have such decisions. Empty where there is no ledger."""
    wanted = [f for f in ledger.files_now() if f.section == LOG and f.last > record_filter.after and f.first <= record_filter.until]
    return LedgerLog(ledger.read(wanted, LOG_COLUMNS, record_filter.after)).batches(record_filter)


def by_day(ledger: Ledger, files: Sequence[LedgerFile], after: int = 0) -> Iterator[tuple[dt.date, LedgerLog]]:
    """The log of the decisions behind this one, a UTC day at a time: of all days there may be more than memory has room for."""
    chosen = [f for f in files if f.section == LOG and f.last > after]
    for day in sorted({f.day for f in chosen}):
        yield day, LedgerLog(ledger.read([f for f in chosen if f.day == day], LOG_COLUMNS, after))


def floors(state: ConsumerState, before: dt.date) -> dict[Partition, int]:
    """The highest position of each partition that was decided before that UTC day, in its present life.

    Without those that an earlier purge knew: it has put them into the head. So each day of the log is read once in its life.
    """
    since = min(map(dt.date.fromisoformat, filter(None, (state.header.purged_before, state.header.purged_on))), default=dt.date.min)
    files = [f for f in state.ledger.files_now() if f.section == LOG and since <= f.day < before]
    found: dict[Partition, int] = {}
    for portion in portions(files, state.header.keyspace_since, PORTION):
        for partition, (last, _) in _highest(state, _log(state, portion), late=True).items():
            found[partition] = max(last, found.get(partition, last))
    return found


def reached(state: ConsumerState) -> dt.datetime | None:
    """The time of the log up to which everything is decided; without positions, when the last batch was. None where nothing was decided.

    Reads the log backwards, as far as `read_to` needs it: partitions that had nothing in its last hour are not looked for.
    """
    points, newest = state.header.head.checkpoints, dict[Partition, dt.datetime]()
    batch: dt.datetime | None = None
    before = None if state.header.head.batch_ended and state.header.members is None else NEVER
    for portion in portions([f for f in state.ledger.files_now() if f.section == LOG], 0, PORTION):
        log = _log(state, portion)
        found, last = _highest(state, log, late=False), log.last_batch()
        times = log.times([last, pc.min(log.rows["seq"]).as_py(), *(seq for _, seq in found.values())])
        batch = batch or times.get(last)
        newest = {p: times[seq] for p, (_, seq) in found.items() if seq in times} | newest
        if before == NEVER and newest:
            before = _last_before(state, log, max(newest.values()) - ACTIVE)
        older = dt.datetime.combine(portion.day, dt.time(), dt.UTC) if portion.last else min(times.values(), default=FUTURE)
        if (newest and before != NEVER and older <= max(newest.values()) - ACTIVE) or (batch and not points):
            break
    return read_to(points, newest, before) if newest else batch


def _last_before(state: ConsumerState, log: LedgerLog, limit: dt.datetime) -> dt.datetime:
    """When the newest decision before this time was made, of no batch that is decided in part; NEVER where none is here."""
    head = state.header.head
    own = None if head.batch_ended else (head.query_id, head.batch_id)
    docs = ((row["seq"], json.loads(row["doc"])) for row in log.each_record())
    seqs = sorted({seq for seq, doc in docs if (doc["query_id"], doc["batch_id"]) != own})

    def time(seq: int) -> dt.datetime:
        return log.times([seq]).get(seq, FUTURE)

    place = bisect.bisect_left(seqs, True, key=lambda seq: time(seq) >= limit)
    return time(seqs[place - 1]) if place else NEVER


def _log(state: ConsumerState, portion: Portion) -> LedgerLog:
    return LedgerLog(state.ledger.read(portion.files, LOG_COLUMNS, *portion.span))


def _highest(state: ConsumerState, log: LedgerLog, *, late: bool) -> dict[Partition, tuple[int, int]]:
    """Partition -> the highest position that a batch record of its present life has, and the decision.

    Args:
        late: also of records whose highest position is late: the consumer stood further on already.
    """
    lives, found = state.header.head.incarnations, dict[Partition, tuple[int, int]]()
    for row in log.each_record():
        doc, partition = json.loads(row["doc"]), Partition(row["source"], row["topic"], row["partition"])
        if not doc["seen"] or doc["incarnation"] != lives.get((partition.source, partition.topic), 0):
            continue
        one = doc["seen"][-1][1], row["seq"]
        if late or not doc["late"] or doc["late"][-1][1] < one[0]:
            found[partition] = max(one, found.get(partition, one))
    return found
