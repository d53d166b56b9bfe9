"""What `make lint` looks for beside style: secrets that were committed, known holes of pinned packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kit.paths import ROOT

SCRIPT = ROOT / ".ci/audit.py"


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    """The script, as a module; without its tools the test is skipped."""
    pytest.importorskip("detect_secrets")
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_a_secret_that_is_committed_is_found(audit: ModuleType, tmp_path: Path) -> None:
    """The form of a real credential is found in tests, and a password in a URL elsewhere; a line that says it is none is left alone."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text('KEY = "AKIA' + 'IOSFODNN7EXAMPLA"\n')
    (tmp_path / "code/b.py").write_text('DSN = "postgresql://bob:' + 'hunter22@db/shop"\n')
    (tmp_path / "code/c.py").write_text('DSN = "postgresql://bob:' + 'hunter22@db/shop"  # pragma: allowlist ' + "secret\n")
    assert [hit.split()[0] for hit in audit.secrets(tmp_path, ["code"], without=[])] == ["code/a.py:1", "code/b.py:1"]
    assert [hit.split()[0] for hit in audit.secrets(tmp_path, ["code"], without=audit.MADE_UP)] == ["code/a.py:1"]


def test_a_known_hole_fails_and_a_service_that_is_away_does_not(audit: ModuleType) -> None:
    """A package with a hole is named with the version that repairs it; one that could not be asked about is counted."""
    hole = {"id": "GHSA-1", "fix_versions": ["2.0"]}
    packages = [{"name": "a", "version": "1.0", "vulns": [hole]}, {"name": "b", "skip_reason": "not found"}, {"name": "c", "vulns": []}]
    assert audit.holes({"dependencies": packages}) == (["a 1.0: GHSA-1, fixed in ['2.0']"], 1)


def test_a_network_that_swallows_requests_holds_nothing_up(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for holes is ended after a while, and that is said: no answer is no hole."""
    monkeypatch.setattr(audit, "PATIENCE", 0.05)
    assert audit.ask_for_holes() == ([], "The pinned packages were not audited: no answer within 0.05 s.")
