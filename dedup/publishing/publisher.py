"""The publisher stores events with a number and an id, sends them, and sends them again, unchanged, until the broker confirms them.

A producer group has one publisher at a time; the newest wins. docs/how-to/publishing.md says what is promised and what is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from checkpoint import given
from checkpoint.errors import ConfigError, Fenced, KeyConflict, NotConfirmed, StoreError, StoreRestored, StoreUnavailable
from dedup.core.settings import PUBLISHER
from dedup.publishing.events import GATEWAY, LONGEST_ID, OutgoingEvent, Sender, Stored, check_text, pages, payload_hash, spread, stored
from dedup.publishing.lanes import Lanes, PublisherLimits

STEPS = ("open", "resend", "look", "store", "send", "sent", "confirm", "confirmed")
"""What `on_step` is told, right before each acts; `sent` and `confirmed`: right after."""

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Published:
    """What became of the events of one call. The broker has all of them."""

    new: int = 0
    known: int = 0  # their ids were published before, with the same body; nothing was sent for them

    def __add__(self, other: Published) -> Published:
        return Published(self.new + other.new, self.known + other.known)


def _no_step(name: str) -> None:
    """Tell nobody."""


class Publisher:
    """Publish to one event hub or topic, as one producer group. Threads may share it: calls run one after the other.

    Args:
        group: the producer group. A program keeps its name when it is started again. Two programs that run at once need two names.
        store: the PostgresStore. The publisher keeps its state in the same schema.
        to: the sender, such as `dedup.eventhub.Sender(...)`. No other publisher may use it.
        partition_by: "key": dedup chooses the partition by the key, and a resend goes to the same one. "broker": the broker chooses it.
        max_events: the most events of one page. A page is stored by one statement and kept in memory.
        max_bytes: the most bytes of one page.
        max_outage: how long a call retries while the broker or the database does not answer, before it raises.
        resend_within: do not send again what was stored longer ago than this. Give the time for which consumers keep reservations. None:
            no limit.
        on_step: called with the name of each step right before it acts.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(
        self,
        group: str,
        store: Any,
        to: Sender,
        *,
        partition_by: Literal["key", "broker"] = "key",
        max_events: int = 1_000,
        max_bytes: int = 8 * 1024 * 1024,
        max_outage: given.Duration = 60.0,
        resend_within: given.Duration | None = None,
        on_step: Callable[[str], None] = _no_step,
    ) -> None:
        check_text("producer group", group)
        given.check(PUBLISHER, locals())
        self.group, self._to, self._store, self._by_key = group, to, store, partition_by == "key"
        within = None if resend_within is None else given.to_timedelta(resend_within)
        self._limits = PublisherLimits(max_events, max_bytes, given.to_seconds(max_outage), within, on_step)
        self._lanes = Lanes(group, _state_of(store), to, self._limits)
        self._lock, self._pid, self._turn = threading.RLock(), os.getpid(), 0
        self._over: Exception | None = None

    def __repr__(self) -> str:
        return f"Publisher({self.group!r}, {self._to!r})"

    def __enter__(self) -> Publisher:
        self.resend()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what users call
    def publish(self, events: Iterable[OutgoingEvent | bytes]) -> Published:
        """Publish events in their order, and return when the broker has all of them.

        It takes the next page of events after the broker has confirmed the page before.

        An event without an id is a new event at each call. An event with an id stays the same event when it is published again.

        Raises:
            KeyConflict: an id is known with another body; nothing of its page was stored.
            NotConfirmed: the broker does not confirm. What is stored is sent before anything else. Repeat the call only with ids.
            Fenced: a newer publisher has the group. StoreRestored: the state is older than what was published. ResendTooLate.
            ConfigError: an event cannot be sent. StoreUnavailable, CommitUnknown: the database is away; as NotConfirmed.

        Crash: pages before are confirmed. Of this one all events are stored or none; what is stored is sent by the next to open the group.
        """
        done = Published()
        with self._alone():
            found = (event if isinstance(event, OutgoingEvent) else OutgoingEvent(event) for event in events)
            for page in pages(found, self._limits.max_events, self._limits.max_bytes):
                done += self._publish(page)
        return done

    def publish_once(self, id: str, event: OutgoingEvent | bytes) -> Published:
        """Publish one event under an id. If any process calls it again with this id, the consumer still handles one event.

        Raises and Crash: as `publish`.
        """
        return self.publish([replace(event if isinstance(event, OutgoingEvent) else OutgoingEvent(event), id=id)])

    def resend(self) -> int:
        """Open the group and send the events that an earlier publisher has stored and the broker has not confirmed. Return how many.

        Raises and Crash: as `publish`.
        """
        with self._alone():
            return self._lanes.catch_up()

    def close(self) -> None:
        """Give up the group. Events that are not confirmed stay stored."""
        with self._lock:
            if self._pid == os.getpid():
                self._to.close()
                with contextlib.suppress(StoreUnavailable):
                    self._lanes.give_back()

    async def publish_async(self, events: Iterable[OutgoingEvent | bytes]) -> Published:
        """Do what `publish` does, in a thread."""
        return await asyncio.to_thread(self.publish, events)

    async def publish_once_async(self, id: str, event: OutgoingEvent | bytes) -> Published:
        """Do what `publish_once` does, in a thread."""
        return await asyncio.to_thread(self.publish_once, id, event)

    # ------------------------------------------------------------------ one page
    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if self._pid != os.getpid():
                raise ConfigError("This publisher was made in another process. Make one here, of a group of its own.")
            if self._over is not None:
                raise self._over
            try:
                yield
            except (Fenced, StoreRestored) as error:
                self._over = error
                raise
            except BaseException:
                self._lanes.behind = True
                raise

    def _publish(self, page: Sequence[OutgoingEvent]) -> Published:
        self._lanes.catch_up()
        hashes = _hashes(page)
        while True:
            fresh = self._new(page, hashes)
            if not fresh or self._store_and_send(fresh, hashes):
                return Published(len(fresh), len(page) - len(fresh))

    def _store_and_send(self, fresh: Sequence[OutgoingEvent], hashes: Mapping[str, int]) -> bool:
        """False where somebody else was faster with an id."""
        lanes = self._numbered(fresh)
        if not self._lanes.store(lanes, {event.id: hashes[event.id] for event in fresh if event.id is not None}):
            return False
        self._lanes.send(lanes)
        self._lanes.behind = False
        return True

    def _new(self, page: Sequence[OutgoingEvent], hashes: Mapping[str, int]) -> list[OutgoingEvent]:
        """Those that nobody has published; what others have stored and not sent yet is waited for."""
        self._limits.on_step("look")
        known = self._same(hashes)
        while waiting := {id: found for id, found in known.items() if not found.confirmed}:
            for id, found in waiting.items():
                self._wait_for(id, found.publisher)
            known = self._same(hashes)  # somebody may have given one up, which is new then
        firsts: dict[object, OutgoingEvent] = {}
        for number, event in enumerate(page):
            firsts.setdefault(number if event.id is None else event.id, event)
        return [event for name, event in firsts.items() if name not in known]

    def _same(self, hashes: Mapping[str, int]) -> Mapping[str, Any]:
        """Those that are known. Raises KeyConflict where one has another body."""
        known = self._known(list(hashes))
        for id, found in known.items():
            if found.payload_hash != hashes[id]:
                raise KeyConflict(f"Id {id!r} was published to {self._to.topic!r} with another body. Nothing of this page was stored.")
        return known

    def _known(self, ids: Sequence[str]) -> Mapping[str, Any]:
        owner = self._lanes.owner()
        found: Mapping[str, Any] = self._lanes.patiently(lambda: self._lanes.state.known(owner, ids))
        return found

    def _wait_for(self, id: str, publisher: int) -> None:
        """Until the group that stored this id has sent it, or somebody has given it up; if its process is gone, send what it left."""
        end, state, why = time.monotonic() + self._limits.max_outage, self._lanes.state, None
        while (found := self._known([id]).get(id)) is not None and not found.confirmed:
            name = state.name_of(publisher)
            if state.is_gone(publisher) and (why := self._send_left(name)) is None:
                continue
            if time.monotonic() > end:
                raise NotConfirmed(
                    f"Id {id!r} was stored by producer group {name!r}, which has not sent it yet and may be alive. Try again."
                ) from why
            time.sleep(POLL_SECONDS)

    def _send_left(self, group: str) -> Fenced | StoreRestored | None:
        """Send what a group that is gone has left, and give the group up, whatever happens: its owner would look alive as long as we live.

        Return why it could not go on as the owner of that group. That ends nothing of ours: the group has another owner now, or gets one.

        Raises: as Lanes.catch_up.

        Crash: as Lanes.catch_up; the next one that asks sees that this process has ended.
        """
        other = Lanes(group, _state_of(self._store), self._to, self._limits)
        try:
            other.catch_up()
        except BaseException as error:
            with contextlib.suppress(StoreError):  # the first error says more
                other.give_back()
            if isinstance(error, Fenced | StoreRestored):
                return error
            raise
        other.give_back()
        return None

    def _numbered(self, events: Sequence[OutgoingEvent]) -> dict[int, list[Stored]]:
        """partition -> its events, with their numbers. Raises ConfigError for one that cannot be sent."""
        owner, lanes = self._lanes.owner(), dict[int, list[Stored]]()
        largest = self._lanes.patiently(self._to.largest)
        for event in events:
            partition = self._partition(event, owner.partitions)
            lane = lanes.setdefault(partition, [])
            row = stored(owner, event, partition, self._lanes.next.get(partition, 1) + len(lane))
            if row.size > largest:
                raise ConfigError(f"An event has {row.size:,} bytes with its properties; {self._to.topic!r} takes at most {largest:,}.")
            lane.append(row)
        return lanes

    def _partition(self, event: OutgoingEvent, spread_over: int) -> int:
        if event.partition is not None:
            if event.partition >= self._lanes.broker_has:
                raise ConfigError(f"There is no partition {event.partition}: {self._to.topic!r} has {self._lanes.broker_has}.")
            return event.partition
        if not self._by_key:
            self._check_key(event)
            return GATEWAY
        name = event.key if event.key is not None else event.id
        if name is not None:
            return spread(name, spread_over)
        self._turn += 1
        return self._turn % spread_over

    def _check_key(self, event: OutgoingEvent) -> None:
        """Raise ConfigError for a key that the broker refuses: once it is stored, every event behind it would wait."""
        longest: int = getattr(self._to, "longest_key", LONGEST_ID)
        if event.key is not None and len(event.key) > longest:
            raise ConfigError(
                f"The key of an event has {len(event.key)} characters; {self._to.topic!r} takes at most {longest} where the broker chooses "
                f"the partition ({event.key!r:.80}). Nothing of this page was stored."
            )


def _hashes(page: Sequence[OutgoingEvent]) -> dict[str, int]:
    """id -> payload hash. Raises KeyConflict where two events of the page have one id and two bodies."""
    found: dict[str, int] = {}
    for event in page:
        if event.id is not None and found.setdefault(event.id, hashed := payload_hash(event.body)) != hashed:
            raise KeyConflict(f"Id {event.id!r} is given to two events with different bodies. Nothing of this page was stored.")
    return found


def _state_of(store: Any) -> Any:
    """Where the publisher's state is kept. Raises ConfigError for a store that has no such place."""
    if not any(kind.__module__.startswith("dedup.postgres") for kind in type(store).__mro__):
        raise ConfigError("A publisher keeps its state in PostgreSQL. Give it a PostgresStore.")
    from dedup.publishing.postgres import PublisherState

    return PublisherState(store.dsn, store.schema, store.auto_migrate)
