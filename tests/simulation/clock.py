"""Time and other things outside that the real code asks for, while a world runs: set by the world, put back afterwards."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tenacity

import checkpoint.holders
import deadletter.outage
import dedup.pipeline.attempts
import dedup.pipeline.commit
import dedup.pipeline.member
import dedup.reprocessing.dead_letters
import dedup.reprocessing.letters
from checkpoint.holders import Process
from dedup.core.index import Index
from simulation.log import LetterBatch, batch_of

if TYPE_CHECKING:
    from simulation.world import World

DAYS = {n: dt.timedelta(days=n) for n in (1, 5, 10)}
BEGIN = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)

_now = [BEGIN]
_running = [0.0]


class _DateTime(dt.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        """A microsecond later each time, but for jumps."""
        _now[0] += dt.timedelta(microseconds=1)
        return _now[0]


class _Dt:
    """The module `datetime`, with another clock."""

    UTC, timedelta, datetime = dt.UTC, dt.timedelta, _DateTime


_THERE = (
    (dedup.pipeline.commit, "dt"),
    (dedup.pipeline.attempts, "dt"),
    (dedup.reprocessing.dead_letters, "dt"),
    (dedup.reprocessing.letters, "dt"),
    (dedup.reprocessing.letters, "dt"),
)


class _Time:
    """The module `time`, as far as patience is counted with it: time.monotonic goes on while a process is stopped, and never back."""

    @staticmethod
    def monotonic() -> float:
        """Seconds."""
        return _running[0]


def jump(number: int) -> None:
    """By a day or ten, backwards or forwards. Whoever was trying again meanwhile has lost its patience, if it went forwards."""
    by = DAYS[1 if number % 4 < 2 else 10] * (1 if number % 2 else -1)
    _now[0] += by
    _running[0] += max(0.0, by.total_seconds())


def _once_each(index_of: Callable[[Any], Index]) -> Callable[[Any], Index]:
    """The real function, called once for each batch: batches come again and again, and nothing else goes into it."""
    made: dict[int, tuple[Any, Index]] = {}

    def found(evaluated: Any) -> Index:
        if id(evaluated) not in made:
            made[id(evaluated)] = (evaluated, index_of(evaluated))  # kept: its id stays its own
        return made[id(evaluated)][1]

    return found


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Within, time is simulated, nobody sleeps, and letters are events of this world's log. Cheaper than mock.patch."""
    here = Process("here", 1, "")
    changes: list[tuple[Any, str, Any]] = [(module, name, _Dt) for module, name in _THERE]
    changes += [
        (dedup.reprocessing.letters, "open_batch", lambda table, _: LetterBatch(table, world.log)),
        (deadletter.outage, "PAUSE_SECONDS", 0),
    ]
    changes += [
        (tenacity, "time", _Time),
        (dedup.pipeline.member, "ArrowBatch", batch_of),
        (dedup.pipeline.commit, "index_of", _once_each(dedup.pipeline.commit.index_of)),
    ]
    changes += [(module, "this_process", lambda: here) for module in (checkpoint.holders, dedup.pipeline.member)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    _now[0], _running[0] = BEGIN, 0.0
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)
