"""
One Envoy with a listener for each contender, made of the product's own configuration, and one that is their backend.

It has one worker thread, so that nothing depends on which one a connection falls to.
"""

import asyncio
import contextlib
import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from envoy_tokenpools.envoyconf.admin_client import AdminClient, AdminUnavailableError
from envoy_tokenpools.envoyconf.bootstrap import build_bootstrap
from envoy_tokenpools.envoyconf.filter import EXT_PROC_CLUSTER, FILTER_NAME
from envoy_tokenpools.envoyconf.locate import find_envoy
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.envoyconf.render import render_yaml, to_plain
from tests.bench.children import die_with_parent, free_port
from tests.bench.traffic import PATH, answer_body

BARE = "bare"
"""The listener without ext_proc."""

_BACKEND = "bench_backend"
_STREAM_BACKEND = "bench_stream_backend"
_START_TIMEOUT_S = 20.0

_NO_REPLICAS: Mapping[str, Sequence[int]] = MappingProxyType({})

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envoy:
    """
    The Envoy that runs.

    Attributes:
        pid: its process.
        ports: of the contenders' listeners, by name.
        admin_url: of its admin interface.
    """

    pid: int
    ports: Mapping[str, int]
    admin_url: str

    async def messages_sent(self, name: str) -> int:
        """ext_proc messages that the listener `name` has sent so far."""
        stat = f"http.{name}.ext_proc.stream_msgs_sent"
        url = f"{self.admin_url}/stats?format=json&filter=^{stat}$"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            stats = json.loads(await answer.text())["stats"]
        return sum(int(each["value"]) for each in stats if each.get("name") == stat)


@contextlib.asynccontextmanager
async def envoy(
    processors: Mapping[str, int],
    stream_backend_port: int,
    *,
    replicas: Mapping[str, Sequence[int]] = _NO_REPLICAS,
) -> AsyncIterator[Envoy]:
    """
    Run Envoy on the cores that this process may use; ended on the way out.

    Args:
        processors: ports of the ext_proc servers, by contender.
        stream_backend_port: where streams come from.
        replicas: ports of further servers of a contender, which share its requests.
    """
    folder = Path(tempfile.mkdtemp(prefix="tokenpools-bench-"))
    process: asyncio.subprocess.Process | None = None
    try:
        bootstrap, address = folder / "bootstrap.yaml", folder / "admin_address"
        servers = {name: (port, *replicas.get(name, ())) for name, port in processors.items()}
        bootstrap.write_text(render_yaml(_bootstrap(servers, stream_backend_port)), "utf-8")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.topology", str(find_envoy())),
            *("-c", str(bootstrap), "--admin-address-path", str(address)),
            *("--log-level", "error", "--disable-hot-restart", "--concurrency", "1"),
            stdin=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_START_TIMEOUT_S):
            serving = await _serving(process, address, (BARE, *processors))
        yield serving
    finally:
        if process is not None and process.returncode is None:
            process.terminate()
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _serving(
    process: asyncio.subprocess.Process, address: Path, names: tuple[str, ...]
) -> Envoy:
    while process.returncode is None:
        with contextlib.suppress(AdminUnavailableError, FileNotFoundError):
            admin = AdminClient(f"http://{_read(address)}")
            await admin.require_ready()
            ports = {name: await admin.listen_port(name) for name in names}
            found = {name: port for name, port in ports.items() if port is not None}
            if len(found) == len(names):
                return Envoy(process.pid, found, admin.url)
        await asyncio.sleep(0.05)
    raise RuntimeError(f"Envoy ended with status {process.returncode}")


def _read(address: Path) -> str:
    return address.read_text("utf-8").strip()


# ---------------------------------------------------------------------- configuration


def _bootstrap(processors: Mapping[str, Sequence[int]], stream_backend_port: int) -> Document:
    """The product's bootstrap, its listener once for each contender."""
    backend_port = free_port()
    document = _product(backend_port, 1)
    resources = document["static_resources"]
    listener = resources["listeners"][0]
    backend = resources["clusters"][0]
    listeners = [_contender(listener, BARE, None)]
    clusters = [
        _cluster(backend, _BACKEND, backend_port),
        _cluster(backend, _STREAM_BACKEND, stream_backend_port),
    ]
    for name, ports in processors.items():
        listeners.append(_contender(listener, name, f"{EXT_PROC_CLUSTER}_{name}"))
        clusters.append(_cluster(resources["clusters"][1], f"{EXT_PROC_CLUSTER}_{name}", *ports))
    listeners.append(_backend_listener(backend_port))
    return document | {"static_resources": {"listeners": listeners, "clusters": clusters}}


def _product(backend_port: int, ext_proc_port: int) -> Document:
    options = EnvoyOptions(
        backend_url=f"http://127.0.0.1:{backend_port}",
        listen_host="127.0.0.1",
        listen_port=0,
        admin_port=0,
        ext_proc_port=ext_proc_port,
    )
    return to_plain(build_bootstrap(options))


def _contender(listener: Document, name: str, ext_proc_cluster: str | None) -> Document:
    """The product's listener, with another processor or none."""
    listener = copy.deepcopy(listener)
    listener["name"] = name
    manager = _manager(listener)
    manager["stat_prefix"] = name
    stream = {"path": PATH, "query_parameters": [{"name": "stream", "present_match": True}]}
    plain = {"prefix": "/"}
    manager["route_config"]["virtual_hosts"][0]["routes"] = [
        {"match": match, "route": {"cluster": cluster, "timeout": "0s"}}
        for match, cluster in ((stream, _STREAM_BACKEND), (plain, _BACKEND))
    ]
    if ext_proc_cluster is None:
        manager["http_filters"] = [
            each for each in manager["http_filters"] if each["name"] != FILTER_NAME
        ]
    else:
        config = manager["http_filters"][0]["typed_config"]
        config["grpc_service"]["envoy_grpc"]["cluster_name"] = ext_proc_cluster
    return listener


def _manager(listener: Document) -> Document:
    manager: Document = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def _cluster(cluster: Document, name: str, *ports: int) -> Document:
    """The product's cluster, with an endpoint on each of the ports."""
    cluster = copy.deepcopy(cluster)
    cluster["name"] = name
    assignment = cluster["load_assignment"]
    assignment["cluster_name"] = name
    endpoints = assignment["endpoints"][0]["lb_endpoints"]
    endpoints[:] = [copy.deepcopy(endpoints[0]) for _ in ports]
    for each, port in zip(endpoints, ports, strict=True):
        each["endpoint"]["address"]["socket_address"]["port_value"] = port
    return cluster


def _backend_listener(port: int) -> Document:
    """Answers every request with the same JSON, faster than anything in front of it."""
    any_of = "type.googleapis.com/envoy.extensions.filters"
    answer = {"status": 200, "body": {"inline_string": answer_body()}}
    json_type = {"header": {"key": "content-type", "value": "application/json"}}
    manager = {
        "@type": f"{any_of}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": _BACKEND,
        "generate_request_id": False,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": _BACKEND,
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "direct_response": answer,
                            "response_headers_to_add": [
                                json_type | {"append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
                            ],
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{any_of}.http.router.v3.Router"},
            }
        ],
    }
    network_filter = {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": manager,
    }
    return {
        "name": _BACKEND,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [network_filter]}],
    }


if __name__ == "__main__":
    # What is started as the child becomes Envoy, so that it has the child's tie to its parent.
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606
