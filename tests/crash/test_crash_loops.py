"""The crash loops of `make crash`, a few of each kind; and that they notice what is wrong."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crash import cluster_lane, disks, log, report, run, spark_lane
from crash.lane import Lane
from kit.children import Nursery
from kit.places import SINK, DeltaPlace

pytestmark = pytest.mark.crash

ONE_OF_EACH = {"postgres": 16, "delta": 8}
"""Kinds of fault."""

ROUNDS = {"postgres": 1, "delta": 2}

THROUGH_SPARK = [
    pytest.param(f"{store}{way}", marks=[getattr(pytest.mark, store), pytest.mark.spark])
    for store in ROUNDS
    for way in (run.SPARK, run.KAFKA, run.CLUSTER)
]


@pytest.mark.full
@pytest.mark.parametrize("kind", [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("delta", marks=pytest.mark.delta)])
def test_whatever_is_broken_nothing_is_lost_or_doubled(kind: str, tmp_path: Path) -> None:
    """Each kind of fault in its turn; then a restart to the end: rows, letters and merged rows are as computed, and the tables prove it."""
    journal = tmp_path / "journal.jsonl"
    made = run.run(kind, range(ROUNDS[kind] * ONE_OF_EACH[kind]), journal)
    assert len({entry["fault"] for entry in made}) == ONE_OF_EACH[kind]
    print(report.markdown(made))
    skipped = {entry["skipped"] for entry in made if "skipped" in entry}
    assert all("mount" in reason for reason in skipped), skipped
    assert report.totals(made)[kind]["wrong_seeds"] == [], [e for e in made if e.get("lost") or e.get("doubled") or e.get("contradictions")]
    assert run.read(journal) == made


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", THROUGH_SPARK)
def test_whatever_of_spark_or_the_broker_dies_nothing_is_lost_or_doubled(kind: str, tmp_path: Path) -> None:
    """Driver, JVM, Python workers, executors, broker, a driver that is stopped, two that take over from each other: each once."""
    ways = {run.SPARK: spark_lane.FAULTS, run.KAFKA: spark_lane.KAFKA_FAULTS, run.CLUSTER: cluster_lane.FAULTS}
    faults = ways[kind.removeprefix("postgres").removeprefix("delta")]
    made = run.run(kind, range(len(faults)), tmp_path / "journal.jsonl")
    print(report.markdown(made))
    assert {entry["fault"] for entry in made} == set(faults)
    assert report.totals(made)[kind]["wrong_seeds"] == [], made


@pytest.mark.full
@pytest.mark.delta
def test_the_loop_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    """After a run that was killed in the middle of a line, too; the report counts both runs."""
    journal = tmp_path / "journal.jsonl"
    run.run("delta", range(1), journal)
    with journal.open("a") as file:
        file.write('{"seed": 7, "sto')
    first = run.next_seed("delta", journal)
    run.run("delta", range(first, first + 1), journal)
    entries = run.read(journal)
    assert [entry["seed"] for entry in entries] == [0, 1]
    totals = report.totals(entries)["delta"]
    assert (totals["iterations"] + totals["skipped"], totals["seeds"]) == (2, "0-1")
    json.dumps(totals)


@pytest.mark.full
@pytest.mark.delta
def test_loops_at_once_share_the_seeds_and_the_journal(tmp_path: Path) -> None:
    """`--jobs 2` runs each seed once, goes on after what the journal has, and reports all of it."""
    journal = tmp_path / "journal.jsonl"
    journal.write_text(json.dumps({"seed": 4, "store": "delta", "fault": "disk full", "skipped": "made up"}) + "\n")
    command = [sys.executable, "-m", "crash", "3", "--store", "delta", "--jobs", "2", "--journal", str(journal)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(entry["seed"] for entry in run.read(journal)) == [4, 5, 6, 7]
    assert "delta**: 3 iterations, seeds 4-7" in done.stdout


@pytest.mark.full
@pytest.mark.delta
def test_a_row_that_is_missing_and_a_row_that_is_there_twice_are_told(tmp_path: Path) -> None:
    """The loops can fail: one row less is lost, one row more is doubled, a merged row with another value is both."""
    from deltalake import DeltaTable, write_deltalake

    with closing(Nursery(tmp_path)) as nursery:
        lane = Lane.new("delta", str(tmp_path / "lane"), nursery, 0)
        lane.batches = 2
        lane.finish()
        assert lane.wrong() == ([], [], [])
    assert isinstance(lane.place, DeltaPlace)
    orders = DeltaTable(lane.place.path("orders"))
    first, second = lane.place.read("orders")[:2]
    orders.delete(f"id = '{first['id']}'")
    write_deltalake(lane.place.path("orders"), pa.Table.from_pylist([second], schema=SINK), mode="append")
    lost, doubled, contradictions = lane.wrong()
    assert (lost, doubled) == ([(first["id"], first["amount"])], [(second["id"], second["amount"])])
    assert contradictions == ["the two sinks differ"]


ANEW = "import sys; sys.path.insert(0, sys.argv[1]); import disks; disks.again([sys.executable, '-c', sys.argv[2]])"
SAID = "import os; d = os.environ['DEDUP_CRASH_DISKS']; print(os.geteuid(), *(os.statvfs(d + k).f_blocks for k in ('/postgres', '/delta')))"


def test_an_ordinary_user_gets_small_disks_where_namespaces_are_allowed() -> None:
    """Without root the loops start themselves anew in namespaces: a small file system for each store, and the user is who it was."""
    user: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable  # ours may lie where nobody may look
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(disks.__file__, folder)
        Path(folder).chmod(0o755)
        done = subprocess.run([python, "-c", ANEW, folder, SAID], cwd="/", capture_output=True, text=True, check=False, **user)
    if not done.stdout:
        pytest.skip(f"no namespaces for users here: {done.stderr[-200:]}")
    uid, *blocks = map(int, done.stdout.split())
    assert uid == (pwd.getpwnam("nobody").pw_uid if user else os.geteuid())
    assert [b * 4096 // 2**20 for b in blocks] == list(disks.MEGABYTES.values())


def test_the_independent_computation_counts_what_it_says() -> None:
    """Each distinct key is one row or one letter, the first delivery of it decides, and a coin moves it from the one to the other."""
    want = log.expected(6, 3, [])
    every = [f for n in range(3) for f in log.facts(6, n)]
    keys = {f.key for f in every if f.key is not None and not f.junk}
    assert {key for key, _ in want.rows} | set(want.held) == keys
    assert set(want.rows.values()) == {1} and not {key for key, _ in want.rows} & set(want.held)
    one = next(iter(want.rows))[0]
    lost, doubled = want.difference(log.expected(6, 3, [one]))
    assert one in [x[0] for x in lost] and one in doubled
