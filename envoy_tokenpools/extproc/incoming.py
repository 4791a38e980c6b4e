"""
The head of a request, from headers or from attributes, reduced to what the gate asks about.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.wire import Attributes, HttpHeaders, headers_of
from envoy_tokenpools.openai.endpoint import Endpoint, endpoint_of

WANTED = frozenset(
    (
        b":method",
        b":path",
        b"api-key",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"x-api-key",
        b"x-forwarded-client-cert",
        b"x-request-id",
        b"x-stainless-retry-count",
    )
)
"""Request headers that are decoded; an Envoy's `forward_rules` need not send any other."""

CLIENT_CERTIFICATE = b"x-forwarded-client-cert"
"""Set by Envoy from a verified client certificate (`forward_client_cert_details: SANITIZE_SET`)."""

IDENTITY = frozenset((b"api-key", b"authorization", b"x-api-key", CLIENT_CERTIFICATE))
"""Headers that say who calls; credentials are looked for in the order authorization, api-key, x-api-key."""


MAX_REQUEST_ID_CHARS = 256
"""Envoy's own have 36; a client may bring its own, and each is kept for a while."""


@dataclass(frozen=True, slots=True)
class Head:
    """
    What the head of a request says.

    Attributes:
        endpoint: the metered endpoint that it is for; None if it is not ours to meter.
        sends_work: whether its method gives a backend anything to do.
        credential: the bearer token or API key; None if there is none.
        principals: names of the verified client certificate.
        content_length: as declared; None if it is not.
        content_encoding: in lower case; empty if there is none, or none to undo.
        is_retry: the client's library says that it tried before.
        request_id: Envoy's, or the client's if Envoy keeps it; empty if there is none, or none that can be shown.
    """

    endpoint: Endpoint | None
    sends_work: bool
    credential: str | None
    principals: tuple[str, ...]
    content_length: int | None
    content_encoding: str
    is_retry: bool
    request_id: str = ""


def head_from_headers(message: HttpHeaders, path_prefix: str = "") -> Head:
    """
    The head from a request headers message; metered endpoints lie below `path_prefix`.

    Raises:
        RequestError: 400, if a header that identifies the caller comes twice.
    """
    return _head(headers_of(message, WANTED), path_prefix)


def head_from_attributes(attributes: Attributes, path_prefix: str = "") -> Head | None:
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
        (b"x-request-id", attributes.texts.get("request.id", b"")),
    ]
    for name in WANTED:
        value = attributes.texts.get(f"request.headers['{name.decode()}']")
        if value is not None:
            pairs.append((name, value))
    return _head(pairs, path_prefix)


_WORKING_METHODS = frozenset((b"POST", b"PUT", b"PATCH"))
"""SGLang takes PUT where OpenAI takes POST; where a backend does not, its 405 is charged nothing."""

_JOINED = re.compile(rb",[ \t]*+[A-Za-z0-9-]++[ \t]++[^ \t,]")
"""A comma, a scheme and a credential: Envoy makes one header of two `authorization`, before any filter sees them."""


def _head(pairs: Iterable[tuple[bytes, bytes]], path_prefix: str) -> Head:
    found: dict[bytes, bytes] = {}
    repeated: bytes | None = None
    for name, value in pairs:
        if name in found and name in IDENTITY:
            repeated = name
        found[name] = value
    if _JOINED.search(found.get(b"authorization", b"")):
        repeated = b"authorization"
    endpoint = None
    sends_work = found.get(b":method") in _WORKING_METHODS
    if sends_work:
        endpoint = endpoint_of(found.get(b":path", b"").decode("latin-1"), path_prefix)
    if repeated is not None and endpoint is not None:
        raise RequestError(
            400,
            "duplicate_header",
            f"The header {repeated.decode()} was sent more than once; it must identify one caller.",
        )
    retries = _number(found.get(b"x-stainless-retry-count", b""))
    encoding = found.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    return Head(
        endpoint=endpoint,
        sends_work=sends_work,
        credential=_credential(found),
        principals=_principals(found.get(CLIENT_CERTIFICATE, b"").decode("latin-1")),
        content_length=_number(found.get(b"content-length", b"")),
        content_encoding="" if encoding == "identity" else encoding,
        is_retry=retries is not None and retries > 0,
        request_id=_request_id(found.get(b"x-request-id", b"")),
    )


_NOBODYS_KEY = "\0another form of authorization"
"""Whoever sends one is not anonymous. No key equals it: none begins with NUL."""


def _number(digits: bytes) -> int | None:
    """Plain digits as a number; of endless ones, which Python refuses to convert, the first are large enough."""
    return int(digits[:18]) if digits.isdigit() else None


def _request_id(value: bytes) -> str:
    """As it came, unless it is too long to be kept or has what no log or page should show."""
    text = value.decode("latin-1")
    is_fit = len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    return text if is_fit else ""


def _credential(found: dict[bytes, bytes]) -> str | None:
    authorization = found.get(b"authorization", b"").strip()
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        token = b""
    for value in (token, found.get(b"api-key", b""), found.get(b"x-api-key", b"")):
        if value.strip():
            # As the configuration's keys are encoded, so that one beyond ASCII has the same digest.
            return value.strip().decode("utf-8", "surrogateescape")
    return _NOBODYS_KEY if authorization else None


_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^;,"]*)([;,]|$)')


def _principals(header: str) -> tuple[str, ...]:
    """
    URIs, DNS names and subject of the one certificate in an `x-forwarded-client-cert`.

    Several certificates mean that somebody before Envoy wrote into the header: none of them is believed.
    """
    names: list[str] = []
    end = 0
    while end < len(header):
        pair = _PAIR.match(header, end)
        if pair is None or pair[3] == ",":
            return ()
        end = pair.end()
        if pair[1] in ("URI", "DNS", "Subject"):
            value = pair[2]
            names.append(re.sub(r"\\(.)", r"\1", value[1:-1]) if value[:1] == '"' else value)
    return tuple(names)
