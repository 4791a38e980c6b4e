"""
The gate: admits or sheds a request, settles it when it ends, and ticks the pools in between.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from envoy_tokenpools.clock import Clock
from envoy_tokenpools.config import Config
from envoy_tokenpools.core.admission import Claim, Refusal, Terms
from envoy_tokenpools.core.cost import Cost, Need, estimate
from envoy_tokenpools.core.pool import Mode
from envoy_tokenpools.core.tick import NEW_STANDING, is_served
from envoy_tokenpools.errors import RequestError, StoreError
from envoy_tokenpools.gate import answering
from envoy_tokenpools.gate.alone import Alone
from envoy_tokenpools.gate.charge import Charge, charge, needs_count
from envoy_tokenpools.gate.directory import Directory
from envoy_tokenpools.gate.explain import Basis, DecisionLog
from envoy_tokenpools.gate.failures import tell_store_failure
from envoy_tokenpools.gate.housekeeping import Housekeeper
from envoy_tokenpools.gate.live import LivePool, learning_key
from envoy_tokenpools.gate.order import (
    Admitted,
    Order,
    Outcome,
    Refused,
    Verdict,
    fingerprint_of,
)
from envoy_tokenpools.gate.reports import pool_report
from envoy_tokenpools.gate.reserving import OnWait, Reservations
from envoy_tokenpools.observer import Decided, Ending, Explanation, Observer, PoolReport, Settled
from envoy_tokenpools.observer import Outcome as Decision
from envoy_tokenpools.openai.answers import Answer
from envoy_tokenpools.openai.usage import UsageSource
from envoy_tokenpools.store.base import Store

STORE_AWAY = "store_unavailable"
"""Reason of every decision that was made without the store."""


class Counter(Protocol):
    """Counts tokens; `envoy_tokenpools.tokenizer.TokenCounter` is one."""

    def count_now(self, vocabulary: str, texts: Sequence[str]) -> int | None:
        """The count, or None if that would hold up the event loop."""
        ...

    async def count(self, vocabulary: str, texts: Sequence[str]) -> int:
        """The count, elsewhere if it takes long."""
        ...


class Gate:
    """
    Admission, settlement and reports for all pools of one configuration.

    Every lease taken here is settled here, once, by `settle`; should a caller be cancelled while its claim is on the
    way or waits, the claim is undone.
    """

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        counter: Counter,
        clock: Clock,
        observer: Observer,
        new_lease_id: Callable[[], str],
        jitter: Callable[[], float],
    ) -> None:
        """
        Build the gate; `house.start` puts the first terms in force.

        Args:
            config: what to serve.
            store: the books.
            counter: the tokenizer.
            clock: pool time.
            observer: is told what happens.
            new_lease_id: yields ids that no other replica yields.
            jitter: yields numbers within [0, 1), evenly spread.
        """
        self._config = config
        self._store = store
        self._counter = counter
        self._clock = clock
        self._observer = observer
        self._new_lease_id = new_lease_id
        self._jitter = jitter
        self.directory = Directory(config)
        self.house = Housekeeper(config, store=store, clock=clock, observer=observer)
        self._decisions = DecisionLog(config.server.explain_last)
        self._alone = Alone(clock)
        self._reservations = Reservations(
            store=store, house=self.house, alone=self._alone, clock=clock, observer=observer
        )

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._config

    @property
    def observer(self) -> Observer:
        """Who is told what happens."""
        return self._observer

    async def reload(self, config: Config) -> None:
        """Put a new configuration in force; leases and what was learned stay."""
        await self.house.reload(config)
        self._config = config
        self.directory = Directory(config)

    # ------------------------------------------------------------------ admit

    async def admit(self, order: Order, on_wait: OnWait | None = None) -> Verdict:
        """
        Decide on a request (admission rules 3 to 6).

        Args:
            order: what is asked.
            on_wait: told once for how many milliseconds at most the request will wait, should it have to.

        Raises:
            RequestError: 400, the request can never fit; 404, a reload has just removed the entitlement.
        """
        started_us = self._clock.now_us()
        try:
            return await self._admit(order, started_us, on_wait)
        except RequestError as error:
            self._tell(order, Decision.REJECTED, error.code, started_us)
            raise

    async def _admit(self, order: Order, started_us: int, on_wait: OnWait | None) -> Verdict:
        pool, entitlement = order.pool, order.entitlement
        if not is_served(entitlement):
            reason = f"entitlement_{entitlement.state.value.lower()}"
            return self._refuse(order, answering.not_served(order), reason, started_us)
        live = self.house.pool(pool)
        raw_prompt = await self._raw_prompt(order, live)
        terms = live.terms(entitlement.name)
        cost = _price(order, live, terms, raw_prompt)
        lease_id = self._new_lease_id()
        claim = Claim(
            lease_id=lease_id,
            terms=terms,
            cost=cost,
            usable=live.ramp.usable(self._clock.now_ms()),
            window_ms=pool.window_ms,
            ttl_ms=self._config.server.lease_ttl_ms,
            # Asked again while it waits, a request without a body to know it by is still the same one.
            fingerprint=order.fingerprint or fingerprint_of(lease_id.encode()),
            is_retry=order.is_retry,
            enforce=order.enforce and pool.mode is Mode.ENFORCE,
        )
        try:
            taken = await self._reservations.take(live, claim, entitlement.max_wait_ms, on_wait)
        except StoreError:
            answer = answering.store_away(order)
            return self._refuse(order, answer, STORE_AWAY, started_us)
        reply, outcome = taken.reply, taken.reply.outcome
        started_us += taken.waited_us
        standing = live.tick.standings.get(entitlement.name, NEW_STANDING)
        basis = Basis(taken.claim, standing, outcome, taken.waited_us // 1_000)
        if isinstance(outcome, Refusal):
            answer = answering.shed(outcome, reply.balance, order, self._jitter())
            reason = STORE_AWAY if taken.is_alone else outcome.reason.value
            return self._refuse(order, answer, reason, started_us, basis)
        reason = "" if outcome.shadowed is None else outcome.shadowed.reason.value
        if taken.is_alone:
            reason = STORE_AWAY
        self._tell(order, Decision.ADMITTED, reason, started_us, basis)
        holding = self.house.hold(live, outcome)
        return Admitted(order, outcome, reply.balance, raw_prompt, holding)

    async def _raw_prompt(self, order: Order, live: LivePool) -> int:
        """Tokens of the prompt's text, as our tokenizer counts them."""
        facts = order.facts
        tokens = await self._count(order, live, facts.texts)
        if facts.shared_texts:
            tokens += facts.prompts * await self._count(order, live, facts.shared_texts)
        return tokens + facts.token_ids + facts.overhead_tokens

    async def _count(self, order: Order, live: LivePool, texts: Sequence[str]) -> int:
        """Count; of one entitlement's long prompts one at a time, so that they do not hold up everybody's."""
        vocabulary = order.pool.tokenizer
        count = self._counter.count_now(vocabulary, texts)
        if count is not None:
            return count
        async with live.counting(order.entitlement.name):
            return await self._counter.count(vocabulary, texts)

    def _refuse(
        self,
        order: Order,
        answer: Answer,
        reason: str,
        started_us: int,
        basis: Basis | None = None,
    ) -> Refused:
        outcome = Decision.SHED if answer.status == 429 else Decision.REJECTED
        self._tell(order, outcome, reason, started_us, basis)
        return Refused(answer)

    def _tell(
        self,
        order: Order,
        outcome: Decision,
        reason: str,
        started_us: int,
        basis: Basis | None = None,
    ) -> None:
        """Of what was priced (`basis`), the prompt is demand, and all of it is reserved if it was admitted."""
        self._decisions.add(order, outcome, reason, self._clock.now_ms(), basis)
        prompt = reserved = 0
        if basis is not None:
            prompt = basis.claim.cost.prompt_tokens
            reserved = basis.claim.cost.tokens if outcome is Decision.ADMITTED else 0
        self._observer.decided(
            Decided(
                outcome=outcome,
                reason=reason,
                pool=order.pool.name,
                entitlement=order.entitlement.name,
                service_class=order.entitlement.service_class,
                estimated_prompt_tokens=prompt,
                reserved_tokens=reserved,
                decision_us=self._clock.now_us() - started_us,
            )
        )

    # ------------------------------------------------------------------ settle

    async def settle(self, outcome: Outcome) -> None:
        """
        End an admitted request: charge it, give its lease back, and learn from it.

        A store failure is counted; the store settles when it is back, or the lease returns by its expiry.
        """
        admitted, order = outcome.admitted, outcome.admitted.order
        counted = 0
        try:
            if outcome.metered is not None and needs_count(outcome):
                counted = await self._counter.count(order.pool.tokenizer, outcome.metered.texts)
        finally:
            # A lease that is not settled because counting failed must not be renewed for ever.
            self.house.release(order.pool.name, admitted.lease.lease_id)
        amount = charge(outcome, counted)
        self._alone.settle(order.pool.name, admitted.lease.lease_id, amount.tokens)
        held_ms = 0
        try:
            settlement = await self._store.settle(
                order.pool.name, admitted.lease.lease_id, amount.tokens
            )
            held_ms = settlement.held_ms if settlement is not None else 0
        except StoreError as error:
            tell_store_failure(self._observer, "settle", error)
        await self._reservations.serve(self.house.pool(order.pool))
        self._learn(outcome, amount)
        event = Settled(
            pool=order.pool.name,
            entitlement=order.entitlement.name,
            service_class=order.entitlement.service_class,
            ending=outcome.ending,
            prompt_tokens=amount.prompt_tokens,
            prompt_source=amount.prompt_source,
            completion_tokens=amount.completion_tokens,
            completion_source=amount.completion_source,
            estimated_prompt_tokens=admitted.lease.cost.prompt_tokens,
            held_ms=held_ms,
        )
        self._decisions.settled(order, admitted.lease, event)
        self._observer.settled(event)

    def _learn(self, outcome: Outcome, amount: Charge) -> None:
        """Only whole answers teach: one that was cut, or not read, says nothing about how long they are."""
        order = outcome.admitted.order
        if outcome.ending is not Ending.COMPLETED:
            return
        live = self.house.pool(order.pool)
        key = learning_key(order.pool, order.facts.model)
        was_seen = amount.completion_source is not UsageSource.ESTIMATED
        if order.facts.decodes and was_seen:
            per_sequence = -(-amount.completion_tokens // max(1, order.facts.sequences))
            live.output_history(order.entitlement.name, key).add(per_sequence)
        pure_text = not (order.facts.images or order.facts.audio_clips or order.facts.flat)
        if amount.prompt_source is UsageSource.REPORTED and pure_text:
            live.prompt_ratio(key).learn(
                reported=amount.prompt_tokens, estimated=outcome.admitted.raw_prompt_tokens
            )

    # ------------------------------------------------------------------ report

    async def refresh(self) -> None:
        """Read the books for the next `report`."""
        await self.house.refresh()

    def report(self) -> Sequence[PoolReport]:
        """All pools as last read."""
        now_ms = self._clock.now_ms()
        return [pool_report(live, live.ramp.usable(now_ms), now_ms) for live in self.house.pools()]

    def explain(self, request_id: str) -> Explanation | None:
        """Why this replica decided on the newest request of this id as it did; None if that is not known any more."""
        return self._decisions.explain(request_id, self._clock.now_ms())

    @property
    def is_ready(self) -> bool:
        """Whether terms are in force, and requests can be decided on."""
        return self.house.is_ready

    @property
    def store_answers(self) -> bool:
        """Whether the store answered the last time it was asked; else this replica decides alone, or nobody does."""
        return self.house.store_answers

    async def close(self) -> None:
        """Send away whoever waits, and finish what is being undone."""
        await self._reservations.close()


def _price(order: Order, live: LivePool, terms: Terms, raw_prompt: int) -> Cost:
    """The cost to reserve, by what was learned of this model and entitlement."""
    pool, facts = order.pool, order.facts
    model = learning_key(pool, facts.model)
    prompt = live.prompt_ratio(model).apply(raw_prompt)
    prompt += facts.images * pool.image_tokens + facts.audio_clips * pool.audio_tokens
    if facts.flat:
        prompt += facts.sequences * pool.flat_tokens
    need = Need(prompt, facts.sequences, facts.max_output_tokens, facts.decodes, facts.prompts)
    learned = live.output_history(order.entitlement.name, model).p95
    return estimate(pool, order.entitlement, need, learned, terms.reach)
