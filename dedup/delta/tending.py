"""What the upkeep of a Delta store does: for all consumers, as `dedup upkeep` calls it, and in the turns of a consumer's own process.

A turn works on a copy of the store that has states of its own, as another process would: no batch waits for its lock. The one decision that
an upkeep makes, the purge, has its turn between two batches (epoch.py). A running stream rewrites its small files by itself (upkeep.py).
Two processes of one consumer may do an upkeep at once: the ledger decides, and the second purge finds nothing. Called by the store.
"""

from __future__ import annotations

import copy
import datetime as dt
import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from typing import Self

from checkpoint.errors import ConfigError, DedupError, command
from dedup.core.retention import Part, PurgeBound, Upkept, apart, bounded, message_purges
from dedup.delta import ledger_log, upkeep, verify
from dedup.delta.clocks import purged_up_to
from dedup.delta.commit import SinkPublisher
from dedup.delta.consumers import States
from dedup.delta.ledger import Header
from dedup.delta.outbox import DeltaOutbox
from dedup.delta.state import ConsumerState
from dedup.delta.storage import SPARK, StorageOptions, safe_name
from dedup.delta.upkeep import purging

log = logging.getLogger("dedup")

TIDY_EVERY = 86_400.0
"""Seconds between two looks for files that nobody needs, in one process. Another look follows each purge."""

PARTS = 30
"""Of the retention: between two looks for old messages, in one process, is one of them."""


def midnight(day: dt.date) -> dt.datetime:
    """The beginning of this UTC day."""
    return dt.datetime.combine(day, dt.time(), dt.UTC)


def _told_late(consumer: str, kept: dt.date) -> str:
    return (
        f"{consumer}: a host whose clock was late gave the day {kept} to reservations that are newer than some that must be kept. So all "
        "reservations since that day are kept"
    )


class Tending:
    """The part of `DeltaStore` that forgets what is old, and deletes what nobody needs."""

    path: str
    storage_options: StorageOptions
    _states: States

    def _publisher(self, state: ConsumerState) -> SinkPublisher:
        raise NotImplementedError

    def outbox(self, consumer: str) -> DeltaOutbox:
        """The messages that this consumer has published."""
        raise NotImplementedError

    def consumers(self) -> list[str]:
        """Names, sorted."""
        raise NotImplementedError

    def purge_bound(self, consumer: str, before: dt.date) -> PurgeBound | None:
        """Up to where a purge with this day goes at most. None where the consumer has decided nothing.

        That is the day itself, or as long before the time of the log that the consumer has reached as the day is before now.
        """
        with self._states.existing(consumer) as state:
            reached = ledger_log.reached(state)
        return bounded(consumer, reached, midnight(before), dt.datetime.now(dt.UTC)) if reached else None

    def purge(self, consumer: str, before: dt.date, *, by: str, reason: str, although_behind: bool = False) -> None:
        """Drop reservations that were decided before that UTC day, or before `purge_bound` if that is earlier; the log says so then.

        Keys that a letter holds stay. A message whose reservation was dropped counts as new when it comes again. Running processes forget
        those keys at their next look. Of a purge up to a day after today, rows of today stay until a later purge, and do not count.

        It has its turn between two batches of a running stream: each waits for the other, for a while.

        Where a host whose clock was late gave an older day to reservations that are newer, it goes up to that day only; the log says so.

        Args:
            although_behind: purge up to that day, however far the consumer is.

        Crash: nothing is purged, or no process knows those keys any more; the next purge drops rows that this one has left.
        """
        if not although_behind and (bound := self.purge_bound(consumer, before)):
            if told := bound.told(midnight(before)):
                log.warning("Purging reservations: %s", told)
            before = bound.bound.date()
        decided = dt.datetime.now(dt.UTC).date()  # or later: rows of that day may be of decisions after this one
        before = self._in_order(consumer, asked := before)
        if before < asked:
            log.warning("Purging reservations: %s", _told_late(consumer, before))
        with self._states.existing(consumer) as state:
            floors = ledger_log.floors(state, before)

        def planned(state: ConsumerState) -> Header:
            nonlocal before  # a host whose clock is late may have decided since
            before = purged_up_to(state.ledger.files_now(), before, decided)
            return purging(state, before, floors, by=by, reason=reason)

        with self._states.turns(consumer).letters(lambda: self._states.header(consumer)):
            self._states.commit_planned(consumer, planned)
            with state.lock:
                state.ledger.drop_reservations(min(before, decided))

    def _in_order(self, consumer: str, before: dt.date) -> dt.date:
        """That day, or an earlier one that a host whose clock was late gave to newer reservations."""
        with self._states.existing(consumer) as state:
            return purged_up_to(state.ledger.files_now(), before, dt.datetime.now(dt.UTC).date())

    def upkeep(self, retention: dt.timedelta, *, although_behind: Collection[str] = (), dry_run: bool = False) -> list[Upkept]:
        """Forget reservations and sent messages that are older than that, and `maintain` each consumer.

        For a scheduler, once a day. Running consumers go on.

        Args:
            although_behind: consumers that count as having read everything.
            dry_run: say what would be done.

        Raises:
            StoreUnavailable: no consumer's state can be read. One alone that cannot is named, and the others are done.

        Crash: each step is a decision of its own, and the next upkeep goes on.
        """
        before = dt.datetime.now(dt.UTC) - retention
        parts: list[Part] = [
            (Upkept("reservations", name, 0), partial(self._upkept, name, before.date(), name in although_behind, dry_run))
            for name in self.consumers()
        ]
        return apart([*parts, *message_purges(self, before, dry_run=dry_run)], self.consumers)

    def _upkept(self, consumer: str, before: dt.date, although_behind: bool, dry_run: bool) -> Upkept:
        done = self.forget(consumer, before, by="upkeep", although_behind=although_behind, dry_run=dry_run)
        if not dry_run:
            self.maintain(consumer)
        return done

    def forget(self, consumer: str, before: dt.date, *, by: str, although_behind: bool = False, dry_run: bool = False) -> Upkept:
        """Purge what was reserved before that day, as far as the consumer has read its log, where there is any.

        Crash: as of `purge`.
        """
        bound = None if although_behind else self.purge_bound(consumer, before)
        told, day = (bound.told(midnight(before)), bound.bound.date()) if bound else (None, before)
        kept = self._in_order(consumer, day)
        with self._states.existing(consumer) as state:
            count = state.ledger.count_reservations(kept)
        if count and not dry_run:
            self.purge(consumer, kept, by=by, reason=f"older than {before}", although_behind=True)
        late = _told_late(consumer, kept) if kept < day else None
        return Upkept("reservations", consumer, count, tuple(filter(None, (told, late))))

    def has_reserved(self, consumer: str, before: dt.date) -> bool:
        """Whether there are reservations of days before this one."""
        with self._states.existing(consumer) as state:
            return state.ledger.count_reservations(before) > 0

    def maintain(self, consumer: str) -> None:
        """Rewrite small files of ledger, dead letters and outbox into large ones, and delete staged files that no decision lists.

        On object storage it also deletes copies of files of keys that no process needs.

        It deletes only files that are older than a week, and those that left these tables as long ago as they say. A running consumer
        rewrites small files by itself.

        Crash: no row changes; the next one goes on.
        """
        for act in self.tidying(consumer, compact=True):
            act()

    def tidying(self, consumer: str, *, compact: bool = False) -> Iterator[Callable[[], None]]:
        """What `maintain` does, each part to be called before the next one is asked for. Crash: as of `maintain`."""
        with self._states.existing(consumer) as state:
            needed = upkeep.needed_files(state)
            # While a decision waits for a sink, files that it lists are in folders whose tables do not name them yet.
            engine, full = self._states.engine, self._shows_all(state)
            for uri in (state.ledger.uri, state.letters_uri, *state.outbox_uris()):
                if compact:
                    yield partial(upkeep.compact, uri, engine)
                yield partial(upkeep.vacuum, uri, engine, full=full)
            if state.keys.copies is not None:
                yield state.keys.copies.clean
            now = dt.datetime.now(dt.UTC)
            yield partial(upkeep.clear_staged, self.path, self.storage_options, safe_name(consumer), needed, now)

    def _shows_all(self, state: ConsumerState) -> bool:
        """Whether the sinks show all that is decided, which a process that has just begun asks them. False where one does not tell."""
        try:
            return verify.unpublished_since(state, self._publisher(state)) is None
        except DedupError as error:
            log.warning("%s: not all files that nobody needs are looked for this time: %s", state.ledger.consumer, error)
            return False

    def tell_retention(self, consumer: str, retention: dt.timedelta | None, *, upkeep: bool) -> None:
        """Nothing to note: a ledger has the reservations of one consumer."""

    def holding_up(self) -> list[str]:
        """None: no consumer shares its ledger."""
        return []

    def upkeep_turn(self, consumer: str, retention: dt.timedelta) -> DeltaUpkeepTurn:
        """What the consumer's own process does for its upkeep. Begins nothing yet. Raises ConfigError where Spark commits."""
        if self._states.engine.name == SPARK:
            raise ConfigError(
                "Limits(upkeep=True) is not for a store where Spark commits: its jobs would take the place of the stream's. Run "
                f"{command('upkeep', '--retention', '30d', '--yes')} from a scheduler."
            )
        return DeltaUpkeepTurn(self._apart(), consumer, retention, self._states.tidied, self._states.looked)

    def _apart(self) -> Self:
        """This store with states of its own."""
        store = copy.copy(self)
        store._states = copy.copy(self._states)
        return store


class DeltaUpkeepTurn:
    """One turn.

    Args:
        store: a copy that nobody else uses.
        tidied: consumer -> when this process has looked for files that nobody needs.
        looked: consumer -> when it has looked for old messages.
    """

    def __init__(self, store: Tending, consumer: str, retention: dt.timedelta, tidied: dict[str, float], looked: dict[str, float]) -> None:
        self._store, self._consumer, self._retention, self._tidied, self._looked = store, consumer, retention, tidied, looked
        self._stopped = False
        self.kept: tuple[str, ...] = ()

    def portions(self) -> Generator[str, None, None]:
        """Old reservations; old messages; then files that nobody needs.

        Raises:
            DedupError: a portion failed; those before it are done.

        Crash: each portion is done or not; the next turn goes on, of whatever process.
        """
        before = dt.datetime.now(dt.UTC) - self._retention
        count = self._forget(before.date())
        if count:
            yield f"forgot {count} reservations"
        if gone := self._purge_messages(before):
            yield f"deleted {gone} sent messages"
        if count or time.monotonic() > self._tidied.setdefault(self._consumer, time.monotonic()) + TIDY_EVERY:
            yield from self._tidy()

    def _forget(self, before: dt.date) -> int:
        """How many; where nothing is that old, the log is not asked up to where the consumer is, because no purge goes further."""
        if not self._store.has_reserved(self._consumer, before):
            return 0
        done = self._store.forget(self._consumer, before, by="the consumer's own upkeep")
        self.kept = done.kept
        return done.count

    def _purge_messages(self, before: dt.datetime) -> int:
        """How many; of the messages that are kept all are read for it, so it is done once in a thirtieth of the retention."""
        if time.monotonic() < self._looked.get(self._consumer, -math.inf) + self._retention.total_seconds() / PARTS:
            return 0
        count = self._store.outbox(self._consumer).purge(before)
        self._looked[self._consumer] = time.monotonic()
        return count

    def stop(self) -> None:
        """No further portion begins. The one that runs cannot be ended: it is done or not, as where a process dies."""
        self._stopped = True

    def _tidy(self) -> Iterator[str]:
        for act in self._store.tidying(self._consumer):
            if self._stopped:
                return
            act()
            yield "looked for files that nobody needs"
        self._tidied[self._consumer] = time.monotonic()
