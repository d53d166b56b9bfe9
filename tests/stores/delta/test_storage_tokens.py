"""Tokens that expire while a consumer runs: the function of `storage_options=` is asked again."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from deltalake import DeltaTable

from checkpoint.errors import StoreUnavailable
from dedup.delta import DeltaStore, key_objects, storage
from dedup.delta.storage import OptionsOf
from kit import object_storage
from kit.orders import assert_proven, batch, consumer, orders

LIFE = 3.0
"""Seconds for which a token is valid."""


class Tokens:
    """Gives tokens for an account of Azure storage, as a function of options does."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    def __call__(self) -> dict[str, str]:
        """A new one each time, valid for LIFE."""
        account, key = self.settings["AZURE_STORAGE_ACCOUNT_NAME"], self.settings["AZURE_STORAGE_ACCOUNT_KEY"]
        ends = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=LIFE)
        kinds, may = ResourceTypes(service=True, container=True, object=True), AccountSasPermissions.from_string("rwdlacup")
        token = generate_account_sas(account, key, kinds, may, ends, start=ends - dt.timedelta(hours=1))
        rest = {name.lower(): value for name, value in self.settings.items() if name != "AZURE_STORAGE_ACCOUNT_KEY"}
        return {**rest, "azure_storage_sas_key": token, "max_retries": "0"}


@pytest.fixture
def tokens(az_settings: dict[str, str]) -> Tokens:
    """For Azurite."""
    return Tokens(az_settings)


@pytest.fixture
def store(tokens: Tokens) -> Iterator[DeltaStore]:
    """At a new place that is reached by these tokens alone; it has the sink `orders`."""
    root = object_storage.prefix("az")
    by_key = {name.lower(): value for name, value in tokens.settings.items()}
    DeltaTable.create(f"{root}/orders", pa.schema([("id", pa.string()), ("amount", pa.int64())]), storage_options=by_key)
    yield DeltaStore(f"{root}/state", tables={"orders": f"{root}/orders"}, storage_options=tokens)
    key_objects.finish()


@pytest.mark.objects
@pytest.mark.parametrize("again", [1.0, pytest.param(1e9, id="asked once", marks=pytest.mark.full)])
def test_a_consumer_outlives_the_token_that_it_began_with(store: DeltaStore, again: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, ledger and files of keys are reached with the token of today; with the first one alone the storage refuses the next batch."""
    monkeypatch.setattr(storage, "AGAIN", again)
    run = consumer(store)
    assert run(batch(*orders(range(3))), 0).processed == 3
    time.sleep(LIFE)
    if again > LIFE:
        with pytest.raises(StoreUnavailable):
            run(batch(*orders(range(3, 5))), 1)
        return
    assert run(batch(*orders(range(2, 5))), 1).processed == 2
    assert_proven(store)


def test_a_function_that_fails_later_leaves_what_it_gave(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token service that is away for a moment ends no stream, and the log says so once in a while; at the start it is an outage."""
    monkeypatch.setattr(storage, "AGAIN", 0.0)
    given = [{"key": "one"}, {"key": "two"}]
    options = OptionsOf(lambda: given.pop(0))
    assert (options["key"], options["key"]) == ("one", "two")
    with caplog.at_level(logging.WARNING, "dedup"):
        assert (options["key"], len(options)) == ("two", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "IndexError" in caplog.text
    with pytest.raises(StoreUnavailable, match="IndexError"):
        len(OptionsOf(lambda: given.pop(0)))
