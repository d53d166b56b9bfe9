"""Where the seconds of a batch go: each is counted once, and clocks are gone afterwards."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")


def slow(seconds: float) -> None:
    """A step."""
    time.sleep(seconds)


def outer(seconds: float) -> None:
    """A step with another one inside it, and one beside it."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(slow, seconds)
        slow(seconds)
    time.sleep(seconds)


def test_each_second_is_told_once_and_what_threads_do_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's seconds are its own, the rest is told, all of them together are the batch; a thread's are in no sum."""
    from benchmarks import where

    monkeypatch.setattr(where, "STEPS", (("outer", __name__, "outer"), ("slow", __name__, "slow")))
    before, whole = slow, [0.0, 0.0]

    def way(batch: Any, batch_id: int) -> None:
        begun = time.perf_counter()
        (outer if batch_id else slow)(0.02)
        time.sleep(0.01)
        whole[batch_id] = time.perf_counter() - begun

    with where.watched(way) as (timed, found):
        timed(None, 0)
        timed(None, 1)
    assert slow is before
    assert {step: [seconds > 0 for seconds in taken] for step, taken in found.items()} == {
        "slow": [True, True],
        "outer": [False, True],
        "slow, beside": [False, True],
        where.REST: [True, True],
    }
    told = [sum(found[step][n] for step in ("slow", "outer", where.REST)) for n in (0, 1)]
    assert told == pytest.approx(whole, rel=0.2)


def test_every_step_is_a_function_that_is_there() -> None:
    """A function that was renamed or moved would be told by nobody."""
    from benchmarks import where

    with where.watched(lambda batch, batch_id: None) as (timed, found):
        timed(None, 0)
    assert list(found) == [where.REST]
