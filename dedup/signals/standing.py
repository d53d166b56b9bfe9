"""One consumer as it stands now: what `dedup status` shows, and what the metrics are read from. Reads only."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, DedupError, StoreUnavailable
from checkpoint.head import Head, Present
from checkpoint.position import LAST
from checkpoint.records import RecordFilter
from checkpoint.start import Ends, Lag, lags
from deadletter import Status
from deadletter.letter import GROUPS
from deadletter.selection import Selection
from dedup.core.messages import OutboxLag
from dedup.core.store import Store

BUSY = dt.timedelta(minutes=1)
"""Since its last commit, a process that is alive counts as running; after that it waits for events."""

SHOWN_WITHIN = dt.timedelta(minutes=1)
"""From a commit until its rows show in their sinks; after that the publication is stuck, or nobody was left to do it."""

NEWEST = 50
"""Decisions of which the rate is taken."""

FARTHER = 8
"""How many times as many decisions are read next where the newest ones have too few records."""


class Activity(StrEnum):
    """What can be said of the processes of a consumer."""

    NEW = "new"  # nobody has run it
    RUNNING = "running"
    WAITING = "waiting"  # alive, and nothing committed for a minute
    STOPPED = "stopped"  # its process is gone
    UNKNOWN = "unknown"  # it ran on another host, and committed nothing for a minute


@dataclass(frozen=True)
class Standing:
    """One consumer now."""

    head: Head
    present: Sequence[Present]
    last_commit: dt.datetime | None
    rate: float | None  # events a second over the newest decisions
    letters: Mapping[str, int]  # kind -> open ones
    oldest: dt.datetime | None  # when the oldest of them failed first
    outbox: OutboxLag
    lags: Sequence[Lag] | None  # None: no broker was asked, or see `lag_problem`
    blocked: Mapping[str, int] = field(default_factory=dict)  # kind -> letters that wait behind another one of their sequence
    damage: str | None = None  # in which the message names the command
    reserved_since: dt.datetime | None = None  # when the oldest reservations were made that are kept
    unpublished_since: dt.datetime | None = None  # when the first batch was committed that a sink does not show
    lag_problem: ConfigError | None = None  # why the broker cannot say, as where it has a topic no more
    holds_up: bool = False  # it has not told its retention, and another one's own upkeep waits for that
    now: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def activity(self) -> Activity:
        """Whether it is at work."""
        busy = self.last_commit is not None and self.now - self.last_commit < BUSY
        if not self.present:
            return Activity.NEW if self.last_commit is None else Activity.STOPPED
        if any(one.alive for one in self.present):
            return Activity.RUNNING if busy else Activity.WAITING
        if all(one.alive is False for one in self.present):
            return Activity.STOPPED
        return Activity.RUNNING if busy else Activity.UNKNOWN

    @property
    def hidden_since(self) -> dt.datetime | None:
        """Since when batches are committed that a sink does not show, if that lasts."""
        since = self.unpublished_since
        return None if since is None or self.now - since < SHOWN_WITHIN else since

    @property
    def lag(self) -> tuple[int | None, float | None]:
        """Events and seconds to the end of the log, of all partitions; None where it is not known."""
        if self.lags is None:
            return None, None
        times = [one.seconds for one in self.lags]
        known = [seconds for seconds in times if seconds is not None]
        return sum(one.events for one in self.lags), max(known, default=None)


def look(store: Store, name: str, broker: Ends | None = None, source: str = "") -> Standing:
    """Read what is to be said of one consumer. Takes no lock; of decisions it reads the newest, of letters that wait each group.

    Raises:
        StoreError: the consumer cannot be read. SourceUnavailable: the broker does not answer.
    """
    head = store.head(name)
    newest = newest_records(store, head, NEWEST)
    groups, blocked, damage = _waiting(store, name)
    unpublished_since = store.unpublished_since(name)
    far, lag_problem = _lags(head, broker, source)
    return Standing(
        head,
        store.present(name),
        last_commit=pc.max(newest["committed_at"]).as_py(),
        rate=rate(newest),
        letters=_by_kind(groups),
        blocked=_by_kind(blocked),
        oldest=pc.min(groups["first_failed_at"]).as_py(),
        outbox=store.outbox(name).lag(),
        lags=far,
        lag_problem=lag_problem,
        damage=damage,
        reserved_since=store.reserved_since(name),
        unpublished_since=unpublished_since,
        holds_up=name in store.holding_up(),
    )


def newest_records(store: Store, head: Head, decisions: int, wanted: int = 0) -> pa.Table:
    """Batch records of so many of the newest decisions, or of more of them until there are more than `wanted`.

    A decision may have none, as one about letters, or one for each partition. It goes back only as far as it must.
    """
    until, start, span = LAST, head.seq, decisions
    pages: list[pa.Table] = []
    while not pages or (start and sum(page.num_rows for page in pages) <= wanted):
        start = max(0, start - span)
        pages.insert(0, store.batches(head.consumer, RecordFilter(start, until)))
        until, span = start, span * FARTHER
    return pa.concat_tables(pages)


def _lags(head: Head, broker: Ends | None, source: str) -> tuple[list[Lag] | None, ConfigError | None]:
    """The lags, where this broker was named and is read from; or why it has none for this consumer, which says nothing of other ones."""
    read = {partition.source for partition in head.checkpoints}
    if broker is None or not read or (source and source not in read):
        return None, None
    try:
        return lags(head, broker, source=source or None), None
    except ConfigError as error:
        return None, error


def _by_kind(groups: pa.Table) -> dict[str, int]:
    found = groups.group_by("kind").aggregate([("letters", "sum")])
    return dict(zip(found["kind"].to_pylist(), found["letters_sum"].to_pylist(), strict=True))


def _waiting(store: Store, name: str) -> tuple[pa.Table, pa.Table, str | None]:
    """GROUPS of all open letters, those of blocked ones, or why these cannot be told, which says nothing of other consumers."""
    try:
        store.require_letters(name)
        found, blocked = (store.groups(Selection(name, status=status, limit=None)) for status in (Status.OPEN, Status.BLOCKED))
        return found, blocked, None
    except StoreUnavailable:
        raise
    except DedupError as error:
        return GROUPS.empty_table(), GROUPS.empty_table(), str(error)


def rate(records: pa.Table) -> float | None:
    """Events a second from the first of these decisions to the last; None where they are fewer than two, or at one time."""
    if not records.num_rows:
        return None
    first, last = pc.min(records["committed_at"]).as_py(), pc.max(records["committed_at"]).as_py()
    seconds = (last - first).total_seconds()
    later = records.filter(pc.greater(records["committed_at"], pa.scalar(first, records.schema.field("committed_at").type)))
    return None if not seconds else float(pc.sum(later["delivered"]).as_py()) / seconds
