"""
The filter as a process of its own behind a real Envoy, so that its memory, threads and files are its own.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from envoy_tokenpools.envoyconf.child import EnvoyChild
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from tests.support.processes import command
from tests.support.scrapes import parse_text


@dataclass(frozen=True, slots=True)
class Separate:
    """
    A running filter and its Envoy, on loopback.

    Attributes:
        process: the filter.
        ext_proc_port: where its gRPC server listens.
        admin_url: of the filter.
        port: where Envoy listens.
    """

    process: psutil.Process
    ext_proc_port: int
    admin_url: str
    port: int

    async def state(self) -> dict[str, Any]:
        """The first pool of `/state`."""
        pool: dict[str, Any] = json.loads(await self._get("/state"))["pools"][0]
        return pool

    async def total(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric that carry these labels."""
        return sum(
            sample.value
            for family in parse_text(await self._get("/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def _get(self, path: str) -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(self.admin_url + path)).text


@contextlib.asynccontextmanager
async def separate(config: str, backend_url: str, folder: Path) -> AsyncIterator[Separate]:
    """Both in front of `backend_url`, ended at the end; the configuration is written into `folder`."""
    file = folder / "pools.yaml"
    file.write_text(config)
    addresses = ("--ext-proc", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    async with command("serve", "--config", file, *addresses) as filter_:
        line = json.loads(await filter_.line_with('"serving"'))
        options = EnvoyOptions(
            backend_url=backend_url,
            listen_host="127.0.0.1",
            listen_port=0,
            ext_proc_port=line["port"],
            admin_port=0,
        )
        async with EnvoyChild(options, log_level="error") as envoy:
            yield Separate(
                process=psutil.Process(filter_.process.pid),
                ext_proc_port=line["port"],
                admin_url=f"http://127.0.0.1:{line['admin_port']}",
                port=envoy.listen_port,
            )
