"""The ledger as a whole: batch records, dead letter events, and contradictions.

Reads everything, so it is for people and `verify`, not for the running consumer.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from checkpoint.errors import DedupError
from checkpoint.position import Partition
from dedup.delta.events import EVENTS, LETTERS_SINK
from dedup.delta.header import Header, SinkFiles
from dedup.delta.keyindex import KeyIndex
from dedup.delta.ledger import BATCH, HEADER, KEYS, LOG, Ledger, LedgerFile
from dedup.delta.letters import Letters
from dedup.delta.publish import Publisher
from dedup.delta.records import batch_table
from dedup.delta.sink import require_same, require_unrestored
from dedup.delta.state import ConsumerState
from dedup.delta.storage import filesystem


@dataclass(frozen=True)
class Log:
    """The section `log` of a ledger."""

    files: list[LedgerFile]
    rows: pa.Table

    def headers(self) -> list[Header]:
        """All headers in seq order, repeats included."""
        docs = self.rows.filter(pc.equal(self.rows["kind"], HEADER))["doc"].to_pylist()
        return sorted(map(Header.from_json, docs), key=lambda h: h.seq)

    def batches(self) -> pa.Table:
        """ALL_BATCHES."""
        headers = {h.seq: h for h in self.headers()}
        rows = self.rows.filter(pc.equal(self.rows["kind"], BATCH)).to_pylist()
        return batch_table((r for r in rows if r["seq"] in headers), headers)


def read_log(ledger: Ledger) -> Log:
    """All of the log; empty where there is no ledger."""
    table = ledger.open()
    files = ledger.files(table) if table is not None else []
    return Log(files, ledger.read([f for f in files if f.section == LOG], ["kind", "source", "topic", "partition", "doc"], 0))


def letters(state: ConsumerState, publisher: Publisher) -> Letters:
    """The letters of a consumer as of its head: with those that are decided and not published, without those that a RESTORE took back."""
    return Letters(_events(state, publisher), functools.partial(_decided, state))


def _events(state: ConsumerState, publisher: Publisher) -> ds.Dataset:
    uri = state.letters_uri
    table, system = state.sinks.table(uri), filesystem(uri, publisher.options)
    parts: list[ds.Dataset] = [] if table is None else [table.to_pyarrow_dataset(filesystem=system, schema=EVENTS)]
    for seq in sorted(state.pending):
        header = state.decided[seq]
        done = table.transaction_version(publisher.app(header, LETTERS_SINK)) if table is not None else None
        if done is None or done < seq:
            paths = [add.path for entry in header.sinks if entry.name == LETTERS_SINK for add in entry.adds]
            parts.append(ds.dataset(paths, EVENTS, format="parquet", filesystem=system))
    return ds.dataset(parts) if parts else ds.dataset(EVENTS.empty_table())


def _decided(state: ConsumerState, events: pa.Table) -> pa.Table:
    """Those events whose decision is in the ledger; reads the log only where that cannot be told without."""
    if not events.num_rows:
        return events
    generations = pc.coalesce(events["decided_in"], events["generation"])
    first, last = state.header.generation_since, state.header.seq
    bounds, seqs = pc.min_max(generations).as_py(), pc.min_max(events["seq"]).as_py()
    now = state.header.head.generation
    if not state.damage and bounds == {"min": now, "max": now} and first <= seqs["min"] and seqs["max"] <= last:
        return events
    told = [
        pc.and_(pc.equal(generations, generation), pc.is_in(events["seq"], pa.array(known, pa.int64())))
        for generation, known in _decisions(state).items()
    ]
    return events.filter(functools.reduce(pc.or_, told)) if told else events.slice(0, 0)


def _decisions(state: ConsumerState) -> dict[int, list[int]]:
    """All decisions in the ledger: generation -> seqs."""
    found: dict[int, list[int]] = {}
    for header in read_log(state.ledger).headers():
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


def problems(state: ConsumerState, publisher: Publisher) -> list[str]:
    """Sentences, one per contradiction, each naming decisions or sinks."""
    if state.table is None:
        return []
    found = [state.damage] if state.damage else []
    log = read_log(state.ledger)
    headers = log.headers()
    found += _numbering(headers)
    found += _reservations(state, log, headers)
    found += _publications(state, publisher)
    return found


def _numbering(headers: list[Header]) -> Iterator[str]:
    counts = Counter(h.seq for h in headers)
    last = max(counts, default=0)
    if missing := [s for s in range(1, last + 1) if s not in counts]:
        yield f"decisions {missing[:10]} have no header"
    if repeated := [s for s, n in counts.items() if n > 1]:
        yield f"decisions {repeated[:10]} have more than one header"
    for before, after in itertools.pairwise(headers):
        if after.head.epoch < before.head.epoch:
            yield f"decision {after.seq} has epoch {after.head.epoch}, an older one than decision {before.seq} ({before.head.epoch})"


def _reservations(state: ConsumerState, log: Log, headers: list[Header]) -> Iterator[str]:
    """Reservation rows against what headers and batch records say; days that were purged cannot be counted."""
    rows: Counter[int] = Counter()
    index, kept = KeyIndex(), 0
    for file in (f for f in log.files if f.section != LOG):
        table = state.ledger.read([file], ["key", "payload_hash"], 0)
        rows.update(dict(zip(*(c.to_pylist() for c in pc.value_counts(table["seq"]).flatten()), strict=True)))
        current = table.filter(pc.greater(table["seq"], state.header.keyspace_since))
        kept += current.num_rows
        index.add(current["key"], current["payload_hash"].to_numpy(), held=file.section != KEYS)
    if kept != len(index):
        yield f"{kept - len(index)} keys are reserved more than once"
    purged = state.header.purged_before
    recorded = _recorded(log)
    for header in headers:
        counted = purged is None or header.committed_at.date().isoformat() >= purged
        if counted and rows[header.seq] != header.reserved:
            yield f"decision {header.seq} reserved {header.reserved} keys and the ledger has {rows[header.seq]} rows of it"
        if header.kind == "batch" and recorded[header.seq] != header.reserved:
            yield f"decision {header.seq} reserved {header.reserved} keys and its batch records say {recorded[header.seq]}"


def _recorded(log: Log) -> Counter[int]:
    found: Counter[int] = Counter()
    for row in log.rows.filter(pc.equal(log.rows["kind"], BATCH)).to_pylist():
        found[row["seq"]] += json.loads(row["doc"])["reserved"]
    return found


def _publications(state: ConsumerState, publisher: Publisher) -> Iterator[str]:
    for name, mark in sorted(state.marks.items()):
        try:
            require_same(state.sinks.open(name, mark.uri), state.ledger.consumer, mark.table_id, mark)
        except DedupError as error:
            yield str(error)
    for seq in sorted(state.pending):
        header = state.decided[seq]
        for entry in header.sinks:
            table = state.sinks.table(entry.uri)
            done = table.transaction_version(publisher.app(header, entry.name)) if table is not None else None
            if done is None or done < seq:
                yield f"decision {seq} ({entry.rows} rows) is not published to {entry.name!r}; run `dedup publish {state.ledger.consumer}`"
            if table is not None and entry.name not in state.marks:
                yield from _unmarked(state, seq, entry, done=done is not None and done >= seq)


def _unmarked(state: ConsumerState, seq: int, entry: SinkFiles, *, done: bool) -> Iterator[str]:
    """What is wrong with a sink of which no header tells yet how far it is."""
    consumer = state.ledger.consumer
    try:
        sink = state.sinks.open(entry.name, entry.uri)
        require_same(sink, consumer, entry.table_id, None)
        if done:
            require_unrestored(sink, consumer, seq, entry)
    except DedupError as error:
        yield str(error)
