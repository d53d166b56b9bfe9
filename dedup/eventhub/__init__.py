"""Event Hubs over AMQP, by azure-eventhub: `format("eventhubs")` for Spark, reading again by position, where to go on.

Needs azure-eventhub: `pip install 'dedup[eventhubs]'`. Importing this imports neither Spark nor a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import azure.eventhub  # noqa: F401  asked here, so that who lacks it reads one sentence
except ModuleNotFoundError as missing:
    raise ImportError("dedup.eventhub needs azure-eventhub: pip install 'dedup[eventhubs]'") from missing

from dedup.eventhub.errors import ReceiverStolen
from dedup.eventhub.namespace import Namespace
from dedup.eventhub.reading import LogReader, log_reader
from dedup.eventhub.runner import run, run_async
from dedup.eventhub.settings import Connection
from dedup.eventhub.starting import starting_positions

if TYPE_CHECKING:
    from dedup.eventhub.source import EventHubsSource, register

__all__ = [
    "Connection",
    "EventHubsSource",
    "LogReader",
    "Namespace",
    "ReceiverStolen",
    "log_reader",
    "register",
    "run",
    "run_async",
    "starting_positions",
]


def __getattr__(name: str) -> Any:
    if name in ("EventHubsSource", "register"):
        from dedup.eventhub import source

        return getattr(source, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
