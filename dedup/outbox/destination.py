"""Where messages go: what the dispatcher asks of a destination, and the one that is a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkpoint import given
from checkpoint.errors import DestinationUnavailable
from deadletter.classify import classify
from deadletter.failure import text_of
from deadletter.known import SYSTEMIC, TRANSIENT
from dedup.core.messages import Line, Message
from dedup.core.settings import CALL

PATIENT = 3
"""Messages that fail alone, one after the other, by what may pass. Each may wait for a time-out: after so many of them one message is left
to another turn before the next one is tried, then two, then four. So 10,000 that nobody answers wait for some sixteen time-outs."""


@dataclass(frozen=True)
class SendFailure:
    """Why a message was not sent."""

    error_type: str
    error_message: str
    permanent: bool  # the message's own fault: trying it again is of no use
    alone: bool = False  # it was refused when it was sent alone: that is no outage, though it may pass another time

    @classmethod
    def of(cls, error: BaseException, *, permanent: bool) -> SendFailure:
        """From an exception."""
        return cls(type(error).__name__, text_of(error)[:2_000], permanent)


@dataclass(frozen=True)
class Outcome:
    """What became of the messages that were handed over, by their place among them. Those in neither were sent."""

    failed: dict[int, SendFailure] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)  # not tried, or not known: behind one that failed, or to a topic in `away`
    away: dict[str, str] = field(default_factory=dict)  # topic that took nothing, by no message's fault -> why


class Destination(Protocol):
    """Sends messages. Of a key no message may arrive for the first time before an earlier one has.

    One that has an attribute `parallel` that is true is called by several threads at once, for turns that have no key in common.
    """

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Send these and wait until each is safe with the receiver, or is known not to be.

        Raises:
            DestinationUnavailable: nobody's message can be sent now. What was sent already will be sent again, with the same ids. Any other
                error counts as this one, but for errors of dedup's. So a message that can never be sent belongs into `Outcome.failed`:
                else it is sent again for ever.

        Crash: what was sent is sent again, with the same ids.
        """

    def close(self) -> None:
        """Let go of connections."""


Sender = Callable[[Sequence[Message]], object]
"""A function of the user's: called with messages, ascending; returns once all of them are sent, raises where they are not."""


class Call:
    """Messages go to a function.

    Where it raises, each message is handed over alone, to find the one that cannot be sent: those before it in its key were sent, those
    behind it are not. Where several in a row may pass another time, as with time-outs, most of the others wait for another turn.
    """

    def __init__(self, sender: Sender) -> None:
        given.check(CALL, locals())
        self._sender = sender

    def send(self, messages: Sequence[Message]) -> Outcome:
        """All at once, or one by one.

        Raises:
            DestinationUnavailable: the function raised what is everybody's fault, as a connection that cannot be made.

        Crash: what was sent is sent again, with the same ids.
        """
        try:
            self._sender(messages)
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            _refuse_systemic(error)
            return self._one_by_one(messages) if len(messages) > 1 else Outcome({0: _failure(error)})
        return Outcome()

    def _one_by_one(self, messages: Sequence[Message]) -> Outcome:
        outcome, stopped, in_a_row, left = Outcome(), set[Line | None](), 0, 0
        for place, message in enumerate(messages):
            if left or (message.line is not None and message.line in stopped):
                outcome.unsent.add(place)
                stopped.add(message.line)
                left = max(0, left - 1)
                continue
            try:
                self._sender([message])
                in_a_row = 0
            except Exception as error:  # noqa: BLE001
                _refuse_systemic(error)
                outcome.failed[place] = failure = _failure(error)
                stopped.add(message.line)
                in_a_row = 0 if failure.permanent else in_a_row + 1
                left = 1 << (in_a_row - PATIENT) if in_a_row >= PATIENT else 0
        return outcome

    def close(self) -> None:
        """Nothing to let go of."""


def _failure(error: Exception) -> SendFailure:
    return SendFailure.of(error, permanent=classify(error) != TRANSIENT)


def _refuse_systemic(error: Exception) -> None:
    if classify(error) == SYSTEMIC:
        raise DestinationUnavailable(f"The destination cannot be reached: {type(error).__name__}: {text_of(error)}") from error
