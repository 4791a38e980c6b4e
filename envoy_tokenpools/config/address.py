"""
The URL of a Redis or Valkey, in parts: where it is, how to log in, and what our keys begin with.

    redis://[user:password@]host[:port][/database]           rediss:// with TLS
    redis+sentinel://host[:port],host[:port]/master[/database]   rediss+sentinel:// with TLS to all
    redis+cluster://host[:port],host[:port]                   rediss+cluster:// with TLS
    unix:///path[?db=N]

`valkey` may stand for `redis`. Query: `prefix` (of all keys), `ca` (file of the authorities that are trusted), `cert`
and `key` (files of the client's certificate), `sentinel_user` and `sentinel_password`.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, unquote, urlsplit

PORT = 6379
SENTINEL_PORT = 26379

_SCHEME = re.compile(r"(redis|valkey)(s?)(?:\+(sentinel|cluster))?|unix")
SCHEMES = ("memory://", "redis://", "rediss://", "redis+sentinel://", "redis+cluster://", "unix://")
"""Forms of a `state`, for messages."""

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_QUERY = {"prefix", "ca", "cert", "key", "db", "sentinel_user", "sentinel_password"}


class Topology(enum.Enum):
    """How the server is found."""

    ALONE = "alone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """
    A server's URL in parts; not shown, for it holds a password.

    Attributes:
        topology: how it is found.
        hosts: of the server, the sentinels, or some of the cluster.
        path: of its socket, in place of hosts.
        master: its name among the sentinels.
        database: its number; always 0 in a cluster.
        username: of the ACL user; None is the default one.
        password: its password.
        tls: whether the connection is encrypted, and the server's certificate verified.
        files: `ca`, `cert` and `key`.
        sentinel_username: of the sentinels' own user.
        sentinel_password: its password.
        prefix: of all keys.
    """

    topology: Topology
    hosts: Sequence[tuple[str, int]] = ()
    path: str | None = None
    master: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    prefix: str = "tokenpools"


def is_address(url: str) -> bool:
    """Whether the scheme is one of ours."""
    return _SCHEME.fullmatch(url.partition("://")[0]) is not None and "://" in url


def parse_address(url: str) -> Address:
    """
    The parts of `url`.

    Raises:
        ValueError: it is none of the forms above; the message never quotes a part that may hold a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None
    scheme = _SCHEME.fullmatch(parts.scheme)
    if scheme is None:
        raise ValueError(f"unknown scheme; known: {', '.join(SCHEMES)}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not query.keys() <= _QUERY:
        # Not repeated: it may be the rest of a password that is not encoded.
        raise ValueError(f"unknown option in the URL; known: {', '.join(sorted(_QUERY))}")
    prefix = query.get("prefix", "tokenpools")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("prefix: up to 64 letters, digits and any of _ . : -")
    tls = scheme[2] == "s"
    files: dict[str, str] = {name: query[name] for name in ("ca", "cert", "key") if name in query}
    if files and not tls:
        raise ValueError("ca, cert and key need TLS: rediss://")
    if ("cert" in files) != ("key" in files):
        raise ValueError("cert and key go together")
    common = Address(
        topology=Topology(scheme[3]) if scheme[3] else Topology.ALONE,
        tls=tls,
        files=files,
        sentinel_username=query.get("sentinel_user"),
        sentinel_password=query.get("sentinel_password"),
        prefix=prefix,
    )
    if parts.scheme == "unix":
        if parts.netloc:
            raise ValueError("a socket has no host and no login: unix:///path")
        if not parts.path:
            raise ValueError("the path of the socket is missing: unix:///path")
        return replace(common, path=unquote(parts.path), database=_database(query.get("db", "0")))
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    common = replace(common, username=unquote(username) or None, password=unquote(password) or None)
    return _placed(common, hosts, parts.path.strip("/"), query.get("db", ""))


def _placed(common: Address, hosts: str, path: str, database: str) -> Address:
    """With its hosts, and what the path names."""
    topology = common.topology
    default_port = SENTINEL_PORT if topology is Topology.SENTINEL else PORT
    found = tuple(_host(host, default_port) for host in hosts.split(","))
    master = ""
    if topology is Topology.SENTINEL:
        master, _, path = path.partition("/")
        if not master:
            raise ValueError("the name of the master is missing: redis+sentinel://host:port/master")
    elif topology is Topology.ALONE and len(found) > 1:
        raise ValueError("has several hosts: write redis+sentinel:// or redis+cluster://")
    number = _database(database or path or "0")
    if topology is Topology.CLUSTER and number:
        raise ValueError("a cluster has only database 0")
    return replace(common, hosts=found, master=unquote(master), database=number)


def _host(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, or `[v6]:port`."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("the host is missing")
    try:
        port = parts.port
    except ValueError:
        raise ValueError("the port is no number up to 65535") from None
    return parts.hostname, default_port if port is None else port


def _database(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 1_000:
        raise ValueError("the database is a small number: redis://host:port/0")
    return int(text)
