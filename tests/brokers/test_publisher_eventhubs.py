"""The publisher by Microsoft's own client, against the double of Event Hubs, with its state in a real PostgreSQL."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from azure.eventhub import EventDataBatch
from azure.eventhub._pyamqp.error import TokenAuthFailure
from azure.eventhub._transport._pyamqp_transport import PyamqpTransport

from checkpoint.errors import ConfigError, NotConfirmed, StoreUnavailable
from dedup import Consumer, PostgresStore
from dedup.eventhub import Connection, Sender, log_reader
from dedup.eventhub.sender import _explained, _sent
from dedup.publishing import OutgoingEvent, Published, Publisher
from dedup.publishing.events import Stored, spread
from dedup.publishing.postgres import Publishers
from fixtures.fix_eventhubs import AnyHub
from fixtures.variants import of_which
from kit.pg_run import run
from kit.publish_kit import assert_ordered, consumed, copied, events, kept, publisher, restored, sender, waiting

pytestmark = [pytest.mark.postgres, pytest.mark.eventhubs]


@pytest.fixture
def hub(new_hub: Any) -> str:
    """A hub with two partitions."""
    name: str = new_hub(partitions=2)
    return name


@pytest.mark.full
def test_an_id_that_is_published_again_is_one_event(postgres: str, eventhubs: Any, hub: str) -> None:
    """In one process, and by another publisher of the group afterwards: nothing is sent the second time."""
    with publisher(postgres, eventhubs, hub) as one:
        assert one.publish_once("12345", b"x") == Published(new=1)
        assert one.publish_once("12345", OutgoingEvent(b"x")) == Published(known=1)
    with publisher(postgres, eventhubs, hub) as two:
        assert two.publish_once("12345", b"x") == Published(known=1)
    assert kept(eventhubs, hub) == [b"x"] and consumed(postgres, eventhubs, hub) == (["x"], [])


@pytest.mark.parametrize("fault", of_which(1, ["lose_answers", "drop_sends", "stay_silent"]))
def test_a_lost_answer_is_one_event_at_the_consumer(postgres: str, eventhubs: Any, hub: str, fault: str) -> None:
    """Accepted and cut off, accepted and never answered, or not accepted: sent again until confirmed, in order, once at the consumer."""
    with publisher(postgres, eventhubs, hub, timeout=3.0, retry_total=0, max_outage=60.0) as one:
        for first in (0, 10):
            eventhubs.order(fault, count=1)
            assert one.publish(events(first, first + 10)) == Published(new=10)
    assert waiting(postgres) == 0
    assert len(kept(eventhubs, hub)) == 20 if fault == "drop_sends" else len(kept(eventhubs, hub)) > 20
    bodies, letters = consumed(postgres, eventhubs, hub)
    assert sorted(map(int, bodies)) == list(range(20)) and not letters
    assert_ordered(bodies)


@pytest.mark.full
def test_a_resend_is_the_same_event(postgres: str, eventhubs: Any, hub: str) -> None:
    """Same bytes, partition, ids and properties, by another process's publisher as well; only the position differs."""
    sent = OutgoingEvent(
        b"x", key="k", properties={"text": "ä", "number": 7, "large": -(2**63), "share": 0.1, "flag": True}, content_type="text/plain"
    )
    eventhubs.order("lose_answers", count=1_000)
    with pytest.raises(NotConfirmed, match="stored"):
        publisher(postgres, eventhubs, hub, max_outage=0.3).publish([sent])
    eventhubs.order("calm")
    before = next(found for found in eventhubs.kept(hub, 2) if found)
    with publisher(postgres, eventhubs, hub, "shop"):
        after = next(found for found in eventhubs.kept(hub, 2) if found)
    assert len(after) == len(before) + 1 and all(event == before[0] for event in after)
    assert before[0]["properties"].items() >= sent.properties.items()
    assert consumed(postgres, eventhubs, hub) == (["x"], [])


@pytest.mark.full
def test_a_group_that_has_sent_billions_of_events_goes_on(postgres: str, eventhubs: Any, hub: str) -> None:
    """Its number and large numbers of users need 64 bits on the wire; a reader has them as they were given."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"0", partition=0)])
        run(postgres, "update dedup.publisher_lane set next_sequence = 2147483648, confirmed = 2147483647")
    with publisher(postgres, eventhubs, hub) as one:
        assert one.publish([OutgoingEvent(b"1", partition=0, properties={"least": -(2**63), "most": 2**63 - 1})]) == Published(new=1)
    read = log_reader(eventhubs.connection_string, hub).read(hub, 0, 1, 1)["properties"].to_pylist()[0]
    found = {pair["key"]: pair["value"] for pair in read}
    assert (found["dedup_sequence"], found["least"], found["most"]) == (b"2147483648", b"-9223372036854775808", b"9223372036854775807")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Stored(0, 1, "a", None, None, '{"x": 18446744073709551616}', b""), "cannot be encoded as AMQP"),
        (Stored(0, 1, "a", None, None, "{}", b"x" * 2_000), "larger than the hub takes"),
    ],
)
def test_why_a_batch_does_not_take_an_event_is_told(event: Stored, why: str) -> None:
    """What an older version has stored and the client cannot encode is not taken for too large; both name the way out."""
    client: Any = SimpleNamespace(create_batch=lambda **_: EventDataBatch(1_000))
    with pytest.raises(ConfigError, match=f"{why}.*dedup publisher discard"):
        _sent(client, 0, None, [event], 1.0)


def test_an_event_that_the_service_refuses_is_named_and_can_be_given_up(postgres: str, eventhubs: Any, hub: str) -> None:
    """What is before it is sent; then the error names this event and the way out, and without it the group goes on."""
    bodies = [b"poison" if n == 5 else b"%d" % n for n in range(9)]
    eventhubs.order("refuse", text="poison")
    refused = r"Event 6 of partition 1 .*refused.*argument-error.*dedup publisher discard"
    with publisher(postgres, eventhubs, hub) as one, pytest.raises(ConfigError, match=refused):
        one.publish([OutgoingEvent(body, partition=1) for body in bodies])
    assert kept(eventhubs, hub) == bodies[:5] and waiting(postgres) == 4
    with closing(Publishers(postgres, "dedup")) as people:
        assert people.discard(people.one("shop", "", ""), 1, 6, "ann", "refused") == 1
    with publisher(postgres, eventhubs, hub):
        assert kept(eventhubs, hub) == [*bodies[:5], *bodies[6:]] and waiting(postgres) == 0


def test_a_key_that_the_service_would_refuse_is_refused_before_it_is_stored(postgres: str, eventhubs: Any, hub: str) -> None:
    """Event Hubs takes 128 characters where it chooses the partition; where the publisher does, the service never sees the key."""
    long = OutgoingEvent(b"x", key="k" * 129)
    with publisher(postgres, eventhubs, hub, partition_by="broker") as one:
        with pytest.raises(ConfigError, match=r"129 characters.*at most 128"):
            one.publish([b"small", long])
        assert waiting(postgres) == 0 and one.publish([OutgoingEvent(b"y", key="k" * 128)]) == Published(new=1)
    with publisher(postgres, eventhubs, hub, "other") as one:
        assert one.publish([long]) == Published(new=1)


@pytest.mark.parametrize("status", [503, 401])
def test_only_a_login_that_is_refused_is_final(status: int) -> None:
    """A service that cannot look at the token now is asked again."""
    told = PyamqpTransport._create_eventhub_exception(TokenAuthFailure(status, b"said"))
    assert isinstance(_explained(told, Connection("ns", "hub")), ConfigError) == (status == 401)


@pytest.mark.full
def test_state_restored_from_an_old_copy_loses_and_doubles_nothing(postgres: str, eventhubs: Any, hub: str) -> None:
    """Ids published again are duplicates at the consumer; new events have new message ids, though their numbers were given before."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish_once("a", OutgoingEvent(b"a", key="k"))
    old = copied(postgres)
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"b", key="k", id="b"), OutgoingEvent(b"same", key="k"), OutgoingEvent(b"c", key="k")])
    restored(postgres, old)
    with publisher(postgres, eventhubs, hub) as one:
        assert one.publish(
            [OutgoingEvent(b"same", key="k"), OutgoingEvent(b"d", key="k"), OutgoingEvent(b"b", key="k", id="b")]
        ) == Published(new=3)
    assert consumed(postgres, eventhubs, hub) == (["a", "b", "same", "c", "same", "d"], [])


def test_partition_count_changed_keys_stay_where_they_were(
    postgres: str, eventhubs: Any, new_hub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub that grew: keys stay on the first partitions, in order, until a person says otherwise; the log names the command."""
    hub = new_hub(partitions=2)
    with publisher(postgres, eventhubs, hub) as one:
        one.publish(events(0, 20))
    eventhubs.order("grow", hub=hub, partitions=5)
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([*events(20, 40), OutgoingEvent(b"45", partition=4)])
    assert "dedup publisher set-partitions shop 5" in caplog.text
    assert [len(found) > 0 for found in eventhubs.kept(hub, 5)] == [True, True, False, False, True]
    bodies, _ = consumed(postgres, eventhubs, hub, 5)
    assert sorted(map(int, bodies)) == [*range(40), 45]
    assert_ordered(bodies[:40])


def test_partition_chosen_by_the_gateway_is_once_at_the_consumer(postgres: str, eventhubs: Any, new_hub: Any) -> None:
    """Even where a resend lands in another partition: keys of consumers count for the topic. Events without a key have no order."""
    hub = new_hub(partitions=3)
    with publisher(postgres, eventhubs, hub, partition_by="broker") as one:
        for first in range(0, 30, 10):
            eventhubs.order("lose_answers", count=2)
            one.publish([*events(first, first + 10), OutgoingEvent(b"%d" % (100 + first))])
    assert {event["key"] for found in eventhubs.kept(hub, 3) for event in found} == {*(f"k{n}" for n in range(5)), None}
    assert len(kept(eventhubs, hub, 3)) > 33
    bodies, letters = consumed(postgres, eventhubs, hub, 3)
    assert sorted(map(int, bodies)) == [*range(30), 100, 110, 120] and not letters
    assert_ordered([body for body in bodies if int(body) < 100])


def test_an_event_goes_where_it_is_told(postgres: str, eventhubs: Any, hub: str) -> None:
    """A partition of its own, or the one of its key, which docs/how-to/publishing.md defines; without either, of its id."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"p", partition=1), OutgoingEvent(b"k", key="some"), OutgoingEvent(b"i", id="some")])
        with pytest.raises(ConfigError, match="no partition 2"):
            one.publish([OutgoingEvent(b"no", partition=2)])
    found = [[event["body"] for event in events] for events in eventhubs.kept(hub, 2)]
    assert b"p" in found[1] and b"k" in found[spread("some", 2)] and b"i" in found[spread("some", 2)]
    assert [spread(key, 32) for key in ("a", "flight-1", "ä")] == [10, 4, 12]


def test_an_event_that_is_too_large_is_refused_before_it_is_stored(postgres: str, eventhubs: Any, hub: str) -> None:
    """A single one, and one in a page: nothing of the page is stored, the publisher goes on."""
    with publisher(postgres, eventhubs, hub) as one:
        with pytest.raises(ConfigError, match="at most 1,048,576"):
            one.publish([b"small", b"x" * 1_100_000])
        assert one.publish([b"x" * 1_000_000]) == Published(new=1)
    assert waiting(postgres) == 0 and len(kept(eventhubs, hub)) == 1


def test_settings_that_cannot_work_are_refused(postgres: str, eventhubs: Any, hub: str, tmp_path: Any) -> None:
    """No PostgreSQL, no such hub, wrong words, lazy commits: each a sentence, without secrets."""
    from dedup import DeltaStore

    with pytest.raises(ConfigError, match="PostgreSQL"):
        Publisher("shop", DeltaStore(str(tmp_path)), sender(eventhubs, hub))
    with pytest.raises(ConfigError, match="partition_by"):
        publisher(postgres, eventhubs, hub, partition_by="dice")
    with pytest.raises(ConfigError, match="group"):
        publisher(postgres, eventhubs, hub, "")
    with pytest.raises(ConfigError, match="no event hub"):
        publisher(postgres, eventhubs, "nowhere").resend()
    lazy = f"{postgres} options='-c synchronous_commit=off'"
    with pytest.raises(ConfigError, match="synchronous_commit"):
        publisher(lazy, eventhubs, hub).resend()
    with pytest.raises(StoreUnavailable):
        publisher("host=127.0.0.1 port=1 password=s3cret", eventhubs, hub, max_outage=0.1).resend()
    assert "s3cret" not in repr(publisher("host=127.0.0.1 password=s3cret", eventhubs, hub))


@pytest.mark.full
def test_lost_ids_and_repeats_on_any_hub(postgres: str, any_hub: AnyHub) -> None:
    """On the double and, where DEDUP_TEST_EVENTHUBS names a hub, on the service: two publishers without common state, one event."""
    id = f"test-{time.time_ns()}"
    for schema in ("dedup", "elsewhere"):
        store = PostgresStore(postgres, schema=schema)
        with Publisher("shop", store, Sender(any_hub.connection)) as one:
            assert one.publish(
                [OutgoingEvent(id.encode(), partition=0, id=id), OutgoingEvent(id.encode(), partition=0, id=id)]
            ) == Published(1, 1)
    read = log_reader(any_hub.connection).read(any_hub.name, 0, any_hub.begin[0], any_hub.begin[0] + 1)
    assert [[p["value"] for p in found if p["key"] == "message-id"] for found in read["properties"].to_pylist()] == [[id.encode()]] * 2
    consumer = Consumer("reader", PostgresStore(postgres), query="q")
    seen = list[int]()
    consumer.foreach_batch(lambda rows, tx: seen.append(rows.num_rows))
    consumer(read, 0)
    assert seen == [1]
