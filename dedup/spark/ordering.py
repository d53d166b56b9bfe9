"""Whether the rows of a DataFrame come in the order of the frame that it was made of, or in one that its maker asked for.

Spark promises an order after a sort alone. Where each row is looked at by itself, which no exchange comes with, the tasks keep the order
of their rows, and the driver gets those of one task after those of another. Called by dedup/spark/frames.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from dedup.spark.session import JavaError

ROW_BY_ROW = frozenset({"Project", "Filter", "SubqueryAlias", "Generate", "View", "MapInArrow", "MapInPandas"})
"""Nodes of an analysed plan that make rows of one row after another: windows, joins and aggregations are nodes of their own there."""

ROW_BY_ROW_CONNECT = frozenset({"Project", "Filter", "SubqueryAlias", "WithColumns", "WithColumnsRenamed", "Drop", "ToDF", "ToSchema"})
"""Those of a plan that Spark Connect has not analysed yet."""

_MOVES = re.compile(r"window|\bover\s*\(|\bselect\b", re.IGNORECASE)
"""In an expression that nobody has analysed: it looks at other rows than its own."""


def keeps_order(rows: DataFrame, known: Sequence[DataFrame]) -> bool:
    """Whether the rows come in an order: that of one of the known frames, or one that they are sorted by.

    Never raises: of a plan that cannot be read nothing is known.
    """
    try:
        if hasattr(rows, "_jdf"):
            return _in_order(_analysed(rows), [_analysed(frame) for frame in known if hasattr(frame, "_jdf")])
        return _in_order_on_connect(getattr(rows, "_plan", None), [getattr(frame, "_plan", None) for frame in known])
    except (JavaError, AttributeError):  # internals of Spark that another version may not have
        return False


def _analysed(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _in_order(plan: Any, known: Sequence[Any]) -> bool:
    while not any(plan.equals(one) for one in known):
        kind = plan.nodeName()
        if kind == "Sort":
            return bool(getattr(plan, "global")())
        if kind not in ROW_BY_ROW or not plan.subqueries().isEmpty():  # a subquery may become a join
            return False
        plan = plan.child()
    return True


def _in_order_on_connect(plan: Any, known: Sequence[Any]) -> bool:
    while plan is not None and not any(plan is one for one in known):
        kind = type(plan).__name__
        if kind == "Sort":
            return bool(plan.is_global)
        asked = [*getattr(plan, "_columns", ()), *([plan.filter] if kind == "Filter" else [])]
        if kind not in ROW_BY_ROW_CONNECT or any(_MOVES.search(str(one)) for one in asked):
            return False
        plan = plan._child
    return plan is not None
