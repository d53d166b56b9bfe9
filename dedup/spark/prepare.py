"""From an input DataFrame to events with keys: what only Spark can compute, in selects, and then the one preparation, in Arrow.

Where the rows come to the driver they are prepared there; else Spark's tasks prepare them, by `mapInArrow`. No job runs here, and the rows
are evaluated once. Works on classic Spark and Spark Connect alike. Called with each micro-batch before anything is decided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from checkpoint.errors import ConfigError, RegistryUnavailable
from deadletter import outage
from deadletter.classify import classify
from deadletter.failure import chain
from deadletter.known import PERMANENT
from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.rows import in_utc
from dedup.decode import prepare
from dedup.decode.prepare import Expression, Layout, Named, Prepare, layout
from dedup.spark import features
from dedup.spark.delta import first_line

KEPT = 16
"""Schemas of which what was worked out is kept."""

Step = Callable[[pa.Table], pa.Table]
"""What is made of some rows, whichever they are. Travels to tasks."""


@dataclass(frozen=True)
class PreparePlan:
    """How an input with one schema is prepared. Worked out once: a batch every second should not pay for its analysis each time."""

    spec: Prepare
    """Without the function of a user, which Spark applies; travels to tasks."""
    layout: Layout
    computed: tuple[Column, ...]
    """What Spark computes of the input: SQL expressions of the mapping, named by their text."""
    decoded: tuple[Column, ...] = ()
    """What a user's function makes of the body."""
    events: T.StructType = field(default_factory=T.StructType)
    parts: tuple[Column, ...] = ()
    """What Spark computes of the events: SQL expressions among the parts of keys, named by their text."""
    schema: T.StructType = field(default_factory=T.StructType)
    """Of the prepared rows."""

    def input(self, df: DataFrame) -> DataFrame:
        """The input with what Spark computes of it."""
        with self.evaluating(df):
            given = _with(df, self.computed)
            return features.nullable(given.select("*", *self.decoded) if self.decoded else given)

    def rows(self, df: DataFrame) -> DataFrame:
        """What `finish` makes prepared rows of: the input or, where Spark computes parts of keys, the events, which tasks have made."""
        if not self.parts:
            return self.input(df)
        with self.evaluating(df):
            return _with(_mapped(self.input(df), partial(prepare.events, spec=self.spec), self.events), self.parts)

    @contextmanager
    def evaluating(self, df: DataFrame) -> Iterator[None]:
        """For whatever asks Spark Connect about rows of this input, a job or a schema: it analyses all of a frame there, and keeps it.

        So our SQL has to be at home there; classic Spark has analysed it before.

        Raises:
            ConfigError: a user's function may have raised for a body.
        """
        late = (self.computed or self.parts) and not hasattr(df.sparkSession, "_jsparkSession")
        with at_home(df.sparkSession) if late else nullcontext(), _advising(self.spec.consumer) if self.decoded else nullcontext():
            yield

    @property
    def finish(self) -> Step:
        """From `rows` to prepared rows."""
        return partial(prepare.add_keys if self.parts else prepare.prepare_events, spec=self.spec)


def prepare_columns(df: DataFrame, spec: Prepare) -> DataFrame:
    """The input's rows as events with keys, made by tasks; lazy, so nothing is read here.

    Returns:
        the columns of `prepare_events`, in Spark's types. A position that is null or does not fit its type is null:
        `envelope.check_positions` tells once the rows are there.

    Raises:
        ConfigError: as `plan`.
    """
    found = plan(df, spec)
    with found.evaluating(df):
        return _mapped(found.rows(df), found.finish, found.schema)


def positions(df: DataFrame, spec: Prepare) -> DataFrame:
    """The columns of POSITION alone: bodies are not decoded. Lazy. Raises ConfigError, as `plan`."""
    found = plan(df, spec)
    origins = [found.layout.envelope[name] for name in POSITION]
    needed = dict.fromkeys(origin.column for origin in origins if isinstance(origin, Named))
    schema = T.StructType([f for f in found.events if f.name in POSITION])
    with found.evaluating(df):
        return _mapped(found.input(df).select(*map(named, needed)), partial(prepare.positions, plan=found.layout), schema)


def _mapped(df: DataFrame, step: Step, schema: T.StructType) -> DataFrame:
    return features.map_in_arrow(df, partial(_each, step=step), schema)


def _each(batches: Iterable[pa.RecordBatch], step: Step) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from step(in_utc(pa.Table.from_batches([batch]))).to_batches()


def named(name: str) -> Column:
    """The column of exactly this name, whatever characters it has."""
    return F.col("`" + name.replace("`", "``") + "`")


HOME = {"spark.sql.session.timeZone": "UTC", "spark.sql.ansi.enabled": "false"}
"""Under what our SQL expressions are analysed: one message has one key in every session, and what cannot be converted is null."""


@contextmanager
def at_home(session: SparkSession) -> Iterator[None]:
    """The settings under which our SQL expressions are analysed; the session's own are back afterwards."""
    with features.setting(session, HOME), features.active(session):
        yield


def _with(df: DataFrame, computed: Sequence[Column]) -> DataFrame:
    """With our SQL expressions."""
    if not computed:
        return df
    with at_home(df.sparkSession):
        return df.select("*", *computed)


_plans: dict[Hashable, PreparePlan] = {}


def plan(df: DataFrame, spec: Prepare) -> PreparePlan:
    """How to prepare this input.

    Raises:
        ConfigError: the input is not recognised, an expression does not resolve, or a column is missing or of a type that cannot fit.
    """
    incarnations = tuple(sorted(spec.incarnations.items()))
    settings = (spec.consumer, spec.keys, spec.columns, spec.source, spec.part, spec.positions, spec.decoder, spec.keyspace)
    ident = type(df), df.schema.json(), settings, incarnations
    if ident not in _plans:
        if len(_plans) >= KEPT:
            _plans.clear()
        _plans[ident] = _work_out(df, spec)
    return _plans[ident]


def _work_out(df: DataFrame, spec: Prepare) -> PreparePlan:
    found = layout(df.columns, spec)
    sql = dict.fromkeys(origin.sql for origin in found.envelope.values() if isinstance(origin, Expression))
    computed = _ask(df, sql, "columns=")
    first = PreparePlan(spec, layout([*df.columns, *sql], spec), tuple(computed))
    if callable(function := spec.decoder):
        with first.evaluating(df):
            decoded = _asked(_with(df, computed), lambda: [_decoded(found, function)], "decode=")
        first = replace(first, spec=replace(spec, decoder=_applied), decoded=tuple(decoded))
    return _with_events(first, df)


def _with_events(first: PreparePlan, df: DataFrame) -> PreparePlan:
    """Worked out to the end: what becomes of the input that has been computed."""
    with first.evaluating(df):
        given = first.input(df).schema
        made = prepare.events(_empty(given), first.spec)
        first = replace(first, events=_in_spark(made.schema, given))
        parts = _parts(_mapped(first.input(df), partial(prepare.events, spec=first.spec), first.events), made.schema, first.spec)
    whole = replace(first, parts=tuple(parts))
    with whole.evaluating(df):
        rows = whole.rows(df).schema
    return replace(whole, schema=_in_spark(whole.finish(_empty(rows)).schema, given))


def _decoded(found: Layout, function: Callable[[Any], Any]) -> Column:
    body = found.envelope["body"]
    given = named(body.column) if isinstance(body, Named) else named(body.sql) if isinstance(body, Expression) else F.lit(body.value)
    column: Column = function(given.cast("binary"))
    return column.alias(prepare.BY_SPARK)


def _applied(body: Any) -> Any:
    """Stands for the function that Spark has applied: the user's own may not travel."""
    raise NotImplementedError


def _parts(events: DataFrame, schema: pa.Schema, spec: Prepare) -> list[Column]:
    given = {"idempotence_key": spec.keys.columns, "payload": spec.keys.payload, "sequence_key": spec.keys.sequence}
    sql = {what: [name for name in names if not prepare.resolves(name, schema)] for what, names in given.items()}
    parts = {name: part for what, names in sql.items() if names for name, part in zip(names, _ask(events, names, what), strict=True)}
    return list(parts.values())


def _ask(df: DataFrame, sql: Collection[str], what: str) -> list[Column]:
    """These SQL expressions as columns that are named by their text."""
    if not sql:
        return []
    with at_home(df.sparkSession):
        return _asked(df, lambda: [F.expr(text).alias(text) for text in sql], f"{what} {', '.join(map(repr, sql))}")


def _asked(df: DataFrame, columns: Callable[[], list[Column]], what: str) -> list[Column]:
    """The columns. Raises ConfigError where they do not resolve, on classic Spark or, when the schema is asked for, on Spark Connect."""
    try:
        made = columns()
        _ = df.select(*made).schema if made else None
    except AnalysisException as error:
        raise ConfigError(f"{what} does not resolve; there are the columns {_shown(df.columns)}. Spark says: {_first(error)}") from error
    return made


def _first(error: AnalysisException) -> str:
    """What Spark says, without the names of columns that are dedup's own, and without its plan."""
    return first_line(error).partition(" Did you mean")[0].partition(" SQLSTATE")[0]


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(column for column in columns if not column.startswith("_"))


def _empty(schema: T.StructType) -> pa.Table:
    """No rows, in the types in which Spark hands them over."""
    try:
        return features.arrow_schema(schema).empty_table()
    except PySparkTypeError as error:
        raise ConfigError(f"The input has a column whose type Arrow does not have: cast or drop it. Spark says: {error}") from error


def _in_spark(schema: pa.Schema, given: T.StructType) -> T.StructType:
    """The types in Spark of a table that was made of an input with the given ones, which it keeps for what passes through."""
    passed = {f.name: f.dataType for f in given if f.name not in ENVELOPE.names}
    if prepare.BY_SPARK in passed:
        passed["data"] = passed[prepare.BY_SPARK]
    return T.StructType([T.StructField(f.name, passed.get(f.name) or features.spark_type(f.type)) for f in schema])


_RAISED = re.compile(rf"{RegistryUnavailable.__name__}: (.*)")


@contextmanager
def answers() -> Iterator[None]:
    """Raise RegistryUnavailable where tasks have: Spark brings only their text."""
    try:
        yield
    except RegistryUnavailable:
        raise
    except Exception as error:
        found = _RAISED.search(str(error))
        if found is None:
            raise
        raise RegistryUnavailable(found[1].strip()) from error


_OF_DATA = re.compile(r"SQLSTATE: (22|38|39)|PythonException|MALFORMED_RECORD|Malformed records|FAILED_EXECUTE_UDF")
"""In what Spark says where a value was wrong: the classes of a data exception and of a function that raised."""

_OF_OURS = re.compile(r"dedup/spark/features\.py")
"""In the trace of a task of ours, which is no function of a user's."""


@contextmanager
def _advising(consumer: str) -> Iterator[None]:
    """Raise ConfigError where a value made Spark fail, and `decode=` is a function: the batch would come again, and fail, for ever."""
    try:
        yield
    except Exception as error:
        if not _is_of_data(error):
            raise
        raise ConfigError(
            f"Consumer {consumer!r}: Spark could not evaluate the batch because of a value in it, and decode= is a function. Such a "
            "function has to return null for a body that it cannot decode; then the event is a dead letter (UNDECODABLE). Catch the error "
            "in a UDF and return None; leave out the mode FAILFAST; write try_cast for cast. Spark's error, the cause, says what it was."
        ) from error


def _is_of_data(error: Exception) -> bool:
    """Whether it is about a value, and not about the cluster, the network, a storage or the memory."""
    if classify(error) != PERMANENT or outage.is_final(error) or outage.advice(error) is not None:
        return False
    said = "\n".join(map(outage.words, chain(error)))
    return _OF_DATA.search(said) is not None and _OF_OURS.search(said) is None


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


_SOURCE = re.compile(r"^[\s:|+\-]*~?Streaming\w*Relation\w* (?:DataSource\(.*\), )?(\S*)", re.MULTILINE)


def reads_files(plan: str) -> bool:
    """Whether all sources in a streaming logical plan, as Spark prints it, are files."""
    found = _SOURCE.findall(plan)
    return bool(found) and all(source.startswith(("FileSource[", "FileStreamSource[")) for source in found)


def streaming_plan(frame: DataFrame, query_id: str | None) -> str:
    """The logical plan of a streaming DataFrame, or of the running query with that id; empty where Spark does not show it (Connect)."""
    try:
        if frame.isStreaming:
            return features.printed(frame._jdf.queryExecution().analyzed())
        return _query_plan(frame, query_id)
    except Exception:  # noqa: BLE001 - internals of Spark that another version, or Spark Connect, may not have: then nothing is known
        return ""


def _query_plan(frame: DataFrame, query_id: str | None) -> str:
    sessions: list[Any] = [frame.sparkSession, SparkSession._instantiatedSession]
    for session in sessions:
        for query in session.streams.active if session is not None else ():
            if query.id == query_id:
                return features.printed(query._jsq.streamingQuery().logicalPlan())
    return ""
