"""State that released versions have written: this version goes on with it, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from checkpoint import changes
from dedup import Selection, reprocess
from dedup.core.messages import Chosen
from kit import kept_state
from kit.orders import assert_proven, batch, event, flatten, letters, orders
from kit.people import ANN
from kit.places import Place

KEPT = sorted(kept_state.DATA.glob("state-*"))


@pytest.fixture(params=[pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("delta", "postgres")])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the store."""
    return str(request.param)


@pytest.fixture(params=KEPT, ids=lambda folder: str(folder.name))
def kept(request: pytest.FixtureRequest, kind: str) -> Iterator[Place]:
    """Where the state is, as it was left. What a dump brings counts as restored until a person accepts it."""
    if kind == "delta":
        with kept_state.the_folder(request.param / "delta.tar.gz") as place:
            yield place
        return
    place = kept_state.load(request.getfixturevalue("empty_postgres"), request.param / "postgres.sql")
    place.store().migrate()
    place.store().amend("shop", changes.accept_restore, **ANN)
    yield place


def mended(rows: pa.Table, tx: Any) -> None:
    """The handler, without its rule."""
    tx.write(flatten(rows), "orders")


def test_state_of_a_released_version_is_gone_on_with(kept: Place) -> None:
    """What was decided is known, letters are there and can be reprocessed, messages wait: and the tables prove it before and after."""
    ids = ["o6", "o9", "p0-0", "p0-1", "p0-2", "p0-3", "p0-4", "p1-0", "p1-1", "p1-2", "p1-3"]
    store = kept.store()
    assert [row["id"] for row in kept.read()] == ids[2:] == [row["id"] for row in kept.read("latest")]
    assert sorted((r["kind"], r["status"]) for r in letters(store)) == [
        ("KEY_CONFLICT", "BLOCKED"),
        ("REJECTED", "OPEN"),
        ("REJECTED", "OPEN"),
        ("UNDECODABLE", "DISCARDED"),
    ]
    assert store.outbox("shop").lag().waiting == 9
    assert_proven(store)
    run = kept_state.consumer(kept, "q3")
    again = [event(6, "o6", -1), event(9, "o9", -9), event(20, "p1-3", 3), event(21, "new", 1)]
    report = run(batch(*orders(range(5)), *orders(range(4), partition=1), *again), 0)
    assert (report.processed, report.duplicates, report.dead_lettered) == (1, 1, 0)
    done = reprocess(Selection(), kept_state.consumer(kept, "q4", mended))
    assert (done.reprocessed, done.failed) == (2, 1), "another body under a key that is taken stays in conflict"
    assert Counter(row["id"] for row in kept.read()) == Counter([*ids, "new"])
    assert len(store.outbox("shop").entries(Chosen())) == 10
    assert_proven(store)
