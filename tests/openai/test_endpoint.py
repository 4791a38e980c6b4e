"""Paths: which of them are metered, however they are spelled, and what is known of an endpoint by its path."""

from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.openai.endpoint import Dialect, Endpoint, endpoint_of

PATHS = [(path, endpoint) for endpoint in Endpoint for path in endpoint.paths]


@pytest.mark.parametrize(("path", "endpoint"), PATHS)
@pytest.mark.parametrize(
    "spelling",
    [
        "{}",
        "{}?api-version=1",
        "{}?",
        "{}/",
        "{}//",
        "/{}",
        "//{}",
        "{}%2F",
        "{}%0a",
        "{}%20",
        "{}%00",
        "{};v=1",
        "{}#x",
        "{}%3Fx",
        "/.{}",
        "/v1/models/../..{}",
        "/%2e%2e{}",
        "\\{}",
    ],
)
def test_a_metered_path_is_metered_however_it_is_spelled(
    path: str, endpoint: Endpoint, spelling: str
) -> None:
    """What some backend or proxy takes for the endpoint must not pass unmetered."""
    assert endpoint_of(spelling.format(path)) is endpoint


@settings(deadline=None)
@given(st.sampled_from(PATHS), st.data())
def test_percent_encoding_is_no_way_around(
    metered: tuple[str, Endpoint], data: st.DataObject
) -> None:
    """Any characters encoded, once or twice, and any slash doubled."""
    path, endpoint = metered
    spelled = ""
    for character in path:
        encoded = f"%{ord(character):02x}"
        choices = [character, encoded, encoded.upper(), quote(encoded)]
        spelled += data.draw(st.sampled_from(choices))
        if character == "/":
            spelled += data.draw(st.sampled_from(["", "/", "%2F", "./"]))
    assert endpoint_of(spelled) is endpoint


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/messages/batches",
        "/generate_stream",
        "/v1/generate",
        "/v2/score",
        "/score/x",
        "/v1/realtime",
        "/health",
        "/",
        "",
        "*",
        "/v1/chat",
        "/v1/Chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions/x",
        "/v1/chat/completions/../models",
        "/v1/chatcompletions",
        "/v1/responses/resp_1",
        "/v1/models?path=/v1/chat/completions",
        "/v1/chat/completionsx",
    ],
)
def test_other_paths_are_not_metered(path: str) -> None:
    """Only the exact endpoints are, and in their own case."""
    assert endpoint_of(path) is None


def test_a_path_is_decoded_as_often_as_hops_may_do_it() -> None:
    """Three times; nobody decodes a fourth."""
    path = "/v1/messages".replace("m", "%6d")
    for _ in range(3):
        assert endpoint_of(path) is Endpoint.MESSAGES
        path = path.replace("%", "%25")
    assert endpoint_of(path) is None


@settings(deadline=None)
@given(st.text())
def test_no_path_raises(path: str) -> None:
    """Whatever a client asks for, it is an endpoint or none."""
    assert endpoint_of(path) in (None, *Endpoint)
    assert endpoint_of(path, path) in (None, *Endpoint)


@pytest.mark.parametrize(("path", "endpoint"), PATHS)
@pytest.mark.parametrize("prefix", ["/team-a", "team-a", "/team-a/", "//team-a//", "/x/../team-a"])
def test_a_backend_may_live_below_a_prefix(path: str, endpoint: Endpoint, prefix: str) -> None:
    """However the operator wrote it, and however the client spells it."""
    spellings = ["/team-a{}", "/team-a{}?x=1", "//team-a/{}/", "/team%2Da{}", "/./team-a/x/..{}"]
    for spelling in spellings:
        assert endpoint_of(spelling.format(path), prefix) is endpoint
    for outside in [
        "{}",
        "/team-b{}",
        "/team-ab{}",
        "/team-a/team-a{}",
        "/team-a/..{}",
        "/Team-a{}",
    ]:
        assert endpoint_of(outside.format(path), prefix) is None


@pytest.mark.parametrize("prefix", ["", "/", "//", "/.", "/a/.."])
def test_no_prefix_is_the_root(prefix: str) -> None:
    """Then paths are metered as they stand."""
    assert endpoint_of("/v1/messages", prefix) is Endpoint.MESSAGES
    assert endpoint_of("//v1/messages/", prefix) is Endpoint.MESSAGES
    assert endpoint_of("/team-a/v1/messages", prefix) is None


def test_a_prefix_may_look_like_an_endpoint() -> None:
    """Only what is left below it counts."""
    assert endpoint_of("/score/score", "/score") is Endpoint.SCORE
    assert endpoint_of("/score", "/score") is None
    assert endpoint_of("/v1/v1/score", "/v1") is Endpoint.SCORE
    assert endpoint_of("/v1/score", "/v1") is Endpoint.SCORE  # SGLang's and vLLM's other spelling
    assert endpoint_of("/v1/messages", "/v1") is None


def test_no_path_leads_to_two_endpoints() -> None:
    """And the value of an endpoint is the first of its paths."""
    assert len({path for path, _ in PATHS}) == len(PATHS)
    assert all(endpoint.value == endpoint.paths[0] for endpoint in Endpoint)


def test_what_an_endpoint_is_known_for() -> None:
    """Who generates, whose body is read, what is not text, and who speaks Anthropic's dialect."""
    assert {endpoint.name for endpoint in Endpoint if endpoint.decodes} == {
        *("CHAT", "COMPLETIONS", "RESPONSES", "MESSAGES", "GENERATE", "INVOCATIONS"),
    }
    forms = {"TRANSCRIPTIONS", "TRANSLATIONS", "IMAGE_EDITS"}
    assert {endpoint.name for endpoint in Endpoint if not endpoint.reads_body} == forms
    assert {e.name for e in Endpoint if e.flat} == forms | {"SPEECH", "IMAGES"}
    assert {e.name for e in Endpoint if e.dialect is Dialect.ANTHROPIC} == {
        *("MESSAGES", "COUNT_TOKENS"),
    }
