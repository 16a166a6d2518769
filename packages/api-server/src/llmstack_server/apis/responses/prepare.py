"""Preparation of a response, from the body of its request."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llmstack_llm import GivenSampling, request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.admission.seeds import draw_seeds_from
from llmstack_server.apis.responses.compaction import INSTRUCTIONS, KIND, MAX_TOKENS, CompactionAnswer
from llmstack_server.apis.responses.custom_tools import demanded_grammar
from llmstack_server.apis.responses.input_items import adding, new_item_id, new_response_id, read_items, turns_after
from llmstack_server.apis.responses.local import NOT_FOUND, response_not_found
from llmstack_server.apis.responses.objects import ResponseObject
from llmstack_server.apis.responses.protocol import (
    OF_COMPACTION,
    UNSUPPORTED,
    ResponseRequest,
    check_include,
    check_metadata,
    check_words,
)
from llmstack_server.apis.responses.run import ResponseRun
from llmstack_server.apis.responses.shared import SharedResponses, referenced_ids
from llmstack_server.apis.responses.store import StoredItem, StoredResponse, decode, encode
from llmstack_server.apis.responses.tools import chat_tool_choice, chat_tools, structured_outputs
from llmstack_server.apis.responses.truncation import submit_newest_turns
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.prepare import SubmittedChat, render_conversation, submit_chat
from llmstack_server.chat.turns import in_words_of_api
from llmstack_server.state.answer_source import AnswerSource, current_source, lasting
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.fields import parse
from llmstack_server.web.pauses import collected
from llmstack_server.web.restarts import kept_request
from llmstack_server.web.sampling import PARAM_NAMES, given_sampling
from llmstack_server.web.sse import encode_json
from llmstack_server.web.structured import with_form
from llmstack_types import InvalidRequestError

if TYPE_CHECKING:
    from llmstack_server.state.kept_rows import KeptRequest

PATH: Final = "/v1/responses"
_NAMES = {**PARAM_NAMES, "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
_FORM_NAMES = {
    "structured_outputs": "text.format", "structured_outputs.json": "text.format.schema",
    "structured_outputs.json_object": "text.format",
}  # fmt: skip
# A function has no object of its own here.
_FUNCTION_NAMES = {".function": ""}


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response that has passed every check.

    Attributes:
        input_items: The items that the model reads, those of earlier turns first.
        owner: The tenant that it belongs to.
        request, source: From which another server may finish it, where it is in the background and kept on a disk.
    """

    run: ResponseRun
    input_items: tuple[StoredItem, ...]
    fields: ResponseRequest
    owner: str
    request: KeptRequest | None
    source: AnswerSource | None


async def prepare_response(state: ServerState, responses: SharedResponses, body: dict[str, object]) -> PreparedResponse:
    """Checks a request, finds the turns before it, renders the conversation and tokenizes it.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    fields, input_items = await _read(state, responses, body)
    is_stored = fields.store is not False and responses.local.store.is_enabled
    if is_stored:
        responses.local.check_storage()
    request, source = None, None
    if fields.background and responses.local.saver is not None:
        rest = {name: value for name, value in body.items() if name != "input"}  # which is kept as items
        request, source = kept_request(state, PATH, encode_json(rest).encode("utf-8", "replace")), AnswerSource()
        draw_seeds_from(request.seed)
    response_id = new_response_id(responses.process_index)
    run = await _new_run(state, fields, input_items, response_id, is_stored=is_stored, source=source)
    return PreparedResponse(run, input_items, fields, current_client.get().tenant, request, source)


async def prepare_again(state: ServerState, stored: StoredResponse, request: KeptRequest) -> ResponseRun:
    """The run of a response that an earlier server has begun; raises as `prepare_response`."""
    fields = parse(ResponseRequest, json.loads(request.body))
    draw_seeds_from(request.seed)
    if stored.source is not None:
        stored.source.begin_again()
    return await _new_run(state, fields, stored.input_items, stored.id, is_stored=True, source=stored.source)


async def _new_run(
    state: ServerState,
    fields: ResponseRequest,
    input_items: tuple[StoredItem, ...],
    response_id: str,
    *,
    is_stored: bool,
    source: AnswerSource | None,
) -> ResponseRun:
    current_source.set(source)  # also for the task in the background, which begins with a copy of this context
    chat = await _submit(state, fields, await _conversation(state, fields, input_items), response_id)
    response = ResponseObject(
        response_id,
        fields.model or state.served_model_name,
        fields,
        chat.outputs.prompts[0].sampling_params,
        is_stored=is_stored,
        status="queued" if fields.background else "in_progress",
        created_at=lasting(int(time.time())),
    )
    sign = None
    if state.receipts is not None:
        outputs, sign = state.receipts.note(state, chat.outputs)
        chat = chat._replace(outputs=outputs)
    shows_ids = state.config.http.answers.shows_tokens_as_ids
    return ResponseRun(chat, response, shows_ids=shows_ids, sign=sign)


async def count_input_tokens(state: ServerState, responses: SharedResponses, body: dict[str, object]) -> int:
    """The number of tokens that the model would read; raises as `prepare_response`."""
    fields, input_items = await _read(state, responses, body)
    conversation = await _conversation(state, fields, input_items)
    try:
        rendered = await render_conversation(state, conversation)
    except InvalidRequestError as error:
        raise in_words_of_api(error, "input", _FUNCTION_NAMES, conversation.messages) from None
    return len(rendered.token_ids)


async def prepare_compaction(
    state: ServerState, responses: SharedResponses, body: dict[str, object]
) -> CompactionAnswer:
    """Submits a conversation together with the request to summarize it; raises as `prepare_response`.

    Of a conversation that does not fit with its summary the oldest turns are left out.
    """
    for name in sorted((ResponseRequest.model_fields.keys() & body.keys()) - OF_COMPACTION):
        if body[name] is not None:
            raise request_errors.unsupported_parameter(name, "a compaction has no such field")
    fields, items = await _read(state, responses, body, needs_input=False)
    max_tokens = min(MAX_TOKENS, state.engine.limits.max_model_len // 4)
    fields = fields.model_copy(update={"truncation": "auto", "max_output_tokens": max_tokens})
    conversation = await _conversation(state, fields, items)
    messages = [*conversation.messages, {"role": "user", "content": INSTRUCTIONS}]
    answer_id = new_response_id(responses.process_index)
    chat = await _submit(state, fields, replace(conversation, messages=messages), answer_id)
    kept = [item for item in map(decode, items) if item.get("role") == "user"]
    return CompactionAnswer(chat, kept, answer_id, new_item_id(KIND))


async def _read(
    state: ServerState, responses: SharedResponses, body: dict[str, object], *, needs_input: bool = True
) -> tuple[ResponseRequest, tuple[StoredItem, ...]]:
    fields = parse(ResponseRequest, body)
    check_fields(state, body, fields, UNSUPPORTED)
    _check(fields, has_store=responses.local.store.is_enabled)
    history = await _history(responses, fields.previous_response_id)
    found = await responses.find_items(referenced_ids(fields.input))
    has_input = needs_input or fields.input is not None or not history
    items = read_items(fields.input, found.get) if has_input else ()
    return fields, history + tuple(await collected(map(encode, items)))


def _check(fields: ResponseRequest, *, has_store: bool) -> None:
    check_metadata(fields.metadata)
    check_words(fields)
    check_include(fields.include)
    if fields.instructions is not None:
        check_text("instructions", fields.instructions)
    if fields.background and fields.store is False:
        raise request_errors.invalid_value("background", "it needs 'store': true")
    if fields.background and not has_store:
        raise request_errors.unsupported_value("background", "this server stores no responses")


async def _history(responses: SharedResponses, response_id: str | None) -> tuple[StoredItem, ...]:
    if response_id is None:
        return ()
    try:
        return await responses.all_items(response_id)
    except HTTPError as error:
        if error.answer.code != NOT_FOUND:
            raise
        raise response_not_found("previous_response_id") from None


async def _conversation(state: ServerState, fields: ResponseRequest, items: Sequence[StoredItem]) -> Conversation:
    choice, tools = chat_tool_choice(fields.tool_choice, chat_tools(fields.tools))
    has_tags = getattr(state.chat_parsers.tool, "strict_tags", None) is not None
    demanded = demanded_grammar(fields.tools, choice, tools, is_strict=has_tags)
    if demanded is not None:
        choice = {"type": "function", "function": {"name": demanded[0]}}
    turns = turns_after(fields.instructions)
    num_given = len(fields.input) if isinstance(fields.input, list) else 1
    await collected(adding(map(decode, items), turns, max(0, len(items) - num_given)))
    return Conversation(
        turns.messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        call_grammar=None if demanded is None else demanded[1],
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        include_reasoning=fields.include_reasoning is not False,
        may_name_files=True,
        structured_outputs=fields.structured_outputs,
    )


async def _submit(
    state: ServerState, fields: ResponseRequest, conversation: Conversation, response_id: str
) -> SubmittedChat:
    given = _sampling(fields)
    request_ids = itertools.chain([response_id], (f"{response_id}-{number}" for number in itertools.count(1)))

    def submit(messages: Sequence[Mapping[str, object]]) -> Awaitable[SubmittedChat]:
        return submit_chat(
            state,
            replace(conversation, messages=messages),
            given,
            request_id=next(request_ids),  # of several tries two may be in flight
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            model=fields.model,
            request_type="responses",
        )

    try:
        if fields.truncation == "auto":
            return await submit_newest_turns(conversation.messages, submit)
        return await submit(conversation.messages)
    except InvalidRequestError as error:
        raise in_words_of_api(error, "input", _FUNCTION_NAMES, conversation.messages) from None


def _sampling(fields: ResponseRequest) -> GivenSampling:
    """The sampling fields, and this request's names of them."""
    given, names = given_sampling(fields, _NAMES)
    if fields.has_logprobs:
        given["logprobs"] = fields.top_logprobs or 0
    if fields.max_output_tokens is not None:
        given["max_tokens"] = fields.max_output_tokens
    form = structured_outputs(fields.text.format if fields.text else None)
    return with_form(GivenSampling(given, names), form, fields, _FORM_NAMES)
