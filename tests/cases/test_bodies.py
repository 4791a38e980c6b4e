"""Bodies that are compressed, or as large as they may be, through the real gate."""

import gzip
import tracemalloc

import pytest

from tests.support.cases import ENCODINGS, FRAME, ROOMY, running
from tests.support.extproc import (
    CHAT,
    HI,
    BodyMode,
    chat,
    immediate_of,
    kind_of,
    post_rh,
    rb,
    request_change,
    with_protocol,
)

HELLO = chat("Hello world")
MAX_BODY = 8 * 1024 * 1024
"""The default of `server.max_body`."""


def encoded(name: str) -> tuple[str, str]:
    """The header of this content coding."""
    return "content-encoding", name


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        *((name, encode(HELLO)) for name, encode in ENCODINGS.items()),
        ("identity", HELLO),
        ("gzip, gzip", gzip.compress(gzip.compress(HELLO))),
    ],
    ids=[*ENCODINGS, "identity", "gzip, gzip"],
)
async def test_a_compressed_body_is_counted_and_goes_on_as_it_is(
    encoding: str, body: bytes
) -> None:
    """Case 11: two tokens of content; neither the bytes nor the header are changed."""
    async with running(ROOMY) as desk:
        stream, reply = await desk.ask(body, CHAT, encoded(encoding))
        assert desk.reserved[0] == 2 + FRAME
        changed, set_headers, removed = request_change(reply)
        assert (changed, set_headers) == (None, {})
        assert "content-encoding" not in removed
        await stream.end()
        await desk.at_rest()


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("compress", b"\x1f\x9d", 415),
        ("gzip, gzip, gzip", gzip.compress(HELLO), 415),
        ("gzip", gzip.compress(HELLO)[:-9], 400),
        ("gzip", HELLO, 400),
        ("gzip", gzip.compress(bytes(100_000_000)), 413),
    ],
    ids=["unknown", "thrice", "truncated", "not-encoded", "bomb"],
)
async def test_what_cannot_be_decoded_is_no_free_pass(
    encoding: str, body: bytes, status: int
) -> None:
    """Case 11: unsupported 415, truncated 400, and 100 MB of zeros 413 within the memory of one body."""
    async with running(ROOMY) as desk:
        tracemalloc.start()
        answered, _, answer = await desk.refuse(body, CHAT, encoded(encoding))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (answered, answer["error"]["type"]) == (status, "invalid_request_error")
        assert peak < 2 * MAX_BODY
        await desk.at_rest()


def of_size(size: int) -> bytes:
    """A chat of exactly this many bytes."""
    body = chat("")
    return body.replace(b'""', b'"' + b"a" * (size - len(body)) + b'"')


@pytest.mark.parametrize("size", [32_768, 32_769, 4_194_104, 4_194_305, 6_133_409])
async def test_no_hidden_limit_below_the_configured_one(size: int) -> None:
    """Case 12: the usual edges of other limits are decided on like any request."""
    body = of_size(size)
    assert len(body) == size
    content = size - len(chat(""))
    async with running(ROOMY) as desk:
        stream = await desk.admit(body)
        assert content // 8 <= desk.reserved[0] - FRAME <= content // 8 + 20
        await stream.end()
        await desk.at_rest()


async def test_above_the_configured_limit_it_is_a_413() -> None:
    """Case 12: one byte more, whether it was declared or not; nothing is reserved."""
    async with running(ROOMY) as desk:
        for headers in ((), (("content-length", str(MAX_BODY + 1)),)):
            status, answer_headers, answer = await desk.refuse(
                of_size(MAX_BODY + 1), CHAT, *headers
            )
            assert (status, answer["error"]["code"]) == (413, "request_too_large")
            assert answer_headers["content-type"] == "application/json"
        await desk.at_rest()


async def test_a_megabyte_in_64_pieces_is_one_request() -> None:
    """Case 12: streamed, decided on with its last piece; a body that grows too large is refused in the middle."""
    body = of_size(1_048_576)
    pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    async with running(ROOMY) as desk:
        stream = desk.stream()
        await stream.say(with_protocol(post_rh(), BodyMode.STREAMED, BodyMode.STREAMED))
        replies = await stream.say(*(rb(piece, eos=piece is pieces[-1]) for piece in pieces))
        assert {kind_of(reply) for reply in replies} == {"request_body"}
        assert len(desk.observer.decisions) == 1
        assert desk.reserved[0] >= len(body) // 8
        await stream.end()
    async with running(f"server: {{max_body: 512Ki}}\n{ROOMY}") as desk:
        stream = desk.stream()
        await stream.say(with_protocol(post_rh(), BodyMode.STREAMED, BodyMode.STREAMED))
        *_, last = await stream.say(*(rb(piece, eos=False) for piece in pieces[:33]))
        assert immediate_of(last)[0] == 413
        await stream.end()
        await desk.at_rest()


async def test_a_small_request_is_not_touched() -> None:
    """Case 45: where nothing is changed there is neither a body nor a header to be set."""
    async with running(ROOMY) as desk:
        stream, reply = await desk.ask(HI)
        assert request_change(reply)[:2] == (None, {})
        await stream.end()


PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
ASKING = PLAIN[:-1] + b',"stream_options":{"include_usage":true}}'


async def test_a_changed_body_comes_with_its_length() -> None:
    """Case 45: 71 bytes become 111, in one reply with their length; nothing of the connection's is ever set."""
    assert (len(PLAIN), len(ASKING)) == (71, 111)
    async with running(ROOMY) as desk:
        stream, reply = await desk.ask(PLAIN)
        body, headers, removed = request_change(reply)
        assert (body, headers) == (ASKING, {"content-length": b"111"})
        assert not {"transfer-encoding", "connection", "host", "content-length"} & set(removed)
        await stream.end()
        streamed = desk.stream()
        await streamed.say(with_protocol(post_rh(), BodyMode.STREAMED, BodyMode.STREAMED))
        (reply,) = await streamed.say(rb(PLAIN))
        assert request_change(reply)[:2] == (None, {})
        await streamed.end()
        await desk.at_rest()


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ('"stream":true', True),
        ('"stream":true,"stream_options":{"include_usage":false}', False),
        ('"stream":true,"stream_options":{}', False),
        ('"stream":false', False),
        ('"n":1', False),
        ('"stream":true,"stream_options":null', False),
    ],
    ids="abcdef",
)
async def test_usage_is_only_asked_for_where_the_client_is_silent(
    said: str, *, changes: bool
) -> None:
    """Case 28: a stream without `stream_options` alone is changed; what a client says about them stands."""
    async with running(ROOMY) as desk:
        stream, reply = await desk.ask(HI[:-1] + f",{said}}}".encode())
        assert (request_change(reply)[0] is not None) is changes
        await stream.end()
    async with running(ROOMY.replace("kv_bytes", "inject_usage: false\n    kv_bytes")) as desk:
        stream, reply = await desk.ask(HI[:-1] + f",{said}}}".encode())
        assert request_change(reply)[0] is None
        await stream.end()
