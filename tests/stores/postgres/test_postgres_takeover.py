"""Who may commit: takeovers of dead, silent, stopped and living instances, on real processes and sessions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from checkpoint.errors import Fenced, StillHeld
from checkpoint.head import Holder
from checkpoint.position import Partition
from dedup.postgres import PostgresStore
from kit.pg_help import WAITING, chunk, epoch, finish, holder, keys
from kit.pg_proxy import until
from kit.pg_run import run

CHILD = """
import json, sys, time
from pathlib import Path
from kit import pg_help
from dedup.postgres import PostgresStore
task = json.loads(sys.argv[1])
store = PostgresStore(task["dsn"])
number = store.take_epoch("shop", pg_help.holder(), takeover_after=5).epoch
with store.begin("shop", number) as tx:
    known = tx.reserve(pg_help.keys(range(task["keys"]))).num_rows
    Path(task["reached"]).touch()
    while not Path(task["resume"]).exists():
        time.sleep(0.02)
    pg_help.finish(tx, 0, task["keys"] - 1, reserved=task["keys"] - known)
"""


class Instance:
    """Another process that holds an open transaction."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.reached, self.resume, self._errors = folder / "reached", folder / "resume", folder / "errors"
        task = json.dumps({"dsn": dsn, "reached": str(self.reached), "resume": str(self.resume), "keys": 5})
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, "-c", CHILD, task], stderr=errors)
        until(lambda: self.reached.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors()

    def errors(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def instance(postgres: str, tmp_path: Path) -> Iterator[Instance]:
    PostgresStore(postgres).migrate()
    made = Instance(postgres, tmp_path)
    yield made
    made.kill()


@pytest.fixture
def store(postgres: str) -> PostgresStore:
    return PostgresStore(postgres)


def take(store: PostgresStore, who: Holder | None = None, **options: Any) -> tuple[int, list[tuple[float, str]]]:
    """The epoch, and what was told while waiting."""
    told: list[tuple[float, str]] = []
    head = store.take_epoch("shop", who or holder(), **{"takeover_after": 30.0, **options}, on_wait=lambda *what: told.append(what))
    return head.epoch, told


@pytest.mark.full
@pytest.mark.crash
def test_a_killed_process_is_taken_over_at_once(store: PostgresStore, instance: Instance) -> None:
    """Its session has ended or its process is gone: nobody waits the time-out, and its open transaction is undone."""
    instance.kill()
    number, told = take(store)
    assert number == 2 and told == []
    assert chunk(store, number, 0, 4) == 0


@pytest.mark.crash
def test_a_dead_process_on_this_host_is_taken_over_at_once_though_its_session_lives(store: PostgresStore, postgres: str) -> None:
    """The host knows that the process is gone even where a pooler keeps the session."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = holder()
    take(store, Holder(here.host, gone.pid, here.started.rpartition("/")[0] + "/1", "gone"))
    assert run(postgres, "select count(*) from pg_stat_activity a join dedup.heartbeat h on h.backend_pid = a.pid") == [(1,)]
    assert take(PostgresStore(postgres)) == (2, [])


@pytest.mark.full
@pytest.mark.crash
def test_a_stopped_process_is_taken_over_after_the_time_out_and_can_never_commit(store: PostgresStore, instance: Instance) -> None:
    """SIGSTOP keeps the locks: its session is ended. Continued, the old instance learns that it was fenced."""
    instance.process.send_signal(signal.SIGSTOP)
    number, told = take(store, takeover_after=1.0)
    assert number == 2 and told and f"process {instance.process.pid}" in told[0][1]
    assert chunk(store, number, 0, 4) == 0
    instance.resume.touch()
    instance.process.send_signal(signal.SIGCONT)
    assert instance.process.wait(60) != 0 and "dedup.Fenced" in instance.errors()
    assert store.head("shop").seq == 1


@pytest.mark.crash
def test_the_old_instances_next_statement_says_that_it_was_fenced(store: PostgresStore, postgres: str) -> None:
    """A session ended by a takeover is not an outage: the error is Fenced, in the middle of a chunk and at its commit."""
    for last_words in (lambda tx: tx.reserve(keys([1])), lambda tx: finish(tx, 0, 0)):
        old = PostgresStore(postgres)
        number = epoch(old)
        with pytest.raises(Fenced, match="Stop this instance"), old.begin("shop", number) as tx:
            tx.reserve(keys([0]))
            take(PostgresStore(postgres), force=True)
            last_words(tx)
    with pytest.raises(Fenced), old.begin("shop", number) as tx, tx.attempt():
        pass
    assert store.head("shop").seq == 0


@pytest.mark.full
def test_a_handlers_lost_session_is_fenced_too(postgres: str) -> None:
    """The handler's own statement meets the ended session first: the pipeline still learns of the takeover."""
    old = PostgresStore(postgres)
    number = epoch(old)
    with pytest.raises(Fenced), old.begin("shop", number) as tx, tx.attempt():
        take(PostgresStore(postgres), force=True)
        tx.connection.execute("select 1")


def test_a_silent_unknowable_holder_is_taken_over_after_the_time_out(store: PostgresStore, postgres: str) -> None:
    """Another host's process may live: it gets the whole time-out, and the wait is told about."""
    take(store, holder("elsewhere"))
    started = time.monotonic()
    number, told = take(PostgresStore(postgres), takeover_after=1.0)
    assert number == 2 and time.monotonic() - started >= 1.0
    assert 0.5 < told[0][0] <= 1.0 and "host elsewhere" in told[0][1]


def test_a_holder_that_shows_life_is_not_taken_over(store: PostgresStore, postgres: str) -> None:
    """Heartbeats alone keep it, for as long as anybody waits; the error says how to force it, and force works."""
    number, _ = take(store, holder("elsewhere"))
    newcomer = PostgresStore(postgres)
    with store.heartbeat("shop", number, every=0.1):
        with pytest.raises(StillHeld, match=r"host elsewhere, process \d+.*takeover=Takeover\(now=True\)"):
            take(newcomer, takeover_after=1.0)
        assert take(newcomer, force=True) == (2, [])


def test_commits_are_signs_of_life(store: PostgresStore, postgres: str) -> None:
    """An instance that commits is alive without any heartbeat: each wait begins anew."""
    number, _ = take(store, holder("elsewhere"))
    batches = iter(range(1000))

    def commit(seconds: float, who: str) -> None:
        batch = next(batches)
        chunk(store, number, batch, batch, batch_id=batch)

    with pytest.raises(StillHeld):
        PostgresStore(postgres).take_epoch("shop", holder(), takeover_after=0.5, on_wait=commit)


def test_the_same_run_takes_its_epoch_again_at_once(store: PostgresStore, postgres: str) -> None:
    """A consumer that is built anew in one run does not wait for itself."""
    me = holder("elsewhere")
    assert [take(store, me)[0], take(PostgresStore(postgres), me)[0]] == [1, 2]


def test_a_closed_store_gives_its_epoch_free(store: PostgresStore, postgres: str) -> None:
    """A clean stop ends the session, and the next instance begins at once, wherever the first one ran."""
    take(store, holder("elsewhere"))
    store.close()
    until(lambda: run(postgres, "select count(*) from pg_stat_activity a join dedup.heartbeat h on h.backend_pid = a.pid") == [(0,)])
    assert take(PostgresStore(postgres)) == (2, [])


def test_a_reconnected_instance_is_looked_for_in_its_new_session(store: PostgresStore, postgres: str) -> None:
    """A session lost between two chunks is replaced, and the holder does not count as gone."""
    number, _ = take(store, holder("elsewhere"))
    run(postgres, "select pg_terminate_backend(backend_pid) from dedup.heartbeat")
    chunk(store, number, 0, 0)
    sessions = (
        "select count(*) from pg_stat_activity a join dedup.heartbeat h on (h.backend_pid, h.backend_start) = (a.pid, a.backend_start)"
    )
    assert run(postgres, sessions) == [(1,)]
    _, told = take(PostgresStore(postgres), takeover_after=0.5)
    assert told


@pytest.mark.full
@pytest.mark.crash
def test_two_processes_want_the_same_keys_and_the_first_one_dies(store: PostgresStore, postgres: str, tmp_path: Path) -> None:
    """The second reserver waits for the first one's end and wins every key."""
    store.migrate()
    first = Instance(postgres, tmp_path)
    number = epoch(store, "other")
    command = [sys.executable, "-c", RESERVE, postgres, str(number)]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: run(postgres, WAITING) == [(1,)] or second.poll() is not None)
    first.kill()
    out, errors = second.communicate(timeout=60)
    assert out.strip() == "0", errors


@pytest.mark.crash
def test_two_processes_want_the_same_keys_and_the_first_one_commits(store: PostgresStore, postgres: str, tmp_path: Path) -> None:
    """The second reserver learns that the keys it waited for are taken, with their payload, and keeps the others."""
    store.migrate()
    first = Instance(postgres, tmp_path)
    number = epoch(store, "other")
    with store.begin("other", number) as tx, ThreadPoolExecutor(1) as later:
        later.submit(lambda: (until(lambda: run(postgres, WAITING) == [(1,)]), first.resume.touch()))
        known = tx.reserve(keys(range(3, 10), payload=1))
        assert sorted(known.to_pylist(), key=str) == sorted(keys([3, 4]).to_pylist(), key=str)
        finish(tx, 0, 6, reserved=5)
    assert first.process.wait(60) == 0
    assert store.problems("shop") == store.problems("other") == []


RESERVE = """
import sys
from kit import pg_help
from dedup.postgres import PostgresStore
store, number = PostgresStore(sys.argv[1]), int(sys.argv[2])
with store.begin("other", number) as tx:
    known = tx.reserve(pg_help.keys(range(5))).num_rows
    pg_help.finish(tx, 0, 4, reserved=5 - known)
print(known)
"""


@pytest.mark.full
def test_signs_of_life_that_somebody_has_emptied_stop_no_start(store: PostgresStore, postgres: str) -> None:
    """They belong to no decision, and a dump may leave them out: the instance that runs goes on, and another one may take over."""
    number = epoch(store)
    chunk(store, number, 0, 0)
    run(postgres, "truncate dedup.heartbeat")
    chunk(store, number, 1, 1)
    later = PostgresStore(postgres)
    chunk(later, epoch(later), 2, 2)
    assert later.head("shop").seq == 3 and run(postgres, "select count(*) from dedup.heartbeat") == [(1,)]
    with pytest.raises(Fenced):
        chunk(store, number, 3, 3)


def test_a_claim_that_a_stranger_blocks_says_so(store: PostgresStore, postgres: str) -> None:
    """Whoever locks the row of a partition and is on no record is not waited for for ever: the error says where to look."""
    store.migrate()
    place, first, second = Partition("broker", "orders", 0), holder(), holder()
    number = store.join("shop", first, takeover_after=0.5).epoch
    store.claim("shop", number, first.run_id, place, takeover_after=0.5)
    assert store.join("shop", second, takeover_after=0.5).epoch == number
    store.leave("shop", number, first.run_id)
    with psycopg.connect(postgres) as stranger:
        stranger.execute("select number from dedup.partition_claim for update")
        with pytest.raises(StillHeld, match="a session of PostgreSQL that is no process"):
            store.claim("shop", number, second.run_id, place, takeover_after=0.5)
    assert store.claim("shop", number, second.run_id, place, takeover_after=0.5).number == 2
