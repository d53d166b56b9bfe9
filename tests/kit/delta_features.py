"""Delta tables with features under which delta-rs makes no commit: their first log entry is written here, as Spark writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from dedup.delta.objects import create as put
from dedup.delta.storage import StorageOptions, absolute, is_local

DATABRICKS = ("appendOnly", "invariants", "domainMetadata", "clustering", "rowTracking", "inCommitTimestamp")
ENABLED = {"delta.enableRowTracking": "true", "delta.enableInCommitTimestamps": "true", "delta.checkpointInterval": "5"}
LONG_AGO = 1_600_000_000_000


def entry_of(version: int) -> str:
    """The path of a log entry below its table."""
    return f"_delta_log/{version:020}.json"


def create(
    uri: str,
    schema: pa.Schema,
    features: Sequence[str] = DATABRICKS,
    settings: Mapping[str, str] = ENABLED,
    *,
    readers: Sequence[str] = (),
    time: int = LONG_AGO,
    options: StorageOptions = None,
) -> None:
    """An empty table; `readers` are those of its features that readers have to know, too."""
    from deltalake.schema import Schema

    if is_local(uri):
        os.makedirs(uri)
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": list(readers), "writerFeatures": [*features, *readers]}
    metadata = {
        "id": f"made-by-hand-{abs(hash(uri))}",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": Schema.from_arrow(schema).to_json(),
        "partitionColumns": [],
        "configuration": dict(settings),
        "createdTime": time,
    }
    info = {"inCommitTimestamp": time, "timestamp": time, "operation": "CREATE TABLE", "operationParameters": {}}
    clustering = {"domain": "delta.clustering", "configuration": json.dumps({"clusteringColumns": [[schema.names[0]]]}), "removed": False}
    actions = [{"commitInfo": info}, {"protocol": protocol}, {"metaData": metadata}]
    write_entry(uri, 0, [*actions, *([{"domainMetadata": clustering}] if "clustering" in features else [])], options)


def write_entry(uri: str, version: int, actions: Sequence[Mapping[str, Any]], options: StorageOptions = None) -> None:
    """A commit of somebody else."""
    content = "\n".join(json.dumps(action, separators=(",", ":")) for action in actions)
    assert put(absolute(uri), options, entry_of(version), content.encode()) is not None, "the version is taken"


def row_ids(uri: str, options: StorageOptions = None) -> list[tuple[int, int]]:
    """(first, last) row id of each file that the log adds, in the order of the commits."""
    from dedup.delta.storage import read

    found, version = [], 0
    while (content := read(absolute(uri), options, entry_of(version))) is not None:
        for add in (json.loads(line).get("add") for line in content.to_pybytes().splitlines()):
            if add is not None:
                found.append((add["baseRowId"], add["baseRowId"] + json.loads(add["stats"])["numRecords"] - 1))
        version += 1
    return found


def version_of(uri: str) -> int:
    """The newest version of the table."""
    return int(DeltaTable(uri).version())


def require_ids_once(uri: str) -> None:
    """No row id is given twice in a table that `create` made; a plain one passes. Raises AssertionError."""
    protocol = DeltaTable(uri).protocol()
    if "rowTracking" not in (protocol.writer_features or ()):
        return
    spans = sorted(row_ids(uri))
    assert all(last < first for (_, last), (first, _) in pairwise(spans)), f"row ids of {uri} overlap: {spans}"
