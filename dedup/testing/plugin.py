"""The pytest fixture `crash_kit`. It imports the kit only if a test uses the fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def crash_kit(tmp_path: Path) -> Callable[..., None]:
    """Call it as `crash_kit(make, rows, **options)`, with the arguments of `dedup.testing.check`. The test fails if a promise is broken."""
    from dedup.testing import check

    def run(make: Callable[[Path], Any], rows: Any, **options: Any) -> None:
        check(make, rows, **{"folder": tmp_path, **options}).require()

    return run
