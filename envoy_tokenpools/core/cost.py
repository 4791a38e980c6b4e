"""
What one request needs, estimated before it runs, and what is learned from those that ran.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from envoy_tokenpools.core.pool import Entitlement, OutputEstimate, Pool
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import RequestError

OUTPUT_SAMPLES = 256
"""Completions remembered per entitlement and model: enough for a steady p95, a few KiB each."""

MIN_OUTPUT_SAMPLES = 20
"""Below this a p95 is mostly its largest sample; the stated maximum is reserved instead."""

RATIO_STEP = 0.05
"""How far one response moves the prompt ratio: about the last twenty responses count."""

MIN_RATIO_TOKENS = 128
"""In a short prompt the chat template's own tokens outweigh the text, and say nothing about long ones."""

RATIO_BOUNDS = (0.2, 5.0)
"""A backend's tokenizer differs from ours by less than this, or its report is wrong."""


@dataclass(frozen=True, slots=True)
class Cost:
    """
    What one request takes from a pool.

    Attributes:
        prompt_tokens: tokens of the prompt that the backend will see.
        output_tokens: tokens reserved for the output of all sequences together.
        kv_bytes: KV cache for both.
        concurrency: sequences that decode at the same time.
    """

    prompt_tokens: int
    output_tokens: int
    kv_bytes: int
    concurrency: int

    @property
    def tokens(self) -> int:
        """Prompt and output, weighted equally (paper section 3.1)."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Need:
    """
    What a request states about itself, in tokens.

    Attributes:
        prompt_tokens: estimated prompt, all prompts of the request together.
        sequences: outputs generated at the same time (n or best_of, times prompts).
        max_output_tokens: stated maximum per sequence; None if the client set none.
        decodes: False for embeddings and the like, which generate nothing.
        prompts: how many prompts or inputs share `prompt_tokens`.
    """

    prompt_tokens: int
    sequences: int
    max_output_tokens: int | None
    decodes: bool = True
    prompts: int = 1


def estimate(
    pool: Pool,
    entitlement: Entitlement,
    need: Need,
    learned_output: int | None,
    reach: Resources | None = None,
) -> Cost:
    """
    The cost to reserve for `need`.

    Output is per sequence what was learned, where that is known and the pool reserves by it, but not more than the
    stated maximum; without either, the pool's default. What nobody stated is clamped to what the pool can hold.
    Concurrency and KV bytes are clamped to the pool: a wider request runs alone, as the backend would queue its
    sequences.

    Args:
        pool: the pool.
        entitlement: whose request it is.
        need: what the request states.
        learned_output: tokens per sequence that this entitlement really generates; None if not known.
        reach: what of the pool the entitlement could have if nobody else were there; all of it if None.

    Raises:
        RequestError: 400, when the prompt with an explicit maximum, or the number of sequences, can never fit.
    """
    reach = pool.capacity if reach is None else reach
    # Where everything is withheld for others, one sequence is asked for all the same: and is refused, for now.
    sequences = min(need.sequences, max(1, reach.concurrency)) if need.decodes else 1
    limit = entitlement.ceilings.concurrency
    if limit is not None and sequences > limit:
        raise RequestError(
            400,
            "too_many_sequences",
            f"The request generates {sequences} sequences at once; this entitlement allows {limit}.",
            "n",
        )
    room = _room(pool, entitlement, reach)
    # Prompts of one request run one after another where they do not fit together, so that each alone has to.
    prompt_each = -(-need.prompt_tokens // need.prompts)
    if prompt_each > room:
        raise _too_long(f"{prompt_each} prompt tokens", room, "messages")
    output = _output(pool, need, prompt_each, room, learned_output) if need.decodes else 0
    return Cost(
        prompt_tokens=need.prompt_tokens,
        output_tokens=output,
        kv_bytes=min(need.prompt_tokens + output, room) * pool.kv_bytes_per_token,
        concurrency=sequences,
    )


def _output(pool: Pool, need: Need, prompt_each: int, room: int, learned: int | None) -> int:
    """Tokens to reserve for the output of all sequences."""
    if pool.output_estimate is not OutputEstimate.P95:
        learned = None
    stated = need.max_output_tokens
    if stated is not None:
        if prompt_each + stated > room:
            asked = f"{prompt_each} prompt tokens and up to {stated} output tokens"
            raise _too_long(asked, room, "max_tokens")
        return need.sequences * (stated if learned is None else min(stated, learned))
    each = pool.default_max_tokens if learned is None else learned
    holds = room - prompt_each
    if need.prompt_tokens < pool.window_tokens:
        holds = min(holds, pool.window_tokens - need.prompt_tokens)
    return min(each * need.sequences, holds)


def _room(pool: Pool, entitlement: Entitlement, reach: Resources) -> int:
    """Tokens of context that this entitlement could hold at once if nobody else were there."""
    limit = entitlement.ceilings.kv_bytes
    kv_bytes = (
        reach.kv_bytes if reach.kv_bytes >= pool.kv_bytes_per_token else pool.capacity.kv_bytes
    )
    return (kv_bytes if limit is None else min(limit, kv_bytes)) // pool.kv_bytes_per_token


def _too_long(asked: str, room: int, param: str) -> RequestError:
    return RequestError(
        400,
        "context_length_exceeded",
        f"The request asks for {asked}, but the KV cache behind it holds at most {room} tokens.",
        param,
    )


@dataclass(slots=True)
class OutputHistory:
    """The outputs that one entitlement really generated with one model, per sequence."""

    _recent: deque[int] = field(default_factory=deque)
    _ordered: list[int] = field(default_factory=list)

    def add(self, tokens_per_sequence: int) -> None:
        """Remember the output of a completed request."""
        if len(self._recent) == OUTPUT_SAMPLES:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(tokens_per_sequence)
        insort(self._ordered, tokens_per_sequence)

    @property
    def p95(self) -> int | None:
        """The 95th percentile of recent outputs, at least 1; None while too few are known."""
        known = len(self._ordered)
        if known < MIN_OUTPUT_SAMPLES:
            return None
        return max(1, self._ordered[min(known - 1, known * 95 // 100)])


@dataclass(slots=True)
class PromptRatio:
    """Reported prompt tokens over our estimate, learned per model: tiktoken is exact for OpenAI's only."""

    value: float = 1.0

    def learn(self, *, reported: int, estimated: int) -> None:
        """Take one response's report into account; bounded, so that one wrong report does little."""
        if estimated < MIN_RATIO_TOKENS or reported <= 0:
            return
        low, high = RATIO_BOUNDS
        ratio = max(low, min(high, reported / estimated))
        self.value += RATIO_STEP * (ratio - self.value)

    def apply(self, estimated: int) -> int:
        """The corrected estimate, rounded; at least 1 where there was anything."""
        return max(1, round(estimated * self.value)) if estimated else 0
