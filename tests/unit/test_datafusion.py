"""SHA-256 by DataFusion: the digests that hashlib gives, in the same order, and hashlib where it cannot be used."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.decode import datafusion, hashing
from fixtures.variants import of_which
from kit.paths import ROOT

MANY = datafusion.ENOUGH


def by_hashlib(values: pa.Array) -> bytes:
    """The digests one after another."""
    return b"".join(hashlib.sha256(value or b"").digest() for value in values.to_pylist())


def values(count: int, seed: int = 0) -> pa.Array:
    """So many values, none to some blocks of SHA-256 long."""
    chance = random.Random(seed)
    return pa.array([chance.randbytes(chance.choice((0, 1, 55, 56, 63, 64, 65, 300))) for _ in range(count)], pa.large_binary())


def test_digests_of_many_values_are_those_of_hashlib_in_order() -> None:
    """Whichever of the two hashes a batch, its keys are the same: more values than DataFusion takes at once, and a part of an array."""
    assert datafusion.can_hash(MANY)
    column = values(50_001)
    assert datafusion.sha256(column) == by_hashlib(column)
    part = column.slice(777, 9_000)
    assert hashing.sha256(part).tobytes() == by_hashlib(part)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=30), st.integers(0, 20))
def test_digests_of_any_values_are_those_of_hashlib(some: list[bytes], skipped: int) -> None:
    """Nothing in a value, nor its place in a buffer, makes another key of it."""
    column = pa.array([*[b"other"] * skipped, *some * 100], pa.large_binary()).slice(skipped)
    assert datafusion.sha256(column) == by_hashlib(column)


@pytest.mark.parametrize("count", [0, 1, MANY - 1, MANY])
def test_few_values_are_left_to_hashlib(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch does not pay for a plan."""
    asked: list[int] = []
    engine = datafusion.sha256
    monkeypatch.setattr(datafusion, "sha256", lambda column: (asked.append(len(column)), engine(column))[1])
    column = values(count)
    assert hashing.sha256(column).tobytes() == by_hashlib(column)
    assert asked == [count] * (count >= MANY)


def test_nulls_are_left_to_hashlib() -> None:
    """A null, of which DataFusion has no digest, does not move the others' digests."""
    column = pa.array([None, *values(MANY).to_pylist()], pa.large_binary())
    assert hashing.sha256(column).tobytes() == by_hashlib(column)


def test_without_datafusion_keys_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be installed on one machine and missing on the next."""
    column = values(MANY + 1)
    with_it = hashing.sha256(column).tobytes()
    monkeypatch.setattr(datafusion, "_module", lambda: None)
    assert hashing.sha256(column).tobytes() == with_it == by_hashlib(column)


@pytest.mark.parametrize("program", of_which(1, ["raise ImportError('no such library')", "x = 1"]))
def test_an_installation_that_does_not_work_is_left_alone(program: str, tmp_path: Path) -> None:
    """Keys are made by hashlib where DataFusion is broken, or something else of that name."""
    (tmp_path / "datafusion").mkdir()
    (tmp_path / "datafusion/__init__.py").write_text(program)
    check = f"import dedup.decode.datafusion as d; print(d.can_hash({MANY}))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.full
def test_nothing_of_what_was_hashed_is_kept() -> None:
    """Neither keys nor bodies stay in memory: a stream hashes for months."""
    column = pa.array([b"x" * 1_000] * MANY, pa.large_binary())
    datafusion.sha256(column)
    gc.collect()
    before = pa.total_allocated_bytes()
    for _ in range(5):
        datafusion.sha256(pa.concat_arrays([column]))
    gc.collect()
    assert pa.total_allocated_bytes() - before < column.nbytes


def test_where_datafusion_fails_hashlib_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, or a bug of its own: the batch goes on, with the same keys."""

    def fails(column: pa.Array) -> bytes:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(datafusion, "sha256", fails)
    column = values(MANY)
    assert hashing.sha256(column).tobytes() == by_hashlib(column)


def _in_child(answers: multiprocessing.Queue[tuple[bool, bytes]]) -> None:
    answers.put((datafusion.can_hash(MANY), hashing.sha256(values(MANY)).tobytes()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_hashes_by_itself() -> None:
    """DataFusion does not promise to work there: its threads stay with the parent."""
    assert datafusion.can_hash(MANY)
    datafusion.sha256(values(MANY))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(answers,), daemon=True)
    child.start()
    assert answers.get(timeout=60) == (False, by_hashlib(values(MANY)))
    child.join(60)
    assert child.exitcode == 0
