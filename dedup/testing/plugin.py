"""The fixture `crash_kit` of pytest. Does nothing, and imports nothing of the kit, where no test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def crash_kit(tmp_path: Path) -> Callable[..., None]:
    """`crash_kit(make, rows, **options)`: what `dedup.testing.check` takes; the test fails with the broken promises in plain words."""
    from dedup.testing import check

    def run(make: Callable[[Path], Any], rows: Any, **options: Any) -> None:
        check(make, rows, **{"folder": tmp_path, **options}).require()

    return run
