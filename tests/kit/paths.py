"""Where the checkout under test is, and what its child processes import."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which a child imports the product and the kits of this checkout, and of no other."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), **more}
