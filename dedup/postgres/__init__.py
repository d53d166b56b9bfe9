"""The PostgreSQL store: `from dedup.postgres import PostgresStore`."""

from dedup.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
