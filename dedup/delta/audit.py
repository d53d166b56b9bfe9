"""The ledger as a whole: batch records; and dead letters as of its head."""

from __future__ import annotations

import datetime as dt
import functools
import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from checkpoint.position import Partition
from dedup.delta.events import EVENTS, LETTERS_SINK
from dedup.delta.header import Header, SinkFiles
from dedup.delta.ledger import BATCH, HEADER, LOG, Ledger, LedgerFile
from dedup.delta.letters import Letters
from dedup.delta.publish import Publisher
from dedup.delta.records import batch_table
from dedup.delta.rows import Rows, Several
from dedup.delta.state import ConsumerState
from dedup.delta.storage import filesystem
from dedup.wanted import ALL, Wanted


@dataclass(frozen=True)
class Log:
    """The section `log` of a ledger."""

    files: list[LedgerFile]
    rows: pa.Table

    def headers(self) -> list[Header]:
        """All headers in seq order, repeats included."""
        docs = self.rows.filter(pc.equal(self.rows["kind"], HEADER))["doc"].to_pylist()
        return sorted(map(Header.from_json, docs), key=lambda h: h.seq)

    def batches(self, wanted: Wanted = ALL) -> pa.Table:
        """ALL_BATCHES."""
        decided = self.rows.filter(wanted.decided(self.rows["seq"]))
        records = wanted.placed(decided.filter(pc.equal(decided["kind"], BATCH)))
        chosen = decided.filter(pc.is_in(decided["seq"], value_set=records["seq"].combine_chunks()))
        headers = {h.seq: h for h in Log(self.files, chosen).headers()}
        return batch_table((r for r in records.to_pylist() if r["seq"] in headers), headers)


def read_log(ledger: Ledger, after: int = 0) -> Log:
    """The log of the decisions after this one; empty where there is no ledger."""
    table = ledger.open()
    files = ledger.files(table) if table is not None else []
    return Log(
        files,
        ledger.read([f for f in files if f.section == LOG and f.last > after], ["kind", "source", "topic", "partition", "doc"], after),
    )


def letters(state: ConsumerState, publisher: Publisher) -> Letters:
    """The letters of a consumer as of its head: with those that are decided and not published, without those that a RESTORE took back.

    Raises PublicationStuck where files with letters that are decided and not published are gone.
    """
    return Letters(_events(state, publisher), functools.partial(_decided, state.ledger, state.header, not state.damage))


def _events(state: ConsumerState, publisher: Publisher) -> Rows:
    uri = state.letters_uri
    table, system = state.sinks.table(uri), filesystem(uri, publisher.options)
    parts: list[Rows] = [] if table is None else [table.to_pyarrow_dataset(filesystem=system, schema=EVENTS)]
    for seq in sorted(state.pending):
        header = state.decided[seq]
        waiting = [e for e in header.sinks if e.name == LETTERS_SINK and (table is None or not publisher.shows(table, header, e))]
        parts += [_unpublished(header, entry, publisher, system) for entry in waiting]
    if all(isinstance(part, ds.Dataset) for part in parts):
        whole: Rows = ds.dataset(parts) if parts else ds.dataset(EVENTS.empty_table())
        return whole
    return Several(EVENTS, tuple(parts))


def _unpublished(header: Header, entry: SinkFiles, publisher: Publisher, system: pafs.FileSystem) -> ds.Dataset:
    publisher.require_files(header, entry, entry.uri)
    place = filesystem(publisher.root, publisher.options) if entry.staged else system
    return ds.dataset([add.path for add in entry.adds], EVENTS, format="parquet", filesystem=place)


def _decided(ledger: Ledger, header: Header, sound: bool, events: pa.Table) -> pa.Table:
    """Those events whose decision is in the ledger; reads the log only where that cannot be told without."""
    if not events.num_rows:
        return events
    generations = pc.coalesce(events["decided_in"], events["generation"])
    first, last = header.generation_since, header.seq
    bounds, seqs = pc.min_max(generations).as_py(), pc.min_max(events["seq"]).as_py()
    now = header.head.generation
    if sound and bounds == {"min": now, "max": now} and first <= seqs["min"] and seqs["max"] <= last:
        return events
    told = [
        pc.and_(pc.equal(generations, generation), pc.is_in(events["seq"], pa.array(known, pa.int64())))
        for generation, known in _decisions(ledger).items()
    ]
    return events.filter(functools.reduce(pc.or_, told)) if told else events.slice(0, 0)


def _decisions(ledger: Ledger) -> dict[int, list[int]]:
    """All decisions in the ledger: generation -> seqs."""
    found: dict[int, list[int]] = {}
    for header in read_log(ledger).headers():
        found.setdefault(header.head.generation, []).append(header.seq)
    return found


def floors(state: ConsumerState, before: dt.date) -> dict[Partition, int]:
    """The highest position of each partition that was decided before that UTC day, in its present life."""
    log, lives = read_log(state.ledger), state.header.head.incarnations
    old = {h.seq for h in log.headers() if h.committed_at.date() < before and h.seq > state.header.keyspace_since}
    found: dict[Partition, int] = {}
    for row in log.rows.filter(pc.equal(log.rows["kind"], BATCH)).to_pylist():
        doc, partition = json.loads(row["doc"]), Partition(row["source"], row["topic"], row["partition"])
        if row["seq"] in old and doc["seen"] and doc["incarnation"] == lives.get((partition.source, partition.topic), 0):
            found[partition] = max(found.get(partition, -1), doc["seen"][-1][1])
    return found
