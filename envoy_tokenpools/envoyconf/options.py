"""
What an operator may choose about the Envoy in front of a backend. Validated, frozen, no Envoy types.
"""

import enum
import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

from envoy_tokenpools.config import Config, ServerSettings
from envoy_tokenpools.errors import ConfigError, Fault

MESSAGE_TIMEOUT_LIMIT_MS = 3_600_000
"""Envoy refuses an ext_proc `message_timeout` above one hour."""

_CA_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Envoy's own images
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/cert.pem",  # macOS, BSD
)


MAX_WORKERS = 128
"""More processes than a host has cores for; each has a port of its own."""


class Profile(enum.Enum):
    """Which messages Envoy sends to the filter (design section 8)."""

    PORTABLE = "portable"


def system_ca_file() -> str:
    """The bundle of trusted authorities of this machine, else where Envoy's own images have it."""
    default = ssl.get_default_verify_paths().cafile
    candidates = (default, *_CA_FILES) if default else _CA_FILES
    return next((path for path in candidates if Path(path).is_file()), _CA_FILES[0])


def is_ip_literal(host: str) -> bool:
    """Whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Backend:
    """
    Where requests go: an origin, never a path below one.

    Attributes:
        host: name or address, without brackets.
        port: TCP port.
        tls: whether the backend speaks TLS.
    """

    host: str
    port: int
    tls: bool

    @property
    def authority(self) -> str:
        """The `host` header that names this backend, without the scheme's default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @classmethod
    def from_url(cls, url: str) -> "Backend":
        """
        Read `http://host:port` or `https://host:port`.

        Raises:
            ConfigError: the URL has no host, another scheme, or anything beside an origin.
        """
        faults = [Fault("backend_url", message) for message in _url_faults(url)]
        if faults:
            raise ConfigError(faults)
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls)


def _url_faults(url: str) -> Iterator[str]:
    """What keeps `url` from being the origin of a backend."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        yield f"{url!r} is not a URL: {error}"
        return
    if parts.scheme not in ("http", "https"):
        yield f"{url!r} must start with http:// or https://"
        return
    if not parts.hostname:
        yield f"{url!r} names no host"
    if port == 0:
        yield f"{url!r} has port 0"
    yield from _origin_faults(parts)


def _origin_faults(parts: SplitResult) -> Iterator[str]:
    """What a URL has beyond its origin."""
    if parts.path not in ("", "/"):
        yield (
            f"the base path {parts.path!r} is not supported: requests keep the path that the client"
            " sent; give scheme, host and port only"
        )
    if parts.query or parts.fragment:
        yield "a query or fragment has no meaning here"
    if parts.username is not None:
        yield "credentials do not belong in the URL: clients send their own"


def worker_addresses(address: str, workers: int) -> tuple[str, ...]:
    """
    Where each of so many workers listens when together they are given `address`.

    One listens there itself. Of several each has a port (PORT, PORT+1, …) or a socket file
    (`/path.0`, `/path.1`, …) of its own: Envoy keeps one connection per thread and endpoint, so
    that workers who shared a port would be left out.
    """
    if workers == 1:
        return (address,)
    if address.startswith("unix:"):
        return tuple(f"{address}.{worker}" for worker in range(workers))
    host, _, port = address.rpartition(":")
    return tuple(f"{host}:{int(port) + worker}" for worker in range(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """
    How the filter is reached and what may pass through it, in whatever Envoy it is.

    Attributes:
        ext_proc_host: name or address of the filter's gRPC server.
        ext_proc_port: its port.
        ext_proc_unix_path: its socket file instead; host and port are then ignored.
        workers: processes of the filter, each at an address of its own (`worker_addresses`).
        profile: which messages the filter gets.
        max_body_bytes: larger request bodies are refused with 413 unless the filter lets them
            pass unread.
        message_timeout_ms: how long Envoy waits for the filter's answer to one message.
        max_message_timeout_ms: how far the filter may extend that while a request waits.
        max_streams: requests in flight that the circuit breakers allow, per cluster.
        stream_idle_timeout_ms: how long a stream may be silent, both ways, before it is ended.
        forwarded_headers: request headers that the filter gets beside those it always needs,
            such as one that a trusted proxy sets for identity.
        path_prefix: path that the metered endpoints lie below.
        metadata_namespaces: dynamic metadata of filters before this one that the filter gets, for
            identity by a verified claim.
        keep_content_length: leave the length of responses on them; needs Envoy 1.38 or later.

    Raises:
        ConfigError: on construction; names every fault.
    """

    ext_proc_host: str = "127.0.0.1"
    ext_proc_port: int = 50051
    ext_proc_unix_path: str | None = None
    workers: int = 1
    profile: Profile = Profile.PORTABLE
    max_body_bytes: int = ServerSettings().max_body_bytes
    message_timeout_ms: int = 5_000
    max_message_timeout_ms: int = 600_000
    max_streams: int = 100_000
    stream_idle_timeout_ms: int = 3_600_000
    forwarded_headers: tuple[str, ...] = ()
    path_prefix: str = ""
    metadata_namespaces: tuple[str, ...] = ()
    keep_content_length: bool = True

    def __post_init__(self) -> None:
        faults = list(_filter_faults(self))
        if faults:
            raise ConfigError(faults)

    def following(self, config: Config) -> Self:
        """The same, with what the filter's own configuration decides."""
        return replace(
            self,
            max_body_bytes=config.server.max_body_bytes,
            path_prefix=config.server.path_prefix,
            metadata_namespaces=(config.claim.namespace,) if config.claim is not None else (),
        )

    @property
    def ext_proc_addresses(self) -> tuple[str, ...]:
        """Where the workers listen: `host:port` or `unix:/path`."""
        if self.ext_proc_unix_path is not None:
            return worker_addresses(f"unix:{self.ext_proc_unix_path}", self.workers)
        return worker_addresses(f"{self.ext_proc_host}:{self.ext_proc_port}", self.workers)

    @property
    def buffer_limit_bytes(self) -> int:
        """
        What one connection may buffer, and so the largest message that the filter gets.

        There is room above `max_body_bytes`, so that the filter, and not Envoy, answers a body
        that is a little too large.
        """
        return self.max_body_bytes + max(64 * 1024, self.max_body_bytes // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyOptions(FilterOptions):
    """
    Everything that a complete Envoy in front of one backend depends on.

    Attributes:
        backend_url: `http://host:port` or `https://host:port`, without a path.
        listen_host: address that clients connect to.
        listen_port: its port; 0 lets the system choose (then `admin_host` must be set).
        admin_host: address of Envoy's admin interface, or None for no admin. It has no
            authentication and can stop Envoy: keep it on loopback.
        admin_port: its port; 0 lets the system choose.
        drain_timeout_ms: time between Envoy's first and its final GOAWAY when it drains.
        backend_ca_file: authorities that an https backend's certificate is checked against.
        access_log: one JSON line per request on standard output, without query strings.

    Raises:
        ConfigError: on construction; names every fault.
    """

    backend_url: str
    listen_host: str = "0.0.0.0"
    listen_port: int = 8080
    admin_host: str | None = "127.0.0.1"
    admin_port: int = 9901
    drain_timeout_ms: int = 5_000
    backend_ca_file: str = field(default_factory=system_ca_file)
    access_log: bool = False

    def __post_init__(self) -> None:
        faults = [*_envoy_faults(self), *_filter_faults(self)]
        if faults:
            raise ConfigError(faults)

    @property
    def backend(self) -> Backend:
        """The backend that `backend_url` names."""
        return Backend.from_url(self.backend_url)


def _filter_faults(options: FilterOptions) -> Iterator[Fault]:
    """What is wrong with the filter's options."""
    yield from _out_of_bounds(
        ("ext_proc_port", options.ext_proc_port, 1, 65_535),
        ("workers", options.workers, 1, MAX_WORKERS),
        # Windows and limits of HTTP/2 end at 2 GiB.
        ("max_body_bytes", options.max_body_bytes, 1_024, 1 << 30),
        ("message_timeout_ms", options.message_timeout_ms, 1, MESSAGE_TIMEOUT_LIMIT_MS),
        ("max_message_timeout_ms", options.max_message_timeout_ms, 1, MESSAGE_TIMEOUT_LIMIT_MS),
        ("max_streams", options.max_streams, 1, 1_000_000),
        ("stream_idle_timeout_ms", options.stream_idle_timeout_ms, 1, 7 * 86_400_000),
    )
    if options.ext_proc_port <= 65_535 < options.ext_proc_port + options.workers - 1:
        yield Fault("ext_proc_port", f"leaves no ports for {options.workers} workers")
    if options.max_message_timeout_ms < options.message_timeout_ms:
        yield Fault("max_message_timeout_ms", "is below message_timeout_ms")


def _envoy_faults(options: EnvoyOptions) -> Iterator[Fault]:
    """What is wrong with the rest of an Envoy's options."""
    for message in _url_faults(options.backend_url):
        yield Fault("backend_url", message)
    yield from _out_of_bounds(
        ("listen_port", options.listen_port, 0, 65_535),
        ("admin_port", options.admin_port, 0, 65_535),
        ("drain_timeout_ms", options.drain_timeout_ms, 0, 3_600_000),
    )
    for name, host in (("listen_host", options.listen_host), ("admin_host", options.admin_host)):
        if host is not None and not is_ip_literal(host):
            yield Fault(name, f"{host!r} is not an IP address: Envoy binds to addresses only")
    if options.listen_port == 0 and options.admin_host is None:
        yield Fault("listen_port", "port 0 needs the admin interface to be found")


def _out_of_bounds(*bounds: tuple[str, int, int, int]) -> Iterator[Fault]:
    """A fault for each (name, value, lowest, highest) whose value is outside."""
    for name, value, low, high in bounds:
        if not low <= value <= high:
            yield Fault(name, f"{value} is not between {low} and {high}")
