"""A consumer through 45 days of its year; `make year` plays all of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kit.preload import NoCompiler
from kit.year import __main__ as year
from kit.year.clock import Clock
from kit.year.story import DAY, begun

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(params=["postgres", pytest.param("delta", marks=pytest.mark.delta)])
def kind(request: pytest.FixtureRequest) -> str:
    """The store's, where a clock can be set."""
    try:
        Clock(time.time())
    except NoCompiler as missing:
        pytest.skip(str(missing))
    return str(request.param)


def test_a_consumer_lives_through_its_year(tmp_path: Path, kind: str) -> None:
    """Each order is there once, the tables add up, and each alarm is raised on the day of its own fault, and on no other."""
    told = year.play(kind, tmp_path, days=year.SHORTEST, batches=2, turn=0.3)
    print(told)
    assert told["wrong"] == []
    assert told["events"]["repeated"] > 100 and told["killed"]


WRONG = {31: 400 * DAY, 33: -40 * DAY, 34: 5 * DAY}
"""Day -> by how much the clocks of the hosts, and of the server, are wrong."""


def test_a_clock_that_is_wrong_forgets_no_key(tmp_path: Path, kind: str) -> None:
    """The retention is counted in the time of the log: what a host takes for the year after next purges nothing that may come again."""
    with begun(kind, tmp_path, days=38, batches=3, turn=0.1) as story:
        for day in range(38):
            story.wrong_by = WRONG.get(day, 0.0)
            story.day(day)
        assert story.topic.repeated > 100 and story.end() == []
