"""The crash kit: run your streaming job through what streaming does to it, and be told which promise it breaks.

Needs pyarrow only, and what your job needs. Never imported by the library itself.
"""

from __future__ import annotations

from dedup.testing.delivery import Delivery, Faults, deliver, plan
from dedup.testing.kit import Finding, Job, Verdict, check

__all__ = ["Delivery", "Faults", "Finding", "Job", "Verdict", "check", "deliver", "plan"]
