"""How to install what is missing: the one place that names this distribution and its extras. Pure.

Each error about a missing package takes its words from `needs`.
"""

from __future__ import annotations

from typing import Literal

DISTRIBUTION = "dedup-spark"
"""The name on the package index. The import names are dedup, checkpoint and deadletter."""

Extra = Literal["avro", "blob", "delta", "demo", "encrypt", "entra", "eventhubs", "fast", "kafka", "metrics", "otel", "postgres", "spark"]
"""The extras of setup.cfg that a user may need."""


def needs(what: str, package: str | None, *extras: Extra) -> str:
    """The message for a missing package, with the command that installs it.

    Args:
        what: needs the package, as in "DeltaStore".
        package: is missing.
        extras: install it.
    """
    return f"{what} needs {package}: pip install '{DISTRIBUTION}[{','.join(extras)}]'"
