"""The crash kit: it runs your streaming job through the faults of streaming, and reports which promise the job breaks.

It needs pyarrow, and the packages of your job. The library itself never imports it. Each name is imported at its first use, because pytest
loads `dedup.testing.plugin` in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dedup.testing.delivery import Delivery, Faults, deliver, plan
    from dedup.testing.kit import Finding, Job, Verdict, check

__all__ = ["Delivery", "Faults", "Finding", "Job", "Verdict", "check", "deliver", "plan"]

_OF_DELIVERY = {"Delivery", "Faults", "deliver", "plan"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dedup.testing.delivery" if name in _OF_DELIVERY else "dedup.testing.kit"), name)
