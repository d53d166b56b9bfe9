"""Which name a mistyped one may have meant."""

from __future__ import annotations

from dedup import Event
from dedup.core.near import like


def test_names_of_kafka_lead_to_those_of_dedup() -> None:
    """Whoever writes `event.value` or `event.offset`, as Kafka's columns are called, is told what it is called here."""
    assert [like(name, Event._fields) for name in ("value", "offset", "headers", "nothing")] == [
        " (did you mean body?)",
        " (did you mean sequence_number?)",
        " (did you mean properties?)",
        "",
    ]
