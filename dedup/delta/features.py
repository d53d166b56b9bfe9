"""What an append owes to the features of its table, beyond naming the files.

Under most features adding a file is all there is to it. Row tracking wants row ids that were never given before, in-commit timestamps want
a time after that of the commit before. Promises that both go on from exactly the commit before: the entry is put as the very next version,
or not at all. Called by `snapshot`, which puts the entry, and by `sinks`, which asks who may write to a table.

Source: https://github.com/delta-io/delta/blob/master/PROTOCOL.md (writer requirements of each feature), read 2026-11; and each one tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dedup.delta.files import Add
from dedup.delta.storage import StorageOptions, filesystem, read

BY_DELTA_RS = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
    }
)
"""Writer features under which adding a file is all there is to an append - as long as no column or property uses them (sinks.py checks)."""

BY_PUT = frozenset(
    {
        "allowColumnDefaults",
        "checkpointProtection",
        "clustering",
        "domainMetadata",
        "identityColumns",
        "inCommitTimestamp",
        "rowTracking",
        "typeWidening",
        "typeWidening-preview",
        "vacuumProtocolCheck",
        "variantShredding-preview",
        "variantType-preview",
    }
)
"""The same for features under which delta-rs makes no commit (1.6.6), so that we put the log entry."""

EVERY_COLUMN = -1
"""How many columns get bounds where a table is clustered: those that cluster it need bounds, and only its domain metadata names them."""

_TIMES = "delta.enableInCommitTimestamps"
_ROWS = "delta.rowTracking"
_LOG = "_delta_log"
_OF_LOG = re.compile(r"(?:^|/)(\d{20})(\.checkpoint(?:\.[^/]+)?)?\.(?:parquet|json)$")
"""(version, what says that it is a checkpoint) of a file in the log."""


class Owed(NamedTuple):
    """Where the features of a table stand after one of its commits; None where the table does not ask for it."""

    version: int
    highest: int | None  # row id given so far; -1 before the first row
    time: int | None  # in-commit timestamp, milliseconds since 1970

    def after(self, adds: Sequence[Add], now: int) -> Owed:
        """Where they stand once these files are added."""
        rows = sum(add.rows for add in adds)
        return Owed(
            self.version + 1,
            None if self.highest is None else self.highest + rows,
            None if self.time is None else max(now, self.time + 1),
        )


def asks(features: Iterable[str], settings: Mapping[str, str]) -> tuple[bool, bool]:
    """(whether files need row ids, whether commits need a time). Row ids are due as soon as the feature is there, enabled or not."""
    return "rowTracking" in features, "inCommitTimestamp" in features and is_on(settings, _TIMES)


def is_on(settings: Mapping[str, str], name: str) -> bool:
    """Whether a property of a table is true. Delta keeps it as it was given, and reads it without regard to case."""
    return str(settings.get(name, "")).strip().lower() == "true"


def standing(uri: str, options: StorageOptions, version: int, *, rows: bool, time: bool) -> Owed:
    """Read where a table stands at this version: as a rule from the entry of this version alone. Raises OSError."""
    return Owed(version, _highest(uri, options, version) if rows else None, _time(uri, options, version) if time else None)


def first_ids(adds: Sequence[Add], owed: Owed) -> list[dict[str, int]]:
    """What each file's add action says of its rows' ids, where they go on from there."""
    if owed.highest is None:
        return [{}] * len(adds)
    counts = accumulate((add.rows for add in adds), initial=owed.highest + 1)
    return [{"baseRowId": first, "defaultRowCommitVersion": owed.version + 1} for first, _ in zip(counts, adds, strict=False)]


def highest_told(owed: Owed) -> list[dict[str, Any]]:
    """The action that says which row ids are given."""
    if owed.highest is None or owed.highest < 0:
        return []
    text = json.dumps({"rowIdHighWaterMark": owed.highest, "domainName": _ROWS}, separators=(",", ":"))
    return [{"domainMetadata": {"domain": _ROWS, "configuration": text, "removed": False}}]


def _time(uri: str, options: StorageOptions, version: int) -> int:
    """Of that commit; 0 where its entry was cleaned up: that is days old, and so its time is before now."""
    for info in _actions(uri, options, entry_path(version), "commitInfo"):
        return int(info.get("inCommitTimestamp", 0))
    return 0


def _highest(uri: str, options: StorageOptions, version: int) -> int:
    """The newest one that is told: each commit that gives ids tells it, and a checkpoint repeats it."""
    for path in _backwards(uri, options, version):
        if (found := _highest_of(_actions(uri, options, path, "domainMetadata"))) is not None:
            return found
    return -1


def _backwards(uri: str, options: StorageOptions, version: int) -> Iterator[str]:
    """The entry of this version, as a rule all that it takes; then checkpoints and entries, the newest first. Entries may be gone."""
    yield entry_path(version)
    paths = [i.path for i in filesystem(uri, options).get_file_info(pafs.FileSelector(_LOG))]
    found = [(int(m[1]), m[2] is not None, path) for path in paths if (m := _OF_LOG.search(path))]
    yield from (path for at, is_checkpoint, path in sorted(found, reverse=True) if at < version or (is_checkpoint and at == version))


def _highest_of(domains: Iterable[Mapping[str, Any]]) -> int | None:
    for domain in domains:
        if domain["domain"] == _ROWS and not domain.get("removed"):
            return int(json.loads(domain["configuration"])["rowIdHighWaterMark"])
    return None


def _actions(uri: str, options: StorageOptions, path: str, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in an entry or a checkpoint; none where it was cleaned up."""
    if path.endswith(".parquet"):
        with filesystem(uri, options).open_input_file(path) as file, pq.ParquetFile(file) as parts:
            columns = parts.read(columns=[kind]) if kind in parts.schema_arrow.names else None
        return columns.column(0).combine_chunks().drop_null().to_pylist() if columns else []
    content = read(uri, options, path)
    return [] if content is None else actions_in(content.to_pybytes(), kind)


def actions_in(entry: bytes, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the text of a log entry."""
    start = b'{"' + kind.encode() + b'"'
    return [json.loads(line)[kind] for line in entry.splitlines() if line.startswith(start)]


def entry_path(version: int) -> str:
    """Where the log entry of a version is, below its table."""
    return f"{_LOG}/{version:020}.json"
