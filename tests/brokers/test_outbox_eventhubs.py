"""An outbox that is dispatched to event hubs: ids and order, lost acknowledgements, what no batch can hold."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.errors import DestinationUnavailable
from dedup.eventhub import Connection, SendingHubs, log_reader
from dedup.eventhub.outbox import hash_code, partition_of
from dedup.eventhub.rows import table
from dedup.outbox import Message
from fixtures.fix_eventhubs import MakeHub
from kit.eventhubs import clients
from kit.eventhubs.control import Double


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


def test_a_hub_that_is_not_there_holds_back_no_other(eventhubs: Double, new_hub: MakeHub) -> None:
    """What the others have taken counts as sent, once; the hub is away, and none of its messages has failed."""
    hub, out = new_hub(partitions=2), destination(eventhubs, retry_total=0)
    todo = [Message(n, ("none-such", hub)[n % 2], b"k%d" % (n // 2 % 3), f"id-{n}", b"%d" % n) for n in range(12)]
    outcome = out.send(todo)
    out.close()
    assert not outcome.failed and outcome.unsent == {0, 2, 4, 6, 8, 10}
    assert list(outcome.away) == ["none-such"] and "none-such" in outcome.away["none-such"]
    assert sorted(e["id"] for events in eventhubs.kept(hub, 2) for e in events) == sorted(m.id for m in todo if m.topic == hub)


@pytest.mark.full
def test_a_hub_that_took_some_counts_no_attempt_of_the_others(eventhubs: Double, new_hub: MakeHub) -> None:
    """The service goes away between two partitions: what it has taken is sent, the rest is as if it had not been tried."""
    hub, out = new_hub(partitions=4), destination(eventhubs, retry_total=0)
    todo = [Message(n, hub, b"k%d" % n, f"id-{n}", b"%d" % n) for n in range(40)]
    send_to, calls = out._send_to, list[object]()

    def once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            eventhubs.order("drop_sends", count=1)
        send_to(*arguments)

    out._send_to = once  # type: ignore[method-assign]
    outcome = out.send(todo)
    assert not outcome.failed and 0 < len(outcome.unsent) < 40
    assert not out.send([m for place, m in enumerate(todo) if place in outcome.unsent]).unsent
    out.close()
    assert sorted(e["id"] for events in eventhubs.kept(hub, 4) for e in events) == sorted(m.id for m in todo)


def test_an_event_that_no_batch_can_hold_stops_its_own_key(eventhubs: Double, new_hub: MakeHub) -> None:
    """It has failed for good, nothing behind it in its key is sent, all others are."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    todo = [Message(n, hub, b"k%d" % (n % 2), f"id-{n}", b"x" * (3_000_000 if n == 2 else 5)) for n in range(6)]
    outcome = out.send(todo)
    out.close()
    assert list(outcome.failed) == [2] and outcome.failed[2].permanent and outcome.unsent == {4}
    got = clients.receive(eventhubs.connection_string, hub, "0", 4)
    assert sorted(e.message_id for e in got) == ["id-0", "id-1", "id-3", "id-5"]


def test_an_event_that_the_service_refuses_is_found_and_stops_its_own_key(eventhubs: Double, new_hub: MakeHub) -> None:
    """The service refuses whole batches; all but the guilty event and what is behind it in its key are sent, in order, without doubles."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    todo = [Message(n, hub, b"k%d" % (n % 2), f"id-{n}", b"poison" if n == 2 else b"%d" % n) for n in range(6)]
    eventhubs.order("refuse", text="poison")
    outcome = out.send(todo)
    alone = out.send([todo[2]])
    eventhubs.order("calm")
    assert list(outcome.failed) == [2] and not outcome.failed[2].permanent and outcome.unsent == {4}
    assert list(alone.failed) == [0] and alone.failed[0].alone and "argument-error" in alone.failed[0].error_type
    assert not out.send([todo[2], todo[4]]).failed
    out.close()
    got = clients.receive(eventhubs.connection_string, hub, "0", 6)
    assert [e.message_id for e in got] == ["id-0", "id-1", "id-3", "id-5", "id-2", "id-4"]


def test_a_batch_has_all_keys_of_its_partition(eventhubs: Double, new_hub: MakeHub) -> None:
    """However many keys there are, a partition is one batch; each key is where its hash says, in order, and the consumer sees it."""
    hub, out = new_hub(partitions=4), destination(eventhubs)
    todo = [Message(n, hub, b"k%d" % (n % 200), f"id-{n}", b"%d" % n) for n in range(1_000)]
    before = eventhubs.stats().get("sends", 0)
    assert not out.send(todo).failed
    out.close()
    assert eventhubs.stats()["sends"] - before == 4
    kept = eventhubs.kept(hub, 4)
    assert sum(map(len, kept)) == 1_000 and all(kept)
    for number, events in enumerate(kept):
        assert {partition_of(e["key"], 4) for e in events} == {number}
        for key in {e["key"] for e in events}:
            bodies = [int(e["body"]) for e in events if e["key"] == key]
            assert bodies == sorted(bodies) and len(bodies) == 5
    rows = log_reader(eventhubs.connection_string, hub).read(hub, 0, 0, len(kept[0]) - 1)
    assert rows["key"].to_pylist() == [e["key"].encode() for e in kept[0]]


@pytest.mark.full
def test_any_bytes_are_a_key(eventhubs: Double, new_hub: MakeHub) -> None:
    """No bytes, and bytes that are no text, keep their order as well: each is in one partition."""
    hub, out = new_hub(partitions=4), destination(eventhubs)
    keys = [b"", b"\xff\x00", "\u00e9".encode(), None]
    for n in range(12):
        assert not out.send([Message(n, hub, keys[n % 4], f"id-{n}", b"%d" % n)]).failed
    out.close()
    found = {(e["key"], number) for number, events in enumerate(eventhubs.kept(hub, 4)) for e in events if e["key"] is not None}
    assert dict(found) == {key: partition_of(key, 4) for key in ("", "ff00", "\u00e9")} and len(found) == 3
    assert sum(e["key"] is None for events in eventhubs.kept(hub, 4) for e in events) == 3


@pytest.mark.full
def test_a_hub_that_has_grown_is_seen_after_a_while(eventhubs: Double, new_hub: MakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """New partitions get keys once the dispatcher has looked again, as they do from the service itself."""
    hub, out = new_hub(partitions=1), destination(eventhubs)
    monkeypatch.setattr("dedup.eventhub.outbox.LOOK_SECONDS", 0.0)
    out.send([Message(0, hub, b"k", "id-0", b"0")])
    eventhubs.order("grow", hub=hub, partitions=8)
    out.send([Message(n, hub, b"k%d" % n, f"id-{n}", b"%d" % n) for n in range(1, 100)])
    out.close()
    assert sum(1 for events in eventhubs.kept(hub, 8) if events) == 8


@pytest.mark.parametrize(
    ("key", "code"),
    [("7", -15263), ("131", 30562), ("FWfAT", -22341), ("sOdeEAsyQoEuEFPGerWO", -6503), ("-4189260826195535198", 453), ("", 0)],
)
def test_the_hash_is_that_of_other_senders(key: str, code: int) -> None:
    """The numbers are those in the tests of Microsoft's clients for .NET and Java."""
    assert hash_code(key) == code
