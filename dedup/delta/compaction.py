"""Few large files in place of many small ones, for tables that delta-rs commits to.

Promises that each row stays in the table exactly once, whoever compacts, appends, deletes or rewrites at the same time. delta-rs's OPTIMIZE
does not: of two at once both land, and then all rows are there twice (1.6.6; no setting of its commits changes that). Here a commit goes
against exactly a snapshot that has all files which it removes. Called by engine.py.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from dedup.delta import tables
from dedup.delta.files import Add, FileWriter, indexed_columns, partition_text
from dedup.delta.storage import StorageOptions

TRIES = 5
"""Commits of one portion beside others who commit. Its files are written once: between a look and the commit there are milliseconds."""

LONGEST_PAUSE = 0.2
"""Seconds between two of them, at most."""


class File(NamedTuple):
    """One data file of a snapshot."""

    path: str
    size: int  # bytes
    values: tuple[tuple[str, str | None], ...]  # of its partition
    written: int  # milliseconds since 1970


Bin = Sequence[File]
"""Files of one partition that become one, the oldest first."""


def compact(table: DeltaTable, options: StorageOptions, target: int, row_group: int) -> None:
    """Write small files of each partition as one, portion by portion; rows keep the order of their files.

    It stops where somebody else has removed a file of a portion, as another compaction does: the next one goes on.

    Args:
        target: bytes at which a file is left alone, and up to which files are put together. One such file at a time is in memory.
        row_group: rows.

    Raises:
        What `tables.FAILED` names.

    Crash: of each portion the old files or the new ones are in the table; new ones that no commit names are invisible, VACUUM takes them.
    """
    handle, rewriter = tables.Handle(table.table_uri, options), _Rewriter(table, options, row_group)
    for portion in _portions(_bins(_files(table), target), target):
        adds = [add for one in portion for add in rewriter.write(one)]
        if not _replaced(handle, [file for one in portion for file in one], adds):
            return


def _files(table: DeltaTable) -> list[File]:
    """The oldest first."""
    by = list(table.metadata().partition_columns)
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return []
    partitions = zip(*(map(partition_text, actions[f"partition.{name}"].to_pylist()) for name in by), strict=True)
    values = [tuple(zip(by, texts, strict=True)) for texts in partitions] or [()] * actions.num_rows
    written = actions["modification_time"].cast(pa.int64())
    columns = (actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), values, written.to_pylist())
    return sorted((File(*row) for row in zip(*columns, strict=True)), key=lambda file: file.written)


def _bins(files: Iterable[File], target: int) -> Iterator[Bin]:
    """Two or more small files each, up to `target` bytes together."""
    small = defaultdict[tuple[tuple[str, str | None], ...], list[File]](list)
    for file in files:
        if file.size < target:
            small[file.values].append(file)
    for of_one in small.values():
        yield from (one for one in _filled(of_one, target) if len(one) > 1)


def _filled(files: Iterable[File], target: int) -> Iterator[Bin]:
    """Side by side, as many as have room."""
    held: list[File] = []
    size = 0
    for file in files:
        if size + file.size > target:
            yield held
            held, size = [], 0
        held.append(file)
        size += file.size
    yield held


def _portions(bins: Iterable[Bin], most: int) -> Iterator[list[Bin]]:
    """Of about so many bytes: many tiny bins are one commit, and a long work is many, so that one refusal costs little."""
    held: list[Bin] = []
    size = 0
    for one in bins:
        held.append(one)
        size += sum(file.size for file in one)
        if size >= most:
            yield held
            held, size = [], 0
    if held:
        yield held


class _Rewriter:
    """Writes the rows of several files of a snapshot as one."""

    def __init__(self, table: DeltaTable, options: StorageOptions, row_group: int) -> None:
        described = table.metadata()
        fields = [field for field in pa.schema(table.schema().to_arrow()) if field.name not in described.partition_columns]
        layout = {"compression": "snappy", "row_group_size": row_group}
        indexed = indexed_columns(described.configuration)
        self._writer = FileWriter(table.table_uri, options, pa.schema(fields), table.table_uri, indexed=indexed, codec=layout)
        self._dataset = tables.dataset(table)
        self._fragments = {fragment.path: fragment for fragment in self._dataset.get_fragments()}

    def write(self, files: Bin) -> list[Add]:
        """One file of their partition, which no commit names yet. Crash: it is invisible."""
        chosen = [self._fragments[file.path] for file in files]
        rows = ds.FileSystemDataset(chosen, self._writer.schema, self._dataset.format, self._dataset.filesystem).to_table()
        return [add._replace(partition_values=dict(files[0].values)) for add in self._writer.write(rows)]


def _replaced(handle: tables.Handle, files: Sequence[File], adds: Sequence[Add]) -> bool:
    """Commit that these files give way to the new ones; False where one of them is gone. Raises what `tables.FAILED` names.

    The commit says that data changes, although no row does. Otherwise OPTIMIZE of delta-rs, by a person or an older version of dedup, would
    land behind it and double the rows (tried, 1.6.6). Who reads these tables as a stream would get rows again; nobody does.

    Crash: the old ones or the new ones are in the table.
    """
    removes = [RemoveAction(file.path, True, int(time.time() * 1000), file.size, dict(file.values)) for file in files]
    for attempt in range(TRIES):
        table = handle.look()
        if table is None or not {file.path for file in files} <= tables.listed(table):
            return False
        try:
            tables.commit(table, adds, {}, removes=removes, exact=True)
            return True
        except tables.COMMIT_REFUSED:
            handle.forget()
            if attempt + 1 == TRIES:
                raise
            time.sleep(random.uniform(0, LONGEST_PAUSE))
    return False
