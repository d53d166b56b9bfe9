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
from deadletter.budget import Budget
from deadletter.known import ErrorClass
from deadletter.policy import Retry
from dedup.decode import Decoder
from dedup.decode.prepare import Constant, Layout, Named, Prepare, layout
from dedup.envelope import KAFKA_SOURCE, Columns
from dedup.store import Head

SECONDS_OF_SENDING = 60.0
"""How long a batch waits for its messages to be sent, unless `dispatch_to` says otherwise."""

_STORE = given.having("a PostgresStore(...) or a DeltaStore(...)", 'PostgresStore("postgresql://...")', "begin_letters", "take_epoch")
_KEY_COLUMNS = given.names("columns of the event", '"data.order_id"').or_none
_ON_STEP = given.function("of a step's name", "lambda name: None", 1)


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

FOREACH: given.Settings = {
    "into": given.text("the sink", '"orders"').or_none,
    "on": given.word("executors", "driver").or_none,
    "connections": given.whole("connections: a task needs two", "64", least=2).or_none,
    "concurrency": given.whole("events", "16", least=1).or_none,
}
"""What each keyword of `@consumer.foreach` takes; `foreach_arrow` has all but the last."""

DISPATCH_TO: given.Settings = {
    "destination": given.having("a destination, with methods send and close", 'kafka.Topics("host:9092")', "send", "close"),
    "timeout": given.seconds("60.0", above=0),
}
"""What `consumer.dispatch_to` takes."""

POSTGRES_STORE: given.Settings = {
    "dsn": given.text("a libpq connection string or URL", '"postgresql://user@host/database"').hidden,
    "schema": given.text("a schema's name", '"dedup"'),
    "on_step": _ON_STEP,
    "auto_migrate": given.flag("False"),
    "filter_memory": given.whole("bytes", "512 * 1024 * 1024"),
}
"""What `PostgresStore` takes."""

DELTA_STORE: given.Settings = {
    "path": given.path("a folder or URL", '"s3://lake/dedup"'),
    "tables": given.mapping("sinks: name -> path", '{"orders": "s3://lake/orders"}', values=given.path("", "").fits).or_none,
    "storage_options": given.mapping(
        "options of the object store", '{"AWS_REGION": "eu-west-1"}', values=lambda value: isinstance(value, str)
    ).or_none.hidden,
    "on_step": _ON_STEP,
    "engine": given.word("delta-rs", "spark"),
}
"""What `DeltaStore` takes."""

REPROCESS: given.Settings = {
    "by": given.text("who does it", '"ann"'),
    "reason": given.Setting("text, or None", '"fixed in 1.3"', lambda value: value is None or isinstance(value, str)),
    "limit": given.whole("letters", "100").or_none,
    "rate": given.number("letters a second", "10.0", above=0).or_none,
    "stop_after": given.whole("failures in a row", "20", least=1),
    "skip_missing": given.flag("True"),
    "on_progress": given.function("of letters done and all letters", "lambda done, total: None", 2),
    "sleep": given.function("of seconds", "time.sleep", 1),
}
"""What `ReprocessOptions` takes."""

PATIENCE: given.Settings = {
    "attempts": given.whole("attempts", "5", least=1),
    "first": given.seconds("0.5"),
    "most": given.seconds("60.0"),
}
"""What `Patience` takes."""

DISPATCHER: given.Settings = {
    "topics": given.several("topics", '["mails"]'),
    "blocking": given.flag("False"),
    "limit": given.whole("messages", "10_000", least=1),
    "workers": given.whole("turns at once", "2", least=1),
    "on_step": _ON_STEP,
}
"""What `Dispatcher` takes beside an outbox and a destination; `ExactlyOnce`, too."""

BROKER: given.Settings = {
    "servers": given.text("host:port, several with commas between them", '"host:9092"'),
    "settings": given.mapping("settings of librdkafka", '{"security.protocol": "SASL_SSL"}').or_none.hidden,
    "timeout": given.seconds("30.0", above=0),
}
"""What `kafka.Broker` takes."""

PUBLISHER: given.Settings = {
    "partition_by": given.word("key", "broker"),
    "max_events": given.whole("events", "1_000", least=1),
    "max_bytes": given.whole("bytes", "8 * 1024 * 1024", least=1),
    "max_outage": given.seconds("60.0", endless=True),
    "resend_within": given.span("datetime.timedelta(days=7)").or_none,
    "on_step": _ON_STEP,
}
"""What `Publisher` takes beside its group, store and sender."""

RUNNER: given.Settings = {
    "hub": given.text("an event hub", '"orders"').or_none,
    "group": given.text("a consumer group", '"$Default"'),
    "start": given.Setting(
        "'earliest', 'latest', or a datetime with a time zone",
        '"earliest"',
        lambda value: str(value) in ("earliest", "latest") or (isinstance(value, dt.datetime) and value.utcoffset() is not None),
    ),
    "max_events": given.whole("events", "5_000", least=1),
    "max_bytes": given.whole("bytes", "16 * 1024 * 1024", least=1),
    "max_wait": given.seconds("0.5"),
    "prefetch": given.whole("events", "1_000", least=1),
    "balance_every": given.seconds("10.0", above=0),
    "expire_after": given.seconds("60.0", above=0),
}
"""What `eventhub.run` takes beside a consumer and a connection."""

RECEIVE: given.Settings = {
    "prefetch": given.whole("events", "1_000", least=1),
    "timeout": given.seconds("60.0", above=0),
    "level": given.whole("the owner level", "0").or_none,
    "fail_on_data_loss": given.flag("False"),
}
"""How a partition of an event hub is received."""

CALL: given.Settings = {"sender": given.function("of messages", "lambda messages: None", 1)}
"""What `outbox.Call` takes."""

TOPICS: given.Settings = {"timeout": given.seconds("60.0", above=0)}
"""What `kafka.Topics` takes beside a broker."""

TRANSACTIONAL_TOPICS: given.Settings = {"name": given.text("the outbox's name", '"orders"'), **TOPICS}
"""What `kafka.TransactionalTopics` takes beside a broker."""

KAFKA_LOG: given.Settings = {
    "isolation": given.word("read_committed", "read_uncommitted"),
    "headers": given.flag("False"),
    "arrow": given.flag("True"),
}
"""What `kafka.log_reader` takes beside a broker."""

CONNECTION: given.Settings = {
    "namespace": given.text("a host name", '"name.servicebus.windows.net"'),
    "hub": given.text("an event hub", '"orders"'),
    "group": given.text("a consumer group", '"$Default"'),
    "websocket": given.flag("True"),
    "tls": given.flag("False"),
}
"""What a `Connection` to an event hub takes beside a secret or a credential."""

HUB_LOG: given.Settings = {
    "hub": given.text("an event hub", '"orders"').or_none,
    "group": CONNECTION["group"],
    "timeout": given.seconds("60.0", above=0),
    "arrow": given.flag("True"),
}
"""What `eventhub.log_reader` takes beside a connection."""

HUB_SENDER: given.Settings = {"hub": HUB_LOG["hub"], "timeout": HUB_LOG["timeout"]}
"""What `eventhub.Sender` takes beside a connection."""


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
            f"Dead letters may be reprocessed for {within}, and reservations are kept for {retention}: a copy of a message that came after "
            "its reservation was purged would have its effect twice. Keep reservations longer, or shorten reprocess_within."
        )
    return within or retention


def names_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several, or none, as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


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
