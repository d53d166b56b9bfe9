"""Contradictions inside the ledger, and between the ledger and the sinks.

It also reads the ledger as a whole: its batch records, and dead letters as of its head. It reads everything, so it serves people, `verify`
and transactions that change letters, but no batch. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from checkpoint.errors import DedupError, PublicationStuck, StoreUnavailable, command
from deadletter.selection import Selection
from dedup.core.keys import Bools
from dedup.delta import tables
from dedup.delta.commit import SinkPublisher
from dedup.delta.engine import Engine
from dedup.delta.files import Add
from dedup.delta.keys import KeyIndex
from dedup.delta.ledger import (
    DELETE,
    HELD,
    KEYS,
    LETTERS_SINK,
    OUTBOX_SINK,
    Header,
    Ledger,
    LedgerFile,
    Mark,
    SinkFiles,
)
from dedup.delta.ledger_log import LedgerLog, by_day
from dedup.delta.letters import EVENTS, EventRows, Letters, Several
from dedup.delta.messages import MESSAGES_TABLE, repeated_numbers
from dedup.delta.reservations import freed, reservations
from dedup.delta.restores import Publication, require_same, require_unrestored
from dedup.delta.sequences import PLACE, WAITING, chained, lasts_of
from dedup.delta.state import ConsumerState
from dedup.delta.storage import absolute, filesystem, missing
from dedup.delta.tables import seq_of, seq_of_part

LOOKS = 3
"""At a state that others change meanwhile."""

Found = TypeVar("Found")

_CHAIN = [*PLACE, "consumer", "source", "topic", "partition", "sequence", "status", "blocked_by", "kind"]


def problems(state: ConsumerState, publisher: SinkPublisher) -> list[str]:
    """Sentences, one per contradiction, each naming decisions, letters or sinks. Of the log one day at a time is in memory."""
    if state.table is None:
        return []
    if (refused := state.deletion) is not None:
        return [str(refused)]
    found = [state.damage] if state.damage else []
    # Of the same head as all else: others go on deciding.
    files, kept = state.ledger.files(state.table), letters_now(state, publisher)
    told, sinks = _Told(), _Sinks(state, publisher)
    for _, log in by_day(state.ledger, files):
        recorded = log.recorded()
        for header in log.each_header():
            told.add(header, recorded[header.seq])
            sinks.add(header)
        told.pack()
        sinks.look_for_files()
    decisions = told.decisions()
    found += _numbering(decisions)
    found += _reservations(state, files, decisions)
    found += _accounts(decisions, told.given_up, kept)
    found += _order(state, kept)
    found += _holders(state, kept)
    found += _publications(state, publisher)
    found += sinks.contradictions(told.given_up)
    found += _messages(state)
    return list(dict.fromkeys(found))


DECISIONS = pa.schema(
    [
        *((name, pa.int64()) for name in ("seq", "after", "epoch", "reserved", "freed", "recorded")),
        *((name, pa.int64()) for name in ("attempt", "follows")),  # hashes: they are only compared
        ("day", pa.date32()),
        ("kind", pa.string()),
    ]
)
"""What there is to compare of each decision; `recorded`: what its batch records say of reserved keys."""


@dataclass
class _Told:
    """What headers and batch records say, in some 80 bytes a decision: a year has millions of them."""

    parts: list[pa.Table] = field(default_factory=lambda: [DECISIONS.empty_table()])
    rows: list[dict[str, object]] = field(default_factory=list)
    given_up: set[tuple[int, str]] = field(default_factory=set)  # (seq, sink) of publications

    def add(self, header: Header, recorded: int) -> None:
        """One decision."""
        self.given_up.update(header.dropped)
        told = {"seq": header.seq, "after": header.after, "reserved": header.reserved, "freed": header.freed, "recorded": recorded}
        compared = {"epoch": header.head.epoch, "attempt": hash(header.attempt), "follows": hash(header.follows)}
        self.rows.append({**told, **compared, "day": header.committed_at.date(), "kind": header.kind})

    def pack(self) -> None:
        """Keep what was added in few bytes."""
        self.parts.append(pa.Table.from_pylist(self.rows, schema=DECISIONS))
        self.rows = []

    def decisions(self) -> pa.Table:
        """DECISIONS in the order of their numbers, repeats included."""
        return pa.concat_tables(self.parts).sort_by("seq")


def _numbering(told: pa.Table) -> Iterator[str]:
    seqs, afters, epochs = (told[name].to_numpy() for name in ("seq", "after", "epoch"))
    # Of a consumer that was deleted, the decisions before that are gone.
    named = told.filter(pc.not_equal(told["kind"], DELETE))["after"].to_numpy()
    if len(missing := np.setdiff1d(named, np.append(seqs, 0))):
        yield f"decisions {missing[:10].tolist()} have no header"
    if len(repeated := np.unique(seqs[1:][seqs[1:] == seqs[:-1]])):
        yield f"decisions {repeated[:10].tolist()} have more than one header"
    at = np.searchsorted(seqs, afters, side="right") - 1
    known = (at >= 0) & (seqs[at] == afters)
    if strange := seqs[known & (told["follows"].to_numpy() != told["attempt"].to_numpy()[at])].tolist():
        yield f"decisions {strange[:10]} were made after another decision than the one before them in the ledger"
    for place in np.flatnonzero(epochs[1:] < epochs[:-1]).tolist():
        yield f"decision {seqs[place + 1]} has epoch {epochs[place + 1]}, an older one than decision {seqs[place]} ({epochs[place]})"


def _reservations(state: ConsumerState, files: list[LedgerFile], told: pa.Table) -> Iterator[str]:
    """Reservation rows against what headers say; days that were purged cannot be counted."""
    rows: Counter[int] = Counter()
    for file in (f for f in files if f.section in (KEYS, HELD)):
        counts = pc.value_counts(state.ledger.read([file], [], 0)["seq"]).flatten()
        rows.update(dict(zip(*(c.to_pylist() for c in counts), strict=True)))
    did = pc.add(told["reserved"], told["freed"]).to_numpy()
    have = np.fromiter((rows[seq] for seq in told["seq"].to_pylist()), np.int64, told.num_rows)
    for row in told.filter(pa.array((did != have) & _counted(state, told))).to_pylist():
        said = f"reserved {row['reserved']} keys" + (f" and freed {row['freed']}" if row["freed"] else "")
        yield f"decision {row['seq']} {said} and the ledger has {rows[row['seq']]} rows of it"
    index, kept, unknown = KeyIndex(), 0, 0
    since = state.header.keyspace_since
    for table, days in reservations(state.ledger, files, since, freed(state.ledger, files, since), state.header):
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


def _counted(state: ConsumerState, told: pa.Table) -> Bools:
    if state.header.purged_before is None:
        return np.ones(told.num_rows, dtype=bool)
    kept = pc.greater_equal(told["day"], pa.scalar(dt.date.fromisoformat(state.header.purged_before)))
    return np.asarray(kept.to_numpy(), dtype=bool)


def _accounts(told: pa.Table, given_up: set[tuple[int, str]], kept: Letters) -> Iterator[str]:
    """What a decision did to keys against what batch records and the history of letters say it did."""
    lost, letters = {seq for seq, name in given_up if name == LETTERS_SINK}, Counter(kept.reserved())
    rows = told.filter(pc.is_in(told["kind"], pa.array(["batch", "letters"])))
    of_letters = np.fromiter((letters[seq] for seq in rows["seq"].to_pylist()), np.int64, rows.num_rows)
    did, said = pc.subtract(rows["reserved"], rows["freed"]).to_numpy(), rows["recorded"].to_numpy() + of_letters
    for place in np.flatnonzero(did != said).tolist():
        if (seq := rows["seq"][place].as_py()) not in lost:
            yield f"decision {seq} reserved {did[place]} keys more than it freed, and batch records and letters say {said[place]}"


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


class _Sinks:
    """What sinks say themselves: commits with the ids of all decisions, and the files that those brought.

    Others publish, compact and clean up while the log is read. So what looks wrong is looked at again in the end.
    """

    def __init__(self, state: ConsumerState, publisher: SinkPublisher) -> None:
        self._state, self._publisher = state, publisher
        self._tables: dict[_SinkId, _Shown | None] = {}
        self._lacking = defaultdict[_SinkId, list[_Expected]](list)
        self._listed = defaultdict[_SinkId, list[Add]](list)
        self._gone = defaultdict[_SinkId, list[Add]](list)

    def add(self, header: Header) -> None:
        """One decision."""
        for entry in header.sinks:
            if _is_published(self._state, self._publisher, header, entry):
                self._look(header, entry)

    def _look(self, header: Header, entry: SinkFiles) -> None:
        """Where the sink does not list all files, its log has to tell of the decision."""
        sink = entry.name, entry.table_id
        if sink not in self._tables:
            self._tables[sink] = self._open(header, entry)
        if (shown := self._tables[sink]) is None:
            return
        adds = [] if entry.staged else [add for add in entry.adds if add.path in shown.files]
        self._listed[sink] += adds
        if entry.staged or len(adds) < len(entry.adds):
            app, version, _ = self._publisher.publication(header, entry)
            expected = _Expected(header.seq, app, version, entry.rows, seq_of if entry.is_last else seq_of_part)
            self._lacking[sink] += [expected] if shown.lacks(expected) else []

    def look_for_files(self) -> None:
        """Whether the files are there that sinks list, of all that was added since the last call."""
        for sink, adds in self._listed.items():
            if adds and (shown := self._tables[sink]) is not None:
                self._gone[sink] += self._missing(shown, adds)
        self._listed.clear()

    def _missing(self, shown: _Shown, adds: list[Add]) -> list[Add]:
        gone = set(missing(absolute(shown.table.table_uri), self._publisher.options, [add.path for add in adds]))
        return [add for add in adds if add.path in gone]

    def _open(self, header: Header, entry: SinkFiles) -> _Shown | None:
        """The table; None where another one is there, or none."""
        mark = self._state.marks.get(entry.name)
        return self._shown(self._state.here(entry.name, mark.uri) if mark else self._state.place_of(entry, header.seq), entry.table_id)

    def _shown(self, uri: str, table_id: str) -> _Shown | None:
        table, engine = self._state.sinks.table(uri), self._state.sinks.engine
        if table is None or str(table.metadata().id) != table_id:
            return None
        return _Shown(table, engine.listed(table), engine)

    def contradictions(self, given_up: set[tuple[int, str]]) -> Iterator[str]:
        """Of all that was added. That a publication shows is not expected where a person gave it up."""
        for (name, table_id), before in self._tables.items():
            lacking = [one for one in self._lacking[name, table_id] if (one.seq, name) not in given_up]
            if before is not None and (lacking or self._gone[name, table_id]):
                shown = self._shown(before.table.table_uri, table_id)
                yield from self._told(name, shown, lacking, self._gone[name, table_id]) if shown is not None else ()

    def _told(self, name: str, shown: _Shown, lacking: list[_Expected], gone: list[Add]) -> Iterator[str]:
        """What still is wrong."""
        where = f"{name!r} at {shown.table.table_uri}"
        for one in filter(shown.lacks, lacking):
            yield f"decision {one.seq} ({one.rows} rows) was never published to {where}: no commit of that table has its transaction id"
        if lost := self._missing(shown, [add for add in gone if add.path in shown.files]):
            yield (
                f"{len(lost)} files with {sum(add.rows for add in lost)} rows that {where} lists are not "
                f"there, so it cannot be read (VACUUM while a batch was being published?): {', '.join(add.path for add in lost[:3])}"
            )


_SinkId = tuple[str, str]
"""Name and table id."""


class _Expected(NamedTuple):
    """A commit that a sink should have."""

    seq: int
    app: str
    version: int
    rows: int
    number: Callable[[int], int]  # of the decision, by the version


@dataclass
class _Shown:
    """A sink in one version."""

    table: DeltaTable
    files: frozenset[str]
    engine: Engine

    @functools.cached_property
    def _transactions(self) -> tuple[Mapping[str, frozenset[int]], bool]:
        return self.engine.transactions(self.table)

    @functools.cached_property
    def _first(self) -> dict[str, int]:
        return {app: min(versions) for app, versions in self._transactions[0].items() if versions}

    def lacks(self, one: _Expected) -> bool:
        """Whether the log has no commit with its id, although it goes back to an older decision, or to the table's beginning."""
        found, whole = self._transactions
        if one.version in found.get(one.app, ()):
            return False
        return whole or (one.app in self._first and one.number(self._first[one.app]) < one.seq)


def _is_published(state: ConsumerState, publisher: SinkPublisher, header: Header, entry: SinkFiles) -> bool:
    """Whether the sink should have it: it may have been emptied for a reset, accepted without it, or wait, which is told elsewhere."""
    mark = state.marks.get(entry.name)
    accepted = mark.accepted if mark is not None else 0
    waits = header.seq in state.pending and not publisher.is_done(header, entry)
    return header.seq > max(accepted, state.header.keyspace_since) and not waits


def _messages(state: ConsumerState) -> Iterator[str]:
    """The number of a message is its own; of messages that were purged nothing is kept to compare with."""
    table = state.sinks.table(uri := state.outbox_uris()[0])
    if table is not None and (repeated := repeated_numbers(table)):
        yield (
            f"{len(repeated)} messages are in the outbox {uri} more than once, and each may be sent so often; their numbers: "
            f"{', '.join(map(str, repeated[:3]))}. Somebody copied rows of that table, or this is a defect: keep it, and report it"
        )


def letters_now(state: ConsumerState, publisher: SinkPublisher) -> Letters:
    """The letters of a consumer as of its head: with those that are decided and not published, without those that a RESTORE took back.

    Raises PublicationStuck where files with letters that are decided and not published are gone.
    """
    # Whoever reads letters does not hold the lock: a look by the state's own handle would move the snapshot that a decision goes against.
    ledger = type(state.ledger)(state.ledger.uri, publisher.options, state.ledger.consumer, state.sinks.engine)
    events = looked_again(lambda: _events_now(state, publisher))
    return Letters(events, _Decisions(ledger, state.header, not state.damage).of)


class Waiting(NamedTuple):
    """Messages of one decision that their table may not show yet."""

    publication: Publication
    rows: Callable[[], ds.Dataset]  # MESSAGES_TABLE; raises PublicationStuck where files are gone


def messages_waiting(state: ConsumerState, publisher: SinkPublisher) -> Sequence[Waiting]:
    """What is decided of messages, and is not known to be published. Raises StoreRestored where the ledger is older than a table."""
    state.require_sound()
    uri = state.outbox_uris()[0]
    return [
        Waiting(publisher.publication(header, entry), functools.partial(_unpublished, header, entry, publisher, uri, MESSAGES_TABLE))
        for header, entry in _to_publish(state)
        if entry.name == OUTBOX_SINK
    ]


def looked_again(look: Callable[[], Found]) -> Found:
    """Anew where another process publishes in the middle: it removes the files that were staged for Spark."""
    for _ in range(LOOKS - 1):
        try:
            return look()
        except PublicationStuck:
            continue
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return look()


def _events_now(state: ConsumerState, publisher: SinkPublisher) -> EventRows:
    uri = state.letters_uri
    table, system = state.sinks.table(uri), filesystem(uri, publisher.options)
    parts: list[EventRows] = []
    if table is not None:
        with tables.reading(uri):
            parts.append(table.to_pyarrow_dataset(filesystem=system, schema=EVENTS))
    for seq in sorted(state.pending):
        header = state.decided[seq]
        waiting = [e for e in header.sinks if e.name == LETTERS_SINK and (table is None or not publisher.shows(table, header, e))]
        parts += [_unpublished(header, entry, publisher, uri, EVENTS) for entry in waiting]
    if all(isinstance(part, ds.Dataset) for part in parts):
        whole: EventRows = ds.dataset(parts) if parts else ds.dataset(EVENTS.empty_table())
        return whole
    return Several(EVENTS, tuple(parts))


def _unpublished(header: Header, entry: SinkFiles, publisher: SinkPublisher, uri: str, schema: pa.Schema) -> ds.Dataset:
    publisher.require_files(header, entry, uri)
    place = filesystem(publisher.root if entry.staged else uri, publisher.options)
    with tables.reading(uri):
        rows = ds.dataset([add.path for add in entry.adds], schema, format="parquet", filesystem=place)
        return ds.dataset(rows.to_table()) if entry.staged else rows


@dataclass
class _Decisions:
    """The decisions in the ledger up to a header: others go on deciding. Of the log it reads what it is asked for, and that once.

    Args:
        sound: the ledger has each decision of the header's generation once.
    """

    ledger: Ledger
    last: Header
    sound: bool
    asked: set[int] = field(default_factory=set)
    found: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # generation -> numbers

    def of(self, events: pa.Table) -> pa.Table:
        """Those events whose decision is there; a RESTORE may have taken others back."""
        generations, seqs = pc.coalesce(events["decided_in"], events["generation"]), events["seq"]
        decided = self._certain(generations, seqs)
        if pc.all(decided).as_py() is not False:
            return events
        self._look_up(seqs.filter(pc.invert(decided)).unique().to_pylist())
        for generation, known in self.found.items():
            there = pc.is_in(seqs, pa.array(sorted(known), pa.int64()))
            decided = pc.or_(decided, pc.and_(pc.equal(generations, generation), there))
        return events.filter(decided)

    def _certain(self, generations: pa.ChunkedArray, seqs: pa.ChunkedArray) -> pa.ChunkedArray:
        """For which of them that can be told without the log."""
        last = self.last
        inside = pc.and_(pc.greater_equal(seqs, last.generation_since), pc.less_equal(seqs, last.seq))
        return pc.and_(pc.and_(pc.equal(generations, last.head.generation), inside), self.sound)

    def _look_up(self, seqs: Collection[int]) -> None:
        wanted = np.array(sorted(set(seqs) - self.asked), np.int64)
        if not len(wanted):
            return
        files = [f for f in self.ledger.files_now() if _holds_any(f, wanted)]
        for _, log in by_day(self.ledger, files, int(wanted[0]) - 1):
            for header in LedgerLog(log.rows.filter(pc.is_in(log.rows["seq"], pa.array(wanted)))).each_header():
                if (header.head.generation, header.seq) <= (self.last.head.generation, self.last.seq):
                    self.found[header.head.generation].add(header.seq)
        self.asked.update(wanted.tolist())


def _holds_any(file: LedgerFile, seqs: npt.NDArray[np.int64]) -> bool:
    """Whether a file may have rows of these ascending decisions."""
    return bool(np.searchsorted(seqs, file.first) < np.searchsorted(seqs, file.last, side="right"))
