"""What failed: dead letters, kept with everything needed to understand and reprocess them."""

from deadletter.letter import HISTORY, LETTERS, Action, Kind, Status, fingerprint, letter_id
from deadletter.selection import Selection

__all__ = ["HISTORY", "LETTERS", "Action", "Kind", "Selection", "Status", "fingerprint", "letter_id"]
