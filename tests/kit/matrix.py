"""`make matrix`: the tests of Spark on each version of it, and the table of docs/reference/platforms.md.

An environment is a folder of build/matrix that has one PySpark and its Py4J; everything else comes from the project's own one.
`python -m kit.matrix 3.5 4.0` runs two of them. The exit code is 1 where a test failed; the table has only what passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from kit.paths import ROOT, environment

VERSIONS = {"3.5": "3.5.9", "4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.0", "4.3": "4.3.0"}
"""Minor version -> the one that is run. 4.2 is in the project's own environment."""

OWN = "4.2"

PAGE = ROOT / "docs/reference/platforms.md"

FILES = ("spark", "unit/test_decode.py", "unit/test_decode_schemas.py", "unit/test_keys.py", "unit/test_envelope.py")

_ROW = re.compile(r"^\| PySpark (\d+\.\d+)\..*$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What a run said."""

    version: str
    delta: str
    passed: int
    skipped: int

    @property
    def row(self) -> str:
        """As a line of the table."""
        python = ".".join(map(str, sys.version_info[:2]))
        return f"| PySpark {VERSIONS[self.version]} | {self.delta} | {python} | {self.passed} passed, {self.skipped} skipped |"


def python_of(version: str) -> Path:
    """The interpreter of an environment, which is made where it is not there."""
    if version == OWN:
        return Path(sys.executable)
    folder = ROOT / "build/matrix" / version
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        print(f"Setting up build/matrix/{version} (once; Spark alone is 300 to 400 MB to download) ...", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"pyspark=={VERSIONS[version]}"]
        subprocess.run(install, check=True)
        (own,) = (path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages"))
        next(folder.glob("lib/*/site-packages")).joinpath("beneath.pth").write_text(f"import site; site.addsitedir({own!r})\n")
        (folder / "ready").touch()
    return python


def run(version: str, options: list[str]) -> Result | None:
    """Run the tests on this version; None where one failed."""
    python = str(python_of(version))
    # warnings of an older Spark about Python's libraries are no fault of ours
    line = [python, "-m", "pytest", "-q", "-W", "default", "-m", "not full", *options, *(f"{ROOT}/tests/{name}" for name in FILES)]
    print(f"== PySpark {VERSIONS[version]}", flush=True)
    with subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [(sys.stdout.write(one), one)[1] for one in process.stdout]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", said[-1])}
    if process.returncode:
        return None
    told = "from dedup.spark.session import DELTA; print(DELTA.split(':')[-1])"
    delta = subprocess.run([python, "-c", told], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout.strip()
    return Result(version, delta, counts.get("passed", 0), counts.get("skipped", 0))


def note(result: Result) -> None:
    """Put the line of this version into the table."""
    page = PAGE.read_text()
    PAGE.write_text(_ROW.sub(lambda found: result.row if found[1] == result.version else found[0], page))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m kit.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="version", help=f"of {', '.join(VERSIONS)}; default: all")
    parser.add_argument("--jobs", default="2", help="test processes, each with a Spark of its own (default: %(default)s)")
    parser.add_argument("--note", action="store_true", help="write the results into docs/reference/platforms.md")
    asked = parser.parse_args()
    if unknown := set(asked.versions) - set(VERSIONS):
        parser.error(f"there is no version {', '.join(sorted(unknown))} here")
    results = {
        version: run(version, ["-n", asked.jobs, "--dist", "loadgroup", "--no-loadscope-reorder"]) for version in asked.versions or VERSIONS
    }
    for version, result in results.items():
        print(f"{result.row if result else f'| PySpark {VERSIONS[version]} | failed |'}")
        if result and asked.note:
            note(result)
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
