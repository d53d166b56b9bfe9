"""`whole_file`: what people export is there as a whole, or as it was before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpoint.errors import ConfigError
from dedup.reprocessing.whole_file import whole_file


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """Whoever reads meanwhile sees the older file; the new one has its rights, and is where a link leads to."""
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_bytes(b"old")
    old.chmod(0o600)
    link.symlink_to(old)
    with whole_file(link) as file:
        file.write(b"new")
        file.flush()
        assert link.read_bytes() == b"old"
    assert link.is_symlink() and old.read_bytes() == b"new" and old.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]


def test_two_that_write_at_once_do_not_mix(tmp_path: Path) -> None:
    """The file is of the one that ended last."""
    with whole_file(tmp_path / "file") as one:
        one.write(b"one" * 10)
        with whole_file(tmp_path / "file") as two:
            two.write(b"two")
    assert (tmp_path / "file").read_bytes() == b"one" * 10 and os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_older_file_alone(tmp_path: Path) -> None:
    """What was written so far is removed, Ctrl-C included."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"old")]


def test_a_pipe_is_written_to_as_it_stands(tmp_path: Path) -> None:
    """`/dev/stdout` and pipes stay what they are."""
    os.mkfifo(tmp_path / "pipe")
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with whole_file(tmp_path / "pipe") as file:
        file.write(b"rows")
    reader.join()
    assert seen == [b"rows"] and (tmp_path / "pipe").is_fifo()


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A folder that is not there, and a name that a folder has."""
    for path, why in ((tmp_path / "none/file", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"{path} cannot be written: {why}"), whole_file(path):
            pass
