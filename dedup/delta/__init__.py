"""The Delta store: one ledger table per consumer decides, sinks follow."""

from dedup.delta.store import DeltaStore

__all__ = ["DeltaStore"]
