"""What failed: dead letters, kept with everything needed to understand and reprocess them."""

from deadletter.letter import LETTERS, Kind, Status, fingerprint, letter_id

__all__ = ["LETTERS", "Kind", "Status", "fingerprint", "letter_id"]
