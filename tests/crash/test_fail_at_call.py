"""The first call fails, then the second, then the third ... until a batch passes without a fault; after each, everything is counted.

The batch has all kinds of outcome: rows of two sinks, a merge, letters of each kind, duplicates in it and of earlier ones, redeliveries.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import get_args

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from crash import child, file_calls, lane, log
from fixtures.fix_postgres import database
from kit.local_tasks import run_here, run_in_tasks
from kit.orders import consumer
from kit.pg_calls import Calls, Way, counted
from kit.places import PostgresPlace
from kit.preload import NoCompiler

pytestmark = pytest.mark.crash

SEED, BATCHES = 6, 3
"""Of the log; the batch that fails is the last one."""


def run_batches(place: PostgresPlace, numbers: range, *, patience: float = 0.0, in_tasks: bool = False) -> None:
    """In one process, in which nothing is remembered of earlier ones; by a handler of batches, or of events in tasks (a double)."""
    store = place.store()
    run = consumer(store, max_outage=patience, budget=None)
    run._handler = None
    run.foreach()(child.handle_one) if in_tasks else run.foreach_batch(child.handle_all)
    try:
        for number in numbers:
            (run_in_tasks if in_tasks else run_here)(run, log.planned(SEED, number), number)
    finally:
        store.close()  # type: ignore[attr-defined]


Copies = Callable[[], AbstractContextManager[str]]


@pytest.fixture
def copies(postgres: str, postgres_server: str) -> Copies:
    """Makes databases, for the length of a block each, in which all batches but the last one are done."""
    first = PostgresPlace(postgres)
    child.create(first)
    run_batches(first, range(BATCHES - 1))
    return partial(database, postgres_server, template=str(conninfo_to_dict(postgres)["dbname"]))


def fails_once(calls: Calls, dsn: str, *, patience: float, in_tasks: bool) -> str:
    """What the batch ended with, through the proxy."""
    away = make_conninfo(dsn, host="127.0.0.1", port=calls.port, sslmode="disable", gssencmode="disable")
    try:
        run_batches(PostgresPlace(away), range(BATCHES - 1, BATCHES), patience=patience, in_tasks=in_tasks)
    except Exception as error:  # noqa: BLE001 - whatever it is: it is counted by its name
        return type(error).__name__
    return "passed"


EVERY = 15
"""One call of so many fails in `make test`."""

WAYS = [
    pytest.param(*each, id=f"{each[0]}, {'the same' if each[1] else 'a new'} process{', in tasks' * each[2]}")
    for each in itertools.product(get_args(Way), (0.0, 30.0), (False, True))
]


@pytest.mark.full
@pytest.mark.postgres
def test_calls_of_slices_may_fail(postgres: str, copies: Copies) -> None:
    """Where tasks commit by themselves, on connections of their own: the same, in CI for some of the calls."""
    each_call(postgres, copies, "cut", 0.0, in_tasks=True, every=EVERY)


@pytest.mark.postgres
@pytest.mark.parametrize(("way", "patience"), [("lost", 0.0), pytest.param("error", 30.0, marks=pytest.mark.full)])
def test_calls_to_postgres_may_fail(postgres: str, copies: Copies, way: Way, patience: float) -> None:
    """Where the handler's batch is committed by this process: the same for some of its calls."""
    each_call(postgres, copies, way, patience, in_tasks=False, every=EVERY)


@pytest.mark.timeout(3600)
@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.parametrize(("way", "patience", "in_tasks"), WAYS)
def test_each_call_to_postgres_may_fail(postgres: str, copies: Copies, way: Way, patience: float, in_tasks: bool) -> None:
    """Cut off before the call, its answer lost, or refused by the server: then all of the batch is true, or none, and it is run again.

    Where tasks commit by themselves, on connections of their own: the same.
    """
    each_call(postgres, copies, way, patience, in_tasks=in_tasks, every=1)


def one_call(calls: Calls, dsn: str, number: int, way: Way, patience: float, *, in_tasks: bool) -> str:
    """What the batch ended with whose call of this number failed; afterwards it is run again and everything is counted."""
    calls.arm(number, way)
    how = fails_once(calls, dsn, patience=patience, in_tasks=in_tasks)
    if calls.failed:
        if patience and not calls.failed.startswith("d"):  # rows of a COPY: a client can only have it cancelled, which ends the query
            assert how == "passed", f"call {number} ({calls.failed!r}) ended with {how}"
        place = PostgresPlace(dsn)
        run_batches(place, range(BATCHES - 1, BATCHES), in_tasks=in_tasks)
        wrong = lane.wrong(place, SEED, BATCHES)
        assert wrong == ([], [], []), f"call {number} ({calls.failed!r}), {way}, ended with {how}: {wrong}"
    return how


def each_call(postgres: str, copies: Copies, way: Way, patience: float, *, in_tasks: bool, every: int) -> None:
    """One call of so many, until the batch passes without a fault."""
    ended: Counter[str] = Counter()
    with counted(int(conninfo_to_dict(postgres)["port"] or 5432)) as calls:
        for number in range(1, 1_000, every):
            with copies() as dsn:
                ended[one_call(calls, dsn, number, way, patience, in_tasks=in_tasks)] += 1
            if not calls.failed:
                break
    print(way, patience, in_tasks, number - 1, "calls", dict(ended))
    assert number > 20, "the batch has fewer calls than it has statements"
    assert set(ended) <= {"passed", "StoreUnavailable", "CommitUnknown", "StoreError"}, ended


FEW = {"lost": 27, "killed after": 9, "error": 7, "full": 9}
"""Way -> every so many operations of those that write, in CI."""


def each_file_call(way: str, *options: str) -> None:
    """In a process of its own, before whose libc the library stands."""
    try:
        environment = file_calls.environment()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "crash.each_file_call", way, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["calls"] > 40 and told["wrong"] == [], told
    assert set(told["ended"]) <= {"passed", "killed", "StoreUnavailable", "CommitUnknown", "StoreError", "CommitConflict"}, told


@pytest.mark.delta
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.full] * (way != "lost")) for way in FEW])
def test_file_operations_of_a_delta_commit_may_fail(way: str) -> None:
    """An operation below the tables' folder fails, or its answer is lost, or the process dies in it: run again, every row is there once."""
    each_file_call(way, "--stride", str(FEW[way]))


@pytest.mark.full
@pytest.mark.delta
def test_what_cannot_be_read_is_an_outage_of_the_store() -> None:
    """Operations that read fail, too: whichever it is, the batch ends with what is waited for (`max_outage`), or passes."""
    each_file_call("error", "--reads", "--stride", "61")


@pytest.mark.timeout(2 * 3600)
@pytest.mark.delta
@pytest.mark.full
@pytest.mark.parametrize("reads", [[], ["--reads"]], ids=["writing", "all"])
@pytest.mark.parametrize("way", file_calls.WAYS[1:])
def test_each_file_operation_of_a_delta_commit_may_fail(way: str, reads: list[str]) -> None:
    """The first one, the second one, the third one ... of those that write, and of all."""
    each_file_call(way, *reads)
