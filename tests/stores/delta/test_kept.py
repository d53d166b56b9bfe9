"""Rows that tasks keep as files: what the driver decides on is what tasks read, whatever the layout, and where files are gone."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import holders
from checkpoint.errors import StoreUnavailable
from dedup.core.keys import KeySettings
from dedup.decode import json as decode_json
from dedup.decode.prepare import Prepare, prepare_events
from dedup.pipeline.batch import EvaluatedArrow
from dedup.pipeline.commit import index_of
from dedup.spark import keeping
from dedup.spark.keeping import EvaluatedInTasks, Keeping
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import Tasks, run_in
from kit.orders import ORDER, assert_proven, batch, event, ids, orders
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

SPEC = Prepare("shop", KeySettings(columns=("data.id",), sequence=("data.amount",)), decoder=decode_json(ORDER))

PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 1)), unique=True, min_size=1, max_size=40)


@pytest.fixture
def lake(tmp_path: Path) -> DeltaPlace:
    """A folder with the sink `orders`."""
    place = DeltaPlace(tmp_path / "lake")
    place.create_sink()
    return place


def kept(rows: pa.Table, folder: Path, parts: list[int]) -> EvaluatedInTasks:
    """The rows, kept by one task for each of these numbers of rows."""
    task = pickle.loads(pickle.dumps(Keeping(str(folder), None, SPEC)))
    bounds = [*np.minimum(np.cumsum([0, *parts]), rows.num_rows).tolist(), rows.num_rows]
    slices = [rows.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    answers = [piece for part in slices for piece in task(part.to_batches(max_chunksize=4))]
    return EvaluatedInTasks(pa.Table.from_batches(answers, keeping.PIECES), SPEC)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(PLACES, st.lists(st.integers(0, 9), max_size=5), st.data())
def test_kept_rows_are_the_rows_of_the_batch(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int, int]], parts: list[int], data: Any
) -> None:
    """Any order and layout: the same index, content and handler's rows as of the batch in memory, of all rows and of some."""
    rows = batch(*(event(n, f"k{n % 7}", n % 3, partition=p, part=part) for p, n, part in places))
    there = kept(rows, tmp_path_factory.mktemp("kept"), parts)
    here = EvaluatedArrow(prepare_events(rows, SPEC))
    mine, whole = index_of(there), index_of(here)
    assert mine.positions(np.arange(len(mine))) == whole.positions(np.arange(len(whole)))
    assert (mine.high == whole.high).all() and (mine.payload == whole.payload).all()
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(mine) - 1), min_size=1))))
    assert there.content(mine.order[chosen]).to_pylist() == here.content(whole.order[chosen]).to_pylist()
    dealt = there.frame(mine.order[chosen]).dealt(2, np.full(len(chosen), -1))
    shares = sorted((share for task in pickle.loads(pickle.dumps(dealt)) for share in task), key=lambda share: share.base)
    assert [share.base for share in shares] == [int(np.searchsorted(whole.place[chosen], p)) for p in np.unique(whole.place[chosen])]
    read = pa.concat_tables([share.read({}) for share in shares])
    wanted = here.frame(whole.order[chosen])
    assert read.select(wanted.column_names).to_pylist() == wanted.to_pylist()


def test_one_partition_is_one_call_in_order_whatever_the_layout(lake: DeltaPlace) -> None:
    """Two tasks have kept every second row: the handler still gets each partition once, whole and ascending."""
    made, calls = bare(lake.store()), lake.folder / "calls"

    @made.foreach_arrow(into="orders")
    def load(events: pa.Table, tx: Any) -> pa.Table:
        numbers = events["sequence_number"].to_pylist()
        with calls.open("a") as out:
            out.write(f"{events['partition'][0]}: {numbers == sorted(numbers)} {len(numbers)}\n")
        return pa.table({name: pc.struct_field(events["data"], name) for name in ORDER.names})

    rows = batch(*(e for n in range(20) for p in (1, 0) for e in orders([n], partition=p)))
    assert run_in(Tasks(rows), made, rows).processed == 40
    assert sorted(calls.read_text().splitlines()) == ["0: True 20", "1: True 20"]
    assert_proven(lake.store())


def test_known_keys_and_repeats_in_other_tasks_are_left_out_before_the_handler(lake: DeltaPlace) -> None:
    """A key of an earlier batch, and one that two partitions have: the handler is given neither twice."""
    for number, events in enumerate((orders(range(4)), [event(n, f"p0-{n % 6}", n, partition=n % 2) for n in range(4, 16)])):
        made = bare(lake.store())
        made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1})
        rows = batch(*events)
        report = run_in(Tasks(rows), made, rows, number)
    assert (report.processed, report.dead_lettered + report.duplicates) == (2, 10)
    assert sorted(ids(lake.read())) == [f"p0-{n}" for n in range(6)]


@pytest.mark.parametrize(
    "harm", of_which(1, [Path.unlink, lambda path: os.truncate(path, 100), lambda path: path.write_bytes(bytes(path.stat().st_size))])
)
def test_a_file_that_is_gone_decides_nothing_and_the_next_try_keeps_none(
    lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], Any]
) -> None:
    """Somebody removes, cuts or overwrites a file between the two jobs: the batch fails whole, and passes by way of the driver."""

    class Emptied(Tasks):
        def spread(self, task: Any, parts: int, answers: pa.Schema) -> pa.Table:
            """A task that finds nothing."""
            for path in Path(self.root).glob(f"{keeping.PREFIX}*/*"):
                harm(path)
            return super().spread(task, parts, answers)

    monkeypatch.setattr(keeping, "_not_shared", set())
    made, rows = bare(lake.store()), batch(*orders(range(5)))
    made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1})
    tasks = Emptied(rows, root=str(lake.folder))
    with pytest.raises(StoreUnavailable, match="Kept rows of the batch are gone"):
        run_in(tasks, made, rows)
    assert lake.read() == [] and lake.store().head("shop").checkpoints == {}
    assert tasks.folder() is None
    assert run_in(tasks, made, rows).processed == 5


def test_rows_that_cannot_be_kept_come_to_the_driver(lake: DeltaPlace, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk in a task: said in the log, and the batch passes all the same."""

    class Full(Tasks):
        def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
            """As on a disk that takes nothing."""
            return super().keep(prepare, f"{folder}/missing")

    made, rows = bare(lake.store()), batch(*orders(range(5)))
    made.foreach(into="orders")(lambda event, tx: {"id": event.data["id"], "amount": 1})
    assert run_in(Full(rows), made, rows).processed == 5
    assert "could not keep the rows of the batch" in caplog.text and "missing" in caplog.text


@pytest.mark.full
def test_a_folder_goes_with_its_block_and_that_of_a_dead_process_with_the_next_one(tmp_path: Path) -> None:
    """Kept rows of a killed driver are not left on the disk; those of a living process stay."""
    code = f"""
import os
from dedup.spark import keeping
held = keeping.shared_folder({str(tmp_path)!r})
print(held.__enter__(), flush=True)
os._exit(1)
"""
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip())
    assert left.is_dir()
    first = keeping.shared_folder(str(tmp_path))
    assert first is not None
    with first as mine:
        assert not left.exists() and os.path.isdir(mine)
        second = keeping.shared_folder(str(tmp_path))
        assert second is not None
        with second:
            assert os.path.isdir(mine)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_kept_below_scratch_where_it_is_a_path(tmp_path: Path) -> None:
    """A folder with or without file: is used; object storage, which Arrow files are not written to, is not."""
    from dedup.spark.tasks import SparkTasks

    for scratch in (str(tmp_path), f"file:{tmp_path}", f"file://{tmp_path}"):
        folder = SparkTasks(None, scratch).folder()  # type: ignore[arg-type]
        assert folder is not None
        with folder as path:
            assert Path(path).parent == tmp_path and Path(path).is_dir()
    assert SparkTasks(None, "abfss://container@account/scratch").folder() is None  # type: ignore[arg-type]


def test_tasks_of_another_user_may_keep_rows_in_a_shared_folder(tmp_path: Path) -> None:
    """Whatever the umask: below a folder that somebody named anybody may write, below that for temporary files nobody else."""
    before = os.umask(0o077)
    try:
        with shared(str(tmp_path)) as folder, shared(None) as own:
            assert (os.stat(folder).st_mode & 0o777, os.stat(own).st_mode & 0o777) == (0o777, 0o700)
    finally:
        os.umask(before)


def shared(base: str | None) -> AbstractContextManager[str]:
    """A folder for kept rows."""
    found = keeping.shared_folder(base)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scratch", "path"),
    [
        ("/mnt/x", "/mnt/x"),
        ("file:/mnt/x", "/mnt/x"),
        ("file:///mnt/x", "/mnt/x"),
        ("scratch/x", "scratch/x"),
        ("s3a://bucket/x", None),
        ("dbfs:/x", None),
    ],
)
def test_only_a_folder_of_this_machine_is_a_path(scratch: str, path: str | None) -> None:
    """Anything with a scheme is for Spark alone: as a path it would be a folder below the working directory."""
    assert keeping.path_of(scratch) == path


def test_a_folder_that_cannot_be_made_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows come another way, and the log says once why."""
    monkeypatch.setattr(keeping, "_not_shared", set())
    (tmp_path / "file").touch()
    assert [keeping.shared_folder(str(tmp_path / "file/below")) for _ in range(2)] == [None, None]


def test_a_folder_that_nothing_can_be_written_to_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is mounted read-only: it is no outage that the stream waits for."""
    monkeypatch.setattr(keeping, "_not_shared", set())

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        assert keeping.shared_folder(str(tmp_path)) is None
    assert keeping.shared_folder(str(tmp_path)) is None


def test_a_folder_that_is_not_shared_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the files of tasks are not here, the next batch keeps no rows in vain."""
    monkeypatch.setattr(keeping, "_not_shared", set())
    with shared(str(tmp_path)) as folder:
        assert not keeping._all_here(pa.table({"path": [f"{folder}/elsewhere.arrow"]}))
    assert keeping.shared_folder(str(tmp_path)) is None


def test_an_error_that_cannot_be_told_stays_the_error() -> None:
    """A user's class may raise where it is asked for its text: the letter is to name that class."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    with pytest.raises(Unspeakable), keeping.giving_up():
        raise Unspeakable


def test_only_folders_of_processes_that_are_proven_to_be_gone_are_removed(tmp_path: Path) -> None:
    """Another container may have the same host name and number: its folder is in use, and that of a predecessor with my number is not."""
    mine = holders.this_process()
    world = mine.started.rpartition("/")[0]
    dead = mine._replace(started=f"{world}/1")  # it had my number before me
    gone = mine._replace(pid=999_999_999)
    boot, _, _ = world.partition("/")
    left = [mine, mine._replace(host=f"{mine.host}-7"), dead._replace(started=f"{boot}/pid:[1]/1"), mine._replace(started="")]
    names = {process: keeping._name(process) for process in (dead, gone, *left)}
    others = [f"{keeping.PREFIX}{mine.host}-999999999-{'a' * 32}", f"{keeping.PREFIX}else", f"{keeping.PREFIX}a-1-a-{'a' * 32}"]
    for name in (*names.values(), *others):
        (tmp_path / name).mkdir()
    with shared(str(tmp_path)) as here:
        assert {path.name for path in tmp_path.iterdir()} == {*(names[process] for process in left), *others, Path(here).name}


def test_a_folder_tells_its_process() -> None:
    """Its name fits every file system, and whoever sweeps reads the whole process from it, whatever the host is called."""
    for process in (holders.this_process(), holders.Process("h" * 60 + "-12", 4_194_304, f"{'b' * 36}/pid:[4026531836]/9999999999")):
        name = keeping._name(process)
        assert keeping._holder(name) == process
        assert len(name) <= 255 and re.fullmatch(r"[A-Za-z0-9.-]+", name)
