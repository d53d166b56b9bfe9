"""docs/explanation/architecture.md names only what is there."""

from __future__ import annotations

import re

from kit.paths import ROOT

PAGE = "\n".join((ROOT / "docs/explanation" / name).read_text(encoding="utf-8") for name in ("architecture.md", "architecture.svg"))
PRODUCT = "\n".join(f.read_text(encoding="utf-8") for p in ("checkpoint", "deadletter", "dedup") for f in (ROOT / p).rglob("*.py"))
SQL = "\n".join(f.read_text(encoding="utf-8") for f in (ROOT / "sql").rglob("*.sql"))


def test_each_path_of_the_page_exists() -> None:
    """Whoever follows the page to a file finds it."""
    paths = set(re.findall(r"(?:checkpoint|deadletter|dedup|tests)/[\w/]+(?:\.py)?", PAGE))
    assert len(paths) > 20
    assert not sorted(path for path in paths if not (ROOT / path).exists())


def test_each_package_and_name_of_the_page_exists() -> None:
    """A module in the layers is there, and a name in the text is defined in the product."""
    modules = set(re.findall(r"`(dedup\.\w+)`", PAGE))
    places = {module: ROOT / module.replace(".", "/") for module in modules}
    assert not sorted(module for module, place in places.items() if not place.is_dir() and not place.with_suffix(".py").is_file())
    names = set(re.findall(r"`([A-Za-z_]+)`", PAGE)) - {"deadletter", "checkpoint", "layers"}
    missing = sorted(n for n in names if not re.search(rf"^\s*(?:class |def )?{n}\b", PRODUCT, re.MULTILINE))
    assert not [n for n in missing if f"function {{schema}}.{n}(" not in SQL]
