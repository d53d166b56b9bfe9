"""Tables of reservations are begun, closed, packed, purged and dropped beside batches that die: each key has one effect."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dedup.postgres import PostgresStore
from kit.paths import environment
from kit.pg_run import run

pytestmark = pytest.mark.postgres

KILLS = 25

CHILD = """
import datetime as dt, random, sys, time
from dedup.postgres import PostgresStore, key_filter
from kit.pg_help import epoch, finish, keys
key_filter.FEW, key_filter._CHEAPER = 0, 10**9  # a filter from the first batch on
store, mine, dice = PostgresStore(sys.argv[1]), sys.argv[2], random.Random()
number, batch = epoch(store, mine), 0
at = store.head(mine).checkpoints
at = max((point.sequence_number for point in at.values()), default=0) + 1
while True:
    batch, now = batch + 1, int(time.time() * 50)
    wanted = keys(dice.sample(range(now, now + 100), 25))  # a key is drawn for two seconds, by whichever process
    with store.begin(mine, number) as tx:
        known = tx.reserve(wanted)["key"].to_pylist()
        new = [key for key in wanted["key"].to_pylist() if key not in known]
        time.sleep(dice.choice((0, 0, 0.05, 0.3)))  # the handler
        tx.connection.cursor().executemany("insert into effect values (%s)", [(key,) for key in new])
        finish(tx, at, at, batch_id=batch, reserved=len(new))
    print(at, flush=True)
    at += 1
    if dice.random() < 0.1:
        store.rotate_reservations()
    if dice.random() < 0.1:
        store.purge_reservations(dt.datetime.now(dt.UTC) - dt.timedelta(seconds=6), patience=0.1)
    if dice.random() < 0.3:
        store.pack_reservations(patience=0.05, portion=50)
"""


@pytest.mark.full
def test_each_key_has_one_effect_whoever_dies_while_tables_come_and_go(postgres: str) -> None:
    """Five processes write the same keys, rotate, pack and purge; one after the other is killed and started again."""
    PostgresStore(postgres).migrate()
    run(postgres, "create table effect (key bytea)")
    dice, children = random.Random(7), {}

    def start(name: str) -> None:
        line = [sys.executable, "-c", CHILD, postgres, name]
        children[name] = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    try:
        for number in range(5):
            start(f"shop-{number}")
        for _ in range(KILLS):
            name = dice.choice(list(children))
            children[name].stdout.readline()  # it has committed
            time.sleep(dice.random())
            assert children[name].poll() is None, children[name].communicate()[1][-3000:]
            os.kill(children[name].pid, signal.SIGKILL)
            children[name].communicate()
            start(name)
    finally:
        for child in children.values():
            child.kill()
            child.communicate()
    (told,) = run(postgres, "select count(*), count(distinct key) from effect")
    assert told[0] == told[1] > KILLS
    (tables,) = run(postgres, "select count(*), count(closed_at), count(dropped_at), count(packed_at) from dedup.reservation_generation")
    assert tables[1] > 3 and tables[2] > 1 and tables[3] > 3, tables
    store = PostgresStore(postgres)
    for number in range(5):
        assert [p for p in store.problems(f"shop-{number}") if "written here" not in p] == []
