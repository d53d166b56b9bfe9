"""Exactly-once effect for Spark Structured Streaming: every message handled once, none lost.

The public names. Importing this needs neither pyspark nor a driver: each name is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _refuse_namesakes() -> None:
    """Say so in one sentence where a user's own checkpoint.py or deadletter.py hides our package of that name."""
    home = Path(__file__).parent.parent
    for name in ("checkpoint", "deadletter"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin) if spec and spec.origin else None
        if found == home / name / "__init__.py":
            continue
        sentence = f"dedup has a package of its own named {name!r}, and Python finds {found or 'none'} in its place: " + (
            f"rename {found.name}, or start Python from another folder." if found else "run pip install --force-reinstall dedup-spark."
        )
        # under `python -m dedup` nothing of ours runs before this that could catch an exception
        raise SystemExit(f"dedup: {sentence}") if sys.argv[:1] == ["-m"] and "dedup" in sys.orig_argv else ImportError(sentence)


_refuse_namesakes()

from checkpoint.errors import (  # noqa: E402  a namesake has to be refused before it is imported
    AmbiguousPosition,
    BatchTooLarge,
    BudgetExceeded,
    CheckpointError,
    CommitConflict,
    CommitUnknown,
    ConfigError,
    DedupError,
    DestinationUnavailable,
    Fenced,
    HandlerError,
    IncarnationChanged,
    KeyConflict,
    LettersUnread,
    NotConfirmed,
    PartitionLost,
    PositionGap,
    PositionsMissing,
    PublicationStuck,
    ReceiverStolen,
    Refused,
    RegistryUnavailable,
    ReprocessStopped,
    ResendTooLate,
    RowsMisfit,
    RowsRefused,
    SchemaOutdated,
    SealUnavailable,
    SettingsChanged,
    SinkMismatch,
    SourceUnavailable,
    SparkGone,
    StateTooNew,
    StillHeld,
    StoreError,
    StoreRestored,
    StoreUnavailable,
    ValuesRefused,
)
from checkpoint.install import Extra, needs  # noqa: E402

for _error in [found for found in globals().values() if isinstance(found, type) and issubclass(found, DedupError)]:
    _error.__module__ = __name__  # letters, logs and tracebacks name an error as users import it

if TYPE_CHECKING:
    from deadletter.encryption import Encrypt
    from deadletter.hiding import LetterPart
    from deadletter.known import ErrorClass
    from deadletter.masks import Contents, Mask
    from deadletter.parked import ParkedGroup
    from deadletter.policy import Budget, FailurePolicy, Retry
    from deadletter.selection import Selection
    from dedup import decode
    from dedup.consumer import Consumer
    from dedup.core.envelope import Columns
    from dedup.delta import DeltaStore
    from dedup.pipeline.handlers import Event
    from dedup.pipeline.report import Report
    from dedup.pipeline.tx import Tx
    from dedup.postgres import PostgresStore
    from dedup.reprocessing.dead_letters import DeadLetters
    from dedup.reprocessing.letters import reprocess
    from dedup.reprocessing.options import ReprocessOptions
    from dedup.reprocessing.replay import replay
    from dedup.settings import Limits, Takeover

__all__ = [
    "AmbiguousPosition",
    "BatchTooLarge",
    "Budget",
    "BudgetExceeded",
    "CheckpointError",
    "Columns",
    "CommitConflict",
    "CommitUnknown",
    "ConfigError",
    "Consumer",
    "Contents",
    "DeadLetters",
    "DedupError",
    "DeltaStore",
    "DestinationUnavailable",
    "Encrypt",
    "ErrorClass",
    "Event",
    "FailurePolicy",
    "Fenced",
    "HandlerError",
    "IncarnationChanged",
    "KeyConflict",
    "LetterPart",
    "LettersUnread",
    "Limits",
    "Mask",
    "NotConfirmed",
    "ParkedGroup",
    "PartitionLost",
    "PositionGap",
    "PositionsMissing",
    "PostgresStore",
    "PublicationStuck",
    "ReceiverStolen",
    "Refused",
    "RegistryUnavailable",
    "Report",
    "ReprocessOptions",
    "ReprocessStopped",
    "ResendTooLate",
    "Retry",
    "RowsMisfit",
    "RowsRefused",
    "SchemaOutdated",
    "SealUnavailable",
    "Selection",
    "SettingsChanged",
    "SinkMismatch",
    "SourceUnavailable",
    "SparkGone",
    "StateTooNew",
    "StillHeld",
    "StoreError",
    "StoreRestored",
    "StoreUnavailable",
    "Takeover",
    "Tx",
    "ValuesRefused",
    "__version__",
    "decode",
    "replay",
    "reprocess",
]

_HOMES = {
    "Budget": "deadletter.policy",
    "Columns": "dedup.core.envelope",
    "Consumer": "dedup.consumer",
    "Contents": "deadletter.masks",
    "DeadLetters": "dedup.reprocessing.dead_letters",
    "DeltaStore": "dedup.delta",
    "Encrypt": "deadletter.encryption",
    "ErrorClass": "deadletter.known",
    "Event": "dedup.pipeline.handlers",
    "FailurePolicy": "deadletter.policy",
    "LetterPart": "deadletter.hiding",
    "Limits": "dedup.settings",
    "Mask": "deadletter.masks",
    "ParkedGroup": "deadletter.parked",
    "PostgresStore": "dedup.postgres",
    "Report": "dedup.pipeline.report",
    "ReprocessOptions": "dedup.reprocessing.options",
    "Retry": "deadletter.policy",
    "Selection": "deadletter.selection",
    "Takeover": "dedup.settings",
    "Tx": "dedup.pipeline.tx",
    "decode": "dedup.decode",
    "replay": "dedup.reprocessing.replay",
    "reprocess": "dedup.reprocessing.letters",
}

_EXTRAS: dict[str, Extra] = {"deadletter.encryption": "encrypt", "dedup.delta": "delta", "dedup.postgres": "postgres"}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a program that uses one store needs the other one's driver as little as Spark's shell does."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as missing:
        package = (missing.name or "dedup").split(".")[0]
        if home not in _EXTRAS or package == "dedup":
            raise
        raise ImportError(needs(name, package, _EXTRAS[home])) from missing
    return module if name == "decode" else getattr(module, name)


def __dir__() -> list[str]:
    """The public names, those that are not imported yet included."""
    return list(__all__)
