"""Whoever the server lets in: with TLS, as a user of its own, and with no more rights than it needs."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.store.factory import open_store
from tests.support.pools import amount, claim, cost, terms
from tests.support.redis_server import RedisProcess, free_port

RIGHTS = "~books:* &books:* +@read +@write +eval +evalsha +time +publish +subscribe"
"""What README says: no administration, no other keys."""


def certificates(folder: Path) -> None:
    """An authority, and a certificate of it for 127.0.0.1."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is needed to make certificates"
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test")
    subprocess.run(
        [
            openssl,
            *made,
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )


async def use(url: str) -> None:
    """Take a lease and give it back, through a store at `url`."""
    store = open_store(url, SystemClock(), owner="one", deadline_ms=1_000)
    try:
        await store.reserve("pool", claim("1", cost(10), terms(), amount()))
        assert await store.settle("pool", "1", 5) is not None
        await store.open("pool", "configuration")
        assert await store.sweep("pool") == ()
        assert (await store.snapshot("pool")).total.in_flight == 0
    finally:
        await store.close()


async def test_tls_and_a_user_of_its_own(tmp_path: Path) -> None:
    """Encrypted, verified by our authority; a wrong password or another authority is an error, nothing less."""
    certificates(tmp_path)
    port = free_port()
    server = RedisProcess(
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *(
            "--tls-cert-file",
            str(tmp_path / "cert.pem"),
            "--tls-key-file",
            str(tmp_path / "key.pem"),
        ),
        *("--tls-ca-cert-file", str(tmp_path / "cert.pem")),
    )
    server.start()
    try:
        server.ask("ACL", "SETUSER", "filter", "on", ">p@ss:word/", *RIGHTS.split())
        server.ask("ACL", "SETUSER", "default", "off")
        where = f"127.0.0.1:{port}/0?prefix=books"
        ca = f"&ca={tmp_path / 'cert.pem'}"
        await use(f"rediss://filter:p%40ss%3Aword%2F@{where}{ca}")
        for url in (
            f"rediss://filter:wrong@{where}{ca}",
            f"rediss://{where}{ca}",
            f"rediss://filter:p%40ss%3Aword%2F@{where}",
            f"redis://filter:p%40ss%3Aword%2F@{where}",
            f"rediss://filter:p%40ss%3Aword%2F@127.0.0.1:{port}/0?prefix=others{ca}",
        ):
            with pytest.raises(StoreError) as raised:
                await asyncio.wait_for(use(url), 20)
            assert "p@ss" not in str(raised.value)
    finally:
        server.close()
