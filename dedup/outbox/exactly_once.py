"""Dispatch in flights: messages are handed to one transaction of the broker that also says that they were.

A flight is noted in the store before it is sent, and there is one at a time. Who finds one asks the broker whether it was committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from checkpoint.errors import DestinationUnavailable
from dedup.core.messages import Asked, Failed, Marks, Message, Outbox
from dedup.outbox.destination import Outcome
from dedup.outbox.dispatch import Dispatcher, TookNothing, log, noted


@dataclass(frozen=True)
class Flight:
    """Messages that go together, or not at all."""

    number: int  # ascending, until the store is restored from an older copy
    messages: Sequence[Message]
    fresh: bool  # noted by this very call: nobody can have sent it
    count: int = 0  # of the outbox when it was handed to us; whoever gets the flight after us counts on

    @property
    def token(self) -> str:
        """What tells it from every other flight, also from one that had its number before the store was restored."""
        told = "\0".join((str(self.number), *(message.id for message in self.messages)))
        return hashlib.sha256(told.encode()).hexdigest()[:32]


class Transactions(Protocol):
    """A broker that takes messages in transactions."""

    def connect(self, *, anew: bool = False) -> None:
        """Become the one that sends; nobody before us can commit any more. `anew`: also if we were that one a while ago."""

    def has(self, flight: Flight) -> bool:
        """Whether this flight was committed."""

    def send(self, flight: Flight) -> Outcome:
        """Send and commit; where one message cannot be sent, none is. Failures that are not permanent are those of whole topics."""


class Flights(Outbox, Protocol):
    """An outbox that notes flights."""

    def fly(self, asked: Asked) -> Flight | None:
        """The flight that is not settled, or else a new one; None where nothing waits. Either way it is noted that it is ours now."""

    def land(self, flight: Flight) -> None:
        """It was committed: its messages are sent."""

    def ground(self, flight: Flight, dead: Failed | None) -> None:
        """It was not committed and will not be: its messages wait again, but for one that is dead.

        Nothing happens if somebody got the flight after us, for they may have committed it.
        """


class ExactlyOnce(Dispatcher):
    """Sends the messages of one outbox in transactions of the broker: readers of committed messages see each of them once.

    Args:
        as `Dispatcher`; there is no `patience`: a message that the broker refuses is dead at once, and an outage is met with the default.
    """

    def __init__(
        self,
        outbox: Flights,
        broker: Transactions,
        *,
        topics: Sequence[str] = (),
        blocking: bool = True,
        limit: int = 10_000,
        on_step: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(outbox, _Nowhere(), topics=topics, blocking=blocking, limit=limit, workers=1, on_step=on_step)
        self._flights, self._broker = outbox, broker
        self._alone: set[str] = set()  # topics that took nothing: each flies without others, until it takes something

    def _turn(self, found: Callable[[], None] = lambda: None) -> Marks | None:
        self._broker.connect()  # before a flight is noted: whoever connects after us, and not before, may send it instead of us
        asked, alone = self._asked_for()
        flight = self._flights.fly(asked)
        if flight is None:
            self._alone -= alone
            return Marks() if alone else None
        outcome = Outcome()
        if not flight.fresh:
            self._broker.connect(anew=True)  # after we got the flight: who had it before us cannot commit it when we take it back
        is_sent = not flight.fresh and self._broker.has(flight)
        if not is_sent and not flight.fresh and len(flight.messages) > self._limit:
            self._flights.ground(flight, None)  # it was not sent in time
            return Marks()
        if not is_sent:
            self._on_step("send")
            outcome = self._send(flight)
        self._on_step("sent")
        if any(failure.permanent for failure in outcome.failed.values()):
            return self._grounded(flight, outcome)
        if outcome.failed:
            return self._without_topics(flight, outcome)
        self._flights.land(flight)
        self._taken({message.topic for message in flight.messages})
        self._on_step("marked")
        return Marks(sent=[m.number for m in flight.messages])

    def _send(self, flight: Flight) -> Outcome:
        """As the broker's `send`. After one of which nobody knows whether it was committed, flights are smaller."""
        try:
            return self._broker.send(flight)
        except DestinationUnavailable:
            self._take_fewer(flight.messages)
            raise

    def _asked_for(self) -> tuple[Asked, set[str]]:
        """What to fly next, and the topic that flies alone, if one does."""
        asked = self._asked_now()
        alone = set(sorted(self._alone - asked.resting_topics)[:1])
        return (replace(asked, topics=tuple(alone)) if alone else asked), alone

    def _taken(self, topics: set[str]) -> None:
        self._limit = min(self._asked.limit, 2 * self._limit)
        self._alone -= topics
        self._resting.back(topics)

    def _without_topics(self, flight: Flight, outcome: Outcome) -> Marks:
        """Where no message is at fault its topic is: it rests, and others go. Of several topics each is tried alone first.

        Raises:
            TookNothing: a single topic is at fault.

        Crash: as `Flights.ground`.
        """
        self._flights.ground(flight, None)
        topics = {flight.messages[place].topic for place in outcome.failed}
        self._alone |= topics.intersection(self._asked.topics) if self._asked.topics else topics
        if len(topics) > 1:
            return Marks()
        wait, why = self._resting.rest_topics(topics, self.patience.wait), next(iter(outcome.failed.values()))
        error = DestinationUnavailable(f"The broker takes nothing for topic {min(topics)!r}: {why.error_type}: {why.error_message}.")
        log.warning("outbox: %s Again in %.1f s", error, wait)
        raise TookNothing(error)

    def _grounded(self, flight: Flight, outcome: Outcome) -> Marks:
        """A broker refuses batches: unless it is plain which message it meant, the next flights are smaller."""
        dead = None
        if len(outcome.failed) == 1:
            place, failure = next(iter(outcome.failed.items()))
            dead = noted(flight.messages[place].number, failure)
        self._flights.ground(flight, dead)
        self._limit = max(1, len(flight.messages) // 2) if dead is None else self._limit
        return Marks(dead=[dead] if dead else [])


class _Nowhere:
    def send(self, messages: Sequence[Message]) -> Outcome:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to let go of."""
