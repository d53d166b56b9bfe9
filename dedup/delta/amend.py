"""Decisions that people make about a consumer's state, as headers. Nothing is committed here; called by the store."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

from checkpoint.advice import command
from checkpoint.errors import ConfigError, PublicationStuck
from checkpoint.position import Partition
from dedup.delta import tables
from dedup.delta.events import LETTERS_SINK
from dedup.delta.header import Header, Mark
from dedup.delta.outbox_tables import last_decision
from dedup.delta.publish import Publisher
from dedup.delta.state import ConsumerState
from dedup.store import Head


def amendment(state: ConsumerState, publisher: Publisher, change: Callable[[Head], Head], *, by: str, reason: str) -> Header:
    """The header after `change`; what is decided is published first, so that nothing old is left to a new life.

    Raises:
        PublicationStuck: something cannot be published, and the change does not begin all over.
    """
    head = _unused(state, replace(change(state.header.head), seq=state.header.seq))
    dropped: tuple[tuple[int, str], ...] = ()
    try:
        if state.damage is None:
            publisher.publish()
    except PublicationStuck:
        if head.keyspace == state.header.head.keyspace:
            raise
        # After a reset every event comes again: rows of the old life must not come up late in its sinks.
        dropped = tuple((seq, entry.name) for seq in sorted(state.pending) for entry in state.decided[seq].sinks)
    header = _next(state, "amend", head, by, reason)
    if head.keyspace != state.header.head.keyspace:
        # Whoever starts over may have emptied, dropped and re-created the sinks; the letters stay.
        header = replace(header, marks={name: mark for name, mark in header.marks.items() if name == LETTERS_SINK})
    return replace(_above_messages(state, header), dropped=(*header.dropped, *dropped))


def _above_messages(state: ConsumerState, header: Header) -> Header:
    """A new generation numbers its decisions above the messages of those that were taken back: what became of these is kept by number."""
    if header.head.generation == state.header.head.generation:
        return header
    seq = max(header.seq, last_decision(state.sinks.engine, *state.outbox_uris()) + 1)
    keyspace_since = seq if header.keyspace_since == header.seq else header.keyspace_since
    return replace(header, head=replace(header.head, seq=seq), generation_since=seq, keyspace_since=keyspace_since)


def _unused(state: ConsumerState, head: Head) -> Head:
    """With a generation that neither the ledger nor its tables have met: they keep the transaction ids of a time that was taken back."""
    if state.table is None or head.generation == state.header.head.generation:
        return head
    free = head.generation
    while tables.transaction_of(state.table, state.ledger.app(state.table, free)) is not None or state.agreement.meets(free):
        free += 1
    return replace(head, generation=free, keyspace=free if head.keyspace == head.generation else head.keyspace)


def acceptance(state: ConsumerState, publisher: Publisher, sink: str, uri: str | None, *, lost: bool, by: str, reason: str) -> Header:
    """The header that says: the table under this name now is the right one."""
    mark = state.marks.get(sink)
    waiting = [(seq, entry) for seq in sorted(state.pending) for entry in state.decided[seq].sinks if entry.name == sink]
    known = uri or (mark.uri if mark else next((e.uri for _, e in waiting), None))
    if known is None:
        names = sorted({*state.marks, *(e.name for seq in state.pending for e in state.decided[seq].sinks)})
        raise ConfigError(
            f"Consumer {state.ledger.consumer!r} has never written to a sink {sink!r}, as far as its ledger knows: there is nothing to "
            f"accept. It has written to: {', '.join(names) or 'none'}."
        )
    now = state.sinks.open(sink, known)
    unpublished = [(s, e) for s, e in waiting if not publisher.shows(now.table, state.decided[s], e)]
    gone = sorted({s for s, entry in unpublished if publisher.missing(entry, now.uri)})
    if gone and not lost:
        rows = sum(entry.rows for s, entry in unpublished if s in gone)
        raise PublicationStuck(
            f"Decisions {gone} with {rows} rows for {sink!r} are not known to be published, and their files are gone. "
            "If those rows were in the old table, or may be lost, say so: "
            f"{command('publish', state.ledger.consumer, '--accept-sink', sink, '--lost')}."
        )
    header = _next(state, "accept-sink", state.header.head, by, reason)
    generation = state.header.head.generation
    shown = tables.transaction_of(now.table, state.app(generation, sink))
    accepted = Mark(mark.seq if mark else 0, now.table_id, now.table.version(), now.uri, generation, shown, header.seq)
    return replace(header, marks={**header.marks, sink: accepted}, dropped=(*header.dropped, *((seq, sink) for seq in gone)))


def purging(state: ConsumerState, before: dt.date, floors: Mapping[Partition, int], *, by: str, reason: str) -> Header:
    """The header that says: reservations of days before this one may be gone."""
    state.require_sound()
    head = state.header.head
    raised = {p: max(floor, head.floors.get(p, floor)) for p, floor in {**head.floors, **floors}.items()}
    header = _next(state, "purge", replace(head, floors=raised), by, reason)
    return replace(header, purged_before=max(before.isoformat(), header.purged_before or ""))


def _next(state: ConsumerState, kind: str, head: Head, by: str, reason: str) -> Header:
    return state.following(kind, uuid.uuid4().hex, dt.datetime.now(dt.UTC), head, by=by, reason=reason)
