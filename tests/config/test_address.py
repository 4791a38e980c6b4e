"""The URL of a server: every form, every fault with its message, and a password that no message repeats."""

import traceback
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.config.address import Address, Topology, parse_address

ALONE, SENTINEL, CLUSTER = Topology.ALONE, Topology.SENTINEL, Topology.CLUSTER


def parts(url: str) -> dict[str, Any]:
    """The parts of an address that are not as they are by default."""
    address = parse_address(url)
    shown = {name: getattr(address, name) for name in Address.__slots__}
    default = Address(ALONE)
    return {name: value for name, value in shown.items() if value != getattr(default, name)}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", {"hosts": (("host", 6379),)}),
        ("redis://host/", {"hosts": (("host", 6379),)}),
        ("redis://host:7000", {"hosts": (("host", 7000),)}),
        ("redis://host:7000/3", {"hosts": (("host", 7000),), "database": 3}),
        ("redis://host/3/", {"hosts": (("host", 6379),), "database": 3}),
        ("redis://host?db=3", {"hosts": (("host", 6379),), "database": 3}),
        ("redis://10.0.0.1:7000", {"hosts": (("10.0.0.1", 7000),)}),
        ("redis://[::1]", {"hosts": (("::1", 6379),)}),
        ("redis://[2001:db8::1]:7000/2", {"hosts": (("2001:db8::1", 7000),), "database": 2}),
        ("redis://:pw@[::1]:7000", {"hosts": (("::1", 7000),), "password": "pw"}),
        ("redis://:pw@host", {"hosts": (("host", 6379),), "password": "pw"}),
        ("redis://user@host", {"hosts": (("host", 6379),), "username": "user"}),
        (
            "redis://user:pw@host",
            {"hosts": (("host", 6379),), "username": "user", "password": "pw"},
        ),
        ("redis://:@host", {"hosts": (("host", 6379),)}),
        ("redis://@host", {"hosts": (("host", 6379),)}),
        ("redis://host?prefix=a.b:c-d_E9", {"hosts": (("host", 6379),), "prefix": "a.b:c-d_E9"}),
    ],
)
def test_a_server_that_stands_alone(url: str, expected: dict[str, Any]) -> None:
    """Its host, and if it is not the usual one its port, database, user and prefix."""
    assert parts(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("rediss://host", {}),
        ("rediss://host?ca=/etc/ca.pem", {"files": {"ca": "/etc/ca.pem"}}),
        (
            "rediss://host?cert=/c.pem&key=%2Fk.pem",
            {"files": {"cert": "/c.pem", "key": "/k.pem"}},
        ),
    ],
)
def test_a_server_behind_tls(url: str, expected: dict[str, Any]) -> None:
    """With an authority of one's own, or a certificate for the client."""
    assert parts(url) == {"hosts": (("host", 6379),), "tls": True, **expected}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://a/main", {"hosts": (("a", 26379),), "master": "main"}),
        (
            "redis+sentinel://a,b:7000,[::1]:7001/main/2",
            {
                "hosts": (("a", 26379), ("b", 7000), ("::1", 7001)),
                "master": "main",
                "database": 2,
            },
        ),
        ("redis+sentinel://a/my%20books", {"hosts": (("a", 26379),), "master": "my books"}),
        (
            "rediss+sentinel://user:pw@a/main?sentinel_user=s&sentinel_password=p%26q",
            {
                "hosts": (("a", 26379),),
                "master": "main",
                "tls": True,
                "username": "user",
                "password": "pw",
                "sentinel_username": "s",
                "sentinel_password": "p&q",
            },
        ),
    ],
)
def test_a_server_that_sentinels_know(url: str, expected: dict[str, Any]) -> None:
    """By their hosts and the master's name; they have a login of their own."""
    assert parts(url) == {"topology": SENTINEL, **expected}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+cluster://a", {"hosts": (("a", 6379),)}),
        ("redis+cluster://a,b:7000/0", {"hosts": (("a", 6379), ("b", 7000))}),
        ("redis+cluster://[::1]:1,[::2]:2", {"hosts": (("::1", 1), ("::2", 2))}),
        ("redis+cluster://a,[::2]:2", {"hosts": (("a", 6379), ("::2", 2))}),
        ("redis+cluster://[::1],[::2]", {"hosts": (("::1", 6379), ("::2", 6379))}),
        ("rediss+cluster://:pw@a,b", {"hosts": (("a", 6379), ("b", 6379)), "password": "pw"}),
    ],
)
def test_a_cluster(url: str, expected: dict[str, Any]) -> None:
    """Some of its nodes; the others are asked of them."""
    tls = {"tls": True} if url.startswith("rediss") else {}
    assert parts(url) == {"topology": CLUSTER, **tls, **expected}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("unix:///run/redis.sock", {"path": "/run/redis.sock"}),
        ("unix:///run/my%20redis.sock?db=4", {"path": "/run/my redis.sock", "database": 4}),
        ("unix:///run/redis.sock?prefix=p", {"path": "/run/redis.sock", "prefix": "p"}),
    ],
)
def test_a_socket(url: str, expected: dict[str, Any]) -> None:
    """Of a server on the same machine."""
    assert parts(url) == expected


@pytest.mark.parametrize("scheme", ["{}", "{}s", "{}+sentinel", "{}s+sentinel", "{}+cluster"])
def test_valkey_is_the_same(scheme: str) -> None:
    """In every form."""
    rest = "://user:pw@a:1/" + ("main/0" if "sentinel" in scheme else "0")
    one, other = (scheme.format(name) + rest for name in ("redis", "valkey"))
    assert parts(one) == parts(other)


# Passwords

SPECIAL = "p@s:s/w?o#r%d [x]{ü}+&=,;'\"\\<>^`|~\u65e5"


@given(st.text(min_size=1) | st.just(SPECIAL), st.text(min_size=1))
def test_any_user_and_password_can_be_written(password: str, user: str) -> None:
    """Percent-encoded, with every character that there is."""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    for url in (f"redis://{login}@host", f"redis+cluster://{login}@host,other"):
        address = parse_address(url)
        assert (address.username, address.password) == (user, password)
    query = urlencode({"sentinel_user": user, "sentinel_password": password})
    address = parse_address(f"redis+sentinel://host/main?{query}")
    assert (address.sentinel_username, address.sentinel_password) == (user, password)


def test_an_address_does_not_show_its_password() -> None:
    """Nor anything else: it may stand in a log by mistake."""
    address = parse_address("rediss+sentinel://user:hunter2@host/main?sentinel_password=hunter3")
    for shown in (repr(address), str(address), f"{address}"):
        assert "hunter" not in shown
        assert "user" not in shown


# Faults

KNOWN = "ca, cert, db, key, prefix, sentinel_password, sentinel_user"

SMALL = "the database is a small number: redis://host:port/0"

FAULTS = {
    "etcd://host": "unknown scheme; known: memory://, redis://",
    "redis+ring://host": "unknown scheme",
    "redis+sentinels://host": "unknown scheme",
    "redi://host": "unknown scheme",
    "unix+cluster:///a": "unknown scheme",
    "host:6379": "unknown scheme",
    "": "unknown scheme",
    "redis://[::1": "is not a URL|the host is neither",
    "redis://[x]": "is not a URL|the host is neither",
    "redis://": "the host is missing",
    "redis:host": "the host is missing|unknown scheme",
    "redis:///0": "the host is missing",
    "redis://:6379": "the host is missing",
    "redis://user:pw@": "the host is missing",
    "redis+cluster://a,": "the host is missing",
    "redis+sentinel://,a/main": "the host is missing",
    "redis://host:x": "the port is no number up to 65535",
    "redis://host:65536": "the port is no number up to 65535",
    "redis://host:-1": "the port is no number up to 65535",
    "redis://a,b": "has several hosts: write redis\\+sentinel:// or redis\\+cluster://",
    "redis://host/x": SMALL,
    "redis://host/0/1": SMALL,
    "redis://host/-1": SMALL,
    "redis://host/1001": SMALL,
    "redis://host/\u0661": SMALL,
    "redis://host?db=x": SMALL,
    "unix:///a?db=x": SMALL,
    "redis+sentinel://a/main/x": SMALL,
    "redis+sentinel://a": "the name of the master is missing",
    "redis+sentinel://a/": "the name of the master is missing",
    "redis+cluster://a/1": "a cluster has only database 0",
    "redis+cluster://a?db=1": "a cluster has only database 0",
    "unix://": "the path of the socket is missing: unix:///path",
    "redis://host?ssl=true": f"unknown option .*known: {KNOWN}",
    "redis://host?Prefix=a": f"unknown option .*known: {KNOWN}",
    "redis://host?ca=/a": "ca, cert and key need TLS: rediss://",
    "redis+cluster://host?cert=/a&key=/b": "ca, cert and key need TLS: rediss://",
    "unix:///a?ca=/b": "ca, cert and key need TLS: rediss://",
    "rediss://host?cert=/a": "cert and key go together",
    "rediss://host?ca=/c&key=/a": "cert and key go together",
    "redis://host?prefix=": "prefix: up to 64 letters",
    "redis://host?prefix=a%20b": "prefix: up to 64 letters",
    "redis://host?prefix=a{b}": "prefix: up to 64 letters",
    "redis://host?prefix=a%0a": "prefix: up to 64 letters",
    "redis://host?prefix=" + 65 * "a": "prefix: up to 64 letters",
}


@pytest.mark.parametrize(("url", "message"), FAULTS.items())
def test_a_fault_says_what_is_wrong(url: str, message: str) -> None:
    """And what would be right."""
    with pytest.raises(ValueError, match=message):
        parse_address(url)


def test_an_empty_database_is_the_first() -> None:
    """As no database at all."""
    assert parts("redis://host?db=") == parts("redis://host/") == parts("redis://host/0")


@pytest.mark.parametrize("url", ["unix://run/redis.sock", "unix://user:hunter2@/run/redis.sock"])
def test_what_a_socket_cannot_have_is_a_fault(url: str) -> None:
    """A host, or a login, would be passed over: a slash is missing, or the server will refuse."""
    with pytest.raises(ValueError, match="unix:///path"):
        parse_address(url)


SCHEMES = st.sampled_from(
    ["redis", "rediss", "redis+sentinel", "redis+cluster", "valkey", "unix", "etcd", ""]
)

RESTS = st.sampled_from(
    ["host", "host:x", "host/9999", "a,b", "a/1", "[::1", "", "host?x=1", "host?prefix=%20"]
)

SECRET = "hunter2"

AROUND = st.text("?#/@:&=%[]+, \u2100x", max_size=3)
"""Characters that mean something in a URL."""


def message_of(url: str) -> str:
    """What is said of `url`; empty if it is an address."""
    try:
        parse_address(url)
    except ValueError as error:
        return "".join(traceback.format_exception(error))
    return ""


@given(scheme=SCHEMES, before=AROUND, after=AROUND, rest=RESTS, is_encoded=st.booleans())
def test_no_message_repeats_a_password(
    scheme: str, before: str, after: str, rest: str, *, is_encoded: bool
) -> None:
    """Wherever the fault is, and also where somebody forgot to encode the password's special characters."""
    password = before + SECRET + after
    if is_encoded:
        password = quote(password, safe="")
    assert SECRET not in message_of(f"{scheme}://user:{password}@{rest}")
    assert SECRET not in message_of(f"{scheme}://host/main?sentinel_password={password}&{rest}")
    assert SECRET not in message_of(password)


@given(st.text() | st.tuples(SCHEMES, st.text()).map("://".join))
def test_any_text_is_an_address_or_a_fault(url: str) -> None:
    """Nothing but the documented error."""
    try:
        address = parse_address(url)
    except ValueError:
        return
    assert address.path or address.hosts
