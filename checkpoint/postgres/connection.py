"""How PostgreSQL is reached: the DSN, settings of connections, a limit for waiting, and the driver's errors in our words.

Promises that every psycopg error which leaves this package, other than one raised by a handler's own SQL, is a StoreError or Fenced, that
no message shows a password, and that a connection waits for the server until a point in time and no longer. PostgreSQL's own time-outs
cannot promise that: a backend that is stopped keeps its connection open and answers nothing. Called by all that connects.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import Row

from checkpoint.errors import CommitConflict, ConfigError, SchemaOutdated, StoreError, StoreUnavailable

Connection = psycopg.Connection[tuple[Any, ...]]

_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "dedup",
    # A network that drops idle connections must not look like a batch that runs for ever.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    # No tcp_user_timeout: it would also end a COPY that waits in the server for a lock, once the buffers between are full (tcp(7)).
}
SECRETS = ("password", "sslpassword", "oauth_client_secret")
"""What libpq 18 marks as a password to be hidden (PQconndefaults, dispchar "*")."""

_URL = re.compile(r"\Apostgres(ql)?://", re.IGNORECASE)
"""What a URL begins with. The case of a scheme has no meaning (RFC 3986, 3.1), but libpq takes only lower case."""

_LOST = ("08", "57P", "25P03", "53")
"""Class 08 connection, 57P shutdown, 25P03 idle session ended, 53 out of memory, disk or connections."""

_PLAN_AGAIN = ("40",)
"""Serialization failure and deadlock. Source: PostgreSQL 16 manual, appendix A, read 2025-06."""

_WAIT = ("25P04", "55006", "55P03", "57014", "72")
"""Time-outs, cancelled statements, locks that were not given, snapshots that were too old: the next try may pass. Source: the same."""

READ_ONLY = "25006"
"""This server, or the session's default, is read-only, as after a failover: another connection may lead to another server."""

_TOO_SLOW = (
    "If the statement_timeout of the role or the database is too short for it, raise that, or lower max_events_per_transaction. If it "
    "waited for a lock, pg_locks says whose."
)

_TO_THE_PRIMARY = (
    "PostgreSQL lets this session only read: it is a standby, or the role or the database says so. Let the DSN lead to the primary"
)

_OPERATING = (
    "rotate_reservations",
    "purge_reservations",
    "drop_purged_reservations",
    "merge_batches",
    "pack_reservations",
    "keep_filter",
    "free_reservations",
    "begin_deletion",
    "delete_portion",
    "publisher_lane",
    "published_id",
)
"""What only the role dedup_operate may call, or delete from (sql/postgres/roles.sql). The server's words name it in any language."""

T = TypeVar("T")


class NoPassword(psycopg.OperationalError):
    """The function that gives the password failed. The server was not asked."""


class DsnWithPassword(str):
    """A DSN whose password comes from a function: it is called for each new connection, and is pickled in place of what it returns."""

    ask: Callable[[], str]

    def __new__(cls, dsn: str, ask: Callable[[], str]) -> DsnWithPassword:
        """The DSN, and the function."""
        made = super().__new__(cls, dsn)
        made.ask = ask
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return DsnWithPassword, (str(self), self.ask)

    def password(self) -> str:
        """What the function returns now. Raises NoPassword."""
        try:
            told = self.ask()
        except Exception as error:
            raise NoPassword(f"password() raised {type(error).__name__}") from error
        if not isinstance(told, str):
            raise NoPassword(f"password() returned {type(told).__name__}; it must return text")
        return told


def redacted(dsn: str) -> str:
    """The DSN as it may be shown."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "..."
    return make_conninfo("", **{k: "***" if k in SECRETS else v for k, v in parts.items()})


def checked(dsn: str) -> str:
    """The DSN as libpq takes it: the scheme of a URL in lower case. Raises ConfigError, without showing it: it may hold a password."""
    if isinstance(dsn, DsnWithPassword):
        return DsnWithPassword(checked(str(dsn)), dsn.ask)
    dsn = _URL.sub(lambda scheme: scheme[0].lower(), dsn)
    if _URL.match(dsn) and dsn.split("/")[2].count("@") > 1:
        raise ConfigError("The PostgreSQL URL has more than one @ before the database. Write %40 for an @ of the password.")
    try:
        ports = str(conninfo_to_dict(dsn).get("port") or "").split(",")
    except psycopg.ProgrammingError:
        raise ConfigError("The PostgreSQL DSN cannot be read. Write postgresql://user@host:port/database or host=... dbname=...") from None
    if not all(port.isdecimal() for port in ports if port):
        raise ConfigError("The port of the PostgreSQL DSN is no number. If the password has a / in a URL, write %2F for it.")
    return dsn


def checked_schema(name: str) -> str:
    """The name, if a schema can have it. Raises ConfigError."""
    if not name or "\0" in name or len(name.encode()) > 63 or name.startswith("pg_"):
        raise ConfigError("A schema needs a name of 1 to 63 bytes without NUL that does not begin with pg_.")
    return name


def settings(dsn: str) -> dict[str, Any]:
    """The keyword arguments for psycopg's connect: what the DSN says, else our defaults; autocommit, nothing prepared.

    Transactions are begun and ended by statements of our own; statements are few and large, so that preparing them gains nothing,
    and poolers that switch sessions cannot have it. Raises NoPassword.
    """
    given = {k: v for k, v in conninfo_to_dict(dsn).items() if v is not None}
    if isinstance(dsn, DsnWithPassword):
        given["password"] = dsn.password()
    return {**_DEFAULTS, **given, "client_encoding": "UTF8", "autocommit": True, "prepare_threshold": None}


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection, and with it the transaction, is gone or cannot go on."""
    state = error.sqlstate
    return state.startswith(_LOST) if state else isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def ends_transaction(error: psycopg.Error) -> bool:
    """Whether a retry must start the transaction anew: after these, going on from a savepoint fails for ever."""
    return is_lost(error) or bool(error.sqlstate and error.sqlstate.startswith(_PLAN_AGAIN))


def text_of(error: psycopg.Error) -> str:
    """The server's words on one line."""
    parts = [error.diag.message_primary or str(error).strip() or type(error).__name__, error.diag.message_detail or ""]
    return " ".join(" ".join(part.split()) for part in parts if part).rstrip(".")


def translate(error: psycopg.Error, doing: str) -> StoreError:
    """The error to raise in place of the driver's, for our own statements."""
    text = f"{doing}: {text_of(error)}"
    if isinstance(error, psycopg.errors.OutOfMemory):  # also where the locks of all sessions do not fit: the server's hint says so
        text = ". ".join(filter(None, (text, error.diag.message_hint))).rstrip(".")
    if isinstance(error, psycopg.errors.QueryCanceled):  # by a person, too: the server's words are in any language
        return StoreUnavailable(f"{text}. Nothing of it was committed. {_TOO_SLOW}")
    if is_lost(error) or (error.sqlstate or "").startswith(_WAIT):
        return StoreUnavailable(f"{text.rstrip('?')}. Nothing of it was committed; try again.")
    if error.sqlstate == READ_ONLY:
        return StoreUnavailable(f"{text}. {_TO_THE_PRIMARY}. Nothing of it was committed; try again.")
    if ends_transaction(error):
        return CommitConflict(f"{text}. Nothing of this attempt was committed; plan it again.")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return StoreError(f"{text}. {_missing_right(error, text)}")
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName | psycopg.errors.UndefinedFunction):
        return SchemaOutdated(f"{text}. Run `dedup migrate`.")
    return StoreError(f"{text}. Nothing of it was committed.")


def _missing_right(error: psycopg.Error, text: str) -> str:
    """What to grant, as one sentence or two. A trigger of ours (sql/postgres/separate.sql) says so itself."""
    if error.diag.message_hint:
        return " ".join(error.diag.message_hint.split())
    if any(name in text for name in _OPERATING):
        return "This is for a login with the role dedup_operate: see the roles in docs/how-to/postgres.md."
    return "Grant this role what it needs: docs/how-to/postgres.md lists the rights."


@contextmanager
def translating(doing: str) -> Iterator[None]:
    """Raise our errors in place of the driver's."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from error


@contextmanager
def connecting(dsn: str) -> Iterator[None]:
    """Raise StoreUnavailable, which names the server and says what to do, in place of the driver's error."""
    try:
        yield
    except psycopg.Error as error:
        raise StoreUnavailable(
            f"PostgreSQL at {address(dsn)} cannot be reached: {_HINT.sub('', text_of(error)).rstrip('.? ')}. "
            "Check that the server runs, and the host, port, database, user and password; then try again. Nothing was committed."
        ) from error


def address(dsn: str) -> str:
    """The server, the database and the user that a DSN means, as libpq reads it; never a password."""
    parts = {**{name: os.environ.get(variable) for name, variable in _VARIABLES.items()}, **conninfo_to_dict(dsn)}
    service = f"service {parts['service']}" if parts["service"] else "the local socket"
    hosts = str(parts["host"] or parts.get("hostaddr") or service).split(",")
    ports = str(parts["port"] or "").split(",")
    servers = ", ".join(f"{host}:{port or 5432}" for host, port in zip(hosts, ports * (len(hosts) // len(ports)), strict=False))
    named = [f"{what} {parts[name]}" for name, what in (("dbname", "database"), ("user", "user")) if parts[name]]
    return servers + (f" ({', '.join(named)})" if named else "")


_VARIABLES = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER", "service": "PGSERVICE"}
"""Part of a DSN -> the variable that libpq reads where it is left out."""

_HINT = re.compile(r"\s*Is the server running[^?]*\??$")
"""What libpq asks on a line of its own."""


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in time. Whether it did what was asked is not known."""


def _limited(steps: Generator[Any, Any, T], until: float) -> Generator[Any, Any, T]:
    """psycopg's steps of an exchange; psycopg takes one at least ten times a second, also while nothing comes. Raises NoAnswer."""
    try:
        wanted = next(steps)
        while True:
            if time.monotonic() >= until:
                raise NoAnswer("the server did not answer in time")
            wanted = steps.send((yield wanted))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Limited(psycopg.Connection[Row]):
    """For threads. A connection that raised NoAnswer is to be closed."""

    until: float = math.inf
    """Of time.monotonic(): when to give up."""

    def wait(self, gen: Any, *options: Any, **named: Any) -> Any:
        """What psycopg calls for every exchange with the server. Raises NoAnswer."""
        return super().wait(_limited(gen, self.until), *options, **named)


class AsyncLimited(psycopg.AsyncConnection[Row]):
    """For asyncio. A connection that raised NoAnswer is to be closed."""

    until: float = math.inf
    """Of time.monotonic(): when to give up."""

    async def wait(self, gen: Any, *options: Any, **named: Any) -> Any:
        """What psycopg calls for every exchange with the server. Raises NoAnswer."""
        return await super().wait(_limited(gen, self.until), *options, **named)
