"""What must have arrived, computed from the CSV and the seed by plain pyarrow: nothing here has passed through the library.

Promises: the multiset of sink rows and of dead letters that any correct run ends with, whenever it was killed. Called by audit.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dedup.demo import delivery as d

NO_DEPARTURE = "no departure time"
"""The reason that the demo's handler gives."""

LETTERS = pa.schema([pa.field(name, pa.string()) for name in ("kind", "reason")] + [pa.field("body", pa.binary())])
"""What a dead letter is compared by: kind, the handler's reason ('' where the library gives it), exact body."""


@dataclass(frozen=True)
class Expected:
    """The end of a correct run."""

    rows: pa.Table
    """FLIGHT, one row per flight that departed and whose event could be read: each once, however often it was delivered."""
    letters: pa.Table
    """LETTERS, one row per event that could not be processed."""
    reserved: int
    """Flights with a readable key: one reservation each, departed or not."""


def compute(delivery: d.Delivery, table: pa.Table) -> Expected:
    """The rows and letters of these flights delivered so. Copies of a flight and redeliveries of an event add nothing."""
    sent = delivery.topic.filter(pc.invert(delivery.topic["copy"])).sort_by("row")
    damage = sent["damage"].to_numpy()
    grounded = pc.is_null(table["dep_time"]).to_numpy()
    intact = damage == d.INTACT
    letters = [
        _letters(table, damage, np.isin(damage, (d.CUT, d.GARBAGE)), "UNDECODABLE", ""),
        _letters(table, damage, damage == d.NO_ID, "NO_KEY", ""),
        _letters(table, damage, intact & grounded, "REJECTED", NO_DEPARTURE),
    ]
    return Expected(table.filter(pa.array(intact & ~grounded)), pa.concat_tables(letters), int(intact.sum()))


def _letters(table: pa.Table, damage: npt.NDArray[np.int8], which: npt.NDArray[np.bool_], kind: str, reason: str) -> pa.Table:
    rows = np.flatnonzero(which)
    bodies = d.body(table, pa.chunked_array([rows]), damage[rows])
    return pa.table([pa.repeat(kind, len(rows)), pa.repeat(reason, len(rows)), bodies], schema=LETTERS)


def difference(expected: pa.Table, found: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(lost, doubled): rows of `expected` that `found` lacks, and rows that `found` has beyond them, as often as they are off.

    Rows are compared by all columns of `expected`, nulls equal to nulls; a row that came out changed is in both. Columns keep
    their names, `times` says how often.

    Raises:
        pyarrow.ArrowInvalid: `found` has other columns, or values that do not fit the expected types.
    """
    names = expected.column_names
    signed = [
        t.select(names).cast(expected.schema).append_column("times", pa.repeat(pa.scalar(sign, pa.int64()), t.num_rows))
        for t, sign in ((expected, -1), (found, 1))
    ]
    balance = pa.concat_tables(signed).group_by(names).aggregate([("times", "sum")]).rename_columns([*names, "times"])
    lost = balance.filter(pc.less(balance["times"], 0))
    doubled = balance.filter(pc.greater(balance["times"], 0))
    return lost.set_column(len(names), "times", pc.negate(lost["times"])), doubled
