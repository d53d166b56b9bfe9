"""Where a stream goes on when Spark's own checkpoint is lost: behind the consumer's checkpoints."""

from __future__ import annotations

import json

from checkpoint.errors import ConfigError
from dedup.consumer import Consumer


def starting_positions(consumer: Consumer, *, source: str | None = None) -> str:
    """The option `startingPositions` that begins behind the consumer's checkpoints: JSON, hub -> partition -> next sequence number.

    Partitions without a checkpoint are left out: they begin at their earliest event.

    Args:
        consumer: whose checkpoints.
        source: host name of the namespace, where the consumer has read from several.

    Raises:
        ConfigError: the consumer has no checkpoint, or has read from several namespaces and `source` names none of them.
    """
    checkpoints = consumer.store.head(consumer.name).checkpoints
    sources = sorted({place.source for place in checkpoints if source in (None, place.source)})
    if len(sources) != 1:
        has = ", ".join(sorted({place.source for place in checkpoints})) or "none"
        raise ConfigError(
            f"Consumer {consumer.name!r} has checkpoints of these namespaces: {has}. Name one with source=; without a checkpoint, choose "
            "startingPositions yourself."
        )
    found: dict[str, dict[str, int]] = {}
    for place, checkpoint in sorted(checkpoints.items()):
        if place.source == sources[0]:
            found.setdefault(place.topic, {})[str(place.partition)] = checkpoint.sequence_number + 1
    return json.dumps(found)
