"""Render routes: the prompt that the model would read, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from llmstack_llm import CheckedSampling, check_fan_out, request_errors
from llmstack_server.apis.openai.chat import conversation_of, sampling_of
from llmstack_server.apis.openai.protocol import (
    CHAT,
    COMPLETIONS,
    AnswerFields,
    ChatCompletionRequest,
    CompletionRequest,
)
from llmstack_server.chat.prepare import render_conversation
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import answer_ids
from llmstack_server.web.checks import check_fields, check_model
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.sampling import PARAM_NAMES, given_sampling, parse_prompts
from llmstack_types.json_values import JSONObject, JSONValue


async def render_chat(state: ServerState, body: JSONObject, *, is_counted: bool = False) -> JSONObject:
    """The token ids of a conversation under the template, and its sampling parameters.

    `is_counted`: The token ids are counted and not sent; without it pictures, which they leave out, are refused.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(ChatCompletionRequest, body)
    if fields.messages is None:
        raise missing_parameter("messages")
    check_fields(state, body, fields, CHAT)
    given = sampling_of(fields)
    sampling = state.engine.check_sampling(given.values, given.names)
    rendered = await render_conversation(state, conversation_of(fields))
    if rendered.media and not is_counted:
        raise request_errors.unsupported_value("messages", "token ids alone do not stand for a prompt with pictures")
    _check_length(state, rendered.token_ids, sampling, "messages")
    return _rendered(state, fields, rendered.token_ids, sampling, answer_ids("chatcmpl", fields.request_id).answer)


async def render_completions(state: ServerState, body: JSONObject) -> list[JSONObject]:
    """The rendered prompts of a request for completions."""
    fields = parse(CompletionRequest, body)
    prompts, is_list = parse_prompts(fields.prompt, body)
    check_fields(state, body, fields, COMPLETIONS)
    check_fan_out(len(prompts), 1, state.engine.limits)
    given, names = given_sampling(fields, PARAM_NAMES)
    sampling = state.engine.check_sampling(given, names, is_echo=bool(fields.echo))
    adds_special = fields.add_special_tokens is not False
    rendered, answer_id = [], answer_ids("cmpl", fields.request_id).answer
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if is_list else "prompt"
        if isinstance(prompt, str):
            prompt = await state.engine.tokenize(prompt, add_special_tokens=adds_special, param=param)
        _check_length(state, prompt, sampling, param)
        rendered.append(_rendered(state, fields, prompt, sampling, f"{answer_id}-{index}"))
    return rendered


def _check_length(state: ServerState, token_ids: Sequence[int], sampling: CheckedSampling, param: str) -> None:
    """Refuses a prompt that can never run, unless the request cuts it."""
    longest = state.engine.limits.max_request_tokens
    if len(token_ids) > longest and sampling.values.get("truncate_prompt_tokens") is None:
        raise request_errors.context_length_exceeded(param, longest, len(token_ids))


def _rendered(
    state: ServerState, fields: AnswerFields, token_ids: Sequence[int], sampling: CheckedSampling, request_id: str
) -> dict[str, object]:
    """One rendered prompt, with the keys of vLLM."""
    return {
        "request_id": request_id,
        "token_ids": list(token_ids),
        "features": None,
        "sampling_params": _plain(sampling.values),
        "model": check_model(state, fields.model),
        "stream": bool(fields.stream),
        "cache_salt": fields.cache_salt,
        "priority": fields.priority or 0,
        "kv_transfer_params": None,
    }


def _plain(values: Mapping[str, JSONValue]) -> JSONObject:
    """Sampling parameters as JSON; objects are shown by the fields that are set."""
    plain = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.asdict(value)
            plain[name] = {key: entry for key, entry in fields.items() if entry not in (None, False)}
        elif name != "output_kind":  # how the front end delivers, which is the answer's form
            plain[name] = value
    return plain
