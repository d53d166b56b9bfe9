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
    behind it are not.
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
        outcome, stopped = Outcome(), set[Line]()
        for place, message in enumerate(messages):
            if message.line in stopped:
                outcome.unsent.add(place)
                continue
            try:
                self._sender([message])
            except Exception as error:  # noqa: BLE001
                _refuse_systemic(error)
                outcome.failed[place] = _failure(error)
                if message.line is not None:
                    stopped.add(message.line)
        return outcome

    def close(self) -> None:
        """Nothing to let go of."""


def _failure(error: Exception) -> SendFailure:
    return SendFailure.of(error, permanent=classify(error) != TRANSIENT)


def _refuse_systemic(error: Exception) -> None:
    if classify(error) == SYSTEMIC:
        raise DestinationUnavailable(f"The destination cannot be reached: {type(error).__name__}: {text_of(error)}") from error
