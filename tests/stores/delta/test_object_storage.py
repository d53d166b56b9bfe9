"""Delta tables on object storage: what the contract suite, which runs there too, cannot see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.errors import ConfigError
from kit import http_proxy, object_storage
from kit.http_proxy import HttpProxy
from kit.orders import batch, consumer, flatten, orders
from kit.paths import environment
from kit.places import S3Place

pytestmark = pytest.mark.objects


@pytest.fixture
def place(s3_folder: str) -> S3Place:
    """An empty place with the sink `orders`."""
    made = S3Place(s3_folder)
    made.create_sink()
    return made


@pytest.fixture
def proxy(s3: str, s3_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """Before the server; this process's environment leads other processes through it."""
    with http_proxy.proxied(s3) as made:
        for name, value in object_storage.s3(s3).items():
            monkeypatch.setenv(name, value.replace(s3, made.address))
        yield made


def test_a_sink_on_s3_that_only_spark_may_write_is_refused(place: S3Place) -> None:
    """Before anything is decided, for appends and for merges: Spark's commits there may replace those of others."""
    from deltalake import DeltaTable

    DeltaTable(place.path("orders")).alter.add_constraint({"positive": "amount > 0"})
    for write in (lambda tx, rows: tx.write(rows, "orders"), lambda tx, rows: tx.merge(rows, "orders", keys=["id"])):
        made = consumer(place.store())
        made._handler = lambda rows, tx, write=write: write(tx, flatten(rows))
        with pytest.raises(ConfigError, match="dedup_spark_on_s3"):
            made(batch(*orders(range(3))), 0)
    assert place.read() == [] and place.store().head("shop").checkpoints == {}


RACER = """
import sys
from deltalake import write_deltalake
import pyarrow as pa
for n in range(20):
    while True:
        try:
            write_deltalake(sys.argv[1], pa.table({"id": [f"{sys.argv[2]}-{n}"], "amount": [n]}), mode="append")
            break
        except Exception as error:
            if "oncurrent" not in str(error) and "Failed to commit" not in str(error):
                raise
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["", http_proxy.PLAIN])
def test_writers_at_once_lose_nothing_and_would_without_the_condition(place: S3Place, proxy: HttpProxy, tmp_path: Path, way: str) -> None:
    """Four processes append to one table: each row once. A proxy that makes a plain put of put-if-absent loses rows, and this sees it."""
    proxy.rule = lambda method, path: way
    script = tmp_path / "racer.py"
    script.write_text(RACER)
    line = [sys.executable, str(script), place.path("orders")]
    racers = [subprocess.Popen([*line, str(n)], env=environment(**os.environ)) for n in range(4)]
    assert [racer.wait() for racer in racers] == [0] * 4
    rows = Counter(row["id"] for row in place.read())
    whole = rows == Counter(f"{racer}-{n}" for racer in range(4) for n in range(20))
    assert whole == (way != http_proxy.PLAIN)
