"""
One HTTP request as Envoy tells it: messages in, actions out. No I/O, no clock, no waiting.

Every kind of message is optional, so that one server serves every filter configuration: headers sent or skipped,
attributes on the first message of a direction, bodies buffered or streamed, trailers or none.

    OPENING ──────── not a metered request ────────▶ PASSING
       │ identified
    COLLECTING ───── refused (4xx) ────────────────▶ ANSWERED
       │ body whole                                     ▲
    DECIDING ─────── `refused`, `rejected` ─────────────┘
       │ `admitted`
    ADMITTED ─────── response ended, or stream did ▶ SETTLED

Rules:

1. A message gets exactly one reply of its own kind, in its turn; none in observability mode. The reply is the last of
   its actions: sending may be cancelled, and what must happen must have happened by then.
2. `Settle` is emitted once for each `admitted`, whatever comes or does not come after it.
3. Nothing is admitted before the whole body was read; an exchange that ends before that held nothing.
"""

import enum
from dataclasses import dataclass

from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.incoming import Head, head_from_attributes, head_from_headers
from envoy_tokenpools.extproc.wire import (
    BUFFERED,
    NONE,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    attributes_of,
    headers_of,
)
from envoy_tokenpools.gate.answering import rate_limits
from envoy_tokenpools.gate.directory import Directory, Rights
from envoy_tokenpools.gate.order import Admitted, Order, Outcome, fingerprint_of
from envoy_tokenpools.observer import Decided, Ending, FirstToken
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.answers import (
    Answer,
    error_answer,
    rate_limit_headers,
    unavailable_answer,
)
from envoy_tokenpools.openai.request import parse_request
from envoy_tokenpools.openai.usage import UsageMeter, meter_for

RESPONSE_HEADERS = frozenset((b":status", b"content-encoding", b"content-type"))
"""Response headers that are decoded."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Send these bytes to Envoy."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Admit:
    """Ask the gate; the exchange waits for `admitted`, `refused` or `rejected`."""

    order: Order


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle the lease."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the observer."""

    event: Decided | FirstToken


Action = Reply | Admit | Settle | Tell
Actions = tuple[Action, ...]


class Phase(enum.Enum):
    """Where an exchange is; see the module's picture."""

    OPENING = enum.auto()
    COLLECTING = enum.auto()
    DECIDING = enum.auto()
    ADMITTED = enum.auto()
    SETTLED = enum.auto()
    PASSING = enum.auto()
    ANSWERED = enum.auto()


_REQUEST_HEADERS = (Reply(replies.CONTINUE_REQUEST_HEADERS),)
_REQUEST_BODY = (Reply(replies.CONTINUE_REQUEST_BODY),)
_BUFFER_REQUEST_BODY = (Reply(replies.BUFFER_REQUEST_BODY),)
_REQUEST_TRAILERS = (Reply(replies.CONTINUE_REQUEST_TRAILERS),)
_RESPONSE_HEADERS = (Reply(replies.CONTINUE_RESPONSE_HEADERS),)
_RESPONSE_BODY = (Reply(replies.CONTINUE_RESPONSE_BODY),)
_RESPONSE_TRAILERS = (Reply(replies.CONTINUE_RESPONSE_TRAILERS),)
_UNMETERED = Tell(Decided(Decision.BYPASSED, reason="unmetered"))
_BODY_NOT_SENT = Tell(Decided(Decision.BYPASSED, reason="body_not_sent"))


class Exchange:
    """The state of one request; feed it with `receive`, and end it with `finish`."""

    def __init__(self, directory: Directory, *, max_body_bytes: int) -> None:
        """
        Begin; nothing is held.

        Args:
            directory: identifies callers and finds pools.
            max_body_bytes: a larger request body is refused with 413.
        """
        self._directory = directory
        self._max_body_bytes = max_body_bytes
        self._phase = Phase.OPENING
        self._observes = False
        self._body_mode: int | None = None
        self._started_us = 0
        self._head: Head | None = None
        self._rights: Rights = ()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._admit_reply = _REQUEST_BODY
        self._admitted: Admitted | None = None
        self._order: Order | None = None
        self._status: int | None = None
        self._meter: UsageMeter | None = None
        self._first_token_seen = False

    def receive(self, message: ProcessingRequest, now_us: int) -> Actions:
        """Take the next message from Envoy."""
        if message.observability_mode:
            self._observes = True
        if message.protocol_config is not None:
            self._body_mode = message.protocol_config.request_body_mode
        try:
            actions = self._dispatch(message, now_us)
        except RequestError as error:
            actions = self.rejected(error)
        if self._observes:
            return tuple(action for action in actions if not isinstance(action, Reply))
        return actions

    def admitted(self, verdict: Admitted) -> Actions:
        """The gate admitted the order: let the request go on."""
        self._phase = Phase.ADMITTED
        self._admitted = verdict
        return () if self._observes else self._admit_reply

    def refused(self, answer: Answer) -> Actions:
        """The gate refused the order: answer the client."""
        self._phase = Phase.ANSWERED
        self._body.clear()
        return () if self._observes else (Reply(replies.immediate(answer)),)

    def rejected(self, error: RequestError) -> Actions:
        """The request cannot be served, whatever the load: answer the client, and tell."""
        order = self._order
        event = Decided(
            Decision.REJECTED,
            reason=error.code,
            pool=order.pool.name if order is not None else "",
            entitlement=order.entitlement.name if order is not None else "",
            service_class=order.entitlement.service_class if order is not None else None,
        )
        return (Tell(event), *self.refused(error_answer(error)))

    def finish(self, *, shutting_down: bool = False) -> Actions:
        """
        The gRPC stream is over, for whatever reason.

        How it was closed says little (a good end often looks like a cancellation), so that what was seen decides.
        """
        if self._phase is not Phase.ADMITTED:
            return ()
        if shutting_down:
            return self._settle(Ending.TRUNCATED)
        return self._settle(Ending.CLIENT_GONE)

    # ------------------------------------------------------------------ request

    def _dispatch(self, message: ProcessingRequest, now_us: int) -> Actions:
        actions: Actions = ()
        if message.response_body is not None:
            actions = self._response_body(message.response_body, message, now_us)
        elif message.request_headers is not None:
            actions = self._request_headers(message.request_headers, now_us)
        elif message.request_body is not None:
            actions = self._request_body(message.request_body, message, now_us)
        elif message.response_headers is not None:
            actions = self._response_headers(message.response_headers)
        elif message.request_trailers is not None:
            actions = self._request_trailers()
        elif message.response_trailers is not None:
            actions = (*self._response_ended(), *_RESPONSE_TRAILERS)
        return actions

    def _request_headers(self, message: HttpHeaders, now_us: int) -> Actions:
        if self._phase is not Phase.OPENING:
            return _REQUEST_HEADERS
        head = head_from_headers(message)
        if head.endpoint is None:
            return self._pass((Reply(replies.PASS_UNMETERED),))
        self._open(head, now_us)
        if message.end_of_stream:
            raise RequestError(400, "invalid_json", "The request has no body.")
        if self._body_mode == NONE:
            self._body_mode = BUFFERED
            return _BUFFER_REQUEST_BODY
        return _REQUEST_HEADERS

    def _request_body(self, message: HttpBody, whole: ProcessingRequest, now_us: int) -> Actions:
        if self._phase is Phase.OPENING:
            head = head_from_attributes(attributes_of(whole.attributes))
            if head is None:
                return self.refused(_MISCONFIGURED)
            if head.endpoint is None:
                return self._pass(_REQUEST_BODY)
            self._open(head, now_us)
        if self._phase is not Phase.COLLECTING:
            return _REQUEST_BODY
        self._body_bytes += len(message.body)
        if self._body_bytes > self._max_body_bytes:
            raise self._too_large()
        self._body.append(message.body)
        # A request with trailers has no end of stream on its body: the buffered one is whole nevertheless.
        if message.end_of_stream or self._body_mode == BUFFERED:
            return self._decide(_REQUEST_BODY)
        return _REQUEST_BODY

    def _request_trailers(self) -> Actions:
        if self._phase is Phase.COLLECTING:
            return self._decide(_REQUEST_TRAILERS)
        return _REQUEST_TRAILERS

    def _open(self, head: Head, now_us: int) -> None:
        """Identify the caller, and refuse what the head alone rules out."""
        self._head = head
        self._started_us = now_us
        self._rights = self._directory.identify(head.credential)
        if head.content_encoding not in ("", "identity"):
            raise RequestError(
                415,
                "unsupported_content_encoding",
                f"A request body in the encoding {head.content_encoding[:32]!r} cannot be read; "
                "send it as it is.",
            )
        if head.content_length is not None and head.content_length > self._max_body_bytes:
            raise self._too_large()
        self._phase = Phase.COLLECTING

    def _pass(self, reply: Actions) -> Actions:
        self._phase = Phase.PASSING
        return (_UNMETERED, *reply)

    def _too_large(self) -> RequestError:
        return RequestError(
            413,
            "request_too_large",
            f"The request body is larger than the {self._max_body_bytes} bytes that are read here.",
        )

    def _decide(self, admit_reply: tuple[Reply]) -> Actions:
        """The body is whole: read it, find its pool, and ask the gate."""
        head = self._head
        if head is None or head.endpoint is None:
            raise AssertionError("unreachable: collecting without a metered head")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        facts = parse_request(head.endpoint, body)
        pool, entitlement = self._directory.resolve(self._rights, facts.model)
        self._order = Order(
            pool=pool,
            entitlement=entitlement,
            facts=facts,
            fingerprint=fingerprint_of(body),
            is_retry=head.is_retry,
            arrived_us=self._started_us,
            enforce=not self._observes,
        )
        self._phase = Phase.DECIDING
        self._admit_reply = admit_reply
        if admit_reply is _REQUEST_BODY:
            self._admit_reply = _ADMIT_REQUEST_BODY
        return (Admit(self._order),)

    # ------------------------------------------------------------------ response

    def _response_headers(self, message: HttpHeaders) -> Actions:
        if self._phase is Phase.COLLECTING:
            # The request went upstream without its body ever having been shown to us.
            self._phase = Phase.PASSING
            return (_BODY_NOT_SENT, *_RESPONSE_HEADERS)
        if self._phase is not Phase.ADMITTED or self._admitted is None:
            return _RESPONSE_HEADERS
        headers = dict(headers_of(message, RESPONSE_HEADERS))
        self._begin_response(
            headers.get(b":status", b""),
            headers.get(b"content-type", b""),
            headers.get(b"content-encoding", b""),
        )
        order = self._admitted.order
        limits = rate_limits(self._admitted.balance, order.pool)
        reply = Reply(replies.response_headers_with(rate_limit_headers(limits)))
        if message.end_of_stream:
            return (*self._response_ended(), reply)
        return (reply,)

    def _begin_response(self, status: bytes, content_type: bytes, encoding: bytes) -> None:
        self._status = int(status) if status.isdigit() else 0
        if encoding.strip().lower() in (b"", b"identity"):
            self._meter = meter_for(content_type.decode("latin-1"))

    def _response_body(self, message: HttpBody, whole: ProcessingRequest, now_us: int) -> Actions:
        if self._phase is not Phase.ADMITTED or self._admitted is None:
            return _RESPONSE_BODY
        if self._status is None:
            self._begin_without_headers(whole, self._admitted)
        actions: Actions = _RESPONSE_BODY
        meter = self._meter
        if meter is not None and message.body:
            meter.feed(message.body)
            if not self._first_token_seen and meter.first_output:
                self._first_token_seen = True
                actions = (self._first_token(self._admitted, now_us), *actions)
        if message.end_of_stream:
            return (*self._response_ended(), *actions)
        return actions

    def _begin_without_headers(self, whole: ProcessingRequest, admitted: Admitted) -> None:
        """Response headers were skipped: attributes tell, or else the request's own wish for a stream."""
        attributes = attributes_of(whole.attributes)
        wished = b"text/event-stream" if admitted.order.facts.stream else b"application/json"
        self._begin_response(
            b"%d" % int(attributes.numbers.get("response.code", 200)),
            attributes.texts.get("response.headers['content-type']", wished),
            attributes.texts.get("response.headers['content-encoding']", b""),
        )

    @staticmethod
    def _first_token(admitted: Admitted, now_us: int) -> Tell:
        order = admitted.order
        elapsed_ms = max(0, now_us - order.arrived_us) // 1_000
        return Tell(FirstToken(order.pool.name, order.entitlement.service_class, elapsed_ms))

    def _response_ended(self) -> Actions:
        if self._phase is not Phase.ADMITTED:
            return ()
        return self._settle(Ending.COMPLETED)

    def _settle(self, seen: Ending) -> Actions:
        """
        Settle, naming the ending by what was seen.

        `seen` is COMPLETED where the body ended, else why it did not go on.
        """
        if self._admitted is None:
            raise AssertionError("unreachable: settling what was not admitted")
        self._phase = Phase.SETTLED
        metered = self._meter.finish() if self._meter is not None else None
        failed = self._status is not None and self._status >= 400
        if failed or (metered is not None and metered.error):
            ending = Ending.BACKEND_ERROR
        elif metered is not None and metered.finished:
            ending = Ending.COMPLETED
        elif seen is Ending.COMPLETED and metered is not None:
            ending = Ending.TRUNCATED
        else:
            ending = seen
        return (Settle(Outcome(self._admitted, ending, self._status, metered)),)


_ADMIT_REQUEST_BODY = (Reply(replies.ADMIT_REQUEST_BODY),)

_MISCONFIGURED = unavailable_answer(
    reason="filter_misconfigured",
    message="Envoy sends this filter neither request headers nor the attribute request.path: "
    "set request_header_mode: SEND, or add request.path to request_attributes.",
    retry_after_ms=None,
)
