"""Upkeep on Delta beside a stream: its turn between two batches, a process that dies in it, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake.exceptions import CommitFailedError

from checkpoint.errors import CommitConflict, ConfigError, StoreUnavailable
from dedup import DeltaStore
from dedup.delta import ledger_log, outbox, upkeep
from dedup.delta.engine import DeltaRs
from kit.aged import MONTH, age, deliver, now, turned
from kit.orders import assert_proven, batch, consumer, event, ids, orders, write_orders
from kit.outgoing import Receiver, dispatcher, publisher
from kit.paths import environment
from kit.places import DeltaPlace

OWN = {"retention": MONTH, "upkeep": True}

CHILD = """
import sys, time
from dedup.delta.ledger import Ledger
from kit.aged import MONTH, now
from kit.orders import batch, consumer, event
from kit.places import DeltaPlace
def hang(*_):
    print("hangs", flush=True)
    time.sleep(1000)
Ledger.drop_reservations = hang
made = consumer(DeltaPlace(sys.argv[1]).store(), retention=MONTH, upkeep=True)
made(batch(event(1, "b", enqueued_time=now())), 1)
made._upkeep._thread.join()
"""


@pytest.fixture
def aged(tmp_path: Path) -> DeltaPlace:
    """`shop` has decided its first event 90 days ago."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    age(place)
    return place


def test_a_process_that_dies_in_its_upkeep_leaves_nothing_behind(aged: DeltaPlace) -> None:
    """Killed after the purge was decided, before its rows went: the key is forgotten, and the next process drops the rows."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(aged.where)], env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "hangs\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    deliver(aged, 2, "a")
    assert sorted(ids(aged.read())) == ["a", "a", "b"]
    made = consumer(aged.store(), **OWN)
    made(batch(event(3, "b", enqueued_time=now())), 3)
    turned(made)
    store: Any = aged.store()
    since = store.reserved_since("shop")
    assert since is not None and since > now() - MONTH
    assert sorted(ids(aged.read())) == ["a", "a", "b"]
    assert_proven(store)


def test_a_purge_has_its_turn_between_two_batches(aged: DeltaPlace) -> None:
    """It waits for the handler that runs; the batch is not planned again for it."""
    purged, calls = threading.Event(), list[bool]()
    other: Any = aged.store()

    def forget() -> None:
        other.forget("shop", (now() - MONTH).date(), by="test", although_behind=True)
        purged.set()

    made = consumer(aged.store())
    made._handler = None

    @made.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        """While it runs, a purge is asked for."""
        thread.start()
        calls.append(purged.wait(3))
        write_orders(rows, tx)

    thread = threading.Thread(target=forget)
    assert made(batch(event(1, "b", enqueued_time=now())), 1).processed == 1
    thread.join(60)
    assert calls == [False] and purged.is_set()
    assert aged.store().reserved("shop") == 1


def test_a_store_where_spark_commits_has_no_upkeep_of_its_own(tmp_path: Path) -> None:
    """It is refused when the consumer is made, and the message names the command."""
    with pytest.raises(ConfigError, match="dedup upkeep --retention 30d --yes"):
        consumer(DeltaStore(str(tmp_path / "state"), engine="spark"), **OWN)


def test_a_stop_lets_no_further_portion_begin(aged: DeltaPlace) -> None:
    """What is decided stays decided; files that nobody needs wait for another turn."""
    turn: Any = aged.store().upkeep_turn("shop", MONTH)
    deliver(aged, 1, "b")
    portions = turn.portions()
    assert next(portions) == "forgot 1 reservations"
    turn.stop()
    assert list(portions) == []


def test_a_turn_with_nothing_to_forget_reads_neither_the_log_nor_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one every ten minutes, and both may be larger than memory."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    publisher(place.store())(batch(*orders(range(4))), 0)
    dispatcher(place, Receiver()).once()
    for where, name in ((ledger_log, "reached"), (outbox, "OutboxSnapshot")):
        monkeypatch.setattr(where, name, lambda *_: pytest.fail("it reads them"))
    turn: Any = place.store().upkeep_turn("shop", MONTH)
    assert list(turn.portions()) == []


@pytest.mark.full
def test_old_messages_are_looked_for_once_in_a_part_of_the_retention(aged: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look may read all of them: of a month it is one a day, however often there is a turn."""
    clock, looks = [1000.0], list[float]()
    monkeypatch.setattr("dedup.delta.tending.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(outbox.DeltaOutbox, "purge", lambda *_: looks.append(clock[0]) or 0)
    store: Any = aged.store()
    for _ in range(6):
        list(store.upkeep_turn("shop", MONTH).portions())
        clock[0] += 43_200
    assert looks == [1000 + 86_400 * day for day in range(3)]


def test_a_purge_that_lost_the_race_for_its_commit_is_no_outage(aged: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage answers; the key is forgotten, and the next purge drops its row."""
    store: Any = aged.store()
    with monkeypatch.context() as patched:
        patched.setattr(DeltaRs, "delete", lambda *_: _raise(CommitFailedError("Failed to commit transaction: 15")))
        with pytest.raises(CommitConflict, match="The next purge drops them"):
            store.forget("shop", (now() - MONTH).date(), by="test", although_behind=True)
    assert aged.store().reserved("shop") == 0
    assert store.forget("shop", (now() - MONTH).date(), by="test", although_behind=True).count == 1
    assert store.reserved_since("shop") is None


def test_a_storage_that_lists_no_files_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of staged rows, as of all other files: a plain OSError would end what goes on past a consumer."""
    away = SimpleNamespace(get_file_info=lambda _: _raise(OSError("away")))
    monkeypatch.setattr(upkeep, "filesystem", lambda *_: away)
    with pytest.raises(StoreUnavailable, match="away"):
        upkeep.clear_staged(str(tmp_path), None, "shop", (), now())


def _raise(error: Exception) -> None:
    raise error
