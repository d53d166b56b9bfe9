"""Where we are: positions, ranges, checkpoints, and every error of the project.

Importing this needs no driver: `PostgresCheckpointStore` is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from checkpoint.errors import DedupError
from checkpoint.install import Extra, needs
from checkpoint.position import Partition, Range, Ranges
from checkpoint.processors import Group

if TYPE_CHECKING:
    from checkpoint.blob import BlobMirror
    from checkpoint.eventhub import PostgresCheckpointStore

__all__ = ["BlobMirror", "DedupError", "Group", "Partition", "PostgresCheckpointStore", "Range", "Ranges"]

_HOMES: dict[str, tuple[str, tuple[Extra, ...]]] = {
    "BlobMirror": ("checkpoint.blob", ("blob",)),
    "PostgresCheckpointStore": ("checkpoint.eventhub", ("eventhubs", "postgres")),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, extras = _HOMES[name]
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as missing:
        package = missing.name or "checkpoint"
        if package.split(".")[0] == "checkpoint":
            raise
        raise ImportError(needs(name, package, *extras)) from missing
