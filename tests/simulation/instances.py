"""Processes that move only when the scheduler says so: greenlets, which switch in a microsecond and always in the same order."""

from __future__ import annotations

from collections.abc import Callable

import greenlet

from checkpoint.errors import DedupError
from dedup.pipeline import company

DONE = "its work is done"


class Crash(BaseException):
    """The process of one instance died."""


class Boom(Exception):
    """The handler failed."""


class Instance:
    """One process; it stands right before the step whose name is in `at`."""

    def __init__(self, number: int, what: str, body: Callable[[Instance], None]) -> None:
        self.number, self.what, self.at = number, what, "start"
        self.asleep, self.done, self.ended = 0, False, ""
        self.reads: object = None  # the Spark checkpoint of a query
        self._body, self._greenlet, self._dead = body, greenlet.greenlet(self._run), False

    def __str__(self) -> str:
        return f"{self.what} {self.number}"

    def _run(self) -> None:
        company.be_a_process()
        try:
            self._body(self)
            self.ended = DONE
        except Crash:
            self.ended = "dead"
        except (Boom, DedupError) as error:
            self.ended = f"{type(error).__name__}"
        self.done = True

    def pause(self, name: str = "") -> None:
        """Called by the instance before each step: give the turn back. Who is dead does nothing any more on its way out."""
        if self._dead:
            raise Crash
        parent = self._greenlet.parent
        assert parent is not None
        self.at = name
        fault = parent.switch()
        if fault is not None:
            self._dead = isinstance(fault, Crash)
            raise fault

    def step(self, fault: BaseException | None = None) -> None:
        """Called by the scheduler: go on to the next pause, or meet a fault right here. What is a defect is raised here."""
        self._greenlet.parent = greenlet.getcurrent()
        if fault is not None and self.at == "start":
            self.done, self.ended = True, "dead"  # nothing of it has run
        else:
            self._greenlet.switch(*(() if self.at == "start" else (fault,)))

    def abandon(self) -> None:
        """The schedule is over, or somebody stops it."""
        self._dead = True
        while not self.done and self._greenlet:
            self._greenlet.parent = greenlet.getcurrent()
            self._greenlet.switch(Crash())
        self.done = True
