"""The command `dedup`."""

from dedup.cli.app import main, program

__all__ = ["main", "program"]
