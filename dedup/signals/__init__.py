"""What others are told of a consumer in numbers: for Prometheus (`dedup metrics`) and, with the extra `otel`, for OpenTelemetry.

Importing this imports no driver. The functions use OpenTelemetry's API; which SDK there is, and where it exports to, is yours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoint.errors import ConfigError
from checkpoint.install import needs
from checkpoint.start import Ends
from dedup.core.store import Store
from dedup.signals.metrics import Collected, Numbers

if TYPE_CHECKING:
    from dedup.signals.opentelemetry import Recorder

__all__ = ["observe", "recorder"]


def recorder(provider: Any = None) -> Recorder:
    """Make what records a running consumer's batches and new dead letters in OpenTelemetry.

    Give it twice: `Consumer(..., on_batch=told, failure=FailurePolicy(on_parked=told))` with `told = signals.recorder()`. It may be given
    to several consumers of a process.

    Args:
        provider: the SDK's MeterProvider. Default: the global one.

    Raises:
        ConfigError: opentelemetry-api is not installed (extra `otel`).

    Crash: a batch that was committed and not told yet is not counted. The store has all of them: `dedup batch list`.
    """
    made: Recorder = _opentelemetry().Recorder(provider)
    return made


def observe(store: Store, name: str = "", *, broker: Ends | None = None, source: str = "", provider: Any = None) -> None:
    """Let OpenTelemetry observe what the store says: the numbers of `dedup metrics`. Call it once, in one process for each store.

    The store is read once for each collection of the SDK, in the thread that collects. Give it a store of its own. What cannot be read then
    is left out, `dedup.up` is 0, and the log says why.

    Args:
        name: of one consumer. Default: all of the store, new ones included.
        broker: tells where the logs end, for the lag: `kafka.Broker("host:9092")`.
        source: the broker's name in the state, where the state has several.
        provider: the SDK's MeterProvider. Default: the global one.

    Raises:
        ConfigError: opentelemetry-api is not installed (extra `otel`).
    """
    _opentelemetry().observe(Collected(Numbers(store, name, broker, source)), provider)


def _opentelemetry() -> Any:
    try:
        from dedup.signals import opentelemetry
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "opentelemetry":
            raise
        raise ConfigError(needs("`dedup.signals`", "opentelemetry-api", "otel")) from error
    return opentelemetry
