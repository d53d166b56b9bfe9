"""How failures of a handler are met, and what became of its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deadletter.budget import Budget
from deadletter.classify import Rule
from deadletter.failure import Failure
from deadletter.policy import Retry


@dataclass(frozen=True)
class Care:
    """How failures of the handler are met."""

    retry: Retry = field(default_factory=Retry)
    budget: Budget | None = field(default_factory=Budget)  # None: nothing is counted
    bisect: bool = True
    rules: Sequence[Rule] = ()
    owner: tuple[str, str] = ("", "")  # reentry.Identity of the consumer whose handler this is
    timeout: float | None = None  # seconds for one run of the handler; then the process ends
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@dataclass
class Outcome:
    """What became of the rows that the handler was given; those in none of these were processed."""

    rejected: dict[int, str] = field(default_factory=dict)  # row -> reason
    skipped: set[int] = field(default_factory=set)
    failed: dict[int, list[Failure]] = field(default_factory=dict)  # row -> its failures, oldest first
    waiting: set[int] = field(default_factory=set)  # behind a letter of their sequence
