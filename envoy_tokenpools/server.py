"""
The composition root: puts store, gate, gRPC server and admin together, and takes them apart without losing a lease.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from envoy_tokenpools.admin.server import AdminServer
from envoy_tokenpools.clock import Clock, SystemClock
from envoy_tokenpools.config import Config
from envoy_tokenpools.extproc.service import SERVICE, ExtProcService
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.metrics import PrometheusObserver
from envoy_tokenpools.store.factory import open_store
from envoy_tokenpools.tokenizer import VOCABULARY_NAMES, TokenCounter, load_vocabularies

log = logging.getLogger(__name__)

MESSAGE_MARGIN_BYTES = 1024 * 1024
"""Room for headers and framing above the largest body in one gRPC message; gRPC's own default of 4 MiB answers 500."""

NEVER_S = 3_600
"""Longer than it takes gRPC to cancel what is left."""


@dataclass(frozen=True, slots=True)
class Listen:
    """
    Where to listen.

    Attributes:
        ext_proc: `host:port` or `unix:/path` of the gRPC server; port 0 picks a free one.
        admin_host: of the admin HTTP.
        admin_port: of the admin HTTP; 0 picks a free one, None leaves it out.
        admin_socket: socket file of the admin HTTP instead; host and port are then ignored.
    """

    ext_proc: str = "127.0.0.1:50051"
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 9090
    admin_socket: Path | None = None


class FilterServer:
    """
    The filter: start it once, stop it once.

    `ext_proc_port` and `admin_port` are known after `start`.
    """

    def __init__(self, config: Config, listen: Listen, clock: Clock | None = None) -> None:
        """
        Build everything that can fail before anything listens.

        Args:
            config: what to serve.
            listen: where.
            clock: pool time; the system's if None.

        Raises:
            VocabularyError: a tokenizer vocabulary is missing or damaged.
            ConfigError: the `state` URL names no known store.
        """
        self._listen = listen
        clock = clock or SystemClock()
        # All of them: a reload may name another one.
        self._counter = TokenCounter(load_vocabularies(VOCABULARY_NAMES))
        self._metrics = PrometheusObserver()
        owner = secrets.token_hex(6)
        self._store = open_store(
            config.state, clock, owner=owner, deadline_ms=config.server.store_deadline_ms
        )
        numbers = itertools.count()
        self.gate = Gate(
            config,
            store=self._store,
            counter=self._counter,
            clock=clock,
            observer=self._metrics,
            new_lease_id=lambda: f"{owner}-{next(numbers):x}",
            jitter=random.Random(owner).random,  # noqa: S311
        )
        self._service = ExtProcService(self.gate, clock)
        self._admin = AdminServer(self.gate, self._metrics)
        self._health = health_aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._house: asyncio.Task[None] | None = None
        self.ext_proc_port = 0
        self.admin_port: int | None = None

    async def start(self) -> None:
        """
        Put the terms in force, and listen; on failure nothing stays behind.

        Raises:
            OSError: an address cannot be bound.
        """
        try:
            await self.gate.house.start()
            self._house = asyncio.create_task(self.gate.house.run())
            server = self._grpc_server()
            self.ext_proc_port = _bind(server, self._listen.ext_proc)
            if self._listen.admin_socket is not None:
                await self._admin.start_on_socket(self._listen.admin_socket)
            elif self._listen.admin_port is not None:
                self.admin_port = await self._admin.start(
                    self._listen.admin_host, self._listen.admin_port
                )
            await server.start()
            self._grpc = server
        except BaseException:
            await self.stop()
            raise
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def reload(self, config: Config) -> None:
        """Put a new configuration in force; addresses, the store and gRPC's message limit stay until a restart."""
        await self.gate.reload(config)
        self._metrics.config_reloaded(succeeded=True)

    def config_refused(self) -> None:
        """A reload failed: the last good configuration stays in force."""
        self._metrics.config_reloaded(succeeded=False)

    async def drain(self) -> None:
        """Say that we are about to stop: not ready, not serving. Requests are still taken."""
        self._admin.drain()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self) -> None:
        """Take no new requests, let those in flight end within `drain_ms`, settle all, and close."""
        await self.drain()
        if self._grpc is not None:
            grace_s = self.gate.config.server.drain_ms / 1_000
            # gRPC's own grace must not end while we cancel: it would touch a server that is gone, and crash.
            stopping = asyncio.ensure_future(self._grpc.stop(grace_s + NEVER_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.idle(), grace_s)
            self._service.stop()
            if self._service.open_streams:
                log.warning("ending open requests", extra={"count": self._service.open_streams})
            await self._grpc.stop(None)
            await stopping
        await self._service.settled()
        await self.gate.close()
        if self._house is not None:
            self._house.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._house
        await self._admin.stop()
        await self._store.close()
        self._counter.close()

    def _grpc_server(self) -> grpc.aio.Server:
        limit = self.gate.config.server.max_body_bytes + MESSAGE_MARGIN_BYTES
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # Envoy's keepalive pings are welcome, also while all streams are quiet.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)


def _refuse_taken_socket(path: str) -> None:
    """Else gRPC takes the socket file over silently, and whoever had it would later remove it under us."""
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(f"cannot listen for Envoy on unix:{path}: another process serves there")


def _bind(server: grpc.aio.Server, address: str) -> int:
    if address.startswith("unix:"):
        _refuse_taken_socket(address.removeprefix("unix:"))
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen for Envoy on {address}: {error}") from error
    if port == 0 and not address.startswith("unix:"):
        raise OSError(f"cannot listen for Envoy on {address}")
    if address.startswith("unix:"):
        # Envoy usually runs as another user of the same machine or pod.
        Path(address.removeprefix("unix:")).chmod(0o660)
    return port
