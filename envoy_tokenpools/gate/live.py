"""
A pool as this replica knows it between two ticks.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from envoy_tokenpools.core.admission import Terms
from envoy_tokenpools.core.cost import OutputHistory, PromptRatio
from envoy_tokenpools.core.ledger import InUse, LedgerView
from envoy_tokenpools.core.pool import OnStoreError, Pool
from envoy_tokenpools.core.ramp import Ramp
from envoy_tokenpools.core.tick import Tick
from envoy_tokenpools.errors import RequestError
from envoy_tokenpools.gate.holding import Holdings
from envoy_tokenpools.gate.waiting import WaitingRoom


@dataclass(slots=True)
class LivePool:
    """
    Configuration, terms in force, and what was learned.

    Attributes:
        pool: as configured.
        ramp: what of its capacity is usable when.
        tick: the latest tick.
        tick_due_ms: when the next one is.
        outputs: what was generated, per entitlement and model.
        ratios: reported over estimated prompt tokens, per model.
        view: the books as last read, for reports.
        waiting: requests that wait for capacity, here.
        held: leases of requests that run, here.
        replicas: how many share the pool, as last seen.
        is_open: this replica has joined those who share the pool, with the configuration in force here.
        has_joined: it has done so before, with whatever configuration: it knows how many share the pool.
        is_lost: the store has lost its books, and does not have back yet what is held here.
        is_published: whether the tick was put in force, by whomever.
        own_terms: by this replica's own configuration, before anything was asked for.
    """

    pool: Pool
    ramp: Ramp
    tick: Tick
    tick_due_ms: int
    outputs: dict[tuple[str, str], OutputHistory] = field(default_factory=dict)
    ratios: dict[str, PromptRatio] = field(default_factory=dict)
    view: LedgerView = field(default_factory=lambda: LedgerView(InUse(), {}))
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    held: Holdings = field(default_factory=Holdings)
    replicas: int = 1
    is_open: bool = False
    has_joined: bool = False
    is_lost: bool = False
    is_published: bool = True
    own_terms: Mapping[str, Terms] = field(default_factory=dict)
    _counting: dict[str, asyncio.Lock] = field(default_factory=dict)

    @property
    def may_decide_alone(self) -> bool:
        """Whether requests of any class are decided here while the store is away; never before it was known."""
        return self.has_joined and OnStoreError.ALLOW in self.pool.on_store_error.values()

    def terms(self, entitlement: str) -> Terms:
        """
        The terms of `entitlement` now.

        What another replica has published need not know it, if their configurations differ for a while.

        Raises:
            RequestError: 404, a reload has removed it.
        """
        terms = self.tick.terms.get(entitlement)
        if terms is None:
            terms = self.own_terms.get(entitlement)
        if terms is None:
            raise RequestError(404, "model_not_found", "The entitlement has just been removed.")
        return terms

    def counting(self, entitlement: str) -> asyncio.Lock:
        """Held while a long prompt of `entitlement` is counted."""
        lock = self._counting.get(entitlement)
        if lock is None:
            lock = self._counting[entitlement] = asyncio.Lock()
        return lock

    def output_history(self, entitlement: str, model: str) -> OutputHistory:
        """Outputs of `entitlement` with `model`."""
        history = self.outputs.get((entitlement, model))
        if history is None:
            history = self.outputs[entitlement, model] = OutputHistory()
        return history

    def keep_learned(self, pool: Pool) -> None:
        """Forget what was learned about entitlements and models that are not in `pool`."""
        self.outputs = {
            (entitlement, model): history
            for (entitlement, model), history in self.outputs.items()
            if entitlement in pool.entitlements and model in pool.models
        }
        self.ratios = {m: ratio for m, ratio in self.ratios.items() if m in pool.models}

    def prompt_ratio(self, model: str) -> PromptRatio:
        """The learned ratio of `model`."""
        ratio = self.ratios.get(model)
        if ratio is None:
            ratio = self.ratios[model] = PromptRatio()
        return ratio


def learning_key(pool: Pool, model: str | None) -> str:
    """The configured model that a request's name stands for, so that clients cannot add names to what is learned."""
    return model if model in pool.models else pool.models[0]
