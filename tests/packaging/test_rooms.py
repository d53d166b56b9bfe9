"""The rooms of tests: each belongs to a part of the full run, a run says what it does, and what fails is told at once."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from fixtures.rooms import room_of
from kit import parts
from kit.parts import PARTS
from kit.paths import ROOT, TESTS, environment

SETUP = "[tool:pytest]\nmarkers =\n    full: x\n    spark: x\n    xdist_group: x\nconsole_output_style = classic\n"

TWO_ROOMS = {
    "unit/test_a.py": "def test_one(): pass\ndef test_two(): assert 1 == 2\n",
    "stores/delta/test_b.py": "import pytest\ndef test_three(): pytest.skip('no disk')\n",
    "full/test_c.py": "def test_four(): pass\n",
}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest with the plugin alone, over the tests of a folder."""
    (folder / "setup.cfg").write_text(SETUP)
    for name, text in TWO_ROOMS.items():
        file = folder / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "fixtures.rooms", "-p", "no:cacheprovider", *options, "tests"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_every_room_belongs_to_the_full_run() -> None:
    """Each folder with tests is a room of a part; where two parts share it, one has what the other one leaves."""
    marked = defaultdict(list)
    for part in PARTS:
        for room in part.rooms:
            marked[room].append(part.marked)
    assert set(marked) == {str(file.parent.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")}
    slow = ["again", "not spark and not objects", "objects and not again", "spark and not again"]
    whole = ([""], ["not spark", "spark"], ["not spark and not objects", "objects and not again", "spark"], slow)
    assert all(sorted(found) in whole for found in marked.values())
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_no_two_modules_of_tests_share_a_name() -> None:
    """pytest imports them by their file's name, and leaves out the second of a name: it reads "import file mismatch"."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.full
@pytest.mark.parametrize("processes", ["2", pytest.param("0", marks=pytest.mark.full)])
def test_a_run_says_which_room_begins_and_how_it_ended(tmp_path: Path, processes: str) -> None:
    """A line for each room with its counts, each failure with its reason before the end, the slowest tests; no dots."""
    done = run(tmp_path, "-n", processes, "--dist", "loadgroup", "-m", "not full")
    said = done.stdout.splitlines()
    lines = [re.sub(r"^ *\d+:\d\d  ", "", line) for line in said]
    assert "unit: 2 tests begin" in lines and "stores/delta: 1 tests begin" in lines
    assert any(line.startswith("unit: 1 passed, 1 failed in ") for line in lines), done.stdout
    assert any(line.startswith("stores/delta: 1 skipped in ") for line in lines)
    at_once = lines.index("FAILED tests/unit/test_a.py::test_two (call)")
    assert at_once < next(n for n, line in enumerate(said) if "= FAILURES =" in line) and "assert 1 == 2" in done.stdout
    assert any(line.startswith("slowest ") for line in lines) and not {".", ".F", "s"} & set(lines)
    assert "full:" not in done.stdout and done.returncode == 1


def test_the_room_full_is_left_out_of_the_fast_run(tmp_path: Path) -> None:
    """What lies in it needs no marker of its own."""
    assert "full: 1 passed" in run(tmp_path, "-m", "full").stdout


def test_a_room_is_a_folder() -> None:
    """Whatever the test is called."""
    assert room_of("tests/stores/delta/test_x.py::test_y[a/b]") == "stores/delta"


@pytest.mark.full
@pytest.mark.parametrize(("body", "code"), [("assert 0", parts.FAILED), pytest.param("pass", parts.STOPPED, marks=pytest.mark.full)])
def test_a_part_that_is_stopped_fails_only_where_a_test_has_failed(tmp_path: Path, body: str, code: int) -> None:
    """Time is over in the middle of a test: what failed before it counts, and nothing else does."""
    begun = tmp_path / "begun"
    (tmp_path / "setup.cfg").write_text(SETUP)
    (tmp_path / "test_x.py").write_text(
        f"import pathlib, time\ndef test_a():\n    {body}\ndef test_b():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
    )
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "fixtures.rooms",
        "-p",
        "no:cacheprovider",
        "-c",
        str(tmp_path / "setup.cfg"),
        str(tmp_path),
    ]
    assert parts.run(line, begun.exists) == code


def test_a_part_is_begun_while_there_is_time_and_the_end_names_each() -> None:
    """Nothing is begun after the time is over; each part is named by what became of it."""
    assert parts.play(PARTS[:2], left=True, until=time.time() - 1) == {PARTS[0].name: None, PARTS[1].name: None}
    assert parts.told({"a": parts.OK, "b": None, "c": parts.STOPPED, "d": 4}) == [
        "parts of the full run passed: a",
        "parts of the full run stopped without a failure, since time was over: c",
        "parts of the full run not begun, since time was over: b",
        "parts of the full run FAILED: d",
    ]


def test_each_turn_begins_with_another_part() -> None:
    """After as many turns as there are parts each was the first one."""
    assert {parts.in_turn(PARTS, turn)[0].name for turn in range(7, 7 + len(PARTS))} == {part.name for part in PARTS}


def test_make_names_the_parts() -> None:
    """`make test-full PART=list` prints a line for each."""
    done = subprocess.run([sys.executable, "-m", "kit.parts", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [part.name for part in PARTS]
