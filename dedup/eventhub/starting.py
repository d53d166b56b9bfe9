"""Where a stream goes on when Spark's own checkpoint is lost: behind the consumer's checkpoints."""

from __future__ import annotations

import json

from checkpoint.errors import ConfigError
from dedup import starting
from dedup.consumer import Consumer
from dedup.eventhub.namespace import Namespace
from dedup.eventhub.settings import Connection


def starting_positions(consumer: Consumer, connection: Connection | str | None = None, *, source: str | None = None) -> str:
    """The option `startingPositions` that begins behind the consumer's checkpoints: JSON, hub -> partition -> next sequence number.

    Partitions without a checkpoint begin at their earliest event.

    Args:
        consumer: whose checkpoints.
        connection: of the hub, or its connection string: then the hub is asked, too, what it still has.
        source: without a connection, the host name of the namespace, where the consumer has read from several.

    Raises:
        ConfigError: the consumer has no checkpoint, or has read from several namespaces and `source` names none of them.
        PositionGap: retention has passed a checkpoint, and nobody has accepted the gap (asked with a connection only).
        IncarnationChanged: the hub ends below a checkpoint (asked with a connection only).
    """
    head = consumer.known_head()
    if connection is not None:
        hub = Connection.of(connection) if isinstance(connection, str) else connection
        where = consumer.source or hub.source
        return starting.spark_json(starting.positions(head, where, Namespace(hub), [hub.hub]))
    where = _only(consumer, sorted({place.source for place in head.checkpoints}), source)
    found: dict[str, dict[str, int]] = {}
    for place, checkpoint in sorted(head.checkpoints.items()):
        if place.source == where:
            found.setdefault(place.topic, {})[str(place.partition)] = checkpoint.sequence_number + 1
    return json.dumps(found)


def _only(consumer: Consumer, sources: list[str], asked: str | None) -> str:
    chosen = [source for source in sources if asked in (None, source)]
    if len(chosen) == 1:
        return chosen[0]
    raise ConfigError(
        f"Consumer {consumer.name!r} has checkpoints of these namespaces: {', '.join(sources) or 'none'}. Name one with source=; where "
        "there is no checkpoint, choose startingPositions yourself."
    )
