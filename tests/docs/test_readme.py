"""What the README shows is what runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from deadletter.selection import Selection
from dedup.delta import DeltaStore
from dedup.postgres import PostgresStore
from dedup.verify import verify
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = (ROOT / "README.md").read_text()
FLIGHT = pa.schema([("flight_id", pa.string()), ("dep_time", pa.int64())])


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    """Every `dedup ...` line of the README's consoles."""
    lines = [line.split("#")[0] for block in blocks("console") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("dedup ")]


def test_the_first_code_stands_within_thirty_lines() -> None:
    """A reader sees code before line 30."""
    assert README.splitlines().index("```python") < 30


@pytest.mark.delta
def test_the_code_and_the_commands_run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snippet streams flights into a catalog table; then each command answers on its store, in the order of the README, and
    what was rejected is there once the second snippet's handler has reprocessed it.
    """
    lake = tmp_path / "lake"
    bodies = ['{"flight_id": "a", "dep_time": 5}', '{"flight_id": "b"}', '{"flight_id": "a", "dep_time": 5}', "junk"]
    rows = spark.createDataFrame([(n, body) for n, body in enumerate(bodies)], "sequence_number bigint, text string")
    shape = rows.selectExpr("'hub' source", "'flights' topic", "0 partition", "sequence_number", "cast(text as binary) body")
    shape.write.parquet(f"{lake}/capture")
    spark.sql("drop table if exists departures")
    spark.sql(f"create table departures (flight_id string, dep_time bigint) using delta location '{lake}/departures'")
    names = {"schema": FLIGHT, "events": spark.readStream.schema(shape.schema).parquet(f"{lake}/capture")}
    first, second = (snippet.replace("/lake", str(lake)) for snippet in blocks("python"))
    exec(first, names)
    for query in spark.streams.active:
        query.processAllAvailable()
        query.stop()
    assert [tuple(r) for r in spark.table("departures").collect()] == [("a", 5)]
    store = DeltaStore(f"{lake}/dedup")
    assert verify(store, "departures").ok
    (tmp_path / "departures.py").write_text(MODULE + second)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_commands(f"{lake}/dedup", store)
    assert sorted(map(tuple, spark.table("departures").collect()), key=str) == [("a", 5), ("b", None)]
    assert (tmp_path / "letters.jsonl").read_text().count("\n") == 2
    assert verify(store, "departures").ok
    spark.sql("drop table departures")


MODULE = """
import pyarrow as pa
from pyspark.sql import SparkSession
from dedup import Consumer, DeltaStore, decode

spark = SparkSession.builder.getOrCreate()
schema = pa.schema([("flight_id", pa.string()), ("dep_time", pa.int64())])
"""
"""What the second snippet takes as given."""


def run_commands(url: str, store: DeltaStore) -> None:
    """Each command ends with 0 and prints something."""
    from dedup.cli.app import app

    found = commands()
    assert len(found) >= 20
    for arguments in found:
        arguments = [example(store) if a == "ID" else a for a in arguments]
        of_store = [] if "departures:consumer" in arguments else ["--store", url]
        result = CliRunner().invoke(app, [*arguments, *of_store])
        if "--sql" in arguments:
            continue  # a Delta store has none; tests/cli/test_cli.py runs it on PostgreSQL
        assert result.exit_code == 0 and result.output.strip(), (arguments, result.output, result.exception)


def example(store: DeltaStore) -> str:
    """A letter that a person is not done with."""
    rows = store.letters(Selection(), ["id", "status"]).to_pylist()
    return str(next(row["id"] for row in rows if row["status"] != "REPROCESSED"))


def test_the_table_of_deaths_names_every_step_of_both_stores() -> None:
    """The table "What if it dies here?" has exactly the steps that the code reports."""
    table = README.split("## What if it dies here?")[1].split("##")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    named = [[re.findall(r"`(\w+)`", row[column]) for row in rows] for column in (1, 2)]
    assert [s for cell in named[0] for s in cell] == list(PostgresStore.steps)
    assert [s for cell in named[1] for s in cell] == list(DeltaStore.steps)


def test_every_setting_of_the_consumer_is_in_the_table() -> None:
    """A setting that the README does not tell of does not exist for its readers."""
    import inspect

    from dedup import Consumer

    settings = [p for p in inspect.signature(Consumer).parameters if p not in ("name", "store")]
    table = README.split("## Settings")[1].split("## Operating")[0]
    assert [s for s in settings if f"`{s}`" not in table and f"{s}=True" not in table] == []


def test_every_command_that_an_error_names_exists() -> None:
    """The table of errors names commands that have help."""
    from dedup.cli.app import app

    table = README.split("## Operating")[1].split("## Where it runs")[0]
    for words in {tuple(m.split()[1:3]) for m in re.findall(r"`(dedup (?:consumer|budget) [\w-]+)", table)}:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
