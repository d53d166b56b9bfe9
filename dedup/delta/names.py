"""What a sink's name means: a path, an entry of the store's `tables`, or a table of Spark's catalog.

Spark is asked only where this process already has a session. Called by the transaction.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.errors import ConfigError
from dedup.delta.storage import Options, absolute, require_put_if_absent


@dataclass(frozen=True)
class SinkNames:
    """Names as one store knows them."""

    tables: Mapping[str, str]
    options: Options

    def uri(self, name: str) -> str:
        """The absolute URI of a sink. Raises ConfigError where the name means nothing, or the storage cannot decide between two writers."""
        if name in self.tables:
            return self.tables[name]
        if "/" in name:
            uri = absolute(name)
        elif (side := _spark_side()) is not None:
            uri = absolute(side.location(name))
        else:
            raise ConfigError(
                f"The sink {name!r} is not a path, not in tables=, and there is no Spark session to ask for a table of that name. "
                f"Name it in DeltaStore(..., tables={{{name!r}: '/path/of/the/table'}}), or write to its path."
            )
        require_put_if_absent(uri, self.options)
        return uri

    def spark(self) -> Any:
        """The Spark side, for sinks that only Spark may write. Raises ConfigError where this process has no session."""
        side = _spark_side()
        if side is None:
            raise ConfigError(
                "This sink can only be written by Spark, and there is no Spark session in this process. Run it where Spark runs."
            )
        return side


def _spark_side() -> Any | None:
    # Importing Spark in order to find out would cost seconds, and fail where it is not installed.
    return importlib.import_module("dedup.spark.delta_rows").active() if "pyspark" in sys.modules else None


def sql_name(name: str) -> str:
    """A sink's name as SQL takes it."""
    return f"delta.`{name}`" if "/" in name else name
