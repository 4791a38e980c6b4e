"""
Messages as Envoy sends them, made of the full types, and one exchange spoken to in shorthand.

The shorthand: `rh`, `rb`, `rt` are request headers, body and trailers; `sh`, `sb`, `st` those of the response.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import betterproto2
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_filter
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.google.protobuf import Struct, Value

from envoy_tokenpools.config import ServerSettings
from envoy_tokenpools.core.admission import Balance, Lease
from envoy_tokenpools.core.cost import Cost
from envoy_tokenpools.core.ledger import Ledger
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.extproc.actions import Abort, Actions, Admit, Reply, Settle, Tell
from envoy_tokenpools.extproc.exchange import Exchange
from envoy_tokenpools.extproc.wire import parse_request
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.holding import Holding
from envoy_tokenpools.gate.order import Admitted, Order, Outcome
from envoy_tokenpools.observer import Decided, FirstToken
from envoy_tokenpools.openai.answers import Answer
from tests.support.pools import amount, claim, terms

Message = ext_proc.ProcessingRequest
Response = ext_proc.ProcessingResponse
BodyMode = ext_proc_filter.ProcessingModeBodySendMode
Pairs = Iterable[tuple[str, str | bytes]]

FILTER = "envoy.filters.http.ext_proc"
CHAT = "/v1/chat/completions"
KEY = "key-a"
HI = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
"""The smallest chat request."""


def header_map(pairs: Pairs) -> core.HeaderMap:
    """Headers as Envoy sends them: values raw."""
    return core.HeaderMap(
        headers=[
            core.HeaderValue(
                key=name, raw_value=value if isinstance(value, bytes) else value.encode()
            )
            for name, value in pairs
        ]
    )


def attributes(values: Mapping[str, str | float]) -> dict[str, Struct]:
    """Attributes as Envoy sends them: one struct for the filter."""
    fields = {
        name: Value(string_value=value) if isinstance(value, str) else Value(number_value=value)
        for name, value in values.items()
    }
    return {FILTER: Struct(fields=fields)} if fields else {}


def rh(headers: Pairs = (), *, eos: bool = False) -> Message:
    """Request headers."""
    return Message(request_headers=ext_proc.HttpHeaders(header_map(headers), end_of_stream=eos))


def post_rh(
    path: str = CHAT, *more: tuple[str, str | bytes], key: str | None = KEY, eos: bool = False
) -> Message:
    """The headers of a JSON POST, with a bearer token unless `key` is None."""
    headers: list[tuple[str, str | bytes]] = [
        (":method", "POST"),
        (":path", path),
        ("content-type", "application/json"),
    ]
    if key is not None:
        headers.append(("authorization", f"Bearer {key}"))
    return rh([*headers, *more], eos=eos)


def rb(
    body: bytes = b"", *, eos: bool = True, given: Mapping[str, str | float] | None = None
) -> Message:
    """A request body, with attributes if any are given."""
    http_body = ext_proc.HttpBody(body=body, end_of_stream=eos)
    return Message(request_body=http_body, attributes=attributes(given or {}))


def rt(headers: Pairs = ()) -> Message:
    """Request trailers."""
    return Message(request_trailers=ext_proc.HttpTrailers(header_map(headers)))


def sh(
    status: int | str = 200,
    content_type: str | None = "application/json",
    *more: tuple[str, str | bytes],
    eos: bool = False,
) -> Message:
    """Response headers."""
    headers: list[tuple[str, str | bytes]] = [(":status", str(status))]
    if content_type is not None:
        headers.append(("content-type", content_type))
    http_headers = ext_proc.HttpHeaders(header_map([*headers, *more]), end_of_stream=eos)
    return Message(response_headers=http_headers)


def sb(
    body: bytes = b"", *, eos: bool = False, given: Mapping[str, str | float] | None = None
) -> Message:
    """A piece of the response body, with attributes if any are given."""
    http_body = ext_proc.HttpBody(body=body, end_of_stream=eos)
    return Message(response_body=http_body, attributes=attributes(given or {}))


def st(headers: Pairs = ()) -> Message:
    """Response trailers."""
    return Message(response_trailers=ext_proc.HttpTrailers(header_map(headers)))


def with_protocol(message: Message, request: BodyMode, response: BodyMode) -> Message:
    """The same as the first message of a stream, which says how the filter is configured."""
    message.protocol_config = ext_proc.ProtocolConfiguration(
        request_body_mode=request, response_body_mode=response
    )
    return message


def verified(message: Message, namespace: str, **claims: Value) -> Message:
    """The same with what an earlier filter verified, in its metadata."""
    metadata = {"other.filter": Struct(fields={"x": Value(bool_value=True)})}
    metadata[namespace] = Struct(fields=claims)
    message.metadata_context = core.Metadata(filter_metadata=metadata)
    return message


def observed(message: Message) -> Message:
    """The same in observability mode."""
    message.observability_mode = True
    return message


def head_attributes(path: str = CHAT, key: str | None = KEY, **more: str) -> dict[str, str | float]:
    """What the compact configuration sends in place of request headers; `more` are headers."""
    values: dict[str, str | float] = {"request.path": path, "request.id": "8f3c"}
    if key is not None:
        values["request.headers['authorization']"] = f"Bearer {key}"
    for name, value in more.items():
        values[f"request.headers['{name.replace('_', '-')}']"] = value
    return values


def chat(content: object = "hi", **fields: object) -> bytes:
    """A chat request with one message."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def kind_of(message: Message | Response) -> str:
    """Which of the message's kinds is set."""
    group = "request" if isinstance(message, Message) else "response"
    name, _ = betterproto2.which_one_of(message, group)
    return name


def request_change(response: Response) -> tuple[bytes | None, dict[str, bytes], list[str]]:
    """Of a reply to a request body: the new body, headers that are set and removed."""
    assert response.request_body is not None
    common = response.request_body.response
    assert common is not None
    mutation = common.header_mutation or ext_proc.HeaderMutation()
    options = [option.header for option in mutation.set_headers if option.header is not None]
    headers = {header.key: header.raw_value for header in options}
    body = common.body_mutation.body if common.body_mutation is not None else None
    return body, headers, list(mutation.remove_headers)


def passed_on(sent: bytes, response: Response) -> bytes:
    """What the client gets of a piece of the response body that was answered like this."""
    assert response.response_body is not None
    common = response.response_body.response
    assert common is not None
    if common.body_mutation is None:
        return sent
    return b"" if common.body_mutation.clear_body else common.body_mutation.body or b""


def immediate_of(response: Response) -> tuple[int, dict[str, str], Any]:
    """Status, headers and decoded body of an answer that we gave ourselves."""
    answer = response.immediate_response
    assert answer is not None
    assert answer.status is not None
    headers = answer.headers.set_headers if answer.headers is not None else []
    pairs = [option.header for option in headers]
    found = {pair.key: pair.raw_value.decode() for pair in pairs if pair is not None}
    return int(answer.status.code), found, json.loads(answer.body)


COST = Cost(prompt_tokens=8, output_tokens=32, kv_bytes=40_000, concurrency=1)
"""What `admit` reserves."""

Judge = Callable[[Order], Admitted | Answer | RequestError]
"""Stands for the gate."""


def admit(order: Order) -> Admitted:
    """Admits whatever comes."""
    wanted = claim("lease-1", COST, terms(order.entitlement.name, share=amount()), amount())
    lease = Ledger().reserve(wanted, 0)
    assert isinstance(lease, Lease)
    balance = Balance(
        limit_tokens=1_000,
        remaining_tokens=960,
        reset_tokens_ms=400,
        limit_concurrency=8,
        remaining_concurrency=7,
        reset_concurrency_ms=0,
    )
    return Admitted(order, lease, balance, 8, Holding(lease, 0))


@dataclass(slots=True)
class Conversation:
    """
    Speaks to one exchange as Envoy and the service do, and writes down what comes of it.

    Every message is checked to get one reply of its own kind, after all that had to happen first; none in
    observability mode.
    """

    exchange: Exchange
    judge: Judge = admit
    now_us: int = 0
    orders: list[Order] = field(default_factory=list)
    told: list[Decided | FirstToken] = field(default_factory=list)
    settled: list[Outcome] = field(default_factory=list)
    admissions: int = 0
    was_aborted: bool = False
    _observes: bool = False

    @classmethod
    def begin(
        cls,
        directory: Directory,
        judge: Judge = admit,
        max_body_bytes: int = 1_000_000,
        path_prefix: str = "",
        *,
        rejects_unknown_endpoints: bool = False,
    ) -> "Conversation":
        """A conversation about a new request."""
        settings = ServerSettings(
            max_body_bytes=max_body_bytes,
            path_prefix=path_prefix,
            rejects_unknown_endpoints=rejects_unknown_endpoints,
        )
        return cls(Exchange(directory, settings), judge)

    def say(self, *messages: Message) -> list[Response]:
        """Send these messages; the replies to them."""
        replies: list[Response] = []
        for message in messages:
            self._observes = self._observes or message.observability_mode
            payloads: list[bytes] = []
            narrow = parse_request(bytes(message))
            self._take(self.exchange.receive(narrow, self.now_us), payloads)
            assert len(payloads) == (0 if self._observes else 1)
            for reply in map(Response.parse, payloads):
                assert kind_of(reply) in (kind_of(message), "immediate_response")
                replies.append(reply)
        return replies

    def end(self, *, shutting_down: bool = False) -> None:
        """The stream is over: CANCEL and EOF look alike from here."""
        self._take(self.exchange.finish(shutting_down=shutting_down), [])

    def evict(self) -> list[Response]:
        """The store takes the lease back; what is said to Envoy."""
        payloads: list[bytes] = []
        self._take(self.exchange.evicted(), payloads)
        return [Response.parse(payload) for payload in payloads]

    @property
    def decisions(self) -> list[Decided]:
        """What was told of decisions."""
        return [event for event in self.told if isinstance(event, Decided)]

    @property
    def first_tokens(self) -> list[FirstToken]:
        """What was told of first tokens."""
        return [event for event in self.told if isinstance(event, FirstToken)]

    @property
    def outcome(self) -> Outcome:
        """The one settlement."""
        (outcome,) = self.settled
        return outcome

    def _take(self, actions: Actions, payloads: list[bytes]) -> None:
        for action in actions:
            assert not payloads, "the reply is the last action"
            match action:
                case Reply(payload):
                    payloads.append(payload)
                case Admit(order):
                    self.orders.append(order)
                    self._take(self._judged(order), payloads)
                case Settle(outcome):
                    self.settled.append(outcome)
                case Tell(event):
                    self.told.append(event)
                case Abort():
                    self.was_aborted = True

    def _judged(self, order: Order) -> Actions:
        verdict = self.judge(order)
        if isinstance(verdict, Admitted):
            self.admissions += 1
            return self.exchange.admitted(verdict)
        if isinstance(verdict, Answer):
            return self.exchange.refused(verdict)
        return self.exchange.rejected(verdict)
