"""What one process knows of one consumer's ledger: the head, the seen positions, the keys; and the decision protocol.

Promises that everything known was read from the ledger, that a decision is tried only against the snapshot everything known is as of,
and that its outcome is told by the ledger and by nothing else. Called by the store.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from checkpoint.advice import command
from checkpoint.errors import Fenced, PartitionLost, StoreRestored, StoreUnavailable
from checkpoint.position import GrowingRanges, Partition, Ranges
from dedup.delta import lineage, tables
from dedup.delta.agreement import Agreement
from dedup.delta.engine import Engine
from dedup.delta.events import LETTERS_SINK
from dedup.delta.header import Header, Mark, first_header
from dedup.delta.keyindex import Bool, KeyIndex
from dedup.delta.ledger import BATCH, HEADER, LOG, ORDER, Ledger, LedgerFile
from dedup.delta.reserved import freed, reservations
from dedup.delta.sequences import Sequences, from_ledger
from dedup.delta.sink import Sinks
from dedup.delta.storage import join, safe_name
from dedup.store import KEYS as KEYS_SCHEMA
from dedup.store import Claim, Head

SUMMARY_EVERY = 200
"""Decisions between two summaries of seen positions: what a starting process reads of the log at most."""


class ConsumerState:
    """One consumer as of the last look at its ledger. Not picklable; for one thread at a time, which holds `lock`."""

    def __init__(self, ledger: Ledger, root: str, engine: Engine) -> None:
        self.ledger, self.root = ledger, root
        self.letters_uri = join(root, "dead_letters", safe_name(ledger.consumer))
        self.sinks = Sinks(engine)
        self.lock = threading.RLock()  # held by whoever looks or decides: people ask while a stream runs in another thread
        self.table: DeltaTable | None = None
        self._version: int | None = None  # of `table` when everything was taken in
        self._table_id: str | None = None
        self.agreement = Agreement(self)
        self._forget()

    def _forget(self) -> None:
        self.header = first_header(self.ledger.consumer)
        self.decided: dict[int, Header] = {}  # headers read lately, and all pending ones
        self.pending: set[int] = set()
        self.marks: dict[str, Mark] = {}
        self.index = KeyIndex()
        self.sequences = Sequences()
        self._seen: dict[tuple[Partition, int], GrowingRanges] = {}
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
        self.table, self._version = table, None if table is None else table.version()

    def _require_same_table(self, table: DeltaTable | None) -> None:
        found = None if table is None else str(table.metadata().id)
        if self._table_id not in (None, found):
            raise StoreRestored(self.advice("was deleted or re-created while this process ran"))
        self._table_id = found

    def _take_in(self, table: DeltaTable) -> None:
        known, follows = self.header, self._went_on(table)
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
        return self._read(files, last) if last > self.header.seq else last == self.header.seq

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
        """The application id under which a sink shows the last decision it took."""
        assert self.table is not None
        return f"{self.ledger.app(self.table, generation)}/{sink}"

    def outbox_uris(self) -> tuple[str, str]:
        """Of its messages and of what became of them: below the ledger's own id, because another ledger begins to number anew."""
        below = (safe_name(self.ledger.consumer), str(self.table.metadata().id) if self.table is not None else "none")
        return join(self.root, "outbox", *below, "messages"), join(self.root, "outbox", *below, "marks")

    def header_at(self, seq: int) -> Header | None:
        """Of a decision, read from the ledger where it is not known; None where there is none."""
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
        found = {p: self._seen.get((p, lives.get((p.source, p.topic), 0))) for p in spans}
        return {p: ranges for p, seen in found.items() if seen and (ranges := seen.within(*spans[p]))}

    def table_to_write(self) -> DeltaTable:
        """The snapshot that everything known is as of; the ledger is created where there is none. Raises StoreUnavailable."""
        if self.table is None and self._table_id is not None:
            raise StoreUnavailable(
                f"The ledger {self.ledger.uri} could not be read the last time; nothing was committed. Run the batch again."
            )
        if self.table is None:
            self.ledger.create()
            self.catch_up()
        assert self.table is not None
        if self.table.version() != self._version:  # somebody looked at the ledger meanwhile, and delta-rs moves the object itself
            self.catch_up()
        return self.table

    def fenced(self) -> Fenced:
        """The error that says who took over, and when."""
        holder, at = self.header.holder, self.header.held_since
        who = f"process {holder.pid} on {holder.host}" if holder else "another copy"
        when = f" at {at:%Y-%m-%d %H:%M:%S} UTC" if at else ""
        return Fenced(f"Consumer {self.ledger.consumer!r} was taken over by {who}{when} (epoch {self.header.head.epoch}). Stop this copy.")

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

    def summary(self) -> str:
        """All seen positions since the last reset, as a document."""
        return json.dumps([[*p, life, seen.whole().items] for (p, life), seen in self._seen.items()], separators=(",", ":"))

    def _read(self, files: Sequence[LedgerFile], last: int) -> bool:
        """Take in the decisions after the known ones, up to `last`; False where they follow another one than the known one."""
        known = self.header.seq
        start = known or self._first_needed(files, last)
        log = self.ledger.read(
            [f for f in files if f.section == LOG and f.last > start], ["kind", "source", "topic", "partition", "doc"], start
        )
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
            self._seen = {}
        rows = log.filter(pc.and_(pc.not_equal(log["kind"], HEADER), pc.greater(log["seq"], self.header.keyspace_since))).sort_by("seq")
        for row in rows.to_pylist():
            doc = json.loads(row["doc"])
            if row["kind"] == BATCH:
                self._ranges(Partition(row["source"], row["topic"], row["partition"]), doc["incarnation"]).add(doc["seen"])
            elif row["seq"] == self.header.summary and not self._seen:
                for source, topic, partition, life, pairs in doc:
                    self._ranges(Partition(source, topic, partition), life).add(pairs)

    def _ranges(self, partition: Partition, life: int) -> GrowingRanges:
        return self._seen.setdefault((partition, life), GrowingRanges())

    def _take_keys(self, files: Sequence[LedgerFile], known: int) -> None:
        after = max(known, self.header.keyspace_since)
        if after > known:
            self.index = KeyIndex()
        gone = freed(self.ledger, files, after)
        if gone.num_rows:
            self.index.discard(gone["key"])
        for rows, held in reservations(self.ledger, files, after, gone):
            self.index.add(rows["key"], rows["payload_hash"].to_numpy(), held=held)

    def _take_sequences(self, files: Sequence[LedgerFile], known: int) -> None:
        rows = self.ledger.read([f for f in files if f.section == ORDER and f.last > known], ["key", "doc"], known)
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
                if name not in self.marks or mark.seq >= self.marks[name].seq:
                    self.marks[name] = mark
        self.decided = {**self.decided, **headers}
        self.decided |= self._headers(files, self.pending - set(self.decided))
        for seq in sorted(self.decided)[:-SUMMARY_EVERY]:
            if seq not in self.pending:
                del self.decided[seq]

    def _compare(self, shown: int | None) -> None:
        if shown != (self.header.version if self.header.seq else None):
            self._damage = self.advice(
                f"shows {self.header.seq} decisions and its transaction id says {lineage.seq_of(shown or 0)}: it was restored to an older "
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
            f"{command('publish', name, '--accept-sink', 'SINK')} for each table that you "
            f"restored (the dead letters are the sink {LETTERS_SINK})."
        )

    def following(self, kind: str, attempt: str, now: dt.datetime, head: Head, **changes: Any) -> Header:
        """The header of the decision after `head`, which was read before; with everything that this process knows of publications."""
        last, seq = self.header, head.seq + 1
        return last.following(
            kind,
            attempt,
            now,
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
        known, payload, _ = self.index.probe(keys["key"])
        found = keys.filter(pa.array(known))
        return pa.table([found["key"], pa.array(payload[known], pa.int64())], schema=KEYS_SCHEMA), keys.filter(pa.array(~known))

    def held(self, keys: pa.Array | pa.ChunkedArray) -> Bool:
        """Which of these keys a letter holds."""
        return self.index.probe(keys)[2]
