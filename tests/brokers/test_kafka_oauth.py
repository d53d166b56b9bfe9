"""The login of an app registration (SASL/OAUTHBEARER) on a real broker, which checks each token's signature, issuer and audience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from checkpoint.errors import SourceUnavailable
from dedup import kafka as dk
from kit import kafka_server, token_server
from kit.kafka_kit import Topic
from kit.token_server import CLIENT, SECRET, TokenServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def tokens(kafka: kafka_server.Broker) -> Iterator[TokenServer]:
    """A token endpoint whose key the broker knows."""
    with token_server.running_tokens(kafka.home) as served:
        yield served


def endpoint(kafka: kafka_server.Broker, tokens: TokenServer, secret: str = SECRET) -> dk.EventHubs:
    """As an app registration gets at the Kafka endpoint of Event Hubs; here without TLS, and at another port."""
    made = dk.EventHubs.entra("127.0.0.1", "a-tenant", CLIENT, secret, authority=tokens.url)
    return replace(made, port=kafka.token_port, tls=False)


def test_the_client_logs_in_with_a_token(kafka: kafka_server.Broker, topic: Topic, tokens: TokenServer) -> None:
    """Start positions, lag and reading again go through it; the endpoint is asked as Entra ID wants to be."""
    topic.send(["x", "y"])
    broker = endpoint(kafka, tokens).broker()
    assert broker.cluster_id() == dk.Broker(kafka.servers).cluster_id()
    assert dk.log_reader(broker).read(topic.name, 0, 0, 1)["value"].to_pylist() == [b"x", b"y"]
    wanted = {"grant_type": "client_credentials", "scope": "https://127.0.0.1/.default", "path": "/a-tenant/oauth2/v2.0/token"}
    assert tokens.asked and all(asked == wanted for asked in tokens.asked)


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["secret", pytest.param("audience", marks=pytest.mark.full)])
def test_a_wrong_secret_or_token_is_refused(kafka: kafka_server.Broker, tokens: TokenServer, wrong: str) -> None:
    """By the endpoint, or by the broker, which looks into the token; nothing secret is in the error."""
    if wrong == "audience":
        tokens.audience = "https://somebody.else"
    broker = endpoint(kafka, tokens, "wrong-one" if wrong == "secret" else SECRET).broker()
    broker.timeout = 5
    with pytest.raises(SourceUnavailable) as refused:
        broker.cluster_id()
    assert (tokens.refused > 0) == (wrong == "secret")
    assert "wrong-one" not in str(refused.value) and SECRET not in str(refused.value)


@pytest.mark.full
def test_sparks_source_logs_in_with_a_token(spark: SparkSession, kafka: kafka_server.Broker, topic: Topic, tokens: TokenServer) -> None:
    """The options are read by Kafka's Java client; its JVM has to be told that it may ask that address for tokens."""
    topic.send(["x", "y", "z"])
    hubs = endpoint(kafka, tokens)
    allowed, system = "org.apache.kafka.sasl.oauthbearer.allowed.urls", spark._jvm.java.lang.System  # type: ignore[union-attr]
    system.setProperty(allowed, f"{tokens.url}/a-tenant/oauth2/v2.0/token")
    try:
        events = spark.read.format("kafka").options(**hubs.options).option("subscribe", topic.name).load()
        assert sorted(bytes(row.value) for row in events.collect()) == [b"x", b"y", b"z"]
    finally:
        system.clearProperty(allowed)
    assert {asked["scope"] for asked in tokens.asked} == {"https://127.0.0.1/.default"}
