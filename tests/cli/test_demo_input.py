"""The demo's input and its arithmetic, without a stream: flights, delivery, expected result, supervisor."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from deadletter.letter import fingerprint
from dedup.demo import audit, input, main, supervise
from dedup.testing import delivery

EVENTS, SEED, FILES = 20_000, 5, 12


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return input.read(EVENTS)


@pytest.fixture(scope="module")
def planned(table: pa.Table) -> delivery.Delivery:
    return input.plan(table.num_rows, SEED, FILES)


@pytest.fixture(scope="module")
def landed(planned: delivery.Delivery, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Everything in the landing folder, with the number of the file."""
    folder = tmp_path_factory.mktemp("demo") / "landing"
    input.write(planned, table, folder)
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    tables = [pq.read_table(path) for path in files]
    return pa.concat_tables([t.append_column("file", pa.repeat(n, t.num_rows)) for n, t in enumerate(tables)])


def test_the_flights_are_all_there() -> None:
    """The whole input has the known figures, and flight_id names each flight."""
    everything = input.read()
    assert everything.num_rows == main.ALL
    assert everything["dep_time"].null_count == 8_255
    assert pc.count_distinct(everything["flight_id"]).as_py() == main.ALL


def test_a_body_is_the_flight(table: pa.Table) -> None:
    """The JSON that is sent says exactly what the CSV says, nulls included."""
    some = pa.concat_tables([table.slice(0, 50), table.filter(pc.is_null(table["dep_time"])).slice(0, 50)])
    for body, row in zip(input.bodies(some).to_pylist(), some.to_pylist(), strict=True):
        sent = json.loads(body)
        sent["time_hour"] = datetime.fromisoformat(sent["time_hour"])
        assert sent == row
    assert "flight_id" not in json.loads(input.bodies(some, with_id=False)[0].as_py())


def test_the_same_seed_delivers_the_same(planned: delivery.Delivery) -> None:
    """A run can be repeated: everything random hangs on the seed."""
    assert input.plan(EVENTS, SEED, FILES) == planned
    assert input.plan(EVENTS, SEED + 1, FILES) != planned


def test_every_kind_of_fault_is_delivered(planned: delivery.Delivery) -> None:
    """Redeliveries, duplicates near and far, in the same and another partition, every damage, unused numbers: none is left to chance."""
    topic = planned.topic
    assert set(topic["damage"].to_pylist()) == {input.INTACT, input.CUT, input.GARBAGE, input.NO_ID}
    assert planned.redelivered > 100
    assert planned.duplicates > 100
    first = {row["row"]: row for row in topic.to_pylist() if not row["duplicate"]}
    moved = [row["partition"] != first[row["row"]]["partition"] for row in topic.to_pylist() if row["duplicate"]]
    assert {True, False} == set(moved)
    for p in range(input.PARTITIONS):
        steps = np.diff(topic.filter(pc.equal(topic["partition"], p))["sequence_number"].to_numpy())
        assert steps.min() == 1
        assert steps.max() > 1


def test_a_redelivery_is_the_same_event_in_a_later_file(planned: delivery.Delivery, landed: pa.Table) -> None:
    """A position that comes again holds what it held, and comes as often as the log says."""
    position = ["partition", "sequence_number"]
    assert landed.num_rows == planned.delivered
    contents = landed.group_by([*position, "body"]).aggregate([("file", "count_distinct"), ("file", "count")])
    assert contents.num_rows == landed.group_by(position).aggregate([]).num_rows == planned.topic.num_rows
    assert contents["file_count_distinct"] == contents["file_count"]
    assert landed.num_rows - contents.num_rows == planned.redelivered


def test_a_partition_keeps_its_order(landed: pa.Table) -> None:
    """Within a file and a partition sequence numbers ascend: a rebalance goes back between files, never within one."""
    for _, rows in landed.to_pandas()[["file", "partition", "sequence_number"]].groupby(["file", "partition"]):
        assert rows["sequence_number"].is_monotonic_increasing


def test_what_is_expected_adds_up(planned: delivery.Delivery, table: pa.Table) -> None:
    """Every delivery is a redelivery, a duplicate, a row or a letter."""
    due = input.compute(planned, table)
    assert planned.delivered == planned.redelivered + planned.duplicates + due.rows.num_rows + due.letters.num_rows
    assert {"REJECTED", "UNDECODABLE", "NO_KEY"} == set(due.letters["kind"].to_pylist())
    assert due.rows["dep_time"].null_count == 0


@pytest.mark.parametrize("at", [0, 7_000])
def test_a_missing_a_doubled_and_a_changed_row_are_found(table: pa.Table, at: int) -> None:
    """The comparison sees one row among thousands, also where columns are null."""
    one, rest = table.slice(at, 1), pa.concat_tables([table.slice(0, at), table.slice(at + 1)])
    changed = one.set_column(16, "distance", pa.array([1], pa.int32()))

    def off(found: pa.Table) -> tuple[list[str], list[str]]:
        lost, doubled = input.difference(table, found)
        return tuple(t["flight_id"].to_pylist() * t["times"].to_pylist()[0] if t.num_rows else [] for t in (lost, doubled))

    name = one["flight_id"].to_pylist()
    assert off(pa.concat_tables([rest, one])) == ([], [])
    assert off(rest) == (name, [])
    assert off(pa.concat_tables([table, one, one])) == ([], name * 2)
    assert off(pa.concat_tables([rest, changed])) == (name, name)


def test_progress_is_counted_from_checkpoints(planned: delivery.Delivery) -> None:
    """A checkpoint stands for all events at or below it, unused numbers not counted."""
    topic = planned.topic
    last = {p: pc.max(topic.filter(pc.equal(topic["partition"], p))["sequence_number"]).as_py() for p in range(input.PARTITIONS)}
    assert planned.decided({}) == 0
    assert planned.decided(last) == topic.num_rows
    assert planned.decided({**last, 0: last[0] - 1}) == topic.num_rows - 1


COUNTING = """
import pathlib, subprocess, sys, time
file = pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "600"], process_group=0)
with file.with_name("children").open("a") as children:
    print(child.pid, file=children)
for n in range(int(file.read_text()) + 1, 31):
    time.sleep(0.05)
    new = file.with_suffix(".new")
    new.write_text(str(n))
    new.rename(file)
"""
"""Counts to 30 in a file, and goes on there when it is started again; leaves a child in a process group of its own."""


@pytest.mark.full
def test_a_child_is_killed_with_everything_it_started_and_goes_on(tmp_path: Path) -> None:
    """Each kill hits a child that has done something, nothing of it survives, and the work is finished all the same."""
    count = tmp_path / "count"
    count.write_text("0")
    told: list[tuple[int, int]] = []
    kills = supervise.moments(seed=1, events=30, kills=3, longest=0.1)
    command = [sys.executable, "-c", COUNTING, str(count)]
    outcome = supervise.run(command, tmp_path / "log", kills, lambda: int(count.read_text()), lambda *now: told.append(now))
    assert outcome.kills == 3
    assert told[-1] == (3, 30)
    assert len(left := (tmp_path / "children").read_text().split()) == 4
    assert [pid for pid in left if _runs(int(pid))] == []


def _runs(pid: int) -> bool:
    return any(pid == other and state[0] != "Z" for other, state, _, _ in supervise.processes())


def test_a_child_is_not_killed_before_it_has_done_anything(tmp_path: Path) -> None:
    """A kill waits for progress since the start: without any, the child ends by itself and no kill is counted."""
    outcome = supervise.run([sys.executable, "-c", ""], tmp_path / "log", [supervise.Kill(0, 0.0)], lambda: 7)
    assert outcome.kills == 0


def test_a_child_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    """An error of the stream is not taken for a kill."""
    with pytest.raises(supervise.DemoFailed, match=r"exit code 1 \(ValueError: so it is\)"):
        supervise.run([sys.executable, "-c", "raise ValueError('so it is')"], tmp_path / "log", [], lambda: 0)


def test_an_interrupted_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    """An exception in the supervisor, such as Ctrl-C, takes the child along."""
    pid = tmp_path / "pid"
    child = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n'); time.sleep(600)"

    def decided() -> int:
        if pid.exists() and pid.read_text().endswith("\n"):
            raise KeyboardInterrupt
        return 0

    with pytest.raises(KeyboardInterrupt):
        supervise.run([sys.executable, "-c", child, str(pid)], tmp_path / "log", [], decided)
    assert not _runs(int(pid.read_text()))


def test_dead_letters_with_one_fingerprint_are_one_line() -> None:
    """Reasons that differ in a number alone are counted together, beside one of them; the table has a line for each fault."""
    torn = [f"the body is not JSON: Unterminated string starting at, at character {at} of 100" for at in (90, 88, 89)]
    reasons = [("UNDECODABLE", reason) for reason in [*torn, "the body is not UTF-8: byte 0xff at position 0"]]
    reasons += [("REJECTED", "cancelled")] * 3
    rows = [{"kind": kind, "reason": reason, "fingerprint": fingerprint(kind, reason)} for kind, reason in reasons]
    counted = audit.by_fingerprint(pa.Table.from_pylist(rows))
    assert counted == {("REJECTED", "cancelled"): 3, ("UNDECODABLE", f"for example: {torn[1]}"): 3, reasons[3]: 1}
    found = audit.Audit(7, 0, 0, 0, 0, counted, 0, 0, ())
    assert [line[:2] for line in main._lines(found, 0) if line[0].startswith("dead")] == [
        ("dead letters REJECTED", 3),
        ("dead letters UNDECODABLE", 3),
        ("dead letters UNDECODABLE", 1),
    ]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """The demo empties only what a demo has filled."""
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(main.ConfigError, match="not empty"):
        main.run(str(tmp_path), seed=1, events=5_000)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_machine_without_java_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is one sentence, not a stack of Spark's."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(main.ConfigError, match="needs Java 17"):
        main.run(str(tmp_path / "demo"), events=5_000)
    assert not (tmp_path / "demo").exists()
