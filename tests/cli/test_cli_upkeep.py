"""`dedup upkeep`: what it would do, what it did, what it keeps and why, and what failed."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.fix_places import BOTH, new_place
from kit.orders import batch, consumer, event
from kit.paths import ROOT, environment
from kit.places import DeltaPlace, Place

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has decided one event, three days behind in its log."""
    made = new_place(request, tmp_path)
    behind = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    consumer(made.store())(batch(event(0, "a", enqueued_time=behind)), 0)
    return made


def test_it_shows_what_it_would_do_and_does_it_with_yes(place: Place, dedup: Run) -> None:
    """A table for people with the reason why something is kept, the same as JSON, and nothing done without --yes."""
    code, out, err = dedup("upkeep --retention 0d", place)
    assert (code, err) == (0, "") and "shop has read its log up to" in " ".join(out.split())
    code, out, _ = dedup("upkeep --retention 0d --json --yes", place)
    told = json.loads(out)
    assert code == 0 and told["done"] and {line["count"] for line in told["upkeep"] if line["what"] != "packed tables"} == {0}
    code, out, _ = dedup("upkeep --retention 0d --json --yes --although-behind shop", place)
    assert code == 0 and not any(line["kept"] for line in json.loads(out)["upkeep"])


@pytest.mark.parametrize("place", ["delta"], indirect=True)
def test_a_consumer_that_is_broken_holds_no_other_one_up(place: DeltaPlace, dedup: Run) -> None:
    """A ledger that was copied back is named with its error, and the exit code is 1; the others are done."""
    consumer(place.store(), name="two")(batch(event(0, "b")), 0)
    ledger, copy = Path(place.where) / "state/ledger/two", Path(place.where) / "copy"
    shutil.copytree(ledger, copy)
    consumer(place.store(), name="two")(batch(event(1, "c")), 1)
    shutil.rmtree(ledger)
    copy.rename(ledger)
    code, out, _ = dedup("upkeep --retention 0d --although-behind shop --although-behind two --json --yes", place)
    failed = {(line["what"], line["consumer"]): line["failed"] for line in json.loads(out)["upkeep"] if line["failed"]}
    assert code == 1 and list(failed) == [("sent messages", "two")] and "accept-restore" in failed["sent messages", "two"]


@pytest.mark.full
def test_it_goes_on_until_it_is_stopped(place: Place) -> None:
    """With --every: again and again, and a signal ends it."""
    line = [sys.executable, "-m", "dedup", "upkeep", "--retention", "0d", "--every", "0.5s", "--yes", "--store", place.url]
    process = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    seen = [process.stdout.readline() for _ in range(8)]
    assert sum("shop" in text or "all" in text for text in seen) >= 2
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    process.stdout.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("upkeep", "--retention"),
        ("upkeep --retention soon", "30m"),
        ("upkeep --retention 30d --every 1h", "--every needs --yes"),
        ("upkeep --retention 30d --although-behind shoop", "shop"),
    ],
)
@pytest.mark.parametrize("place", ["delta"], indirect=True)
def test_a_wrong_call_is_told(place: Place, dedup: Run, line: str, says: str) -> None:
    """What is missing, what a duration looks like, and which consumer was meant."""
    code, _, err = dedup(line, place)
    assert code == 2 and says in err
