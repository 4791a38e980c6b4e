"""Who pays, when clients say that they are somebody else, through the real gate."""

import random

import pytest
from envoy_data_plane.google.protobuf import Value

from envoy_tokenpools.core.pool import ServiceClass
from tests.support.cases import Filter, running
from tests.support.extproc import (
    CHAT,
    HI,
    KEY,
    Message,
    Response,
    immediate_of,
    post_rh,
    rb,
    verified,
)

JWT = "envoy.filters.http.jwt_authn"

BY_CLAIM = """
identity: {claim: tenant}
pools:
  - name: pool
    models: [m]
    capacity: {tokens_per_second: 10M, kv_cache: 64Gi, concurrency: 10000}
    kv_bytes_per_token: 1Ki
    entitlements:
      - {name: low, class: spot, keys: [{claim: t-low}, {plain: key-a}]}
      - name: vip
        class: guaranteed
        baseline: {tokens_per_second: 1M, kv_cache: 1Gi, concurrency: 10}
        keys: [{claim: vip}, {plain: vip}]
"""
"""Tenants are known by a claim that Envoy verified; both have a key as well."""

HEADER = "x-tenant-id"


def head(*headers: tuple[str, str | bytes]) -> Message:
    """The head of a chat whose token Envoy verified as that of `t-low`."""
    return verified(post_rh(CHAT, *headers, key=None), JWT, tenant=Value(string_value="t-low"))


async def decided(desk: Filter, *headers: tuple[str, str | bytes]) -> Response:
    """The last reply to a chat with these headers, which is over afterwards."""
    stream = desk.stream()
    (reply,) = await stream.say(head(*headers))
    if reply.immediate_response is None:
        (reply,) = await stream.say(rb(HI))
    await stream.end()
    await desk.settled()
    return reply


@pytest.mark.parametrize(
    "headers",
    [
        [(HEADER, "vip")],
        [(HEADER, "vip"), (HEADER, "t-low")],
        [(HEADER, "vip, t-low")],
        [("X-Tenant-ID ", "vip")],
        [("x-priority-class", "critical")],
        [("x-tokenpools-entitlement", "vip")],
        [(HEADER, "v" * 1_000_000)],
        [(HEADER, b"vip\r\nauthorization: Bearer vip")],
        [(HEADER, b"vip\0")],
        [(HEADER, "}{vip:")],
    ],
    ids=["a", "b", "c", "d", "f", "ours", "g-long", "g-crlf", "g-nul", "g-braces"],
)
async def test_no_header_makes_somebody_of_a_verified_caller(
    headers: list[tuple[str, str | bytes]],
) -> None:
    """Case 13: whatever is written into headers, the claim that Envoy verified decides who pays, in which class."""
    async with running(BY_CLAIM) as desk:
        reply = await decided(desk, *headers)
        assert reply.immediate_response is None
        assert (desk.decided.entitlement, desk.decided.service_class) == ("low", ServiceClass.SPOT)
        assert desk.last_settled.entitlement == "low"
        await desk.at_rest()


async def test_ten_thousand_names_are_one_tenant() -> None:
    """Case 13: random values of a header make no books, no averages and no series."""
    random_names = random.Random(13)
    async with running(BY_CLAIM) as desk:
        await decided(desk)
        before = await desk.store.snapshot("pool")
        live = next(iter(desk.gate.house.pools()))
        learned = (set(live.outputs), set(live.ratios))
        named, body = bytes(head((HEADER, "NAME" * 4))), bytes(rb(HI))
        for _ in range(10_000):
            name = random_names.randbytes(8).hex().encode()
            stream = desk.stream()
            for message in (named.replace(b"NAME" * 4, name), body):
                stream.begin(message)
                await stream.heard()
            await stream.end()
            desk.forget()
        await desk.settled()
        after = await desk.store.snapshot("pool")
        assert set(after.accounts) == set(before.accounts) == {"low", "vip"}
        assert (set(live.outputs), set(live.ratios)) == learned
        assert {event.entitlement for event in desk.observer.decisions} == {"low"}
        await desk.at_rest()


async def test_a_key_that_is_not_a_claim_does_not_outrank_one() -> None:
    """Case 13: a verified caller who also sends somebody's key is charged by its claim."""
    async with running(BY_CLAIM) as desk:
        await decided(desk, ("authorization", "Bearer vip"))
        assert desk.decided.entitlement == "low"


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer vip")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY},Bearer vip")],
        [("authorization", f"Bearer {KEY}, bearer vip")],
        [("x-api-key", KEY), ("x-api-key", "vip")],
        [("api-key", "vip"), ("api-key", KEY)],
    ],
)
async def test_an_identity_that_comes_twice_is_refused(headers: list[tuple[str, str]]) -> None:
    """Case 13: also as the one value with a comma that Envoy makes of two; neither the first nor the last wins."""
    async with running(BY_CLAIM) as desk:
        stream = desk.stream()
        (reply,) = await stream.say(post_rh(CHAT, *headers, key=None))
        status, _, answer = immediate_of(reply)
        assert (status, answer["error"]["code"]) == (400, "duplicate_header")
        await stream.end()
        await desk.at_rest()
