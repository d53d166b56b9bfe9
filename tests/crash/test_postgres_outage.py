"""The database itself goes away: killed in the middle of a batch, and down for as long as fifty batches take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import StoreUnavailable
from kit import pg_server
from kit.orders import assert_proven, batch, consumer, ids, letters, orders, write_orders
from kit.places import PostgresPlace

pytestmark = [pytest.mark.postgres, pytest.mark.crash]

EVENTS, BEFORE, AFTER = 20, 5, 10
"""Events a batch, batches until the database goes away, and batches from then on."""

MOST_GROWN = 64 * 1024 * 1024
"""Bytes that an outage may leave behind."""


@pytest.fixture
def server() -> Iterator[pg_server.Server]:
    """A server of the test's own, which it may kill."""
    try:
        with pg_server.running_server() as started:
            yield started
    except pg_server.NoPostgres as missing:
        pytest.skip(str(missing))


def numbered(n: int) -> Any:
    """The events of batch `n`."""
    return batch(*orders(range(EVENTS * n, EVENTS * (n + 1))))


def killing(server: pg_server.Server) -> tuple[Any, threading.Event]:
    """A handler during whose first run the database is killed, as if its machine had failed; and whether that has happened."""
    down = threading.Event()

    def handler(rows: Any, tx: Any) -> None:
        if not down.is_set():
            server.kill()
            down.set()
        write_orders(rows, tx)

    return handler, down


@pytest.mark.full
def test_a_database_that_is_down_for_fifty_batches_parks_nothing(server: pg_server.Server) -> None:
    """The batch in hand is tried until the database is back, then every event is written once, and none became a letter."""
    place = PostgresPlace(server.dsn)
    place.create_sink()
    run = consumer(place.store(), max_outage=300.0)
    begun = time.monotonic()
    for n in range(BEFORE):
        run(numbered(n), n)
    length, memory = 50 * (time.monotonic() - begun) / BEFORE, _memory()
    run._handler, down = killing(server)
    with ThreadPoolExecutor(1) as stream:
        reports = [stream.submit(run, numbered(n), n) for n in range(BEFORE, BEFORE + AFTER)]
        assert down.wait(60)
        time.sleep(length)
        server.start()  # here: it ends with the thread that started it
        assert [report.result().processed for report in reports] == [EVENTS] * AFTER
    assert _memory() < memory + MOST_GROWN, "what an outage leaves in memory does not grow with it"
    assert letters(place.store()) == []
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(EVENTS * (BEFORE + AFTER)))
    assert_proven(place.store())


def _memory() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.full
def test_patience_with_a_database_that_stays_away_ends_with_one_error(server: pg_server.Server) -> None:
    """Without patience the batch ends with StoreUnavailable; the same batch passes in a new process once the database is back."""
    place = PostgresPlace(server.dsn)
    place.create_sink()
    run = consumer(place.store(), max_outage=0.0)
    run(numbered(0), 0)
    run._handler, _ = killing(server)
    with pytest.raises(StoreUnavailable):
        run(numbered(1), 1)
    server.start()
    assert len(place.read()) == EVENTS
    assert consumer(place.store())(numbered(1), 1).processed == EVENTS
    assert letters(place.store()) == []
    assert len(place.read()) == 2 * EVENTS
    assert_proven(place.store())


@pytest.mark.full
def test_a_statement_that_is_cancelled_is_tried_again(server: pg_server.Server) -> None:
    """A statement time-out, or somebody's pg_cancel_backend, in the COPY into the sink: the batch is tried again and written once."""
    place = PostgresPlace(server.dsn)
    place.create_sink()
    place.execute("""
        create sequence tries;
        create function cancel_twice() returns trigger language plpgsql as $$
        begin
            if nextval('tries') <= 2 then
                perform pg_cancel_backend(pg_backend_pid()), pg_sleep(5);
            end if;
            return null;
        end $$;
        create trigger cancelling before insert on orders for each statement execute function cancel_twice();
    """)
    assert consumer(place.store(), max_outage=60.0)(batch(*orders(range(EVENTS))), 0).processed == EVENTS
    assert place.execute("select last_value from tries")[0][0] == 3
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(EVENTS))
    assert letters(place.store()) == []
