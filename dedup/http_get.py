"""One HTTP GET, by the standard library. Called by dedup/registry.py."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from checkpoint.errors import RegistryUnavailable

MOST = 16 * 1024 * 1024
"""Bytes of an answer that are read at most."""


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    url: str
    status: int
    body: bytes = field(repr=False)
    content_type: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: following it would hand the credentials to whomever it names."""

    def redirect_request(self, *_: Any) -> None:
        """Never."""


def get(url: str, headers: dict[str, str], timeout: float) -> Answer:
    """Ask once. Proxies and certificates are those of the environment (`HTTPS_PROXY`, `SSL_CERT_FILE`).

    Args:
        timeout: seconds for each part of the answer to come.

    Raises:
        RegistryUnavailable: no answer, or one that says to come back later (5xx, 408, 429). Never tells the headers.
    """
    try:
        with _open(urllib.request.Request(url, headers=headers), timeout) as response:
            found = Answer(url, response.status, response.read(MOST), response.headers.get("Content-Type", ""))
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = getattr(error, "reason", None) or error
        raise RegistryUnavailable(
            f"The schema registry cannot be reached at {url}: {type(error).__name__}: {said}. Nothing was decided."
        ) from error
    if found.status >= 500 or found.status in (408, 429):
        raise RegistryUnavailable(f"The schema registry answers {found.status} to {url}. Nothing was decided.")
    return found


def _open(request: urllib.request.Request, timeout: float) -> Any:
    try:
        return urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout)
    except urllib.error.HTTPError as answer:  # is the response of a status that is not 200
        return answer
