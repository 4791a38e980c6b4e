"""
What an ended request is charged: the backend's report, else what was seen, else what was reserved.
"""

from dataclasses import dataclass

from envoy_tokenpools.gate.order import Outcome
from envoy_tokenpools.observer import Ending
from envoy_tokenpools.openai.usage import UsageSource

CHARS_PER_TOKEN = 4
"""For generated text beyond what a meter holds: English averages about four characters per token."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens to charge, and where each number comes from."""

    prompt_tokens: int
    prompt_source: UsageSource
    completion_tokens: int
    completion_source: UsageSource

    @property
    def tokens(self) -> int:
        """All that is taken from the buckets."""
        return self.prompt_tokens + self.completion_tokens


def needs_count(outcome: Outcome) -> bool:
    """Whether the generated text has to be tokenized: only where the backend reported no completion."""
    metered = outcome.metered
    if metered is None or not metered.texts:
        return False
    return metered.usage is None or metered.usage.completion_tokens is None


def charge(outcome: Outcome, counted_tokens: int) -> Charge:
    """
    The charge for `outcome`; `counted_tokens` is the tokenizer's count of its generated texts, if `needs_count`.

    - Reported usage is taken as it is.
    - A backend that refused (status 400 and above, Envoy's own errors among them) delivered nothing: nothing is charged
      that it did not report.
    - A client that left before any answer is charged its prompt, which the backend may have read by then: leaving early
      must not be a way to have prompts processed for nothing.
    - A request that we evicted before any answer is charged nothing either.
    - Otherwise the prompt is charged as estimated and the output as counted; where some of it could not be read, at
      least as reserved.
    """
    admitted, metered = outcome.admitted, outcome.metered
    cost, facts = admitted.lease.cost, admitted.order.facts
    usage = metered.usage if metered is not None else None
    refused = outcome.status is not None and outcome.status >= 400
    if outcome.ending is Ending.EVICTED and outcome.status is None:
        refused = True  # by ourselves
    prompt, prompt_source = (0 if refused else cost.prompt_tokens), UsageSource.ESTIMATED
    if usage is not None and usage.prompt_tokens is not None:
        prompt, prompt_source = usage.prompt_tokens, UsageSource.REPORTED
        if facts.prompts > 1 and metered is not None and not metered.finished:
            # Until the end, a batch reports the prompt of each choice alone.
            prompt = max(prompt, cost.prompt_tokens)
    if usage is not None and usage.completion_tokens is not None:
        return Charge(prompt, prompt_source, usage.completion_tokens, UsageSource.REPORTED)
    if refused or outcome.status is None:
        return Charge(prompt, prompt_source, 0, UsageSource.COUNTED)
    if metered is None:
        return Charge(prompt, prompt_source, cost.output_tokens, UsageSource.ESTIMATED)
    if facts.echo:
        counted_tokens = max(0, counted_tokens - admitted.raw_prompt_tokens)
    counted_tokens += metered.overflow_chars // CHARS_PER_TOKEN
    counted_tokens = max(counted_tokens, metered.token_ids)
    if metered.unread and counted_tokens < cost.output_tokens:
        return Charge(prompt, prompt_source, cost.output_tokens, UsageSource.ESTIMATED)
    return Charge(prompt, prompt_source, counted_tokens, UsageSource.COUNTED)
