"""Housekeeping of our own tables: few files, short logs. Changes no row.

A failure here never fails a batch: it is logged, and the next turn tries again. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Collection, Iterable

import pyarrow.fs as pafs
from deltalake import DeltaTable

from dedup.delta import tables
from dedup.delta.engine import Engine
from dedup.delta.events import ROW_GROUP
from dedup.delta.storage import Options, filesystem, remove

log = logging.getLogger("dedup")

COMPACT_EVERY = 100
"""Decisions between two compactions: bounds the number of files that a start has to open."""

STAGED_DAYS = 7
"""Age above which staged rows that no pending decision names are left over from a dead attempt."""

VACUUM_EVERY = 1000
"""Decisions between two clean-ups of files that a compaction has replaced."""

TARGET_BYTES = 64 * 1024 * 1024
"""Size above which a file is left alone."""


def compact(uri: str, engine: Engine) -> None:
    """Rewrite small files of each partition into one. Crash: the old files or the new ones are in the table."""
    _quietly(uri, engine, lambda table: engine.compact(table, TARGET_BYTES, ROW_GROUP), "compacted")


def vacuum(uri: str, engine: Engine, *, full: bool = True) -> None:
    """Delete files that left the table longer ago than its retention; with `full` also those that never came into it.

    Crash: some are deleted.
    """
    _quietly(uri, engine, lambda table: engine.vacuum(table, full=full), "vacuumed")


def after_decision(seq: int, uris: Iterable[str], engine: Engine) -> None:
    """What a running consumer does by itself from time to time, after everything of a decision is true and visible."""
    for uri in uris:
        if seq % COMPACT_EVERY == 0:
            compact(uri, engine)
        if seq % VACUUM_EVERY == 0:
            vacuum(uri, engine, full=False)


def everything(uris: Iterable[str], engine: Engine, *, full: bool) -> None:
    """What a person asks for: few files, and none that nobody needs. Crash: no row changes; the next one goes on.

    Args:
        full: also files that never came into a table.
    """
    for uri in uris:
        compact(uri, engine)
        vacuum(uri, engine, full=full)


def clear_staged(root: str, options: Options, folder: str, needed: Collection[str], now: dt.datetime) -> None:
    """Delete staged rows of attempts that never committed, once they are older than STAGED_DAYS. Crash: some are deleted."""
    selector = pafs.FileSelector(f"staged/{folder}", allow_not_found=True, recursive=True)
    found = filesystem(root, options).get_file_info(selector)
    old = [i.path for i in found if i.type == pafs.FileType.File and i.mtime is not None and now - i.mtime > dt.timedelta(days=STAGED_DAYS)]
    remove(root, options, [path for path in old if path not in needed])


def _quietly(uri: str, engine: Engine, act: Callable[[DeltaTable], object], what: str) -> None:
    try:
        table = engine.handle(uri).look()
        if table is not None:
            act(table)
    except tables.FAILED as error:
        log.warning("%s was not %s this time: %s", uri, what, error)
