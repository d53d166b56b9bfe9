"""Event Hubs over AMQP with azure-eventhub: `format("eventhubs")` for Spark, the runner without Spark, reading again by position, and
sending the messages of an outbox.

This package needs azure-eventhub: `pip install 'dedup-spark[eventhubs]'`. Importing it imports neither Spark nor a database driver. Each
name loads its module at its first use, because Spark imports this package in each of its Python processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from checkpoint.install import needs

try:
    import azure.eventhub  # noqa: F401  asked here, so that who lacks it reads one sentence
except ModuleNotFoundError as missing:
    raise ImportError(needs("dedup.eventhub", "azure-eventhub", "eventhubs")) from missing

if TYPE_CHECKING:
    from dedup.eventhub.connection import Connection
    from dedup.eventhub.log import LogReader, log_reader, starting_positions
    from dedup.eventhub.namespace import Namespace
    from dedup.eventhub.outbox import SendingHubs
    from dedup.eventhub.runner import run, run_async
    from dedup.eventhub.sender import Sender
    from dedup.eventhub.source import EventHubsSource, register

__all__ = [
    "Connection",
    "EventHubsSource",
    "LogReader",
    "Namespace",
    "Sender",
    "SendingHubs",
    "log_reader",
    "register",
    "run",
    "run_async",
    "starting_positions",
]

_HOMES = {
    "Connection": "connection",
    "EventHubsSource": "source",
    "LogReader": "log",
    "Namespace": "namespace",
    "Sender": "sender",
    "SendingHubs": "outbox",
    "log_reader": "log",
    "register": "source",
    "run": "runner",
    "run_async": "runner",
    "starting_positions": "log",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
