"""The envelope: which inputs are recognised or mapped, and what is refused before anything is written."""

from __future__ import annotations

import datetime as dt
import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from dedup import Event, decode
from dedup.core.envelope import ENVELOPE, POSITION, Columns, check_positions
from dedup.core.keys import INTERNAL, LOG_TIME, KeySettings
from dedup.core.near import like
from dedup.core.rows import arrow_of, frame_of
from dedup.decode.prepare import Prepare, layout, prepare_events
from fixtures.variants import of_which
from kit.sparks import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = dt.datetime(2024, 3, 31, 12, tzinfo=dt.UTC)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

KAFKA = pa.table(
    {
        "key": pa.array([b"k", None], pa.binary()),
        "value": pa.array([b"v", None], pa.binary()),
        "topic": ["orders", "orders"],
        "partition": pa.array([0, 1], pa.int32()),
        "offset": pa.array([7, 8], pa.int64()),
        "timestamp": pa.array([NOON, NOON], pa.timestamp("us", tz="UTC")),
        "timestampType": pa.array([0, 1], pa.int32()),
        "headers": pa.array([[{"key": "message_id", "value": b"m"}], None], HEADERS),
    }
)

OWN = pa.table(
    {
        "source": ["hub.example", "hub.example"],
        "topic": ["orders", "orders"],
        "partition": pa.array([0, 1], pa.int32()),
        "sequence_number": pa.array([7, 8], pa.int64()),
        "offset": ["4294967296", None],
        "enqueued_time": pa.array([NOON, NOON], pa.timestamp("us", tz="UTC")),
        "key": pa.array([b"k", None], pa.binary()),
        "body": pa.array([b"v", None], pa.binary()),
        "properties": pa.array([[("message_id", "m")], None], pa.map_(pa.string(), pa.string())),
        "extra": [1.5, 2.5],
    }
)

FILES = pa.table(
    {"file": ["a", "a"], "line no": pa.array(["1", "2"]), "item": pa.array([0, 1], pa.int8()), "text": ["x", "y"], "n": [1, 2]}
)


def rows(table: pa.Table, **spec: Any) -> list[dict[str, Any]]:
    """The envelope's rows."""
    found: list[dict[str, Any]] = prepare_events(table, Prepare("c", **spec)).to_pylist()
    return found


def test_kafka_columns_are_recognised() -> None:
    """A Kafka offset is the sequence number, its text is the opaque offset, and headers are the properties."""
    first, second = rows(KAFKA)
    assert {name: first[name] for name in ENVELOPE.names} == {
        "source": "kafka",
        "topic": "orders",
        "partition": 0,
        "sequence_number": 7,
        "part": 0,
        "offset": "7",
        "enqueued_time": NOON,
        "key": b"k",
        "body": b"v",
        "properties": [{"key": "message_id", "value": b"m"}],
    }
    assert second["properties"] is None
    assert rows(KAFKA, source="cluster-1")[0]["source"] == "cluster-1"


def test_large_columns_are_taken_as_well() -> None:
    """With spark.sql.execution.arrow.useLargeVarTypes Spark hands over large texts and bytes, in headers too: the rows are the same."""
    large = {"string": pa.large_string(), "binary": pa.large_binary()}
    headers = pa.list_(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))
    types = [headers if f.name == "headers" else large.get(str(f.type), f.type) for f in KAFKA.schema]
    assert rows(KAFKA.cast(pa.schema(list(zip(KAFKA.column_names, types, strict=True))))) == rows(KAFKA)


def test_nulls_and_constants_have_the_types_of_the_envelope() -> None:
    """A column of nothing but nulls, and a constant that is another type's, do not end the stream."""
    own = OWN.set_column(OWN.schema.get_field_index("properties"), "properties", pa.nulls(2))
    assert [row["properties"] for row in rows(own)] == [None, None]
    assert [row["partition"] for row in rows(FILES, columns=Columns("'t'", "'7'", "n"))] == [7, 7]


def test_headers_may_have_their_value_first() -> None:
    """The fields of a pair are known by their names."""
    pairs = pa.array([[{"value": b"m", "key": "message_id"}], None], pa.list_(pa.struct([("value", pa.binary()), ("key", pa.string())])))
    found = rows(KAFKA.set_column(KAFKA.schema.get_field_index("headers"), "headers", pairs))
    assert [row["properties"] for row in found] == [[{"key": "message_id", "value": b"m"}], None]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.string(), pa.large_string()])
def test_positions_of_every_kind_of_number(kind: pa.DataType) -> None:
    """Whatever a position is written as, it is the same number; what a column of the envelope cannot hold is null."""
    unsigned = pa.types.is_unsigned_integer(kind)
    given = [7, None, 0 if unsigned else -1, 100 if kind == pa.int8() else 2**31]
    column = pa.array([None if n is None else str(n) for n in given], pa.string()).cast(kind)
    table = pa.table({"p": column, "n": range(4), "t": ["t"] * 4})
    found = [row["partition"] for row in rows(table, columns=Columns("t", "p", "n"))]
    assert found == [*given[:3], 100 if kind == pa.int8() else None]


def test_our_own_columns_are_recognised() -> None:
    """An input with the envelope's names is taken as it is; properties may be a map of strings; other columns pass through."""
    first, second = rows(OWN)
    assert (first["source"], first["sequence_number"], first["part"], first["offset"]) == ("hub.example", 7, 0, "4294967296")
    assert first["properties"] == [{"key": "message_id", "value": b"m"}]
    assert (second["properties"], second["extra"]) == (None, 2.5)


def test_the_columns_come_in_one_order() -> None:
    """Envelope, then what passed through, then data, then the internal columns: stores and pipeline rely on it."""
    spec = Prepare("c", decoder=decode.json(pa.schema([("a", pa.int64())])))
    table = prepare_events(OWN, spec)
    assert table.column_names == [*ENVELOPE.names, "extra", "data", LOG_TIME, *INTERNAL]
    assert table.select(ENVELOPE.names).schema == ENVELOPE
    assert [table.schema.field(name).type for name in INTERNAL] == [pa.binary(), pa.string(), pa.int64(), pa.bool_()]
    assert table.slice(0, 0).schema == prepare_events(OWN.slice(0, 0), spec).schema


@pytest.mark.parametrize(
    ("table", "spec", "by_broker"),
    [
        (KAFKA, {}, [False, True]),
        (KAFKA.set_column(6, "timestampType", pa.array([-1, None], pa.int32())), {}, [False, False]),
        (KAFKA.set_column(6, "timestampType", pa.array(["1", "1"])), {}, [False, False]),
        (KAFKA.drop_columns(["timestampType"]), {}, [False, False]),
        (OWN, {}, [True, True]),
        (OWN.drop_columns(["enqueued_time"]), {}, [False, False]),
        (OWN.append_column("timestampType", pa.array([0, 1])), {}, [False, True]),
        (KAFKA.select([2, 3, 4, 5, 6]), {"columns": Columns("topic", "partition", "offset", enqueued_time="timestamp")}, [False, True]),
        (
            OWN.select([1, 2, 3, 5]),
            {"columns": Columns("topic", "partition", "sequence_number", enqueued_time="enqueued_time")},
            [True, True],
        ),
    ],
    ids=["kafka", "no kind", "no number", "kafka without kinds", "own", "own without times", "own of kafka", "mapped kafka", "mapped own"],
)
def test_whose_clock_a_time_is_of_is_known(table: pa.Table, spec: dict[str, Any], by_broker: list[bool]) -> None:
    """Event Hubs has the broker's time alone; Kafka's is the broker's where timestampType says LogAppendTime, and else some producer's."""
    assert prepare_events(table, Prepare("c", **spec))[LOG_TIME].to_pylist() == by_broker


def test_any_input_can_be_mapped() -> None:
    """Columns named in the mapping move to their envelope names; constants are quoted; the rest passes through."""
    columns = Columns(topic="'lines'", partition="item", sequence_number="line no", body="text")
    first, second = rows(FILES, columns=columns, source="disk")
    assert (first["source"], first["topic"], first["partition"], first["sequence_number"], first["body"]) == ("disk", "lines", 0, 1, b"x")
    assert (second["partition"], second["sequence_number"], second["file"], second["n"]) == (1, 2, "a", 2)
    assert "text" not in first


EDGES = [-62_135_510_400_000_000, -62_135_510_400_000_001, 253_402_214_399_999_999, 253_402_214_400_000_000, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("unit", ["us", "ms", "ns"])
def test_times_that_are_no_dates_are_null(unit: str) -> None:
    """Producers can claim any time: what no calendar has would stop the stream where the checkpoint keeps it."""
    times = pa.array(EDGES, pa.int64()).cast(pa.timestamp(unit, tz="UTC"))
    table = pa.concat_tables([OWN] * 3).set_column(OWN.schema.get_field_index("enqueued_time"), "enqueued_time", times)
    found = [row["enqueued_time"] is not None for row in rows(table)]
    assert found == {"us": [True, False, True, False, False, False], "ms": [False] * 6, "ns": [True] * 4 + [False] * 2}[unit]


def test_part_names_the_column_that_tells_rows_apart() -> None:
    """The rows of one exploded event have positions of their own."""
    first, second = rows(OWN.append_column("line", pa.array([3, 4])), part="line")
    assert (first["part"], second["part"]) == (3, 4)
    assert "line" not in first


def test_key_only_mode_has_no_positions() -> None:
    """Rows of joins and aggregates have constants for a position, and their body where there is one."""
    first = rows(FILES.append_column("value", pa.array(["v", "w"])), positions=False, keys=KeySettings(("n",)))[0]
    assert [first[name] for name in POSITION] == ["", "", -1, -1, 0]
    assert (first["body"], first["n"]) == (b"v", 1)
    assert rows(FILES, positions=False, keys=KeySettings(("n",)))[0]["body"] is None


def test_key_only_mode_never_falls_back_to_a_position() -> None:
    """Without positions an event without a key has none: they must not become one message."""
    assert [row["_key"] for row in rows(FILES, positions=False)] == [None, None]
    with pytest.raises(ConfigError, match="needs positions"):
        Prepare("c", KeySettings(("n",), null_key="position"), positions=False)
    with pytest.raises(ConfigError, match="with positions=None events have none"):
        Prepare("c", positions=False, part="n")


@pytest.mark.parametrize(
    ("table", "spec", "said"),
    [
        (
            FILES,
            {},
            r"columns file, line no, item, text, n; for Spark's Kafka source it lacks key, value.*own schema it lacks source.*Columns\(",
        ),
        (KAFKA.drop_columns(["value"]), {}, "Kafka source it lacks value;"),
        (FILES, {"columns": Columns("'t'", "item", "nope", body="none")}, r"'nope' \(for sequence_number\), 'none' \(for body\)"),
        (OWN, {"part": "nope"}, "part='nope' names a column"),
        (FILES, {"columns": Columns("'t'", "item", "n + 1")}, "needs Spark"),
        (FILES.append_column("topic", pa.array(["t", "t"])), {"columns": Columns("file", "item", "n")}, "columns topic have the names"),
        (OWN.append_column("_Key", pa.array([1, 2])), {}, "columns _Key have the names"),
        (OWN.append_column("Extra", pa.array([1, 2])), {}, "several columns of one name: Extra, extra"),
        (FILES.append_column("topic", pa.array(["t", "t"])), {"positions": False}, "columns topic have the names"),
        (
            OWN.set_column(2, "partition", pa.array([0.0, 1.0])),
            {},
            "partition comes from 'partition' of type double; it must be an integer",
        ),
        (OWN.set_column(1, "topic", pa.array([1, 2])), {}, "topic comes from 'topic' of type int64"),
        (OWN.set_column(5, "enqueued_time", pa.array([NOON, NOON], pa.timestamp("us"))), {}, "must be a timestamp with time zone"),
        (OWN.set_column(8, "properties", pa.array(["x", "y"])), {}, "must be a map or a list"),
        (OWN, {"decoder": lambda body: body}, "this runs without Spark. Use decode.json"),
    ],
)
def test_an_input_that_cannot_be_mapped_is_refused(table: pa.Table, spec: dict[str, Any], said: str) -> None:
    """One clear error says what was found, what is missing and what to do, before anything is written."""
    with pytest.raises(ConfigError, match=said):
        prepare_events(table, Prepare("c", **spec))


def test_rows_without_a_whole_position_are_named() -> None:
    """A null position, or a value that does not fit its type, is an error with row numbers and the rest of the position."""
    numbers = pa.array(["7", "x", None, "9223372036854775808", " 5 ", "1.5", ""])
    table = pa.table({"p": pa.array([0, 1, 2, 3, 4, 2**31, 6]), "s": numbers, "t": ["t"] * 7})
    prepared = prepare_events(table, Prepare("c", columns=Columns("t", "p", "s"), source="s"))
    assert prepared["sequence_number"].to_pylist() == [7, None, None, None, 5, None, None]
    told = r"5 of 7 rows .*partition, sequence_number .*a text that is no number counts as null"
    with pytest.raises(ConfigError, match=told + r".*row 1: source=s topic=t partition=1 sequence_number=null") as raised:
        check_positions(prepared)
    assert "row 5: source=s topic=t partition=null sequence_number=null part=0" in str(raised.value)
    check_positions(prepared.slice(0, 1))


def test_at_most_five_rows_are_named() -> None:
    """A batch of bad rows does not fill the log."""
    table = pa.table({"p": pa.nulls(100, pa.int32()), "s": list(range(100)), "t": ["t"] * 100})
    with pytest.raises(ConfigError) as raised:
        check_positions(prepare_events(table, Prepare("c", columns=Columns("t", "p", "s"))))
    assert str(raised.value).count("sequence_number=") == 5


def test_the_order_travels() -> None:
    """What to prepare goes where the code runs and arrives unchanged."""
    spec = Prepare(
        "c", KeySettings(("a",)), Columns("t", "p", "s"), incarnations={("s", "t"): 1}, decoder=decode.json(pa.schema([("a", pa.int64())]))
    )
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_spark_prepares_the_same_rows(spark: SparkSession) -> None:
    """Recognised and mapped inputs give the same rows in Spark as in pyarrow."""
    from dedup.spark.prepare import prepare_columns

    part = OWN.append_column("line", pa.array([3, 4]))
    times = pa.array(EDGES[:4], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    wild = pa.concat_tables([OWN] * 2).set_column(OWN.schema.get_field_index("enqueued_time"), "enqueued_time", times)
    numbers = pa.table({"p": pa.array([0, 2**31]), "s": pa.array([" 7 ", "x"]), "t": ["t", "t"]})
    cases: list[tuple[pa.Table, Prepare]] = [
        (KAFKA, Prepare("c", source="cluster-1")),
        (KAFKA.drop_columns(["timestampType"]), Prepare("c")),
        (OWN, Prepare("c", KeySettings())),
        (wild, Prepare("c", KeySettings())),
        (part, Prepare("c", part="line", incarnations={("hub.example", "orders"): 3})),
        (FILES, Prepare("c", KeySettings(("n",)), Columns("'lines'", "item", "line no", body="text"), source="disk")),
        (FILES, Prepare("c", KeySettings(("n", "file")), positions=False)),
        (numbers, Prepare("c", columns=Columns("t", "p", "s"))),
    ]
    for table, spec in cases:
        expected = prepare_events(table, spec)
        found = arrow_of(prepare_columns(frame_of(spark, table), spec))
        assert found.column_names == expected.column_names
        assert found.cast(expected.schema).to_pylist() == expected.to_pylist()


@pytest.mark.full
def test_spark_takes_sql_expressions(spark: SparkSession) -> None:
    """On Spark, columns, part and key parts may be computed; columns that an expression uses pass through as well."""
    from dedup.spark.prepare import prepare_columns

    columns = Columns("concat('f-', file)", "pmod(item, 2)", "cast(`line no` as int) * 10", body="encode(text, 'UTF-8')")
    spec = Prepare("c", KeySettings(("upper(text)", "n + 1", "data.item")), columns, part="n * 2", decoder=lambda body: body)
    with pytest.raises(ConfigError, match=r"idempotence_key .* does not resolve"):
        prepare_columns(frame_of(spark, FILES), spec)
    spec = Prepare("c", KeySettings(("upper(text)", "n + 1")), columns, part="n * 2")
    found = arrow_of(prepare_columns(frame_of(spark, FILES), spec)).to_pylist()
    assert [(row["topic"], row["partition"], row["sequence_number"], row["part"], row["body"]) for row in found] == [
        ("f-a", 0, 10, 2, b"x"),
        ("f-a", 1, 20, 4, b"y"),
    ]
    assert [row["_key_text"] for row in found] == ["X|2", "Y|3"]
    assert found[0]["line no"] == "1" and set(found[0]) == {*ENVELOPE.names, *FILES.column_names, LOG_TIME, *INTERNAL}


@pytest.mark.parametrize("part", of_which(1, ["`a.b`", "a.b"]), ids=["sql", "arrow"])
def test_whatever_passes_through_spark_arrives(spark: SparkSession, part: str) -> None:
    """Columns of odd names and types keep both, where they are only carried and where SQL computes the key from one of them."""
    from dedup.spark.prepare import prepare_columns

    require("4.0", "VARIANT and collations")
    odd = (
        "'x' `a.b`, 'y' `t``k`, timestamp'1500-01-01 01:00:00' t, timestamp_ntz'1500-01-01' n, interval '1' day d, null v, "
        "parse_json('{\"a\":1}') j, 'c' collate UNICODE c, cast('z' as char(3)) ch, map('k', named_struct('x', array(1))) m, 0.10BD m2"
    )
    sql = f"select 's' source, 't' topic, 0 partition, 1L sequence_number, cast('b' as binary) body, {odd}"
    frame = spark.sql(sql)
    found = prepare_columns(frame, Prepare("c", KeySettings((part,))))
    names = frame.columns[5:]
    kept = [f"`{name.replace('`', '``')}`" for name in names]
    assert [(f.name, f.dataType) for f in found.select(*kept).schema] == [(f.name, f.dataType) for f in frame.select(*kept).schema]
    (before,), (after,) = frame.select(*kept).collect(), found.select(*kept, "_key_text").collect()
    assert [str(value) for value in after[:-1]] == [str(value) for value in before] and after[-1] == "x"


def test_a_type_that_arrow_does_not_have_is_refused(spark: SparkSession) -> None:
    """It is told before anything is read, and not by a task."""
    from dedup.spark.prepare import prepare_columns

    frame = frame_of(spark, OWN).selectExpr("*", "interval '1' year y")
    with pytest.raises(ConfigError, match="a column whose type Arrow does not have: cast or drop it"):
        prepare_columns(frame, Prepare("c"))


@pytest.mark.parametrize(
    ("table", "spec", "said"),
    [
        (FILES, {}, "The input is not recognised"),
        (FILES, {"columns": Columns("'t'", "item + nope", "n")}, "columns= 'item \\+ nope' does not resolve; there are the columns file"),
        (FILES, {"columns": Columns("'t'", "item +", "n")}, r"columns= 'item \+' does not resolve"),
        (FILES, {"columns": Columns("'t'", "n * 1.5", "n")}, r"partition comes from 'n \* 1.5' of type decimal"),
        (OWN, {"keys": KeySettings(("a", "data.b"))}, "idempotence_key 'a', 'data.b' does not resolve; there are the columns source"),
        (OWN, {"keys": KeySettings(payload=("extra",))}, "'extra' is of type double and cannot be part"),
        (OWN.append_column("s", pa.array([{"a": 1}, None])), {"keys": KeySettings(("s.nope",))}, "idempotence_key .* does not resolve"),
        (OWN.append_column("s", pa.array([{"a": 1}, None])), {"keys": KeySettings(("s",))}, "'s' is of type struct"),
    ],
)
def test_spark_refuses_before_any_job(spark: SparkSession, table: pa.Table, spec: dict[str, Any], said: str) -> None:
    """What does not resolve or fit is one clear error while the frame is still lazy."""
    from dedup.spark.prepare import prepare_columns

    with pytest.raises(ConfigError, match=said):
        prepare_columns(frame_of(spark, table), Prepare("c", **spec))


def test_what_spark_says_is_one_sentence(spark: SparkSession) -> None:
    """The message for a wrong key neither shows Spark's plan nor proposes a column that only dedup knows."""
    from dedup.spark.prepare import prepare_columns

    with pytest.raises(ConfigError, match="nope") as refused:
        prepare_columns(frame_of(spark, OWN), Prepare("c", KeySettings(("nope",))))
    assert [word for word in ("Project", "_log_time", "\n") if word in str(refused.value)] == []


def test_a_key_that_no_event_can_have_is_refused() -> None:
    """`message_id` for `data.message_id` would park every event: where nothing can have this id, it is refused at the start."""
    names = ["topic", "partition", "offset", "timestamp", "key", "value"]
    spec = Prepare("c", KeySettings(("message_id",)))
    with pytest.raises(ConfigError, match=r"data\.message_id"):
        layout(names, spec)
    for fits in ([*names, "headers"], [*names, "message_id"]):
        layout(fits, spec)
    layout(names, Prepare("c", KeySettings(("message_id",), null_key="position")))


def test_names_of_kafka_lead_to_those_of_dedup() -> None:
    """Whoever writes `event.value` or `event.offset`, as Kafka's columns are called, is told what it is called here."""
    assert [like(name, Event._fields) for name in ("value", "offset", "headers", "nothing")] == [
        " (did you mean body?)",
        " (did you mean sequence_number?)",
        " (did you mean properties?)",
        "",
    ]


def test_preparing_runs_no_spark_job(spark: SparkSession) -> None:
    """Preparing only describes: reading the batch is left to the one materialisation of the pipeline."""
    from pyspark.sql import functions as F

    from dedup.spark.prepare import prepare_columns
    from dedup.spark.session import ERRORS

    unreadable = frame_of(spark, OWN).where(F.raise_error(F.lit("it was read")).isNull())
    schema = pa.schema([("a", pa.int64())])
    prepared = prepare_columns(unreadable, Prepare("c", KeySettings(("data.a",)), decoder=decode.json(schema)))
    with pytest.raises(ERRORS, match="it was read"):
        prepared.count()


def test_position_names_are_in_the_envelope() -> None:
    """The position is part of what every event has."""
    assert set(POSITION) <= set(ENVELOPE.names)
