"""A library of the next version, as far as an older one sees it: a migration that adds what the older one does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from checkpoint.postgres import sql
from dedup.postgres import PostgresStore

WIDER = """-- Compatible with libraries from migration {first} on.
create table {{schema}}.added_later (id int primary key);
do $$
declare found regclass;
begin
    for found in
        select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace and n.nspname = '{name}'
        where c.relkind in ('r', 'p') and not c.relispartition and not exists (select from pg_inherits i where i.inhrelid = c.oid)
    loop
        execute format('alter table %s add column added_later int not null default 7', found);
    end loop;
end $$;
"""
"""Each table gets a column, and there is one table more."""


@contextmanager
def next_library(schema: str = "dedup", *, compatible: bool = True) -> Iterator[sql.Migration]:
    """Inside the block this process has the migrations of the next version."""
    known = sql.migrations()
    later = sql.Migration(known[-1].version + 1, "wider", WIDER.format(first=known[-1].version, name=schema))
    if not compatible:
        later = sql.Migration(later.version, later.name, later.text.split("\n", 1)[1])
    with mock.patch.object(sql, "migrations", return_value=(*known, later)):
        yield later


def upgrade(dsn: str, schema: str = "dedup", *, compatible: bool = True) -> list[str]:
    """Migrate as the next version does; the names of what was applied."""
    with next_library(schema, compatible=compatible):
        store = PostgresStore(dsn, schema=schema)
        applied = store.migrate()
        store.close()
    return applied
