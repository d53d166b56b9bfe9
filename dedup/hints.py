"""What a consumer is told before its first batch: settings that work, and that do less than their user may think. Pure.

Called by the consumer for each query run; it logs what is found once.
"""

from __future__ import annotations

from collections.abc import Sequence

from dedup.decode.prepare import Constant, Layout, Named, Prepare, layout
from dedup.envelope import KAFKA_SOURCE
from dedup.store import Head


def hints(names: Sequence[str], spec: Prepare, head: Head, *, witnessed: bool) -> list[str]:
    """Sentences for the log, about an input with these columns.

    Args:
        head: the state. What cannot be changed any more is not spoken of.
        witnessed: whether `incarnation=` was given.

    Raises:
        ConfigError: the input cannot be mapped.
    """
    if not spec.positions:
        return []
    found = layout(names, spec)
    kafka = _is_kafka(found)
    named = spec.source is not None or found.envelope["source"] not in (Constant(KAFKA_SOURCE), Constant("input"))
    checks = {
        _NO_KEY: not spec.keys.columns and found.envelope["properties"] == Constant(None),
        _NO_SOURCE: kafka and not named and not head.checkpoints,
        _NO_INCARNATION: kafka and not witnessed,
    }
    return [sentence for sentence, holds in checks.items() if holds]


def _is_kafka(found: Layout) -> bool:
    """Whether it has the columns of Spark's Kafka source, recognised or mapped."""
    return found.envelope["sequence_number"] == Named("offset") and found.envelope["body"] == Named("value")


_NO_KEY = (
    "there is no idempotence_key= and the input has no headers, where a message id could be: each event is known by its position alone. "
    "Only redeliveries are dropped; what a producer sends twice has its effect twice. Give idempotence_key=, or read the headers: "
    'option("includeHeaders", "true") of Spark\'s Kafka source, properties= of Columns.'
)

_NO_SOURCE = (
    "this is a Kafka stream and there is no source=: its positions and keys are stored under the source 'kafka', and this cannot be "
    "changed later. Topics of one name on two clusters would be taken for one. Give source=, such as kafka.Broker(servers).cluster_id()."
)

_NO_INCARNATION = (
    "this is a Kafka stream and there is no incarnation=: a topic that is deleted and created again is noticed only where it delivers a "
    "position that was decided, and what happened before incarnation= is given stays unnoticed. Give incarnation=, such as "
    "kafka.Broker(servers).topic_ids."
)
