"""How a cluster's executors get this library, as users ship it: the wheel of this checkout, or an environment in an archive."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from kit.paths import copy_checkout

OURS = ("checkpoint", "deadletter", "dedup")
SECONDS = 600


def environment(folder: Path) -> Path:
    """The Python of a new virtual environment, in which the packages of this one are linked, all but ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=SECONDS)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).resolve().iterdir():
        if entry.suffix != ".pth" and not entry.name.startswith(("__editable__", "dedup_spark", "__pycache__")) and entry.name not in OURS:
            (site / entry.name).symlink_to(entry)
    return folder / "bin/python"


def wheel(folder: Path) -> Path:
    """The wheel of this checkout, built from a copy."""
    source = copy_checkout(folder / "source", (*OURS, "sql"))
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(line, check=True, timeout=SECONDS, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (made,) = folder.glob("*.whl")
    return made


def packed(folder: Path, made: Path) -> Path:
    """An archive with an environment like `environment`, in which this wheel is installed. Packages of others stay links."""
    python = environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(made)]
    subprocess.run(line, check=True, timeout=SECONDS, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as out:
        out.add(python.parent.parent, ".")
    return archive
