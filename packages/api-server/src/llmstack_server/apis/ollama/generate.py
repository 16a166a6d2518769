"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_server.apis.ollama.answer import ChatAnswer, GenerateAnswer, LoadedAnswer
from llmstack_server.apis.ollama.keep_alive import keep_model
from llmstack_server.apis.ollama.messages import conversation_of_chat, conversation_of_prompt
from llmstack_server.apis.ollama.names import Fields, plain_name, without_tag
from llmstack_server.apis.ollama.protocol import FIELDS, AnswerRequest, ChatRequest, GenerateRequest
from llmstack_server.apis.ollama.sampling import given_sampling
from llmstack_server.apis.openai.infilling import with_suffix
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.prepare import SubmittedChat, submit_chat
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.answers import WholeAnswer, new_id
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse
from llmstack_server.web.submission import submit_prompts


async def prepare_chat(state: ServerState, body: Fields) -> WholeAnswer:
    """Checks a request, renders its conversation and submits it.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    body = without_tag(state, body)
    fields = parse(ChatRequest, body)
    check_fields(state, body, fields, FIELDS)
    model, is_last = plain_name(state, fields.model), keep_model(state, fields.keep_alive)
    if not fields.messages:
        return LoadedAnswer(model, {"message": {"role": "assistant", "content": ""}}, is_last=is_last)
    chat = await _submit(state, fields, conversation_of_chat(fields))
    return ChatAnswer(model, chat, fields)


async def prepare_generate(state: ServerState, body: Fields) -> WholeAnswer:
    """Does the same for one prompt, as a question of a chat, or `raw` as a text to continue."""
    body = without_tag(state, body)
    fields = parse(GenerateRequest, body)
    check_fields(state, body, fields, FIELDS)
    model, is_last = plain_name(state, fields.model), keep_model(state, fields.keep_alive)
    if not fields.prompt and not fields.images and not fields.suffix:
        return LoadedAnswer(model, {"response": ""}, is_last=is_last)
    if fields.raw or fields.suffix:
        chat = SubmittedChat(await _submit_text(state, fields), None)
    else:
        chat = await _submit(state, fields, conversation_of_prompt(fields))
    return GenerateAnswer(model, chat, fields)


async def _submit(state: ServerState, fields: AnswerRequest, conversation: Conversation) -> SubmittedChat:
    sampling = given_sampling(state, fields)
    return await submit_chat(state, conversation, sampling, request_id=new_id("ollama"), model=fields.model)


async def _submit_text(state: ServerState, fields: GenerateRequest) -> OutputStream:
    """The outputs of a prompt that is continued as it is, up to the suffix where there is one."""
    for name in ("system", "images", "think"):
        if getattr(fields, name):
            reason = "a prompt that is continued as it is, with 'raw' or 'suffix', has no place for it"
            raise request_errors.invalid_value(name, reason)
    sampling = given_sampling(state, fields)
    prompt: str | list[int] = fields.prompt or ""
    if fields.suffix:
        [prompt] = await with_suffix(state, [prompt], fields.suffix, add_special_tokens=True)
    return await submit_prompts(state, [(prompt, "prompt")], sampling, new_id("ollama"), model=fields.model)
