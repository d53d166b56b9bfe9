"""What the settings of everything but a consumer's constructor may be: one table for each constructor or function. Pure.

The tables are `given.Settings`; the constructors check against them. Those of a consumer are in dedup/settings.py.
"""

from __future__ import annotations

import datetime as dt

from checkpoint import given

SECONDS_OF_SENDING = 60.0
"""How long a batch waits for its messages to be sent, unless `dispatch_to` says otherwise."""
_ON_STEP = given.function("of a step's name", "lambda name: None", 1)

FOREACH: given.Settings = {
    "into": given.text("the sink", '"orders"').or_none,
    "on": given.word("executors", "driver").or_none,
    "connections": given.whole("connections: a task needs two", "64", least=2).or_none,
    "concurrency": given.whole("events", "16", least=1).or_none,
}
"""What each keyword of `@consumer.foreach` takes; `foreach_arrow` has all but the last."""

DISPATCH_TO: given.Settings = {
    "destination": given.having("a destination, with methods send and close", 'kafka.Topics("host:9092")', "send", "close"),
    "timeout": given.duration("60.0", above=0),
}
"""What `consumer.dispatch_to` takes."""

POSTGRES_STORE: given.Settings = {
    "dsn": given.text("a libpq connection string or URL", '"postgresql://user@host/database"').hidden,
    "schema": given.text("a schema's name", '"dedup"'),
    "on_step": _ON_STEP,
    "auto_migrate": given.flag("False"),
    "filter_memory": given.whole("bytes", "512 * 1024 * 1024"),
    "password": given.function("that returns the password", 'lambda: secrets.get("orders-db")', 0).or_none.hidden,
}
"""What `PostgresStore` takes."""

_OPTIONS = given.mapping("options of the object store", '{"AWS_REGION": "eu-west-1"}', values=lambda value: isinstance(value, str))

DELTA_STORE: given.Settings = {
    "path": given.path("a folder or URL", '"s3://lake/dedup"'),
    "tables": given.mapping("sinks: name -> path", '{"orders": "s3://lake/orders"}', values=given.path("", "").fits).or_none,
    "storage_options": given.Setting(
        f"{_OPTIONS.expected}, or a function that returns it",
        _OPTIONS.example,
        lambda value: _OPTIONS.fits(value) or (not isinstance(value, type) and given.takes(value, 0)),
    ).or_none.hidden,
    "on_step": _ON_STEP,
    "engine": given.word("delta-rs", "spark"),
    "keys_folder": given.path("a folder of this machine", '"/var/lib/dedup"').or_none,
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
    "first": given.duration("0.5"),
    "most": given.duration("60.0"),
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
    "timeout": given.duration("30.0", above=0),
}
"""What `kafka.Broker` takes."""

PUBLISHER: given.Settings = {
    "partition_by": given.word("key", "broker"),
    "max_events": given.whole("events", "1_000", least=1),
    "max_bytes": given.whole("bytes", "8 * 1024 * 1024", least=1),
    "max_outage": given.duration("60.0", endless=True),
    "resend_within": given.duration("timedelta(days=7)", most=given.OLDEST).or_none,
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
    "max_wait": given.duration("0.5"),
    "prefetch": given.whole("events", "1_000", least=1),
    "balance_every": given.duration("10.0", above=0),
    "expire_after": given.duration("60.0", above=0),
}
"""What `eventhub.run` takes beside a consumer and a connection."""

RECEIVE: given.Settings = {
    "prefetch": given.whole("events", "1_000", least=1),
    "timeout": given.duration("60.0", above=0),
    "level": given.whole("the owner level", "0").or_none,
    "fail_on_data_loss": given.flag("False"),
}
"""How a partition of an event hub is received."""

CALL: given.Settings = {"sender": given.function("of messages", "lambda messages: None", 1)}
"""What `outbox.Call` takes."""

TOPICS: given.Settings = {"timeout": given.duration("60.0", above=0)}
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
    "timeout": given.duration("60.0", above=0),
    "arrow": given.flag("True"),
}
"""What `eventhub.log_reader` takes beside a connection."""

HUB_SENDER: given.Settings = {"hub": HUB_LOG["hub"], "timeout": HUB_LOG["timeout"]}
"""What `eventhub.Sender` takes beside a connection."""
