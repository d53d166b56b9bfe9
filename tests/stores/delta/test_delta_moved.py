"""A lake that was moved: the store's own tables are found below its folder, and a person says where the sinks are now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import PublicationStuck
from dedup import Consumer
from dedup.outbox import Call, Dispatcher, Message
from dedup.pipeline.handlers import Event
from kit.foreach_kit import bare
from kit.orders import assert_proven, batch, event, letters
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

Run = Callable[..., tuple[int, str, str]]

BAD = 13
"""The amount of an event that fails."""


class Died(BaseException):
    """The process ends."""


def of_shop(place: DeltaPlace, named: Callable[[str], str], **options: Any) -> Consumer:
    """A consumer that appends, merges, publishes and parks."""
    made = bare(place.store(**options), query=None)

    @made.foreach(into=named("orders"), on="driver")
    def book(event: Event, tx: Any) -> dict[str, Any]:
        row = {"id": event.data["id"], "amount": event.data["amount"]}
        if row["amount"] == BAD:
            raise ValueError("bad")
        tx.merge(row, named("balances"), keys="id")
        tx.publish({"body": row["id"]}, "out")
        return row

    return made


def die(step: str) -> None:
    """Between the decision and its publication."""
    if step == "publish":
        raise Died


@pytest.mark.parametrize("by_path", [False, pytest.param(True, marks=pytest.mark.full)], ids=["by name", "by path"])
@pytest.mark.parametrize("published", [False, pytest.param(True, marks=pytest.mark.full)], ids=["decided", "published"])
def test_a_lake_goes_on_where_it_was_moved_to(tmp_path: Path, dedup: Run, by_path: bool, published: bool) -> None:
    """Letters and messages are there by themselves, also decided ones that no table shows. Nothing is written before sinks are accepted."""
    old, new = DeltaPlace(tmp_path / "old"), DeltaPlace(tmp_path / "new")
    old.create_sink()
    old.create_merge_sink("balances")
    first: Callable[[str], str] = old.path if by_path else str
    of_shop(old, first)(batch(event(0, "a", 1), event(1, "b", BAD)), 0)
    try:
        of_shop(old, first, on_step=lambda step: None if published else die(step))(batch(event(2, "c", 2), event(3, "x", BAD)), 1)
    except Died:
        assert not published
    shutil.move(tmp_path / "old", tmp_path / "new")

    later: Callable[[str], str] = new.path if by_path else str
    third = batch(event(2, "c", 2), event(4, "d", 4))
    with pytest.raises(PublicationStuck, match=r"has no Delta table at .*/old/.*; with --at ADDRESS where the table was moved to"):
        of_shop(new, later)(third, 2)
    assert len(letters(new.store())) == 2
    assert dedup("verify shop", new)[0] == 1
    for name in ("orders", "balances"):
        line = f"sink accept shop {first(name)} --at {new.path(name)}"
        assert dedup(line, new)[0] == 0
        code, told, _ = dedup(f"{line} --yes --reason moved", new)
        assert code == 0 and "done; the next batch makes them visible, or `dedup sink sync`" in told
    assert dedup("sink sync shop", new)[0] == dedup("verify shop", new)[0] == 0
    assert of_shop(new, later)(third, 2).processed == 1

    assert [(row["id"], row["amount"]) for row in new.read()] == [("a", 1), ("c", 2), ("d", 4)]
    assert [(row["id"], row["amount"]) for row in new.read("balances")] == [("a", 1), ("c", 2), ("d", 4)]
    sent: list[Message] = []
    Dispatcher(new.store().outbox("shop"), Call(sent.extend)).once()
    assert [m.body for m in sent] == [b"a", b"c", b"d"] and len(letters(new.store())) == 2
    assert_proven(new.store())
    assert not (tmp_path / "old").exists()


def test_a_sink_is_moved_whole_or_not_at_all(tmp_path: Path, dedup: Run) -> None:
    """While a table is at the old address, decisions go there, and a copy would lack them: the copy is refused, and so is no table."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    place.create_merge_sink("balances")
    of_shop(place, str)(batch(event(0, "a", 1), event(1, "b", BAD)), 0)
    shutil.copytree(place.path("orders"), tmp_path / "copy")
    refused = {
        f"orders --at {tmp_path}/copy": f"still has a table at {place.path('orders')}",
        f"dedup.dead_letters --at {tmp_path}/copy": "dedup finds it below the store's folder",
    }
    for line, why in refused.items():
        for sure in ("", " --yes"):
            code, _, told = dedup(f"sink accept shop {line}{sure}", place)
            assert code == 3 and why in " ".join(told.split())
    shutil.rmtree(place.path("orders"))
    code, _, told = dedup(f"sink accept shop orders --at {tmp_path}/nowhere", place)
    assert code != 0 and "has no Delta table at" in told
    assert dedup(f"sink accept shop orders --at {tmp_path}/copy --yes", place)[0] == 0
    assert dedup("verify shop", place)[0] == 0
