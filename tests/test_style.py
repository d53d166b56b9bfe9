"""House rules that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_each_test_says_what_it_guards(file: Path) -> None:
    """Every test has a docstring that is a sentence, so that the list of tests reads as the specification."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert not [node.name for node in tests if not (ast.get_docstring(node) or "").endswith((".", "?", ")"))]
