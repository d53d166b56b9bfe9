"""What a dying process leaves behind, step by step: the page "What if it dies here?" for Delta."""

from __future__ import annotations

STEPS = {
    "catch_up": "Nothing of the batch has happened. The next copy begins here.",
    "redeliveries": "Earlier decisions are published. Nothing of the batch has happened.",
    "reserve": "Nothing is reserved: reservations are rows of the ledger commit.",
    "handler": "Nothing is reserved or written. The next copy runs the handler for the first time.",
    "check": "The handler has run; its rows were not written. It runs again.",
    "files": "No file of the batch exists. The handler runs again.",
    "park": "Files of sink rows exist that no commit names. The handler runs again; VACUUM takes them.",
    "note": "As at park: nothing is decided.",
    "record": "As at park: nothing is decided.",
    "advance": "As at park: nothing is decided.",
    "commit": "As at park: nothing is decided.",
    "decide": "The ledger's own files exist, too, and no commit names them. Nothing is decided.",
    "read_back": "The ledger commit was tried. If it landed, the batch is decided, and the next copy publishes it; if not, nothing is.",
    "publish": "The batch is decided: reservations, letters, batch record and checkpoint are true. The next copy publishes its rows.",
    "published": "Everything is true and visible.",
}
"""Every name given to on_step, in order -> what is true if the process dies right before it."""
