"""What others are told of new dead letters: `on_parked=` after the commit, `letters_to=` in the same transaction."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from checkpoint.position import Partition
from dedup import DeadLetters, ParkedGroup, Selection
from dedup.outbox import Message
from dedup.pipeline.member import Member
from dedup.reprocessing.from_log import fill
from dedup.reprocessing.letters import reprocess
from fixtures.fix_places import Place
from kit.orders import assert_proven, batch, consumer, event, letters, orders
from kit.outgoing import Receiver, dispatcher, states

P0 = Partition("broker", "orders", 0)

CONNECT = "__connect.errors."


def told_by(told: list[tuple[ParkedGroup, int]], place: Place, **settings: Any) -> Any:
    """A consumer that tells of its letters, with how many the store has by then."""
    return consumer(place.store(), on_parked=lambda group: told.append((group, len(letters(place.store())))), **settings)


def test_each_cause_is_told_once_after_the_commit(place: Place) -> None:
    """Kind, fingerprint, number, reason and an example that can be looked up; a batch without letters tells nothing."""
    told: list[tuple[ParkedGroup, int]] = []
    run = told_by(told, place)
    junk = event(3, body=b"junk")
    run(batch(event(0, "a", -1), event(1, "b", -2), event(2, "c"), junk), 0)
    assert [(group.consumer, group.kind, group.letters, there) for group, there in told] == [
        ("shop", "REJECTED", 2, 3),
        ("shop", "UNDECODABLE", 1, 3),
    ]
    groups = {group["fingerprint"]: group["letters"] for group in DeadLetters(place.store()).groups().to_pylist()}
    assert {group.fingerprint: group.letters for group, _ in told} == groups
    first = DeadLetters(place.store()).show(told[0][0].example).row
    assert (first["idempotence_key"], told[0][0].reason) == ("a", "negative amount")
    run(batch(event(0, "a", -1), *orders([4])), 1)
    assert len(told) == 2


def test_each_transaction_tells_of_its_own_letters(place: Place) -> None:
    """A batch of several chunks; one that fails later has told of those before it, and its next try does not tell again."""
    told: list[tuple[ParkedGroup, int]] = []
    run = told_by(told, place, max_events_per_transaction=2, bisect=True)
    handler = run._handler
    fails = [True]

    def once(rows: pa.Table, tx: Any) -> None:
        if fails[0] and 3 in rows["sequence_number"].to_pylist():
            raise MemoryError("of everybody")
        handler(rows, tx)

    run._handler = once
    rows = batch(event(0, "a", -1), *orders([1, 2, 3]), event(4, "e", -1))
    with pytest.raises(MemoryError):
        run(rows, 0)
    assert [(group.letters, there) for group, there in told] == [(1, 1)]
    fails[0] = False
    run(rows, 0)
    assert [(group.letters, there) for group, there in told] == [(1, 1), (1, 2)]


def test_an_error_of_on_parked_fails_nothing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The letters are committed: what it raises is logged with its stack, and the other groups are told. By a member of a runner, too."""
    told: list[ParkedGroup] = []

    def broken(group: ParkedGroup) -> None:
        told.append(group)
        raise ZeroDivisionError("in a pager")

    run = consumer(place.store(), on_parked=broken, query=None)
    assert run(batch(event(0, "a", -1), event(1, body=b"junk"), *orders([2])), 0).dead_lettered == 2
    assert len(told) == 2 and "on_parked= raised" in caplog.text and "ZeroDivisionError" in caplog.text
    member = Member(consumer(place.store(), on_parked=broken, query=None).job())
    member.join()
    member.process(member.claim(P0), batch(event(3, "c", -1)))
    member.leave()
    assert [group.letters for group in told] == [1, 1, 1]


@pytest.mark.full
def test_letters_that_the_log_brings_are_told(place: Place) -> None:
    """Absent positions that are run from the log may park, too; a letter that is run again is no new one."""
    told: list[tuple[ParkedGroup, int]] = []
    run = told_by(told, place, letters_to="dead")
    run(batch(*orders([0, 3])), 0)
    run.register_log_reader(lambda source, topic, partition, first, last: batch(*orders([0]), event(1, "b", -1), *orders([2, 3])))
    fill(Selection(topic="orders", partition=0, first=0), run)
    assert [(group.letters, there) for group, there in told] == [(1, 1)] and states(place) == {"WAITING": 1}
    reprocess(Selection(), run)
    assert len(told) == 1 and states(place) == {"WAITING": 1}


@pytest.mark.parametrize("name", ["on_parked", "letters_to"])
def test_what_cannot_be_told_is_refused_at_once(place: Place, name: str) -> None:
    """A coroutine would never run; a topic has a name."""

    async def later(group: ParkedGroup) -> None: ...

    with pytest.raises(ConfigError, match=name):
        consumer(place.store(), **{name: later})


def sent(place: Place) -> list[Message]:
    """What a dispatcher sends."""
    receiver = Receiver()
    dispatcher(place, receiver).once()
    return receiver.got


def headers_of(message: Message) -> dict[str, bytes | None]:
    """By name."""
    return dict(message.headers)


def test_each_new_letter_is_a_message_of_the_same_transaction(place: Place) -> None:
    """Its id is the letter's, its key and body the event's; headers say where the event was and what was wrong. Others send nothing."""
    run = consumer(place.store(), letters_to="dead")
    properties = [{"key": "message-id", "value": b"m0"}, {"key": "trace", "value": b"\x00\xff"}, {"key": "n\0ul", "value": None}]
    when = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    bad = event(0, "a", -1, properties=properties, key=b"eu", enqueued_time=when)
    run(batch(bad, *orders([1]), event(2, body=b"junk")), 0)
    kept = letters(place.store())
    first, second = sorted(sent(place), key=lambda message: [x["id"] for x in kept].index(message.id))
    assert (first.topic, first.key, first.body) == ("dead", b"eu", bad["body"]) and (second.key, second.body) == (None, b"junk")
    assert headers_of(first) == {
        "message-id": b"m0",
        "trace": b"\x00\xff",
        "n\ufffdul": None,
        CONNECT + "topic": b"orders",
        CONNECT + "partition": b"0",
        CONNECT + "offset": b"@0",
        "dedup.consumer": b"shop",
        "dedup.kind": b"REJECTED",
        "dedup.reason": b"negative amount",
        "dedup.fingerprint": kept[0]["fingerprint"].encode(),
        "dedup.idempotence-key": b"a",
        "dedup.source": b"broker",
        "dedup.sequence-number": b"0",
        "dedup.part": b"0",
        "dedup.enqueued-time": b"2026-01-02T03:04:05+00:00",
        "dedup.message-id": b"m0",
    }
    assert headers_of(second)["dedup.kind"] == b"UNDECODABLE" and "dedup.idempotence-key" not in headers_of(second)
    run(batch(bad, *orders([3])), 1)
    assert sent(place) == []
    assert_proven(place.store())


def test_a_letter_of_an_error_has_the_headers_of_kafka_connect(place: Place) -> None:
    """Class, message and stack of what the handler raised."""
    run = consumer(place.store(), letters_to="dead")
    run._handler = None

    @run.foreach_batch
    def fail(rows: pa.Table, tx: Any) -> None:
        raise KeyError("größe")

    run(batch(event(0, "a")), 0)
    (message,) = sent(place)
    found = headers_of(message)
    assert (found[CONNECT + "exception.class.name"], found[CONNECT + "exception.message"]) == (b"KeyError", "'größe'".encode())
    assert b"raise KeyError" in (found[CONNECT + "exception.stacktrace"] or b"")


def test_a_body_that_is_too_large_is_sent_as_it_is_kept(place: Place) -> None:
    """The first 64 kB, with the size of the whole."""
    body = b'{"id": "a", "amount": -1, "x": "' + b"x" * 100_000 + b'"}'
    consumer(place.store(), letters_to="dead", max_body=70_000)(batch(event(0, body=body)), 0)
    (message,) = sent(place)
    assert message.body == body[: 64 * 1024] and headers_of(message)["dedup.body-size"] == str(len(body)).encode()


@pytest.mark.full
def test_events_without_positions_have_letters_without_any(place: Place) -> None:
    """No topic, partition or offset is said of them."""
    run = consumer(place.store(), letters_to="dead", positions=None)
    run(batch(event(0, "a", -1)).select(["body"]), 0)
    (message,) = sent(place)
    said = headers_of(message)
    assert said["dedup.kind"] == b"REJECTED" and not {CONNECT + "topic", CONNECT + "offset", "dedup.sequence-number"} & said.keys()


def test_a_batch_that_fails_sends_no_letter(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Neither letter nor message is there when the commit fails; the next try has both, once."""
    store, steps = place.store(), []

    def broken(step: str) -> None:
        steps.append(step)
        if step == "commit" and steps.count("commit") == 1:
            raise ConnectionError("made up")

    told: list[ParkedGroup] = []
    run = consumer(store, letters_to="dead", on_parked=told.append)
    store.on_step = broken
    with pytest.raises(ConnectionError), caplog.at_level(logging.CRITICAL):
        run(batch(event(0, "a", -1)), 0)
    assert (letters(place.store()), states(place), told) == ([], {}, [])
    run(batch(event(0, "a", -1)), 0)
    assert (len(letters(place.store())), states(place), len(told)) == (1, {"WAITING": 1}, 1)
