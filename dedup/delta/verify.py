"""Contradictions inside the ledger, and between the ledger and the sinks.

It also reads the ledger as a whole: its batch records, and dead letters as of its head. It reads everything, so it serves people, `verify`
and transactions that change letters, but no batch. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from checkpoint.errors import DedupError, PublicationStuck, StoreUnavailable, command
from checkpoint.position import Partition
from checkpoint.records import ALL, RecordFilter
from deadletter.selection import Selection
from dedup.core.retention import ACTIVE, read_to
from dedup.delta import tables
from dedup.delta.commit import SinkPublisher
from dedup.delta.files import Add
from dedup.delta.keys import KeyIndex
from dedup.delta.ledger import (
    BATCH,
    DELETE,
    HEADER,
    HELD,
    KEYS,
    LETTERS_SINK,
    LOG,
    LOG_COLUMNS,
    Header,
    Ledger,
    LedgerFile,
    Mark,
    SinkFiles,
    batch_table,
)
from dedup.delta.letters import EVENTS, EventRows, Letters, Several
from dedup.delta.messages import repeated_numbers
from dedup.delta.reservations import freed, reservations
from dedup.delta.restores import require_same, require_unrestored
from dedup.delta.sequences import PLACE, WAITING, chained, lasts_of
from dedup.delta.state import ConsumerState
from dedup.delta.storage import absolute, filesystem, missing
from dedup.delta.tables import seq_of, seq_of_part

LOOKS = 3
"""At a state that others change meanwhile."""

_CHAIN = [*PLACE, "consumer", "source", "topic", "partition", "sequence", "status", "blocked_by", "kind"]


def problems(state: ConsumerState, publisher: SinkPublisher) -> list[str]:
    """Sentences, one per contradiction, each naming decisions, letters or sinks."""
    if state.table is None:
        return []
    if (refused := state.deletion) is not None:
        return [str(refused)]
    found = [state.damage] if state.damage else []
    # Of the same head as all else: others go on deciding.
    log, kept = _log_of(state.ledger, state.ledger.files(state.table), 0, lambda _: True), letters_now(state, publisher)
    headers = log.headers()
    found += _numbering(headers)
    found += _reservations(state, log, headers)
    found += _accounts(state, log, headers, kept)
    found += _order(state, kept)
    found += _holders(state, kept)
    found += _publications(state, publisher)
    found += _sinks(state, publisher, headers)
    found += _messages(state)
    return list(dict.fromkeys(found))


def _numbering(headers: list[Header]) -> Iterator[str]:
    counts = Counter(h.seq for h in headers)
    # Of a consumer that was deleted, the decisions before that are gone.
    if missing := sorted({h.after for h in headers if h.kind != DELETE} - {*counts, 0}):
        yield f"decisions {missing[:10]} have no header"
    if repeated := [s for s, n in counts.items() if n > 1]:
        yield f"decisions {repeated[:10]} have more than one header"
    attempts = {h.seq: h.attempt for h in headers}
    if strange := [h.seq for h in headers if h.follows != attempts.get(h.after, h.follows)]:
        yield f"decisions {strange[:10]} were made after another decision than the one before them in the ledger"
    for before, after in itertools.pairwise(headers):
        if after.head.epoch < before.head.epoch:
            yield f"decision {after.seq} has epoch {after.head.epoch}, an older one than decision {before.seq} ({before.head.epoch})"


def _reservations(state: ConsumerState, log: LedgerLog, headers: list[Header]) -> Iterator[str]:
    """Reservation rows against what headers say; days that were purged cannot be counted."""
    rows: Counter[int] = Counter()
    for file in (f for f in log.files if f.section in (KEYS, HELD)):
        counts = pc.value_counts(state.ledger.read([file], [], 0)["seq"]).flatten()
        rows.update(dict(zip(*(c.to_pylist() for c in counts), strict=True)))
    for header in headers:
        told = header.reserved + header.freed
        if _counted(state, header) and rows[header.seq] != told:
            did = f"reserved {header.reserved} keys" + (f" and freed {header.freed}" if header.freed else "")
            yield f"decision {header.seq} {did} and the ledger has {rows[header.seq]} rows of it"
    index, kept, unknown = KeyIndex(), 0, 0
    since = state.header.keyspace_since
    for table, days in reservations(state.ledger, log.files, since, freed(state.ledger, log.files, since), state.header):
        kept += table.num_rows
        index.add(table["key"], table["payload_hash"].to_numpy(), days)
        unknown += int(np.count_nonzero(~state.probe(table["key"])[0]))
    if kept != len(index):
        yield f"{kept - len(index)} keys are reserved more than once"
    if unknown or (state.header.purged_before is None and len(index) != state.reserved()):
        yield (
            f"the ledger has {len(index)} reserved keys; this process knows {state.reserved()}, and {unknown} of the ledger's are unknown. "
            f"Stop the consumer, delete the folder {state.keys.folder.path}, and start it again"
        )


def _counted(state: ConsumerState, header: Header) -> bool:
    purged = state.header.purged_before
    return purged is None or header.committed_at.date().isoformat() >= purged


def _accounts(state: ConsumerState, log: LedgerLog, headers: list[Header], kept: Letters) -> Iterator[str]:
    """What a decision did to keys against what batch records and the history of letters say it did."""
    told = _recorded(log)
    told.update(kept.reserved())
    lost = {seq for header in headers for seq, name in header.dropped if name == LETTERS_SINK}
    for header in headers:
        did = header.reserved - header.freed
        if header.kind in ("batch", "letters") and header.seq not in lost and told[header.seq] != did:
            yield f"decision {header.seq} reserved {did} keys more than it freed, and batch records and letters say {told[header.seq]}"


def _order(state: ConsumerState, kept: Letters) -> Iterator[str]:
    """Each sequence's letters against each other, and against what the ledger says is blocked."""
    rows = kept.select(Selection(statuses=WAITING, limit=None), _CHAIN)
    rows = rows.filter(rows["sequence"].is_valid()).sort_by([("id", "ascending")])
    chain = chained(rows)
    same = chain.sort_by([("id", "ascending")])
    for name in ("status", "blocked_by"):
        wrong = rows.filter(pc.not_equal(pc.fill_null(rows[name], ""), pc.fill_null(same[name], "")))["id"].to_pylist()
        if wrong:
            yield f"{len(wrong)} letters have another {name} than their place in their sequence asks for: {', '.join(wrong[:3])}"
    blocked = state.sequences.all()
    names = pa.chunked_array(
        [*rows["sequence"].cast(pa.binary()).chunks, *blocked["sequence"].cast(pa.binary()).chunks], pa.binary()
    ).unique()
    want = {row["sequence"]: row["letter"] for row in lasts_of(chain, names.cast(pa.binary(16))).to_pylist()}
    have = {row["sequence"]: row["letter"] for row in blocked.to_pylist()}
    if wrong := [s.hex() for s, letter in want.items() if have.get(s) != letter]:
        yield f"{len(wrong)} sequences are blocked by another letter than the ledger says, or by none: {', '.join(wrong[:3])}"


def _holders(state: ConsumerState, kept: Letters) -> Iterator[str]:
    """Every held key is reserved."""
    if state.header.purged_before is not None:
        return
    rows = kept.select(Selection(limit=None), ["id", "generation", "key", "holds_key"])
    holds = pc.and_(rows["holds_key"], pc.and_(rows["key"].is_valid(), pc.greater_equal(rows["generation"], state.header.head.keyspace)))
    held = rows.filter(holds)
    known = pa.array(state.probe(held["key"])[0])
    if free := held.filter(pc.invert(known))["id"].to_pylist():
        yield f"{len(free)} letters hold a key that is not reserved: {', '.join(free[:3])}"


def _recorded(log: LedgerLog) -> Counter[int]:
    found: Counter[int] = Counter()
    for row in log.rows.filter(pc.equal(log.rows["kind"], BATCH)).to_pylist():
        found[row["seq"]] += json.loads(row["doc"])["reserved"]
    return found


def require_letters(state: ConsumerState, publisher: SinkPublisher) -> None:
    """Raise StoreRestored or PublicationStuck where letters that were decided may be missing."""
    state.require_sound()
    for name, mark in state.marks.items():
        if name == LETTERS_SINK:
            _require_published(state, name, mark)
    for seq in sorted(state.pending):
        header = state.decided[seq]
        for entry in (entry for entry in header.sinks if entry.name == LETTERS_SINK):
            if publisher.is_done(header, entry):
                _require_known(state, publisher, header, entry)
            else:
                publisher.require_files(header, entry, state.letters_uri)


def _require_published(state: ConsumerState, name: str, mark: Mark) -> None:
    sink = state.sinks.open(name, state.here(name, mark.uri))
    require_same(state, sink, mark.table_id, mark)
    state.require_in_step(name, sink.table)


def _require_known(state: ConsumerState, publisher: SinkPublisher, header: Header, entry: SinkFiles) -> None:
    """What no header tells of yet."""
    sink = state.sinks.open(entry.name, state.place_of(entry, header.seq))
    if entry.name not in state.marks:
        require_same(state, sink, entry.table_id, None)
    if publisher.is_done(header, entry):
        require_unrestored(state, sink, header.seq, entry, publisher.publication(header, entry))


def _publications(state: ConsumerState, publisher: SinkPublisher) -> Iterator[str]:
    for name, mark in sorted(state.marks.items()):
        try:
            _require_published(state, name, mark)
        except DedupError as error:
            yield str(error)
    for header, entry in _to_publish(state):
        table, done = state.sinks.table(state.place_of(entry, header.seq)), publisher.is_done(header, entry)
        if not done:
            yield (
                f"decision {header.seq} ({entry.rows} rows) is not published to {entry.name!r}; run "
                f"{command('sink', 'sync', state.ledger.consumer)}"
            )
        try:
            if table is not None:
                _require_known(state, publisher, header, entry)
        except DedupError as error:
            yield str(error)


def _to_publish(state: ConsumerState) -> Iterator[tuple[Header, SinkFiles]]:
    """What this process does not know to be published, and nobody gave up, in the order of decisions."""
    for seq in sorted(state.pending):
        given_up = {name for dropped, name in state.header.dropped if dropped == seq}
        yield from ((state.decided[seq], entry) for entry in state.decided[seq].sinks if entry.name not in given_up)


def unpublished_since(state: ConsumerState, publisher: SinkPublisher) -> dt.datetime | None:
    """When the first decision was committed that a sink does not show yet; None where all are shown."""
    return next((header.committed_at for header, entry in _to_publish(state) if not publisher.is_done(header, entry)), None)


def _sinks(state: ConsumerState, publisher: SinkPublisher, headers: list[Header]) -> Iterator[str]:
    """What sinks say themselves: commits with the ids of all decisions, and the files that those brought."""
    published: dict[tuple[str, str], list[tuple[Header, SinkFiles]]] = {}
    dropped = {one for header in headers for one in header.dropped}
    for header in headers:
        for entry in header.sinks:
            if _is_published(state, publisher, header, entry) and (header.seq, entry.name) not in dropped:
                published.setdefault((entry.name, entry.table_id), []).append((header, entry))
    for (name, table_id), entries in published.items():
        mark, (header, entry) = state.marks.get(name), entries[0]
        table = state.sinks.table(state.here(name, mark.uri) if mark else state.place_of(entry, header.seq))
        if table is not None and str(table.metadata().id) == table_id:
            listed = state.sinks.engine.listed(table)
            others = [(h, e) for h, e in entries if e.staged or not all(add.path in listed for add in e.adds)]
            yield from _never_received(state, publisher, table, others)
            yield from _files_gone(publisher, table, [(e, a) for _, e in entries for a in e.adds if not e.staged and a.path in listed])


def _is_published(state: ConsumerState, publisher: SinkPublisher, header: Header, entry: SinkFiles) -> bool:
    """Whether the sink should have it: it may have been emptied for a reset, accepted without it, or wait, which is told elsewhere."""
    mark = state.marks.get(entry.name)
    accepted = mark.accepted if mark is not None else 0
    waits = header.seq in state.pending and not publisher.is_done(header, entry)
    return header.seq > max(accepted, state.header.keyspace_since) and not waits


def _never_received(
    state: ConsumerState, publisher: SinkPublisher, table: DeltaTable, entries: list[tuple[Header, SinkFiles]]
) -> Iterator[str]:
    """Decisions that no commit of the sink names, as far back as its log is kept."""
    shown, whole = state.sinks.engine.transactions(table) if entries else ({}, False)
    for header, entry in entries:
        app, version, _ = publisher.publication(header, entry)
        versions, number = shown.get(app, frozenset()), seq_of if entry.is_last else seq_of_part
        kept = whole or (bool(versions) and min(map(number, versions)) < header.seq)
        if kept and version not in versions:
            yield (
                f"decision {header.seq} ({entry.rows} rows) was never published to {entry.name!r} at {table.table_uri}: no commit of that "
                "table has its transaction id"
            )


def _files_gone(publisher: SinkPublisher, table: DeltaTable, listed: list[tuple[SinkFiles, Add]]) -> Iterator[str]:
    """Files of decisions that the sink lists, and that are not there any more."""
    gone = set(missing(absolute(table.table_uri), publisher.options, [add.path for _, add in listed]))
    if lost := [(entry, add) for entry, add in listed if add.path in gone]:
        yield (
            f"{len(lost)} files with {sum(add.rows for _, add in lost)} rows that {lost[0][0].name!r} at {table.table_uri} lists are not "
            f"there, so it cannot be read (VACUUM while a batch was being published?): {', '.join(add.path for _, add in lost[:3])}"
        )


def _messages(state: ConsumerState) -> Iterator[str]:
    """The number of a message is its own; of messages that were purged nothing is kept to compare with."""
    table = state.sinks.table(uri := state.outbox_uris()[0])
    if table is not None and (repeated := repeated_numbers(table)):
        yield (
            f"{len(repeated)} messages are in the outbox {uri} more than once, and each may be sent so often; their numbers: "
            f"{', '.join(map(str, repeated[:3]))}. Somebody copied rows of that table, or this is a defect: keep it, and report it"
        )


@dataclass(frozen=True)
class LedgerLog:
    """The section `log` of a ledger."""

    files: list[LedgerFile]
    rows: pa.Table

    def headers(self) -> list[Header]:
        """All headers in seq order, repeats included."""
        docs = self.rows.filter(pc.equal(self.rows["kind"], HEADER))["doc"].to_pylist()
        return sorted(map(Header.from_json, docs), key=lambda h: h.seq)

    def batches(self, record_filter: RecordFilter = ALL) -> pa.Table:
        """ALL_BATCHES."""
        decided = self.rows.filter(record_filter.decided(self.rows["seq"]))
        records = record_filter.placed(decided.filter(pc.equal(decided["kind"], BATCH)))
        chosen = decided.filter(pc.is_in(decided["seq"], value_set=records["seq"].combine_chunks()))
        headers = {h.seq: h for h in LedgerLog(self.files, chosen).headers()}
        return batch_table((r for r in records.to_pylist() if r["seq"] in headers), headers)


def read_log(ledger: Ledger, after: int = 0, days: Callable[[dt.date], bool] = lambda day: True) -> LedgerLog:
    """The log of the decisions after this one that were made on such UTC days; empty where there is no ledger."""
    return _log_of(ledger, ledger.files_now(), after, days)


def _log_of(ledger: Ledger, files: list[LedgerFile], after: int, days: Callable[[dt.date], bool]) -> LedgerLog:
    wanted = [f for f in files if f.section == LOG and f.last > after and days(f.day)]
    return LedgerLog(files, ledger.read(wanted, LOG_COLUMNS, after))


def letters_now(state: ConsumerState, publisher: SinkPublisher) -> Letters:
    """The letters of a consumer as of its head: with those that are decided and not published, without those that a RESTORE took back.

    Raises PublicationStuck where files with letters that are decided and not published are gone.
    """
    return Letters(_events(state, publisher), functools.partial(_decided, state.ledger, state.header, not state.damage))


def _events(state: ConsumerState, publisher: SinkPublisher) -> EventRows:
    """Looked at again where another process publishes in the middle: it removes the files that were staged for Spark."""
    for _ in range(LOOKS - 1):
        try:
            return _events_now(state, publisher)
        except PublicationStuck:
            continue
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return _events_now(state, publisher)


def _events_now(state: ConsumerState, publisher: SinkPublisher) -> EventRows:
    uri = state.letters_uri
    table, system = state.sinks.table(uri), filesystem(uri, publisher.options)
    parts: list[EventRows] = [] if table is None else [table.to_pyarrow_dataset(filesystem=system, schema=EVENTS)]
    for seq in sorted(state.pending):
        header = state.decided[seq]
        waiting = [e for e in header.sinks if e.name == LETTERS_SINK and (table is None or not publisher.shows(table, header, e))]
        parts += [_unpublished(header, entry, publisher, uri) for entry in waiting]
    if all(isinstance(part, ds.Dataset) for part in parts):
        whole: EventRows = ds.dataset(parts) if parts else ds.dataset(EVENTS.empty_table())
        return whole
    return Several(EVENTS, tuple(parts))


def _unpublished(header: Header, entry: SinkFiles, publisher: SinkPublisher, uri: str) -> ds.Dataset:
    publisher.require_files(header, entry, uri)
    place = filesystem(publisher.root if entry.staged else uri, publisher.options)
    with tables.reading("of dead letters"):
        rows = ds.dataset([add.path for add in entry.adds], EVENTS, format="parquet", filesystem=place)
        return ds.dataset(rows.to_table()) if entry.staged else rows


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
        for generation, known in _decisions(ledger, header).items()
    ]
    return events.filter(functools.reduce(pc.or_, told)) if told else events.slice(0, 0)


def _decisions(ledger: Ledger, last: Header) -> dict[int, list[int]]:
    """The decisions in the ledger up to this one: generation -> seqs. Others go on deciding, and all else is of this one."""
    found: dict[int, list[int]] = {}
    for header in read_log(ledger).headers():
        if (header.head.generation, header.seq) <= (last.head.generation, last.seq):
            found.setdefault(header.head.generation, []).append(header.seq)
    return found


def floors(state: ConsumerState, before: dt.date) -> dict[Partition, int]:
    """The highest position of each partition that was decided before that UTC day, in its present life.

    Without those that an earlier purge knew: it has put them into the head. So each day of the log is read once in its life.
    """
    since = min(map(dt.date.fromisoformat, filter(None, (state.header.purged_before, state.header.purged_on))), default=dt.date.min)
    log = read_log(state.ledger, state.header.keyspace_since, lambda day: since <= day < before)
    return {partition: max(last for _, last in records) for partition, records in _seen(state, log).items()}


def reached(state: ConsumerState) -> dt.datetime | None:
    """The time of the log up to which everything is decided; without positions, when the last batch was. None where nothing was decided.

    Reads the days of the log backwards, as far as it needs them.
    """
    points, files = state.header.head.checkpoints, state.ledger.files_now()
    newest: dict[Partition, dt.datetime] = {}
    batch: dt.datetime | None = None
    for day in sorted({f.day for f in files if f.section == LOG}, reverse=True):
        log = _log_of(state.ledger, files, 0, day.__eq__)
        committed = {h.seq: h.committed_at for h in log.headers()}
        decided = log.rows.filter(pc.equal(log.rows["kind"], BATCH))["seq"].to_pylist()
        batch = batch or (committed[max(decided)] if decided else None)
        found = {p: committed[max(records, key=lambda record: record[1])[0]] for p, records in _seen(state, log).items()}
        newest = found | newest
        if (newest and day <= (max(newest.values()) - ACTIVE).date()) or (batch and not points):
            break
    return read_to(points, newest) if newest else batch


def _seen(state: ConsumerState, log: LedgerLog) -> dict[Partition, list[tuple[int, int]]]:
    """Partition -> decision and last position, for each batch record of its present life with positions."""
    lives, found = state.header.head.incarnations, defaultdict[Partition, list[tuple[int, int]]](list)
    for row in log.rows.filter(pc.equal(log.rows["kind"], BATCH)).to_pylist():
        doc, partition = json.loads(row["doc"]), Partition(row["source"], row["topic"], row["partition"])
        if doc["seen"] and doc["incarnation"] == lives.get((partition.source, partition.topic), 0):
            found[partition].append((row["seq"], doc["seen"][-1][1]))
    return found
