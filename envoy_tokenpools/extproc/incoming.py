"""
The head of a request, from headers or from attributes, reduced to what the gate asks about.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.wire import Attributes, HttpHeaders, headers_of
from envoy_tokenpools.openai.request import Endpoint, endpoint_of

WANTED = frozenset(
    (
        b":method",
        b":path",
        b"api-key",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"x-api-key",
        b"x-stainless-retry-count",
    )
)
"""Request headers that are decoded; an Envoy's `forward_rules` need not send any other."""

IDENTITY = frozenset((b"api-key", b"authorization", b"x-api-key"))
"""Headers that carry a credential, looked for in the order authorization, api-key, x-api-key."""


@dataclass(frozen=True, slots=True)
class Head:
    """
    What the head of a request says.

    Attributes:
        endpoint: the metered endpoint that it is for; None if it is not ours to meter.
        credential: the bearer token or API key; None if there is none.
        content_length: as declared; None if it is not.
        content_encoding: in lower case; empty if there is none.
        is_retry: the client's library says that it tried before.
    """

    endpoint: Endpoint | None
    credential: str | None
    content_length: int | None
    content_encoding: str
    is_retry: bool


def head_from_headers(message: HttpHeaders) -> Head:
    """
    The head from a request headers message.

    Raises:
        RequestError: 400, if a header that identifies the caller comes twice.
    """
    return _head(headers_of(message, WANTED))


def head_from_attributes(attributes: Attributes) -> Head | None:
    """
    The head from `request_attributes`, where Envoy skips the headers; None if the path is not among them.

    Raises:
        RequestError: as `head_from_headers`.
    """
    path = attributes.texts.get("request.path")
    if path is None:
        return None
    pairs = [
        (b":path", path),
        (b":method", attributes.texts.get("request.method", b"POST")),
    ]
    for name in WANTED:
        value = attributes.texts.get(f"request.headers['{name.decode()}']")
        if value is not None:
            pairs.append((name, value))
    return _head(pairs)


def _head(pairs: Iterable[tuple[bytes, bytes]]) -> Head:
    found: dict[bytes, bytes] = {}
    repeated: bytes | None = None
    for name, value in pairs:
        if name in found and name in IDENTITY:
            repeated = name
        found[name] = value
    endpoint = None
    if found.get(b":method") == b"POST":
        endpoint = endpoint_of(found.get(b":path", b"").decode("latin-1"))
    if repeated is not None and endpoint is not None:
        raise RequestError(
            400,
            "duplicate_header",
            f"The header {repeated.decode()} was sent more than once; it must identify one caller.",
        )
    retries = _number(found.get(b"x-stainless-retry-count", b""))
    return Head(
        endpoint=endpoint,
        credential=_credential(found),
        content_length=_number(found.get(b"content-length", b"")),
        content_encoding=found.get(b"content-encoding", b"").decode("latin-1").strip().lower(),
        is_retry=retries is not None and retries > 0,
    )


def _number(digits: bytes) -> int | None:
    """Plain digits as a number; of endless ones, which Python refuses to convert, the first are large enough."""
    return int(digits[:18]) if digits.isdigit() else None


def _credential(found: dict[bytes, bytes]) -> str | None:
    scheme, _, token = found.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() != b"bearer":
        token = b""
    for value in (token, found.get(b"api-key", b""), found.get(b"x-api-key", b"")):
        if value.strip():
            # As the configuration's keys are encoded, so that one beyond ASCII has the same digest.
            return value.strip().decode("utf-8", "surrogateescape")
    return None
