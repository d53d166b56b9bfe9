"""The deliberate breaks of `make mutants` still fit the code; whether each is noticed takes minutes, and is its own command."""

from __future__ import annotations

import ast
import re

import pytest

from fixtures.rooms import room_of
from kit.mutant import Mutant
from kit.mutant_patches import MUTANTS
from kit.mutants import mutated
from kit.paths import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_break_still_applies_and_names_a_test(mutant: Mutant) -> None:
    """Its text is in its file exactly once, the broken file is still Python, and the test that has to notice is there."""
    broken = mutated(mutant, ROOT)
    if mutant.file.endswith(".py"):
        ast.parse(broken)
    file, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("named", sorted({mutant.test for mutant in MUTANTS}))
def test_each_break_is_noticed_by_the_fast_run(named: str) -> None:
    """The test that has to notice is one of `make test`: neither it nor its module or room is marked `full`."""
    file, _, name = named.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marked = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    (test,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert room_of(file) != "full"
    marks = [ast.unparse(mark) for mark in (*marked, *test.decorator_list)]
    assert not [mark for mark in marks if re.search(r"pytest\.mark\.full$|pytest\.mark\.full[,\]]", mark) and "param" not in mark]


def test_there_are_enough_breaks_and_no_two_alike() -> None:
    """At least twenty, each with a name of its own."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
