"""The database fails over to an older copy of itself: its last transactions are gone, and nobody told the consumer.

The older copy is the server's folder as it was some batches ago, started in its place on the same port: what a promoted replica is that had
not received the last transactions.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from checkpoint import changes
from checkpoint.errors import PartitionLost, StoreRestored, StoreUnavailable
from checkpoint.position import Partition
from dedup.pipeline.member import Member
from kit import pg_server
from kit.orders import assert_proven, batch, consumer, ids, letters, orders
from kit.pg_help import keep_copy
from kit.places import PostgresPlace

pytestmark = [pytest.mark.postgres, pytest.mark.crash]

EVENTS = 20


@pytest.fixture
def server() -> Iterator[pg_server.Server]:
    """A server of the test's own."""
    try:
        with pg_server.running_server() as started:
            yield started
    except pg_server.NoPostgres as missing:
        pytest.skip(str(missing))


@pytest.fixture
def place(server: pg_server.Server) -> PostgresPlace:
    """In that server, with the sink `orders`."""
    made = PostgresPlace(server.dsn)
    made.create_sink()
    return made


def numbered(n: int) -> Any:
    """The events of batch `n`."""
    return batch(*orders(range(EVENTS * n, EVENTS * (n + 1))))


def check(place: PostgresPlace, batches: int) -> None:
    """Every event of so many batches is in the sink once, none is a letter, and the tables prove themselves."""
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(EVENTS * batches))
    assert letters(place.store()) == []
    assert_proven(place.store())


def test_a_failover_to_an_older_copy_stops_the_query_until_a_person_accepts_it(server: pg_server.Server, place: PostgresPlace) -> None:
    """No letter, no commit on top of the older state; accepted, and read again from its checkpoint, every event is there once."""
    run = consumer(place.store(), max_outage=60.0)
    for n in range(3):
        run(numbered(n), n)
    fail_over = keep_copy(server)
    for n in range(3, 6):
        run(numbered(n), n)
    fail_over()
    with pytest.raises(StoreRestored, match="accept-restore"):
        run(numbered(6), 6)
    with pytest.raises(StoreRestored, match="accept-restore"):
        consumer(place.store())(numbered(6), 6)  # nor a new process
    check(place, 3)
    place.store().amend("shop", changes.accept_restore, by="ann", reason="failed over")
    again = consumer(place.store(), query="after")
    for n in range(3, 8):  # a new query begins at the checkpoint
        again(numbered(n), n - 3)
    check(place, 8)


def become_standby(server: pg_server.Server) -> None:
    """The server starts again as one that only reads, until it is promoted."""
    server.stop()
    signal = server.data / "standby.signal"
    signal.touch()
    shutil.chown(signal, server.data.owner())  # it removes the file by itself
    server.start()


@pytest.mark.full
def test_a_server_that_only_reads_until_it_is_promoted_is_waited_for(server: pg_server.Server, place: PostgresPlace) -> None:
    """A failover leads to the standby before it is promoted: the running job and a new one try their batch until it is, and say why."""
    run = consumer(place.store(), max_outage=60.0)
    run(numbered(0), 0)
    for n, job in ((1, run), (2, consumer(place.store(), max_outage=60.0))):
        become_standby(server)
        with pytest.raises(StoreUnavailable, match="standby"):
            consumer(place.store())(numbered(n), n)
        promotion = threading.Timer(1.0, place.execute, ["SELECT pg_promote()"])
        promotion.start()
        job(numbered(n), n)
        promotion.join()
    check(place, 3)


@pytest.mark.full
def test_a_session_that_may_write_again_takes_the_place_of_one_that_may_not(place: PostgresPlace) -> None:
    """Sessions keep what the role said when they began: one that only reads is not kept."""
    read_only = "ALTER ROLE postgres SET default_transaction_read_only = "
    run = consumer(place.store(), max_outage=60.0)
    place.execute(read_only + "on")
    writer = PostgresPlace(make_conninfo(place.url, options="-c default_transaction_read_only=off"))
    change = threading.Timer(1.0, writer.execute, [read_only + "off"])
    change.start()
    run(numbered(0), 0)
    change.join()
    check(place, 1)


@pytest.mark.full
def test_a_failover_between_two_chunks_of_a_batch_runs_the_whole_batch_again(server: pg_server.Server, place: PostgresPlace) -> None:
    """The chunk that the older copy does not know is not left behind the checkpoint of the next one."""
    fail_over: list[Callable[[], None]] = []

    def on_step(name: str) -> None:
        if name == "committed" and fail_over:
            fail_over.pop()()

    run = consumer(place.store(on_step=on_step), max_events_per_transaction=8, max_outage=60.0)
    run(numbered(0), 0)
    fail_over.append(keep_copy(server))
    run(numbered(1), 1)
    assert not fail_over
    check(place, 2)


@pytest.mark.full
@pytest.mark.parametrize("query", ["q", pytest.param(None, marks=pytest.mark.full)], ids=["a query that is known", "a query without an id"])
def test_a_failover_after_the_guard_and_before_the_transaction_is_noticed(
    server: pg_server.Server, place: PostgresPlace, query: str | None
) -> None:
    """The state that a batch was planned on is the state that it commits on, or one that is not older."""
    fail_over: list[Callable[[], None]] = []

    def witness(source: str, topics: list[str]) -> dict[str, str]:
        if fail_over:
            fail_over.pop()()
        return dict.fromkeys(topics, "one")

    run = consumer(place.store(), incarnation=witness, query=query, max_outage=60.0)
    run(numbered(0), 0)
    lose = keep_copy(server)
    run(numbered(1), 1)
    fail_over.append(lose)
    with pytest.raises(StoreRestored, match="accept-restore"):
        run(numbered(2), 2)
    check(place, 1)


@pytest.mark.full
def test_a_runner_reads_again_what_the_older_copy_does_not_know(server: pg_server.Server, place: PostgresPlace) -> None:
    """Its partition counts as lost, so it is claimed again and read from the checkpoint: nothing lies behind it undone."""
    partition = Partition("broker", "orders", 0)
    member = Member(consumer(place.store(), query=None, max_outage=60.0).job())
    member.join()
    assignment = member.claim(partition)
    member.process(assignment, numbered(0))
    fail_over = keep_copy(server)
    member.process(assignment, numbered(1))
    fail_over()
    with pytest.raises(PartitionLost, match="older"):
        member.process(assignment, numbered(2))
    check(place, 1)
    again = member.claim(partition)
    for n in (1, 2):
        member.process(again, numbered(n))
    check(place, 3)
