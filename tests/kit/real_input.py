"""Where the real input of tests is: DEDUP_TEST_DATA, or a folder beside the project."""

from __future__ import annotations

import os
from pathlib import Path

from kit.paths import ROOT

REAL_INPUT = Path(os.environ.get("DEDUP_TEST_DATA") or ROOT / "../shared/data").resolve()
ONLINE_RETAIL = REAL_INPUT / "online-retail-by-day.tar.xz"
