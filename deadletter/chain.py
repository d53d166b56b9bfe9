"""An error and what led to it."""

from __future__ import annotations

from collections.abc import Iterator

_LINKS = 50
_cause, _context, _is_final = (
    vars(BaseException)[name].__get__ for name in ("__cause__", "__context__", "__suppress_context__")
)  # a subclass may hide its own


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause ...; where none is given, the error that was being handled, as in a traceback.

    Ends where the chain closes a circle, and after 50 links.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _LINKS:
        yield link
        seen.add(id(link))
        cause = _cause(link)
        link = cause if cause is not None or _is_final(link) else _context(link)
