"""Microsoft's own tests of event processors and checkpoint stores, from the sdists of the installed packages, on our stores."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kit import microsoft_plugin

SUITES = {
    "azure-eventhub": [
        "tests/livetest/synctests/test_eventprocessor.py",
        "tests/livetest/asynctests/test_eventprocessor_async.py",
        "tests/unittest/asynctests/test_in_memory_checkpointstore.py",
    ],
    "azure-eventhub-checkpointstoreblob": ["tests/test_storage_blob_partition_manager.py"],
    "azure-eventhub-checkpointstoreblob-aio": ["tests/test_storage_blob_partition_manager_aio.py"],
}
"""Package -> its test modules in which a checkpoint store has a part."""


def sdist(package: str, folder: Path) -> Path:
    """The source of the installed version, from the registry that pip uses. Skips where that has none."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    wanted = f"{package}=={version(package)}"
    asked = subprocess.run(
        [*pip, "--no-binary", ":all:", "--dest", str(folder), wanted], capture_output=True, text=True, check=False, timeout=300
    )
    if asked.returncode:
        pytest.skip(f"the registry has no sdist of {wanted}: {asked.stderr.strip().splitlines()[-1]}")
    (archive,) = folder.glob(f"{package.replace('-', '_')}-{version(package)}.tar.gz")
    return archive


def unpack(archive: Path, modules: list[str], folder: Path) -> None:
    """These test modules, without the package and without their conftest. Skips where the sdist holds no tests."""
    with tarfile.open(archive) as source:
        root = archive.name.removesuffix(".tar.gz")
        missing = [module for module in modules if f"{root}/{module}" not in source.getnames()]
        if missing:
            pytest.skip(f"{archive.name} does not hold {', '.join(missing)}")
        for module in modules:
            found = source.extractfile(f"{root}/{module}")
            assert found is not None
            (folder / Path(module).name).write_bytes(found.read())


@pytest.mark.postgres
def test_microsofts_suites_pass_on_our_stores(postgres: str, tmp_path: Path) -> None:
    """All but those that cannot apply, which are named with the reason and have to fail (microsoft_plugin.CANNOT_APPLY)."""
    downloads, suites, report = tmp_path / "sdists", tmp_path / "suites", tmp_path / "report.xml"
    downloads.mkdir()
    suites.mkdir()
    for package, modules in SUITES.items():
        unpack(sdist(package, downloads), modules, suites)
    (suites / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "kit.microsoft_plugin", "-p", "no:cacheprovider", "-q", "-rA", f"--junitxml={report}"]
    environment = {**os.environ, "DEDUP_MICROSOFT_DSN": postgres}
    ran = subprocess.run(command, cwd=suites, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-2_000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    told = {f"{case.get('classname')}.py::{case.get('name')}" for case in cases if case.find("skipped") is not None}
    assert told == set(microsoft_plugin.CANNOT_APPLY) and len(cases) >= 59
