"""How PostgreSQL is reached: the DSN, checked and without its password, and the settings of each connection."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from checkpoint.errors import ConfigError

Connection = psycopg.Connection[tuple[Any, ...]]

_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "dedup",
    # A network that drops idle connections must not look like a batch that runs for ever.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
SECRETS = ("password", "sslpassword")


def redacted(dsn: str) -> str:
    """The DSN as it may be shown."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "..."
    return make_conninfo("", **{k: "***" if k in SECRETS else v for k, v in parts.items()})


def checked(dsn: str) -> str:
    """The DSN, if it is one. Raises ConfigError, without showing it: it may hold a password."""
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigError("The PostgreSQL DSN cannot be read. Write postgresql://user@host:port/database or host=... dbname=...") from None
    return dsn


def checked_schema(name: str) -> str:
    """The name, if a schema can have it. Raises ConfigError."""
    if not name or "\0" in name or len(name.encode()) > 63 or name.startswith("pg_"):
        raise ConfigError("A schema needs a name of 1 to 63 bytes without NUL that does not begin with pg_.")
    return name


def settings(dsn: str) -> dict[str, Any]:
    """The keyword arguments for psycopg's connect: what the DSN says, else our defaults; autocommit, nothing prepared.

    Transactions are begun and ended by statements of our own; statements are few and large, so that preparing them gains nothing,
    and poolers that switch sessions cannot have it.
    """
    given = {k: v for k, v in conninfo_to_dict(dsn).items() if v is not None}
    return {**_DEFAULTS, **given, "client_encoding": "UTF8", "autocommit": True, "prepare_threshold": None}
