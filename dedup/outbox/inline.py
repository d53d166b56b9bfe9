"""Sends the messages of a consumer right after its batches, for a limited time: a destination that hangs must not stop the stream.

A call that hangs cannot be ended. It is left behind with nothing of the store in its hands: its turn is over, its locks are free. What it
has sent is learned if it ever returns. Until then no other call is made from this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from checkpoint.errors import DestinationUnavailable, Fenced, StoreError
from dedup.outbox.destination import Destination, Outcome
from dedup.outbox.dispatch import Dispatcher
from dedup.outbox.message import Message
from dedup.outbox.store import Outbox

log = logging.getLogger("dedup")


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
            DestinationUnavailable: nothing passed, the time is over, or an earlier call still hangs. StoreError, Fenced: of the outbox.

        Crash: what was sent and not marked is sent again, with the same ids.
        """
        if not self._lock.acquire(timeout=self._seconds):
            raise DestinationUnavailable(f"Another thread of this process has been sending for {self._seconds:g} s.")
        try:
            self._bounded.begin(self._seconds)
            self._dispatcher = self._dispatcher or Dispatcher(outbox(), self._bounded)
            self._dispatcher.once()
        except (DestinationUnavailable, StoreError, Fenced):
            self._dispatcher = None
            raise
        finally:
            self._lock.release()

    def settle(self, seconds: float) -> bool:
        """Wait so long for calls that were left behind; returns whether none hangs any more."""
        return self._bounded.settle(seconds)


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
        return Outcome(failed, {places[place] for place in outcome.unsent})

    def _waited_for(self, call: _Call) -> Outcome:
        in_time = call.done.wait(self._remaining)
        with self._counting:
            self._remaining -= time.monotonic() - call.began
        if in_time:
            return call.answer()
        self._left.append(call)
        raise DestinationUnavailable(
            f"The destination has not answered within {self._seconds:g} s: it is left alone with {len(call.messages)} messages, which may "
            "still arrive. They wait in the outbox and are sent again with the same ids, unless it tells that it has sent them."
        )

    def settle(self, seconds: float) -> bool:
        """Wait so long for calls that were left behind; returns whether none hangs any more."""
        return all(call.done.wait(seconds) for call in self._left)

    def close(self) -> None:
        """Let go of connections."""
        self.destination.close()

    def _refuse_hanging(self) -> None:
        hanging = [call for call in self._left if not call.done.is_set()]
        if hanging:
            raise DestinationUnavailable(
                f"The destination hangs since {time.monotonic() - hanging[0].began:.0f} s and is not called again by this process before "
                "it returns. The messages wait in the outbox: repair it, restart this process, or send them with `dedup outbox dispatch`."
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
            self._outcome = destination.send(self.messages)
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
