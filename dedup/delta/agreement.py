"""What the tables that a consumer publishes to show of its decisions, compared with its ledger.

Promises that a table which shows a decision that the ledger does not have, or has another one for, is told before anything is decided; and
that one which lacks a publication that is known is told before anything is published. Called by the consumer state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltalake import DeltaTable

from checkpoint.advice import command
from checkpoint.errors import PublicationStuck, StoreRestored, StoreUnavailable
from dedup.delta import lineage, tables
from dedup.delta.events import LETTERS_SINK
from dedup.delta.outbox_tables import OUTBOX_SINK

if TYPE_CHECKING:
    from dedup.delta.state import ConsumerState


class Agreement:
    """As far as this process has looked. A table is looked at again where somebody else has committed to it since."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state
        self.forget()

    def forget(self) -> None:
        """Compare everything anew."""
        self._seen: dict[str, tuple[DeltaTable, int]] = {}  # table name -> what was found to agree, in which version
        self._behind: dict[str, str] = {}  # name -> URI of tables that lack a publication
        self._began = False

    def took(self, name: str, table: DeltaTable, version: int) -> None:
        """This process has published to the table, or seen it show what it should; this is its version then."""
        self._seen[name] = table, version

    def require_known(self) -> None:
        """Compare every table that the ledger knows, its dead letters and its outbox, once. Raises StoreRestored."""
        if self._began or self._state.table is None:
            return
        self._began = True
        for name, uri in self._known().items():
            try:
                if (table := self._state.sinks.table(uri)) is not None:
                    self.require(name, table)
            except PublicationStuck:
                self._behind[name] = uri
            except StoreUnavailable:
                self._began = False  # whoever writes there is told; it is compared at the next look

    def require_none_behind(self) -> None:
        """Raise PublicationStuck where a table that was found to lack a publication still lacks it."""
        for name, uri in list(self._behind.items()):
            if (table := self._state.sinks.table(uri)) is not None:
                self.require(name, table)
            del self._behind[name]

    def require(self, name: str, table: DeltaTable) -> None:
        """Raise StoreRestored where the table shows what the ledger does not know, PublicationStuck where it lacks what is known of it."""
        seen = self._seen.get(name)
        if seen is not None and seen[0] is table and seen[1] == table.version():
            return
        whole = seen is None or seen[0] is not table
        if self._unknown(name, table, whole=whole) is not None:
            self._state.catch_up()  # perhaps somebody else has decided since the last look
            self._state.require_undamaged()
            if (told := self._unknown(name, table, whole=whole)) is not None:
                raise StoreRestored(self._state.advice(told))
        self._require_published(name, table)
        self.took(name, table, table.version())

    def meets(self, generation: int) -> bool:
        """Whether a table that the ledger knows shows decisions of this generation. Raises StoreUnavailable."""
        found = ((name, self._state.sinks.table(uri)) for name, uri in self._known().items())
        return any(t is not None and tables.transaction_of(t, self._state.app(generation, name)) is not None for name, t in found)

    def _known(self) -> dict[str, str]:
        state = self._state
        waiting = {entry.name: entry.uri for seq in sorted(state.pending) for entry in state.decided[seq].sinks}
        own = {LETTERS_SINK: state.letters_uri, OUTBOX_SINK: state.outbox_uris()[0]}
        return {**own, **waiting, **{name: mark.uri for name, mark in state.marks.items()}}

    def _unknown(self, name: str, table: DeltaTable, *, whole: bool) -> str | None:
        """What the table shows and the ledger does not know.

        Args:
            whole: look also for decisions that were published in part, and for a later generation.
        """
        state, generation = self._state, self._state.header.head.generation
        shown = tables.transaction_of(table, state.app(generation, name))
        if shown is not None and not self._agrees(name, shown):
            return self._told(name, table, lineage.seq_of(shown))
        if not whole:
            return None
        part = tables.transaction_of(table, f"{state.app(generation, name)}/parts")
        if part is not None and not self._has_part(part):
            return self._told(name, table, lineage.seq_of_part(part))
        if tables.transaction_of(table, state.app(generation + 1, name)) is not None:
            return f"is of generation {generation}, and the table {name!r} at {table.table_uri} shows decisions of a later one"
        return None

    def _agrees(self, name: str, shown: int) -> bool:
        mark = self._state.marks.get(name)
        if mark is not None and (mark.generation, mark.shown) == (self._state.header.head.generation, shown):
            return True
        decided = self._state.header_at(lineage.seq_of(shown))
        return decided is not None and decided.version == shown

    def _has_part(self, part: int) -> bool:
        decided = self._state.header_at(lineage.seq_of_part(part))
        return decided is not None and lineage.same_decision(part, decided.seq, decided.attempt)

    def _told(self, name: str, table: DeltaTable, seq: int) -> str:
        last = self._state.header.seq
        what = f"has {last} decisions" if seq > last else f"has another decision {seq}"
        return f"{what}, and the table {name!r} at {table.table_uri} shows decision {seq}: the ledger was taken back to an older state"

    def _require_published(self, name: str, table: DeltaTable) -> None:
        mark, consumer = self._state.marks.get(name), self._state.ledger.consumer
        if mark is None or mark.shown is None or mark.table_id != str(table.metadata().id):
            return
        shown = tables.transaction_of(table, self._state.app(mark.generation, name))
        if shown is None or lineage.seq_of(shown) < lineage.seq_of(mark.shown):
            last = "none" if shown is None else f"decision {lineage.seq_of(shown)}"
            raise PublicationStuck(
                f"The sink {name!r} at {table.table_uri} was taken back to an older state: decision {lineage.seq_of(mark.shown)} was "
                f"published to it, and the last one that it shows is {last}, so published rows are missing. Put the newer state back; or "
                f"go on without those rows: {command('publish', consumer, '--accept-sink', name)}."
            )
