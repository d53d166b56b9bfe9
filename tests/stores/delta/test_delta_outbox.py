"""The outbox on Delta where a person, or another process, commits beside the dispatcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dedup.core.messages import Asked, Chosen, Failed, Marks
from dedup.delta.engine import DeltaRs
from kit.orders import batch, consumer, event
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta


@pytest.fixture
def lake(tmp_path: Path) -> DeltaPlace:
    """Two messages that wait."""
    place = DeltaPlace(tmp_path)
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(pa.table({"body": pc.struct_field(rows["data"], "id")}), "out")

    run(batch(event(0, "a"), event(1, "b")), 0)
    return place


def states(place: DeltaPlace) -> list[str]:
    """Of the messages, ascending."""
    return [e.state.name for e in place.store().outbox("shop").entries(Chosen(limit=None))]


def test_what_a_person_decides_while_messages_are_sent_stays(lake: DeltaPlace) -> None:
    """A message that is discarded while it is in hand, and cannot be sent, is not waiting again afterwards."""
    mine = lake.store().outbox("shop")
    first, second = (e.number for e in mine.entries(Chosen()))
    with mine.turn(Asked()) as turn:
        assert lake.store().outbox("shop").discard([first]) == 1
        turn.mark(Marks(sent=(second,), tried=(Failed(first, "Away", "later"),)))
    assert states(lake) == ["DISCARDED", "SENT"]


def test_a_message_that_was_sent_meanwhile_is_not_let_go_again(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people retry a dead message; one of them is slow, and it has been sent in between: it is not sent a second time."""
    mine, real = lake.store().outbox("shop"), DeltaRs.append
    first = mine.entries(Chosen())[0].number
    with mine.turn(Asked()) as turn:
        turn.mark(Marks(dead=(Failed(first, "No", "no"),)))

    def after_the_other(self: DeltaRs, *given: Any) -> None:
        monkeypatch.setattr(DeltaRs, "append", real)
        assert lake.store().outbox("shop").retry([first]) == 1
        with mine.turn(Asked()) as turn:
            turn.mark(Marks(sent=tuple(m.number for m in turn.messages)))
        real(self, *given)

    slow = lake.store().outbox("shop")
    monkeypatch.setattr(DeltaRs, "append", after_the_other)
    assert slow.retry([first]) == 0
    assert states(lake) == ["SENT", "SENT"]


def test_a_dispatcher_sees_what_is_decided_right_behind_its_mark(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody commits between its mark and its next look: a message that is let go again comes with its next turn."""
    mine, real = lake.store().outbox("shop"), DeltaRs.append
    first, second = (e.number for e in mine.entries(Chosen()))
    with mine.turn(Asked()) as turn:
        turn.mark(Marks(dead=(Failed(first, "No", "no"),)))

    def and_retried(self: DeltaRs, *given: Any) -> None:
        real(self, *given)
        monkeypatch.setattr(DeltaRs, "append", real)
        assert lake.store().outbox("shop").retry([first]) == 1

    with mine.turn(Asked()) as turn:
        monkeypatch.setattr(DeltaRs, "append", and_retried)
        turn.mark(Marks(sent=(second,)))
    with mine.turn(Asked()) as turn:
        assert [m.number for m in turn.messages] == [first]
