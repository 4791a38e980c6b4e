"""What a request is taken to need: stated maxima, defaults, what was learned, and what can never fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envoy_tokenpools.core.cost import (
    MIN_OUTPUT_SAMPLES,
    MIN_RATIO_TOKENS,
    OUTPUT_SAMPLES,
    RATIO_BOUNDS,
    Cost,
    Need,
    OutputHistory,
    PromptRatio,
    estimate,
)
from envoy_tokenpools.core.pool import Limits, OutputEstimate, Pool, ServiceClass
from envoy_tokenpools.core.resources import Resources
from envoy_tokenpools.errors import RequestError
from tests.support.pools import KV_BYTES_PER_TOKEN, entitlement, pool

SPOT = entitlement("spot", ServiceClass.SPOT)

ROOM = 10_000
"""Tokens of context that the pool's KV cache holds."""

POOL = pool(
    Resources(tokens_per_second=5_000, kv_bytes=ROOM * KV_BYTES_PER_TOKEN, concurrency=16), SPOT
)


def chat(maximum: int | None = None, *, prompt: int = 9, sequences: int = 1) -> Need:
    """A chat request; 9 tokens are `hi` in its message."""
    return Need(prompt, sequences, maximum)


def cost_of(need: Need, learned: int | None = None, where: Pool = POOL) -> Cost:
    """The cost for the spot entitlement."""
    return estimate(where, SPOT, need, learned)


def refusal(need: Need, where: Pool = POOL) -> RequestError:
    """The 400 that `need` gets."""
    with pytest.raises(RequestError) as caught:
        cost_of(need, where=where)
    assert caught.value.status == 400
    return caught.value


# ---------------------------------------------------------------- stated, default, learned


@pytest.mark.parametrize(
    ("sequences", "output"), [(1, 800), (3, 2_400)], ids=["one sequence", "n of 3"]
)
def test_a_stated_maximum_is_reserved_for_every_sequence(sequences: int, output: int) -> None:
    """800 output tokens, 2,400 with n 3 (of fields that disagree the worst reading arrives here)."""
    assert cost_of(chat(800, sequences=sequences)) == Cost(
        prompt_tokens=9,
        output_tokens=output,
        kv_bytes=(9 + output) * KV_BYTES_PER_TOKEN,
        concurrency=sequences,
    )


def test_several_prompts_decode_one_sequence_each() -> None:
    """Two prompts with a maximum of 10 reserve 20 tokens of output and two sequences."""
    cost = cost_of(chat(10, prompt=5, sequences=2))
    assert (cost.tokens, cost.concurrency) == (25, 2)


def test_without_a_maximum_the_default_is_reserved() -> None:
    """The pool's default per sequence."""
    assert cost_of(chat()).output_tokens == POOL.default_max_tokens
    assert cost_of(chat(sequences=4)).output_tokens == 4 * POOL.default_max_tokens


@pytest.mark.parametrize(
    "capacity",
    [
        Resources(100, ROOM * KV_BYTES_PER_TOKEN, 16),
        Resources(5_000, 1_000 * KV_BYTES_PER_TOKEN, 16),
    ],
    ids=["token bucket", "KV cache"],
)
def test_a_default_is_clamped_to_what_the_pool_holds(capacity: Resources) -> None:
    """A default of 1,024 in a pool of 1,000 tokens reserves all of it, and is not refused."""
    small = replace(POOL, capacity=capacity, default_max_tokens=1_024)
    cost = cost_of(chat(), where=small)
    assert (cost.tokens, cost.output_tokens) == (1_000, 991)


def test_a_prompt_beyond_the_window_still_reserves_its_output() -> None:
    """The bucket admits what is deeper than itself; only the cache bounds the default then."""
    small = replace(POOL, capacity=Resources(1, ROOM * KV_BYTES_PER_TOKEN, 16))
    assert cost_of(chat(prompt=500), where=small).output_tokens == 256
    assert cost_of(chat(prompt=ROOM - 5), where=small).output_tokens == 5


@pytest.mark.parametrize(
    ("need", "learned", "output"),
    [
        (chat(4_096), 120, 120),
        (chat(50), 120, 50),
        (chat(4_096, sequences=2), 120, 240),
        (chat(), 120, 120),
        (chat(0), 120, 0),
    ],
)
def test_what_was_learned_lowers_the_reservation(need: Need, learned: int, output: int) -> None:
    """Not more than the p95 per sequence is reserved, and never more than what was stated."""
    assert cost_of(need, learned).output_tokens == output


def test_a_pool_may_reserve_by_stated_maxima_only() -> None:
    """`output_estimate: max_tokens` ignores what was learned."""
    strict = replace(POOL, output_estimate=OutputEstimate.MAX_TOKENS)
    assert cost_of(chat(4_096), 120, where=strict).output_tokens == 4_096


def test_a_maximum_of_zero_is_not_a_missing_one() -> None:
    """It reserves no output."""
    assert cost_of(chat(0)).output_tokens == 0


def test_embeddings_reserve_their_prompt_and_one_place() -> None:
    """Nothing is generated, whatever the number of inputs."""
    cost = cost_of(Need(500, 64, None, decodes=False), 120)
    assert cost == Cost(500, 0, 500 * KV_BYTES_PER_TOKEN, 1)


# ---------------------------------------------------------------- what can never fit


def test_a_prompt_and_maximum_that_fill_the_cache_fit() -> None:
    """At the limit is inside it."""
    assert cost_of(chat(ROOM - 9)).tokens == ROOM


def test_a_prompt_and_maximum_beyond_the_cache_are_a_400() -> None:
    """It says what was asked, what there is, and which field to change."""
    error = refusal(chat(ROOM - 8))
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert "9 prompt tokens and up to 9992 output tokens" in str(error)
    assert "10000 tokens" in str(error)


def test_a_prompt_beyond_the_cache_is_a_400() -> None:
    """Without any maximum too, and for embeddings."""
    error = refusal(chat(prompt=ROOM + 1))
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert refusal(Need(ROOM + 1, 1, None, decodes=False)).param == "messages"


def test_an_absurd_maximum_is_a_400() -> None:
    """Whatever its size, it is compared and never reserved."""
    assert refusal(chat(2**63)).param == "max_tokens"


def test_prompts_of_one_request_have_to_fit_one_by_one() -> None:
    """A batch larger than the cache is legal, for the backend works it off; its cache is clamped to all there is."""
    batch = Need(3 * ROOM, 1, None, decodes=False, prompts=100)
    cost = cost_of(batch)
    assert (cost.prompt_tokens, cost.kv_bytes) == (3 * ROOM, ROOM * KV_BYTES_PER_TOKEN)
    wide = cost_of(Need(100, 50, ROOM - 2, prompts=50))
    assert (wide.output_tokens, wide.kv_bytes) == (50 * (ROOM - 2), ROOM * KV_BYTES_PER_TOKEN)
    assert refusal(Need(100 * ROOM + 1, 1, None, decodes=False, prompts=100)).param == "messages"


def test_an_absurd_width_without_a_maximum_takes_the_whole_pool() -> None:
    """Its default is clamped, so it runs alone or not at all."""
    cost = cost_of(chat(sequences=10**9))
    assert (cost.tokens, cost.concurrency) == (ROOM, 16)


def test_a_request_wider_than_the_pool_runs_alone() -> None:
    """Twenty sequences on sixteen places take all of them; their output counts in full."""
    cost = cost_of(chat(10, sequences=20))
    assert (cost.concurrency, cost.output_tokens) == (16, 200)


def test_a_request_wider_than_its_entitlement_is_a_400() -> None:
    """It could never be admitted, so no 429 sends it round in circles."""
    narrow = entitlement("narrow", ServiceClass.SPOT, limits=Limits(concurrency=4))
    assert estimate(POOL, narrow, chat(10, sequences=4), None).concurrency == 4
    with pytest.raises(RequestError, match="5 sequences at once") as caught:
        estimate(POOL, narrow, chat(10, sequences=5), None)
    assert (caught.value.code, caught.value.param) == ("too_many_sequences", "n")


def test_the_room_is_that_of_the_entitlement() -> None:
    """A guaranteed baseline of 100 tokens of KV cache is a ceiling: more is a 400, a default is clamped to it."""
    baseline = Resources(1_000, 100 * KV_BYTES_PER_TOKEN, 4)
    guaranteed = entitlement("g", ServiceClass.GUARANTEED, baseline)
    assert estimate(POOL, guaranteed, chat(), None).tokens == 100
    with pytest.raises(RequestError, match="at most 100 tokens"):
        estimate(POOL, guaranteed, chat(92), None)


def within(sequences: int = 16, room: int = ROOM) -> Resources:
    """What the others leave of the pool: so many sequences, and a KV cache of `room` tokens."""
    return Resources(5_000, room * KV_BYTES_PER_TOKEN, sequences)


def test_a_request_wider_than_what_others_leave_takes_all_of_that() -> None:
    """Sixteen sequences where four are withheld for somebody else are twelve; their output counts in full."""
    cost = estimate(POOL, SPOT, chat(10, sequences=16), None, within(sequences=12))
    assert (cost.concurrency, cost.output_tokens) == (12, 160)


def test_the_room_is_what_others_leave() -> None:
    """A default is clamped to it, and so is a batch; a prompt with a stated maximum beyond it is a 400."""
    reach = within(room=100)
    assert estimate(POOL, SPOT, chat(), None, reach).tokens == 100
    batch = Need(900, 1, None, decodes=False, prompts=9)
    assert estimate(POOL, SPOT, batch, None, reach).kv_bytes == reach.kv_bytes
    assert estimate(POOL, SPOT, chat(91), None, reach).tokens == 100
    with pytest.raises(RequestError, match="at most 100 tokens"):
        estimate(POOL, SPOT, chat(92), None, reach)


def test_where_others_leave_nothing_the_request_still_has_a_cost() -> None:
    """It is refused for now, and not for ever: no 400, no cost of nothing."""
    for reach in (Resources.NONE, within(sequences=0), Resources(0, KV_BYTES_PER_TOKEN - 1, 0)):
        cost = estimate(POOL, SPOT, chat(10, sequences=4), None, reach)
        assert (cost.concurrency, cost.tokens) == (1, 49)
        assert cost.kv_bytes > reach.kv_bytes or cost.concurrency > reach.concurrency


@given(
    prompt=st.integers(0, 2 * ROOM),
    sequences=st.integers(1, 40),
    maximum=st.none() | st.integers(0, 2 * ROOM),
    learned=st.none() | st.integers(1, 5_000),
    decodes=st.booleans(),
)
def test_a_cost_always_fits_an_idle_pool(
    prompt: int, sequences: int, maximum: int | None, learned: int | None, *, decodes: bool
) -> None:
    """Or it is a 400: nothing is priced so that it could never be admitted."""
    need = Need(prompt, sequences, maximum, decodes=decodes)
    if prompt + ((maximum or 0) if decodes else 0) > ROOM:
        refusal(need)
        return
    cost = cost_of(need, learned)
    assert cost.prompt_tokens == prompt
    assert 0 <= cost.output_tokens <= (ROOM if maximum is None else maximum * sequences)
    assert cost.kv_bytes <= POOL.capacity.kv_bytes
    assert 1 <= cost.concurrency <= POOL.capacity.concurrency


# ---------------------------------------------------------------- learning


def test_nothing_is_learned_from_too_few() -> None:
    """The stated maximum is reserved until a p95 means something."""
    history = OutputHistory()
    for _ in range(MIN_OUTPUT_SAMPLES - 1):
        history.add(100)
        assert history.p95 is None
    history.add(100)
    assert history.p95 == 100


def test_the_p95_of_a_hundred_outputs() -> None:
    """Of 1 to 100 about 95, in whatever order they came."""
    history = OutputHistory()
    for tokens in range(100, 0, -1):
        history.add(tokens)
    assert history.p95 in (95, 96)


@given(st.lists(st.integers(0, 10_000), min_size=MIN_OUTPUT_SAMPLES, max_size=300))
def test_the_p95_covers_95_of_a_hundred_recent_outputs(outputs: list[int]) -> None:
    """It is one of them, at least 1, and at most a twentieth is above it."""
    history = OutputHistory()
    for tokens in outputs:
        history.add(tokens)
    recent = outputs[-OUTPUT_SAMPLES:]
    p95 = history.p95
    assert p95 is not None
    assert p95 == 1 or p95 in recent
    assert sum(tokens > p95 for tokens in recent) <= len(recent) / 20


def test_old_outputs_are_forgotten() -> None:
    """A tenant that turns brief reserves less after a while."""
    history = OutputHistory()
    for _ in range(OUTPUT_SAMPLES):
        history.add(4_000)
    for _ in range(OUTPUT_SAMPLES):
        history.add(10)
    assert history.p95 == 10


def test_outputs_of_nothing_still_reserve_a_token() -> None:
    """A reservation of 0 would be no reservation."""
    history = OutputHistory()
    for _ in range(MIN_OUTPUT_SAMPLES):
        history.add(0)
    assert history.p95 == 1


def test_the_ratio_converges_on_what_the_backend_reports() -> None:
    """A tokenizer that makes 30 % more is followed within a hundred responses."""
    ratio = PromptRatio()
    assert ratio.apply(1_000) == 1_000
    for _ in range(100):
        ratio.learn(reported=1_300, estimated=1_000)
    assert ratio.apply(1_000) == pytest.approx(1_300, abs=3)


@given(st.lists(st.tuples(st.integers(-5, 10**9), st.integers(-5, 10**9)), max_size=50))
def test_the_ratio_stays_within_its_bounds(reports: list[tuple[int, int]]) -> None:
    """However wrong a report is; and one report moves it by a twentieth of the span at most."""
    ratio, (low, high) = PromptRatio(), RATIO_BOUNDS
    for reported, estimated in reports:
        before = ratio.value
        ratio.learn(reported=reported, estimated=estimated)
        assert low <= ratio.value <= high
        assert abs(ratio.value - before) <= (high - low) / 20 + 1e-9


@pytest.mark.parametrize(
    ("reported", "estimated"), [(0, 1_000), (1_000, 0), (-1, 1_000), (1_000, -1)]
)
def test_an_empty_report_teaches_nothing(reported: int, estimated: int) -> None:
    """A missing count is no count of zero."""
    ratio = PromptRatio()
    ratio.learn(reported=reported, estimated=estimated)
    assert ratio.value == 1.0


def test_a_short_prompt_teaches_nothing() -> None:
    """The template's own 28 tokens around one word are no reason to take long prompts for three times as long."""
    ratio = PromptRatio()
    for _ in range(100):
        ratio.learn(reported=3 * (MIN_RATIO_TOKENS - 1), estimated=MIN_RATIO_TOKENS - 1)
        ratio.learn(reported=29, estimated=9)
    assert ratio.apply(1_000) == 1_000
    ratio.learn(reported=3 * MIN_RATIO_TOKENS, estimated=MIN_RATIO_TOKENS)
    assert ratio.apply(1_000) > 1_000


def test_a_corrected_estimate_of_something_is_something() -> None:
    """At least 1, and 0 only of nothing."""
    ratio = PromptRatio(0.2)
    assert [ratio.apply(tokens) for tokens in (0, 1, 10)] == [0, 1, 2]
