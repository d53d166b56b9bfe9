"""How rows of one kind (Spark DataFrame, Arrow table) are asked for what the flow needs of them."""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa

from dedup.store import Rows


class Frames(Protocol):
    """What Tx needs of one kind of rows."""

    def columns(self, rows: Any) -> list[str]:
        """Column names."""

    def positions(self, rows: Any, condition: Any | None, columns: list[str]) -> pa.Table:
        """These columns of the rows for which the condition is true (None: of all rows). One evaluation."""

    def without(self, rows: Any, positions: pa.Table) -> Any:
        """The rows whose position is not among `positions`, compared by its columns."""

    def rows(self, rows: Any) -> Rows:
        """The rows as a store takes them. Accepts the frame's own kind, an Arrow table, a dict, or a list of dicts."""
