"""A place whose first event was decided 90 days ago."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from fixtures.fix_postgres import run
from kit.clock import showing
from kit.orders import batch, consumer, event
from kit.places import Place, PostgresPlace

MONTH = dt.timedelta(days=30)


def now() -> dt.datetime:
    """With the zone."""
    return dt.datetime.now(dt.UTC)


def months_later(place: PostgresPlace) -> None:
    """What was decided until now was decided 90 days ago."""
    run(place.url, "update dedup.batch set committed_at = committed_at - interval '90 days'")
    earlier = ", ".join(f"{name} = {name} - interval '90 days'" for name in ("created_at", "closed_at"))
    run(place.url, f"update dedup.reservation_generation set {earlier} where closed_at is not null")
    run(place.url, "update dedup.checkpoint set enqueued_time = enqueued_time - interval '90 days'")


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
        patched.setattr("dedup.delta.transaction.dt", showing(lambda tz: earlier))
        deliver(place, 0, "a", earlier, **settings)
