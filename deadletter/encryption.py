"""The ready-made seal: AES-GCM of the library `cryptography`, each sealed part bound to its letter, with keys that can be replaced."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from checkpoint import given
from checkpoint.errors import ConfigError, Refused
from deadletter.hiding import LetterPart

Keys = str | Sequence[str]
"""One key, or several: base64 of 16, 24 or 32 bytes each."""

_FORM, _ID, _NONCE = b"\x01", 4, 12


@dataclass(frozen=True)
class Encrypt:
    """Seal what letters keep of their events by AES-GCM; whoever has the key can open it, and `reprocess` does.

    Each part is bound to the consumer, its letter and its place there: moved to another one it does not open. The sealed bytes are the
    form (one byte, 1), the first 4 bytes of the key's SHA-256, a nonce of 12 bytes, and what AES-GCM made.

    Args:
        keys: base64 of 16, 24 or 32 random bytes (`openssl rand -base64 32`), or several. The first one seals; each of them opens what it
            has sealed: put a new key in front of the old one. A function that returns them is called once in each process: then neither a
            pickle nor a task of Spark's carries a key.
        texts: "hide": the texts of errors are sealed as well. "keep": they are stored as they are, and may quote the event.

    Raises:
        ConfigError: a key is none; the message does not show it.
    """

    keys: Keys | Callable[[], Keys] = field(repr=False)
    texts: Literal["hide", "keep"] = "hide"

    def __post_init__(self) -> None:
        given.check(ENCRYPT, vars(self), "Encrypt")
        if not callable(self.keys):
            object.__setattr__(self, "keys", self.keys if isinstance(self.keys, str) else tuple(self.keys))
            _ciphers(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": self.keys, "texts": self.texts}

    def seal(self, data: bytes, of: LetterPart) -> bytes:
        """Return the sealed bytes. Raises what a function as `keys` raises."""
        name, cipher = next(iter(self._known().items()))
        head, nonce = _FORM + name, os.urandom(_NONCE)
        return head + nonce + cipher.encrypt(nonce, data, head + of.bound)

    def open(self, sealed: bytes, of: LetterPart) -> bytes:
        """Return what was sealed.

        Raises:
            Refused: it is sealed with a key that is not among these; it is of another letter, or was changed; it is nothing sealed.
        """
        head, nonce, rest = sealed[: 1 + _ID], sealed[1 + _ID : 1 + _ID + _NONCE], sealed[1 + _ID + _NONCE :]
        if head[:1] != _FORM or not rest:
            raise Refused("these are no bytes that Encrypt has sealed")
        cipher = self._known().get(head[1:])
        if cipher is None:
            raise Refused(f"it was sealed with the key {head[1:].hex()}, which is not among those of Encrypt(keys=...)")
        try:
            return cipher.decrypt(nonce, rest, head + of.bound)
        except InvalidTag:
            raise Refused("it was changed, or sealed for another letter") from None

    def _known(self) -> dict[bytes, AESGCM]:
        """By the beginning of its SHA-256, each key; the one that seals comes first."""
        if "_made" not in self.__dict__:
            object.__setattr__(self, "_made", _ciphers(self.keys() if callable(self.keys) else self.keys))
        made: dict[bytes, AESGCM] = self.__dict__["_made"]
        return made


def _ciphers(keys: Keys) -> dict[bytes, AESGCM]:
    raw = [_bytes_of(key) for key in ([keys] if isinstance(keys, str) else keys)]
    if not raw:
        raise ConfigError("Encrypt(keys=...) has no key. Give one: `openssl rand -base64 32` makes it.")
    return {hashlib.sha256(key).digest()[:_ID]: AESGCM(key) for key in raw}


def _bytes_of(key: object) -> bytes:
    try:
        found = base64.b64decode(str(key).strip().translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) not in (16, 24, 32):
        raise ConfigError("A key of Encrypt is not base64 of 16, 24 or 32 bytes. `openssl rand -base64 32` makes one.")
    return found


ENCRYPT: given.Settings = {
    "keys": given.Setting(
        "a key, several in a list, or a function that returns them",
        "keys_from_the_vault",
        lambda value: (isinstance(value, str | list | tuple) and bool(value)) or given.takes(value, 0),
    ).hidden,
    "texts": given.word("hide", "keep"),
}
"""What `Encrypt` takes."""
