"""What failed: dead letters, kept with everything needed to understand and reprocess them."""

from deadletter.failure import Failure
from deadletter.known import ErrorClass
from deadletter.letter import HISTORY, LETTERS, Action, Kind, Status, fingerprint, letter_id
from deadletter.policy import Budget, Retry
from deadletter.selection import Selection

__all__ = [
    "HISTORY",
    "LETTERS",
    "Action",
    "Budget",
    "ErrorClass",
    "Failure",
    "Kind",
    "Retry",
    "Selection",
    "Status",
    "fingerprint",
    "letter_id",
]
