"""A real Kafka broker for tests: `kafka` once per run, `topic` a fresh topic per test.

In a container where an engine answers (engine.py), else from jars that come from Maven Central once (maven.py). Tests kill it and start it
again on the same data.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import engine
import kafka_server
import pytest
from kafka_kit import Topic


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the broker as `kafka`."""
    for item in items:
        if "kafka" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[kafka_server.Broker]:
    """The broker. Whoever kills it starts it again."""
    if engine.runs_kafka():
        broker = engine.ContainerBroker.made(request.getfixturevalue("docker_services")._docker_compose)
        yield broker
        broker.remove()
        return
    with kafka_server.running_broker() as broker:
        yield broker


@pytest.fixture
def topic(kafka: kafka_server.Broker) -> Topic:
    """An empty topic with two partitions."""
    made = Topic(kafka.servers, f"orders-{uuid.uuid4().hex[:8]}")
    made.create(partitions=2)
    return made
