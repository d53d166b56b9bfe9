"""Reading one data file of a ledger: of large ones only the parts that are asked for, and errors that name the file.

Promises that a file which is not there, and one that is damaged, are told apart: the first may come back by itself. Called by the ledger.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import StoreError, StoreUnavailable, command
from dedup.delta.storage import is_local

if TYPE_CHECKING:
    from dedup.delta.ledger import LedgerFile


class DecisionSpan(NamedTuple):
    """Decisions behind one, up to another one."""

    after: int
    until: int | None = None  # None: up to the newest

    def has_all(self, first: int, last: int) -> bool:
        """Whether all decisions from the first to the last are in it."""
        return first > self.after and (self.until is None or last <= self.until)

    def has_some(self, first: int, last: int) -> bool:
        """Whether some of them may be."""
        return last > self.after and (self.until is None or first <= self.until)

    def of(self, rows: pa.Table) -> pa.Table:
        """Those rows whose `seq` is in it."""
        rows = rows.filter(pc.greater(rows["seq"], self.after))
        return rows if self.until is None else rows.filter(pc.less_equal(rows["seq"], self.until))


class Portion(NamedTuple):
    """Some decisions of one day, and the files that have them."""

    files: list[LedgerFile]
    span: DecisionSpan
    day: dt.date
    last: bool  # what comes behind it is of earlier days


def portions(files: Iterable[LedgerFile], after: int, size: int) -> Iterator[Portion]:
    """The decisions behind this one, the newest first; so many at a time, because a day of them may be more than memory has room for."""
    days: dict[dt.date, list[LedgerFile]] = defaultdict(list)
    for file in files:
        days[file.day].append(file)
    for day in sorted(days, reverse=True):
        end = max(file.last for file in days[day])
        while end > after:
            span = DecisionSpan(max(end - size, after), end)
            end = max((min(file.last, span.after) for file in days[day] if file.first <= span.after), default=0)
            yield Portion([file for file in days[day] if span.has_some(file.first, file.last)], span, day, end <= after)


def rows_of(content: Any, names: list[str], span: DecisionSpan) -> pa.Table:
    """Columns of a Parquet file; at least its rows of the span, in whole row groups. Raises OSError, ArrowException."""
    file = pq.ParquetFile(content)
    place = file.schema_arrow.get_field_index("seq")
    bounds = [file.metadata.row_group(number).column(place).statistics for number in range(file.num_row_groups)]
    return file.read_row_groups([number for number, told in enumerate(bounds) if _may_have(told, span)], columns=names)


def _may_have(told: Any, span: DecisionSpan) -> bool:
    return told is None or not told.has_min_max or span.has_some(told.min, told.max)


def dated(rows: pa.Table, schema: pa.Schema, day: dt.date) -> pa.Table:
    """Rows of a file in this schema, with its day where that is asked for."""
    given = rows.append_column("day", pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows)) if "day" in schema.names else rows
    return given.cast(schema)


@contextmanager
def reading_file(path: str, ledger: str, consumer: str) -> Iterator[None]:
    """Raises StoreUnavailable where a file of a ledger cannot be reached, StoreError where it is damaged.

    Of damage within a page Arrow makes an OSError, without a number; a local file system gives one.
    """
    try:
        yield
    except MemoryError:  # Arrow's is both
        raise
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and (error.errno is not None or not is_local(ledger)):
            raise StoreUnavailable(f"The file {path} of the ledger {ledger} cannot be read: {error}") from error
        raise StoreError(
            f"The file {path} of the ledger {ledger} is damaged, and without it consumer {consumer!r} decides nothing: {error}. Bring this "
            f"file back from a backup; or bring back the whole ledger, and run {command('consumer', 'accept-restore', consumer)}."
        ) from error
