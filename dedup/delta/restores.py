"""Find out whether a RESTORE removed rows of ours from a table. A RESTORE keeps transaction ids, so these alone do not show it.

Promises that a table which may lack something of ours is reported before anything is written to it. A table that was restored to a version
which has all of ours goes on. What cannot be known counts as missing: a RESTORE to a time, a version whose log is gone, an engine that does
not show old versions. Called by the transaction and the publisher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from deltalake import DeltaTable

from checkpoint.errors import PublicationStuck, command
from dedup.delta import tables
from dedup.delta.ledger import Mark, SinkFiles
from dedup.delta.sinks import Sink
from dedup.delta.tables import part_reached, reached, seq_of

if TYPE_CHECKING:
    from dedup.delta.state import ConsumerState

MANY = 1_000
"""Commits since the last look of which the log is not read where the files of the last publication tell enough: each commit is a file."""

Restores = Mapping[int, int | None]
"""Version of a RESTORE -> the version that it went back to; None where the log does not say."""


class Publication(NamedTuple):
    """What a table has to hold, by the transaction id under which it shows it."""

    app: str
    version: int
    whole: bool = True  # the id of a decision; False: of one write of a decision

    def is_reached(self, shown: int | None) -> bool:
        """Whether a table that shows this version under `app` is at or behind the publication."""
        return (reached if self.whole else part_reached)(shown, self.version)

    def shown_by(self, table: DeltaTable) -> bool:
        """Whether this table is. The one answer to "does this table show that transaction". Raises StoreUnavailable."""
        return self.is_reached(tables.transaction_of(table, self.app))


def require_same(state: ConsumerState, sink: Sink, table_id: str, mark: Mark | None) -> None:
    """Raise PublicationStuck where the sink is another table than `table_id`, or lost what it had at the mark to a RESTORE."""
    consumer = state.ledger.consumer
    if sink.table_id != table_id:
        raise PublicationStuck(
            f"The sink {sink.name!r} at {sink.uri} is not the table that was written to before (dropped and created again?). "
            f"If that is meant, run {command('sink', 'accept', consumer, sink.name)}: rows that were published before are not written to "
            "the new one."
        )
    if mark is not None and mark.table_id == table_id:
        whole = mark.shown is not None and seq_of(mark.shown) == mark.seq  # else its id is that of one write, which the mark does not keep
        what = Publication(state.app(mark.generation, sink.name), mark.shown or 0) if whole else None
        _require_kept(state, sink, mark.version, what, f"decision {mark.seq} was published at version {mark.version}")


def require_unrestored(state: ConsumerState, sink: Sink, seq: int, entry: SinkFiles, what: Publication) -> None:
    """For a decision that the sink shows: raise PublicationStuck where a RESTORE took it back, and nobody has accepted that."""
    mark = state.marks.get(sink.name)
    accepted = mark is not None and mark.accepted >= seq
    if entry.version is not None and entry.table_id == sink.table_id and not accepted:
        _require_kept(state, sink, entry.version, what, f"decision {seq} was made at version {entry.version}")


def _require_kept(state: ConsumerState, sink: Sink, version: int, what: Publication | None, since: str) -> None:
    if lost := _lost(state, sink, version, what):
        raise PublicationStuck(
            f"The sink {sink.name!r} at {sink.uri} was restored to an older version after {since}: {lost}. "
            f"Put them back if they are wanted, then run {command('sink', 'accept', state.ledger.consumer, sink.name)}."
        )


def _lost(state: ConsumerState, sink: Sink, version: int, what: Publication | None) -> str:
    """What may be missing of a publication that was looked at in this version, or made after it; empty where nothing is."""
    now, looked_at = sink.table.version(), (sink.table_id, sink.table.version(), version, what)
    if now == version or looked_at in state.sinks.kept:
        return ""
    if now > version + MANY and _lists_all(state, sink, what):
        state.sinks.kept.add(looked_at)
        return ""
    if now > version and not _restores(sink.table, version)[0]:
        return ""
    if now < version or what is None:
        return "published rows may be missing"
    try:
        lost = _Versions(state, sink.table, what).lost(version)
    except _Unknown:
        return "whether published rows are missing cannot be told"
    if not lost:
        state.sinks.kept.add(looked_at)
    return lost


def _lists_all(state: ConsumerState, sink: Sink, what: Publication | None) -> bool:
    """Whether the sink lists each file of that decision, and they are there: a RESTORE to any version before it would have taken them."""
    header = state.header_at(seq_of(what.version)) if what is not None and what.whole else None
    if header is None or what is None or header.version != what.version:
        return False
    entries, engine = [entry for entry in header.sinks if entry.name == sink.name], state.sinks.engine
    paths = [add.path for entry in entries for add in entry.adds]
    if not paths or any(entry.staged for entry in entries):
        return False
    return engine.listed(sink.table).issuperset(paths) and not engine.gone(sink.table, paths)


def _restores(table: DeltaTable, since: int) -> tuple[dict[int, int | None], int]:
    """Those after this version, and the first version that the log tells of. Raises StoreUnavailable."""
    found = dict[int, int | None]()
    entries = tables.history_of(table, table.version() - since)
    for number, entry in enumerate(entries):
        if entry.get("operation") == "RESTORE":
            target = str((entry.get("operationParameters") or {}).get("version")).strip('"')
            found[table.version() - number] = int(target) if target.isdecimal() else None
    return found, table.version() - len(entries) + 1


def path_to(now: int, restores: Restores, looked_at: int, has: Callable[[int], bool]) -> list[int] | None:
    """The RESTOREs by which the version `now` has got the publication, newest first; None where it does not have it, or may not.

    Args:
        looked_at: a version that had the publication, if it was made by then.
        has: whether a version is at or behind the publication, by the transaction id that it shows.
    """
    at, path = now, list[int]()
    while has(at):
        last = max((version for version in restores if version <= at), default=-1)
        if last < 0 or last <= looked_at <= at or not has(last - 1):
            return path
        if (target := restores[last]) is None:
            return None
        at = target
        path.append(last)
    return None


class _Unknown(Exception):
    """The log of a version is gone, or the engine does not show it."""


@dataclass(frozen=True)
class _Versions:
    """The versions of one table."""

    state: ConsumerState
    table: DeltaTable
    what: Publication

    def lost(self, looked_at: int) -> str:
        """What is missing; empty where nothing is. Raises _Unknown, StoreUnavailable."""
        restores, first = _restores(self.table, -1)
        if first > 0:  # what is below may have been restored, too
            restores = {first: None, **restores}
        path = path_to(self.table.version(), restores, looked_at, lambda version: self.what.shown_by(self._at(version)))
        if path is None:
            return "published rows may be missing"
        return next(filter(None, map(self._gone, path)), "")

    def _gone(self, restore: int) -> str:
        """Files that the RESTORE brought back and that are not there any more, although the table lists them."""
        engine = self.state.sinks.engine
        back = engine.listed(self._at(restore)) - engine.listed(self._at(restore - 1))
        gone = engine.gone(self.table, sorted(back & engine.listed(self.table)))
        return f"{len(gone)} files with rows that it brought back are gone (VACUUM): {', '.join(gone[:3])}" if gone else ""

    def _at(self, version: int) -> DeltaTable:
        found = self.table if version == self.table.version() else self.state.sinks.engine.as_of(self.table, version)
        if found is None:
            raise _Unknown
        return found
