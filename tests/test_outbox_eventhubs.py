"""An outbox that is dispatched to event hubs: ids and order, lost acknowledgements, what no batch can hold."""

from __future__ import annotations

import pytest
from eventhubs import clients
from eventhubs.control import Double
from fix_eventhubs import MakeHub

from checkpoint.errors import DestinationUnavailable
from dedup.eventhub import Connection, SendingHubs
from dedup.eventhub.rows import table
from dedup.outbox import Message


def destination(double: Double, **options: object) -> SendingHubs:
    return SendingHubs(Connection.of(double.connection_string, hub="any"), retry_backoff_factor=0.05, **options)


def test_events_carry_the_stored_id_and_keep_the_order_of_their_key(eventhubs: Double, new_hub: MakeHub) -> None:
    """The message id is AMQP's own property, so that a consumer takes it as it is; the key is the partition key."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    todo = [Message(n, hub, b"k%d" % (n % 3), f"id-{n}", b"%d" % n, (("message-id", b"another"), ("a", b"1"))) for n in range(30)]
    outcome = out.send(todo)
    out.close()
    assert not outcome.failed and not outcome.unsent
    got = clients.receive(eventhubs.connection_string, hub, "0", 30)
    assert sorted(e.message_id for e in got) == sorted(m.id for m in todo)
    for key in ("k0", "k1", "k2"):
        bodies = [int(e.body_as_str()) for e in got if e.partition_key == key.encode()]
        assert bodies == sorted(bodies) and len(bodies) == 10
    assert table(got[:1], "hub", "out", 0)["properties"][0].as_py() == [
        {"key": "message-id", "value": b"id-0"},
        {"key": "a", "value": b"1"},
    ]


def test_a_lost_acknowledgement_doubles_the_event_and_not_its_id(eventhubs: Double, new_hub: MakeHub) -> None:
    """The service has the event and the answer never comes: it is sent again under the same id, and nothing is lost."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    todo = [Message(n, hub, b"k", f"id-{n}", b"%d" % n) for n in range(5)]
    eventhubs.order("lose_answers", count=1)
    assert not out.send(todo).failed  # the client itself has sent the batch twice
    out.close()
    got = clients.receive(eventhubs.connection_string, hub, "0", 10)
    assert [e.message_id for e in got] == [f"id-{n}" for n in range(5)] * 2


def test_a_hub_that_is_not_there_is_nobodys_fault(eventhubs: Double, new_hub: MakeHub) -> None:
    """No message is given up, and the error says what the service said, without the key."""
    out = destination(eventhubs, retry_total=0)
    with pytest.raises(DestinationUnavailable, match="none-such") as told:
        out.send([Message(0, "none-such", b"k", "id", b"")])
    assert "SharedAccessKey=" not in str(told.value)


def test_an_event_that_no_batch_can_hold_stops_its_own_key(eventhubs: Double, new_hub: MakeHub) -> None:
    """It has failed for good, nothing behind it in its key is sent, all others are."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    todo = [Message(n, hub, b"k%d" % (n % 2), f"id-{n}", b"x" * (3_000_000 if n == 2 else 5)) for n in range(6)]
    outcome = out.send(todo)
    out.close()
    assert list(outcome.failed) == [2] and outcome.failed[2].permanent and outcome.unsent == {4}
    got = clients.receive(eventhubs.connection_string, hub, "0", 4)
    assert sorted(e.message_id for e in got) == ["id-0", "id-1", "id-3", "id-5"]
