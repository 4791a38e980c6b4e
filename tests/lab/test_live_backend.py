"""Backends of a real-time run."""

import dataclasses

from envoy_tokenpools.lab.backend import SimulatedBackend
from envoy_tokenpools.lab.dialect import Offer
from envoy_tokenpools.lab.live_backend import Burden, existing, read_burden, simulated
from envoy_tokenpools.lab.scenario_file import shipped_scenarios

SCENARIO = shipped_scenarios("protection")[0]

EXPOSITION = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 12.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 99.0
vllm:generation_tokens_total{engine="0"} 7
"""


def test_the_queue_is_read_from_vllms_metrics() -> None:
    """All engines together; what merely begins alike is something else; nothing is not zero."""
    assert read_burden(EXPOSITION) == Burden(16, 3)
    assert read_burden("vllm:num_requests_waiting 2\n") == Burden(None, 2)
    assert read_burden("vllm:num_requests_waiting nonsense\n") == Burden()


async def test_the_simulated_one_has_the_scenarios_engine() -> None:
    """It tells its burden without a request, and loses slots when told."""
    async with simulated(SCENARIO) as backend:
        assert await backend.burden() == Burden(0, 0)
        backend.resize(8)
        assert backend.url.startswith("http://127.0.0.1:")


async def test_a_small_engine_offers_no_longer_sequences_than_it_holds() -> None:
    """Its KV cache bounds the model's length."""
    engine = dataclasses.replace(SCENARIO.engine, kv_tokens=1_000)
    async with simulated(dataclasses.replace(SCENARIO, engine=engine)) as backend:
        assert await backend.burden() == Burden(0, 0)


async def test_an_existing_one_is_asked_over_http() -> None:
    """Without metrics, or while it is away, it tells nothing, and that is no failure."""
    server = SimulatedBackend(SCENARIO.engine, Offer(("tiny",)))
    url = await server.start()
    try:
        async with existing(url + "/") as backend:
            assert await backend.burden() == Burden(0, 0)
            backend.resize(1)
        async with existing(url + "/absent") as backend:
            assert await backend.burden() == Burden()
    finally:
        await server.stop()
    async with existing(url) as backend:
        assert await backend.burden() == Burden()
