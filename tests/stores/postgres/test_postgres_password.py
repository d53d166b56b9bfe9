"""A password that a function gives: asked for each new connection, of stores, heartbeats, publishers and leases, and never in a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from checkpoint.errors import ConfigError, StoreUnavailable
from checkpoint.eventhub import PostgresCheckpointStore
from dedup.postgres import PostgresStore
from dedup.publishing.postgres import PublisherState
from kit.foreach_kit import bare
from kit.local_tasks import Tasks, run_in
from kit.orders import batch, orders
from kit.pg_help import chunk, epoch
from kit.pg_proxy import until
from kit.pg_run import run
from kit.pg_server import Server, start_server

pytestmark = pytest.mark.postgres


class Vault:
    """Gives the password of today; can be pickled, as a function of a module can."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self) -> str:
        return self.file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def asking() -> Iterator[Server]:
    """A server that trusts its owner, and wants the password of `app`."""
    server = start_server(settings={"fsync": "off"})
    hba = server.data / "pg_hba.conf"
    hba.write_text("host all app 127.0.0.1/32 scram-sha-256\n" + hba.read_text(encoding="utf-8"), encoding="utf-8")
    with psycopg.connect(server.dsn, autocommit=True) as owner:
        owner.execute("create role app login password 'first'")
        owner.execute("create database shop owner app")
        owner.execute("select pg_reload_conf()")
    yield server
    server.remove()


@pytest.fixture
def dsn(asking: Server) -> str:
    with psycopg.connect(asking.dsn, autocommit=True) as owner:
        owner.execute("alter role app password 'first'")
    return make_conninfo(asking.dsn, dbname="shop", user="app")


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    (tmp_path / "token").write_text("first", encoding="utf-8")
    return Vault(tmp_path / "token")


def change(asking: Server, vault: Vault, password: str) -> None:
    """As a token that has expired: sessions go on, new ones need the new one."""
    with psycopg.connect(asking.dsn, autocommit=True) as owner:
        owner.execute(f"alter role app password '{password}'".encode())
    vault.file.write_text(password, encoding="utf-8")


def test_each_new_connection_asks_for_the_password(asking: Server, dsn: str, vault: Vault) -> None:
    """A store goes on after its token has expired, and so does what it is pickled to; a wrong one is an outage."""
    store = PostgresStore(dsn, password=vault)
    number = epoch(store)
    known = chunk(store, number, 0, 9)
    change(asking, vault, "second")
    store.close()
    assert chunk(store, number, 0, 9, batch_id=1) == 10
    sent = pickle.dumps(store)
    assert b"second" not in sent and b"first" not in sent
    change(asking, vault, "third")
    assert pickle.loads(sent).consumers() == ["shop"]
    vault.file.write_text("wrong", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match="password authentication failed"):
        PostgresStore(dsn, password=vault).consumers()
    store.close()
    assert known == 0


def test_what_is_made_of_a_store_asks_as_well(asking: Server, dsn: str, vault: Vault) -> None:
    """Heartbeats, leases of the runner and publishers take the store's DSN, and with it the function."""
    store = PostgresStore(dsn, password=vault)
    number = epoch(store)
    leases, publisher = PostgresCheckpointStore(store.dsn, store.schema), PublisherState(store.dsn, store.schema)
    change(asking, vault, "fourth")
    assert list(leases.list_ownership("namespace", "hub", "group")) == []
    assert publisher.is_gone(0)
    beats = "select beats from dedup.heartbeat"
    with store.heartbeat("shop", number, 0.05):
        until(lambda: run(make_conninfo(asking.dsn, dbname="shop"), beats) > [(0,)])
    leases.close()
    store.close()


class Watching(Tasks):
    """Tasks that keep what is sent to them."""

    sent: ClassVar[list[bytes]] = []

    def pack(self, what: object) -> bytes:
        """And keep it."""
        self.sent.append(super().pack(what))
        return self.sent[-1]


@pytest.mark.full
def test_what_is_sent_to_tasks_has_no_password(asking: Server, dsn: str, vault: Vault) -> None:
    """A batch in tasks commits, and no closure that was sent holds the password; that of a DSN is in it."""
    change(asking, vault, "SECRET-17")
    run(make_conninfo(asking.dsn, dbname="shop"), "create table orders (id text, amount bigint); grant all on orders to app")
    inside = make_conninfo(dsn, password="SECRET-17")
    for number, store in enumerate((PostgresStore(dsn, password=vault, schema="tasks"), PostgresStore(inside, schema="tasks"))):
        Watching.sent.clear()
        made = bare(store)
        made.foreach(into="orders")(lambda event, tx: dict(event.data))
        rows = batch(*orders(range(3 * number, 3 * number + 3)))
        assert run_in(Watching(rows), made, rows, number).processed == 3
        assert Watching.sent and any(b"SECRET-17" in one for one in Watching.sent) == (store.dsn == inside)
        store.close()


def test_a_function_that_fails_is_an_outage_that_names_it(dsn: str, vault: Vault) -> None:
    """The error says what the function raised; its text is not shown, for it may hold the secret; another type is named, too."""
    vault.file.unlink()
    with pytest.raises(StoreUnavailable, match=r"cannot be reached: password\(\) raised FileNotFoundError") as failed:
        PostgresStore(dsn, password=vault).consumers()
    assert str(vault.file) not in str(failed.value)
    with pytest.raises(StoreUnavailable, match=r"password\(\) returned bytes"):
        PostgresStore(dsn, password=lambda: b"first").consumers()  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="password") as refused:
        PostgresStore(dsn, password="first")  # type: ignore[arg-type]
    assert "first" not in str(refused.value)
