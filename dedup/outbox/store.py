"""What the dispatcher and people ask of a store's outbox. Both stores pass the same contract tests."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from dedup.outbox.message import Entry, Lag, Message, State

Line = tuple[str, bytes]
"""Topic and key: what keeps its order."""

BYTES_PER_TURN = 64 << 20
"""Bytes of bodies that a dispatcher has in hand, about: bounds memory."""


@dataclass(frozen=True)
class Asked:
    """Which messages a dispatcher can send now."""

    topics: tuple[str, ...] = ()  # empty: all
    limit: int = 10_000
    resting_topics: frozenset[str] = frozenset()  # took nothing a moment ago: their turn comes later
    resting: frozenset[Line] = frozenset()  # the same, of keys
    resting_numbers: frozenset[int] = frozenset()  # the same, of messages without a key
    blocking: bool = True  # a dead message holds back the others of its key


@dataclass(frozen=True)
class Failed:
    """A message that was not sent, and why."""

    number: int
    error_type: str
    error_message: str


@dataclass(frozen=True)
class Marks:
    """What became of the messages of one turn; those in none of these stay as they are."""

    sent: Sequence[int] = ()  # numbers
    dead: Sequence[Failed] = ()
    tried: Sequence[Failed] = ()  # to be tried again


class Turn(Protocol):
    """Messages whose keys nobody else sends for as long as the turn is open. Left without `mark`, nothing of it is noted."""

    messages: Sequence[Message]  # ascending by number; none: there is nothing to do

    def mark(self, marks: Marks) -> None:
        """Note what became of them, durably."""


class Outbox(Protocol):
    """The messages of one consumer."""

    parallel: ClassVar[bool]  # whether several turns can be open at once

    def turn(self, asked: Asked) -> AbstractContextManager[Turn]:
        """Take messages to send: of each key the first ones that wait, and of no key that another dispatcher has in hand."""

    def entries(self, chosen: Chosen) -> list[Entry]:
        """Messages without their bodies, ascending."""

    def message(self, number: int) -> Message | None:
        """One message with its body."""

    def lag(self, topics: Sequence[str] = ()) -> Lag:
        """What is not sent yet."""

    def retry(self, numbers: Sequence[int]) -> int:
        """Let dead messages be sent again, and those behind them after them. Returns how many were dead."""

    def discard(self, numbers: Sequence[int]) -> int:
        """Give up messages that are not sent; those behind them go on. Returns how many."""

    def purge(self, before: dt.datetime, *, dry_run: bool = False) -> int:
        """Delete what was sent or discarded before that time. Returns how many."""


@dataclass(frozen=True)
class Chosen:
    """Which messages somebody wants to see; all conditions must match."""

    states: tuple[State, ...] = ()
    topic: str | None = None
    numbers: tuple[int, ...] = ()
    limit: int | None = field(default=100)
