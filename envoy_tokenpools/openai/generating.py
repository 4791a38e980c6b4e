"""
What the endpoints that generate read: one function for each, from the fields of a body to its prompt.

Every place that a chat template or a tokenizer may take text from is read. Where a body states the same
thing in several places, all of them are, since backends differ in which of them they take.
"""

from envoy_tokenpools.openai.codes import ErrorCode, malformed, too_many
from envoy_tokenpools.openai.fields import Fields, missing, required
from envoy_tokenpools.openai.prompt import (
    MAX_PROMPTS,
    TOKENS_PER_MESSAGE,
    TOKENS_PRIMING_REPLY,
    Prompt,
)

_STATE_KEPT_BY_BACKEND = ("prompt", "previous_response_id", "conversation")
_INPUTS_OF_GENERATE = ("prompt", "text", "inputs", "token_ids", "prompt_token_ids", "input_ids")
_SETTINGS_OF_GENERATE = ("sampling_params", "parameters")


def chat(fields: Fields, prompt: Prompt) -> None:
    """`/v1/chat/completions`, and the conversations of its batches."""
    prompt.add_conversations(required(fields, "messages"), "messages")
    prompt.overhead_tokens += TOKENS_PRIMING_REPLY * prompt.prompts
    for name in ("tools", "functions", "documents"):
        if name in fields:
            prompt.add_json(fields[name])
    add_template(fields, prompt)
    _add_json_schema(fields, prompt)


def completions(fields: Fields, prompt: Prompt) -> None:
    """`/v1/completions`; prompts as embeddings come beside the others."""
    prompts = 0
    # Without a prompt the backend starts from its own beginning-of-text token: legal, and one sequence.
    if fields.get("prompt") is not None:
        prompt.add_inputs(fields["prompt"], "prompt", MAX_PROMPTS)
        prompts = prompt.prompts
    embeds = fields.get("prompt_embeds")
    if embeds is not None:
        prompts += len(embeds) if type(embeds) is list else 1
        if prompts > MAX_PROMPTS:
            raise too_many("prompt_embeds", MAX_PROMPTS, "prompts")
        prompt.add_embeds(embeds)
        prompt.prompts = max(prompt.prompts, prompts)
    prompt.add_content(fields.get("suffix"))
    _add_json_schema(fields, prompt)


def responses(fields: Fields, prompt: Prompt) -> None:
    """
    `/v1/responses`; what the backend keeps of earlier ones is not known here.

    One in the background is refused: its answer is fetched later, where nobody could meter it or hold its place.
    """
    if fields.get("background"):
        refusal = "'background' is not supported here: the answer must come with the request."
        raise malformed(ErrorCode.UNSUPPORTED_PARAMETER, refusal, "background")
    given = fields.get("input")
    if type(given) is str:
        prompt.add_content(given)
    elif given is not None:
        prompt.add_messages(given, "input")
        prompt.overhead_tokens += TOKENS_PRIMING_REPLY
    elif not any(fields.get(name) for name in _STATE_KEPT_BY_BACKEND):
        raise missing("input")
    prompt.add_content(fields.get("previous_input_messages"))
    prompt.add_content(fields.get("instructions"))
    template = fields.get("prompt")
    if type(template) is dict:
        prompt.add_values(template.get("variables"))
    prompt.add_json(fields.get("tools"))
    add_template(fields, prompt)
    text = fields.get("text")
    if type(text) is dict and type(text.get("format")) is dict and "schema" in text["format"]:
        prompt.add_json(text["format"])


def messages(fields: Fields, prompt: Prompt) -> None:
    """Anthropic's `/v1/messages`, and the counting of its tokens."""
    prompt.add_messages(required(fields, "messages"), "messages")
    prompt.overhead_tokens += TOKENS_PRIMING_REPLY
    system = fields.get("system")
    if system:
        prompt.overhead_tokens += TOKENS_PER_MESSAGE
        prompt.add_content(system)
    prompt.add_json(fields.get("tools"))
    add_template(fields, prompt)
    output = fields.get("output_config")
    if type(output) is dict and type(output.get("format")) is dict:
        prompt.add_json(output["format"].get("schema"))


def generate(fields: Fields, prompt: Prompt) -> None:
    """The engines' own endpoints: vLLM's prompt or token ids, SGLang's text or ids, TGI's inputs."""
    given = [name for name in _INPUTS_OF_GENERATE if fields.get(name) is not None]
    embeds = fields.get("input_embeds")
    if not given and embeds is None:
        raise missing("prompt")
    for name in given:
        prompt.add_inputs(fields[name], name, MAX_PROMPTS)
    if type(embeds) is list:
        _add_rows(embeds, prompt)
    prompt.add_content(fields.get("content_parts"))
    prompt.add_images(fields.get("image_data"))
    prompt.add_images(fields.get("video_data"))
    prompt.add_clips(fields.get("audio_data"))


def settings_of_generate(fields: Fields) -> list[Fields]:
    """
    The objects that may state a limit: the body itself, and its sampling parameters, one or several.

    Raises:
        RequestError: 400, for more parameters than a request may have prompts.
    """
    settings = [fields]
    for name in _SETTINGS_OF_GENERATE:
        nested = fields.get(name)
        if type(nested) is list and len(nested) > MAX_PROMPTS:
            raise too_many(name, MAX_PROMPTS, "objects")
        candidates = nested if type(nested) is list else [nested]
        settings += [candidate for candidate in candidates if type(candidate) is dict]
    return settings


def add_template(fields: Fields, prompt: Prompt) -> None:
    """A chat template of the client's own, and what it is rendered with."""
    prompt.add_content(fields.get("chat_template"))
    prompt.add_values(fields.get("chat_template_kwargs"))


def _add_json_schema(fields: Fields, prompt: Prompt) -> None:
    form = fields.get("response_format")
    if type(form) is dict:
        prompt.add_json(form.get("json_schema"))


def _add_rows(embeds: list[object], prompt: Prompt) -> None:
    """Embeddings as numbers: a row is a token; a batch has one list of rows for each prompt."""
    rows = [row for row in embeds if type(row) is list]
    if rows and rows[0] and type(rows[0][0]) is list:
        if len(rows) > MAX_PROMPTS:
            raise too_many("input_embeds", MAX_PROMPTS, "prompts")
        prompt.prompts = max(prompt.prompts, len(rows))
        prompt.token_ids += sum(map(len, rows))
    else:
        prompt.token_ids += len(rows)
