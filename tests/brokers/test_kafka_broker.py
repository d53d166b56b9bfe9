"""What a real broker is asked: who it is, which life of a topic this is, where its partitions reach; and the login of Event Hubs."""

from __future__ import annotations

import datetime as dt
import logging
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from checkpoint.errors import ConfigError, SourceUnavailable
from dedup import kafka as dk
from kit import kafka_server
from kit.kafka_kit import Topic

NOBODY = "127.0.0.1:1"
"""An address where no broker is."""

SECRET, OTHER_KEY = kafka_server.KEY, "YW5vdGhlciBrZXk="


def test_a_cluster_is_known_by_its_own_id(kafka: kafka_server.Broker) -> None:
    """The id is the same by every address and for every client, also one that travelled to another process."""
    broker = dk.Broker(kafka.servers)
    assert len(broker.cluster_id()) == 22
    assert pickle.loads(pickle.dumps(dk.log_reader(broker))).broker.cluster_id() == broker.cluster_id()
    assert dk.Broker(f"localhost:{kafka.port}").cluster_id() == pickle.loads(pickle.dumps(broker)).cluster_id() == broker.cluster_id()


def test_a_topic_that_is_created_again_has_another_id(kafka: kafka_server.Broker, topic: Topic) -> None:
    """The id stays through the life of a topic, is gone with it, and never comes back."""
    broker = dk.Broker(kafka.servers)
    first = broker.topic_ids("any", [topic.name, "no-such-topic"])
    assert set(first) == {topic.name}
    topic.grow(3)
    assert broker.topic_ids("any", [topic.name]) == first
    topic.delete()
    assert broker.topic_ids("any", [topic.name]) == {}
    topic.create()
    assert broker.topic_ids("any", [topic.name])[topic.name] != first[topic.name]


def test_a_partition_reaches_from_what_retention_left_to_its_end(kafka: kafka_server.Broker, topic: Topic) -> None:
    """Empty partitions, deleted records and positions that no event has (markers) all count into the span."""
    topic.send([b"a", b"b", b"c"])
    topic.send_transaction(["d"], commit=True)
    topic.delete_records(0, before=2)
    broker = dk.Broker(kafka.servers)
    assert broker.spans([topic.name]) == {(topic.name, 0): (2, 5), (topic.name, 1): (0, 0)}
    assert set(broker.newest([(topic.name, 0), (topic.name, 1)])) == {(topic.name, 0)}
    with pytest.raises(ConfigError, match="no-such-topic"):
        broker.spans([topic.name, "no-such-topic"])


def test_a_time_that_no_calendar_has_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that gives microseconds or less says years that no datetime has: such a time is left out, and the others are told."""
    broker, times = dk.Broker(NOBODY), (1_764_396_000_000, 1_764_396_000_000_000, 2**63 - 1, -1, None)
    told = {("t", number): SimpleNamespace(timestamp=time) for number, time in enumerate(times)}
    monkeypatch.setattr(broker, "_offsets", lambda places, _: {place: told[place] for place in places})
    assert broker.newest(told) == {("t", 0): dt.datetime(2025, 11, 29, 6, tzinfo=dt.UTC)}


@pytest.mark.full
def test_a_broker_that_is_away_is_told_as_such() -> None:
    """Every question ends within the time-out, with an error that says who was asked."""
    broker = dk.Broker(NOBODY, timeout=1)
    for ask in (broker.cluster_id, lambda: broker.topic_ids("s", ["t"]), lambda: dk.log_reader(broker).read("t", 0, 0, 0)):
        with pytest.raises(SourceUnavailable, match=NOBODY):
            ask()


@pytest.mark.full
def test_event_hubs_login_is_accepted_by_a_real_broker(kafka: kafka_server.Broker) -> None:
    """The client that a connection string makes logs in as Event Hubs asks for it; another password is refused."""
    assert dk.EventHubs.connection_string(kafka.connection_string).broker().cluster_id() == dk.Broker(kafka.servers).cluster_id()
    wrong = dk.EventHubs.connection_string(kafka.connection_string.replace(kafka_server.KEY, OTHER_KEY)).broker()
    wrong.timeout = 5
    with pytest.raises(SourceUnavailable, match=r"[Aa]uthentication") as refused:
        wrong.cluster_id()
    assert OTHER_KEY not in str(refused.value)


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Options, brokers and errors can be printed: neither keys nor client secrets are in them."""
    caplog.set_level(logging.DEBUG)
    key = dk.EventHubs.connection_string(
        f"Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={SECRET};EntityPath=h"
    )
    app = dk.EventHubs.entra("ns.servicebus.windows.net", "tenant", "client", SECRET)
    reader = dk.log_reader(key.broker())
    shown = [f"{thing!r} {thing}" for thing in (key, app, key.options, app.options, key.broker(), reader, app.broker())]
    with pytest.raises(ConfigError) as wrong:
        dk.EventHubs.connection_string(f"SharedAccessKey={SECRET}")
    assert SECRET not in " ".join([*shown, str(wrong.value), caplog.text])
    assert SECRET in key.options["kafka.sasl.jaas.config"] and SECRET in app.options["kafka.sasl.jaas.config"]
    assert key.options["subscribe"] == "h"


def test_a_quote_in_a_secret_stays_in_the_secret() -> None:
    """Quotes and backslashes cannot end the value in the login line and begin another setting."""
    options = dk.EventHubs.entra("h", "t", "c", 'a"b\\c').options
    assert 'clientSecret="a\\"b\\\\c"' in options["kafka.sasl.jaas.config"]


@pytest.mark.full
def test_without_the_client_one_sentence_says_what_to_install() -> None:
    """`import dedup` works without confluent-kafka, and `dedup.kafka` names the extra."""
    program = "import sys; sys.modules['confluent_kafka'] = None\nimport dedup\nfrom dedup import Consumer\nimport dedup.kafka"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ImportError: dedup.kafka needs confluent-kafka: pip install 'dedup-spark[kafka]'"
