"""How failures of a handler are met, what became of its rows, and the end of a run that takes too long."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    timeout: float | None = None  # seconds for one run of the handler; then the process ends
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Outcome:
    """What became of the rows that the handler was given; those in none of these were processed."""

    rejected: dict[int, str] = field(default_factory=dict)  # row -> reason
    skipped: set[int] = field(default_factory=set)
    failed: dict[int, list[Failure]] = field(default_factory=dict)  # row -> its failures, oldest first
    waiting: set[int] = field(default_factory=set)  # behind a letter of their sequence


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """End the process where the block takes longer: a thread that hangs cannot be stopped.

    Crash: that is what it does; the stack of every thread is on stderr, and the marker of the trial counts it.
    """
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
