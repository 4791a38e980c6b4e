"""
`envoy-tokenpools demo`: a simulated backend, the filter and a real Envoy on loopback, under more traffic than fits.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

import aiohttp
from rich.console import Console
from rich.live import Live

from envoy_tokenpools.clock import SystemClock
from envoy_tokenpools.config import load_config
from envoy_tokenpools.envoyconf.options import EnvoyOptions
from envoy_tokenpools.errors import TokenpoolsError
from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.engine import EngineShape
from envoy_tokenpools.lab.state_view import read_state
from envoy_tokenpools.lab.table import live_table, summary
from envoy_tokenpools.lab.tally import Tally
from envoy_tokenpools.lab.traffic import Workload, run_traffic, tallies_for
from envoy_tokenpools.lab.verdict import Verdict, findings
from envoy_tokenpools.server import Listen
from envoy_tokenpools.standalone import Standalone

MODEL = "demo-model"

ENGINE = EngineShape(slots=16, tokens_per_second=960, prefill_tokens_per_second=8_000)

WORKLOADS = (
    Workload("search-prod", "key-search", clients=6, prompt_words=24, max_tokens=40, think_ms=50),
    Workload("copilot", "key-copilot", clients=5, prompt_words=40, max_tokens=32, think_ms=20),
    Workload("reports", "key-reports", clients=4, prompt_words=120, max_tokens=64),
    Workload("batch", "key-batch", clients=12, prompt_words=60, max_tokens=64),
)
"""27 clients that never rest, for 16 sequences."""

REFRESH_SECONDS = 0.5

PLAIN_WIDTH = 140
"""Columns where the output goes to a file or pipe, which has no width of its own."""

SETTLE_SECONDS = 2.0
"""How long after the last answer the filter may take to show that it holds nothing."""


class DemoFailedError(TokenpoolsError):
    """What the demo promises did not come true."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """
    How to show it.

    Attributes:
        seconds: how long traffic runs.
        plain: no live table.
    """

    seconds: int = 20
    plain: bool = False


async def demo(
    options: DemoOptions,
    *,
    say: Callable[[str], None],
    keep: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """
    Run the demo and print its summary.

    Args:
        options: how to show it.
        say: prints a line.
        keep: if given, everything stays up until it returns.

    Raises:
        DemoFailedError: a promise of a class was broken, or something was not settled.
        EnvoyError: there is no Envoy.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    async with _stack() as (backend, both):
        admin = f"http://127.0.0.1:{both.filter.admin_port}"
        say(
            f"A simulated vLLM with {ENGINE.slots} sequences, a real Envoy at {both.url}, "
            f"and {sum(w.clients for w in WORKLOADS)} clients for {options.seconds} s."
        )
        clock = SystemClock()
        tallies = tallies_for(WORKLOADS, clock)
        traffic = asyncio.create_task(
            run_traffic(
                both.url,
                WORKLOADS,
                model=MODEL,
                duration_ms=options.seconds * 1_000,
                clock=clock,
                rng=random.Random(1),
                tallies=tallies,
            )
        )
        async with aiohttp.ClientSession(admin) as session:
            if options.plain or not console.is_terminal:
                await traffic
            else:
                await _watch(session, traffic, tallies, console)
            state = await _settled_state(session)
        peak = backend.stats.peak_waiting
        console.print(summary(tallies, state, backend_peak_waiting=peak))
        if keep is not None:
            _say_how_to_use(say, both.url, admin)
            await keep()
    broken = [
        finding.text
        for finding in findings(tallies, read_state(state), backend_peak_waiting=peak)
        if finding.verdict is Verdict.BROKEN
    ]
    if broken:
        raise DemoFailedError("; ".join(broken))


@contextlib.asynccontextmanager
async def _stack() -> AsyncIterator[tuple[SimulatedBackend, Standalone]]:
    """Backend, filter and Envoy on free loopback ports; gone afterwards, whatever happens."""
    text = files("envoy_tokenpools.lab").joinpath("demo.yaml").read_text("utf-8")
    backend = SimulatedBackend(ENGINE, Offer(models=(MODEL,)))
    url = await backend.start("127.0.0.1", 0)
    try:
        both = Standalone(
            load_config(text, env={}),
            EnvoyOptions(backend_url=url, listen_host="127.0.0.1", listen_port=0, admin_port=0),
            Listen("127.0.0.1:0", "127.0.0.1", 0),
            envoy_log_level="error",
        )
        await both.start()
        try:
            yield backend, both
        finally:
            await both.stop()
    finally:
        await backend.stop()


async def _watch(
    session: aiohttp.ClientSession,
    traffic: "asyncio.Task[Mapping[str, Tally]]",
    tallies: Mapping[str, Tally],
    console: Console,
) -> None:
    """Show the live table until the traffic ends."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not traffic.done():
            live.update(live_table(tallies, await _state(session)), refresh=True)
            await asyncio.wait({traffic}, timeout=REFRESH_SECONDS)
    await traffic


async def _settled_state(session: aiohttp.ClientSession) -> Mapping[str, object]:
    """The state once nothing is held any more, or as it is when the time for that is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while True:
        state = await _state(session)
        held = any(pool.holds_something for pool in read_state(state).pools)
        if not held or loop.time() > deadline:
            return state
        await asyncio.sleep(0.05)


async def _state(session: aiohttp.ClientSession) -> Mapping[str, object]:
    async with session.get("/state") as response:
        state: Mapping[str, object] = await response.json()
        return state


def _say_how_to_use(say: Callable[[str], None], url: str, admin: str) -> None:
    say(
        f"""
Still up. Try it (keys: {", ".join(workload.key for workload in WORKLOADS)}); stop with Ctrl-C.
  curl -i {url}/v1/chat/completions -H 'authorization: Bearer key-batch' -H 'content-type: application/json' \\
    -d '{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "hello"}}]}}'
  curl {admin}/state       curl {admin}/metrics       a page to look at: {admin}/"""
    )
