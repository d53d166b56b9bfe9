"""Jars from Maven's central repository for tests, by the Ivy that PySpark brings: fetched once, kept in the virtual environment.

Spark resolves its own packages at every start; these are asked for by hand because one of them is not there under the version its user
names, and because a broker is no part of Spark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyspark

FETCH_SECONDS = 600

HOME = Path(sys.prefix) / "maven"

BROKER = ["org.apache.kafka:kafka_2.13:4.1.2"]
"""A Kafka broker; with everything it needs."""

_SOURCES = {
    "3.5": ("2.12:3.5.7", "2.12:3.5.7", "3.4.1", "2.11.1"),
    "4.0": ("2.13:4.0.1", "2.13:4.0.0", "3.9.1", "2.12.0"),
    "4.1": ("2.13:4.1.3", "2.13:4.1.1", "3.9.1", "2.12.1"),
    "4.2": ("2.13:4.2.0", "2.13:4.0.0", "3.9.2", "2.13.1"),
}
"""Version of Spark -> its Kafka source, its tokens (not each version is there), Kafka's client, and the pool it needs."""

_SOURCE, _TOKENS, _CLIENT, _POOL = _SOURCES.get(".".join(pyspark.__version__.split(".")[:2]), _SOURCES["4.2"])

SPARK_KAFKA = [
    f"org.apache.spark:spark-sql-kafka-0-10_{_SOURCE}",
    f"org.apache.spark:spark-token-provider-kafka-0-10_{_TOKENS}",
    f"org.apache.kafka:kafka-clients:{_CLIENT}",
    f"org.apache.commons:commons-pool2:{_POOL}",
]
"""Spark's Kafka source, as it is; nothing beside these."""


def java() -> str:
    """The Java that runs everything."""
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


def jars(name: str, coordinates: Sequence[str], *, transitive: bool) -> list[Path]:
    """The jars of these coordinates (group:artifact:version). Safe to call from several processes at once.

    Raises:
        RuntimeError: they cannot be fetched; says what Ivy said.
    """
    folder = HOME / name
    if not folder.exists():
        _fetch(folder, coordinates, transitive)
    return sorted(folder.glob("*.jar"))


def _fetch(folder: Path, coordinates: Sequence[str], transitive: bool) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME, prefix="fetching-") as scratch:
        wanted = Path(scratch) / "ivy.xml"
        wanted.write_text(_document(coordinates, transitive))
        ivy = next((Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar"))
        command = [
            java(),
            "-jar",
            ivy,
            "-ivy",
            wanted,
            "-cache",
            f"{scratch}/cache",
            "-retrieve",
            f"{scratch}/jars/[artifact]-[revision].[ext]",
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=FETCH_SECONDS)
        if done.returncode:
            raise RuntimeError(f"Ivy could not fetch {', '.join(coordinates)}:\n{(done.stdout + done.stderr)[-3000:]}")
        if not folder.exists():  # else another process was quicker
            shutil.move(Path(scratch) / "jars", folder)


def _document(coordinates: Sequence[str], transitive: bool) -> str:
    tags = ""
    for coordinate in coordinates:
        group, artifact, version = coordinate.split(":")
        tags += f'<dependency org="{group}" name="{artifact}" rev="{version}" conf="default" transitive="{str(transitive).lower()}"/>'
    return f'<ivy-module version="2.0"><info organisation="dedup" module="tests"/><dependencies>{tags}</dependencies></ivy-module>'


def spark_kafka() -> str:
    """What `spark.jars` needs to have Spark's Kafka source."""
    return ",".join(map(str, jars("spark-kafka", SPARK_KAFKA, transitive=False)))
