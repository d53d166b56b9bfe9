"""The publisher step by step: a broker in this process that can be told what goes wrong, and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint.errors import ConfigError, Fenced, KeyConflict, NotConfirmed, ResendTooLate, StoreRestored, StoreUnavailable
from dedup import PostgresStore
from dedup.publishing import OutgoingEvent, Published, Publisher
from dedup.publishing.events import RESERVED
from dedup.publishing.lanes import Lanes
from dedup.publishing.postgres import Publishers
from kit.pg_run import run
from kit.publish_kit import Broker, consumed, copied, events, kept, publisher, restored, sender, texts, waiting

pytestmark = pytest.mark.postgres


@pytest.fixture
def eventhubs() -> Broker:
    """In place of the double: it answers at once."""
    return Broker()


@pytest.fixture
def new_hub(eventhubs: Broker) -> Any:
    """Makes a hub of it."""
    return eventhubs.new


@pytest.fixture
def hub(new_hub: Any) -> str:
    """A hub with two partitions."""
    name: str = new_hub(partitions=2)
    return name


def test_an_id_with_another_body_is_refused(postgres: str, eventhubs: Any, hub: str) -> None:
    """KeyConflict names the id; nothing of the page is stored or sent; the publisher goes on."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish_once("12345", b"x")
        for wrong in ([OutgoingEvent(b"new"), OutgoingEvent(b"y", id="12345")], [OutgoingEvent(b"1", id="a"), OutgoingEvent(b"2", id="a")]):
            with pytest.raises(KeyConflict, match=r"'12345'|'a'"):
                one.publish(wrong)
        assert one.publish_once("a", b"3") == Published(new=1)
    assert sorted(kept(eventhubs, hub)) == [b"3", b"x"]


def test_an_id_twice_in_one_call_is_one_event(postgres: str, eventhubs: Any, hub: str) -> None:
    """The first one is sent, the others are counted as known."""
    with publisher(postgres, eventhubs, hub) as one:
        assert one.publish([OutgoingEvent(b"x", id="a"), b"free", OutgoingEvent(b"x", id="a"), b"free"]) == Published(new=3, known=1)
    assert sorted(kept(eventhubs, hub)) == [b"free", b"free", b"x"]


def test_two_publishers_with_one_id_are_one_event(postgres: str, eventhubs: Any, hub: str) -> None:
    """Of two groups, too; an id counts for a destination, so that another hub gets its own."""
    with publisher(postgres, eventhubs, hub, "east") as one, publisher(postgres, eventhubs, hub, "west") as two:
        assert (one.publish_once("a", b"x"), two.publish_once("a", b"x")) == (Published(new=1), Published(known=1))
        with pytest.raises(KeyConflict):
            two.publish_once("a", b"y")
    eventhubs.create(f"{hub}-other", 2)
    with publisher(postgres, eventhubs, f"{hub}-other", "east") as other:
        assert other.publish_once("a", b"y") == Published(new=1)
    assert kept(eventhubs, hub) == [b"x"]


def test_two_publishers_with_one_id_and_no_common_state_are_one_event_at_the_consumer(postgres: str, eventhubs: Any, hub: str) -> None:
    """Each sends it, with the same message id: what comes twice is a duplicate, another body is a KEY_CONFLICT letter."""
    run(postgres, "create schema elsewhere")
    for schema, bodies in (("dedup", (b"x", b"y")), ("elsewhere", (b"x", b"z"))):
        with Publisher("shop", PostgresStore(postgres, schema=schema), sender(eventhubs, hub)) as one:
            for id, body in zip("ab", bodies, strict=True):
                one.publish_once(id, OutgoingEvent(body, key="k"))
    assert kept(eventhubs, hub).count(b"x") == 2
    assert consumed(postgres, eventhubs, hub) == (["x", "y"], ["KEY_CONFLICT"])


def test_what_was_not_confirmed_goes_out_before_anything_else(postgres: str, eventhubs: Any, hub: str) -> None:
    """A call that raised NotConfirmed has stored its events: the next call sends them first."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        one.publish([OutgoingEvent(b"0", key="k")])
    eventhubs.order("calm")
    one.publish([OutgoingEvent(b"1", key="k")])
    assert kept(eventhubs, hub) == [b"0", b"1"]
    one.close()


def test_one_lane_that_fails_does_not_undo_the_others(postgres: str, eventhubs: Any, hub: str) -> None:
    """What the broker has confirmed of other partitions is not sent again."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.2, retry_total=0)
    one.resend()
    sends = iter(range(100))

    def fail_second(name: str) -> None:
        if name == "send" and next(sends) == 1:
            eventhubs.order("drop_sends", count=1_000)

    object.__setattr__(one._limits, "on_step", fail_second)
    with pytest.raises(NotConfirmed):
        one.publish([OutgoingEvent(b"a", partition=0), OutgoingEvent(b"b", partition=1)])
    assert waiting(postgres) == 1
    eventhubs.order("calm")
    one.resend()
    one.close()
    assert kept(eventhubs, hub) == [b"a", b"b"]


def test_a_partition_that_fails_half_way_keeps_what_was_not_sent(postgres: str, eventhubs: Any, hub: str) -> None:
    """Confirmed is what the broker has, up to there and no further; the rest waits, and goes out in order."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.0)
    one.resend()
    sends = iter(range(100))

    def fail_third(name: str) -> None:
        if name == "send" and next(sends) == 2:
            eventhubs.order("drop_sends", count=1_000)

    object.__setattr__(one._limits, "on_step", fail_third)
    with pytest.raises(NotConfirmed):
        one.publish([OutgoingEvent(b"%d" % n, partition=0) for n in range(20)])
    assert (len(kept(eventhubs, hub)), waiting(postgres)) == (14, 6)
    eventhubs.order("calm")
    one.close()
    with publisher(postgres, eventhubs, hub):
        assert [int(body) for body in kept(eventhubs, hub)] == list(range(20))


def test_the_database_away_after_the_send_means_sent_again(postgres: str, eventhubs: Any, hub: str) -> None:
    """Sent, and the confirmation cannot be kept: the call raises, the event goes out once more, and the consumer has it once."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.3)
    one.resend()
    steps = {"n": 0}

    def cut(name: str) -> None:
        if name == "confirm" and not steps["n"]:
            steps["n"] = 1
            run(postgres, "alter table dedup.publisher_lane rename to hidden")

    object.__setattr__(one._limits, "on_step", cut)
    with pytest.raises(Exception, match=r"hidden|publisher_lane|migrate"):
        one.publish_once("a", b"x")
    run(postgres, "alter table dedup.hidden rename to publisher_lane")
    assert one.publish_once("a", b"x") == Published(known=1)
    one.close()
    assert kept(eventhubs, hub) == [b"x", b"x"] and consumed(postgres, eventhubs, hub) == (["x"], [])


def test_broken_sessions_of_the_database_do_no_harm(postgres: str, eventhubs: Any, hub: str) -> None:
    """Sessions that end between two steps are opened again; nothing is lost or doubled."""
    kill = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    with publisher(postgres, eventhubs, hub) as one:
        object.__setattr__(one._limits, "on_step", lambda name: run(postgres, kill) and None)
        for first in range(0, 20, 10):
            assert one.publish(events(first, first + 10)) == Published(new=10)
    assert sorted(map(int, kept(eventhubs, hub))) == list(range(20))


def test_an_older_publisher_of_a_group_is_fenced(postgres: str, eventhubs: Any, hub: str) -> None:
    """The newest wins; the older one gets a clear error, at each call, and nothing of it is stored or sent."""
    with publisher(postgres, eventhubs, hub) as old:
        old.publish([b"1"])
        with publisher(postgres, eventhubs, hub) as new:
            for _ in range(2):
                with pytest.raises(Fenced, match=r"'shop'.*owner level 2, ours is 1"):
                    old.publish([b"no"])
            new.publish([b"2"])
    assert sorted(kept(eventhubs, hub)) == [b"1", b"2"] and waiting(postgres) == 0


def test_a_publisher_that_is_fenced_between_storing_and_sending_sends_nothing(
    postgres: str, eventhubs: Any, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again when it is woken; the newer one sends what it had stored."""
    from dedup.publishing import lanes

    monkeypatch.setattr(lanes, "TRUST_SECONDS", 0.0)
    old, taken = publisher(postgres, eventhubs, hub), list[Publisher]()

    def overtake(name: str) -> None:
        if name == "send" and not taken:
            taken.append(publisher(postgres, eventhubs, hub))
            taken[0].resend()

    object.__setattr__(old._limits, "on_step", overtake)
    with pytest.raises(Fenced):
        old.publish([b"x"])
    assert kept(eventhubs, hub) == [b"x"]
    taken[0].close()


def test_an_id_that_a_dead_publisher_left_is_sent_by_who_asks_for_it(postgres: str, eventhubs: Any, hub: str) -> None:
    """Stored and not confirmed by a group that nobody owns any more: its events are sent first, in its order."""
    dead = publisher(postgres, eventhubs, hub, "east", max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        dead.publish([OutgoingEvent(b"before", key="k"), OutgoingEvent(b"x", key="k", id="a")])
    dead.close()
    eventhubs.order("calm")
    with publisher(postgres, eventhubs, hub, "west") as other:
        assert other.publish_once("a", b"x") == Published(known=1)
    assert kept(eventhubs, hub) == [b"before", b"x"]


def left(postgres: str, eventhubs: Any, hub: str) -> None:
    """Group "east" has stored the id "a", could not send it, and is gone."""
    dead = publisher(postgres, eventhubs, hub, "east", max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        dead.publish_once("a", b"x")
    dead.close()


@pytest.mark.full
def test_who_could_not_send_what_a_dead_publisher_left_lets_others_try(postgres: str, eventhubs: Any, hub: str) -> None:
    """A helper that failed, and lives on, does not keep the group: it or another one sends the id once the broker answers."""
    left(postgres, eventhubs, hub)
    with publisher(postgres, eventhubs, hub, "west", max_outage=0.3) as west:
        with pytest.raises(NotConfirmed, match="'east'"):
            west.publish_once("a", b"x")
        eventhubs.order("calm")
        with publisher(postgres, eventhubs, hub, "south", max_outage=0.3) as south:
            assert south.publish_once("a", b"x") == Published(known=1)
        assert west.publish_once("a", b"x") == Published(known=1)
    assert kept(eventhubs, hub) == [b"x"]


@pytest.mark.full
def test_an_id_that_a_person_gives_up_meanwhile_is_sent_by_who_waits_for_it(postgres: str, eventhubs: Any, hub: str) -> None:
    """Whoever waits for the group that stored it is new then, and sends it; it is not counted as known, and nothing of the page is lost."""
    east = publisher(postgres, eventhubs, hub, "east", max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        east.publish_once("a", b"x")
    eventhubs.order("calm")
    given_up = list[str]()

    def give_up(seconds: float) -> None:
        if not given_up:
            with closing(Publishers(postgres, "dedup")) as people:
                given_up.append(str(people.discard(people.one("east", "", ""), None, None, "ann", "it is sent elsewhere")))

    with publisher(postgres, eventhubs, hub, "west", max_outage=30.0) as west, patch("dedup.publishing.publisher.time.sleep", give_up):
        assert west.publish_once("a", b"x") == Published(new=1)
    assert given_up == ["1"] and kept(eventhubs, hub) == [b"x"]
    with contextlib.suppress(Fenced):
        east.close()


@pytest.mark.full
def test_an_error_of_giving_a_group_back_does_not_hide_why(
    postgres: str, eventhubs: Any, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not answer, and then the database neither: the caller learns that the events are not confirmed."""
    left(postgres, eventhubs, hub)

    def away(lanes: Lanes) -> None:
        raise StoreUnavailable("away")

    with publisher(postgres, eventhubs, hub, "west", max_outage=0.3) as west:
        monkeypatch.setattr(Lanes, "give_back", away)
        with pytest.raises(NotConfirmed, match="'east'"):
            west.publish_once("a", b"x")


@pytest.mark.full
def test_who_is_overtaken_while_it_helps_goes_on_with_its_own_group(postgres: str, eventhubs: Any, hub: str) -> None:
    """The group that was helped gets an owner meanwhile, which sends the id: the helper's call and its later ones succeed."""
    left(postgres, eventhubs, hub)
    eventhubs.order("calm")
    back = list[Publisher]()

    def overtake(name: str) -> None:
        if name == "resend" and not back:
            back.append(publisher(postgres, eventhubs, hub, "east"))
            back[0].resend()

    with publisher(postgres, eventhubs, hub, "west", on_step=overtake) as west:
        assert west.publish_once("a", b"x") == Published(known=1)
        assert west.publish([b"y"]) == Published(new=1)
    back[0].close()
    assert sorted(kept(eventhubs, hub)) == [b"x", b"y"]


@pytest.mark.full
def test_another_group_that_was_restored_does_not_end_who_helps_it(
    postgres: str, eventhubs: Any, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told after its patience that the id is not confirmed, with the cause; its own events go out."""
    left(postgres, eventhubs, hub)
    eventhubs.order("calm")
    catch_up = Lanes.catch_up

    def torn(lanes: Lanes) -> int:
        if lanes.group == "east":
            raise StoreRestored("east is older")
        return catch_up(lanes)

    monkeypatch.setattr(Lanes, "catch_up", torn)
    with publisher(postgres, eventhubs, hub, "west", max_outage=0.3) as west:
        with pytest.raises(NotConfirmed, match="'east'") as told:
            west.publish_once("a", b"x")
        assert isinstance(told.value.__cause__, StoreRestored)
        assert west.publish([b"y"]) == Published(new=1)


def test_an_id_that_a_living_publisher_has_stored_is_waited_for(postgres: str, eventhubs: Any, hub: str) -> None:
    """It is not taken from it; who asks is told that it is not confirmed yet."""
    living = publisher(postgres, eventhubs, hub, "east", max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        living.publish_once("a", b"x")
    eventhubs.order("calm")
    with publisher(postgres, eventhubs, hub, "west", max_outage=0.3) as other:
        with pytest.raises(NotConfirmed, match="'east'"):
            other.publish_once("a", b"x")
        living.resend()
        assert other.publish_once("a", b"x") == Published(known=1)
    living.close()
    assert kept(eventhubs, hub) == [b"x"]


def test_state_restored_from_an_old_copy_with_events_that_wait_sends_them_again(postgres: str, eventhubs: Any, hub: str) -> None:
    """The copy has them as not confirmed: they go out once more, and are duplicates at the consumer."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        one.publish(events(0, 5))
    eventhubs.order("calm")
    old = copied(postgres)
    one.resend()
    one.close()
    restored(postgres, old)
    with publisher(postgres, eventhubs, hub):
        pass
    assert len(kept(eventhubs, hub)) == 10
    assert sorted(consumed(postgres, eventhubs, hub)[0]) == ["0", "1", "2", "3", "4"]


def test_state_restored_under_a_living_publisher_stops_it(postgres: str, eventhubs: Any, hub: str) -> None:
    """It knows which numbers it has given: StoreRestored, before anything is stored or sent; a new one goes on."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"1", key="k")])
        old = copied(postgres)
        one.publish([OutgoingEvent(b"2", key="k")])
        restored(postgres, old)
        for _ in range(2):
            with pytest.raises(StoreRestored, match="publish again, with the same ids"):
                one.publish([OutgoingEvent(b"3", key="k")])
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"3", key="k")])
    assert kept(eventhubs, hub) == [b"1", b"2", b"3"] and consumed(postgres, eventhubs, hub) == (["1", "2", "3"], [])


def test_what_waited_for_longer_than_consumers_remember_is_not_sent_again(postgres: str, eventhubs: Any, hub: str) -> None:
    """ResendTooLate names the commands; with a longer time it is sent."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.2)
    eventhubs.order("drop_sends", count=1_000)
    with pytest.raises(NotConfirmed):
        one.publish([b"x"])
    one.close()
    eventhubs.order("calm")
    run(postgres, "update dedup.publisher_event set stored_at = stored_at - interval '8 days'")
    with pytest.raises(ResendTooLate, match="discard shop"):
        publisher(postgres, eventhubs, hub, resend_within=dt.timedelta(days=7)).resend()
    with publisher(postgres, eventhubs, hub, resend_within=dt.timedelta(days=9)):
        assert kept(eventhubs, hub) == [b"x"]


def test_events_without_key_and_id_go_to_one_partition_after_the_other(postgres: str, eventhubs: Any, new_hub: Any) -> None:
    """Within a page and from page to page; events with a key do not count."""
    hub = new_hub(partitions=3)
    with publisher(postgres, eventhubs, hub, max_events=4) as one:
        one.publish([b"%d" % n for n in range(9)])
        one.publish([OutgoingEvent(b"keyed", key="k"), b"9", b"10", b"11"])
    found = [{event["body"] for event in events} - {b"keyed"} for events in eventhubs.kept(hub, 3)]
    assert {frozenset(map(int, bodies)) for bodies in found} == {frozenset(range(first, 12, 3)) for first in range(3)}


def test_partition_count_changed_to_fewer_is_refused(postgres: str, eventhubs: Any, new_hub: Any) -> None:
    """That is another hub under the old name: ConfigError, and nothing is sent."""
    hub = new_hub(partitions=4)
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([b"1"])
    eventhubs.create(hub, 2)
    with pytest.raises(ConfigError, match="set-partitions shop 2"):
        publisher(postgres, eventhubs, hub).publish([b"2"])
    assert kept(eventhubs, hub) == []


def test_a_call_asks_for_no_more_events_than_one_page(postgres: str, eventhubs: Any, hub: str) -> None:
    """Back-pressure: the next events are made when the broker has the ones before; in memory is one page, by count and by bytes."""
    made = 0

    def source() -> Iterator[bytes]:
        nonlocal made
        for n in range(100):
            made += 1
            confirmed = run(postgres, "select coalesce(sum(confirmed), 0) from dedup.publisher_lane")[0][0] if n else 0
            assert made - confirmed <= 8
            yield b"x" * 1_000

    with publisher(postgres, eventhubs, hub, max_events=7, max_bytes=1_000_000) as one:
        assert one.publish(source()) == Published(new=100)
        assert one.publish([b"y" * 400_000] * 5) == Published(new=5)
    assert len(kept(eventhubs, hub)) == 105 and waiting(postgres) == 0


def test_events_that_were_left_are_read_back_by_pages(postgres: str, eventhubs: Any, hub: str) -> None:
    """However many wait, and however large they are, they come in order and no page is larger than allowed."""
    one = publisher(postgres, eventhubs, hub, max_outage=0.2)
    for first in (0, 10):
        eventhubs.order("drop_sends", count=1_000)
        with pytest.raises(NotConfirmed):
            one.publish([OutgoingEvent(b"%d" % n + b" " * 50_000, key="k") for n in range(first, first + 10)])
        run(postgres, "update dedup.publisher set epoch = epoch")
        break
    eventhubs.order("calm")
    one.close()
    steps = list[str]()
    with publisher(postgres, eventhubs, hub, max_bytes=120_000, on_step=steps.append):
        assert steps.count("resend") == 4
    assert [int(body) for body in kept(eventhubs, hub)] == list(range(10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"body": "text"},
        {"id": ""},
        {"id": "x" * 513},
        {"id": "a\0b"},
        {"key": ""},
        {"key": "a", "partition": 1},
        {"partition": -1},
        {"properties": {"message_id": "a"}},
        {"properties": {RESERVED[0]: "a"}},
        {"properties": {"x": None}},
        {"properties": {"x": 2**63}},
        {"properties": {"x": -(2**63) - 1}},
    ],
    ids=str,
)
def test_an_event_that_could_not_be_sent_again_is_refused(wrong: dict[str, Any]) -> None:
    """ConfigError where it is made, not when it is sent."""
    with pytest.raises(ConfigError):
        OutgoingEvent(**{"body": b"x", **wrong})


def test_the_async_calls_do_the_same(postgres: str, eventhubs: Any, hub: str) -> None:
    """Several at once in one loop: one after the other, each once."""
    one = publisher(postgres, eventhubs, hub)

    async def go() -> list[Published]:
        return await asyncio.gather(*(one.publish_once_async("a", b"x") for _ in range(4)), one.publish_async([b"y"]))

    assert sum(asyncio.run(go()), Published()) == Published(new=2, known=3)
    one.close()
    assert sorted(kept(eventhubs, hub)) == [b"x", b"y"]


def test_a_publisher_is_of_one_process(postgres: str, eventhubs: Any, hub: str) -> None:
    """After a fork the child is refused, and the parent goes on."""
    with publisher(postgres, eventhubs, hub) as one:
        child = os.fork()
        if not child:
            try:
                one.publish([b"no"])
            except ConfigError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert one.publish([b"x"]) == Published(new=1)


def test_another_body_at_the_consumer_is_a_letter_where_the_publisher_forgot(postgres: str, eventhubs: Any, hub: str) -> None:
    """The publisher's rows are purged, the reservation is there: the same event is a duplicate, another body a KEY_CONFLICT letter."""
    with publisher(postgres, eventhubs, hub) as one:
        one.publish([OutgoingEvent(b"x", id="a"), OutgoingEvent(b"y", id="b")])
        run(postgres, "delete from dedup.published_id")
        one.publish([OutgoingEvent(b"x", id="a"), OutgoingEvent(b"other", id="b")])
    bodies, letters = consumed(postgres, eventhubs, hub)
    assert sorted(bodies) == sorted(texts([b"x", b"y"])) and letters == ["KEY_CONFLICT"]
