"""What docs/how-to/eventhubs.md shows is what runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dedup.eventhub.rows import SCHEMA
from dedup.eventhub.source import NAMES
from kit.eventhubs.control import Double
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (ROOT / "docs/how-to/eventhubs.md").read_text()


@pytest.mark.full
@pytest.mark.delta
def test_the_code_runs(spark: SparkSession, eventhubs: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, one after another: a stream into Delta, begun again behind our checkpoints, the hub asked, batch reads."""
    eventhubs.create("orders", 2, ["again"])
    for part in (0, 1):
        for n in range(3):
            eventhubs.put("orders", part, [json.dumps({"id": f"{part}-{n}", "amount": n}).encode()], {"message-id": f"{part}-{n}"})
    monkeypatch.setenv("EVENTHUBS", f"{eventhubs.connection_string};EntityPath=orders")
    names: dict[str, Any] = {"spark": spark, "schema": pa.schema([("id", pa.string()), ("amount", pa.int64())])}
    write_deltalake(str(tmp_path / "orders"), names["schema"].empty_table())
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(snippet.replace("/lake", str(tmp_path)), names)
        if "start" not in names:
            eventhubs.put("orders", 0, [b'{"id": "later", "amount": 9}'], {"message-id": "later"})
    found = DeltaTable(str(tmp_path / "orders")).to_pyarrow_table()["id"].to_pylist()
    assert sorted(found) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2", "later"]
    assert names["table"]["sequence_number"].to_pylist() == [0, 1]


def test_every_option_and_column_is_told() -> None:
    """The tables name what there is, and nothing else."""
    options = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in _table("## Options"))))
    assert options == set(NAMES)
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in _table("## Rows")))) == set(SCHEMA.names)


def _table(title: str) -> list[str]:
    section = PAGE.split(f"\n{title}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]
