"""Events and exceptions made to hurt: each ends as one letter or one clear stop, and the stream goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import BudgetExceeded
from deadletter.selection import Selection
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.options import ReprocessOptions
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.places import Place, PostgresPlace

SECRETS = {
    "hunter2": "cannot reach postgresql://bob:hunter2@db.example:5432/shop",
    "c2hhcmVkIHNlY3JldA==": "Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=all;SharedAccessKey=c2hhcmVkIHNlY3JldA==;EntityPath=h",
    "swordfish": "login failed: host=db user=bob password=swordfish",
    "eyJhbGciOi.eyJzdWIi.c2ln": "401 for Authorization: Bearer eyJhbGciOi.eyJzdWIi.c2ln",
}
"""Secret -> text of an exception that gives it away."""

LONG = "k" * 10_000
PROPERTIES: list[dict[str, Any]] = [{"key": "twice", "value": b"1"}, {"key": "twice", "value": b"2"}, {"key": "", "value": None}]
MANY = [{"key": f"h{n}", "value": bytes([n % 256])} for n in range(5_000)]
FIRST, LAST = -(2**63), 2**63 - 1


def order(id: str, **more: Any) -> bytes:
    """A body whose handler raises: it ends with an id that begins with `bad`."""
    return json.dumps({"id": id, "amount": 1, **more}).encode()


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "NUL in text": ("HANDLER_ERROR", {"body": order("bad\0nul"), "offset": "@\0", "properties": [{"key": "n\0ul", "value": b"\0"}]}),
    "invalid UTF-8": (
        "UNDECODABLE",
        {"body": b'{"id": "\xff\xfe\xc0"}', "key": b"\xff\x00", "properties": [{"key": "h", "value": b"\xff"}]},
    ),
    "after all time": ("HANDLER_ERROR", {"body": order("bad-late"), "enqueued_time": LAST}),
    "text that is no text": ("HANDLER_ERROR", {"body": order("bad \U0001f4a3 \u202e\u0007 \ufffe")}),
    "half a surrogate": ("UNDECODABLE", {"body": b'{"id": "bad\\ud800", "amount": 1}'}),
    "10 kB key": ("HANDLER_ERROR", {"body": order("bad" + LONG), "key": LONG.encode()}),
    "16 MB body": ("HANDLER_ERROR", {"body": order("bad-large", padding="x" * (16 * 1024 * 1024))}),
    "empty body": ("UNDECODABLE", {"body": b""}),
    "null body": ("NO_KEY", {"body": None}),
    "deep nesting": ("UNDECODABLE", {"body": b"[" * 100_000}),
    "5,000 headers": ("HANDLER_ERROR", {"body": order("bad-headers"), "properties": MANY}),
    "duplicate header names": ("HANDLER_ERROR", {"body": order("bad-names"), "properties": PROPERTIES}),
    "no header list": ("HANDLER_ERROR", {"body": order("bad-null"), "properties": None}),
    "before all time": ("HANDLER_ERROR", {"body": order("bad-early"), "enqueued_time": FIRST}),
    "year 12000": ("HANDLER_ERROR", {"body": order("bad-12000"), "enqueued_time": 316_500_000_000 * 1_000_000}),
}
"""What it is -> (kind of its letter, columns of the event). `make test` gives the first three alone, and all but the large one together."""


class Hostile(Exception):
    """Holds whatever an event holds."""


class PanicException(BaseException):
    """Named like what a library written in Rust raises where it gives up."""


class FunctionTimedOut(BaseException):
    """Named like what a library raises, past every `except Exception`, where a call takes too long."""


class Unspeakable(Exception):
    """Neither text nor pickle can be had of it."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.lock = lock

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def recursing(rows: pa.Table) -> None:
    """Never ends by itself."""
    recursing(rows)


def exits(_: pa.Table) -> None:
    """Wants to end the process."""
    sys.exit("bye")


def raises(error: Callable[[], BaseException]) -> Callable[[pa.Table], None]:
    """Raises this."""

    def act(_: pa.Table) -> None:
        raise error()

    return act


def when_bad(place: Place, act: Callable[[pa.Table], None], **settings: Any) -> Any:
    """A consumer that writes all orders, and then does this if one of them has an id that begins with `bad`."""
    run = consumer(place.store(), **settings)

    def handler(rows: pa.Table, tx: Any) -> None:
        flat = flatten(rows)
        tx.write(flat.set_column(0, "id", pc.replace_substring(flat["id"], "\0", "?")), "orders")  # PostgreSQL's text has no NUL
        if any(i.startswith("bad") for i in flat["id"].to_pylist()):
            act(rows)

    run._handler = handler
    return run


def of_its_event(rows: pa.Table) -> None:
    """An exception whose text holds everything that the rows hold."""
    bodies = b"".join(b or b"" for b in rows["body"].to_pylist())
    raise Hostile(f"\0 \ud800 {bodies!r} " + bodies[:100_000].decode("utf-8", "surrogateescape"), str(rows["properties"]))


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("what", of_which(3, HOSTILE))
def test_a_hostile_event_becomes_one_letter(place: Place, what: str) -> None:
    """It is parked with its exact bytes and headers, its neighbours pass, and once the handler is repaired it is reprocessed."""
    kind, columns = HOSTILE[what]
    bad = event(1, **columns)
    given = {**bad, "enqueued_time": None}
    rows = batch(event(0, "good"), given, event(2, "better"))
    if "enqueued_time" in columns:
        times = pa.array([0, columns["enqueued_time"], None], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        rows = rows.set_column(rows.schema.get_field_index("enqueued_time"), "enqueued_time", times)
    report = when_bad(place, of_its_event)(rows, 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    assert when_bad(place, of_its_event)(rows, 0).redelivered == 3
    (letter,) = letters(place.store())
    assert (letter["kind"], letter["status"], letter["sequence_number"]) == (kind, "OPEN", 1)
    assert letter["body"] == bad["body"] and letter["event_key"] == bad.get("key")
    headers = [(h["key"].replace("\0", "\u2400"), h["value"]) for h in bad["properties"]] if bad["properties"] is not None else None
    kept = letter["properties"]
    assert (None if kept is None else [(h["key"].replace("\0", "\u2400"), h["value"]) for h in kept]) == headers
    assert ids(place.read()) == ["better", "good"]
    assert when_bad(place, of_its_event)(batch(event(3, "next")), 1).processed == 1
    again = reprocess(Selection(), when_bad(place, lambda _: None), options=ReprocessOptions(stop_after=9))
    assert (again.reprocessed, again.failed) == ((1, 0) if kind == "HANDLER_ERROR" else (0, 1))
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(
    "act",
    of_which(
        3,
        [
            raises(lambda: Unspeakable(open)),
            exits,
            raises(asyncio.CancelledError),
            raises(lambda: Hostile(b"\xff\0", "\0\ud800", LONG, HOSTILE)),
            recursing,
            raises(PanicException),
            raises(FunctionTimedOut),
        ],
    ),
    ids=["unspeakable", "sys.exit", "cancelled", "text of everything", "recursion", "panic", "time-out"],
)
def test_a_hostile_exception_becomes_one_letter(place: Place, act: Callable[[pa.Table], None]) -> None:
    """Whatever the exception does when it is looked at, its event is parked and the others pass."""
    run = when_bad(place, act)
    report = run(batch(event(0, "a"), event(1, "bad"), event(2, "b")), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    (letter,) = letters(place.store())
    assert letter["error_type"] and letter["stack"] and letter["fingerprint"]
    assert all(len((letter[n] or "").encode()) <= 50_000 for n in ("error_message", "stack", "reason"))
    again = reprocess(Selection(), run)
    assert (again.failed, letters(place.store())[0]["attempts"]) == (1, 2)
    assert run(batch(event(3, "c")), 1).processed == 1
    assert_proven(place.store())


def test_an_interrupt_is_a_clear_stop(place: Place) -> None:
    """Ctrl-C in the handler ends the call at once; nothing of the batch is true, and the next call does all of it."""
    with pytest.raises(KeyboardInterrupt):
        when_bad(place, raises(KeyboardInterrupt))(batch(event(0, "a"), event(1, "bad")), 0)
    assert place.read() == [] and letters(place.store()) == []
    assert when_bad(place, lambda _: None)(batch(event(0, "a"), event(1, "bad")), 0).processed == 2
    assert_proven(place.store())


@pytest.mark.parametrize("secret", of_which(2, SECRETS))
def test_no_secret_of_an_exception_is_kept_or_logged(place: Place, secret: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not in the letter, not in its history after a retry and a reprocess, not in the log."""
    error = TimeoutError if secret == "hunter2" else Hostile

    def act(_: pa.Table) -> None:
        try:
            raise Hostile(SECRETS[secret])
        except Hostile as cause:
            raise error(SECRETS[secret]) from cause

    run = when_bad(place, act)
    run.on_failure = type(run.on_failure)(run.on_failure.retry, run.on_failure.budget, sleep=lambda _: None)
    with caplog.at_level(logging.DEBUG):
        run(batch(event(0, "a"), event(1, "bad")), 0)
        reprocess(Selection(), run)
    (letter,) = letters(place.store())
    past = place.store().history(letter["id"]).to_pylist()
    assert letter["attempts"] >= 2 and past
    assert secret not in str(letter) + str(past) and secret not in caplog.text


def test_a_topic_whose_every_body_is_undecodable_is_held_back(place: Place) -> None:
    """The first 99 are parked, as on a quiet topic; then a hundred in a row say that it is no single event's fault, and nothing more is."""
    run = consumer(place.store())
    bad = [event(n, body=b"\xff%d" % n) for n in range(200)]
    assert run(batch(*bad[:99]), 0).dead_lettered == 99
    with pytest.raises(BudgetExceeded, match="100 of 100 events in a row are UNDECODABLE"):
        run(batch(*bad[99:]), 1)
    assert {x["kind"] for x in letters(place.store())} == {"UNDECODABLE"} and len(letters(place.store())) == 99
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_quiet_topic_with_a_single_poison_event_goes_on(place: Place) -> None:
    """One event a batch, and the poison comes again under new positions: one letter, its repetitions are duplicates, the rest passes."""
    run = when_bad(place, raises(lambda: Hostile("poison")))
    reports = [run(batch(event(n, "bad" if n % 2 else f"good{n}")), n) for n in range(6)]
    assert [(r.processed, r.dead_lettered, r.duplicates) for r in reports] == [(1, 0, 0), (0, 1, 0), *[(1, 0, 0), (0, 0, 1)] * 2]
    assert len(letters(place.store())) == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_outage_of_fifty_batches_parks_nothing(place: Place) -> None:
    """Systemic errors of the handler and a sink that is away end each batch with nothing of it kept; afterwards all of them pass."""
    from checkpoint.errors import DedupError, StoreUnavailable

    def away(rows: pa.Table, tx: Any) -> None:
        raise MemoryError if away_by_memory[0] else StoreUnavailable("gone")

    away_by_memory = [True]
    run = consumer(place.store())
    run.on_failure = type(run.on_failure)(type(run.on_failure.retry)(attempts=1))
    good, run._handler = run._handler, away
    for number in range(50):
        away_by_memory[0] = number % 2 == 0
        with pytest.raises((MemoryError, DedupError)):
            run(batch(*orders(range(20))), 0)
    assert letters(place.store()) == [] and place.read() == [] and not place.store().head("shop").checkpoints
    run._handler = good
    assert run(batch(*orders(range(20))), 0).processed == 20
    assert_proven(place.store())


@pytest.mark.fast_on("postgres", "delta")
def test_hostile_events_in_one_batch_do_not_hide_each_other(place: Place) -> None:
    """All of them in one batch: one letter each, of its own kind, and none of them stops the good one."""
    names = [n for n in HOSTILE if n != "16 MB body"]
    plain = [event(n, **{k: v for k, v in HOSTILE[name][1].items() if k != "enqueued_time"}) for n, name in enumerate(names)]
    report = when_bad(place, of_its_event, budget=None)(batch(*plain, event(99, "good")), 0)
    assert (report.processed, report.dead_lettered) == (1, len(names))
    assert [x["kind"] for x in letters(place.store())] == [HOSTILE[name][0] for name in names]
    assert_proven(place.store())


def clash(dsn: str, connection: Any, state: str) -> None:
    """A real deadlock with another session, which PostgreSQL ends here; or the answer that a serialization failure has."""
    import psycopg

    if state == "40001":
        connection.execute("do $$ begin raise exception 'could not serialize access' using errcode = '40001'; end $$")
    connection.execute("set local deadlock_timeout = '10ms'")
    connection.execute("select from late where id = 'a' for update")
    with psycopg.connect(dsn) as other:
        other.execute("set deadlock_timeout = '1h'; select from late where id = 'b' for update")
        waiting = threading.Thread(target=lambda: other.execute("select from late where id = 'a' for update"))
        waiting.start()
        waits = "select exists (select from pg_locks where pid = %s and not granted)"
        while connection.execute(waits, [other.info.backend_pid]).fetchone() == (False,):
            time.sleep(0.001)  # PostgreSQL looks for a deadlock once a wait: nobody would find one that came into being after it
        try:
            connection.execute("select from late where id = 'b' for update")
        finally:
            released = threading.Timer(0.5, other.cancel)
            released.start()
            with contextlib.suppress(psycopg.Error):
                waiting.join()


def savepoint_swallows(connection: Any, clashing: Callable[[], None]) -> None:
    """The error ends with a savepoint of the handler's own, and the handler goes on."""
    with contextlib.suppress(Exception), connection.transaction():
        clashing()
    connection.execute("insert into late values ('c')")


def swallow(_connection: Any, clashing: Callable[[], None]) -> None:
    """The handler looks away."""
    with contextlib.suppress(Exception):
        clashing()


def blame(_connection: Any, clashing: Callable[[], None]) -> None:
    """The handler raises an error of its own, from which nobody can tell."""
    try:
        clashing()
    except Exception:  # noqa: BLE001 - this is what handlers do
        raise ValueError("a bad order") from None


DOING = {"let through": lambda _connection, clashing: clashing(), "swallowed": swallow, "savepoint": savepoint_swallows, "blamed": blame}


@pytest.mark.parametrize("doing", DOING)
@pytest.mark.parametrize("state", of_which(1, ["40P01", "40001"]))
def test_a_deadlock_starts_the_transaction_anew(postgres: str, state: str, doing: str, caplog: pytest.LogCaptureFixture) -> None:
    """PostgreSQL ends one of two transactions that wait for each other: whatever the handler does with the error, no letter is left."""
    place = PostgresPlace(postgres)
    place.create_sink()
    place.create_sink("late")
    place.execute("insert into late values ('a'), ('b')")
    run, runs = consumer(place.store()), []

    def handler(rows: pa.Table, tx: Any) -> None:
        tx.write(flatten(rows), "orders")
        runs.append(rows.num_rows)
        if len(runs) == 1:
            DOING[doing](tx.connection, lambda: clash(postgres, tx.connection, state))

    run._handler = handler
    assert run(batch(*orders(range(5)), event(5, "bad")), 0).processed == 6
    assert letters(place.store()) == [] and len(place.read()) == 6
    assert runs == [6, 6] and place.execute("select count(*) from late") == [(2,)], (
        "the handler has run anew, and its first run left nothing"
    )
    assert "planning again" in caplog.text
    assert_proven(place.store())


def test_a_lost_session_starts_the_transaction_anew_whatever_the_handler_does(postgres: str) -> None:
    """An administrator ends the session inside the handler: no event is blamed for it, and the batch passes on another connection."""
    place = PostgresPlace(postgres)
    place.create_sink()
    run, runs = consumer(place.store(), max_outage=30.0), []

    def handler(rows: pa.Table, tx: Any) -> None:
        tx.write(flatten(rows), "orders")
        runs.append(rows.num_rows)
        if len(runs) == 1:
            blame(tx.connection, lambda: tx.connection.execute("select pg_terminate_backend(pg_backend_pid())"))

    run._handler = handler
    assert run(batch(*orders(range(3))), 0).processed == 3
    assert letters(place.store()) == [] and len(place.read()) == 3 and runs == [3, 3]
    assert_proven(place.store())


def test_a_failed_statement_of_one_event_is_not_blamed_on_the_next_ones(postgres: str) -> None:
    """Handlers of single events share a transaction, where nothing works after an error until it is undone."""
    place = PostgresPlace(postgres)
    place.create_sink()
    place.execute("CREATE TABLE late (id text CHECK (id NOT IN ('p0-3', 'p0-8')))")
    run = consumer(place.store())
    run._handler = None

    @run.foreach(into="orders")
    def handle(one: Any, tx: Any) -> dict[str, Any]:
        tx.connection.execute("INSERT INTO late VALUES (%s)", [one.data["id"]])
        return dict(one.data)

    assert run(batch(*orders(range(10))), 0).dead_lettered == 2
    assert [x["idempotence_key"] for x in letters(place.store())] == ["p0-3", "p0-8"]
    assert len(place.read()) == 8 and place.execute("SELECT count(*) FROM late") == [(8,)]
    assert_proven(place.store())
