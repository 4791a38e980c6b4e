"""Any order of messages, legal or not, with the end at any point: the exchange keeps its rules."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.pool import ServiceClass
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.actions import Actions, Admit, Reply, Settle, Tell
from envoy_tokenpools.extproc.exchange import Exchange
from envoy_tokenpools.extproc.wire import parse_request
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.order import Admitted, Order
from envoy_tokenpools.observer import Decided
from envoy_tokenpools.openai.answers import Answer
from tests.support import extproc
from tests.support.extproc import BodyMode, Message, Response, chat, head_attributes, kind_of
from tests.support.gate import configured
from tests.support.pools import amount, entitlement, pool
from tests.support.streams import S

DIRECTORY = Directory(configured(pool(amount(), entitlement("a", ServiceClass.SPOT))))
SHED = Answer(429, (), b"{}")
NOT_TO_FIT = RequestError(400, "context_length_exceeded", "Too long.")

REQUEST_HEADERS = [
    extproc.post_rh(),
    extproc.post_rh(eos=True),
    extproc.post_rh(key=None),
    extproc.post_rh("/v1/embeddings"),
    extproc.post_rh("/v1/audio/transcriptions"),
    extproc.post_rh("/v1/messages", eos=True),
    extproc.post_rh(extproc.CHAT, ("content-length", "9999999999")),
    extproc.post_rh(extproc.CHAT, ("content-encoding", "gzip")),
    extproc.post_rh(extproc.CHAT, ("authorization", "Bearer b")),
    extproc.rh([(":method", "GET"), (":path", "/v1/models")], eos=True),
    extproc.rh(),
]
UPLOAD = head_attributes("/v1/audio/transcriptions")
REQUEST_BODIES = [
    extproc.rb(body, eos=eos, given=given)
    for body in (extproc.HI, chat(stream=True), extproc.HI[:9], b"", b"\xff", b"x" * 2_000)
    for eos in (True, False)
    for given in (None, head_attributes(), head_attributes("/health", None), UPLOAD)
]
RESPONSE_HEADERS = [
    extproc.sh(status, kind, eos=eos)
    for status in (200, 429, 500, "odd")
    for kind in ("text/event-stream", "application/json", None)
    for eos in (True, False)
]
RESPONSE_ATTRIBUTES: list[dict[str, str | float]] = [
    {},
    {"response.code": 500.0},
    {"response.code": 0.0, "response.headers['content-type']": "text/event-stream"},
]
RESPONSE_BODIES = [
    extproc.sb(body, eos=eos, given=given)
    for body in (S, S[:200], S[200:500], S[500:], b"", b"\xff\x00", b'{"usage":{}}')
    for eos in (True, False)
    for given in RESPONSE_ATTRIBUTES
]
USUAL = [
    extproc.post_rh(),
    extproc.rb(extproc.HI),
    extproc.rb(chat(stream=True), given=head_attributes()),
    extproc.sh(200, "text/event-stream"),
    extproc.sb(S[:300]),
    extproc.sb(S, eos=True),
]
TRAILERS = [extproc.rt(), extproc.st(), extproc.rt([("a", "b")]), extproc.st([("a", "b")])]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Any of the above, half of them usual ones; seldom with a protocol or in observability mode."""
    others = (REQUEST_HEADERS, REQUEST_BODIES, RESPONSE_HEADERS, RESPONSE_BODIES, TRAILERS)
    kinds = (*(USUAL for _ in others), *others)
    message = Message.parse(bytes(draw(st.sampled_from(draw(st.sampled_from(kinds))))))
    mode = draw(st.sampled_from([*(None for _ in range(20)), *BodyMode]))
    if mode is not None:
        extproc.with_protocol(message, mode, BodyMode.STREAMED)
    if draw(st.integers(0, 60)) == 60:
        extproc.observed(message)
    return message


class ExchangeMachine(RuleBasedStateMachine):
    """Plays Envoy, the service and the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """A new request."""
        self.exchange = Exchange(DIRECTORY, ServerSettings(max_body_bytes=1_000))
        self.pending: Order | None = None
        self.kind = ""
        self.observes = False
        self.is_over = False
        self.now_us = 0
        self.admitted = 0
        self.settled = 0
        self.first_tokens = 0

    @precondition(lambda self: not self.is_over and self.pending is None)
    @rule(message=messages(), passed_us=st.integers(0, 10_000_000))
    def say(self, message: Message, passed_us: int) -> None:
        """Envoy sends something."""
        self.now_us += passed_us
        self.kind = kind_of(message)
        self.observes = self.observes or message.observability_mode
        self.take(self.exchange.receive(parse_request(bytes(message)), self.now_us))

    @precondition(lambda self: self.pending is not None and not self.is_over)
    @rule()
    def let_in(self) -> None:
        """The gate admits."""
        order, self.pending = self.pending, None
        assert order is not None
        verdict = extproc.admit(order)
        assert isinstance(verdict, Admitted)
        self.admitted += 1
        self.take(self.exchange.admitted(verdict))

    @precondition(lambda self: self.pending is not None and not self.is_over)
    @rule(verdict=st.sampled_from([SHED, NOT_TO_FIT]))
    def keep_out(self, verdict: Answer | RequestError) -> None:
        """The gate refuses, or cannot."""
        self.pending = None
        if isinstance(verdict, Answer):
            self.take(self.exchange.refused(verdict))
        else:
            self.take(self.exchange.rejected(verdict))

    @precondition(lambda self: self.is_over)
    @rule()
    def another(self) -> None:
        """The next request has an exchange of its own."""
        self.begin()

    @rule(shutting_down=st.booleans(), now=st.integers(0, 7).map(lambda n: n == 7))
    def may_end(self, *, shutting_down: bool, now: bool) -> None:
        """The stream may be over at any time, also while the gate decides."""
        if now:
            self.end(shutting_down=shutting_down)

    def end(self, *, shutting_down: bool) -> None:
        """The stream is over; to be told so again changes nothing."""
        actions = self.exchange.finish(shutting_down=shutting_down)
        assert all(isinstance(action, Settle) for action in actions)
        self.settled += len(actions)
        self.is_over = True

    def take(self, actions: Actions) -> None:
        """Do what the service would, and hold the exchange to its rules."""
        *before, last = actions or (None,)
        assert not [action for action in before if isinstance(action, (Reply, Admit))]
        for action in actions:
            match action:
                case Settle():
                    self.settled += 1
                case Tell(event):
                    self.first_tokens += not isinstance(event, Decided)
        if isinstance(last, Admit):
            self.pending = last.order
        elif self.observes:
            assert not isinstance(last, Reply)
        else:
            assert isinstance(last, Reply)
            reply = Response.parse(last.payload)
            assert kind_of(reply) in (self.kind, "immediate_response")
            assert reply.mode_override is None or self.kind == "request_headers"

    @invariant()
    def settles_what_was_admitted(self) -> None:
        """Once at most while it goes on, exactly once when it is over; nothing else ever."""
        assert self.admitted <= 1
        assert self.first_tokens <= self.admitted
        if self.is_over:
            assert self.settled == self.admitted
        else:
            assert self.settled <= self.admitted

    def teardown(self) -> None:
        """Every exchange is over one day."""
        self.end(shutting_down=False)
        self.settles_what_was_admitted()


ExchangeMachine.TestCase.settings = settings(
    deadline=None, max_examples=200, stateful_step_count=40
)
test_any_order_of_messages = ExchangeMachine.TestCase
