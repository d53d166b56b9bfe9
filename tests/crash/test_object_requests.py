"""Each request of a batch on object storage fails once, or all from it on: then the batch is run again, and each row is there once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import http_proxy, object_storage
from kit.http_proxy import BEFORE, BUSY, EXPIRED, HANG, LOST, SLOW_DOWN, Counted, HttpProxy
from kit.object_child import EVENTS, QUICK, Steered
from kit.orders import assert_proven
from kit.places import ON_DELTA, ObjectPlace

pytestmark = [pytest.mark.objects, pytest.mark.crash]

FROM_THERE_ON = (BUSY, SLOW_DOWN, EXPIRED)
"""Ways of an outage, which lasts until the batch has failed."""

MOST = 40
"""More than an append has requests; a merge has more, the more files the table has."""

EVERY = 2
"""One request of so many fails in the short test."""

TRIES, PAUSE = 20, 0.2

TOLD = {"ok", "StoreUnavailable", "CommitUnknown"}
"""What a batch may say of it."""


@pytest.fixture
def place(request: pytest.FixtureRequest) -> ObjectPlace:
    """An empty place with the sinks `orders` and `balances`, which this process reaches without the proxy."""
    made = ON_DELTA[f"delta-{request.param}"](request.getfixturevalue(f"{request.param}_folder"))
    made.create_sink()
    made.create_merge_sink("balances")
    assert isinstance(made, ObjectPlace)
    return made


@pytest.fixture
def settings(request: pytest.FixtureRequest, place: ObjectPlace) -> dict[str, str]:
    """What leads to the server of the place."""
    found: dict[str, str] = request.getfixturevalue("az_settings" if place.kind == "delta-az" else "s3_settings")
    return found


@pytest.fixture
def proxy(settings: dict[str, str]) -> Iterator[HttpProxy]:
    """Before the server of the place; a request that hangs is cut after two seconds."""
    with http_proxy.proxied(object_storage.server(settings), hang=2.0) as made:
        yield made


def run_with_failures(child: Steered, proxy: HttpProxy, step: str, way: str, every: int) -> Counter[str]:
    """The step again and again, until it has no request left to break, or MOST were; how it ended, by error."""
    ends: Counter[str] = Counter()
    for nth in range(0, MOST, every):
        proxy.rule = rule = Counted(way, nth, times=1_000_000 if way in FROM_THERE_ON else 1)
        ended = child.do(step)
        proxy.rule = lambda method, path: ""
        ends[ended.partition(":")[0]] += 1
        if ended != "ok":
            assert _again(child, step) == "ok"
        if not rule.met:
            break
    return ends


def _again(child: Steered, step: str) -> str:
    """The step until it succeeds: these settings allow no second try inside, and a server beside many tests may be slow once."""
    ended = ""
    for _ in range(TRIES):
        time.sleep(PAUSE)
        assert child.do("start") == "ok"
        if (ended := child.do(step)) == "ok":
            break
    return ended


@pytest.mark.full
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_an_answer_that_is_lost_is_looked_up(place: ObjectPlace, proxy: HttpProxy, settings: dict[str, str], tmp_path: Path) -> None:
    """One request of so many was carried out without an answer: the next look or the next run finds it, and each row is there once."""
    _plays(place, proxy, object_storage.through(settings, proxy.address), tmp_path / "next", "batch", LOST, every=EVERY)


@pytest.mark.full
@pytest.mark.parametrize("step", ["batch", "merge"])
@pytest.mark.parametrize("way", [BEFORE, LOST, HANG, BUSY, SLOW_DOWN, EXPIRED])
@pytest.mark.parametrize("place", ["az", "s3"], indirect=True)
def test_whichever_request_fails_nothing_is_lost_or_doubled(
    place: ObjectPlace, proxy: HttpProxy, settings: dict[str, str], tmp_path: Path, way: str, step: str
) -> None:
    """It never arrives, its answer is lost, it hangs; storage that answers 503 or 429 from then on, credentials that have expired."""
    _plays(place, proxy, object_storage.through(settings, proxy.address), tmp_path / "next", step, way, every=1)


def _plays(place: ObjectPlace, proxy: HttpProxy, settings: dict[str, str], progress: Path, step: str, way: str, *, every: int) -> None:
    timeout = {"timeout": "1s"} if way == HANG else {}
    child = Steered(place.kind, place.where, progress, settings, **QUICK, **timeout)  # this process does not go through the proxy
    try:
        assert [_again(child, one) for one in ("batch", "merge")] == ["ok"] * 2
        ends = run_with_failures(child, proxy, step, way, every)
    finally:
        child.close()
    assert set(ends) <= TOLD and ends.total() - ends["ok"] >= 5, ends
    events = int(progress.read_text()) * EVENTS
    rows = Counter(row["id"] for sink in ("orders", "balances") for row in place.read(sink))
    assert rows == Counter(f"p0-{n}" for n in range(events))
    assert_proven(place.store())
