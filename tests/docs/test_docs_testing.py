"""What docs/how-to/testing.md shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dedup.testing import kit
from kit.paths import ROOT

PAGE = (ROOT / "docs/how-to/testing.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_snippet_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader who copies it sees the same words."""
    exec(compile(SNIPPETS[0], "docs/how-to/testing.md", "exec"), {})
    said = re.search(r"```\n(\d+ schedules.*?)```", PAGE, re.DOTALL)
    assert said and capsys.readouterr().out == said[1]


@pytest.mark.full
@pytest.mark.delta
def test_the_test_of_a_consumer_passes(tmp_path: Path) -> None:
    """The page's test of a Consumer is a test that passes, run by pytest with nothing but the plugin."""
    (tmp_path / "test_orders.py").write_text(SNIPPETS[1])
    command = [sys.executable, "-m", "pytest", "-p", "dedup.testing.plugin", "-q", "test_orders.py"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_delivery_of_the_page_runs() -> None:
    """The generator gives the batches that the page asks for."""
    exec(compile(SNIPPETS[2], "docs/how-to/testing.md", "exec"), {})


@pytest.mark.delta
def test_the_rows_of_the_page_are_processed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader does by hand in a notebook gives the report that the page says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    exec(compile(SNIPPETS[1] + SNIPPETS[3], "docs/testing.md", "exec"), {})


def test_the_page_names_every_promise() -> None:
    """What the kit can say stands in the table of the page."""
    others = ("CLEAN_INPUT", "LETTERS")
    said = [value for name, value in vars(kit).items() if name.isupper() and isinstance(value, str) and name not in others]
    assert len(said) == 13 and [value for value in said if f"*{value}*" not in PAGE] == []
