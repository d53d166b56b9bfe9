"""What a sink's name means: a path, an entry of the store's `tables`, or a table of Spark's catalog.

Spark is asked only where this process already has a session. Called by the transaction.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoint.errors import ConfigError
from dedup.delta.storage import SPARK, Options, absolute, require_put_if_absent

if TYPE_CHECKING:
    from dedup.delta.engine import Engine


@dataclass(frozen=True)
class SinkNames:
    """Names as one store knows them."""

    tables: Mapping[str, str]
    options: Options
    engine: Engine

    @classmethod
    def of(cls, tables: Mapping[str, str], options: Options, engine: Engine) -> SinkNames:
        """With the tables as a person gave them. Raises ConfigError where their storage cannot decide between two writers."""
        by_name = {n: str(u) for n, u in tables.items() if engine.name == SPARK and "/" not in str(u)}
        by_path = {n: absolute(str(u)) for n, u in tables.items() if n not in by_name}
        for uri in by_path.values():
            require_put_if_absent(uri, options)
        return cls({**by_path, **by_name}, options, engine)

    def uri(self, name: str) -> str:
        """The absolute URI of a sink. Raises ConfigError where the name means nothing, or the storage cannot decide between two writers."""
        if name in self.tables:
            return self.tables[name]
        if "/" in name:
            uri = absolute(name)
        elif self.engine.name == SPARK:
            return name  # the catalog may not let anybody in by the path
        elif (side := spark_side()) is not None:
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
        return self.engine.side()


def spark_side() -> Any | None:
    """That of the session which this process has, if any."""
    # Importing Spark in order to find out would cost seconds, and fail where it is not installed.
    return importlib.import_module("dedup.spark.delta_rows").active() if "pyspark" in sys.modules else None


def sql_name(name: str) -> str:
    """A sink's name as SQL takes it."""
    return f"delta.`{name}`" if "/" in name else name
