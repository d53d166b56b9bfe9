"""Sends what waits in an outbox, turn by turn: take messages whose keys nobody else has, send them, mark them.

Several dispatchers may run. A message is marked after the receiver has it: whoever dies in between leaves it to be sent again, with the
same id, and of each key a message never arrives for the first time before an earlier one has.

Right after its batches a consumer sends its messages for a limited time: a destination that hangs must not stop the stream. A call that
hangs cannot be ended. It is left behind with nothing of the store in its hands: its turn is over, its locks are free. What it has sent is
learned if it ever returns. Until then no other call is made from this process. Called by the consumer and by `dedup outbox`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

from checkpoint import given
from checkpoint.errors import DedupError, DestinationUnavailable, StoreUnavailable
from deadletter.failure import MESSAGE_BYTES, TYPE_BYTES, clean, text_of
from dedup import logs
from dedup.core.messages import Asked, Failed, Line, Marks, Message, Outbox
from dedup.core.settings import DISPATCHER, PATIENCE
from dedup.outbox.destination import Destination, Outcome, SendFailure

log = logging.getLogger("dedup")

LONGEST_ROUND = 10.0
"""Seconds after which `run` begins another round: then topics that took nothing have their turn, however much waits for others."""

STEPS = ("send", "sent", "marked")
"""What `on_step` is told, each right before it is acted on: before the messages are handed over, before they are marked, after that."""


class TookNothing(Exception):
    """Nothing passed of a turn, or of some of its topics. `marks`: what became of the others."""

    def __init__(self, why: DestinationUnavailable, marks: Marks | None = None) -> None:
        super().__init__(str(why))
        self.why, self.marks = why, marks or Marks()


@dataclass(frozen=True)
class Patience:
    """How failures are met."""

    attempts: int = 5  # of one message, while others pass; then it is dead
    first: given.Duration = 0.5  # before the second attempt; doubled each time
    most: given.Duration = 60.0

    def __post_init__(self) -> None:
        given.check_fields(PATIENCE, self, "Patience")

    def wait(self, attempts: int) -> float:
        """Seconds before the next attempt, somewhere between half and all of the step."""
        step = min(given.to_seconds(self.most), given.to_seconds(self.first) * 2.0 ** min(attempts, 30))
        return step * random.uniform(0.5, 1.0)


@dataclass
class Dispatched:
    """What one call has done."""

    sent: int = 0
    dead: int = 0
    tried: int = 0  # failed, and will be tried again
    away: DestinationUnavailable | None = field(default=None, repr=False, compare=False)  # why a turn took nothing, where one did

    def add(self, marks: Marks) -> None:
        """Count a turn."""
        self.sent, self.dead, self.tried = self.sent + len(marks.sent), self.dead + len(marks.dead), self.tried + len(marks.tried)

    def merged(self, other: Dispatched) -> Dispatched:
        """With what another worker has done."""
        self.sent, self.dead, self.tried = self.sent + other.sent, self.dead + other.dead, self.tried + other.tried
        self.away = self.away or other.away
        return self


def judge(messages: Sequence[Message], outcome: Outcome, attempts: int) -> Marks:
    """What to note of a turn. Pure."""
    if not outcome.failed and not outcome.unsent:
        return Marks(sent=[message.number for message in messages])
    failed = {place: noted(messages[place].number, failure) for place, failure in outcome.failed.items()}
    over = {p for p, f in outcome.failed.items() if f.permanent or messages[p].attempts + 1 >= attempts}
    return Marks(
        sent=[m.number for place, m in enumerate(messages) if place not in outcome.failed and place not in outcome.unsent],
        dead=[f for place, f in failed.items() if place in over],
        tried=[f for place, f in failed.items() if place not in over],
    )


def noted(number: int, failure: SendFailure) -> Failed:
    """What is kept of it: redacted, and a text that every store takes. Of a function's error it may hold whatever a body holds."""
    return Failed(number, clean(failure.error_type, TYPE_BYTES), clean(failure.error_message, MESSAGE_BYTES))


class _Resting:
    """Keys whose message failed, and topics that took nothing, a moment ago, and when their turn comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[Line | int, float] = {}
        self._topics: dict[str, float] = {}
        self._away: dict[str, int] = {}  # topic -> turns since it took anything
        self._round: set[str] = set()  # that are not tried again in this round
        self._lock = threading.Lock()

    def rest(self, message: Message, seconds: float) -> None:
        """Its key, or the message itself where it has none."""
        with self._lock:
            self._until[message.line or message.number] = self._clock() + seconds

    def rest_topics(self, topics: set[str], wait: Callable[[int], float]) -> float:
        """Returns for how many seconds the first of them rests."""
        with self._lock:
            seconds = {topic: wait(self._away.get(topic, 0)) for topic in topics}
            self._away |= {topic: self._away.get(topic, 0) + 1 for topic in topics}
            self._topics |= {topic: self._clock() + rest for topic, rest in seconds.items()}
            self._round |= topics
            return min(seconds.values())

    def begin(self) -> None:
        """A round."""
        with self._lock:
            self._round.clear()

    def back(self, topics: set[str] | None = None) -> None:
        """These took something; or all may be tried now."""
        with self._lock:
            for topic in set(self._away) if topics is None else topics:
                self._away.pop(topic, None)
                self._topics.pop(topic, None)

    def asked(self, asked: Asked) -> Asked:
        """Without what rests now."""
        with self._lock:
            now = self._clock()
            self._until = {who: until for who, until in self._until.items() if until > now}
            self._topics = {topic: until for topic, until in self._topics.items() if until > now}  # else `next` says "now" for ever
            topics = frozenset(self._round.union(self._topics))
            lines = frozenset(who for who in self._until if isinstance(who, tuple))
            numbers = frozenset(who for who in self._until if isinstance(who, int))
        return replace(asked, resting_topics=topics, resting=lines, resting_numbers=numbers)

    def next(self) -> float | None:
        """Seconds until the first of them is due."""
        due = [*self._until.values(), *self._topics.values()]
        return max(0.0, min(due) - self._clock()) if due else None


class Dispatcher:
    """Sends the messages of one outbox to one destination.

    Args:
        topics: only messages to these topics; empty: all.
        blocking: a dead message holds back the later ones of its key until a person decides. False: they overtake it.
        limit: messages of one turn; bounds memory.
        workers: turns at once, where the store has locks: while one sends, the others take and mark. Unless the destination is `parallel`,
            one sends at a time.
        on_step: called with each name of STEPS right before it acts.
    """

    def __init__(
        self,
        outbox: Outbox,
        destination: Destination,
        *,
        topics: Sequence[str] = (),
        patience: Patience | None = None,
        blocking: bool = True,
        limit: int = 10_000,
        workers: int = 2,
        on_step: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given.check(DISPATCHER, locals())
        self.outbox, self.destination, self.patience, self._on_step = outbox, destination, patience or Patience(), on_step
        self._asked = Asked(tuple(topics), limit, blocking=blocking)
        self._limit = limit  # of the next turn
        self._in_round = 0  # messages that this round is done with
        self._clock = clock
        self._workers = workers if outbox.parallel else 1
        self._resting = _Resting(clock)
        self._sending: AbstractContextManager[Any] = nullcontext() if getattr(destination, "parallel", False) else threading.Lock()

    def once(self, most: float = float("inf")) -> Dispatched:
        """Send until nothing is left that can be sent now. What failed and waits for its next attempt is left.

        Args:
            most: begin no turn once so many messages were taken: others may store new ones all the time.

        Raises:
            DestinationUnavailable: nothing passed of a turn, of which nothing is marked; topics that were not in it have been tried.

        Crash: what was sent and not marked is sent again, with the same ids.
        """
        self._resting.back()
        done = self._round(lambda: self._in_round >= most)
        if done.away is not None:
            raise done.away
        return done

    def _round(self, is_over: Callable[[], bool]) -> Dispatched:
        others: list[Future[Dispatched]] = []
        self._resting.begin()
        self._in_round = 0
        with ThreadPoolExecutor(self._workers) as pool:

            def found() -> None:
                if not others:
                    others.extend(pool.submit(self._until_empty, is_over) for _ in range(self._workers - 1))

            done = self._until_empty(is_over, found)  # the others begin once a turn is half full, else after the first one
            for other in others:
                done.merged(other.result())
        return done

    def _until_empty(self, is_over: Callable[[], bool], found: Callable[[], None] = lambda: None) -> Dispatched:
        with logs.about(consumer=self.outbox.consumer):  # each worker is a thread of its own
            return self._emptied(is_over, found)

    def _emptied(self, is_over: Callable[[], bool], found: Callable[[], None]) -> Dispatched:
        done = Dispatched()
        while not is_over():
            try:
                marks = self._turn(found)
            except TookNothing as nothing:
                marks, done.away = nothing.marks, done.away or nothing.why
            if marks is None:
                break
            done.add(marks)
            self._in_round += len(marks.sent) + len(marks.dead)
            found()
        return done

    def run(self, stop: threading.Event, *, every: given.Duration = 1.0, tell: Callable[[Dispatched], None] = lambda done: None) -> None:
        """Send until `stop` is set, and end after the turns that run then; while there is nothing to send look again after `every`.

        While the destination or the store is away it is tried again, with backoff, and nothing is given up.

        Crash: as `once`.
        """
        away, pause = 0, given.to_seconds(every)
        while not stop.is_set():
            until = self._clock() + LONGEST_ROUND
            try:
                done, away = self._round(partial(self._is_over, stop, until)), 0
            except (StoreUnavailable, DestinationUnavailable) as error:
                wait, away = self.patience.wait(away), away + 1
                log.warning("outbox: %s Again in %.1f s", error, wait, extra={"consumer": self.outbox.consumer})
                stop.wait(wait)
                continue
            if done.sent or done.dead or done.tried:
                tell(done)
            due = self._resting.next()
            if self._clock() < until:  # else there is more
                stop.wait(pause if due is None else min(pause, due + 0.01))

    def _is_over(self, stop: threading.Event, until: float) -> bool:
        return stop.is_set() or self._clock() >= until

    def _turn(self, found: Callable[[], None] = lambda: None) -> Marks | None:
        in_hand: Sequence[Message] = ()
        try:
            with self.outbox.turn(self._asked_now()) as turn:
                in_hand = turn.messages
                if not in_hand:
                    return None
                if 2 * len(in_hand) >= self._asked.limit:  # there will be more
                    found()
                outcome = self._sent(in_hand)
                marks = judge(in_hand, outcome, self.patience.attempts)
                turn.mark(marks)
        except DestinationUnavailable as error:
            self._take_fewer(in_hand)
            wait = self._resting.rest_topics({message.topic for message in in_hand}, self.patience.wait)
            log.warning("outbox: %s Again in %.1f s", error, wait)
            raise TookNothing(error) from error
        except StoreUnavailable:
            self._take_fewer(in_hand)
            raise
        self._limit = min(self._asked.limit, self._limit + self._limit // 32 + 1)
        self._on_step("marked")
        self._resting.back({message.topic for message in in_hand}.difference(outcome.away))
        self._note(in_hand, marks)
        if outcome.away:
            raise TookNothing(self._left(outcome.away), marks)
        return marks

    def _take_fewer(self, in_hand: Sequence[Message]) -> None:
        """Next time: neither the store nor the receiver may wait for as long as sending these takes, and they would be sent for ever."""
        if in_hand:
            self._limit = max(1, min(self._limit, len(in_hand)) // 2)

    def _left(self, away: Mapping[str, str]) -> DestinationUnavailable:
        """Let topics rest that took nothing, while others took something."""
        wait = self._resting.rest_topics(set(away), self.patience.wait)
        for topic, why in away.items():
            log.warning("outbox: topic %r took nothing: %s Again in %.1f s", topic, why, wait)
        topic, why = next(iter(away.items()))
        return DestinationUnavailable(f"Topic {topic!r} took nothing: {why}")

    def _sent(self, messages: Sequence[Message]) -> Outcome:
        with self._sending:
            self._on_step("send")
            outcome = asked(self.destination, messages)
        _refuse_outage(messages, outcome)
        self._on_step("sent")
        return outcome

    def _asked_now(self) -> Asked:
        return self._resting.asked(replace(self._asked, limit=self._limit))

    def _note(self, messages: Sequence[Message], marks: Marks) -> None:
        by_number = {m.number: m for m in messages} if marks.dead or marks.tried else {}
        for failed in marks.tried:
            message = by_number[failed.number]
            self._resting.rest(message, self.patience.wait(message.attempts))
        for failed in marks.dead:
            message = by_number[failed.number]
            log.error("outbox: message %d to %s cannot be sent: %s: %s", failed.number, message.topic, *_said(failed))


def asked(destination: Destination, messages: Sequence[Message]) -> Outcome:
    """What a destination answers.

    Raises:
        DestinationUnavailable: it cannot be reached, has raised an error that is none of dedup's, or has returned no `Outcome` of these
            messages. Of such an error nobody knows which message it is about. Other errors of dedup's as they are.

    Crash: what was sent is sent again, with the same ids.
    """
    try:
        outcome = destination.send(messages)
    except DedupError:
        raise
    except Exception as error:
        raise DestinationUnavailable(f"The destination raised {type(error).__name__}: {text_of(error)[:300]}") from error
    if (wrong := _misfit(outcome, len(messages))) is not None:
        raise DestinationUnavailable(f"{type(destination).__name__}.send returned {wrong}: nobody knows what it has sent.")
    return outcome


def _misfit(outcome: Any, count: int) -> str | None:
    """What is wrong with the answer to so many messages: a destination of a user's own may return anything."""
    if not isinstance(outcome, Outcome):
        return f"{type(outcome).__name__}, not an Outcome"
    for name, kind in (("failed", Mapping), ("unsent", Collection), ("away", Mapping)):
        if not isinstance(part := getattr(outcome, name), kind):
            return f"an Outcome whose {name} is {type(part).__name__}"
    places: list[Any] = [*outcome.failed, *outcome.unsent]
    if strange := [place for place in places if not (isinstance(place, Integral) and 0 <= int(place) < count)]:
        return f"an Outcome with the place {_shown(strange[0])}, which none of {count} messages has"
    if strange := [failure for failure in outcome.failed.values() if not _is_failure(failure)]:
        return f"an Outcome with the failure {_shown(strange[0])}, which is no SendFailure of two texts"
    strange = [each for pair in outcome.away.items() for each in pair if not isinstance(each, str)]
    return f"an Outcome with {_shown(strange[0])} in away, which is no text" if strange else None


def _is_failure(failure: object) -> bool:
    return isinstance(failure, SendFailure) and isinstance(failure.error_type, str) and isinstance(failure.error_message, str)


def _shown(anything: object) -> str:
    return repr(anything)[:300]


def _said(failed: Failed) -> tuple[str, str]:
    return failed.error_type, failed.error_message[:300]


def _refuse_outage(messages: Sequence[Message], outcome: Outcome) -> None:
    """Raise DestinationUnavailable where nothing passes, by no message's fault: it is an outage, and no attempt is counted.

    Where it is only the fault of some topics, they rest, and the others are tried again.
    """
    failures, topics = list(outcome.failed.values()), {message.topic for message in messages}
    if len(failures) + len(outcome.unsent) < len(messages) or any(f.permanent or f.alone for f in failures):
        return
    if outcome.away and not failures and not topics <= set(outcome.away):
        return
    whys = [*(f"{f.error_type}: {f.error_message[:300]}" for f in failures), *outcome.away.values(), "the destination does not say why"]
    raise DestinationUnavailable(f"None of {len(messages)} messages could be sent: {whys[0].rstrip('.')}.")


class Inline:
    """Sends after each batch what waits in the outbox.

    Args:
        destination: where to. It is called in threads of its own.
        seconds: how long the destination may take in one call of `send`, and another thread before it.
    """

    def __init__(self, destination: Destination, seconds: float) -> None:
        self._seconds, self._bounded = seconds, Bounded(destination)
        self._lock = threading.Lock()  # a runner's partitions are threads of one process, and share what sends
        self._dispatcher: Dispatcher | None = None

    def send(self, outbox: Callable[[], Outbox]) -> None:
        """Send what waits, until nothing is left or the time is over; the rest stays in the outbox.

        Raises:
            DestinationUnavailable: nothing passed, the time is over, or an earlier call still hangs. Other errors of dedup's, as StoreError
                and Fenced: of the outbox, or of settings that the destination does not take.

        Crash: what was sent and not marked is sent again, with the same ids.
        """
        if not self._lock.acquire(timeout=self._seconds):
            raise DestinationUnavailable(f"Another thread of this process has been sending for {self._seconds:g} s.")
        try:
            self._bounded.begin(self._seconds)
            self._dispatcher = self._dispatcher or Dispatcher(outbox(), self._bounded)
            self._dispatcher.once()
        except DedupError:
            self._dispatcher = None
            raise
        finally:
            self._lock.release()

    def wait_for_calls(self, seconds: float) -> bool:
        """Wait so long for calls that were left behind; returns whether none hangs any more."""
        return self._bounded.wait_for_calls(seconds)


class Bounded:
    """A destination whose calls are waited for so many seconds together. A call that takes longer goes on alone."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.parallel = bool(getattr(destination, "parallel", False))
        self._seconds = self._remaining = float("inf")
        self._counting = threading.Lock()
        self._left: list[_Call] = []  # calls that were not waited for
        self._sent: set[tuple[int, str]] = set()  # what they have sent, once they have returned: number and id

    def begin(self, seconds: float) -> None:
        """From here on calls are waited for so many seconds together. Raises DestinationUnavailable while a call hangs."""
        self._refuse_hanging()
        self._sent = {each for call in self._left for each in call.sent()} or self._sent
        self._left = []
        self._seconds = self._remaining = seconds

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send these, but for what a call that was left behind has sent meanwhile.

        Raises:
            DestinationUnavailable: as the destination itself; it has not answered in time; another call hangs.

        Crash: what was sent is sent again, with the same ids.
        """
        places = [place for place, message in enumerate(messages) if (message.number, message.id) not in self._sent]
        if not places:
            return Outcome()
        self._refuse_hanging()
        if self._remaining <= 0:
            raise DestinationUnavailable(f"The {self._seconds:g} s for sending after a batch are over: the other messages wait.")
        outcome = self._waited_for(_Call(self.destination, [messages[place] for place in places]))
        failed = {places[place]: failure for place, failure in outcome.failed.items()}
        return Outcome(failed, {places[place] for place in outcome.unsent}, outcome.away)

    def _waited_for(self, call: _Call) -> Outcome:
        in_time = call.done.wait(self._remaining)
        with self._counting:
            self._remaining -= time.monotonic() - call.began
        if in_time:
            return call.answer()
        self._left.append(call)
        raise DestinationUnavailable(
            f"The destination has not answered within {self._seconds:g} s: dedup stops waiting for {len(call.messages)} messages, which "
            "may "
            "still arrive. They wait in the outbox and are sent again with the same ids, unless it tells that it has sent them."
        )

    def wait_for_calls(self, seconds: float) -> bool:
        """Wait so long for calls that were left behind; returns whether none hangs any more."""
        return all(call.done.wait(seconds) for call in self._left)

    def close(self) -> None:
        """Let go of connections."""
        self.destination.close()

    def _refuse_hanging(self) -> None:
        hanging = [call for call in self._left if not call.done.is_set()]
        if hanging:
            raise DestinationUnavailable(
                f"The destination has not returned for {time.monotonic() - hanging[0].began:.0f} s. This process does not call it again "
                "before it returns; the messages wait in the outbox. Repair the destination and restart this process, or send the messages "
                "with `dedup outbox dispatch`."
            )


class _Call:
    """One call of a destination, in a thread that nobody has to wait for; the process may end before it."""

    def __init__(self, destination: Destination, messages: Sequence[Message]) -> None:
        self.messages, self.done, self.began = messages, threading.Event(), time.monotonic()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(destination,), name="dedup-sending", daemon=True).start()

    def _run(self, destination: Destination) -> None:
        try:
            self._outcome = asked(destination, self.messages)
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            self._error = error
        finally:
            self.done.set()

    def answer(self) -> Outcome:
        """What the destination returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def sent(self) -> list[tuple[int, str]]:
        """Number and id of what it has sent, of a call that has returned."""
        found = self._outcome
        if found is None:
            return []
        return [(m.number, m.id) for place, m in enumerate(self.messages) if place not in found.failed and place not in found.unsent]
