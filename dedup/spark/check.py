"""Whether a stream's rows still have positions of their own: stateful operators upstream take them away."""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import DataFrame, SparkSession

STATEFUL = (
    "Aggregate|Deduplicate|DeduplicateWithinWatermark|FlatMapGroupsWithState|FlatMapGroupsInPandasWithState|"
    "TransformWithState|TransformWithStateInPySpark|TransformWithStateInPandas"
)
"""Logical operators that emit rows of their own, or later than the positions they came from."""

_NODE = re.compile(rf"^[\s:|+\-]*~({STATEFUL})\b", re.MULTILINE)
_JOIN = re.compile(r"^(?P<indent>[\s:|+\-]*)~Join\b", re.MULTILINE)


def stateful_operators(plan: str) -> list[str]:
    """Names of stateful operators in a streaming logical plan as Spark prints it: streaming nodes begin with `~`.

    A join is stateful where both of its sides stream.
    """
    found = [m.group(1) for m in _NODE.finditer(plan)]
    for join in _JOIN.finditer(plan):
        depth = len(join.group("indent"))
        below = re.compile(rf"^.{{{depth}}}(?:\+- |:- )~", re.MULTILINE)
        if len(below.findall(plan[join.end() :])) >= 2:
            found.append("Join of two streams")
    return found


def streaming_plan(frame: DataFrame, query_id: str | None) -> str:
    """The logical plan of a streaming DataFrame, or of the running query with that id; empty where Spark does not show it (Connect)."""
    try:
        if frame.isStreaming:
            return str(frame._jdf.queryExecution().analyzed().toString())
        return _query_plan(frame, query_id)
    except Exception:  # noqa: BLE001 - internals of Spark that another version, or Spark Connect, may not have: then nothing is known
        return ""


def _query_plan(frame: DataFrame, query_id: str | None) -> str:
    sessions: list[Any] = [frame.sparkSession, SparkSession._instantiatedSession]
    for session in sessions:
        for query in session.streams.active if session is not None else ():
            if query.id == query_id:
                return str(query._jsq.streamingQuery().logicalPlan().toString())
    return ""
