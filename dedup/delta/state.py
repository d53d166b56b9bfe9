"""What one process knows of one consumer's ledger: the head, the seen positions, the keys; and the decision protocol.

Promises that everything known was read from the ledger, that a decision is tried only against the snapshot that was read, and that only the
ledger says what became of it. Called by the store.

Reservations are the rows of the sections `keys` and `held`, without those that a later decision freed. The tables that the consumer
publishes to are compared with the ledger. A table that shows a decision which the ledger lacks, or has differently, is reported before
anything is decided. A table that lacks a known publication is reported before anything is published.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from checkpoint.errors import Fenced, PartitionLost, PublicationStuck, Refused, StoreRestored, StoreUnavailable, command
from checkpoint.head import Claim, Head
from checkpoint.position import Partition, Ranges
from deadletter.store import KEYS as KEYS_SCHEMA
from dedup.core.deletion import being_deleted
from dedup.core.keys import Bools
from dedup.delta import tables
from dedup.delta.clocks import DecisionTimes
from dedup.delta.engine import Engine
from dedup.delta.key_files import I64
from dedup.delta.ledger import (
    DELETE,
    DELETED,
    HEADER,
    LETTERS_SINK,
    LOG,
    LOG_COLUMNS,
    ORDER,
    OUTBOX_SINK,
    Header,
    Ledger,
    LedgerFile,
    LogRow,
    Mark,
    SinkFiles,
    first_header,
)
from dedup.delta.reservations import Look, ReservedKeys
from dedup.delta.seen import PartitionLife, SeenPositions, Stretch, positions_of
from dedup.delta.sequences import Sequences, from_ledger
from dedup.delta.sinks import Sinks
from dedup.delta.storage import join, safe_name

SUMMARY_EVERY = 200
"""Decisions between two summaries of seen positions: what a starting process reads of the log at most."""


class ConsumerState:
    """One consumer as of the last look at its ledger. Not picklable; for one thread at a time, which holds `lock`."""

    def __init__(self, ledger: Ledger, root: str, engine: Engine, keys: ReservedKeys) -> None:
        self.ledger, self.root, self.keys = ledger, root, keys
        self.letters_uri = join(root, "dead_letters", safe_name(ledger.consumer))
        self.sinks, self._times = Sinks(engine), DecisionTimes(ledger.consumer)
        self.lock = threading.RLock()  # held by whoever looks or decides: people ask while a stream runs in another thread
        self.table: DeltaTable | None = None
        self._version: int | None = None  # of `table` when everything was taken in
        self._table_id: str | None = None
        self.agreement = Agreement(self)
        self._forget()
        self._whole = self.header  # the last one of which everything was taken in

    def _forget(self) -> None:
        self.header = first_header(self.ledger.consumer)
        self.decided: dict[int, Header] = {}  # headers read lately, and all pending ones
        self.pending: set[int] = set()
        self.marks: dict[str, Mark] = {}
        self.keys.forget()
        self.sequences = Sequences()
        self._seen = SeenPositions(self._stretch)
        self._damage: str | None = None
        self.agreement.forget()

    def catch_up(self) -> None:
        """Read what was decided since the last look.

        Raises:
            StoreRestored: the ledger is gone, or another one.
            StoreUnavailable: it cannot be read now.
        """
        self.table = None  # until everything is taken in: a decision must not go against a snapshot that is not known
        try:
            table = self.ledger.open()
            self._require_same_table(table)
            if table is not None:
                self._take_in(table)
        except Exception:
            self.ledger.forget()
            raise
        self.table, self._version, self._whole = table, None if table is None else table.version(), self.header

    def _require_same_table(self, table: DeltaTable | None) -> None:
        found = None if table is None else str(table.metadata().id)
        if self._table_id not in (None, found):
            raise StoreRestored(self.advice("was deleted or re-created while this process ran"))
        self._table_id = found

    def _take_in(self, table: DeltaTable) -> None:
        known, torn = self._whole, self.header is not self._whole
        if torn:
            self._forget()  # an error ended the last look: keys or positions of what it read may be missing
        follows = self._went_on(table) and not (torn and known.seq and not self._has(known, table))
        shown = self._shown(table)
        if not follows or (known is self.header and known.seq and shown != known.version):
            self._forget()  # taken back while this process ran: what is known is not so any more
            self._went_on(table)
            if known.head.generation >= self.header.head.generation:
                self._damage = self.advice(
                    f"ends with decision {self.header.seq}, and this process has seen another one, {known.seq}: it was taken back to an "
                    "older state"
                )
            shown = self._shown(table)
        self._compare(shown)

    def _went_on(self, table: DeltaTable) -> bool:
        """Take in what is new; False, and nothing is taken in, where it does not follow what is known."""
        files = self.ledger.files(table, self.header.seq)
        last = max((f.last for f in files if f.section == LOG), default=0)
        return self._read(table, files, last) if last > self.header.seq else last == self.header.seq

    def _has(self, known: Header, table: DeltaTable) -> bool:
        """Whether a decision that this process has seen is one of the ledger's."""
        found = self.decided.get(known.seq) or self._headers(self.ledger.files(table), {known.seq}).get(known.seq)
        return found is not None and found.attempt == known.attempt

    def require_sound(self) -> None:
        """Raise StoreRestored where the ledger contradicts itself or a table that it publishes to.

        It was restored to an older state, or rows of it were deleted.
        """
        self.require_undamaged()
        try:
            self.agreement.require_known()
        except StoreRestored as error:
            self._damage = str(error)
            raise

    def require_undamaged(self) -> None:
        """Raise StoreRestored where the ledger contradicts itself, as of the last look."""
        if self._damage:
            raise StoreRestored(self._damage)

    def require_in_step(self, name: str, table: DeltaTable) -> None:
        """Compare one table that decisions are published to.

        Raises:
            StoreRestored: it shows a decision that the ledger does not have, or has another one for.
            PublicationStuck: it lacks a publication that is known: it was taken back to an older state.
        """
        try:
            self.agreement.require(name, table)
        except StoreRestored as error:
            self._damage = str(error)
            raise

    def app(self, generation: int, sink: str) -> str:
        """The application id under which a sink shows the last decision it took. Raises StoreUnavailable if the ledger was not read."""
        self.require_read()
        assert self.table is not None
        return f"{self.ledger.app(self.table, generation)}/{sink}"

    def outbox_uris(self) -> tuple[str, str]:
        """URIs of its tables of messages and of marks: below the ledger's own id, because another ledger begins to number anew."""
        below = (safe_name(self.ledger.consumer), str(self.table.metadata().id) if self.table is not None else "none")
        return join(self.root, "outbox", *below, "messages"), join(self.root, "outbox", *below, "marks")

    def own_tables(self) -> dict[str, str]:
        """Name -> URI of the tables below the store's folder that decisions are published to."""
        return {LETTERS_SINK: self.letters_uri, OUTBOX_SINK: self.outbox_uris()[0]}

    def here(self, name: str, uri: str) -> str:
        """Where a table is that the ledger names with this URI: our own ones are where the store's folder is now."""
        return self.own_tables().get(name, uri)

    def place_of(self, entry: SinkFiles, seq: int) -> str:
        """Where the table is that this entry of a decision is for: where its rows were checked, or where a person says that it is now."""
        mark = self.marks.get(entry.name)
        moved = mark.uri if mark is not None and mark.accepted >= seq else entry.uri
        return self.here(entry.name, moved)

    def header_at(self, seq: int) -> Header | None:
        """The header of a decision, read from the ledger where it is not known; None where there is none."""
        if seq > self.header.seq or self.table is None:
            return None
        return self.decided.get(seq) or self._headers(self.ledger.files(self.table), {seq}).get(seq)

    def is_at(self, header: Header) -> bool:
        """Whether the newest decision is the one that this header was planned on."""
        return (self.header.seq, self.header.attempt) == (header.after, header.follows)

    def skipped(self, seq: int) -> StoreRestored:
        """The error where the ledger takes a decision for one that it has, and does not show any."""
        return StoreRestored(self.advice(f"takes decision {seq} for one that it has had, and does not show it: it was restored"))

    def require_sound_for(self, header: Header) -> None:
        """A person who accepts a restore begins a new generation: that decision may follow damage."""
        if header.head.generation == self.header.head.generation:
            self.require_sound()

    @property
    def damage(self) -> str | None:
        """What `require_sound` would say."""
        with contextlib.suppress(StoreRestored):
            self.require_sound()
        return self._damage

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """Positions within the spans that batch records since the last reset hold as seen, for the current incarnations."""
        lives = self.header.head.incarnations
        found = {p: self._seen.within(PartitionLife(p, lives.get((p.source, p.topic), 0)), *span) for p, span in spans.items()}
        return {p: ranges for p, ranges in found.items() if ranges}

    def _stretch(self, place: PartitionLife, stretch: Stretch) -> Ranges:
        assert self.table is not None
        files = [f for f in self.ledger.files(self.table) if f.section == LOG and f.first <= stretch.seq <= f.last]
        found = positions_of(self.ledger.read(files, LOG_COLUMNS, stretch.seq - 1), place, stretch)
        if found is None:
            raise StoreRestored(self.advice(f"has lost positions that decision {stretch.seq} has kept"))
        return found

    def table_to_write(self) -> DeltaTable:
        """The snapshot that everything known is as of; the ledger is created where there is none. Raises StoreUnavailable."""
        self.require_read()
        if self.table is None:
            self.ledger.create()
            self.catch_up()
        assert self.table is not None
        if self.table.version() != self._version:  # somebody looked at the ledger meanwhile, and delta-rs moves the object itself
            self.catch_up()
        return self.table

    def require_read(self) -> None:
        """Raise StoreUnavailable where there is a ledger, and the last look could not read it."""
        if self.table is None and self._table_id is not None:
            raise StoreUnavailable(
                f"The ledger {self.ledger.uri} could not be read the last time; nothing was committed. Run the batch again."
            )

    def fenced(self) -> Fenced:
        """The error that says who took over, and when."""
        if self.header.kind in (DELETE, DELETED):
            return Fenced(f"Consumer {self.ledger.consumer!r} was deleted, by {self._deleted_by()}. Stop this instance.")
        holder, at = self.header.holder, self.header.held_since
        who = f"process {holder.pid} on {holder.host}" if holder else "another instance"
        when = f" at {at:%Y-%m-%d %H:%M:%S} UTC" if at else ""
        epoch = self.header.head.epoch
        return Fenced(f"Consumer {self.ledger.consumer!r} was taken over by {who}{when} (epoch {epoch}). Stop this instance.")

    def _deleted_by(self) -> str:
        """Who deletes it, and since when."""
        return f"{self.header.by} at {self.header.committed_at:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def deletion(self) -> Refused | None:
        """What `require_not_deleted` raises; None where nobody has decided that it is deleted, or everything is gone."""
        return being_deleted(self.ledger.consumer, self._deleted_by()) if self.header.kind == DELETE else None

    def require_not_deleted(self) -> None:
        """Raise Refused where the consumer is being deleted."""
        if (refused := self.deletion) is not None:
            raise refused

    def require_claim(self, claim: Claim) -> None:
        """Raise PartitionLost where the partition was claimed after this claim."""
        number = self.header.claims.get(claim.partition)
        if number != claim.number:
            raise PartitionLost(
                f"Consumer {self.ledger.consumer!r}: another process claimed partition {claim.partition} (its number is {number}, this "
                f"batch has {claim.number}). Nothing of the batch is committed here; the other process reads it again."
            )

    def summary_due(self, seq: int) -> bool:
        """Whether the decision `seq` should carry a summary of seen positions."""
        return seq - max(self.header.summary, self.header.keyspace_since) >= SUMMARY_EVERY

    def positions(self, header: Header) -> Iterator[LogRow]:
        """What a decision writes down of the positions before it."""
        return self._seen.rows(header.seq, summary=header.summary == header.seq)

    def _read(self, table: DeltaTable, files: Sequence[LedgerFile], last: int) -> bool:
        """Take in the decisions after the known ones, up to `last`; False where they follow another one than the known one."""
        known = self.header.seq
        start = known or self._first_needed(files, last)
        log = self.ledger.read([f for f in files if f.section == LOG and f.last > start], LOG_COLUMNS, start)
        told = log.filter(pc.equal(log["kind"], HEADER))
        headers = {h.seq: h for h in map(Header.from_json, told["doc"].to_pylist())}
        if last not in headers:
            raise StoreRestored(self.advice(f"has lost the header of decision {last}"))
        if known and self.header.attempt not in {h.follows for h in headers.values() if h.after == known}:
            return False
        old, self.header = self.header, headers[last]
        new_life = old.head.keyspace != self.header.head.keyspace
        if old.head.generation != self.header.head.generation:
            self._damage = None
            self.agreement.forget()
        first = max(start + 1, self.header.generation_since)  # what lies before was accepted by whoever began the generation
        if sorted(s for s in told["seq"].to_pylist() if s >= first) != list(range(first, last + 1)):
            self._damage = self.advice(f"shows decisions {first}-{last} not exactly once each")
        self._take_seen(log, new_life=new_life)
        self._take_keys(files, known)
        if known and new_life:  # rows may be gone that were read before
            self._take_sequences(self.ledger.files(table), 0)
        else:
            self._take_sequences(files, known)
        self._take_publications(headers, fresh=not known, files=files)
        return True

    def _first_needed(self, files: Sequence[LedgerFile], last: int) -> int:
        """For a first look: the seq after which the log has to be read."""
        newest = self._headers(files, {last}).get(last)
        if newest is None:
            raise StoreRestored(self.advice(f"has lost the header of decision {last}"))
        return max(newest.summary, newest.keyspace_since, 1) - 1

    def _headers(self, files: Sequence[LedgerFile], seqs: set[int]) -> dict[int, Header]:
        if not seqs:
            return {}
        wanted = [f for f in files if f.section == LOG and any(f.first <= s <= f.last for s in seqs)]
        rows = self.ledger.read(wanted, ["kind", "doc"], min(seqs) - 1)
        rows = rows.filter(pc.and_(pc.equal(rows["kind"], HEADER), pc.is_in(rows["seq"], pa.array(sorted(seqs), pa.int64()))))
        return {h.seq: h for h in map(Header.from_json, rows["doc"].to_pylist())}

    def _take_seen(self, log: pa.Table, *, new_life: bool) -> None:
        if new_life:
            self._seen = SeenPositions(self._stretch)
        counts = pc.and_(pc.not_equal(log["kind"], HEADER), pc.greater(log["seq"], self.header.keyspace_since))
        self._seen.take_in(log.filter(counts), self.header.summary)

    def _take_keys(self, files: Sequence[LedgerFile], known: int) -> None:
        self.keys.take(self._look(files), known)

    def _look(self, files: Sequence[LedgerFile]) -> Look:
        return Look(self.header, str(self._table_id), files, lambda seq: self._headers(files, {seq}).get(seq))

    def _take_sequences(self, files: Sequence[LedgerFile], known: int) -> None:
        """What was decided after the known decision; with 0 as that one, the files have to be all there are."""
        if not known or self.header.kind in (DELETE, DELETED):
            self.sequences = Sequences()
        if self.header.kind in (DELETE, DELETED):
            return
        after = max(known, self.header.order_since - 1)
        rows = self.ledger.read([f for f in files if f.section == ORDER and f.last > after], ["key", "doc"], after)
        if rows.num_rows:
            self.sequences.take_in(from_ledger(rows))

    def _take_publications(self, headers: dict[int, Header], *, fresh: bool, files: Sequence[LedgerFile]) -> None:
        """What is decided and perhaps not published: nobody forgets, and whoever knows better wins."""
        for seq in sorted(headers):
            header = headers[seq]
            theirs = set(header.pending)
            self.pending = (theirs if fresh else theirs & self.pending) | ({seq} if header.sinks else set())
            fresh = False
            if header.generation_since == seq:
                self.marks = {}  # the header of a new life says which sinks are still the same
            for name, mark in header.marks.items():
                mine = self.marks.get(name)
                if mine is None or (mark.accepted, mark.seq) >= (mine.accepted, mine.seq):  # what a person accepted is not forgotten
                    self.marks[name] = mark
        self.decided = {**self.decided, **headers}
        self.decided |= self._headers(files, self.pending - set(self.decided))
        for seq in sorted(self.decided)[:-SUMMARY_EVERY]:
            if seq not in self.pending:
                del self.decided[seq]

    def _compare(self, shown: int | None) -> None:
        if shown != (self.header.version if self.header.seq else None):
            self._damage = self.advice(
                f"shows {self.header.seq} decisions and its transaction id says {tables.seq_of(shown or 0)}: it was restored to an older "
                "state"
            )

    def _shown(self, table: DeltaTable) -> int | None:
        return tables.transaction_of(table, self.ledger.app(table, self.header.head.generation))

    def advice(self, what: str) -> str:
        """What is wrong with the ledger, and what to do."""
        name = self.ledger.consumer
        return (
            f"The ledger {self.ledger.uri} of consumer {name!r} {what}. First restore the sinks, and the table "
            f"{self.letters_uri}, to the same time: they may hold more than the ledger knows, and those rows would come twice. Then run "
            f"{command('consumer', 'accept-restore', name)}, and "
            f"{command('sink', 'accept', name, 'SINK')} for each table that you "
            f"restored (the dead letters are the sink {LETTERS_SINK})."
        )

    def following(self, kind: str, attempt: str, now: dt.datetime, head: Head, **changes: Any) -> Header:
        """The header of the decision after `head`, which was read before; with everything that this process knows of publications.

        Raises Refused where the consumer is being deleted: nothing but the end of that may follow.
        """
        if kind != DELETED:
            self.require_not_deleted()
        last, seq = self.header, head.seq + 1
        return last.following(
            kind,
            attempt,
            self._times.following(last, now),
            head=replace(head, seq=seq),
            after=head.seq,
            generation_since=last.generation_since if head.generation == last.head.generation else seq,
            keyspace_since=last.keyspace_since if head.keyspace == last.head.keyspace else seq,
            marks=dict(self.marks),
            pending=tuple(sorted(self.pending)),
            dropped=tuple(d for d in last.dropped if d[0] in self.pending),
            **changes,
        )

    def split(self, keys: pa.Table) -> tuple[pa.Table, pa.Table]:
        """(known, new) of these KEYS; the known ones with the payload hash they were reserved with."""
        known, payload, _ = self.probe(keys["key"])
        found = keys.filter(pa.array(known))
        return pa.table([found["key"], pa.array(payload[known], pa.int64())], schema=KEYS_SCHEMA), keys.filter(pa.array(~known))

    def held(self, keys: pa.Array | pa.ChunkedArray) -> Bools:
        """Which of these keys a letter holds."""
        return self.probe(keys)[2]

    def probe(self, keys: pa.Array | pa.ChunkedArray) -> tuple[Bools, I64, Bools]:
        """For each key: whether it is reserved, the payload hash it was reserved with (0 if it is not), and whether a letter holds it.

        Raises:
            StoreUnavailable: the ledger cannot be read. CommitConflict: it went on since the last look.
        """
        return self.keys.probe(keys, self._look_again)

    def reserved(self) -> int:
        """How many keys are reserved. Raises as `probe`."""
        return self.keys.count(self._look_again)

    def _look_again(self) -> Look:
        self.require_read()
        return self._look([] if self.table is None else self.ledger.files(self.table))


@dataclass(frozen=True)
class _ShownDecisions:
    """What a look at a table has shown of one generation of a consumer. Looks are equal where it shows the same, in whatever version."""

    uri: str
    last: int | None
    """The last decision that is published as a whole."""
    part: int | None
    """The last one that is published in part."""
    later: bool
    """Whether there are decisions of the next generation."""
    version: int = field(compare=False)


class Agreement:
    """Compares the tables with the ledger, as far as this process has looked. It looks again at a table that others committed to."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state
        self.forget()

    def forget(self) -> None:
        """Compare everything anew."""
        self._seen: dict[str, tuple[DeltaTable, int]] = {}  # table name -> what was found to agree, in which version
        self._behind: dict[str, str] = {}  # name -> URI of tables that lack a publication
        self._began = False

    def took(self, name: str, table: DeltaTable, version: int) -> None:
        """This process has published to the table, or seen it show what it should; this is its version then."""
        self._seen[name] = table, version

    def require_known(self) -> None:
        """Compare every table that the ledger knows, its dead letters and its outbox, once. Raises StoreRestored."""
        if self._began or self._state.table is None:
            return
        self._began = True
        for name, uri in self._known().items():
            try:
                if (table := self._state.sinks.table(uri)) is not None:
                    self.require(name, table)
            except PublicationStuck:
                self._behind[name] = uri
            except StoreUnavailable:
                self._began = False  # whoever writes there is told; it is compared at the next look
                if self._state.table is None:  # the ledger itself is away
                    raise

    def require_none_behind(self) -> None:
        """Raise PublicationStuck where a table that was found to lack a publication still lacks it."""
        for name, uri in list(self._behind.items()):
            if (table := self._state.sinks.table(uri)) is not None:
                self.require(name, table)
            del self._behind[name]

    def require(self, name: str, table: DeltaTable) -> None:
        """Raise StoreRestored where the table shows what the ledger does not know, PublicationStuck where it lacks what is known of it."""
        seen = self._seen.get(name)
        if seen is not None and seen[0] is table and seen[1] == table.version():
            return
        table, version = self._known_to_the_ledger(name, table, whole=seen is None or seen[0] is not table)
        self._require_published(name, table)
        self.took(name, table, version)

    def _known_to_the_ledger(self, name: str, table: DeltaTable, *, whole: bool) -> tuple[DeltaTable, int]:
        """The table now, and a version of it that the ledger is found to know. Raises StoreRestored.

        Others decide and publish all the time. What a look at a table has shown is in a ledger that is read after it, and not always in one
        that was read before. What the ledger then says of the table's publications is in a look that follows, and not always in this one.
        """
        shown = self._look(name, table, whole=whole)
        while self._unknown(name, shown) is not None:
            self._state.catch_up()
            self._state.require_undamaged()
            told = self._unknown(name, shown)
            table = self._state.sinks.table(shown.uri) or table
            if told is None:
                break
            before, shown = shown, self._look(name, table, whole=whole)
            if shown == before:
                raise StoreRestored(self._state.advice(told))
        return table, shown.version

    def meets(self, generation: int, *, reachable: bool = False) -> bool:
        """Whether a table that the ledger knows shows decisions of this generation. Raises StoreUnavailable.

        Args:
            reachable: sinks that cannot be read are left out. One that comes back with such decisions is told as restored.
        """
        return any(self._meets(name, uri, generation, reachable) for name, uri in self._known().items())

    def _meets(self, name: str, uri: str, generation: int, reachable: bool) -> bool:
        try:
            table = self._state.sinks.table(uri)
            return table is not None and tables.transaction_of(table, self._state.app(generation, name)) is not None
        except StoreUnavailable:
            if not reachable or name in self._state.own_tables():
                raise
            return False

    def _known(self) -> dict[str, str]:
        state = self._state
        waiting = {entry.name: state.place_of(entry, seq) for seq in sorted(state.pending) for entry in state.decided[seq].sinks}
        return {**waiting, **{name: mark.uri for name, mark in state.marks.items()}, **state.own_tables()}

    def _look(self, name: str, table: DeltaTable, *, whole: bool) -> _ShownDecisions:
        """What it shows now; `whole` also of decisions that were published in part, and of a later generation."""
        state, generation = self._state, self._state.header.head.generation
        app = state.app(generation, name)
        part = tables.transaction_of(table, f"{app}/parts") if whole else None
        later = whole and tables.transaction_of(table, state.app(generation + 1, name)) is not None
        return _ShownDecisions(str(table.table_uri), tables.transaction_of(table, app), part, later, table.version())

    def _unknown(self, name: str, shown: _ShownDecisions) -> str | None:
        """What a table showed and the ledger does not know."""
        if shown.last is not None and not self._agrees(name, shown.last):
            return self._told(name, shown.uri, tables.seq_of(shown.last))
        if shown.part is not None and not self._has_part(shown.part):
            return self._told(name, shown.uri, tables.seq_of_part(shown.part))
        if shown.later:
            generation = self._state.header.head.generation
            return f"is of generation {generation}, and the table {name!r} at {shown.uri} shows decisions of a later one"
        return None

    def _agrees(self, name: str, shown: int) -> bool:
        mark = self._state.marks.get(name)
        if mark is not None and (mark.generation, mark.shown) == (self._state.header.head.generation, shown):
            return True
        decided = self._state.header_at(tables.seq_of(shown))
        return decided is not None and decided.version == shown

    def _has_part(self, part: int) -> bool:
        decided = self._state.header_at(tables.seq_of_part(part))
        return decided is not None and tables.same_decision(part, decided.seq, decided.attempt)

    def _told(self, name: str, uri: str, seq: int) -> str:
        last = self._state.header.seq
        what = f"has {last} decisions" if seq > last else f"has another decision {seq}"
        return f"{what}, and the table {name!r} at {uri} shows decision {seq}: the ledger was taken back to an older state"

    def _require_published(self, name: str, table: DeltaTable) -> None:
        mark, consumer = self._state.marks.get(name), self._state.ledger.consumer
        if mark is None or mark.shown is None or mark.table_id != str(table.metadata().id):
            return
        shown = tables.transaction_of(table, self._state.app(mark.generation, name))
        if shown is None or tables.seq_of(shown) < tables.seq_of(mark.shown):
            last = "none" if shown is None else f"decision {tables.seq_of(shown)}"
            raise PublicationStuck(
                f"The sink {name!r} at {table.table_uri} was taken back to an older state: decision {tables.seq_of(mark.shown)} was "
                f"published to it, and the last one that it shows is {last}, so published rows are missing. Put the newer state back; or "
                f"go on without those rows: {command('sink', 'accept', consumer, name)}."
            )
