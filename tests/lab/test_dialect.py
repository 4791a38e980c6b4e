"""What the simulated server understands of a body, without HTTP."""

import msgspec
import pytest

from envoy_tokenpools.lab.dialect import (
    MESSAGE_TOKENS,
    Api,
    Offer,
    Question,
    Refusal,
    understand,
)

OFFER = Offer(models=("tiny", "alias"), max_model_len=100, reply_tokens=20)
CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi there"}]}


def asked(api: Api, **body: object) -> Question:
    """A body that must be served."""
    question = understand(api, msgspec.json.encode(body), OFFER)
    assert isinstance(question, Question), question
    return question


def refused(api: Api, **body: object) -> Refusal:
    """A body that must be refused."""
    refusal = understand(api, msgspec.json.encode(body), OFFER)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_a_chat_prompt_is_its_words_and_a_little_per_message() -> None:
    """Text in parts counts like plain text; a message without content counts itself."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one two three"}]},
        {"role": "assistant", "content": None},
    ]
    assert asked(Api.CHAT, messages=messages).prompt_tokens == 5 + 3 * MESSAGE_TOKENS


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("one two", [2]),
        (["one", "one two three"], [1, 3]),
        ([5, 6, 7, 8], [4]),
        ([[5, 6], [7]], [2, 1]),
        ("", [1]),
    ],
)
def test_prompts_of_every_form_are_counted(prompt: object, lengths: list[int]) -> None:
    """Text, texts, token ids and lists of them; one reply each."""
    question = asked(Api.COMPLETIONS, prompt=prompt, max_tokens=1)
    assert [reply.prompt_tokens for reply in question.replies] == lengths
    assert question.prompt_tokens == sum(lengths)


def test_each_prompt_is_answered_n_times() -> None:
    """Two prompts and n=3 are six sequences, numbered through, and the prompts count once."""
    question = asked(Api.COMPLETIONS, prompt=["a", "b c"], n=3, max_tokens=2)
    assert [reply.index for reply in question.replies] == list(range(6))
    assert [reply.prompt_tokens for reply in question.replies] == [1, 1, 1, 2, 2, 2]
    assert question.prompt_tokens == 3


def test_a_reply_is_cut_by_max_tokens_or_ends_by_itself() -> None:
    """`length` below the reply's natural length, `stop` with a silent end token at it."""
    (cut,) = asked(Api.CHAT, **CHAT, max_tokens=3).replies
    assert (cut.output_tokens, cut.finish_reason, cut.text()) == (3, "length", "the pool lends")
    (natural,) = asked(Api.CHAT, **CHAT).replies
    assert (natural.output_tokens, natural.finish_reason, natural.piece(20)) == (20, "stop", "")
    (forced,) = asked(Api.CHAT, **CHAT, max_tokens=50, ignore_eos=True).replies
    assert (forced.output_tokens, forced.finish_reason) == (50, "length")


def test_the_newer_name_of_max_tokens_wins() -> None:
    """As in vLLM: max_completion_tokens before max_tokens."""
    (reply,) = asked(Api.CHAT, **CHAT, max_tokens=9, max_completion_tokens=4).replies
    assert reply.output_tokens == 4


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "met"),
    [
        ("nds", "the pool le", 3, "nds"),
        (["zzz", " its"], "the pool lends", 4, " its"),
        (["pool", "po"], "the ", 2, "po"),
        ("zzz", "the pool lends its idle", 5, None),
    ],
)
def test_a_stop_string_ends_the_reply_before_itself(
    stop: object, text: str, tokens: int, met: str | None
) -> None:
    """The token that completes the stop string is counted, its text is not shown."""
    (reply,) = asked(Api.CHAT, **CHAT, max_tokens=5, stop=stop).replies
    assert (reply.text(), reply.output_tokens, reply.stop_reason) == (text, tokens, met)
    assert reply.finish_reason == ("stop" if met else "length")


def test_the_words_differ_between_choices_and_not_between_calls() -> None:
    """Deterministic text, so that tests can state it."""
    first, second = asked(Api.CHAT, **CHAT, n=2, max_tokens=4).replies
    assert first.text() != second.text()
    assert asked(Api.CHAT, **CHAT, n=2, max_tokens=4).replies == (first, second)


def test_usage_options_follow_vllm() -> None:
    """Continuous usage needs include_usage beside it; null options ask for nothing."""
    both = {"include_usage": True, "continuous_usage_stats": True}
    alone = {"continuous_usage_stats": True}
    assert asked(Api.CHAT, **CHAT, stream=True, stream_options=both).continuous_usage
    assert not asked(Api.CHAT, **CHAT, stream=True, stream_options=alone).continuous_usage
    assert not asked(Api.CHAT, **CHAT, stream=True, stream_options={}).include_usage
    assert not asked(Api.CHAT, **CHAT, stream=True, stream_options=None).include_usage


def test_the_responses_api_has_input_and_instructions() -> None:
    """Plain input is one message; a list is several; `n` is not a word of this API."""
    plain = asked(Api.RESPONSES, input="one two", instructions="be brief", max_output_tokens=3)
    assert plain.prompt_tokens == 2 + MESSAGE_TOKENS + 2
    items = [{"role": "user", "content": [{"type": "input_text", "text": "one two"}]}]
    listed = asked(Api.RESPONSES, input=items, n=3)
    assert listed.prompt_tokens == MESSAGE_TOKENS + 2
    assert len(listed.replies) == 1


def test_embeddings_generate_nothing() -> None:
    """One sequence per input, no output tokens, never a stream."""
    question = asked(Api.EMBEDDINGS, input=["one two", "three"], stream=True)
    assert [reply.output_tokens for reply in question.replies] == [0, 0]
    assert not question.stream


def test_unknown_fields_are_ignored_and_a_missing_model_is_the_first() -> None:
    """Both are what vLLM does."""
    assert asked(Api.CHAT, messages=CHAT["messages"], foo_bar=1).model == "tiny"


@pytest.mark.parametrize(
    ("api", "body", "status", "param"),
    [
        (Api.CHAT, CHAT | {"model": "nope"}, 404, "model"),
        (Api.CHAT, {"model": "tiny"}, 400, "body"),
        (Api.CHAT, CHAT | {"messages": "hi"}, 400, "body"),
        (Api.CHAT, CHAT | {"max_tokens": 0}, 400, "max_tokens"),
        (Api.CHAT, CHAT | {"max_tokens": 99}, 400, "max_tokens"),
        (Api.CHAT, CHAT | {"max_tokens": "many"}, 400, "body"),
        (Api.CHAT, CHAT | {"n": 129}, 400, "n"),
        (Api.CHAT, CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        (Api.COMPLETIONS, {"prompt": [5] * 100}, 400, "input_tokens"),
        (Api.COMPLETIONS, {"prompt": [5, "five"]}, 400, "body"),
        (Api.COMPLETIONS, {"prompt": [{}]}, 400, "body"),
        (Api.RESPONSES, {"model": "tiny"}, 400, "body"),
        (Api.EMBEDDINGS, {"model": "tiny"}, 400, "body"),
    ],
)
def test_what_vllm_refuses_is_refused(
    api: Api, body: dict[str, object], status: int, param: str
) -> None:
    """With its status, and naming the field at fault."""
    refusal = refused(api, **body)
    assert (refusal.status, refusal.param) == (status, param)
    error = msgspec.json.decode(refusal.body())["error"]
    assert error == {
        "message": refusal.message,
        "type": refusal.kind,
        "param": param,
        "code": status,
    }


def test_bad_json_is_a_400() -> None:
    """Neither a crash nor a 500."""
    refusal = understand(Api.CHAT, b'{"model":"tiny",', OFFER)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def test_completions_clip_an_output_that_is_too_long() -> None:
    """Where chat is refused, /v1/completions generates what still fits."""
    (reply,) = asked(Api.COMPLETIONS, prompt=[5] * 90, max_tokens=50, ignore_eos=True).replies
    assert reply.output_tokens == 10
