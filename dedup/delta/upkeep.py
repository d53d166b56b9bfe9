"""Housekeeping of our own tables (few files, short logs; it changes no row), and the headers of changes that a person makes.

A failure of housekeeping never fails a batch: it is logged, and the next turn tries again. This module only makes those headers; the store
commits them. Called by the store and the transaction.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

from checkpoint.errors import ConfigError, PublicationStuck, Refused, StoreUnavailable, command
from checkpoint.head import Head
from checkpoint.position import Partition
from dedup.core.retention import Remains
from dedup.delta import tables
from dedup.delta.commit import SinkPublisher
from dedup.delta.engine import Engine
from dedup.delta.ledger import LETTERS_SINK, Header, Mark
from dedup.delta.letters import ROW_GROUP
from dedup.delta.messages import last_decision
from dedup.delta.state import ConsumerState
from dedup.delta.storage import StorageOptions, answering, filesystem, join, remove

log = logging.getLogger("dedup")

COMPACT_EVERY = 100
"""Decisions between two compactions: bounds the number of files that a start has to open."""

STAGED_DAYS = 7
"""Age above which staged rows that no pending decision names are left over from a dead attempt."""

VACUUM_EVERY = 1000
"""Decisions between two clean-ups of files that a compaction has replaced."""

TARGET_BYTES = 64 * 1024 * 1024
"""Size above which a file is left alone."""

YOUNG_BYTES = TARGET_BYTES // 16
"""The same at most compactions: the last large file is not written anew each time."""

LARGE_EVERY = 16 * COMPACT_EVERY
"""Decisions between two compactions up to TARGET_BYTES."""


def compact(uri: str, engine: Engine, *, target: int = TARGET_BYTES) -> None:
    """Rewrite small files of each partition into one. Crash: each row is in an old file or in a new one, never in both.

    Args:
        target: bytes above which a file is left alone.
    """
    _quietly(uri, engine, lambda table: engine.compact(table, target, ROW_GROUP), "compacted")


def vacuum(uri: str, engine: Engine, *, full: bool = True) -> None:
    """Delete files that left the table longer ago than its retention; with `full` also those that its log does not name any more.

    Those are files that never came into it, and those that left it before its last checkpoint and whose time was over by then. So only
    `full` finds all. It is for a time when no decision waits for its publication: the table does not name the files of that one yet.

    Crash: some are deleted.
    """
    _quietly(uri, engine, lambda table: engine.vacuum(table, full=full), "vacuumed")


def after_decision(seq: int, uris: Iterable[str], engine: Engine) -> None:
    """What a running consumer does by itself from time to time, after everything of a decision is true and visible."""
    for uri in uris:
        if seq % COMPACT_EVERY == 0:
            compact(uri, engine, target=YOUNG_BYTES if seq % LARGE_EVERY else TARGET_BYTES)
        if seq % VACUUM_EVERY == 0:
            vacuum(uri, engine)


def expire(uris: Iterable[str], engine: Engine) -> None:
    """Delete files that left these tables longer ago than their retention, while no decision waits. Crash: some are deleted."""
    for uri in uris:
        vacuum(uri, engine)


def clear_staged(root: str, options: StorageOptions, folder: str, needed: Collection[str], now: dt.datetime) -> None:
    """Delete staged rows of attempts that never committed, once they are older than STAGED_DAYS. Raises StoreUnavailable.

    Crash: some are deleted.
    """
    old = [path for path, since in _staged(root, options, folder) if now - since > dt.timedelta(days=STAGED_DAYS)]
    remove(root, options, [path for path in old if path not in needed])


def staged_left(root: str, options: StorageOptions, folder: str, needed: Collection[str]) -> list[Remains]:
    """Where rows of attempts that never committed can still be found; nothing where there are none."""
    since = [since for path, since in _staged(root, options, folder) if path not in needed]
    then = "the same command, or `dedup upkeep`, deletes them then"
    where = f"{join(root, 'staged', folder)}: rows for merges, and for sinks that only Spark writes, of attempts that failed"
    return [Remains(where, max(since) + dt.timedelta(days=STAGED_DAYS), then)] if since else []


def _staged(root: str, options: StorageOptions, folder: str) -> list[tuple[str, dt.datetime]]:
    """Files, and when they were written. Raises StoreUnavailable."""
    selector = pafs.FileSelector(f"staged/{folder}", allow_not_found=True, recursive=True)
    with answering(root):
        found = filesystem(root, options).get_file_info(selector)
    return [(info.path, info.mtime) for info in found if info.type == pafs.FileType.File and info.mtime is not None]


def needed_files(state: ConsumerState) -> frozenset[str]:
    """What decisions list that may wait for a sink."""
    return frozenset(add.path for seq in state.pending for entry in state.decided[seq].sinks for add in entry.adds)


def _quietly(uri: str, engine: Engine, act: Callable[[DeltaTable], object], what: str) -> None:
    try:
        table = engine.handle(uri).look()
        if table is not None:
            act(table)
    except (*tables.FAILED, pa.ArrowException) as error:  # Arrow's: of a file that is damaged
        log.warning("%s was not %s this time: %s", uri, what, error)


def amendment(
    state: ConsumerState, publisher: SinkPublisher, change: Callable[[Head], Head], *, by: str, reason: str, give_up: bool = True
) -> Header:
    """The header after `change`; what is decided is published first, so that nothing old is left to a new life.

    Args:
        give_up: where the change begins all over, what cannot be published to a sink is given up; of a sink that can be read only where a
            person has to repair it.

    Raises:
        PublicationStuck: something cannot be published, and is not given up.
        StoreUnavailable: the same, because a sink cannot be reached; or the store cannot.

    Crash: the change is not made; what was published stays published.
    """
    changed = replace(change(state.header.head), seq=state.header.seq)
    anew = changed.keyspace != state.header.head.keyspace
    head = _unused(state, changed, reachable=anew and give_up)
    dropped: tuple[tuple[int, str], ...] = ()
    try:
        if state.damage is None:
            publisher.publish()
    except (PublicationStuck, StoreUnavailable) as error:
        if not (anew and give_up):
            raise
        if isinstance(error, StoreUnavailable):
            require_own_tables(state)
            if not _lacks_a_sink(state):
                raise  # others commit to it, or it is away for a moment: the next call may publish
        # After a reset every event comes again: rows of the old life must not come up late in its sinks.
        dropped = tuple((seq, entry.name) for seq in sorted(state.pending) for entry in state.decided[seq].sinks)
        log.warning("%s: decisions %s are not published, and given up: %s", head.consumer, sorted({seq for seq, _ in dropped}), error)
    header = _next(state, "amend", head, by, reason)
    if anew:
        # Whoever starts over may have emptied, dropped and re-created the sinks; the letters stay.
        header = replace(header, marks={name: mark for name, mark in header.marks.items() if name == LETTERS_SINK})
    return replace(_above_messages(state, header), dropped=(*header.dropped, *dropped))


def require_own_tables(state: ConsumerState) -> None:
    """Raise StoreUnavailable where a table below the store's folder cannot be read: then not only a sink is away."""
    for uri in state.own_tables().values():
        state.sinks.table(uri)


def _lacks_a_sink(state: ConsumerState) -> bool:
    """Whether a sink cannot be read that decided rows wait for."""
    for uri in {entry.uri for seq in state.pending for entry in state.decided[seq].sinks}:
        state.sinks.forget(uri)
        try:
            state.sinks.table(uri)
        except StoreUnavailable:
            return True
    return False


def _above_messages(state: ConsumerState, header: Header) -> Header:
    """A new generation numbers its decisions above the messages of those that were taken back: what became of these is kept by number."""
    if header.head.generation == state.header.head.generation:
        return header
    seq = max(header.seq, last_decision(state.sinks.engine, *state.outbox_uris()) + 1)
    keyspace_since = seq if header.keyspace_since == header.seq else header.keyspace_since
    return replace(header, head=replace(header.head, seq=seq), generation_since=seq, keyspace_since=keyspace_since)


def _unused(state: ConsumerState, head: Head, *, reachable: bool) -> Head:
    """With a generation that neither the ledger nor its tables have met: they keep the transaction ids of a time that was taken back."""
    if state.table is None or head.generation == state.header.head.generation:
        return head
    free = head.generation
    while tables.transaction_of(state.table, state.ledger.app(state.table, free)) is not None or state.agreement.meets(
        free, reachable=reachable
    ):
        free += 1
    return replace(head, generation=free, keyspace=free if head.keyspace == head.generation else head.keyspace)


def acceptance(
    state: ConsumerState, publisher: SinkPublisher, sink: str, uri: str | None, *, moved: bool, lost: bool, by: str, reason: str
) -> Header:
    """The header that says: the table under this name now, or at this URI, is the right one.

    Args:
        moved: the URI is where the table was moved to: nothing may be left behind.
    """
    mark = state.marks.get(sink)
    waiting = [(seq, entry) for seq in sorted(state.pending) for entry in state.decided[seq].sinks if entry.name == sink]
    places = [state.place_of(entry, seq) for seq, entry in waiting]
    if mark is not None:
        places.insert(0, state.here(sink, mark.uri))
    known = uri or next(iter(places), None)
    if known is None:
        names = sorted({*state.marks, *(e.name for seq in state.pending for e in state.decided[seq].sinks)})
        raise ConfigError(
            f"Consumer {state.ledger.consumer!r} has never written to a sink {sink!r}, as far as its ledger knows: there is nothing to "
            f"accept. It has written to: {', '.join(names) or 'none'}."
        )
    if moved:
        _require_moved(state, sink, known, places)
    now = state.sinks.open(sink, known)
    unpublished = [(s, e) for s, e in waiting if not publisher.shows(now.table, state.decided[s], e)]
    gone = sorted({s for s, entry in unpublished if publisher.missing(entry, now.uri)})
    if gone and not lost:
        rows = sum(entry.rows for s, entry in unpublished if s in gone)
        raise PublicationStuck(
            f"Decisions {gone} with {rows} rows for {sink!r} are not known to be published, and their files are gone. "
            "If those rows were in the old table, or may be lost, say so: "
            f"{command('sink', 'accept', state.ledger.consumer, sink, '--lost')}."
        )
    header = _next(state, "accept-sink", state.header.head, by, reason)
    generation = state.header.head.generation
    shown = tables.transaction_of(now.table, state.app(generation, sink))
    accepted = Mark(mark.seq if mark else 0, now.table_id, now.table.version(), now.uri, generation, shown, header.seq)
    return replace(header, marks={**header.marks, sink: accepted}, dropped=(*header.dropped, *((seq, sink) for seq in gone)))


def _require_moved(state: ConsumerState, sink: str, to: str, places: Sequence[str]) -> None:
    """Raise Refused where the table is still at an address that decisions name: they go there, and a copy would lack them."""
    if (own := state.own_tables().get(sink)) is not None:
        raise Refused(f"The table {sink!r} is always at {own}: dedup finds it below the store's folder.")
    for place in dict.fromkeys(places):
        if place != to and state.sinks.table(place) is not None:
            raise Refused(
                f"The sink {sink!r} still has a table at {place}, where the decisions of {state.ledger.consumer!r} name it; a copy at {to} "
                "would lack what goes there. Move or remove the old one first."
            )


def purging(state: ConsumerState, before: dt.date, floors: Mapping[Partition, int], *, by: str, reason: str) -> Header:
    """The header that says: reservations of days before this one do not count, and may be gone."""
    state.require_sound()
    head = state.header.head
    raised = {p: max(floor, head.floors.get(p, floor)) for p, floor in {**head.floors, **floors}.items()}
    header = _next(state, "purge", replace(head, floors=raised), by, reason)
    if header.purged_before is not None and header.purged_before >= before.isoformat():
        return header
    on = header.committed_at.date().isoformat()
    return replace(header, purged_before=before.isoformat(), purged_on=on, purged_in=header.seq)


def _next(state: ConsumerState, kind: str, head: Head, by: str, reason: str) -> Header:
    return state.following(kind, uuid.uuid4().hex, dt.datetime.now(dt.UTC), head, by=by, reason=reason)
