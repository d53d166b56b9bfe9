"""A host that vanishes without a word: no FIN, no RST, nothing that answers. Shown with a network of its own, whose link is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kit.paths import ROOT, environment
from kit.pg_proxy import until
from kit.pg_run import run
from kit.pg_server import Server, running_server

HERE, THERE, NAME = "10.222.77.1", "10.222.77.2", f"dedup{os.getpid() % 10_000}"

SETTINGS = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")

CHILD = """
import sys, time
from dedup.postgres import PostgresStore
from kit.pg_help import epoch, keys
store = PostgresStore(sys.argv[1])
with store.begin("shop", epoch(store)) as transaction:
    transaction.reserve(keys([1]))
    print("open", flush=True)
    time.sleep(600)
"""
"""A task that has reserved a key, and runs its handler."""


def ip(*words: str) -> None:
    """A command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[None]:
    """Another host: a namespace with a link to this one."""
    try:
        ip("netns", "add", NAME)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not make a network of its own: {error}")
    try:
        ip("link", "add", f"{NAME}h", "type", "veth", "peer", "name", f"{NAME}t")
        ip("link", "set", f"{NAME}t", "netns", NAME)
        ip("addr", "add", f"{HERE}/24", "dev", f"{NAME}h")
        ip("link", "set", f"{NAME}h", "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/24", "dev", f"{NAME}t")
        ip("-n", NAME, "link", "set", f"{NAME}t", "up")
        yield
    finally:
        ip("netns", "del", NAME)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that listens to that network, too."""
    with running_server(settings={"listen_addresses": "*"}) as made:
        with (made.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {THERE}/32 trust\n")
        run(made.dsn, "select pg_reload_conf()")
        yield made


@pytest.mark.full
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_a_host_that_vanishes_leaves_no_locks_for_longer_than_a_minute(network: None, server: Server) -> None:
    """The server notices by itself, although nobody writes to it: else the task that comes after waits for two hours."""
    dsn = server.dsn.replace("127.0.0.1", HERE)
    line = ["ip", "netns", "exec", NAME, sys.executable, "-c", CHILD, dsn]
    with subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        open_ones = f"select count(*) from pg_stat_activity where client_addr = '{THERE}' and state like 'idle in transaction%'"
        assert run(server.dsn, open_ones) == [(1,)]
        ip("link", "set", f"{NAME}h", "down")
        child.kill()
        until(lambda: run(server.dsn, open_ones) == [(0,)], seconds=120)


@pytest.mark.postgres
def test_a_transaction_asks_the_server_to_look_after_its_client(postgres: str) -> None:
    """Until its end, whatever the server's own settings are; a handler that takes long is no client that is gone."""
    from dedup.postgres import PostgresStore
    from kit.pg_help import epoch

    store = PostgresStore(postgres)
    with store.begin("shop", epoch(store)) as transaction:
        shown = [str(transaction._connection.execute(f"show {name}").fetchone()[0]) for name in SETTINGS]  # type: ignore[index]
    assert shown == ["30", "10", "3", "60000"]
