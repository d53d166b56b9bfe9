"""Where the demo writes: what it needs of a store beside what the library needs of it. One module per store, named after its driver."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pyarrow as pa

from dedup.cli.stores import is_postgres
from dedup.store import Store

CONSUMER = "departures"
"""The consumer's name, and the sink's."""

DEFAULT = ".demo"
"""The demo's folder, in the current one."""


class Target(Protocol):
    """A place for the consumer's state and its sink, both of the demo alone."""

    sink: str
    """What `tx.write` calls the sink."""

    def prepare(self) -> None:
        """Make it empty: what an earlier demo left is removed, the sink table is created.

        Crash: half emptied; the next demo empties the rest.
        """

    def store(self) -> Store:
        """The library's store in this place."""

    def rows(self) -> pa.Table:
        """All rows of the sink."""

    def where(self) -> dict[str, str]:
        """What there is to look at: name -> path, or table."""

    def command(self, words: str) -> str:
        """What to type for `dedup WORDS` on this store."""


def target(store: str | None) -> tuple[Path, Target]:
    """The demo's folder and place: PostgreSQL for its URL, Delta inside the folder that `store` names; by default `.demo`."""
    if store and is_postgres(store):
        from dedup.demo.postgres import PostgresTarget

        return Path(DEFAULT).absolute(), PostgresTarget(store)
    from dedup.demo.delta import DeltaTarget

    folder = Path(store or DEFAULT).absolute()  # the JVM and its workers may stand elsewhere
    return folder, DeltaTarget(folder / "lake")
