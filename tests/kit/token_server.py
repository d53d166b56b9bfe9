"""A token endpoint as Entra ID has one, with a key of its own: client credentials in, a signed token (JWT) out. No pytest here."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

KEY, KEYS, ID = "token-key.pem", "jwks.json", "tests"
ISSUER, AUDIENCE = "https://tokens.invalid/", "https://events.invalid"
CLIENT, SECRET = "an-app", 'it\'s a "secret"'


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def new_key(home: Path) -> None:
    """A private key for the endpoint, and the public one for a broker (JWKS), as files of this folder."""
    made = rsa.generate_private_key(65537, 2048)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (home / KEY).write_bytes(made.private_bytes(*kinds))
    numbers = made.public_key().public_numbers()
    public = {name: _text(value.to_bytes((value.bit_length() + 7) // 8, "big")) for name, value in (("n", numbers.n), ("e", numbers.e))}
    (home / KEYS).write_text(json.dumps({"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": ID, **public}]}))


@dataclass
class TokenServer:
    """The endpoint."""

    home: Path  # with the key
    audience: str = AUDIENCE
    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)  # the forms that came
    refused: int = 0

    def token(self) -> str:
        """A token for ten minutes."""
        now = int(time.time())
        head = {"alg": "RS256", "typ": "JWT", "kid": ID}
        claims = {"iss": ISSUER, "aud": self.audience, "sub": CLIENT, "iat": now, "exp": now + 600}
        signed = ".".join(_text(json.dumps(part).encode()) for part in (head, claims))
        key: Any = serialization.load_pem_private_key((self.home / KEY).read_bytes(), None)
        return f"{signed}.{_text(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


@contextmanager
def running_tokens(home: Path) -> Iterator[TokenServer]:
    """An endpoint for the length of the block."""
    served = TokenServer(home)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = dict(urllib.parse.parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
            given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            known = f"{CLIENT}:{SECRET}" in (given, urllib.parse.unquote(given))
            served.asked.append({**form, "path": self.path})
            served.refused += not known
            answer = {"access_token": served.token(), "token_type": "Bearer", "expires_in": 600} if known else {"error": "invalid_client"}
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
