"""The command `dedup`."""

from dedup.cli.app import main

__all__ = ["main"]
