"""`dedup consumer delete`: what it shows, what it refuses, what it does with --yes, and that a second call ends what a first one began."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.fix_places import BOTH, new_place
from kit.orders import batch, consumer, event, ids
from kit.places import Place

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place where `shop` and `other` run, and have an open letter each."""
    made = new_place(request, tmp_path)
    stores = {name: made.store() for name in ("shop", "other")}
    for name, store in stores.items():
        consumer(store, name=name, budget=None)(batch(event(0, "a"), event(1, "b", -1)), 0)
    yield made
    for store in stores.values():
        store.close()


def test_without_yes_it_shows_what_there_is_and_why_it_would_not_go(place: Place, dedup: Run) -> None:
    """A table of counts; exit code 3 with the process that runs it and the letter that waits; nothing has changed."""
    code, out, err = dedup("consumer delete shop", place)
    told = " ".join(err.split())
    assert (code, "dead letters" in out) == (3, True)
    assert "it runs, or may run: process" in told and "it has 1 open or blocked dead letters" in told
    code, out, err = dedup("consumer delete shop --although-running --although-waiting --json", place)
    document = json.loads(out)
    assert (code, err, document["done"], document["parts"]["dead letters"]) == (0, "", False, 1)
    assert place.store().consumers() == ["other", "shop"]


def test_with_yes_the_consumer_is_gone(place: Place, dedup: Run) -> None:
    """It is refused where something speaks against it; where that is allowed all of it goes, and the other one is as it was."""
    code, _, err = dedup("consumer delete shop --yes --reason done", place)
    assert (code, "is not deleted" in err) == (3, True)
    code, out, _ = dedup("consumer delete shop --although-running --although-waiting --yes --by ann --reason done", place)
    assert (code, out.strip().splitlines()[-1]) == (0, "shop: deleted.")
    code, _, err = dedup("consumer delete shop --yes --reason done", place)
    assert (code, "There is no consumer 'shop' in this store. It has: other." in " ".join(err.split())) == (2, True)
    code, out, _ = dedup("consumer list --json", place)
    assert [one["consumer"] for one in json.loads(out)] == ["other"]
    assert dedup("verify other", place)[0] == 0


@pytest.mark.fast_on("delta")
def test_the_same_command_ends_what_an_earlier_one_began(place: Place, dedup: Run) -> None:
    """Whoever starts the consumer meanwhile is told the command; it asks nothing again, and the name is free after it."""

    def dies(name: str) -> None:
        if name in ("delete_portion", "empty_table"):
            raise KeyboardInterrupt

    said: dict[str, Any] = {"by": "ann", "reason": "done", "although_running": True, "although_waiting": True}
    with pytest.raises(KeyboardInterrupt):
        place.store(on_step=dies).delete_consumer("shop", **said)
    for command in ("consumer reset shop --yes", "dead-letter discard --consumer shop --reason x --yes"):
        code, _, err = dedup(command, place)
        assert (code, "dedup consumer delete shop --yes" in " ".join(err.split())) == (3, True), err
    code, out, _ = dedup("verify shop", place)
    assert (code, "dedup consumer delete shop --yes" in " ".join(out.split())) == (1, True), out
    code, out, _ = dedup("consumer delete shop", place)
    assert (code, "an earlier call has decided this" in out) == (0, True)
    assert dedup("consumer delete shop --yes", place)[0] == 0
    consumer(place.store(), name="shop")(batch(event(0, "a")), 0)
    assert ids(place.read()) == ["a"] * 3
