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
       └──────────── `evicted` ────────────────────▶ EVICTED

Rules:

1. A message gets exactly one reply of its own kind, in its turn; none in observability mode. The reply is the last of
   its actions: sending may be cancelled, and what must happen must have happened by then.
2. `Settle` is emitted once for each `admitted`, whatever comes or does not come after it. Nothing at all is emitted
   after `evicted`.
3. Nothing is admitted before the whole body was read; an exchange that ends before that held nothing. The one exception
   is a body that the route keeps from us: its request is admitted with its answer, at the flat amount.
"""

import enum
from dataclasses import replace

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc import replies
from envoy_tokenpools.extproc.actions import Abort, Actions, Admit, Reply, Settle, Tell
from envoy_tokenpools.extproc.incoming import Head, head_from_attributes, head_from_headers
from envoy_tokenpools.extproc.requesting import (
    ADMIT_BODY,
    ADMIT_HEADERS,
    NO_CHANGE,
    RequestBody,
    admit_body,
    change_for,
)
from envoy_tokenpools.extproc.responding import Response, response_head
from envoy_tokenpools.extproc.wire import (
    BUFFERED,
    NONE,
    STREAMED,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    attributes_of,
    metadata_text,
)
from envoy_tokenpools.gate.answering import evicted, rate_limits
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
from envoy_tokenpools.openai.endpoint import Dialect, Endpoint
from envoy_tokenpools.openai.request import RequestFacts, facts_without_body, parse_request


class Phase(enum.Enum):
    """Where an exchange is; see the module's picture."""

    OPENING = enum.auto()
    COLLECTING = enum.auto()
    DECIDING = enum.auto()
    ADMITTED = enum.auto()
    SETTLED = enum.auto()
    EVICTED = enum.auto()
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
_NOT_TAKEN = Tell(Decided(Decision.REJECTED, reason="body_not_taken"))
_BODY_NOT_SENT = Tell(Decided(Decision.BYPASSED, reason="body_not_sent"))


class Exchange:
    """The state of one request; feed it with `receive`, and end it with `finish`."""

    def __init__(self, directory: Directory, settings: ServerSettings) -> None:
        """
        Begin; nothing is held.

        Args:
            directory: identifies callers and finds pools.
            settings: limits and policies of the server.
        """
        self._directory = directory
        self._settings = settings
        self._phase = Phase.OPENING
        self._observes = False
        self._body_mode: int | None = None
        self._started_us = 0
        self._head: Head | None = None
        self._has_headers = False
        self._rights: Rights = ()
        self._body = RequestBody(settings.max_body_bytes)
        self._order: Order | None = None
        self._change = NO_CHANGE
        self._admit_reply: Actions = ()
        self._unseen: HttpHeaders | None = None
        self._admitted: Admitted | None = None
        self._response = Response(withholds_usage=False)
        self._first_token_seen = False

    @property
    def observes(self) -> bool:
        """Whether Envoy only lets us observe: it takes no replies."""
        return self._observes

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
        return self._said(actions)

    def admitted(self, verdict: Admitted) -> Actions:
        """The gate admitted the order: let the request go on, and keep nothing of its body while it is answered."""
        self._phase = Phase.ADMITTED
        facts = replace(verdict.order.facts, texts=(), shared_texts=())
        self._admitted = replace(verdict, order=replace(verdict.order, facts=facts))
        self._response = Response(withholds_usage=self._change.asks_usage and not self._observes)
        actions, self._admit_reply = self._admit_reply, ()
        self._order, self._change = None, NO_CHANGE
        if self._unseen is not None:
            actions = self._response_headers(self._unseen)
        return self._said(actions)

    def refused(self, answer: Answer) -> Actions:
        """The gate refused the order: answer the client."""
        if self._unseen is not None:
            return self._said(self._pass_unseen())
        self._phase = Phase.ANSWERED
        self._body.clear()
        return self._said((self._answer(answer),))

    def rejected(self, error: RequestError) -> Actions:
        """The request cannot be served, whatever the load: answer the client. What the gate decided, it has told."""
        endpoint = self._head.endpoint if self._head is not None else None
        dialect = endpoint.dialect if endpoint is not None else Dialect.OPENAI
        answer = self.refused(error_answer(error, dialect))
        if self._order is not None or self._unseen is not None:
            return answer
        return (Tell(Decided(Decision.REJECTED, reason=error.code)), *answer)

    def evicted(self) -> Actions:
        """
        The store took the lease back: end the request, unless Envoy only lets us observe it.

        Its client gets a 429 while nothing of the answer has been passed on; later all that is left is to break it off.
        """
        admitted = self._admitted
        if self._phase is not Phase.ADMITTED or admitted is None or self._observes:
            return ()
        order = admitted.order
        ending: Actions = (Abort(),)
        if self._response.status is None:
            ending = (self._answer(evicted(admitted)),)
        told = Tell(
            Decided(
                Decision.EVICTED,
                reason="evicted",
                pool=order.pool.name,
                entitlement=order.entitlement.name,
                service_class=order.entitlement.service_class,
            )
        )
        settled = self._settle(Ending.EVICTED)
        self._phase = Phase.EVICTED
        return (told, *settled, *ending)

    def finish(self, *, shutting_down: bool = False) -> Actions:
        """
        The gRPC stream is over, for whatever reason.

        How it was closed says little (a good end often looks like a cancellation), so that what was seen decides.
        """
        return self._settle(Ending.TRUNCATED if shutting_down else Ending.CLIENT_GONE)

    def _said(self, actions: Actions) -> Actions:
        """The same, without replies where Envoy only lets us observe."""
        if self._observes:
            return tuple(action for action in actions if not isinstance(action, Reply))
        return actions

    def _answer(self, answer: Answer) -> Reply:
        request_id = self._head.request_id if self._head is not None else ""
        return Reply(replies.immediate(answer, request_id))

    def _dispatch(self, message: ProcessingRequest, now_us: int) -> Actions:
        actions: Actions = ()
        if self._phase is Phase.EVICTED:
            return actions
        if message.response_body is not None:
            actions = self._response_body(message.response_body, message, now_us)
        elif message.request_headers is not None:
            actions = self._request_headers(message.request_headers, message, now_us)
        elif message.request_body is not None:
            actions = self._request_body(message.request_body, message, now_us)
        elif message.response_headers is not None:
            actions = self._response_headers(message.response_headers)
        elif message.request_trailers is not None:
            actions = self._request_trailers()
        elif message.response_trailers is not None:
            actions = (*self._settle(Ending.COMPLETED), *_RESPONSE_TRAILERS)
        return actions

    # ------------------------------------------------------------------ request

    def _request_headers(
        self, message: HttpHeaders, whole: ProcessingRequest, now_us: int
    ) -> Actions:
        if self._phase is not Phase.OPENING:
            return _REQUEST_HEADERS
        self._has_headers = True
        head = head_from_headers(message, self._settings.path_prefix)
        if head.endpoint is None:
            return self._pass(head, (Reply(replies.PASS_UNMETERED),))
        self._open(head, whole.metadata_context, now_us)
        if message.end_of_stream:
            raise RequestError(400, "invalid_json", "The request has no body.")
        if not head.endpoint.reads_body:
            return self._decide_unread(head, head.endpoint, Reply(ADMIT_HEADERS))
        if self._body_mode == NONE:
            self._body_mode = BUFFERED
            return _BUFFER_REQUEST_BODY
        return _REQUEST_HEADERS

    def _request_body(self, message: HttpBody, whole: ProcessingRequest, now_us: int) -> Actions:
        if self._phase is Phase.OPENING:
            head = head_from_attributes(attributes_of(whole.attributes), self._settings.path_prefix)
            if head is None:
                return (_MISCONFIGURATION, *self.refused(_MISCONFIGURED))
            if head.endpoint is None:
                return self._pass(head, _REQUEST_BODY)
            self._open(head, whole.metadata_context, now_us)
            if not head.endpoint.reads_body:
                return self._decide_unread(head, head.endpoint, Reply(ADMIT_BODY))
        if self._phase is not Phase.COLLECTING:
            return _REQUEST_BODY
        self._body.add(message.body)
        # A request with trailers has no end of stream on its body: the buffered one is whole nevertheless.
        if message.end_of_stream or self._body_mode == BUFFERED:
            return self._decide(is_trailers=False)
        return _REQUEST_BODY

    def _request_trailers(self) -> Actions:
        if self._phase is Phase.COLLECTING:
            return self._decide(is_trailers=True)
        return _REQUEST_TRAILERS

    def _open(self, head: Head, metadata: bytes, now_us: int) -> None:
        """Identify the caller, and refuse what the head alone rules out."""
        self._head = head
        self._started_us = now_us
        source = self._directory.claim
        claim = None
        if source is not None and metadata:
            claim = metadata_text(metadata, source.namespace, source.path)
        self._rights = self._directory.identify(
            head.credential, claim=claim, principals=head.principals
        )
        if head.endpoint is not None and head.endpoint.reads_body:
            self._body.check_declared(head.content_length, head.content_encoding)
        self._phase = Phase.COLLECTING

    def _pass(self, head: Head, reply: Actions) -> Actions:
        """A request that no pool meters: it passes, unless the operator wants only metered ones."""
        if head.sends_work and self._settings.rejects_unknown_endpoints:
            raise RequestError(404, "unknown_url", "This path is not served here.")
        self._phase = Phase.PASSING
        return (_UNMETERED, *reply)

    def _decide(self, *, is_trailers: bool) -> Actions:
        """The body is whole: read it, find its pool, and ask the gate."""
        head, endpoint = self._metered_head()
        was_held = self._body.pieces == 1 and not is_trailers and self._body_mode != STREAMED
        body = self._body.take(head.content_encoding)
        facts = parse_request(endpoint, body)
        pool, entitlement = self._directory.resolve(self._rights, facts.model)
        order = Order(
            pool,
            entitlement,
            facts,
            fingerprint_of(body),
            head.is_retry,
            self._started_us,
            request_id=head.request_id,
        )
        if was_held:
            self._change = change_for(facts, pool, body, head.content_encoding)
        reply = Reply(admit_body(self._change, sets_length=self._has_headers))
        return self._ask(order, _REQUEST_TRAILERS if is_trailers else (reply,))

    def _metered_head(self) -> tuple[Head, Endpoint]:
        """The head and the endpoint of a request whose body is collected."""
        if self._head is None or self._head.endpoint is None:
            raise AssertionError("unreachable: collecting without a metered head")
        return self._head, self._head.endpoint

    def _decide_unread(self, head: Head, endpoint: Endpoint, admit_reply: Reply) -> Actions:
        """The head is all that is read: find the pool, and ask the gate."""
        pool, entitlement = self._directory.resolve_alone(self._rights)
        facts = facts_without_body(endpoint)
        order = Order(
            pool,
            entitlement,
            facts,
            0,
            head.is_retry,
            self._started_us,
            request_id=head.request_id,
        )
        return self._ask(order, (admit_reply,))

    def _ask(self, order: Order, admit_reply: Actions) -> Actions:
        too_late = self._observes or self._unseen is not None
        self._order = replace(order, enforce=False) if too_late else order
        self._admit_reply = admit_reply
        self._phase = Phase.DECIDING
        return (Admit(self._order),)

    # ------------------------------------------------------------------ response

    def _response_headers(self, message: HttpHeaders) -> Actions:
        if self._phase is Phase.COLLECTING:
            return self._admit_unseen(message)
        if self._phase is not Phase.ADMITTED or self._admitted is None:
            return _RESPONSE_HEADERS
        self._response.begin(*response_head(message))
        limits = rate_limits(self._admitted.balance, self._admitted.order.pool)
        removed = ("content-length",) if self._response.changes_body else ()
        reply = Reply(replies.response_headers_with(rate_limit_headers(limits), removed))
        if message.end_of_stream:
            return (*self._settle(Ending.COMPLETED), reply)
        return (reply,)

    def _admit_unseen(self, message: HttpHeaders) -> Actions:
        """
        The request went upstream without its body ever having been shown to us.

        It cannot be refused any more, and costs the flat amount unless its answer reports usage. An error costs
        nothing: mostly it is Envoy's own, for a body that it would not take.
        """
        if response_head(message).status >= 400:
            self._phase = Phase.PASSING
            return (_NOT_TAKEN, *_RESPONSE_HEADERS)
        self._unseen = message
        return self._decide_unread(*self._metered_head(), *_RESPONSE_HEADERS)

    def _pass_unseen(self) -> Actions:
        self._phase = Phase.PASSING
        return (_BODY_NOT_SENT, *_RESPONSE_HEADERS)

    def _response_body(self, message: HttpBody, whole: ProcessingRequest, now_us: int) -> Actions:
        if self._phase is not Phase.ADMITTED or self._admitted is None:
            return _RESPONSE_BODY
        response = self._response
        if response.status is None:
            self._begin_without_headers(whole, self._admitted.order.facts)
        passed = response.feed(message.body, ends=message.end_of_stream)
        actions: Actions = _RESPONSE_BODY
        if passed != message.body:
            actions = (Reply(replies.response_body_with(passed)),)
        if not self._first_token_seen and response.has_output:
            self._first_token_seen = True
            actions = (self._first_token(self._admitted.order, now_us), *actions)
        if message.end_of_stream:
            return (*self._settle(Ending.COMPLETED), *actions)
        return actions

    def _begin_without_headers(self, whole: ProcessingRequest, facts: RequestFacts) -> None:
        """Response headers were skipped: attributes tell, or else the request's own wish for a stream."""
        attributes = attributes_of(whole.attributes)
        wished = b"text/event-stream" if facts.stream else b"application/json"
        self._response.begin(
            int(attributes.numbers.get("response.code", 200)),
            attributes.texts.get("response.headers['content-type']", wished).decode("latin-1"),
            attributes.texts.get("response.headers['content-encoding']", b"").decode("latin-1"),
        )

    @staticmethod
    def _first_token(order: Order, now_us: int) -> Tell:
        elapsed_ms = max(0, now_us - order.arrived_us) // 1_000
        return Tell(FirstToken(order.pool.name, order.entitlement.service_class, elapsed_ms))

    def _settle(self, seen: Ending) -> Actions:
        """Settle what was admitted, once; `seen` is COMPLETED where the body ended, else why it did not go on."""
        if self._phase is not Phase.ADMITTED or self._admitted is None:
            return ()
        self._phase = Phase.SETTLED
        metered = self._response.finish()
        ending = self._response.ending(seen, metered)
        return (Settle(Outcome(self._admitted, ending, self._response.status, metered)),)


_MISCONFIGURATION = Tell(Decided(Decision.REJECTED, reason="filter_misconfigured"))
_MISCONFIGURED = unavailable_answer(
    reason="filter_misconfigured",
    message="Envoy sends this filter neither request headers nor the attribute request.path: "
    "set request_header_mode: SEND, or add request.path to request_attributes.",
    retry_after_ms=None,
)
