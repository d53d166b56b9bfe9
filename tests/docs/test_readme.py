"""What the README, and the pages about operation and dead letters, show is what runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from deadletter.selection import Selection
from dedup.delta import DeltaStore
from dedup.postgres import PostgresStore
from dedup.verify import verify
from kit.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = (ROOT / "README.md").read_text()
OPERATE, LETTERS = ((ROOT / "docs/how-to" / page).read_text() for page in ("operate.md", "dead-letters.md"))
CRASH = (ROOT / "docs/explanation/crash.md").read_text()


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Every `dedup ...` line of the page's consoles."""
    lines = [line.split("#")[0] for block in blocks("console", page) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("dedup ")]


def test_the_readme_is_short_and_begins_with_code() -> None:
    """A reader sees code before line 30, and the end before line 160."""
    assert README.splitlines().index("```python") < 30
    assert len(README.splitlines()) <= 160


def test_the_ratios_are_the_measured_ones() -> None:
    """Each ratio of the README's table is that of its measure in benchmarks/latest.json."""
    measured = {m["measure"]: m["ratio"] for m in json.loads((ROOT / "benchmarks/latest.json").read_text())}
    told = re.findall(r"(\d+\.\d\d)[^|,()]*\(`(\w+/\w+)`\)", README)
    assert len(told) == 7
    assert told == [(f"{measured[name]:.2f}", name) for _, name in told]


def test_every_link_and_target_of_the_readme_is_there() -> None:
    """Each link names a file of the repository, and each `make ...` a target."""
    links = re.findall(r"\]\(([\w./-]+)\)", README)
    assert len(links) > 20 and [link for link in links if not (ROOT / link).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"`make ([\w-]+)`", README), *re.findall(r"^make ([\w-]+)", README, re.MULTILINE)}
    assert len(targets) > 3 and [name for name in targets if f"\n{name}:" not in makefile] == []


@pytest.mark.delta
def test_the_code_and_the_commands_run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's program runs as it stands, and again without Spark's checkpoint. Then each command of it, and of the pages about
    operation and about dead letters, answers on its store, in their order; what was rejected is there once the repaired handler has run.
    """
    here = str(tmp_path / "shop")
    (program,), (telling, repaired, later) = (blocks("python", page.replace("/tmp/shop", here)) for page in (README, LETTERS))
    paid, refund = {"message_id": "m-1", "customer": "ann", "amount": 5}, {"message_id": "m-2", "customer": None, "amount": -3}
    for _ in range(2):
        exec(program, {})
        assert DeltaTable(f"{here}/orders").to_pyarrow_table().to_pylist() == [paid]
        shutil.rmtree(f"{here}/spark")
    store = DeltaStore(f"{here}/dedup")
    assert verify(store, "shop").ok
    (tmp_path / "shop.py").write_text(repaired)
    exec(telling, {})
    exec(later.replace("/lake", str(tmp_path / "lake")), {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    for page in (README, OPERATE, LETTERS):
        run_commands(page.replace("/tmp/shop", here), f"{here}/dedup", store)
    sys.modules.pop("shop", None)
    rows = DeltaTable(f"{here}/orders").to_pyarrow_table().to_pylist()
    assert sorted(rows, key=lambda row: row["message_id"]) == [paid, refund]
    assert (tmp_path / "letters.jsonl").read_text().count("\n") == 2
    assert verify(store, "shop").ok


def run_commands(page: str, url: str, store: DeltaStore) -> None:
    """Each command ends with 0 and prints something."""
    from dedup.cli.app import app

    found = commands(page)
    assert found
    for arguments in found:
        arguments = [example(store) if a == "ID" else a for a in arguments]
        of_store = [] if {"shop:consumer", "--store"} & {*arguments} else ["--store", url]
        result = CliRunner().invoke(app, [*arguments, *of_store])
        if "--sql" in arguments:
            continue  # a Delta store has none; tests/cli/test_cli.py runs it on PostgreSQL
        assert result.exit_code == 0 and result.output.strip(), (arguments, result.output, result.exception)


def example(store: DeltaStore) -> str:
    """A letter that a person is not done with."""
    rows = store.letters(Selection(), ["id", "status"]).to_pylist()
    return str(next(row["id"] for row in rows if row["status"] != "REPROCESSED"))


def test_the_table_of_deaths_names_every_step_of_both_stores() -> None:
    """The table of the page "What if it dies here?" has exactly the steps that the code reports."""
    table = CRASH.split("## Step by step")[1].split("##")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    named = [[re.findall(r"`(\w+)`", row[column]) for row in rows] for column in (1, 2)]
    assert [s for cell in named[0] for s in cell] == list(PostgresStore.steps)
    assert [s for cell in named[1] for s in cell] == list(DeltaStore.steps)
