"""A Delta store on object storage: where its credentials come from, what is said without them, and that none of them is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.errors import StoreUnavailable
from dedup import ConfigError, DeltaStore
from dedup.delta.storage import explained
from dedup.urls import StoreAddress, open_store
from kit.orders import batch, consumer, orders
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

Run = Callable[..., tuple[int, str, str]]

NOWHERE = "--storage-option azure_storage_endpoint=http://127.0.0.1:1 --storage-option allow_http=true --storage-option max_retries=0"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


def test_storage_without_credentials_says_what_to_set(dedup: Run) -> None:
    """One line that names the variables and the option; not the storage client's own error alone."""
    code, out, err = dedup("verify --store az://lake/dedup")
    assert (code, out, err.count("\n")) == (4, "", 1)
    for word in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "--storage-option"):
        assert word in err


def test_a_program_is_told_the_same() -> None:
    """The library raises an error of its own, not an OSError of the storage client."""
    with pytest.raises(StoreUnavailable, match="AZURE_STORAGE_ACCOUNT_NAME"):
        DeltaStore("az://lake/dedup").consumers()


@pytest.mark.parametrize(("uri", "variable"), [("s3://lake/x", "AWS_SECRET_ACCESS_KEY"), ("gs://lake/x", "GOOGLE_SERVICE_ACCOUNT")])
def test_each_storage_has_its_own_variables(uri: str, variable: str) -> None:
    """What is missing is named as the storage calls it; an error about something else is left as it is."""
    assert variable in explained(uri, OSError("an error occurred while loading credentials"))
    assert explained(uri, OSError("dns error")) == "dns error"


def test_a_signature_is_never_shown(dedup: Run) -> None:
    """Neither what the option holds nor the request that carries it is part of an error."""
    secret = "--storage-option azure_storage_account_name=shop --storage-option 'azure_storage_sas_key=sv=2024&sig=s3cret%2Fs3cret'"
    code, _, err = dedup(f"consumer list --store az://lake/dedup {secret} {NOWHERE}")
    assert (code, "cannot be reached" in err, "s3cret" in err) == (4, True, False)


def test_a_storage_option_is_a_pair(dedup: Run) -> None:
    """Anything else is a usage error with an example, and shows no part of it."""
    code, _, err = dedup("consumer list --store az://lake/dedup --storage-option s3cret")
    assert (code, "KEY=VALUE" in err, "s3cret" in err) == (2, True, False)


def test_storage_options_reach_the_store(tmp_path: Path, postgres: str) -> None:
    """They are those of DeltaStore; PostgreSQL has no use for them and says so."""
    store = open_store(StoreAddress(str(tmp_path), {"timeout": "5s"}), new=True)
    assert isinstance(store, DeltaStore) and store.storage_options == {"timeout": "5s"}
    with pytest.raises(ConfigError, match="--storage-option is for Delta stores"):
        open_store(StoreAddress(postgres, {"timeout": "5s"}))


@pytest.mark.full
@pytest.mark.spark
def test_a_session_without_delta_is_told_what_to_set(tmp_path: Path) -> None:
    """`spark:FOLDER` in a Spark without Delta's extension: a wrong setting (2), and not a server that is away (4)."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    consumer(place.store())(batch(*orders(range(3))), 0)
    done = subprocess.run(
        [sys.executable, "-m", "dedup", "status", "--store", f"spark:{place.url}"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, "spark.sql.extensions" in done.stderr) == (2, True), done.stderr
