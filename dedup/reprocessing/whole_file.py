"""Files that people export: there as a whole, or as they were before."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from checkpoint.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name, and the place of an older file, when the block has ended without an error.

    What is no file, such as a pipe, is written to as it stands.

    Raises:
        ConfigError: the file cannot be made there; the message names it.

    Crash: the file is there, whole, or as it was; what was written so far may be left beside it, with the ending `.part`.
    """
    target = path.resolve()  # the place of a link is not taken, but that of what it leads to
    if os.path.exists(target) and not os.path.isfile(target):
        with _opened(target, path) as file:
            yield file
        return
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")  # of this call alone: two may write at once
    try:
        with _opened(part, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _give_name(part, target, path)
    except BaseException:
        _remove(part)
        raise


def _opened(file: Path, path: Path) -> BinaryIO:
    try:
        return file.open("wb")
    except OSError as error:
        _refuse(path, error)


def _give_name(part: Path, target: Path, path: Path) -> None:
    try:
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        _refuse(path, error)


def _remove(part: Path) -> None:
    with suppress(OSError):
        part.unlink()


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file.") from error
