"""Remove secrets from texts that people will read: error messages, stacks, and configurations inside them.

`redact` hides more rather than less, in time linear to the text; what is hidden becomes `***`. It stands here because letters keep errors
of handlers; the stores and brokers above use it for the errors that they log or raise.
"""

from __future__ import annotations

import re

_HIDDEN = "***"

# Each pattern starts at a fixed word, and then matches or gives up after a bounded number of steps: hostile text costs no more than other.

_URL = re.compile(r"""://(?:(?!://)[^\s"'<>])+""")

_NAMES = (
    r"pass(?:word|wd|phrase)|(?<![a-z])pwd|(?<![a-z])pw|secret(?:[_.-]?access)?(?:[_.-]?key)?|shared[_.-]?access[_.-]?(?:key|signature)"
    r"|(?:account|api|access|private|encryption|storage|master|signing)[_.-]?key|(?:access|refresh|id|auth|sas|session|security|bearer|api)[_.-]?token"
    r"|(?<![a-z0-9])(?:x-api-key|credentials?|sig|x-amz-signature)"
)
"""Of `shared_access_key_name` only `shared_access_key` is one of these, and no separator follows it."""

_VALUE = (
    r"""[\[(]{0,3}(?:b(?=["']))?(?:(?P<open>\\+["'])[^"']*["']?|(?P<quote>["'])(?:(?!(?P=quote))[^\\]|\\.)*(?P=quote)?|[^\s;&"'][^\s;&]*)"""
)

_PAIR = r"""(?<=["']),(?=\s{0,3}[\[(]{0,3}(?:b?\\{0,4}["']|\d))"""
"""('password', 'value'): a name in quotes, and a value that is text, bytes or a number."""

_SETTING = re.compile(
    rf"""(?P<name>(?:{_NAMES})[\\"')\]]{{0,4}}\s{{0,3}}(?:=>|[:=]|(?=\s')|{_PAIR})\s{{0,3}})(?:{_VALUE})""", re.IGNORECASE | re.DOTALL
)

_TOKEN = re.compile(
    rf"""(?P<name>(?<![a-z])token(?:[\\"')]{{0,4}}=|\\{{0,4}}["']\s{{0,3}}:|["']{_PAIR})\s{{0,3}})(?:{_VALUE})""", re.IGNORECASE | re.DOTALL
)
"""The word alone is no setting: 'Unexpected token: }' stays readable."""

_HEADER = re.compile(
    r"""((?:authorization|cookie)[\\"')\]]{0,4}\s{0,3}(?:=>|[:=]|(?<=["']),)\s{0,3}(?:b(?=["']))?[\\"']{0,4})[^"'\r\n]+""", re.IGNORECASE
)

_BEARER = re.compile(r"((?<![a-z])bearer\s{1,3})[\w.~+/=-]{8,}", re.IGNORECASE)

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # key ids of AWS
    r"|(?<![\w-])eyJ[\w-]*\.[\w-]+\.[\w-]*"  # signed tokens (JWT)
)


# A text of ASCII has what a pattern looks for only where it has one of these words, in small letters. To look for them takes a fiftieth of
# the time, and most stacks have none.

_WORDS = ("passw", "passphrase", "pw", "secret", "token", "credential", "sig")
_WORDS_OF_KEYS = ("account", "api", "access", "private", "encryption", "storage", "master", "signing")
_WORDS_OF_HEADERS = ("authorization", "cookie")
_WORDS_OF_SHAPES = ("-----begin", "akia", "asia", "eyj")


_PASSES = 5
"""At most. What one pass hides may join what stood around it to something that the next one takes for a secret; two are usual."""


def redact(text: str) -> str:
    """The text with passwords, keys, tokens and signatures replaced by ***. Doing it twice changes nothing more."""
    for _ in range(_PASSES):
        before, text = text, _hide(text)
        if text == before:
            break
    return text


def _hide(text: str) -> str:
    small = text.lower() if text.isascii() else None  # other letters may be equal to these where case is ignored
    if _may_have(small, "://"):
        text = _URL.sub(_without_password, text)
    if _may_have(small, *_WORDS_OF_HEADERS):
        text = _HEADER.sub(rf"\1{_HIDDEN}", text)
    if _may_have(small, *_WORDS) or (_may_have(small, "key") and _may_have(small, *_WORDS_OF_KEYS)):
        text = _SETTING.sub(_without_value, text)
    if _may_have(small, "token"):
        text = _TOKEN.sub(_without_value, text)
    if _may_have(small, "bearer"):
        text = _BEARER.sub(rf"\1{_HIDDEN}", text)
    return _SHAPES.sub(_HIDDEN, text) if _may_have(small, *_WORDS_OF_SHAPES) else text


def _may_have(text: str | None, *words: str) -> bool:
    return text is None or any(word in text for word in words)


def _without_password(url: re.Match[str]) -> str:
    """://user:password@host; the password may hold anything but blanks and quotes, as may a path."""  # pragma: allowlist secret
    user, colon, rest = url[0][3:].partition(":")
    _, at, host = rest.rpartition("@")
    if not (colon and at) or any(c in user for c in "/?#@"):
        return url[0]
    return f"://{user}:{_HIDDEN}@{host}"


def _without_value(setting: re.Match[str]) -> str:
    """name="value", its quotes kept."""
    quote = setting["open"] or setting["quote"] or ""
    return f"{setting['name']}{quote}{_HIDDEN}{quote}"
