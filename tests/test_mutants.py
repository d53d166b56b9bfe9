"""The deliberate breaks of `make mutants` still fit the code; whether each is noticed takes minutes, and is its own command."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutant_patches import MUTANTS, Mutant
from mutants import mutated

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_break_still_applies_and_names_a_test(mutant: Mutant) -> None:
    """Its text is in its file exactly once, the broken file is still Python, and the test that has to notice is there."""
    broken = mutated(mutant, ROOT)
    if mutant.file.endswith(".py"):
        ast.parse(broken)
    file, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_enough_breaks_and_no_two_alike() -> None:
    """At least twenty, each with a name of its own."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
