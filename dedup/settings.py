"""Settings: what each of them takes, what is refused, and how those of a consumer are written down. Pure.

Every constructor checks what it is given against its table here; that of `Retry` and `Budget` is beside them.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.head import Head
from checkpoint.position import KAFKA_SOURCE
from deadletter.known import ErrorClass
from deadletter.policy import Budget, Retry
from dedup.core.envelope import Columns
from dedup.decode import Decoder
from dedup.decode.prepare import Constant, Layout, Named, Prepare, layout

_STORE = given.having("a PostgresStore(...) or a DeltaStore(...)", 'PostgresStore("postgresql://...")', "begin_letters", "take_epoch")
_KEY_COLUMNS = given.names("columns of the event", '"data.order_id"').or_none


def _are_rules(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(rule, tuple | list) and len(rule) == 2 and given.takes(rule[0], None) and isinstance(rule[1], ErrorClass)
        for rule in value
    )


CONSUMER: given.Settings = {
    "name": given.text("the consumer's name", '"orders"', most=200),
    "store": _STORE,
    "idempotence_key": _KEY_COLUMNS,
    "payload": replace(_KEY_COLUMNS, example='"data.amount"'),
    "key_scope": given.word("topic", "consumer"),
    "null_key": given.word("dead_letter", "position"),
    "on_key_conflict": given.word("dead_letter", "duplicate", "error"),
    "decode": given.Setting(
        "what dedup.decode makes of a schema, or a function Column -> Column, or None",
        "decode.json(schema)",
        lambda value: value is None or isinstance(value, Decoder) or (not isinstance(value, type) and given.takes(value, 1)),
    ),
    "positions": given.Setting(
        "'auto', Columns(...) or None", '"auto"', lambda value: value is None or isinstance(value, Columns) or str(value) == "auto"
    ),
    "source": given.text("the broker's name", '"kafka-eu"').or_none,
    "incarnation": given.function("of a source and its topics", 'Broker("host:9092").topic_ids', 2).or_none,
    "part": given.text("a column", '"line"').or_none,
    "max_events_per_transaction": given.whole("events", "100_000", least=1).or_none,
    "max_body": given.whole("bytes", "20 * 1024 * 1024"),
    "sequence_key": replace(_KEY_COLUMNS, example='"data.customer"'),
    "retry": given.instance(Retry, "a Retry", "Retry(attempts=3)").or_none,
    "budget": given.Setting(
        "a Budget, 'default' or None", "Budget()", lambda value: value is None or isinstance(value, Budget) or str(value) == "default"
    ),
    "bisect": given.flag("False"),
    "errors": given.Setting(
        "pairs of an exception type, or a function of an error, and an ErrorClass", "[(KeyError, PERMANENT)]", _are_rules
    ),
    "max_outage": given.seconds("300.0", endless=True),
    "handler_timeout": given.seconds("60.0", above=0).or_none,
    "retention": given.span("datetime.timedelta(days=30)").or_none,
    "reprocess_within": given.span("datetime.timedelta(days=7)").or_none,
    "query": given.text("the query's name", '"orders"').or_none,
    "takeover_after": given.seconds("60.0"),
    "takeover": given.flag("True"),
    "scratch": given.path("a folder", '"/mnt/scratch"').or_none,
    "collect": given.flag("False"),
}
"""What each keyword of `Consumer` takes."""


def refuse_function(decorator: str, function: Callable[..., Any], takes: Sequence[str]) -> None:
    """Raise ConfigError for what this decorator of a consumer cannot call, or what would run nothing when it is called."""
    lazy = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if lazy or not given.takes(function, len(takes)):
        shown = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"@consumer.{decorator} registers a plain function that takes {len(takes)} arguments, ({', '.join(takes)}), not {shown} "
            f"({type(function).__name__})."
        )


def mapping(positions: Columns | Literal["auto"] | None) -> str:
    """Where positions come from, in a form that can be compared."""
    if not isinstance(positions, Columns):
        return "none" if positions is None else "auto"
    names = ("source", "topic", "partition", "sequence_number")
    return json.dumps({n: getattr(positions, n) for n in names}, sort_keys=True)


def horizon(retention: dt.timedelta | None, within: dt.timedelta | None) -> dt.timedelta | None:
    """How old a dead letter may be when it is reprocessed. Raises ConfigError where reservations are kept for a shorter time."""
    if retention is not None and within is not None and within > retention:
        raise ConfigError(
            f"Dead letters may be reprocessed for {within}, and reservations are kept for {retention}: a duplicate that comes after "
            "its reservation was purged would have its effect twice. Keep reservations longer, or shorten reprocess_within."
        )
    return within or retention


def names_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several, or none, as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def hints(names: Sequence[str], spec: Prepare, head: Head, *, knows_topic_ids: bool) -> list[str]:
    """Sentences for the log, about an input with these columns.

    Args:
        head: the state. What cannot be changed any more is not spoken of.
        knows_topic_ids: whether `incarnation=` was given.

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
        _NO_INCARNATION: kafka and not knows_topic_ids,
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
