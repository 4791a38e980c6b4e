"""
Scripts for `exchanges`: usual conversations, told in the bytes that it reads, with accidents in most of them.
"""

import random

from tests.fuzz.envoy_messages import MESSAGES, USUAL, numbers_of

_SAY, _BODY, _HEADERS, _ANYTHING, _CANCEL, _CLOSE = 0, 40, 46, 49, 50, 52
_PASS_TIME, _HOLD_COUNTING, _SLOW_STORE, _FAILING_STORE, _RELOAD, _STOP = 53, 56, 58, 60, 62, 63
"""The actions, each the first of its codes."""

_USUAL_RESPONSE_HEADERS = numbers_of(2)[:3]
_RESPONSE_BODIES = numbers_of(3)
_ACCIDENTS = (
    *(_CANCEL, _CANCEL, _CLOSE, _PASS_TIME, _PASS_TIME, _HOLD_COUNTING, _HOLD_COUNTING),
    *(_SLOW_STORE, _SLOW_STORE, _FAILING_STORE, _RELOAD, _STOP, _ANYTHING, _HEADERS),
)


def exchange_script(rng: random.Random) -> bytes:
    """One to four conversations, mingled."""
    streams = rng.randrange(4)
    # How the streams end: half of them as clients that stay make them.
    settings = rng.choice((0, 0, 0, 1, 1, 2, 3))
    head = (rng.choice((0, 0, 1, 1, 2, 3, 4, 5, 6, 7)), streams << 2 | settings, rng.randrange(16))
    told = [_conversation(rng, number) for number in range(streams + 1)]
    steps: list[bytes] = []
    while any(told):
        speaker = rng.choice([one for one in told if one])
        steps.append(speaker.pop(0))
        if rng.random() < 0.08:
            steps.append(_accident(rng, rng.randrange(streams + 1)))
    return bytes(head) + b"".join(steps)


def _conversation(rng: random.Random, stream: int) -> list[bytes]:
    """What Envoy says of one request; whoever is in a hurry leaves before its end."""
    steps = []
    headers, body = rng.choice(USUAL)
    if rng.random() < 0.15:
        headers = rng.choice(numbers_of(0))
    if rng.random() < 0.15:
        body = rng.choice(numbers_of(1))
    if rng.random() < 0.95:
        steps.append(_say(rng, stream, headers))
    if rng.random() < 0.95:
        steps.append(_say(rng, stream, body))
    if rng.random() < 0.9:
        heads = _USUAL_RESPONSE_HEADERS if rng.random() < 0.7 else numbers_of(2)
        steps.append(_say(rng, stream, rng.choice(heads)))
    pieces = rng.randrange(6)
    steps += [_say(rng, stream, rng.choice(_RESPONSE_BODIES)) for _ in range(pieces)]
    if rng.random() < 0.3:
        piece = rng.choice((b"data: {}\n\n", b"data: [DONE]\n\n", b'{"usage":{"prompt_tokens":1}}'))
        code, turns = stream << 6 | _BODY, rng.randrange(4)
        steps.append(bytes((code, rng.choice((0, 2)), len(piece), *piece, turns)))
    if rng.random() < 0.1:
        steps.append(_say(rng, stream, rng.randrange(len(MESSAGES))))
    return steps[: rng.randint(1, len(steps))] if steps and rng.random() < 0.3 else steps


def _say(rng: random.Random, stream: int, number: int) -> bytes:
    return bytes((stream << 6 | _SAY, number, rng.choice((0, 0, 1, 2, 3, 3))))


def _accident(rng: random.Random, stream: int) -> bytes:
    action = rng.choice(_ACCIDENTS)
    code = stream << 6 | action
    turns = rng.randrange(4)
    if action in (_CANCEL, _CLOSE):
        return bytes((code, turns))
    if action == _ANYTHING:
        data = bytearray(rng.choice(MESSAGES)[:200])
        data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes((code, len(data), *data, turns))
    if action == _HEADERS:
        pairs = []
        for _ in range(3):
            value = rng.choice(
                (b"Bearer key-a", b"/v1/completions", b"POST", b"gzip", b"\xff", b"7")
            )
            pairs += [rng.randrange(10), len(value), *value]
        return bytes((code, rng.randrange(4), *pairs, turns))
    return bytes((code, rng.randrange(16), turns))
