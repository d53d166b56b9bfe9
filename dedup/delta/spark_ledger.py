"""The ledger of a consumer whose tables only Spark can write.

It compares and swaps by one transaction id for the whole life of the table; the id's version is the generation and the number of the
decision. Spark commits a version only if the table has none that is as high, and two commits that overlap conflict on the id. So of all
instances that decide number n one succeeds, and each of them reads back which. Called by the consumer state.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dedup.delta.engine import KEPT_BYTES, SparkEngine
from dedup.delta.ledger import SCHEMA, Ledger, LedgerFile
from dedup.delta.ledger_files import DecisionSpan
from dedup.delta.tables import seq_of

_GENERATION = 1 << 40
"""Decisions that fit into one generation. A new one begins above all of the older ones, so that no late commit of theirs lands."""


class SparkLedger(Ledger):
    """Rows and commits through Spark. A "file" is one day of one section."""

    _engine: SparkEngine
    _table: Any = None  # that `_rows` are of
    _rows: pa.Table | None = None
    _since: int = 0  # `_rows` are those with a seq >= this

    def files(self, table: Any, after: int = 0) -> list[LedgerFile]:
        """What holds a seq >= `after`; small tables, and what came lately, are read in one go."""
        if table is not self._table or self._rows is None or after < self._since:
            self._table, self._rows, self._since = table, None, after
        if self._rows is None and (after or table.size() <= KEPT_BYTES):
            self._rows = self._engine.side().read(self.uri, table.version(), SCHEMA.names, f"seq >= {after}").cast(SCHEMA)
        if self._rows is not None:
            spans = self._rows.group_by(["section", "day"]).aggregate([("seq", "min"), ("seq", "max"), ("seq", "count")])
            spans = spans.select(["section", "day", "seq_min", "seq_max", "seq_count"])
        else:
            spans = self._engine.side().spans(self.uri, table.version(), ("section", "day"), "seq")
        rows = zip(*(c.to_pylist() for c in spans.columns), strict=True)
        return sorted((LedgerFile(f"{row[0]}/{row[1]}", *row) for row in rows), key=lambda f: (f.first, f.last))

    def read(self, files: Sequence[LedgerFile], columns: Sequence[str], after: int, until: int | None = None) -> pa.Table:
        """Rows with seq > `after`, and not above `until`, of these. `seq` is always among the columns. Raises StoreUnavailable."""
        names = ["seq", *(c for c in columns if c != "seq")]
        schema = pa.schema([SCHEMA.field(n) for n in names])
        if not files:
            return schema.empty_table()
        if self._rows is not None:
            wanted = pc.is_in(_place(self._rows["section"], self._rows["day"]), pa.array([f.path for f in files]))
            return DecisionSpan(after, until).of(self._rows.filter(wanted)).select(names)
        places = " OR ".join(f"(section = '{f.section}' AND day = DATE'{f.day}')" for f in files)
        span = f"seq > {after}" if until is None else f"seq > {after} AND seq <= {until}"
        return self._engine.side().read(self.uri, self._table.version(), names, f"{span} AND ({places})").cast(schema)

    def write(self, section: str, day: dt.date, rows: pa.Table) -> list[Any]:
        """Rows that the commit will bring; nothing is written before."""
        if not rows.num_rows:
            return []
        given = {"section": pa.repeat(section, rows.num_rows), "day": pa.repeat(pa.scalar(day), rows.num_rows)}
        columns = {n: given.get(n, rows[n] if n in rows.column_names else None) for n in SCHEMA.names}
        empty = [pa.nulls(rows.num_rows, f.type) if columns[f.name] is None else columns[f.name] for f in SCHEMA]
        return [pa.table(empty, names=SCHEMA.names).cast(SCHEMA)]

    def commit(self, table: Any, adds: Sequence[Any], transactions: Mapping[str, int]) -> None:
        """Append all rows at once with the number of the decision. Crash: all of it is in the table, or nothing."""
        (app, shown), *_ = transactions.items()
        consumer_and_table, _, generation = app.rpartition("/")
        version = int(generation) * _GENERATION + seq_of(shown)
        self._engine.side().append_rows(self.uri, pa.concat_tables(adds), consumer_and_table, version, transactions)


def _place(sections: Any, days: Any) -> Any:
    return pc.binary_join_element_wise(sections, days.cast(pa.string()), "/")
