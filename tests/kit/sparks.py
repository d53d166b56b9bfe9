"""Which version of Spark the tests run on: some of them are about what an older one does not have."""

from __future__ import annotations

from importlib.metadata import version

import pytest


def require(first: str, what: str) -> None:
    """Skip the test on a Spark before this version, which does not have what it is about."""
    here = version("pyspark")
    if [int(part) for part in here.split(".")[:2]] < [int(part) for part in first.split(".")]:
        pytest.skip(f"Spark {here} has no {what}: {first} is the first")
