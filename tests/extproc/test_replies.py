"""The replies are what the full types would send."""

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_filter
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as envoy_type
from hypothesis import given, settings
from hypothesis import strategies as st

from envoy_tokenpools.extproc import replies
from envoy_tokenpools.openai.answers import Answer
from tests.support.extproc import BodyMode, Response, kind_of

HeaderMode = ext_proc_filter.ProcessingModeHeaderSendMode

LATIN_1 = st.text(st.characters(max_codepoint=255), max_size=300)
HEADERS = st.lists(
    st.tuples(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=150),
        LATIN_1,
    ),
    max_size=6,
)
STATUSES = st.sampled_from([code for code in envoy_type.StatusCode if code.value >= 200])


def options(headers: list[tuple[str, str]]) -> list[core.HeaderValueOption]:
    """Headers that are set, whatever was there before."""
    return [
        core.HeaderValueOption(
            header=core.HeaderValue(key=name, raw_value=value.encode("latin-1")),
            append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers
    ]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (replies.CONTINUE_REQUEST_HEADERS, "request_headers"),
        (replies.CONTINUE_REQUEST_BODY, "request_body"),
        (replies.CONTINUE_REQUEST_TRAILERS, "request_trailers"),
        (replies.CONTINUE_RESPONSE_HEADERS, "response_headers"),
        (replies.CONTINUE_RESPONSE_BODY, "response_body"),
        (replies.CONTINUE_RESPONSE_TRAILERS, "response_trailers"),
        (replies.PASS_UNMETERED, "request_headers"),
        (replies.BUFFER_REQUEST_BODY, "request_headers"),
        (replies.request_body_with(None), "request_body"),
        (replies.request_headers_unread(remove_headers=()), "request_headers"),
        (replies.response_body_with(b""), "response_body"),
        (replies.response_headers_with([]), "response_headers"),
        (replies.immediate(Answer(429, (), b"")), "immediate_response"),
    ],
)
def test_every_reply_is_of_its_kind(reply: bytes, kind: str) -> None:
    """Envoy ends an exchange whose reply is of another kind than the message."""
    assert kind_of(Response.parse(reply)) == kind


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (replies.CONTINUE_REQUEST_HEADERS, "request_headers"),
        (replies.CONTINUE_RESPONSE_HEADERS, "response_headers"),
        (replies.CONTINUE_REQUEST_BODY, "request_body"),
        (replies.CONTINUE_RESPONSE_BODY, "response_body"),
    ],
)
def test_a_continue_changes_nothing(reply: bytes, part: str) -> None:
    """No mutation, no other status, no mode."""
    parsed = Response.parse(reply)
    assert getattr(parsed, part).response == ext_proc.CommonResponse()
    assert parsed.mode_override is None
    assert parsed.dynamic_metadata is None


def test_trailers_are_not_changed() -> None:
    """Neither those of the request nor those of the response."""
    request = Response.parse(replies.CONTINUE_REQUEST_TRAILERS).request_trailers
    response = Response.parse(replies.CONTINUE_RESPONSE_TRAILERS).response_trailers
    assert request == response == ext_proc.TrailersResponse()


def test_an_unmetered_request_is_let_go_whole() -> None:
    """Envoy is asked for nothing more: no body, no response, no trailers."""
    parsed = Response.parse(replies.PASS_UNMETERED)
    assert parsed.request_headers == ext_proc.HeadersResponse(response=ext_proc.CommonResponse())
    assert parsed.mode_override == ext_proc_filter.ProcessingMode(
        request_body_mode=BodyMode.NONE,
        request_trailer_mode=HeaderMode.SKIP,
        response_header_mode=HeaderMode.SKIP,
        response_body_mode=BodyMode.NONE,
        response_trailer_mode=HeaderMode.SKIP,
    )


def test_a_body_that_was_kept_back_is_asked_for() -> None:
    """The modes of the portable configuration, for this request."""
    parsed = Response.parse(replies.BUFFER_REQUEST_BODY)
    assert parsed.request_headers == ext_proc.HeadersResponse(response=ext_proc.CommonResponse())
    assert parsed.mode_override == ext_proc_filter.ProcessingMode(
        request_body_mode=BodyMode.BUFFERED,
        response_header_mode=HeaderMode.SEND,
        response_body_mode=BodyMode.STREAMED,
    )


def test_a_request_decided_on_its_head_keeps_its_body_from_us() -> None:
    """Its response is sent, its body is not."""
    parsed = Response.parse(replies.request_headers_unread(remove_headers=["x-a"]))
    assert parsed.request_headers == ext_proc.HeadersResponse(
        response=ext_proc.CommonResponse(
            header_mutation=ext_proc.HeaderMutation(remove_headers=["x-a"])
        )
    )
    assert parsed.mode_override == ext_proc_filter.ProcessingMode(
        request_body_mode=BodyMode.NONE,
        response_header_mode=HeaderMode.SEND,
        response_body_mode=BodyMode.STREAMED,
    )


@settings(deadline=None)
@given(HEADERS, st.none() | st.binary(max_size=300))
def test_a_request_body_reply_is_encoded_as_the_full_type_does(
    headers: list[tuple[str, str]], body: bytes | None
) -> None:
    """Headers set and removed, and another body or none."""
    removed = [name for name, _ in headers]
    parsed = Response.parse(
        replies.request_body_with(body, set_headers=headers, remove_headers=removed)
    )
    assert parsed.request_body is not None
    assert parsed.request_body.response == ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(
            set_headers=options(headers), remove_headers=removed
        ),
        body_mutation=None if body is None else mutation(body),
    )


@pytest.mark.parametrize("body", [b"", b"x", b"y" * 300])
def test_a_response_body_reply_replaces_the_piece(body: bytes) -> None:
    """An empty piece is cleared: an absent one would leave the backend's."""
    parsed = Response.parse(replies.response_body_with(body))
    assert parsed.response_body == ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(body_mutation=mutation(body))
    )


def mutation(body: bytes) -> ext_proc.BodyMutation:
    """The full type for another body."""
    return ext_proc.BodyMutation(body=body) if body else ext_proc.BodyMutation(clear_body=True)


@settings(deadline=None)
@given(HEADERS)
def test_response_headers_are_encoded_as_the_full_type_does(headers: list[tuple[str, str]]) -> None:
    """Same message, and same bytes but for empty fields, which we write out."""
    full = Response(
        response_headers=ext_proc.HeadersResponse(
            response=ext_proc.CommonResponse(
                header_mutation=ext_proc.HeaderMutation(set_headers=options(headers))
            )
        )
    )
    encoded = replies.response_headers_with(headers)
    assert Response.parse(encoded) == full
    if all(value for _, value in headers):
        assert encoded == bytes(full)


@settings(deadline=None)
@given(STATUSES, HEADERS, st.binary(max_size=300))
def test_an_answer_is_encoded_as_the_full_type_does(
    status: envoy_type.StatusCode, headers: list[tuple[str, str]], body: bytes
) -> None:
    """Status, headers, body, and the detail by which access logs know whose answer it was."""
    full = Response(
        immediate_response=ext_proc.ImmediateResponse(
            status=envoy_type.HttpStatus(code=status),
            headers=ext_proc.HeaderMutation(set_headers=options(headers)),
            body=body,
            details="tokenpools",
        )
    )
    assert Response.parse(replies.immediate(Answer(status.value, tuple(headers), body))) == full


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_152])
def test_lengths_of_any_size_are_encoded(size: int) -> None:
    """At every border of a varint."""
    answer = Answer(400, (("x", "v" * size),), b"b" * size)
    response = Response.parse(replies.immediate(answer)).immediate_response
    assert response is not None
    assert response.body == answer.body
    assert response.headers is not None
    header = response.headers.set_headers[0].header
    assert header is not None
    assert header.raw_value == b"v" * size
