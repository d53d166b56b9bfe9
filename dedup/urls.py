"""From a URL to a store, and never a password on the screen. Called by the command line and by the demo."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated

import typer

import dedup
from dedup.core.store import Store

SPARK = "spark:"
"""Before the folder or URL of a Delta store whose commits Spark makes."""

StoreUrl = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="DEDUP_STORE",
        show_envvar=True,
        show_default=False,
        help="The store: postgresql://..., or the folder or URL of a Delta store. spark:FOLDER: Spark commits to it.",
    ),
]
"""The option every command has that needs a store."""


class StoreAddress(str):
    """A store's URL, with what --storage-option says about the storage that it is on."""

    storage_options: Mapping[str, str]

    def __new__(cls, url: str, storage_options: Mapping[str, str]) -> StoreAddress:
        """Keep the settings beside the text."""
        made = super().__new__(cls, url)
        made.storage_options = storage_options
        return made


def is_postgres(url: str) -> bool:
    """Whether the URL names a PostgreSQL database: a URL of its own scheme, in any case, or a libpq string: `host=db dbname=shop`."""
    return bool(re.match(r"postgres(ql)?://", url, re.IGNORECASE) or re.match(r"\w+\s*=", url))


def postgres_schema() -> str:
    """The PostgreSQL schema that the state is in: the variable DEDUP_SCHEMA, by default `dedup`."""
    return os.environ.get("DEDUP_SCHEMA") or "dedup"


def open_store(url: str, *, new: bool = False) -> Store:
    """The store at this URL. `new`: it may not be there yet.

    Args:
        url: a StoreAddress brings the settings of its storage with it.

    Raises:
        ConfigError: no URL was given, a folder has no store, PostgreSQL cannot read the URL, or settings were given that it has no use for.
        ImportError: the driver is missing; the message names the extra to install.
    """
    if not url:
        raise dedup.ConfigError("No store given. Use --store postgresql://... or --store /path/to/delta, or set DEDUP_STORE.")
    options = dict(url.storage_options) if isinstance(url, StoreAddress) else {}
    if is_postgres(url):
        if options:
            raise dedup.ConfigError(
                "--storage-option is for Delta stores. PostgreSQL takes its settings from the URL or from PG* variables."
            )
        # who only looks creates no tables in a database that was mistyped
        return dedup.PostgresStore(url, schema=postgres_schema(), auto_migrate=False)
    path = url.removeprefix(SPARK)
    store = dedup.DeltaStore(path, storage_options=options, engine="spark" if url.startswith(SPARK) else "delta-rs")
    if not new and not store.consumers() and not store.was_used():
        raise dedup.ConfigError(f"There is no store in {path}. Check --store. A store on Delta begins with the first batch of a consumer.")
    return store


def check_consumer(store: Store, name: str) -> None:
    """Raise ConfigError, with the names there are, where the store does not know this consumer."""
    names = store.consumers()
    if name not in names:
        raise dedup.ConfigError(f"There is no consumer {name!r} in this store. It has: {', '.join(names) or 'none'}.")


_SECRETS = (
    (re.compile(r"(://[^/\s:@]*:)[^\s]*(?=@)"), r"\1***"),  # user:password@, the password may hold an @ of its own
    (
        re.compile(
            r"\b(password|sslpassword|oauth_client_secret|sig|secret|token|AccountKey|SharedAccessKey)(\s*=\s*)('[^']*'|[^\s&;]+)",
            re.IGNORECASE,
        ),
        r"\1\2***",
    ),
)


def mask_secrets(text: str) -> str:
    """The text with passwords, keys and signatures of URLs and connection strings replaced by ***."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
