"""The turns of a consumer's own upkeep: when they begin, how they end, and that no failure of theirs is one of a batch."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator

import pytest

from checkpoint.errors import StoreUnavailable
from dedup.pipeline.upkeep import OwnUpkeep, Pace
from kit.paths import environment

NEVER = 1000.0


class Portions:
    """A turn: its portions are functions."""

    def __init__(self, *acts: Callable[[], object], kept: tuple[str, ...] = ()) -> None:
        self.acts, self.kept, self.done, self.closed, self.stopped = acts, kept, 0, False, threading.Event()

    def portions(self) -> Generator[str, None, None]:
        """One after another."""
        try:
            for act in self.acts:
                act()
                self.done += 1
                yield "done"
        finally:
            self.closed = True

    def stop(self) -> None:
        """End what waits for it."""
        self.stopped.set()


def upkeep(begin: Callable[[], Portions], **pace: float) -> OwnUpkeep:
    """Turns without pauses, unless that is asked for."""
    return OwnUpkeep("shop", begin, Pace(**{"every": 0.0, "rest": 0.0, **pace}))  # type: ignore[arg-type]


def ended(made: OwnUpkeep) -> None:
    """The thread has ended."""
    assert made._thread is not None
    made._thread.join(30)
    assert not made._thread.is_alive()


def failing() -> Portions:
    """Its first portion fails."""

    def fail() -> None:
        raise StoreUnavailable("no right to purge")

    return Portions(fail)


def test_a_turn_runs_in_a_thread_of_its_own_and_no_batch_waits() -> None:
    """While a portion hangs, the next batches go on, and begin no second turn; the turn is closed at its end."""
    gate, turns = threading.Event(), list[Portions]()

    def begin() -> Portions:
        turns.append(Portions(lambda: gate.wait(30)))
        return turns[-1]

    made = upkeep(begin)
    began = time.monotonic()
    for _ in range(5):
        made.after_batch()
    assert time.monotonic() - began < 5 and threading.current_thread() is not made._thread
    gate.set()
    ended(made)
    assert [(turn.done, turn.closed) for turn in turns] == [(1, True)]
    made.after_batch()
    ended(made)
    assert len(turns) == 2


def test_the_next_turn_is_due_after_a_while() -> None:
    """Not with each batch."""
    turns = list[Portions]()
    made = upkeep(lambda: turns.append(Portions()) or turns[-1], every=NEVER)  # type: ignore[func-returns-value]
    for _ in range(3):
        made.after_batch()
        ended(made)
    assert len(turns) == 1


def test_a_turn_ends_when_its_time_is_over_and_rests_after_each_portion() -> None:
    """Portions that are left wait for the next turn; a portion of 0.1 s is followed by a rest."""
    turn = Portions(*[lambda: time.sleep(0.1)] * 100)
    made = upkeep(lambda: turn, longest=0.5, rest=3.0)
    made.after_batch()
    ended(made)
    assert 1 <= turn.done <= 2 and turn.closed


def test_a_stop_ends_the_portion_that_runs() -> None:
    """Within a moment, without a warning, and nothing is left open; without a turn there is nothing to stop."""
    turn = Portions()
    turn.acts = (lambda: turn.stopped.wait(30), lambda: None)
    made = upkeep(lambda: turn)
    made.stop()
    made.after_batch()
    while made._turn is None:
        time.sleep(0.01)
    began = time.monotonic()
    made.stop()
    assert time.monotonic() - began < 5 and turn.closed and turn.done == 1
    ended(made)


def test_an_upkeep_that_fails_pauses_says_what_to_do_and_tries_again_later(caplog: pytest.LogCaptureFixture) -> None:
    """Twice quietly; the third time as a warning with the command, and then it rests; what works begins to count anew."""
    caplog.set_level(logging.INFO, "dedup")
    begins = list[Callable[[], Portions]]([failing] * 2 + [Portions] + [failing] * 3)
    made = upkeep(lambda: begins.pop(0)(), pause=NEVER)
    for _ in range(20):
        made.after_batch()
        ended(made)
    assert not begins
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert (
        "failed 3 times" in warned
        and "`dedup upkeep --yes` with the longest" in warned
        and "no right to purge" in warned
        and "stream goes on" in warned
    )
    assert sum("tried again" in r.getMessage() for r in caplog.records) == 4


def test_why_less_is_forgotten_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """And again where another reason takes its place."""
    reasons = [("two told no retention",)] * 3 + [("three told no retention",), ()]
    made = upkeep(lambda: Portions(kept=reasons.pop(0)))
    for _ in range(5):
        made.after_batch()
        ended(made)
    assert [r.getMessage() for r in caplog.records] == ["shop: upkeep: two told no retention", "shop: upkeep: three told no retention"]


ENDING = """
import threading, time
from dedup.pipeline.upkeep import OwnUpkeep
begun = threading.Event()
class Turn:
    kept = ()
    def portions(self):
        for number in range(3):
            begun.set()
            time.sleep(6)
            print("done", number, flush=True)
            yield "done"
    def stop(self):
        pass
OwnUpkeep("shop", Turn).after_batch()
begun.wait(30)
"""


@pytest.mark.full
def test_the_end_of_the_process_waits_for_the_portion_that_runs() -> None:
    """One that cannot be cancelled: a thread that is inside delta-rs when the interpreter ends crashes the process. No other one begins."""
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done 0\n", "")


def test_a_consumer_that_is_collected_lets_its_turn_end() -> None:
    """Whoever drops it waits for nothing; the portion in hand is done, and no further one begins."""
    begun, gate = threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        gate.wait(30)

    turn = Portions(act, lambda: None)
    made = upkeep(lambda: turn)
    made.after_batch()
    assert begun.wait(30)
    made.let_end()
    assert not turn.stopped.is_set()
    gate.set()
    ended(made)
    assert turn.done == 1 and turn.closed


class Panic(BaseException):
    """As the panics of delta-rs are."""


def test_a_panic_is_a_failure_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    """It counts, the upkeep pauses after three, and no thread ends with a trace."""

    def fail() -> None:
        raise Panic("index out of bounds")

    made = upkeep(lambda: Portions(fail), pause=NEVER)
    for _ in range(5):
        made.after_batch()
        ended(made)
    (warned,) = [r.getMessage() for r in caplog.records]
    assert "failed 3 times" in warned and "index out of bounds" in warned
