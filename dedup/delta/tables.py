"""delta-rs, with its errors told in our words: opening tables and committing files.

The only calls that change a Delta table are here. Promises that a commit either is tried against exactly the snapshot that was read,
or says so. Called by the ledger and the publisher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from checkpoint.errors import StoreUnavailable
from dedup.delta.files import Add
from dedup.delta.storage import Options

COMMIT_REFUSED = CommitFailedError
"""delta-rs says that the commit did not land; still read back, because its own retry may have met its own commit."""

DELTA_ERRORS = (DeltaError, OSError)
"""Everything else that delta-rs raises about a table or its storage."""


def open_table(uri: str, options: Options) -> DeltaTable | None:
    """The table as of now, or None where there is none. Raises StoreUnavailable where that cannot be told."""
    try:
        return DeltaTable(uri, storage_options=dict(options) if options else None)
    except TableNotFoundError:
        return None
    except DELTA_ERRORS as error:
        raise StoreUnavailable(f"The Delta table {uri} cannot be opened: {error}") from error


def commit(
    table: DeltaTable,
    adds: Iterable[Add],
    transactions: Mapping[str, int],
    *,
    removes: Sequence[RemoveAction] = (),
    exact: bool,
) -> None:
    """Add files to the very snapshot that `table` is, with transaction ids.

    Args:
        transactions: app id -> version.
        exact: fail if any other commit came first. Otherwise delta-rs puts the commit after foreign ones that do not conflict;
            another commit with one of these app ids always conflicts.

    Raises:
        CommitFailedError, DeltaError, OSError: as delta-rs gives them; the outcome has to be read back.

    Crash: the log entry is there or not; there is nothing between.
    """
    table.create_write_transaction(
        actions=[*removes, *(_action(add) for add in adds)],
        mode="append",
        schema=table.schema(),
        partition_by=list(table.metadata().partition_columns),
        commit_properties=CommitProperties(
            app_transactions=[Transaction(app, version) for app, version in transactions.items()],
            max_commit_retries=0 if exact else None,
        ),
    )


def _action(add: Add) -> AddAction:
    return AddAction(add.path, add.size, add.partition_values, add.modification_time, True, add.stats)
