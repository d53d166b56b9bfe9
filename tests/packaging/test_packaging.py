"""What people install: wheel and sdist, complete, working from any folder with nothing but what they ask for.

The environments made here hold the core requirements and nothing else: their installed folders are linked in, so that no test
needs a package index. `make` itself resolves and installs everything from the index on a fresh machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import dataclass
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dedup
from checkpoint.install import DISTRIBUTION
from kit.paths import ROOT, copy_checkout

PACKAGES = ("checkpoint", "deadletter", "dedup")

CHECK = """
import importlib.resources, dedup, sys
from dedup import Columns, Consumer, Selection, decode
names = [f.name for f in importlib.resources.files("dedup.sql").joinpath("postgres").iterdir()]
assert "queries.sql" in names and any(n.startswith("0001_") for n in names), names
assert importlib.resources.files("dedup").joinpath("py.typed").is_file()
print(dedup.__version__, dedup.__file__)
"""

NO_DEADLINE = """
from hypothesis import settings
settings.register_profile("wheel", deadline=None)
settings.load_profile("wheel")
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the core requirements only."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    def run(self, *command: str, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """A command of this environment, in another folder and with nothing inherited that could find the checkout."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DEDUP", "COVERAGE"))}
        done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the checkout and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_checkout(folder / "source", (*PACKAGES, "sql", "tests", "docs", "benchmarks", "examples", ".ci"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def closure(*extras: str) -> set[str]:
    """The names of what `pip install dedup-spark[...]` brings: what setup.cfg says, and what that requires in turn."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    asked = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in extras)]
    todo, found = [Requirement(line) for line in "\n".join(asked).split("\n") if line], set[str]()
    while todo:
        requirement = todo.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        todo += [Requirement(line) for line in distribution(requirement.name).requires or []]
    return found


def link_distribution(name: str, target: Path) -> None:
    """Link the top-level files and folders of an installed distribution into another site-packages."""
    installed = distribution(name)
    tops = {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        link = target / top
        if not link.exists():
            link.symlink_to(Path(str(installed.locate_file(top))))


def new_environment(folder: Path, archive: Path, *extras: str) -> Environment:
    """An environment with the core requirements and those of the extras, and the archive installed by pip as a user would."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    environment = Environment(folder)
    site = environment.run(environment.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    building = ("setuptools",) if archive.suffix == ".gz" else ()
    for name in sorted({*closure(*extras), *building}):
        link_distribution(name, Path(site))
    pip = [sys.executable, "-m", "pip", "--python", environment.python]
    environment.run(*pip, "install", "--quiet", "--no-index", "--no-build-isolation", str(archive), cwd=folder)
    environment.run(*pip, "check", cwd=folder)
    return environment


@pytest.fixture(scope="module")
def wheel_environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, installed."""
    return new_environment(tmp_path_factory.mktemp("env") / "wheel", next(built.glob("*.whl")))


def test_the_wheel_holds_every_module_and_every_sql_file(built: Path) -> None:
    """A package or SQL file that is added to the checkout is shipped, and nothing else is."""
    wheel = {n for n in zipfile.ZipFile(next(built.glob("*.whl"))).namelist() if ".dist-info/" not in n}
    source = built / "source"
    modules = {str(f.relative_to(source)) for package in PACKAGES for f in (source / package).rglob("*.py")}
    sql = {f"dedup/{f.relative_to(source)}" for f in (source / "sql").rglob("*") if f.suffix in (".sql", ".py")}
    assert wheel == modules | sql | {f"{package}/py.typed" for package in PACKAGES}


def test_the_sdist_holds_what_it_takes_to_test_it(built: Path) -> None:
    """Each file of the folders, and each file at the top that somebody needs who builds, tests or changes it, travels along."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.cfg", "pyproject.toml", "Makefile", "constraints.txt", ".pre-commit-config.yaml"} <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= names
    source = built / "source"
    folders = [folder for folder in source.iterdir() if folder.is_dir() and folder.suffix != ".egg-info"]
    assert {str(f.relative_to(source)) for folder in folders for f in folder.rglob("*") if f.is_file()} - names == set()


def test_the_metadata_is_what_a_package_index_shows(built: Path) -> None:
    """Name, version, licence, every declared extra, the README without dead links; no licence classifier beside the expression."""
    wheel = zipfile.ZipFile(next(built.glob("dedup_spark-*.whl")))
    (file,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    found = message_from_bytes(wheel.read(file))
    assert (found["Name"], found["Version"]) == (DISTRIBUTION, dedup.__version__)
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert f"{file.removesuffix('METADATA')}licenses/LICENSE" in wheel.namelist()
    description = found.get_payload(decode=True)
    assert found["Description-Content-Type"] == "text/markdown"
    assert isinstance(description, bytes)
    readme, shown = (ROOT / "README.md").read_text(encoding="utf-8"), description.decode()
    assert re.findall(r"^#.*", shown, re.MULTILINE) == re.findall(r"^#.*", readme, re.MULTILINE)
    assert "](docs/" in readme and not re.findall(r"\]\((?!https?:|#)", shown), "links into the repository are dead on an index"
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(found.get_all("Provides-Extra", [])) == set(config["options.extras_require"])
    assert not [name for name in found.get_all("Classifier", []) if name.startswith("License")]


@pytest.mark.full
@pytest.mark.spark
def test_the_program_of_the_readme_runs_with_what_the_readme_installs(built: Path, tmp_path: Path) -> None:
    """`pip install 'dedup-spark[spark,delta]'` brings all that the first program needs: nothing is missing, pandas included."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (extras,) = set(re.findall(r"pip install 'dedup-spark\[([\w,]+)\]'", readme))
    environment = new_environment(tmp_path / "env", next(built.glob("*.whl")), *extras.split(","))
    (tmp_path / "job.py").write_text(program.replace("/tmp/shop", str(tmp_path / "shop")), encoding="utf-8")
    done = environment.run(environment.python, "job.py", cwd=tmp_path, PYSPARK_PYTHON=environment.python)
    assert re.findall(r"m-\d", done.stdout) == ["m-1"]
    command = str(environment.folder / "bin/dedup")
    assert "everything is accounted for" in environment.run(command, "verify", "--store", str(tmp_path / "shop/dedup"), cwd=tmp_path).stdout


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.full)])
def test_it_works_from_another_folder_without_any_driver(kind: str, built: Path, tmp_path: Path) -> None:
    """Installed with core requirements only, it imports, answers `--version` and `--help`, and finds its SQL."""
    environment = new_environment(tmp_path / "env", next(built.glob(kind)))
    where = environment.run(environment.python, "-c", CHECK, cwd=tmp_path).stdout
    assert str(environment.folder) in where
    for driver in ("pyspark", "psycopg", "pgpq", "deltalake", "obstore", "azure", "confluent_kafka", "fastavro", "datafusion"):
        assert environment.run(environment.python, "-c", f"import {driver}", cwd=tmp_path, check=False).returncode == 1
    command = str(environment.folder / "bin/dedup")
    assert environment.run(command, "--version", cwd=tmp_path).stdout == f"dedup {where.split()[0]}\n"
    assert "verify" in environment.run(command, "--help", cwd=tmp_path).stdout
    assert "verify" in environment.run(environment.python, "-m", "dedup", "--help", cwd=tmp_path).stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("url", "extra"), [("postgresql://localhost/none", "postgres"), pytest.param(".", "delta", marks=pytest.mark.full)]
)
def test_a_missing_driver_is_one_sentence_with_the_extra(url: str, extra: str, wheel_environment: Environment, tmp_path: Path) -> None:
    """Who uses a store without its extra reads what to install, not a stack trace."""
    done = wheel_environment.run(str(wheel_environment.folder / "bin/dedup"), "verify", "--store", url, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"pip install 'dedup-spark[{extra}]'" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["checkpoint", "deadletter"])
def test_a_file_of_the_users_that_hides_our_package_is_one_clear_sentence(
    name: str, wheel_environment: Environment, tmp_path: Path
) -> None:
    """A user's checkpoint.py in the working folder is not run and not mistaken for ours."""
    (tmp_path / f"{name}.py").write_text("print('ran')\n")
    (tmp_path / "job.py").write_text("try:\n    import dedup\nexcept ImportError as error:\n    print(error)\n")
    told = wheel_environment.run(wheel_environment.python, "job.py", cwd=tmp_path).stdout
    assert told.count("\n") == 1
    assert f"rename {name}.py" in told
    assert "ran" not in told.split()
    done = wheel_environment.run(wheel_environment.python, "-m", "dedup", "--version", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == f"dedup: {told}"
    assert done.stdout == ""


@pytest.mark.full
def test_the_tests_pass_on_the_installed_wheel(wheel_environment: Environment, tmp_path: Path) -> None:
    """Tests that need no driver pass against the wheel, in a folder from which the checkout cannot be seen."""
    for file in ("test_position.py", "test_errors.py"):
        shutil.copy(ROOT / "tests/unit" / file, tmp_path / file)
    (tmp_path / "conftest.py").write_text(NO_DEADLINE)
    # the tools come last on the path, as a folder: what makes the checkout importable there, a .pth file, does not count
    tools = str(Path(str(distribution("pytest").locate_file("."))).resolve())
    program = (
        f"import sys; sys.path.append({tools!r}); import checkpoint, pytest; print(checkpoint.__file__); sys.exit(pytest.main(['-q']))"
    )
    done = wheel_environment.run(wheel_environment.python, "-c", program, cwd=tmp_path)
    assert re.search(r"\d+ passed", done.stdout)
    assert str(wheel_environment.folder) in done.stdout.splitlines()[0]


def test_constraints_pin_everything_that_is_declared() -> None:
    """Each declared requirement has an exact version in constraints.txt, and that version is inside the declared range."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    versions = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    text = config["options"]["install_requires"] + "".join(config["options.extras_require"].values())
    for requirement in [Requirement(line) for line in text.split("\n") if line and not line.startswith("%")]:
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_pyproject_says_only_what_setup_cfg_cannot() -> None:
    """All metadata has one home: pyproject.toml names the build backend and configures ruff."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(pyproject) == {"build-system", "tool"}
    assert set(pyproject["tool"]) == {"ruff"}


def test_this_environment_is_the_pinned_one() -> None:
    """What the tests run with is what constraints.txt says, so that a green run can be repeated."""
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE):
        with suppress(PackageNotFoundError):  # of an extra that development does not install
            assert distribution(name).version == version, name


def make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run make in the checkout, with another environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("answer", ["", 'java version "1.8.0_392"', 'openjdk version "11.0.22" 2024-01-16'])
def test_java_that_is_missing_or_too_old_is_one_sentence(answer: str, tmp_path: Path) -> None:
    """`make` says which Java it needs, and where to point to it, before anything else fails."""
    if answer:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/java").write_text(f"#!/bin/sh\necho '{answer}' >&2\n")
        (tmp_path / "bin/java").chmod(0o755)
    done = make("java", JAVA_HOME=str(tmp_path))
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(said) == 1
    assert "Java 17 or newer" in said[0]
    assert str(tmp_path) in said[0]


@pytest.mark.parametrize("answer", ['openjdk version "17.0.15" 2025-04-15', 'java version "21"', 'openjdk version "25-ea" 2025-09-16'])
def test_java_that_is_new_enough_is_silent(answer: str, tmp_path: Path) -> None:
    """Versions are compared as numbers, however the vendor writes them."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/java").write_text(f"#!/bin/sh\necho 'Picked up JAVA_TOOL_OPTIONS: -Dx'\necho '{answer}' >&2\n")
    (tmp_path / "bin/java").chmod(0o755)
    done = make("java", JAVA_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("python", ["", "/no/such/python"])
def test_python_that_is_missing_is_one_sentence(python: str) -> None:
    """`make` says which Python it needs and how to name it."""
    done = make("python", f"PYTHON={python}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(said) == 1
    assert "Python 3.11 or newer" in said[0]


def test_make_help_names_every_command_of_the_readme() -> None:
    """`make` alone lists what there is, from the comments of the targets."""
    listed = {line.split()[1] for line in make().stdout.splitlines()}
    commands = {"demo", "test", "test-full", "simulate", "crash", "mutants", "lint", "bench", "bench-smoke", "bench-growth"}
    commands |= {"docs", "matrix", "release", "clean", "year"}
    assert listed == {"help", *commands}
