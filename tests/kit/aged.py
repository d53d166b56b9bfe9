"""A place whose first event was decided 90 days ago."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from dedup import Consumer
from kit.clock import showing
from kit.orders import batch, consumer, event
from kit.pg_run import run
from kit.places import Place, PostgresPlace

MONTH = dt.timedelta(days=30)

HERE = "database = (select oid from pg_database where datname = current_database())"
ADVISORY = f"select count(*) from pg_locks where locktype = 'advisory' and {HERE}"
"""Advisory locks of this database: other tests use the server at the same time."""


def now() -> dt.datetime:
    """With the zone."""
    return dt.datetime.now(dt.UTC)


def months_later(place: PostgresPlace) -> None:
    """What was decided until now was decided 90 days ago."""
    run(place.url, "update dedup.batch set committed_at = committed_at - interval '90 days'")
    earlier = ", ".join(f"{name} = {name} - interval '90 days'" for name in ("created_at", "closed_at"))
    run(place.url, f"update dedup.reservation_generation set {earlier} where closed_at is not null")
    run(place.url, "update dedup.checkpoint set enqueued_time = enqueued_time - interval '90 days'")


def turned(made: Consumer) -> None:
    """The turn of the upkeep that its last batch has begun is over."""
    assert made._upkeep is not None and made._upkeep._thread is not None
    made._upkeep._thread.join(60)
    assert not made._upkeep._thread.is_alive()


def deliver(place: Place, number: int, id: str, time: dt.datetime | None = None, **settings: Any) -> None:
    """One event, logged at that time, to a new process."""
    consumer(place.store(), **settings)(batch(event(number, id, enqueued_time=time or now())), number)


def age(place: Place, **settings: Any) -> None:
    """Let the first event be decided 90 days ago."""
    if isinstance(place, PostgresPlace):
        deliver(place, 0, "a", **settings)
        store: Any = place.store()
        store.rotate_reservations()
        months_later(place)
        return
    earlier = now() - dt.timedelta(days=90)
    with pytest.MonkeyPatch.context() as patched:
        for module in ("transaction", "epoch", "store"):
            patched.setattr(f"dedup.delta.{module}.dt", showing(lambda tz: earlier))
        deliver(place, 0, "a", earlier, **settings)
