"""A database whose consumers run with the rights of `dedup migrate --roles` and no others, and the users that log in there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg.conninfo import make_conninfo

from checkpoint.postgres.sql import roles_sql
from dedup import PostgresStore
from kit.pg_run import run
from kit.places import PostgresPlace

LOGINS = {"owner": "he_dba", "run": "he_app", "read": "he_dashboard", "operate": "he_operator", "inspect": "he_reader"}
"""Role without its prefix -> the user that has it."""


@contextmanager
def logging_in(server: str) -> Iterator[None]:
    """The users of LOGINS, without any right of their own, for the length of the block. Databases of one server share them."""
    run(server, roles_sql("dedup").split("-- dedup_owner owns")[0])
    for role, user in LOGINS.items():
        run(server, f"drop role if exists {user}")
        run(server, f"create role {user} login in role dedup_{role}")
    yield
    run(server, "drop role " + ", ".join(LOGINS.values()))


class LeastPlace(PostgresPlace):
    """A database in which consumers run as the runtime role; sinks are made by the superuser."""

    def __init__(self, dsn: str) -> None:
        super().__init__(make_conninfo(dsn, user=LOGINS["run"]))
        self.super = dsn

    @classmethod
    def made(cls, dsn: str) -> LeastPlace:
        """The script before and after a migration by the owner; sinks can be written by the runtime role."""
        run(dsn, roles_sql("dedup"))
        PostgresStore(make_conninfo(dsn, user=LOGINS["owner"], options="-c role=dedup_owner")).migrate()
        run(dsn, roles_sql("dedup"))
        run(dsn, "alter default privileges in schema public grant select, insert, update, delete on tables to dedup_run")
        made = cls(dsn)
        made.create_sink()
        return made

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """One statement, as the superuser."""
        return run(self.super, sql)

    def of(self, role: str) -> str:
        """The DSN of the login that has this role."""
        return make_conninfo(self.super, user=LOGINS[role])
