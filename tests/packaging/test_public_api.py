"""The public names of `dedup`: exactly these, from anywhere, without a driver."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dedup
from checkpoint import errors

ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.DedupError)}

NAMES = {
    "Budget",
    "Columns",
    "Consumer",
    "Contents",
    "DeadLetters",
    "DeltaStore",
    "Encrypt",
    "ErrorClass",
    "Event",
    "FailurePolicy",
    "LetterPart",
    "Limits",
    "Mask",
    "ParkedGroup",
    "PostgresStore",
    "Report",
    "ReprocessOptions",
    "Retry",
    "Selection",
    "Takeover",
    "Tx",
    "__version__",
    "decode",
    "replay",
    "reprocess",
}

DRIVERS = {
    "pyspark",
    "psycopg",
    "pgpq",
    "deltalake",
    "obstore",
    "azure",
    "delta",
    "confluent_kafka",
    "prometheus_client",
    "opentelemetry",
    "cryptography",
}


def test_all_is_exactly_the_public_names() -> None:
    """Nothing becomes public by accident, and nothing public disappears."""
    assert dedup.__all__ == sorted(NAMES | ERRORS)


def test_dir_lists_the_public_names() -> None:
    """Completion in a notebook shows what there is, before any of it was imported."""
    program = "import dedup; print(*dir(dedup))"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert listed == dedup.__all__


def test_every_error_of_the_docs_can_be_imported() -> None:
    """Who reads of an error on the page of errors can catch it: `from dedup import StoreRestored`."""
    page = (Path(dedup.__file__).parent.parent / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^##+ `([A-Z]\w+)`", page, re.MULTILINE))
    assert len(told) >= 15
    assert told <= set(dedup.__all__)


@pytest.mark.parametrize("name", sorted(NAMES | ERRORS))
def test_each_public_name_can_be_imported(name: str) -> None:
    """`from dedup import name` gives something of that name."""
    value = getattr(dedup, name)
    assert getattr(value, "__name__", name).rsplit(".", 1)[-1] in (name, name.strip("_"))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Lazy names do not hide a typing mistake."""
    with pytest.raises(AttributeError, match="Costumer"):
        _ = dedup.Costumer


def test_importing_the_public_names_imports_no_driver() -> None:
    """A program pays for Spark, PostgreSQL or Delta when it asks for it, not before."""
    program = (
        "import sys, dedup.cli; from dedup import Consumer, Columns, Selection, decode; print(*{m.split('.')[0] for m in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert "pyarrow" in loaded
    assert not DRIVERS & set(loaded)


def test_no_module_imports_the_private_names_of_another() -> None:
    """A name that begins with an underscore stays in its module."""
    root = Path(dedup.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("dedup", "checkpoint", "deadletter"):
                assert not [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")], file


@pytest.mark.full
def test_the_demo_on_delta_needs_no_driver_of_postgresql() -> None:
    """Who installs the extra `demo` alone can run the demo."""
    program = "import sys; sys.modules |= {'psycopg': None, 'pgpq': None}; import dedup.demo.main, dedup.demo.driver"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
