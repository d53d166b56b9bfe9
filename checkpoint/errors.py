"""The error tree of the project. Split by what the caller does next.

    DedupError
    ├── ConfigError              wrong settings or input shape          -> fix and restart
    │   ├── SettingsChanged      state was written with other settings  -> old settings, another name, or reset
    │   ├── AmbiguousPosition    one position, different contents       -> name the part column
    │   └── Refused              the state does not allow what was asked -> read what to do first
    ├── StoreError               the store could not do its part        -> batch is undone; run it again
    │   ├── SchemaOutdated       state is missing or older than this library
    │   ├── StateTooNew          state was written by a newer library
    │   ├── StoreUnavailable     no connection, or it was lost before the commit
    │   ├── BatchTooLarge        the batch does not fit                  -> smaller batches
    │   ├── CommitConflict       another writer committed first; plan again
    │   ├── CommitUnknown        the answer to the commit was lost and cannot be read back yet
    │   ├── SinkMismatch         rows do not fit the sink table
    │   │   ├── RowsMisfit       types of the rows, or columns that they lack, not their values
    │   │   └── RowsRefused      some rows break a rule of the sink: the fault of their events
    │   │       └── ValuesRefused  values that the sink's columns cannot hold
    │   └── PublicationStuck     a decided batch that a sink refuses
    ├── SourceUnavailable        the broker does not answer             -> nothing was decided; run it again
    │   ├── ReceiverStolen       another receiver took the partition    -> give each a consumer group of its own
    │   ├── RegistryUnavailable  the schema registry does not
    │   ├── SealUnavailable      dead letters cannot be sealed
    │   └── NotConfirmed         published events are stored, and the broker has not confirmed them
    ├── DestinationUnavailable   nobody's messages can be sent now      -> they wait in the outbox; try again
    ├── Fenced                   a newer instance of this consumer has taken over -> stop this instance
    │   └── PartitionLost        another runner process has claimed this partition -> leave it to that one
    ├── StillHeld                another instance is alive and holds this consumer
    ├── CheckpointError          the log and our checkpoint disagree    -> a person decides
    │   ├── PositionGap          positions between checkpoint and batch are missing
    │   ├── StoreRestored        our state is older than what Spark remembers
    │   ├── IncarnationChanged   the topic was re-created
    │   ├── PositionsMissing     asked for positions that are neither kept nor in the log
    │   └── ResendTooLate        stored events are older than consumers remember
    ├── BudgetExceeded           too many events fail: a bug, an outage or a bad deploy -> fix, or lift the budget
    ├── ReprocessStopped         too many letters failed again, or a replayed position did
    ├── LettersUnread            bodies that only the log has could not be read; the other letters were run
    ├── HandlerError             the handler broke a rule of the transaction
    ├── SparkGone                Spark, or the query, was stopped         -> start the query again
    └── KeyConflict              same idempotence key, another payload (only with on_key_conflict="error")

Each docstring is the class's default message. All are picklable: Spark moves them between processes.

It stands in the lowest package, because each package raises some of them and `except DedupError` meets all. `command` writes the commands
that messages advise.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


class DedupError(Exception):
    """Something went wrong in dedup."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class ConfigError(DedupError):
    """The settings or the shape of the input are wrong. Fix them and start again."""


class SettingsChanged(ConfigError):
    """This consumer's state was written with other key settings. Use the old settings, another consumer name, or `dedup consumer reset`."""


class AmbiguousPosition(ConfigError):
    """One position occurs twice in a batch with different contents. Name the column that tells the rows apart with part=."""


class Refused(ConfigError):
    """The state does not allow what was asked for. Nothing was changed."""


class StoreError(DedupError):
    """The store could not do its part. The batch is undone; run it again."""


class SchemaOutdated(StoreError):
    """The state is missing or older than this library. Run `dedup migrate`, unless the message says that nothing converts it."""


class StateTooNew(StoreError):
    """The state was written by a newer version of dedup. Upgrade this installation."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, was lost before the commit, or timed out. Nothing of the batch was committed; run it again."""


class BatchTooLarge(StoreError, MemoryError):
    """Memory, or one transaction, was not enough for the batch. Nothing of it was committed; bring smaller ones, or raise the limit."""


class CommitConflict(StoreError):
    """Another writer committed first. Nothing of this attempt was committed; plan it again."""


class CommitUnknown(StoreError):
    """The answer to the commit was lost and could not be read back. Either outcome is safe: run the batch again."""


class SinkMismatch(StoreError):
    """The rows do not fit the sink table. Nothing was sent; change the table or the rows."""


class RowsMisfit(SinkMismatch):
    """The rows have other types than the sink, or lack columns. Nothing was sent; change the table or the rows."""


class RowsRefused(SinkMismatch):
    """Some rows break a rule of the sink (NOT NULL, CHECK, a unique key, a value out of range). Nothing of them was kept."""

    brief: str = ""
    """What is wrong without a value of the row, so that rows with one fault have one group of letters; empty: the message tells."""


class ValuesRefused(RowsRefused):
    """Python values that the sink's columns cannot hold as they are. Nothing was sent; convert them in the handler or change the table."""

    by_row: Mapping[int, str] = {}
    """Row of the call -> what is wrong with it."""
    briefs: Mapping[int, str] = {}
    """Row of the call -> its `brief`."""
    misfits: Mapping[str, tuple[str, int]] = {}
    """Column in which no value of the call fits -> what is wrong with one of them, and how many are."""
    fitting: frozenset[str] = frozenset()
    """Columns in which some value fits."""


class PublicationStuck(StoreError):
    """A decided batch could not be published to its sink, or the sink is another table than before. Repair the sink, or accept it."""


class SourceUnavailable(DedupError):
    """The broker cannot be asked. Nothing was decided; run it again."""


class ReceiverStolen(SourceUnavailable):
    """Another receiver of the same consumer group took this partition. Stop one of the two, or give each a consumer group of its own."""


class RegistryUnavailable(SourceUnavailable):
    """The schema registry cannot be asked. Nothing was decided; run it again."""


class DestinationUnavailable(DedupError):
    """No message can be sent now. They wait in the outbox, and are sent again with the same ids."""


class SealUnavailable(SourceUnavailable):
    """Dead letters cannot be sealed (FailurePolicy(redact=)). Nothing was stored; repair what seals them, and run it again."""


class NotConfirmed(SourceUnavailable):
    """Published events are stored, and the broker has not confirmed them. They are sent again, unchanged; repeat the call only with ids."""


class Fenced(DedupError):
    """A newer instance of this consumer has taken over. Stop this instance."""


class PartitionLost(Fenced):
    """Another runner process has claimed this partition. Nothing of the batch was committed here; that process goes on with it."""


class StillHeld(DedupError):
    """Another instance of this consumer is running. Stop it, wait until its heartbeat is old, or take over by force."""


class CheckpointError(DedupError):
    """The log and our checkpoint disagree. A person has to decide how to go on."""


class PositionGap(CheckpointError):
    """Positions between the checkpoint and this batch are missing. Read from the checkpoint, or `dedup consumer accept-gap`."""


class StoreRestored(CheckpointError):
    """The state is older than what Spark remembers. Run `dedup consumer accept-restore` once the loss is understood."""


class IncarnationChanged(CheckpointError):
    """The topic seems to have been re-created. Run `dedup consumer accept-incarnation` to start its new life at its first position."""


class PositionsMissing(CheckpointError):
    """Some positions are neither kept nor in the log any more. Leave them out, or record them as LOST with --skip-missing."""


class ResendTooLate(CheckpointError):
    """Events wait to be sent again for longer than consumers remember ids. Look at them with `dedup publisher show`."""


class BudgetExceeded(DedupError):
    """So many events fail in one way that no event is the cause. Fix it, or admit them with `dedup budget lift`. None was parked."""


class ReprocessStopped(DedupError):
    """Reprocess or replay stopped because events fail again. What was done before is done; a second call goes on."""

    report: Any = None
    """The `Reprocessed` or `Replayed` of the call, up to there."""


class LettersUnread(DedupError):
    """Some letters were not run, because their whole bodies could not be read from the log. The other letters were run."""

    report: Any = None
    """The `Reprocessed` of the call."""


class HandlerError(DedupError):
    """The handler broke a rule of its transaction. Nothing of the batch was committed."""


class SparkGone(DedupError):
    """Spark, or the query, was stopped: an error of the handler says nothing about an event then. Nothing was committed; start it again."""


class KeyConflict(DedupError):
    """An event has the idempotence key of another one and a different payload. Choose what to do with on_key_conflict=."""


def command(*words: object) -> str:
    """A `dedup` command in backquotes, as a shell takes it: words with spaces, quotes or other special characters are quoted."""
    return f"`dedup {shlex.join(map(str, words))}`"
