"""Where the seconds of a batch go: each is counted once, and clocks are gone afterwards."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")


class Ticks(threading.local):
    """A clock of each thread, which goes on when somebody works."""

    now = 0.0

    def perf_counter(self) -> float:
        """As time's."""
        return self.now


ticks = Ticks()


def slow(seconds: float) -> None:
    """A step."""
    ticks.now += seconds


def outer(seconds: float) -> None:
    """A step with another one inside it, and one beside it."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(slow, 8 * seconds)
        slow(2 * seconds)
    ticks.now += seconds


def test_every_clock_stands_around_something_that_is_there() -> None:
    """The benchmarks name functions of the product; whoever renames one hears of it here, and not from a benchmark."""
    from benchmarks.where import STEPS

    for _, module, path in STEPS:
        *owners, name = path.split(".")
        assert name in vars(functools.reduce(getattr, owners, import_module(module))), f"{module}.{path}"


def test_each_second_is_told_once_and_what_threads_do_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's seconds are its own, the rest is told, all of them together are the batch; a thread's are in no sum."""
    from benchmarks import where

    monkeypatch.setattr(where, "STEPS", (("outer", __name__, "outer"), ("slow", __name__, "slow")))
    monkeypatch.setattr(where, "time", ticks)
    before, whole = slow, [0.0, 0.0]

    def way(batch: Any, batch_id: int) -> None:
        begun = ticks.now
        (outer if batch_id else slow)(4.0)
        ticks.now += 1
        whole[batch_id] = ticks.now - begun

    with where.watched(way) as (timed, found):
        timed(None, 0)
        timed(None, 1)
    assert slow is before
    assert found == {"slow": [4.0, 8.0], "outer": [0.0, 4.0], "slow, beside": [0.0, 32.0], where.REST: [1.0, 1.0]}
    assert [sum(found[step][n] for step in ("slow", "outer", where.REST)) for n in (0, 1)] == whole


def test_every_step_is_a_function_that_is_there() -> None:
    """A function that was renamed or moved would be told by nobody."""
    from benchmarks import where

    with where.watched(lambda batch, batch_id: None) as (timed, found):
        timed(None, 0)
    assert list(found) == [where.REST]
