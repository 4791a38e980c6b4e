"""What an operator may write, and what is refused with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.envoyconf.options import (
    MAX_WORKERS,
    Backend,
    EnvoyOptions,
    FilterOptions,
    is_ip_literal,
    worker_addresses,
)
from envoy_tokenpools.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,20}){0,3}", fullmatch=True)


@given(host=NAMES, port=st.integers(1, 65_535), tls=st.booleans())
def test_an_origin_is_read_as_written(host: str, port: int, *, tls: bool) -> None:
    """Scheme, host and port of a URL become the backend's."""
    scheme = "https" if tls else "http"
    assert Backend.from_url(f"{scheme}://{host}:{port}") == Backend(host, port, tls)


@pytest.mark.parametrize(
    ("url", "backend", "authority"),
    [
        ("http://vllm", Backend("vllm", 80, tls=False), "vllm"),
        ("https://api.example.com/", Backend("api.example.com", 443, tls=True), "api.example.com"),
        ("https://vllm:8443", Backend("vllm", 8443, tls=True), "vllm:8443"),
        ("http://[::1]:8000", Backend("::1", 8000, tls=False), "[::1]:8000"),
    ],
)
def test_a_scheme_has_a_default_port(url: str, backend: Backend, authority: str) -> None:
    """The port may be left out, and is left out of the host header then."""
    assert Backend.from_url(url) == backend
    assert backend.authority == authority


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://vllm:8000/v1", "base path '/v1' is not supported"),
        ("vllm:8000", "must start with http:// or https://"),
        ("ftp://vllm", "must start with http:// or https://"),
        ("http://", "names no host"),
        ("http://vllm:0", "has port 0"),
        ("http://vllm:99999", "is not a URL"),
        ("http://vllm?x=1", "query"),
        ("http://user:secret@vllm", "credentials"),
    ],
)
def test_anything_but_an_origin_is_refused_with_its_reason(url: str, said: str) -> None:
    """A URL that Envoy could not serve names its fault, and where it was written."""
    with pytest.raises(ConfigError, match=said) as caught:
        EnvoyOptions(backend_url=url)
    assert {fault.path for fault in caught.value.faults} == {"backend_url"}


def test_every_fault_is_named_at_once() -> None:
    """One construction tells all that is wrong."""
    with pytest.raises(ConfigError) as caught:
        EnvoyOptions(
            backend_url="vllm",
            listen_host="localhost",
            listen_port=70_000,
            max_body_bytes=0,
            message_timeout_ms=10_000,
            max_message_timeout_ms=5_000,
        )
    assert [fault.path for fault in caught.value.faults] == [
        "backend_url",
        "listen_port",
        "listen_host",
        "max_body_bytes",
        "max_message_timeout_ms",
    ]


def test_a_port_that_nobody_could_find_is_refused() -> None:
    """Port 0 is read from the admin interface, so it needs one."""
    with pytest.raises(ConfigError, match="port 0 needs the admin interface"):
        EnvoyOptions(backend_url="http://vllm", listen_port=0, admin_host=None)


@given(workers=st.integers(2, MAX_WORKERS), port=st.integers(1, 65_535 - MAX_WORKERS))
def test_no_two_workers_have_the_same_address(workers: int, port: int) -> None:
    """Wherever they listen, and Envoy finds what `serve` binds."""
    for options in (
        FilterOptions(ext_proc_port=port, workers=workers),
        FilterOptions(ext_proc_unix_path="/run/x.sock", workers=workers),
    ):
        assert len(set(options.ext_proc_addresses)) == workers
    assert worker_addresses(f"127.0.0.1:{port}", workers)[-1] == f"127.0.0.1:{port + workers - 1}"
    assert worker_addresses("[::1]:80", 2) == ("[::1]:80", "[::1]:81")


def test_one_worker_has_the_address_as_it_was_given() -> None:
    """A filter that has been there stays where it is."""
    assert worker_addresses("unix:/run/x.sock", 1) == ("unix:/run/x.sock",)
    assert FilterOptions(ext_proc_port=80).ext_proc_addresses == ("127.0.0.1:80",)


@pytest.mark.parametrize(
    ("port", "workers", "said"),
    [
        (65_535, 2, "leaves no ports for 2 workers"),
        (50_051, 0, "workers: 0 is not between"),
        (50_051, MAX_WORKERS + 1, "workers: 129 is not between"),
    ],
)
def test_workers_without_a_port_are_refused(port: int, workers: int, said: str) -> None:
    """Before anybody listens."""
    with pytest.raises(ConfigError, match=said):
        FilterOptions(ext_proc_port=port, workers=workers)


@given(st.integers(1_024, 1 << 30))
def test_a_body_of_the_limit_always_fits_the_buffer(max_body_bytes: int) -> None:
    """The buffer is above the limit, so that the filter is the one to refuse."""
    options = FilterOptions(max_body_bytes=max_body_bytes)
    assert max_body_bytes < options.buffer_limit_bytes < 1 << 31


@pytest.mark.parametrize(
    ("host", "literal"), [("10.0.0.1", True), ("::1", True), ("localhost", False), ("", False)]
)
def test_addresses_are_told_from_names(host: str, *, literal: bool) -> None:
    """Names are resolved, addresses are not."""
    assert is_ip_literal(host) is literal
