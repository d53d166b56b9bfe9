"""Where the checkout under test is, and what its child processes import."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which a child imports the product and the kits of this checkout, and of no other."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), **more}


def copy_checkout(folder: Path, names: Iterable[str]) -> Path:
    """These folders of the checkout and all files beside them, in a new folder, to build from."""
    folder.mkdir(parents=True)
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=_not_of_the_checkout)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return folder


def _not_of_the_checkout(folder: str, names: Sequence[str]) -> list[str]:
    """What Python and an editable install leave in the folders."""
    return [name for name in names if name == "__pycache__" or Path(folder, name).is_symlink()]
