"""Rows without Spark: an Arrow table, or dicts, behind the `Rows` interface of store.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa


@dataclass(frozen=True)
class ArrowRows:
    """Rows that are already here."""

    table: pa.Table
    in_tasks: ClassVar[bool] = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return self.table.schema

    def arrow(self) -> pa.Table:
        """The rows themselves."""
        return self.table

    def files(self, write: Callable[[Any], Any], columns: list[str]) -> list[str]:
        """`write` run once over all rows, in this process."""
        return list(write(iter(self.table.select(columns).to_batches())))


class EventRows(list[dict[str, Any]]):
    """Rows that handlers of single events returned: columns and types are values of single events, and a misfit is an event's fault."""
