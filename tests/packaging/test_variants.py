"""What a run says of the stores that the contract suite ran on, and what is selected for the slow ones."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from fixtures.variants import OBJECTS, SELECTED, SELECTED_OBJECTS, counted
from kit.paths import TESTS


def report(store: str | None) -> Any:
    """Of a test that ran on this store, or of one that has none."""
    return SimpleNamespace(user_properties=[] if store is None else [("store", store)])


def test_the_last_lines_count_each_store() -> None:
    """By outcome; a store that no test ran on has no line, so that nobody takes it for one that passed."""
    stats = {"passed": [report("delta"), report("delta"), report(None), report("delta-spark")], "failed": [report("delta-spark")]}
    assert counted(stats) == ["contract suite on delta: 2 passed", "contract suite on delta-spark: 1 passed, 1 failed"]


def test_what_is_selected_is_there() -> None:
    """A test that gets another name does not leave the selection in silence."""
    written = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert {name.partition("[")[0] for name in SELECTED.union(*SELECTED_OBJECTS.values())} <= written
    assert SELECTED_OBJECTS.keys() == OBJECTS
