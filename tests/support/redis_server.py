"""Real Redis servers on free loopback ports: one that can be harmed, a cluster, and one behind a sentinel."""

import contextlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

BINARIES = ("redis-server", "valkey-server")

WITHIN_S = 15.0


def find_binary() -> str:
    """The server's program."""
    for name in BINARIES:
        path = shutil.which(name)
        if path is not None:
            return path
    raise RuntimeError("these tests need a real Redis: apt-get install redis-server")


BUS = 10_000
"""A cluster's node takes the port so far above its own, too; both are kept below those that clients get."""


def free_port() -> int:
    """A port that nobody listens on now, nor on its bus."""
    while True:
        port = 12_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + BUS))
            return port


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {WITHIN_S} s")
        time.sleep(0.02)


class RedisProcess:
    """One server without persistence, in a folder of its own."""

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._arguments = arguments
        self._folder = Path(tempfile.mkdtemp())
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> "RedisProcess":
        """Start it, empty, and wait until it answers."""
        with (self._folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                [
                    *(find_binary(), "--port", str(self.port), "--bind", "127.0.0.1"),
                    *(
                        "--repl-diskless-sync",
                        "no",
                        "--save",
                        "",
                        "--appendonly",
                        "no",
                        "--dir",
                        str(self._folder),
                    ),
                    *self._arguments,
                ],
                stdout=log,
                stderr=log,
            )
        try:
            until(lambda: self.ask("PING").startswith((b"+PONG", b"-NOAUTH")), "redis-server")
        except RuntimeError as error:
            error.add_note((self._folder / "log").read_text()[-1_000:])
            raise
        return self

    def kill(self) -> None:
        """End it at once; what it knew is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def close(self) -> None:
        """End it, and leave nothing behind."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, *words: str) -> bytes:
        """The raw reply to one command; empty if nobody answers."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(each)}\r\n{each}\r\n" for each in words)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(request.encode())
                return connection.recv(65_536)
        except OSError:
            return b""


@contextlib.contextmanager
def redis_process(*arguments: str) -> Iterator[RedisProcess]:
    """A server of one's own."""
    server = RedisProcess(*arguments)
    try:
        yield server.start()
    finally:
        server.close()


@contextlib.contextmanager
def redis_cluster(masters: int = 3) -> Iterator[Sequence[RedisProcess]]:
    """A cluster of so many masters."""
    nodes = [
        RedisProcess("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        for _ in range(masters)
    ]
    try:
        for number, node in enumerate(nodes):
            node.start()
            first, end = 16_384 * number // masters, 16_384 * (number + 1) // masters
            node.ask("CLUSTER", "ADDSLOTS", *map(str, range(first, end)))
            node.ask("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        for node in nodes:
            until(lambda node=node: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "cluster")  # type: ignore[misc]
        yield nodes
    finally:
        for node in nodes:
            node.close()


class Sentinels:
    """A master, its replica, and a sentinel that decides alone."""

    NAME = "books"

    def __init__(self) -> None:
        self.master = RedisProcess()
        self.replica = RedisProcess("--replicaof", "127.0.0.1", str(self.master.port))
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp())
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the sentinel is, and what it calls the master."""
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.NAME}/0"

    def start(self) -> None:
        """Start all three, and wait until the sentinel knows the replica."""
        self.master.start()
        self.replica.start()
        until(lambda: b"master_link_status:up" in self.replica.ask("INFO", "replication"), "link")
        configuration = self._folder / "sentinel.conf"
        configuration.write_text(
            f"port {self.port}\nbind 127.0.0.1\n"
            f"sentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.NAME} 500\n"
            f"sentinel failover-timeout {self.NAME} 3000\n"
        )
        with (self._folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                [find_binary(), str(configuration), "--sentinel"], stdout=log, stderr=log
            )
        asked = RedisProcess(port=self.port)
        until(
            lambda: str(self.replica.port).encode() in asked.ask("SENTINEL", "replicas", self.NAME),
            "sentinel",
        )
        asked.close()

    def close(self) -> None:
        """End all three."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self.master.close()
        self.replica.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def sentinels() -> Iterator[Sentinels]:
    """A server that is replaced when it dies."""
    three = Sentinels()
    try:
        three.start()
        yield three
    finally:
        three.close()
