"""Every setting is checked where it is given: a value of another type, range or unit is a ConfigError that says what is expected."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import inspect
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from checkpoint.given import Setting
from deadletter.policy import BUDGET, FAILURE_POLICY, RETRY, WATCHED
from dedup import (
    Budget,
    Columns,
    Consumer,
    DeltaStore,
    Encrypt,
    ErrorClass,
    FailurePolicy,
    Limits,
    Mask,
    PostgresStore,
    ReprocessOptions,
    Retry,
    Takeover,
    decode,
    eventhub,
    kafka,
)
from dedup.core.settings import DELTA_STORE, POSTGRES_STORE
from dedup.decode import registry
from dedup.eventhub.reader import Receive
from dedup.outbox import Call, Dispatcher, ExactlyOnce, Patience
from dedup.publishing.publisher import Publisher
from dedup.settings import LIMITS, TAKEOVER

NAN, INF, DAY = math.nan, math.inf, dt.timedelta(days=1)

TEXT: list[Any] = ["", " ", "a\0b", 5, b"a", ["a"]]
WEEK = np.timedelta64(7, "D")
"""Numpy counts it as a whole number, of whatever unit it has."""

COUNT: list[Any] = [0, -1, 1.5, "5", True, NAN, WEEK]
SIZE: list[Any] = [-1, 1.5, 2e6, "5", True]
SHARES: list[Any] = [
    "",
    b"",
    None,
    0.5,
    (100, 0.5),
    ((0, 0.5),),
    ((100, 1.5),),
    ((100, NAN),),
    ((1.5, 0.5),),
    ((True, 0.5),),
    ((10_001, 0.5),),
]
TIME: list[Any] = [-1, 1e10, 10**400, -0.5, NAN, "1 minute", "14d", True, -DAY, 4_000 * DAY, WEEK]
LIMIT: list[Any] = [0, 0 * DAY, *TIME]
FLAG: list[Any] = [1, 0, "yes", None]
AGE: list[Any] = ["30 days", -1, -DAY, NAN, INF, 1e30, True, 400_000 * DAY, WEEK]
NAMES: list[Any] = [[], "", ["a", ""], 5, {"a": 1}, [5], b"a"]
CALLED: list[Any] = [5, "print", lambda a, b, c, d: None]
KEY = "MDEyMzQ1Njc4OWFiY2RlZg=="
MAPS: list[Any] = ["a=b", [("a", "b")], {5: "a"}]

STORE = PostgresStore("host=nowhere")
HUB = eventhub.Connection("n", "h", credential=object())


def _runner(**options: Any) -> None:
    asyncio.run(eventhub.run_async(Consumer("a", STORE), "Endpoint=sb://nowhere/", **options))


def _foreach(**options: Any) -> None:
    Consumer("a", STORE).foreach(**options)


def _foreach_arrow(**options: Any) -> None:
    Consumer("a", STORE).foreach_arrow(**options)


def _dispatch_to(**options: Any) -> None:
    Consumer("a", STORE).dispatch_to(**options)


Cases = dict[str, list[Any]]

SETTINGS: dict[Callable[..., Any], tuple[dict[str, Any], Cases, set[str]]] = {
    # what is called -> (what it needs beside the one that is bad, setting -> bad values, arguments that are no settings)
    Consumer: (
        {"name": "a", "store": STORE},
        {
            "name": ["x" * 201, None, *TEXT],
            "store": ["postgresql://host", None, PostgresStore],
            "idempotence_key": NAMES,
            "payload": NAMES,
            "key_scope": ["Topic", None, 5],
            "null_key": ["drop", None],
            "on_key_conflict": ["ignore", None],
            "decode": ["json", {"id": "string"}, pa.schema([]), dict, 5],
            "positions": ["none", {"topic": "t"}, True, Columns],
            "source": TEXT,
            "incarnation": ["id", 5, lambda source: {}],
            "part": TEXT,
            "sequence_key": NAMES,
            "query": TEXT,
            "on_batch": CALLED,
            "failure": [{"bisect": False}, FailurePolicy, Retry()],
            "takeover": [True, 60.0, Takeover],
            "limits": [100_000, {"max_body": 5}, Limits],
        },
        set(),
    ),
    FailurePolicy: (
        {},
        {
            "retry": [3, None, {"attempts": 3}, Retry],
            "budget": [0.5, "default", ((100, 0.5),), Budget],
            "bisect": FLAG,
            "errors": [KeyError, [KeyError], [(KeyError, "PERMANENT")], {KeyError: ErrorClass.PERMANENT}, None],
            "max_outage": [*TIME, None],
            "on_parked": CALLED,
            "letters_to": TEXT,
            "redact": [*CALLED, Mask, Encrypt, object()],
            "handler_timeout": [INF, *LIMIT],
        },
        set(),
    ),
    Mask: ({}, {"headers": ["a", [""], 5], "columns": ["a", [""], 5], "texts": ["show", None]}, {"fields"}),
    Encrypt: ({"keys": KEY}, {"keys": [None, 5, "", [], lambda a: a], "texts": ["show", None]}, set()),
    Takeover: ({}, {"after": [*TIME, INF, None], "now": FLAG}, set()),
    Limits: (
        {},
        {
            "max_events_per_transaction": [*COUNT, "100_000"],
            "max_body": [-5, *SIZE, None],
            "scratch": TEXT,
            "collect": FLAG,
            "retention": AGE,
            "upkeep": FLAG,
            "reprocess_within": AGE,
        },
        set(),
    ),
    _foreach: ({}, {"into": TEXT, "on": ["spark", 5], "connections": [1, *COUNT], "concurrency": COUNT}, set()),
    _foreach_arrow: ({}, {"into": TEXT, "on": ["spark", 5], "connections": [1, *COUNT]}, set()),
    _dispatch_to: (
        {"destination": Call(print)},
        {"destination": ["host:9092", None, print, Call], "timeout": [INF, None, *LIMIT]},
        set(),
    ),
    PostgresStore: (
        {"dsn": "host=nowhere"},
        {
            "dsn": TEXT,
            "schema": [None, *TEXT],
            "on_step": CALLED,
            "auto_migrate": FLAG,
            "filter_memory": [None, *SIZE],
            "password": ["secret", 5],
        },
        set(),
    ),
    DeltaStore: (
        {"path": "/nowhere/state"},
        {
            "path": [None, *TEXT],
            "tables": [*MAPS, {"a": 5}, {"a": ""}],
            "storage_options": [*MAPS, {"a": 5}, {"a": None}, dict, lambda a: {}],
            "on_step": CALLED,
            "engine": ["deltalake", None],
            "keys_folder": TEXT,
        },
        set(),
    ),
    Retry: (
        {},
        {
            "attempts": [None, *COUNT],
            "first": [INF, *TIME],
            "longest": [INF, *TIME],
            "total": [INF, None, *TIME],
            "later": [None, 60, "1m", [0], [INF], [-1], ["1m"]],
        },
        set(),
    ),
    Budget: (
        {},
        {kind.lower(): SHARES for kind in WATCHED},
        set(),
    ),
    ReprocessOptions: (
        {},
        {
            "by": [None, *TEXT],
            "reason": [5, b"a"],
            "limit": SIZE,
            "rate": [0, -1, NAN, INF, "1/s", True, DAY],
            "stop_after": [None, *COUNT],
            "skip_missing": FLAG,
            "on_progress": CALLED,
            "sleep": CALLED,
        },
        set(),
    ),
    Columns: (
        {"topic": "t", "partition": "p", "sequence_number": "n"},
        dict.fromkeys(inspect.signature(Columns).parameters, TEXT),
        set(),
    ),
    Patience: ({}, {"attempts": COUNT, "first": [INF, *TIME], "most": [INF, *TIME]}, set()),
    Call: ({}, {"sender": CALLED}, set()),
    Dispatcher: (
        {"outbox": None, "destination": Call(print)},
        {"topics": ["mails", [5], [""], None], "blocking": FLAG, "limit": COUNT, "workers": COUNT, "on_step": CALLED},
        {"outbox", "destination", "patience", "clock"},
    ),
    ExactlyOnce: (
        {"outbox": None, "broker": None},
        {"topics": ["mails", [5]], "blocking": FLAG, "limit": COUNT, "on_step": CALLED},
        {"outbox", "broker"},
    ),
    Publisher: (
        {"group": "g", "store": STORE, "to": None},
        {
            "partition_by": ["hash", None],
            "max_events": COUNT,
            "max_bytes": COUNT,
            "max_outage": TIME,
            "resend_within": AGE,
            "on_step": CALLED,
        },
        {"group", "store", "to"},
    ),
    kafka.Broker: ({"servers": "host:9092"}, {"servers": TEXT, "settings": MAPS, "timeout": [INF, *LIMIT]}, set()),
    kafka.Topics: ({"broker": "host:9092"}, {"broker": TEXT, "settings": MAPS, "timeout": [INF, *LIMIT]}, set()),
    kafka.TransactionalTopics: (
        {"broker": "host:9092", "name": "a"},
        {"broker": TEXT, "name": TEXT, "settings": MAPS, "timeout": [INF, *LIMIT]},
        set(),
    ),
    kafka.log_reader: (
        {"broker": "host:9092"},
        {"broker": TEXT, "settings": MAPS, "isolation": ["committed", None], "headers": FLAG, "arrow": FLAG},
        set(),
    ),
    _runner: (
        {},
        {
            "hub": TEXT,
            "group": [None, *TEXT],
            "start": ["first", 5, dt.datetime(2026, 1, 1), None],
            "max_events": COUNT,
            "max_bytes": COUNT,
            "max_wait": TIME,
            "prefetch": COUNT,
            "balance_every": LIMIT,
            "expire_after": LIMIT,
        },
        {"consumer", "connection", "stop", "ownership", "client"},
    ),
    Receive: ({}, {"prefetch": COUNT, "timeout": LIMIT, "level": SIZE, "fail_on_data_loss": FLAG}, set()),
    eventhub.log_reader: (
        {"connection": "Endpoint=sb://nowhere/", "hub": "h"},
        {"hub": TEXT, "group": [None, *TEXT], "timeout": LIMIT, "arrow": FLAG},
        {"connection"},
    ),
    eventhub.Sender: ({"connection": "Endpoint=sb://nowhere/", "hub": "h"}, {"hub": TEXT, "timeout": LIMIT}, {"connection", "client"}),
    eventhub.Connection: (
        {"namespace": "n", "hub": "h"},
        {"namespace": TEXT, "hub": [None, *TEXT], "group": [None, *TEXT], "websocket": FLAG, "tls": FLAG},
        {"secret", "credential"},
    ),
    registry.Confluent: ({"url": "http://r"}, {"user": TEXT, "password": TEXT, "token": TEXT, "timeout": LIMIT}, {"url"}),
    registry.Azure: ({"namespace": "n", "credential": object}, {"credential": CALLED, "timeout": LIMIT}, {"namespace"}),
}

_SIGNED = {
    _runner: eventhub.run_async,
    _foreach: Consumer.foreach,
    _foreach_arrow: Consumer.foreach_arrow,
    _dispatch_to: Consumer.dispatch_to,
}

BAD = [(made, name) for made, (_, cases, _) in SETTINGS.items() for name in cases]


def _label(value: Any) -> str:
    return getattr(value, "__name__", "").strip("_") or repr(value)[:20]


@pytest.mark.parametrize("made", SETTINGS, ids=_label)
def test_every_setting_has_a_case_of_a_bad_value(made: Callable[..., Any]) -> None:
    """Who adds a keyword says here what it must not be: a setting that nobody checks is found when something has gone wrong."""
    _, cases, others = SETTINGS[made]
    parameters = set(inspect.signature(_SIGNED.get(made, made)).parameters) - {"self"}
    assert set(cases) | others == parameters
    assert all(cases.values())


@pytest.mark.parametrize(("made", "name"), BAD, ids=_label)
def test_a_bad_value_of_a_setting_is_refused_where_it_is_given(made: Callable[..., Any], name: str) -> None:
    """The error names the setting, the value's type, what is expected and an example, before anything connects."""
    needed, cases, _ = SETTINGS[made]
    asked = "servers" if name == "broker" else name
    for value in cases[name]:
        with pytest.raises(ConfigError, match=rf"{asked} is .*\b{type(value).__name__}\b.*it takes .*For example: (\w+\()?{asked}="):
            made(**{**needed, name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"failure": FailurePolicy(max_outage=INF), "takeover": Takeover(after=0), "limits": Limits(max_body=0)},
        {
            "failure": FailurePolicy(max_outage=5, handler_timeout=np.int64(3)),
            "takeover": Takeover(after=np.float64(1.5)),
            "limits": Limits(max_events_per_transaction=np.int32(5)),
        },
        {"limits": Limits(retention=dt.timedelta(0), reprocess_within=0)},
        {"idempotence_key": ["data.id", "data.line"], "payload": ("data.amount",), "sequence_key": "data.id"},
        {
            "decode": lambda column: column,
            "failure": FailurePolicy(errors=[(lambda error: True, ErrorClass.SYSTEMIC)], budget=None, on_parked=print, letters_to="dead"),
            "on_batch": print,
        },
        {
            "decode": decode.json(pa.schema([("id", pa.string())])),
            "incarnation": lambda source, topics: {},
            "positions": Columns("t", "p", "n"),
        },
    ],
)
def test_values_that_make_sense_are_taken(settings: dict[str, Any]) -> None:
    """Numbers of numpy, infinity where it means "for ever", zero where it means "at once", tuples and lists."""
    assert Consumer("a", STORE, **settings).name == "a"


def test_what_may_be_a_password_is_not_shown() -> None:
    """Neither a DSN nor options of an object store are in the error about them."""
    for made in (
        partial(PostgresStore, ["postgresql://me:secret@host"]),
        partial(DeltaStore, "/x", None, {"key": ["secret"]}),
        partial(kafka.Broker, "host:9092", ["secret"]),
        partial(registry.Confluent, "http://r", "me", ["secret"]),
    ):
        with pytest.raises(ConfigError) as refused:
            made()
        assert "secret" not in str(refused.value) and "not shown" in str(refused.value)


@pytest.mark.parametrize("value", [Fraction(5), np.float32(5), np.int64(5), Decimal(5), 5, dt.timedelta(seconds=5)])
def test_a_duration_of_any_class_becomes_seconds(value: Any) -> None:
    """A duration is a timedelta or a number of seconds; timers take floats, and messages format them."""
    failure, takeover, limits = FailurePolicy(handler_timeout=value, max_outage=value), Takeover(after=value), Limits(retention=value)
    retry, patience, broker = (
        Retry(first=value, longest=value, total=value),
        Patience(first=value, most=value),
        kafka.Broker("h:1", timeout=value),
    )
    found = [
        failure.handler_timeout,
        failure.max_outage,
        takeover.after,
        limits.retention,
        retry.first,
        retry.longest,
        retry.total,
        patience.first,
        patience.most,
    ]
    found += [broker.timeout, kafka.Topics(broker, timeout=value).timeout, kafka.TransactionalTopics(broker, "a", timeout=value).timeout]
    found += [registry.Confluent("http://r", timeout=value).timeout, registry.Azure("n", object, timeout=value).timeout]
    found += [Receive(timeout=value).timeout, eventhub.Sender(HUB, timeout=value).timeout]
    found += [Publisher("g", STORE, None, max_outage=value)._limits.max_outage]  # type: ignore[arg-type]
    assert {type(number) for number in found} == {float} and set(found) == {5.0}


@pytest.mark.parametrize("value", [30 * 86_400, dt.timedelta(days=30)])
def test_an_age_is_a_timedelta_or_seconds(value: Any) -> None:
    """As every duration; and a number with a fraction that is no duration is kept as a float, too."""
    assert Publisher("g", STORE, None, resend_within=value)._limits.resend_within == dt.timedelta(days=30)  # type: ignore[arg-type]
    assert type(ReprocessOptions(by="ann", rate=Decimal(5)).rate) is float


@pytest.mark.parametrize("value", [Decimal("NaN"), Decimal("sNaN"), Decimal(-1), np.bool_(True), True, 1j, None, WEEK])
def test_what_is_no_number_of_seconds_is_refused(value: Any) -> None:
    """A time is a number: what cannot be waited for is told at once."""
    with pytest.raises(
        ConfigError,
        match=r"Takeover\.after is .* a timedelta, or seconds, a number from 0 on, at most 316,224,000\. .* Takeover\(after=60\.0\)\.",
    ):
        Takeover(after=value)


def test_a_consumer_has_at_most_sixteen_keywords() -> None:
    """A signature that fits on a screen: what belongs together is in a group."""
    keywords = [p for p in inspect.signature(Consumer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert len(keywords) <= 16
    for group in (FailurePolicy, Takeover, Limits):
        made = group()
        assert hash(made) == hash(group()) and made == group()
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.bisect = False  # type: ignore[union-attr]


def test_letters_may_not_be_older_than_reservations() -> None:
    """A duplicate that comes after its reservation was purged would have its effect twice; refused, whatever the durations are given as."""
    with pytest.raises(ConfigError, match=r"reprocess_within=.* 30 days.*retention=.* 7 days"):
        Limits(retention=dt.timedelta(days=7), reprocess_within=30 * 86_400)


@pytest.mark.parametrize(
    ("name", "setting"),
    [each for table in (FAILURE_POLICY, RETRY, BUDGET, TAKEOVER, LIMITS, DELTA_STORE, POSTGRES_STORE) for each in table.items()],
)
def test_the_example_in_an_error_can_be_typed_as_it_stands(name: str, setting: Setting) -> None:
    """With the names of `dedup` and timedelta it is a value that the setting takes."""
    known = {"Budget": Budget, "ErrorClass": ErrorClass, "Mask": Mask, "Retry": Retry, "timedelta": dt.timedelta}
    assert setting.fits(eval(setting.example, known)), name


def test_a_table_of_the_store_that_is_no_path_is_told_by_name() -> None:
    """The error names the argument, its value and what it takes."""
    with pytest.raises(ConfigError, match=r"tables is \{'x': 3\} \(dict\); it takes sinks: name -> path, a dict.*tables=\{"):
        DeltaStore("/nowhere", tables={"x": 3})  # type: ignore[dict-item]
