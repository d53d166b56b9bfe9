"""Data that was erased leaves the files of our own tables: those that hold it are written anew without it, and the old ones expire.

A letter is erased by a decision like any other. Rows of before say what it held, until `scrub` writes their files anew. Messages are
erased by such a rewrite alone. Files that left a table are deleted by VACUUM, after the time that the table keeps them: until then whoever
reads an older version of the table, or the files themselves, finds the data. Called by the store and the outbox.
"""

from __future__ import annotations

import datetime as dt
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from checkpoint.errors import CommitConflict
from deadletter.letter import CONTENTS, ERASED, PAST_CONTENTS, Action
from dedup.core.retention import Remains
from dedup.delta import tables
from dedup.delta.letters import HISTORIC, INDEXED, ROW_GROUP, STATES

T = TypeVar("T")

ATTEMPTS = 20
"""Tries to write files anew beside others who commit to the table."""

LONGEST_PAUSE = 2.0
"""Seconds between two of them, at most."""

KEPT_FOR = dt.timedelta(days=7)
"""How long a table keeps files that left it, unless it says otherwise (delta.deletedFileRetentionDuration)."""

_RETENTION = re.compile(r"(?:interval\s+)?(\d+)\s+(\w+?)s?", re.IGNORECASE)

_UNITS = {"minute": 1 / 1440, "hour": 1 / 24, "day": 1.0, "week": 7.0}


@dataclass(frozen=True)
class Blank:
    """Which rows of a table still hold what is to leave it, and what stands there from then on."""

    needed: ds.Expression  # asks for no large column
    where: str  # the same in SQL
    values: Mapping[str, str | int | None]  # column -> what every such row says in it
    indexed: int  # columns with bounds, as the table has them
    codec: Mapping[str, Any] = field(default_factory=lambda: {"compression": "snappy"})

    def apply(self, rows: pa.Table) -> tuple[pa.Table, int]:
        """All these rows, blanked where it is needed, and how many were."""
        count = rows.num_rows
        hit = rows.append_column("_row", pa.array(np.arange(count))).filter(self.needed)["_row"].to_numpy()
        kept = np.ones(count, dtype=bool)
        kept[hit] = False
        at = pa.array(np.arange(count), mask=~kept)  # a row of nulls in place of each that is blanked
        for name in (name for name in self.values if name in rows.column_names):
            place, kind, value = rows.schema.get_field_index(name), rows.schema.field(name), self.values[name]
            column = rows[name].take(at)
            if value is not None:
                column = pc.if_else(pa.array(kept), column, pa.scalar(value, kind.type))
            rows = rows.set_column(place, kind, column)
        return rows, len(hit)

    @property
    def assignments(self) -> str:
        """What SQL says behind SET."""
        return ", ".join(f"{name} = {'NULL' if v is None else v if isinstance(v, int) else repr(v)}" for name, v in self.values.items())


def of_letters(ids: Sequence[str]) -> Blank:
    """Rows of these letters in the table of events, but those that say that they were erased."""
    named, rows = ds.field("id").isin(pa.array(ids, pa.string())), [*STATES, HISTORIC]
    action, reason = ds.field("action"), ds.field("reason")
    told = action.is_null() | (action != Action.FORGOTTEN.value)
    needed = named & ds.field("event").isin(rows) & told & (reason.is_null() | (reason != ERASED))
    where = (
        f"id IN ({_listed(ids)}) AND event IN ({_listed(rows)}) AND (action IS NULL OR action <> '{Action.FORGOTTEN.value}') "
        f"AND (reason IS NULL OR reason <> '{ERASED}')"
    )
    values = {**dict.fromkeys((*CONTENTS, *PAST_CONTENTS)), "reason": ERASED}
    return Blank(needed, where, values, INDEXED, {"compression": "snappy", "row_group_size": ROW_GROUP})


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(f"'{text}'" for text in texts)


def blanked(engine: Any, uri: str, blank: Blank, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Write the files anew that hold such rows; returns how many rows. None where there is no table, or no such row.

    Raises:
        CommitConflict: others commit all the time. StoreUnavailable, and what delta-rs raises.

    Crash: the table has the old files or the new ones.
    """
    left = "not all of what was erased has left its files"
    return changed(engine, uri, lambda table: int(engine.blank(table, blank)), left, sleep=sleep) or 0


def changed(engine: Any, uri: str, change: Callable[[Any], T], left: str, *, sleep: Callable[[float], None] = time.sleep) -> T | None:
    """What the change of a table returns, made again where somebody else has committed meanwhile; None where there is no table.

    Args:
        left: what is so if the change is not made, for the error.

    Raises:
        CommitConflict: others commit all the time. StoreUnavailable, and what delta-rs raises.

    Crash: what the change says.
    """
    handle = engine.handle(uri)
    for attempt in range(ATTEMPTS):
        table = handle.look()
        if table is None:
            return None
        try:
            return change(table)
        except tables.FAILED as error:
            handle.forget()
            if not isinstance(error, tables.COMMIT_REFUSED):
                raise
            sleep(random.uniform(0, min(LONGEST_PAUSE, 0.05 * 2**attempt)))
    raise CommitConflict(f"The table {uri} changes too often: {left}. Run it again.")


def expiring(engine: Any, uri: str) -> list[Remains]:
    """Where files of this table can still be found that were written anew; nothing where none was, or they are deleted."""
    table = engine.handle(uri).look()
    last = engine.blanked_at(table) if table is not None else None
    if last is None:
        return []
    until = last + kept_for(table.metadata().configuration)
    if until < dt.datetime.now(dt.UTC) and not engine.deletable(table):
        return []
    then = "the same command, or `dedup upkeep`, deletes them then"
    return [Remains(f"older files of {uri}, which its older versions show", until, then)]


def bounds(uri: str) -> Remains:
    """What a ledger keeps of the sinks' rows: the bounds of columns of each file that a decision wrote."""
    return Remains(
        f"the ledger {uri} and the sinks' own logs: smallest and largest values of columns of files that were written to sinks",
        None,
        "nothing; a sink whose delta.dataSkippingNumIndexedCols leaves personal columns out has none of them from then on",
    )


def kept_for(settings: Mapping[str, str | None]) -> dt.timedelta:
    """How long a table with these properties keeps files that left it."""
    found = _RETENTION.fullmatch((settings.get("delta.deletedFileRetentionDuration") or "").strip())
    days = _UNITS.get(found[2].lower()) if found else None
    return KEPT_FOR if found is None or days is None else dt.timedelta(days=int(found[1]) * days)
