"""Secrets do not leave through error texts, and hiding them costs time linear to the text."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deadletter.redact import redact

SECRET = "hunter2hunter2"

LEAKS = [
    "postgresql://bob:{}@db.example.com:5432/orders",
    "postgresql://bob:12345{}@db/orders",
    "amqps://bob:{}@hub",
    "postgresql://bob:a/b:{}@db",
    "postgresql://bob:a@{}@db",
    "url=https://a.example?next=postgres://bob:{}@db",
    "postgres://a:x@h1,postgres://b:{}@h2",
    "jdbc:postgresql://db/orders?user=bob&password={}&ssl=true",
    "jdbc:sqlserver://db:1433;user=bob;password={};encrypt=true",
    "host=db user=bob password={} dbname=orders",
    "host=db password='it is {}' dbname=orders",
    r"host=db password='it\'s {}' dbname=orders",
    "password = {}",
    "PGPASSWORD={} psql",
    "sslpassword={}",
    "pwd={};",
    "Pwd: {}",
    '{{"password": "{}"}}',
    '{{"password": "a \\" {}"}}',
    r"{{\"password\": \"{}\"}}",
    "{{'password': '{}', 'user': 'bob'}}",
    "connect(user='bob', password='{}')",
    "[('user', 'bob'), ('password', 'it is {}')]",
    '["api_key", "{}"]',
    r"[\"password\", \"it is {}\"]",
    "(b'password', b'it is {}')",
    "{{'password': b'it is {}'}}",
    "('token', '{}')",
    "('Authorization', b'Basic {}')",
    "('password', 12{})",
    "('password', ('it is {}', 1))",
    "('password', ['it is {}'])",
    "ALTER ROLE bob PASSWORD '{}'",
    "Endpoint=sb://n.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={}=;EntityPath=orders",
    "SharedAccessSignature sr=sb%3a%2f%2fn&sig={}%3d&se=1700000000&skn=Root",
    "SharedAccessSignature={}",
    "https://a.blob.core.windows.net/c?sv=2022&sig={}&se=2026",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==;EndpointSuffix=core.windows.net",
    "Authorization: Bearer {}",
    "authorization: Basic {}",
    "{{'Authorization': 'SharedAccessSignature sr=x&sig=y{}'}}",
    "Cookie: session=1; id={}",
    "sent Bearer {} and got 401",
    "client_secret={}&grant_type=client_credentials",
    "clientSecret: {}",
    "fs.azure.account.oauth2.client.secret={}",
    "aws_secret_access_key = {}",
    "AWS_SESSION_TOKEN={}",
    "api_key={}",
    "X-Api-Key: {}",
    "?access_token={}",
    "refresh_token: {}",
    "token={}",
    '{{"token": "{}"}}',
    'sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required username="$ConnectionString" password="{}";',
    'required username="x" password="Endpoint=sb://x/;SharedAccessKey={}";',
    "Key (api_token)=({}) already exists.",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE{}\n-----END RSA PRIVATE KEY-----",  # pragma: allowlist secret
    "-----BEGIN PRIVATE KEY-----\nMIIE{}",  # pragma: allowlist secret
    "eyJhbGciOi.eyJzdWIi{}.sig",
]


@pytest.mark.parametrize("text", LEAKS)
def test_a_secret_is_hidden(text: str) -> None:
    """Wherever connection strings, headers and settings carry a secret, it is replaced."""
    shown = redact(text.format(SECRET))
    assert SECRET not in shown
    assert "***" in shown


@pytest.mark.parametrize("text", LEAKS)
def test_hiding_twice_changes_nothing_more(text: str) -> None:
    """What was redacted can be redacted again, as part of a longer text."""
    once = redact(text.format(SECRET))
    assert redact(once) == once


def test_key_ids_of_aws_are_hidden() -> None:
    """They are known by their shape."""
    assert redact("user AKIAIOSFODNN7EXAMPLE denied") == "user *** denied"  # pragma: allowlist secret


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://bob:s3@db:5432/orders failed", "postgresql://bob:***@db:5432/orders failed"),
        ("host=db password=s3 user=bob", "host=db password=*** user=bob"),
        ('{"user": "bob", "password": "s3", "n": 1}', '{"user": "bob", "password": "***", "n": 1}'),
        (r"{\"password\": \"s3\", \"n\": 1}", r"{\"password\": \"***\", \"n\": 1}"),
        ("[('user', 'bob'), ('password', 's3'), ('n', 1)]", "[('user', 'bob'), ('password', '***'), ('n', 1)]"),
        (
            "Endpoint=sb://n/;SharedAccessKeyName=Root;SharedAccessKey=s3;E=x",
            "Endpoint=sb://n/;SharedAccessKeyName=Root;SharedAccessKey=***;E=x",
        ),
    ],
)
def test_what_stands_around_a_secret_stays(text: str, shown: str) -> None:
    """Host, user and database are what a person needs to find the cause."""
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        'password authentication failed for user "bob"',
        'null value in column "password" of relation "users" violates not-null constraint',
        "KeyError: 'password'",
        "the rows lack 'password', which is NOT NULL",
        "Unexpected token: }",
        "https://db.example.com:8080/path",
        "https://example.com/orders:list@v1",
        "bob@example.com wrote: hello",
        "invalid literal for int() with base 10: 'abc'",
        "see https://docs.example.com/signature=?",
        "a bearer of bad news",
    ],
)
def test_ordinary_words_stay(text: str) -> None:
    """A message about passwords that holds none is left as it is."""
    assert redact(text) == text


@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    """Whatever stands in it, the text comes back as a str, and doing it again changes nothing more."""
    assert redact(redact(text)) == redact(text)


KEYS = [f"{word}_key" for word in ("account", "api", "access", "private", "encryption", "storage", "master", "signing", "shared_access")]
TOKENS = [f"{word}-token" for word in ("access", "refresh", "id", "auth", "sas", "session", "security", "bearer", "api")]
NAMES = [
    *KEYS, *TOKENS, "password", "passwd", "passphrase", "pwd", "pw", "secret", "secret_access_key", "shared_access_signature", "x-api-key",
    "credential", "credentials", "sig", "x-amz-signature", "token", "Cookie", "Authorization",
]  # fmt: skip
SHAPES = ["AKIA" + "1" * 16, "ASIA" + "1" * 16, "-----BEGIN PRIVATE KEY-----", "eyJa.b.c", "Bearer 12345678"]  # pragma: allowlist secret

PIECES = [*"\\\"'=:@;& ,{}()/\n", "password", "token", "://", "sig", "bearer ", "authorization", "eyJ", "x", "***", "hunter2hunter2"]


@given(st.lists(st.sampled_from(PIECES)))
@example(["://", "sig", "://", ";", "@"])
def test_a_second_pass_finds_nothing_new(pieces: list[str]) -> None:
    """Also where quotes are broken and settings nested, redacting again hides nothing more."""
    once = redact("".join(pieces))
    assert redact(once) == once


LEAKED = [*(leak.format(SECRET) for leak in LEAKS), *(f"{name}={SECRET}" for name in NAMES), *SHAPES]


@pytest.mark.parametrize("text", [*LEAKED, *(f"{name.upper()}={SECRET}" for name in NAMES)])
def test_what_is_looked_for_first_leaves_nothing_out(text: str) -> None:
    """Beside other letters than those of ASCII every pattern is tried: the same is hidden as without them, and something is."""
    assert redact(f"\u00e9\n{text}") == f"\u00e9\n{redact(text)}" != f"\u00e9\n{text}"


UNITS = [
    "a", "a.", "a-", "=", "'", '"', "\\", "\n", " \t", "://", "://:", "://a:", "://a:b@", "password", "password=", "password='",
    'password="',
    'password=\\"', "password  ", "secret_", "access_", "sig=", "token", "eyJ", "eyJa.", "eyJa.a.", "authorization:", "authorization: x\n",
    "bearer ", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "AKIA",  # pragma: allowlist secret
]  # fmt: skip


FEW = frozenset({"password=", "eyJa.a."})


@pytest.mark.parametrize("unit", [pytest.param(u, marks=[pytest.mark.full] * (u not in FEW)) for u in UNITS], ids=repr)
def test_hostile_repetition_costs_no_more_than_its_length(unit: str) -> None:
    """Sixteen times the text takes about sixteen times as long, not the square of it: no pattern runs away, up to 1 MB."""
    small, large = (unit * (size // len(unit)) for size in (1 << 16, 1 << 20))
    assert cost(large, runs=1) < 80 * max(cost(small, runs=3), 0.0005)


def cost(text: str, runs: int) -> float:
    """Seconds of the processor, the best of some runs."""
    best = float("inf")
    for _ in range(runs):
        begun = time.process_time()
        redact(text)
        best = min(best, time.process_time() - begun)
    return best
