"""Rows of a table and of files beside it as one. Called by whoever reads dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.dataset as ds


class Rows(Protocol):
    """A dataset of Arrow, or what answers like one."""

    def to_table(self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None) -> pa.Table:
        """Rows that the filter lets through."""


@dataclass(frozen=True)
class Several:
    """Rows of several places as one."""

    schema: pa.Schema
    parts: tuple[Rows, ...]

    def to_table(self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None) -> pa.Table:
        """Rows that the filter lets through."""
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(n).with_nullable(True) for n in names])
        return pa.concat_tables([part.to_table(columns=names, filter=filter).cast(schema) for part in self.parts])
