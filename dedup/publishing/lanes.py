"""The protocol below the publisher: own a producer group, store events, send them, confirm them, and send again what is not confirmed.

Within a partition an event is sent for the first time only after the broker has all events before it, whichever process sends.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tenacity

from checkpoint.errors import (
    CommitConflict,
    CommitUnknown,
    ConfigError,
    NotConfirmed,
    ResendTooLate,
    SourceUnavailable,
    StoreRestored,
    StoreUnavailable,
    command,
)
from dedup.publishing.events import Owner, Sender, Stored

log = logging.getLogger("dedup")

T = TypeVar("T")

TRUST_SECONDS = 1.0
"""For so long after the state was last seen to be ours, events are sent without looking again."""


@dataclass(frozen=True)
class PublisherLimits:
    """The limits of a publisher."""

    max_events: int
    max_bytes: int
    max_outage: float  # seconds
    resend_within: dt.timedelta | None
    on_step: Callable[[str], None]


def patiently(seconds: float, call: Callable[[], T]) -> T:
    """Repeat a call with backoff while the database or the broker does not answer, for so many seconds."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((StoreUnavailable, CommitConflict, SourceUnavailable)),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
        stop=tenacity.stop_after_delay(seconds),
        reraise=True,
    )(call)


class Lanes:
    """The partitions of one destination as one producer group uses them. One thread may use it at a time.

    Args:
        group: its name.
        state: a PublisherState.
    """

    def __init__(self, group: str, state: Any, to: Sender, limits: PublisherLimits) -> None:
        self.group, self.state, self.to, self.limits = group, state, to, limits
        self._owner: Owner | None = None
        self.next: dict[int, int] = {}  # partition -> sequence number that is given next
        self.behind = True  # whether something may be stored that is not confirmed
        self.broker_has = 0  # partitions
        self._looked = 0.0

    def patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call while the database or the broker does not answer."""
        return patiently(self.limits.max_outage, call)

    # ------------------------------------------------------------------ owning the group
    def owner(self) -> Owner:
        """Open the group if it is not open. Raises ConfigError, SourceUnavailable, StoreError.

        Crash: as PublisherState.open.
        """
        if self._owner is None:
            self.limits.on_step("open")
            self.broker_has = self.patiently(self.to.partitions)
            names = (self.to.source, self.to.topic, self.group, self.broker_has)
            owner = self.patiently(lambda: self._open(names))
            self._check_count(owner)
            self._owner = owner
        return self._owner

    def _open(self, names: tuple[str, str, str, int]) -> Owner:
        self._looked = time.monotonic()
        owner: Owner = self.state.open(*names)
        return owner

    def _check_count(self, owner: Owner) -> None:
        count, topic = self.broker_has, self.to.topic
        how = command("publisher", "set-partitions", self.group, count, "--topic", topic)
        if count < owner.partitions:
            raise ConfigError(
                f"Topic {topic!r} has {count} partitions, and producer group {self.group!r} spreads its keys over {owner.partitions}: the "
                f"topic was created again. Find out which events are lost, then run {how}."
            )
        if count > owner.partitions:
            log.warning("%s: keys stay on the first %d of %d partitions; to use all, run %s", self.group, owner.partitions, count, how)

    def give_back(self) -> None:
        """Give up the ownership of the group."""
        owner, self._owner, self.behind = self._owner, None, True
        self.state.close(owner)

    # ------------------------------------------------------------------ what was stored before
    def catch_up(self) -> int:
        """Send all events that are stored and not confirmed, and learn the next numbers. Return how many events were sent.

        Raises:
            StoreRestored: the state is older than what was stored here. ResendTooLate: an event has waited longer than `resend_within`.
            Others: as `send`.

        Crash: as `send`.
        """
        owner = self.owner()
        if not self.behind:
            return 0
        lanes = self.patiently(lambda: self.state.lanes(owner))
        if any(partition not in lanes or lanes[partition].next < number for partition, number in self.next.items()):
            raise StoreRestored(
                f"The state of producer group {self.group!r} is older than what this publisher has stored: "
                "the database was restored. Open a new publisher."
            )
        self._check_age([lane.waiting_since for lane in lanes.values() if lane.waiting_since])
        self.next = {partition: lane.next for partition, lane in lanes.items()}
        sent = sum(self._resend(owner, partition, lane.confirmed) for partition, lane in lanes.items() if lane.waiting_since)
        self.behind = False
        return sent

    def _check_age(self, since: Sequence[dt.datetime]) -> None:
        oldest, within = min(since, default=None), self.limits.resend_within
        if oldest and within is not None and dt.datetime.now(dt.UTC) - oldest > within:
            raise ResendTooLate(
                f"Producer group {self.group!r} has events that were stored at {oldest:%Y-%m-%d %H:%M:%S %Z} and are not confirmed. "
                f"That is longer ago than resend_within: consumers may have forgotten these ids, and would take the events for new ones. "
                f"Look at them with {command('publisher', 'show', self.group)}. Then open the group with a longer resend_within, "
                f"or give them up with {command('publisher', 'discard', self.group)}."
            )

    def _resend(self, owner: Owner, partition: int, confirmed: int) -> int:
        sent = 0
        while page := self.patiently(partial(self.state.waiting, owner, partition, confirmed, self.limits.max_bytes)):
            self.limits.on_step("resend")
            self._looked = 0.0  # what was stored a while ago is sent only by who owns the group now
            self.send({partition: page})
            confirmed, sent = page[-1].sequence, sent + len(page)
        return sent

    # ------------------------------------------------------------------ storing
    def store(self, lanes: Mapping[int, Sequence[Stored]], hashes: Mapping[str, int]) -> bool:
        """Store events. Return False, and store nothing, if another process has stored one of the ids in the meantime.

        Raises:
            Fenced, StoreRestored, StoreUnavailable, CommitUnknown: as PublisherState.store.

        Crash: all of it is stored or nothing.
        """
        rows = [row for lane in lanes.values() for row in lane]
        self.limits.on_step("store")
        self.behind, looked = True, time.monotonic()
        if not self._keep(rows, hashes):
            self.behind = False
            return False
        self._looked = looked
        self.next |= {partition: lane[-1].sequence + 1 for partition, lane in lanes.items()}
        return True

    def _keep(self, rows: Sequence[Stored], hashes: Mapping[str, int]) -> bool:
        owner = self.owner()
        store: Callable[[], bool] = partial(self.state.store, owner, rows, hashes)
        try:
            return self.patiently(store)
        except CommitUnknown:
            if self._is_stored(owner, rows[-1]):
                return True
        try:
            return self.patiently(store) or self._is_stored(owner, rows[-1])
        except StoreRestored:  # the first statement was only late
            if self._is_stored(owner, rows[-1]):
                return True
            raise

    def _is_stored(self, owner: Owner, row: Stored) -> bool:
        found = self.patiently(lambda: self.state.waiting(owner, row.partition, row.sequence - 1, 1))
        return bool(found and found[0] == row)

    # ------------------------------------------------------------------ sending
    def send(self, lanes: Mapping[int, Sequence[Stored]]) -> None:
        """Send what is stored, each partition in its order. Note what the broker has, also if a later partition fails.

        Raises:
            NotConfirmed: the broker does not answer. ConfigError: it refuses. Fenced, StoreRestored, StoreUnavailable.

        Crash: what the broker has and was not confirmed is sent again, unchanged.
        """
        done: dict[int, int] = {}
        try:
            for partition, events in lanes.items():
                self._send_lane(partition, events, done)
        except SourceUnavailable as error:
            self._confirm(done)
            raise NotConfirmed(
                f"{sum(map(len, lanes.values()))} events of producer group {self.group!r} are stored, and the broker has not "
                f"confirmed all of them: {error} This publisher, or the next one of this group, sends them before any others. "
                "Repeat the call only if each event has an id."
            ) from error
        except ConfigError:
            self._confirm(done)
            raise
        self._confirm(done)

    def _confirm(self, done: Mapping[int, int]) -> None:
        if done:
            self.limits.on_step("confirm")
            owner = self.owner()
            self.patiently(lambda: self.state.confirm(owner, done))
            self.limits.on_step("confirmed")

    def _send_lane(self, partition: int, events: Sequence[Stored], done: dict[int, int]) -> None:
        sent = 0
        while sent < len(events):
            self.limits.on_step("send")
            sent += self.patiently(partial(self._send_checked, partition, events[sent:]))
            done[partition] = events[sent - 1].sequence
            self.limits.on_step("sent")

    def _send_checked(self, partition: int, events: Sequence[Stored]) -> int:
        """Nothing is sent by a publisher that slept while another one took over."""
        now = time.monotonic()
        if now - self._looked > TRUST_SECONDS:
            self.state.check(self.owner())
            self._looked = now
        return self.to.send(partition, events)
