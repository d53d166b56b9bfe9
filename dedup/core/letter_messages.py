"""New dead letters as messages of the outbox: what `FailurePolicy(letters_to=)` sends.

Pure. Called by pipeline/commit.py with the letters of one transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from checkpoint.position import KEY_ONLY
from deadletter.hiding import mark_of
from deadletter.letter import PROPERTIES, Kind
from dedup.core.keys import MESSAGE_ID_PROPERTIES
from dedup.core.messages import MESSAGES, Messages, lanes

KAFKA_CONNECT = {
    "topic": "topic",
    "partition": "partition",
    "offset": "offset",
    "error_type": "exception.class.name",
    "error_message": "exception.message",
    "stack": "exception.stacktrace",
}
"""Column of a letter -> the header `__connect.errors.` + this, whose value is text.

Source: KIP-298 of Apache Kafka, which names the headers of Kafka Connect's dead letter queue; LogReporter and DeadLetterQueueReporter.
"""

OWN = ("consumer", "kind", "reason", "fingerprint", "idempotence_key", "source", "sequence_number", "part", "enqueued_time")
"""Columns of a letter that have a header of ours: `dedup.` and the name with hyphens. A moment is in ISO 8601, in UTC."""


def messages_of(letters: pa.Table, topic: str) -> Messages:
    """A message for each of these letters (LETTERS), in their order.

    Its id is the letter's, so it is the same if the letter is made again. Key and body are the event's; of a body that is too large the
    first 64 kB, with its size in `dedup.body-size`. Its headers are the event's, then those that say what went wrong. What a letter hides
    is hidden here, too: `dedup.redaction` says "masked" or "sealed".
    """
    keys = letters["event_key"].combine_chunks()
    headers = [list(_headers(one)) for one in letters.drop_columns(["body", "event_key"]).to_pylist()]
    columns = {
        "id": letters["id"],
        "key": keys,
        "body": letters["body"],
        "headers": pa.array(headers, PROPERTIES),
        "lane": lanes(topic, keys),
    }
    return Messages(topic, pa.table([columns[field.name] for field in MESSAGES], schema=MESSAGES), derived=True)


def _headers(letter: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = [(one["key"], one["value"]) for one in letter["properties"] or ()]
    yield from (_header(name.replace("\0", "\ufffd"), value) for name, value in given)
    seen = letter["sequence_number"] if letter["partition"] != KEY_ONLY.partition else None
    facts = {**letter, "sequence_number": seen, "offset": letter["offset"] if letter["offset"] is not None else seen}
    if seen is None:
        facts |= {"topic": None, "partition": None, "part": None}
    yield from _texts({f"__connect.errors.{name}": facts[column] for column, name in KAFKA_CONNECT.items()})
    yield from _texts({f"dedup.{column.replace('_', '-')}": facts[column] for column in OWN})
    if letter["kind"] == Kind.TOO_LARGE:
        yield from _texts({"dedup.body-size": letter["body_size"]})
    if mark := mark_of(letter["extras"]):
        yield from _texts({"dedup.redaction": mark.how})
    yield from (_header("dedup.message-id", value) for name, value in given if name in MESSAGE_ID_PROPERTIES)


def _texts(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (_header(name, str(_said(value)).encode()) for name, value in facts.items() if value is not None)


def _said(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _header(name: str, value: bytes | None) -> dict[str, Any]:
    return {"key": name, "value": value}
