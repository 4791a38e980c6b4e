"""
A request's way through the simulator: the real gate in front of the engine model, without HTTP and Envoy.
"""

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.gate import Gate
from envoy_tokenpools.gate.order import Admitted, Order, Outcome
from envoy_tokenpools.lab.clients import Seen, Wish
from envoy_tokenpools.lab.record import Result
from envoy_tokenpools.lab.scenario import Scenario
from envoy_tokenpools.lab.virtual_engine import Run, VirtualEngine
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.endpoint import Endpoint
from envoy_tokenpools.openai.fields import UsageWish
from envoy_tokenpools.openai.request import RequestFacts
from envoy_tokenpools.openai.usage import Metered, Usage


class SimulatedLine:
    """Admits, generates and settles as the filter and a backend that reports its usage do."""

    def __init__(self, scenario: Scenario, gate: Gate, engine: VirtualEngine, clock: Clock) -> None:
        self._pool_name = scenario.pool.name
        self._model = scenario.model
        self._gate = gate
        self._engine = engine
        self._clock = clock

    async def send(self, wish: Wish, retries: int, seen: Seen) -> None:
        """See `Line.send`."""
        try:
            verdict = await self._gate.admit(self._order(wish, retries))
        except RequestError as error:
            seen.decided_us = self._clock.now_us()
            seen.result, seen.reason = Result.FAILED, error.code
            return
        seen.decided_us = self._clock.now_us()
        if isinstance(verdict, Admitted):
            await self._generate(verdict, wish, seen)
        else:
            _refused(verdict.answer, seen)

    async def _generate(self, admitted: Admitted, wish: Wish, seen: Seen) -> None:
        output_tokens = min(wish.output_tokens, wish.max_tokens)
        try:
            run = self._engine.submit(prompt_tokens=wish.prompt_tokens, output_tokens=output_tokens)
        except ValueError:
            run = None
        if run is None:
            seen.result, seen.reason = Result.FAILED, "503"
            await self._gate.settle(Outcome(admitted, Ending.BACKEND_ERROR, 503, None))
            return
        holding = admitted.holding
        holding.on_evict(lambda: self._engine.abort(run))
        ending = Ending.CLIENT_GONE
        try:
            await run.ended
            ending = Ending.EVICTED if holding.is_evicted else Ending.COMPLETED
        finally:
            self._engine.abort(run)
            seen.output_tokens = run.generated
            if run.first_token_ms is not None:
                seen.first_token_us = run.first_token_ms * 1_000
            await self._gate.settle(_outcome(admitted, ending, run, wish))
        if ending is Ending.EVICTED:
            seen.result, seen.reason = Result.EVICTED, "evicted"
        else:
            seen.result = Result.COMPLETED

    def _order(self, wish: Wish, retries: int) -> Order:
        pool = self._gate.config.pools[self._pool_name]
        return Order(
            pool=pool,
            entitlement=pool.entitlements[wish.load.entitlement],
            facts=RequestFacts(
                endpoint=Endpoint.CHAT,
                model=self._model,
                texts=(),
                shared_texts=(),
                token_ids=wish.prompt_tokens,
                overhead_tokens=0,
                images=0,
                audio_clips=0,
                prompts=1,
                sequences=1,
                max_output_tokens=wish.max_tokens,
                stream=True,
                usage_wish=UsageWish.ASKED,
                echo=False,
                flat=False,
            ),
            fingerprint=wish.number + 1,
            is_retry=retries > 0,
            arrived_us=self._clock.now_us(),
        )


def _refused(answer: Answer, seen: Seen) -> None:
    headers = dict(answer.headers)
    seen.asked_wait_ms = float(headers.get("retry-after-ms", seen.asked_wait_ms))
    if answer.status == 429:
        seen.result, seen.reason = Result.SHED, headers["x-tokenpools-reason"]
    else:
        seen.result, seen.reason = Result.FAILED, str(answer.status)


def _outcome(admitted: Admitted, ending: Ending, run: Run, wish: Wish) -> Outcome:
    usage = Usage(wish.prompt_tokens, run.generated)
    is_whole = ending is Ending.COMPLETED
    metered = Metered(
        usage, (), finished=is_whole, error=False, overflow_chars=0, unread=0, token_ids=0
    )
    return Outcome(admitted, ending, 200, metered)
