"""Where we are: positions, ranges, checkpoints, and every error of the project."""

from checkpoint.errors import DedupError
from checkpoint.position import Partition, Range, Ranges

__all__ = ["DedupError", "Partition", "Range", "Ranges"]
