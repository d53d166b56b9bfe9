"""`dedup demo` as its user runs it: a process that kills its stream three times and still adds up, and that says so when it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from rich.console import Console

from dedup.demo import input
from dedup.demo.main import Demo, batches, conclude
from dedup.testing import delivery

EVENTS, SEED = 15_000, 3

pytestmark = [pytest.mark.crash, pytest.mark.spark]

KEYS = {"delivered", "redelivered", "duplicates", "written", "dead_letters", "kills", "lost", "doubled"}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """`dedup demo` in a process of its own."""
    command = [sys.executable, "-m", "dedup", "demo", "--events", str(EVENTS), "--seed", str(SEED), "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check(done: subprocess.CompletedProcess[str], kills: int = 3) -> None:
    """Exit code 0, one object, and the numbers of this seed."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    planned = input.plan(EVENTS, SEED, batches(EVENTS))
    assert set(found) == KEYS
    assert (found["kills"], found["lost"], found["doubled"]) == (kills, 0, 0)
    assert (found["delivered"], found["redelivered"], found["duplicates"]) == (planned.delivered, planned.redelivered, planned.duplicates)
    assert set(found["dead_letters"]) == {"NO_KEY", "REJECTED", "UNDECODABLE"}
    assert found["delivered"] == found["redelivered"] + found["duplicates"] + found["written"] + sum(found["dead_letters"].values())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo on Delta that was killed once and has ended well."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    check(run("--store", str(folder), "--kills", "1"), kills=1)
    return folder


@pytest.mark.delta
def test_killed_on_delta_and_it_adds_up(finished: Path) -> None:
    """A SIGKILL in mid-run loses nothing and doubles nothing, as seen by somebody who only reads the folder."""
    assert Demo(str(finished), SEED).examine(*_input()).ok


@pytest.mark.full
@pytest.mark.delta
def test_killed_three_times_on_delta_and_it_adds_up(tmp_path: Path) -> None:
    """The same as often as the demo kills where nobody says how often."""
    check(run("--store", str(tmp_path / "demo")))


@pytest.mark.full
@pytest.mark.postgres
def test_killed_three_times_on_postgres_and_it_adds_up(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a database; the command to look at it, as the demo prints it, works."""
    monkeypatch.chdir(tmp_path)
    check(run("--store", postgres))
    demo = Demo(postgres, SEED)
    assert demo.examine(*_input()).ok
    command = demo.place.command("verify departures").replace(" dedup ", f" {sys.executable} -m dedup ")
    verified = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stderr


def _input() -> tuple[delivery.Delivery, pa.Table]:
    return input.plan(EVENTS, SEED, batches(EVENTS)), input.read(EVENTS)


def delete_one(sink: DeltaTable) -> None:
    """Lose the row of one flight."""
    victim = sink.to_pyarrow_table()["flight_id"][777].as_py()
    sink.delete(f"flight_id = '{victim}'")


def double_one(sink: DeltaTable) -> None:
    """Write one flight again."""
    write_deltalake(sink, sink.to_pyarrow_table().slice(777, 1), mode="append")


def change_one(sink: DeltaTable) -> None:
    """Make one flight a minute longer."""
    row = sink.to_pyarrow_table().slice(777, 1).to_pylist()[0]
    sink.update(predicate=f"flight_id = '{row['flight_id']}'", updates={"distance": "distance + 1"})


@pytest.mark.delta
@pytest.mark.parametrize(
    ("tamper", "lost", "doubled"),
    [(change_one, 1, 1), pytest.param(delete_one, 1, 0, marks=pytest.mark.full), pytest.param(double_one, 0, 1, marks=pytest.mark.full)],
)
def test_a_sink_that_is_off_by_one_row_fails(
    finished: Path, tamper: Callable[[DeltaTable], None], lost: int, doubled: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row missing, doubled or changed among thousands is found, counted, named, and the exit code is 1."""
    demo = Demo(str(finished), SEED)
    sink = DeltaTable(str(finished / "lake" / "departures"))
    whole = sink.version()
    tamper(sink)
    try:
        found = demo.examine(*_input())
    finally:
        sink.restore(whole)
    assert (found.lost, found.doubled) == (lost, doubled)
    assert conclude(demo, found, 3, "tampered", Console(stderr=True), as_json=True) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["lost"] == lost
    assert "2013-" in told.err


@pytest.mark.full
@pytest.mark.delta
def test_a_demo_that_was_not_killed_enough_fails(finished: Path) -> None:
    """A stream that ended before the third kill has shown less than it claims."""
    demo = Demo(str(finished), SEED)
    assert conclude(demo, demo.examine(*_input()), 2, "", Console(stderr=True), as_json=True) == 1
