"""Where a consumer stands, shown to others as a consumer group of a real Kafka broker."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from checkpoint.errors import ConfigError, Refused, SourceUnavailable
from checkpoint.mirror import Mirrored
from checkpoint.start import next_positions
from dedup import kafka
from dedup.kafka.group import _Client, mirror
from fixtures.variants import of_which
from kit import kafka_server
from kit.kafka_kit import PATIENCE, QUIET, Topic, eventually
from kit.orders import batch, consumer, event
from kit.places import Place

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def group(topic: Topic) -> str:
    """A name that no other test has."""
    return f"of {topic.name}"


def stand(place: Place, topic: Topic, upto: int, *, partition: int = 0, number: int = 0) -> Any:
    """The state of a consumer that has decided everything up to this position; returns its store."""
    store = place.store()
    run = consumer(store, budget=None, query=None)
    run(batch(*(event(n, f"{partition}-{n}", partition=partition, topic=topic.name) for n in range(upto + 1))), number)
    return store


def committed(topic: Topic, group: str) -> list[int]:
    """As a plain client of the group sees it, by partition; -1001 where there is nothing."""
    with closing(Consumer({"bootstrap.servers": topic.servers, "group.id": group, **QUIET})) as client:
        return [place.offset for place in client.committed([TopicPartition(topic.name, n) for n in (0, 1)], PATIENCE)]


@contextmanager
def member(topic: Topic, group: str) -> Iterator[Consumer]:
    """A program that reads the topic as a member of the group."""
    config = {"bootstrap.servers": topic.servers, "group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest", **QUIET}
    with closing(Consumer(config)) as client:
        client.subscribe([topic.name])
        yield client


def test_a_plain_client_of_the_group_goes_on_behind_our_checkpoints(place: Place, topic: Topic, group: str) -> None:
    """The group stands where the consumer goes on, in each partition; so does a client that begins to read with it."""
    topic.send_orders(*((str(n), n) for n in range(5)))
    stand(place, topic, 2)
    store = stand(place, topic, 0, partition=1, number=1)
    broker, ours = kafka.Broker(topic.servers), next_positions(store.head("shop"))
    assert mirror(broker, group, ours, dry_run=True) == Mirrored(written=(f"{topic.name}/0", f"{topic.name}/1"))
    assert committed(topic, group) == [-1001, -1001]
    assert mirror(broker, group, ours) == Mirrored(written=(f"{topic.name}/0", f"{topic.name}/1"))
    assert committed(topic, group) == [3, 1]
    assert mirror(broker, group, ours) == Mirrored()
    with member(topic, group) as client:
        first = client.poll(PATIENCE)
        assert first is not None and first.error() is None and (first.partition(), first.offset()) == (0, 3)


def test_what_another_program_has_committed_is_moved_only_where_that_was_said(topic: Topic, group: str) -> None:
    """That program would lose or repeat messages. What a mirror has committed goes forward and, as after a reset, back."""
    with closing(Consumer({"bootstrap.servers": topic.servers, "group.id": group, **QUIET})) as other:
        other.commit(offsets=[TopicPartition(topic.name, 0, 9)], asynchronous=False)
    broker, ours = kafka.Broker(topic.servers), {(topic.name, 0): 4, (topic.name, 1): 2}
    assert mirror(broker, group, ours) == Mirrored(written=(f"{topic.name}/1",), foreign=(f"{topic.name}/0",))
    assert committed(topic, group) == [9, 2]
    assert mirror(broker, group, ours, overwrite=True).written == (f"{topic.name}/0",)
    assert committed(topic, group) == [4, 2]
    for position in (6, 3):
        assert mirror(broker, group, {(topic.name, 0): position}) == Mirrored(written=(f"{topic.name}/0",))
        assert committed(topic, group) == [position, 2]


def test_a_group_that_somebody_reads_with_is_refused(topic: Topic, group: str) -> None:
    """Its members commit for themselves, and the broker takes no position from outside: the error says so."""
    topic.send_orders(("a", 1))
    with member(topic, group) as client:
        assert client.poll(PATIENCE) is not None
        with pytest.raises(Refused, match="reads as a member of the consumer group"):
            mirror(kafka.Broker(topic.servers), group, {(topic.name, 0): 1})
    assert committed(topic, group) == [-1001, -1001]


@pytest.mark.parametrize("name", ["", " ", "a\0b", 7])
def test_what_is_no_name_of_a_group_is_refused(name: Any) -> None:
    """librdkafka would end the process, which may be the driver of a stream, or cut the name."""
    with pytest.raises(ConfigError, match="is no name of a consumer group"):
        mirror(kafka.Broker("127.0.0.1:1"), name, {})
    with pytest.raises(ConfigError, match="is no name of a consumer group"):
        kafka.GroupMirror(kafka.Broker("127.0.0.1:1"), name, dict)


@pytest.mark.full
def test_a_broker_that_hangs_is_waited_for_as_long_as_was_said(kafka: kafka_server.Broker, topic: Topic, group: str) -> None:
    """A commit that waits by itself would hold a mirror, and the end of its program, for longer."""
    from dedup.kafka import Broker

    with closing(_Client(Broker(topic.servers, timeout=1.0), group)) as client:
        assert client.committed([(topic.name, 0)]) == {}
        assert kafka.process is not None
        kafka.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(SourceUnavailable, match="Timed out"):
                client.commit({(topic.name, 0): 1})
        finally:
            kafka.process.send_signal(signal.SIGCONT)


@pytest.mark.full
def test_a_login_that_may_not_is_told_which_right_it_needs() -> None:
    """The broker's own words, and the rights of Kafka that are missing."""
    with kafka_server.running_broker() as broker:
        broker.stop()
        with (broker.home / "server.properties").open("a") as file:
            file.write(
                "\nauthorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\nallow.everyone.if.no.acl.found=true\n"
            )
        broker.start()
        topic = Topic(broker.servers, "orders")
        topic.create()
        everybody = ("User:ANONYMOUS", "*")
        for operation in (AclOperation.ALL, AclOperation.READ):
            what = (ResourceType.GROUP, f"no {operation.name}", ResourcePatternType.LITERAL, *everybody, operation, AclPermissionType.DENY)
            for done in topic.admin.create_acls([AclBinding(*what)]).values():
                done.result(PATIENCE)
        for operation in (AclOperation.ALL, AclOperation.READ):
            asked = kafka.Broker(broker.servers, timeout=10.0)
            with pytest.raises(ConfigError, match=r"refuses: .*uthorization failed.* READ with consumer group"):
                mirror(asked, f"no {operation.name}", {("orders", 0): 1})


def test_a_topic_or_a_broker_that_is_not_there_is_told(topic: Topic, group: str) -> None:
    """Which partition it is, and where; what could be committed is."""
    broker = kafka.Broker(topic.servers)
    with pytest.raises(ConfigError, match=f"no {topic.name}, partition 7"):
        mirror(broker, group, {(topic.name, 0): 1, (topic.name, 7): 1})
    assert committed(topic, group)[0] == 1
    with pytest.raises(SourceUnavailable, match="cannot be asked"):
        mirror(kafka.Broker("127.0.0.1:1", timeout=1.0), group, {(topic.name, 0): 1})
    with pytest.raises(ConfigError, match=r"does not take these settings: .*no\.such"):
        mirror(kafka.Broker(topic.servers, {"no.such": "s3cret"}), group, {(topic.name, 0): 1})


@pytest.mark.full
def test_positions_are_asked_again_while_the_group_has_no_coordinator(topic: Topic, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that has just started, or hands the group over, refuses for a moment. Only what it says then is a double here."""

    class HandsOver(Consumer):
        refusals = iter((KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS))

        def committed(self, *asked: Any) -> Any:
            for code in self.refusals:
                raise KafkaException(KafkaError(code))
            return super().committed(*asked)

    monkeypatch.setattr("dedup.kafka.group.Consumer", HandsOver)
    assert mirror(kafka.Broker(topic.servers), group, {(topic.name, 0): 1}) == Mirrored(written=(f"{topic.name}/0",))
    HandsOver.refusals = iter([KafkaError.NOT_COORDINATOR] * 99)
    with pytest.raises(SourceUnavailable, match=r"cannot be asked now: .*Not coordinator"):
        mirror(kafka.Broker(topic.servers, timeout=0.5), group, {(topic.name, 0): 1})


def test_a_position_that_the_broker_does_not_tell_now_is_asked_for_again(topic: Topic, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside an open transaction: it may be another program's, and is not written over. Only what the broker says then is a double."""

    class InTransaction(Consumer):
        refusals = iter([KafkaError.UNSTABLE_OFFSET_COMMIT] * 2)

        def committed(self, *asked: Any) -> Any:
            for code in self.refusals:
                return [SimpleNamespace(topic=p.topic, partition=p.partition, offset=-1001, error=KafkaError(code)) for p in asked[0]]
            return super().committed(*asked)

    with closing(Consumer({"bootstrap.servers": topic.servers, "group.id": group})) as other:
        other.commit(offsets=[TopicPartition(topic.name, 0, 3)], asynchronous=False)
    monkeypatch.setattr("dedup.kafka.group.Consumer", InTransaction)
    assert mirror(kafka.Broker(topic.servers), group, {(topic.name, 0): 1}) == Mirrored(foreign=(f"{topic.name}/0",))
    InTransaction.refusals = iter([KafkaError.UNSTABLE_OFFSET_COMMIT] * 99)
    with pytest.raises(SourceUnavailable, match="cannot be asked now"):
        mirror(kafka.Broker(topic.servers, timeout=0.5), group, {(topic.name, 0): 1})


@pytest.mark.full
def test_a_mirror_goes_on_through_an_outage_of_the_broker(
    kafka: kafka_server.Broker, topic: Topic, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs beside a stream, which must not end because of it: failures are counted and logged, and the next look commits."""
    from dedup.kafka import Broker, GroupMirror

    ours = {(topic.name, 0): 3}
    broker = Broker(topic.servers, timeout=2.0)
    with caplog.at_level(logging.WARNING), GroupMirror(broker, group, lambda: ours, every=0.1) as running:
        eventually(lambda: committed(topic, group)[0] == 3)
        kafka.kill()
        try:
            eventually(lambda: running.health.failures > 0)
        finally:
            kafka.start()
        ours[topic.name, 0] = 5
        eventually(lambda: running.health.failures == 0 and committed(topic, group)[0] == 5)
        ours[topic.name, 0] = 6
    assert committed(topic, group)[0] == 6  # a last look
    ours.clear()  # the consumer was deleted
    running.look()
    assert running.health.error == "the consumer has no checkpoints any more: was it deleted?"
    assert f"consumer group {group}: mirroring checkpoints to Kafka failed (1 in a row): The Kafka broker at" in caplog.text


def test_the_command_shows_writes_and_goes_on(place: Place, topic: Topic, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing without --yes; --every goes on until Ctrl-C or SIGTERM, and ends with a last look."""
    from dedup.kafka import GroupMirror

    store, group = stand(place, topic, 2), f"group-{topic.name}"
    line = f"checkpoint mirror-group shop --kafka {topic.servers} --group {group}"
    code, out, _ = dedup(line, place)
    assert (code, committed(topic, group)) == (0, [-1001, -1001])
    assert f"consumer group {group}: would be written: partitions {topic.name}/0" in out and "--yes" in out
    assert dedup(f"{line} --yes", place)[0] == 0 and committed(topic, group) == [3, -1001]
    assert "says what our checkpoints say" in dedup(f"{line} --yes", place)[1]
    told = json.loads(dedup(f"{line} --json", place)[1])
    assert told == {"of": f"consumer group {group}", **{kind: [] for kind in vars(Mirrored())}, "done": False}

    def interrupted(_: GroupMirror) -> None:
        stand(place, topic, 4, number=1)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(GroupMirror, "wait", interrupted)
    assert dedup(f"{line} --every 100s --yes", place)[0] == 0
    assert committed(topic, group) == [5, -1001]
    store.close()


@pytest.mark.parametrize(
    ("line", "told"),
    of_which(
        2,
        [
            ("", "Name the broker: --kafka host:9092"),
            ("--kafka 127.0.0.1:1 --topic other", "has no checkpoint of other"),
            ("--kafka 127.0.0.1:1 --eventhubs HUBS", "Name one broker"),
            ("--kafka 127.0.0.1:1 --source other", "reads nothing from 'other'"),
        ],
    ),
)
def test_what_cannot_be_mirrored_is_one_sentence(line: str, told: str, place: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which broker, which source, which topic: asked before anything is written anywhere."""
    monkeypatch.delenv("DEDUP_KAFKA", raising=False)
    store = place.store()
    consumer(store)(batch(event(0, "a")), 0)
    code, _, err = dedup(f"checkpoint mirror-group shop {line} --yes", place)
    assert (code, told in err) == (2, True), err
