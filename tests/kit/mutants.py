"""`make mutants`: break the protocol on purpose, one piece of text at a time, and see the named test fail.

Each break is made in a copy of the tree; the checkout is left alone. A mutant that its test does not notice survives, and is a defect of
the tests. The last line is `N passed, N failed`: mutants that were noticed, and survivors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kit import cheap, pg_server
from kit.mutant import Mutant
from kit.mutant_patches import MUTANTS
from kit.paths import ROOT

COPIED = ("checkpoint", "deadletter", "dedup", "sql", "tests", "docs", "README.md", "setup.cfg", "pyproject.toml")
LIMIT = 300
"""Seconds for one test. One that hangs has noticed nothing."""

NOTICED = 1
"""pytest's exit code where tests ran and one failed; an import that breaks has another one."""


def mutated(mutant: Mutant, root: Path) -> str:
    """The text of its file with the break. Raises ValueError where the old text is not there exactly once."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name!r}: {mutant.file} has its old text {text.count(mutant.old)} times: adapt tests/kit/mutant_patches.py"
        )
    return text.replace(mutant.old, mutant.new)


def copy_to(folder: Path) -> None:
    """What the tests need, without what they leave behind."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "sql" if name == "dedup" else ""))
        else:
            shutil.copy(source, folder / name)
    (folder / "dedup/sql").symlink_to("../sql")


def run(tests: list[str], folder: Path, dsn: str) -> tuple[int, str]:
    """pytest's exit code and output for these tests in this copy; -1 where they hang."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "DEDUP_TEST_POSTGRES": dsn, "DEDUP_SCHEDULES": "600"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={LIMIT}", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT * (1 + len(tests) // 8))
    except subprocess.TimeoutExpired:
        return -1, "it hangs"
    return done.returncode, done.stdout[-2000:] + done.stderr[-500:]


def survives(mutant: Mutant, folder: Path, dsn: str) -> str:
    """Empty where its test noticed, else what happened."""
    file = folder / mutant.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(mutated(mutant, folder), encoding="utf-8")
    try:
        code, output = run([mutant.test], folder, dsn)
    finally:
        file.write_text(whole, encoding="utf-8")
    return "" if code == NOTICED else output


def main() -> int:
    """Run all of them, or those whose name contains one of the arguments."""
    wanted = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    alive = []
    cheap.use_memory()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, pg_server.running_server(settings=pg_server.UNSAFE) as server:
        folder = Path(temporary)
        copy_to(folder)
        code, output = run(sorted({m.test for m in wanted}), folder, server.dsn)
        if code != 0:
            print(f"{output}\nThe tests fail without any break; nothing was tried.")
            return 2
        for mutant in wanted:
            began = time.monotonic()
            left = survives(mutant, folder, server.dsn)
            print(f"{'SURVIVED' if left else 'noticed '} {time.monotonic() - began:5.1f} s  {mutant.name}", flush=True)
            if left:
                alive.append(mutant)
                print(f"  by {mutant.test}\n{left}", flush=True)
    print(f"{len(wanted) - len(alive)} passed, {len(alive)} failed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
