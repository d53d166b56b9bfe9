"""Commands that messages advise. Pure text."""

from __future__ import annotations

import shlex


def command(*words: object) -> str:
    """A `dedup` command in backquotes, as a shell takes it: words with spaces, quotes or other special characters are quoted."""
    return f"`dedup {shlex.join(map(str, words))}`"
