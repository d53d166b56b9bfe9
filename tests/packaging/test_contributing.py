"""What a contributor reads and runs: CONTRIBUTING.md, SECURITY.md and the hooks of pre-commit."""

from __future__ import annotations

import re

import pytest

from kit.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_pre_commit_runs_what_make_lint_runs() -> None:
    """Each command of `make lint` is a hook with the same words, in the same order, and there is no other hook."""
    yaml = pytest.importorskip("yaml")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe
    commands = [line.removeprefix("\t@").replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == commands
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in repository["hooks"])


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_commands_of_the_page_exist(page: str) -> None:
    """A link leads to a file of the checkout, and each `make` target that the page names is one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (ROOT / link).exists()]
    targets = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert {found[1] for found in re.finditer(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)} <= targets
