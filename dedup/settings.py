"""Settings: what each of them takes, what is refused, and how those of a consumer are written down. Pure.

Every constructor checks what it is given against its table here; those of `FailurePolicy`, `Retry` and `Budget` are beside them.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.head import Head
from checkpoint.position import KAFKA_SOURCE
from deadletter.policy import FailurePolicy
from dedup.core.envelope import Columns
from dedup.decode import Decoder
from dedup.decode.prepare import Constant, Layout, Named, Prepare, layout

_STORE = given.having("a PostgresStore(...) or a DeltaStore(...)", 'PostgresStore("postgresql://...")', "begin_letters", "take_epoch")
_KEY_COLUMNS = given.names("columns of the event", '"data.order_id"').or_none


@dataclass(frozen=True)
class Takeover:
    """When a new instance takes over a consumer from another instance.

    Raises:
        ConfigError: a setting has another type, range or unit than it takes; correct it.
    """

    after: given.Duration = 60.0
    """A timedelta or seconds. The other instance is taken over after this time without a sign of life."""
    now: bool = False
    """True: take over at once, also from a live instance."""

    def __post_init__(self) -> None:
        given.check_fields(TAKEOVER, self, "Takeover")


@dataclass(frozen=True)
class Limits:
    """Limits of sizes, ages and memory.

    Raises:
        ConfigError: a setting has another type, range or unit than it takes; or letters may be older than reservations.
    """

    max_events_per_transaction: int | None = None
    """Rows of one commit. A larger batch is cut into chunks, and the handler is called for each chunk. It does not limit the memory that a
    batch takes in the driver. None: 100,000 on PostgreSQL, 250,000 on Delta."""
    max_body: int = 20 * 1024 * 1024
    """Bytes of a body that a dead letter keeps whole. Of a larger body it keeps a digest and the first 64 KiB."""
    scratch: str | os.PathLike[str] | None = None
    """A folder that driver and executors share, for batches that are too large for the driver. None: a temporary folder in local mode."""
    collect: bool = True
    """False: the rows of a batch never come to the driver, but go through `scratch`, also those that `replay` and
    `reprocess(from_log=True)` read. Only positions and keys come. Letters come from the store, and pass the driver in parts of at most 64
    MiB."""
    retention: given.Duration | None = None
    """A timedelta or seconds: how long reservations are kept at least. What purges them is `dedup upkeep`, or `upkeep=True`. None: for
    ever."""
    upkeep: bool = False
    """True: the consumer's process carries `retention` out by itself, in a thread beside its batches, in small portions."""
    reprocess_within: given.Duration | None = None
    """A timedelta or seconds: older dead letters are not reprocessed. At most `retention`, which is the default."""

    def __post_init__(self) -> None:
        given.check_fields(LIMITS, self, "Limits")
        horizon(self.retention, self.reprocess_within)
        if self.upkeep and self.retention is None:
            raise ConfigError(
                "Limits(upkeep=True) carries a retention out: give it, as in Limits(retention=timedelta(days=30), upkeep=True)."
            )


TAKEOVER: given.Settings = {"after": given.duration("60.0"), "now": given.flag("True")}
"""What `Takeover` takes."""

LIMITS: given.Settings = {
    "max_events_per_transaction": given.whole("events", "100_000", least=1).or_none,
    "max_body": given.whole("bytes", "20 * 1024 * 1024"),
    "scratch": given.path("a folder", '"/mnt/scratch"').or_none,
    "collect": given.flag("False"),
    "retention": given.duration("timedelta(days=30)", most=given.OLDEST).or_none,
    "upkeep": given.flag("True"),
    "reprocess_within": given.duration("timedelta(days=7)", most=given.OLDEST).or_none,
}
"""What `Limits` takes."""


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
    "sequence_key": replace(_KEY_COLUMNS, example='"data.customer"'),
    "query": given.text("the query's name", '"orders"').or_none,
    "on_batch": given.function("of a Report", "print", 1).or_none,
    "failure": given.instance(FailurePolicy, "a FailurePolicy", "FailurePolicy(max_outage=60.0)").or_none,
    "takeover": given.instance(Takeover, "a Takeover", "Takeover(now=True)").or_none,
    "limits": given.instance(Limits, "a Limits", "Limits(max_events_per_transaction=50_000)").or_none,
}
"""What each keyword of `Consumer` takes."""


def mapping(positions: Columns | Literal["auto"] | None) -> str:
    """Where positions come from, in a form that can be compared."""
    if not isinstance(positions, Columns):
        return "none" if positions is None else "auto"
    names = ("source", "topic", "partition", "sequence_number")
    return json.dumps({n: getattr(positions, n) for n in names}, sort_keys=True)


def horizon(retention: given.Duration | None, within: given.Duration | None) -> dt.timedelta | None:
    """How old a dead letter may be when it is reprocessed. Raises ConfigError where reservations are kept for a shorter time."""
    kept, most = (None if age is None else given.to_timedelta(age) for age in (retention, within))
    if kept is not None and most is not None and most > kept:
        raise ConfigError(
            f"Limits(reprocess_within=...) allows dead letters of {most}, and Limits(retention=...) keeps reservations for {kept}: a "
            "duplicate that comes after its reservation was purged would have its effect twice. Keep reservations longer, or shorten "
            "reprocess_within."
        )
    return kept if most is None else most


def names_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One name, several, or none, as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def hints(names: Sequence[str], spec: Prepare, head: Head, *, knows_topic_ids: bool, reads_files: bool = False) -> list[str]:
    """Sentences for the log, about an input with these columns.

    Args:
        head: the state. What cannot be changed any more is not spoken of.
        knows_topic_ids: whether `incarnation=` was given.
        reads_files: whether there is no broker that could be asked for the ids of topics.

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
        _NO_INCARNATION: kafka and not knows_topic_ids and not reads_files,
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
    "the input has the columns of Spark's Kafka source and there is no source=: its positions and keys are stored under the source "
    "'kafka', and this cannot be changed later. Topics of one name on two clusters would be taken for one. Give source=, such as "
    "kafka.Broker(servers).cluster_id(), or a name of your own for files."
)

_NO_INCARNATION = (
    "the input has the columns of Spark's Kafka source and there is no incarnation=: a topic that is deleted and created again is noticed "
    "only where it delivers a position that was decided, and what happened before incarnation= is given stays unnoticed. Give "
    "incarnation=, such as kafka.Broker(servers).topic_ids. If the rows come from files or a table, and not from a broker, you need not "
    "do anything."
)
