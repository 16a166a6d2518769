"""vLLM's `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmstack_llm.admission.rules import check_token_ids
from llmstack_llm.text.gate import in_thread
from llmstack_server.apis.openai.protocol import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT, DetokenizeRequest, TokenizeRequest
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.prepare import render_conversation
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import check_fields
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse

if TYPE_CHECKING:
    from llmstack_server.web.answer_types import Detokenized, Tokens

MIN_LIMIT_OF_TOKENS = 1 << 16
"""Token ids that `/detokenize` takes at least, however short the context of the model is."""


async def tokenize(state: ServerState, body: dict[str, object]) -> Tokens:
    """`{count, max_model_len, tokens, token_strs}` of a prompt, or of messages under the chat template."""
    fields = parse(TokenizeRequest, body)
    check_fields(state, body, fields, TOKENIZE_CHAT if fields.messages is not None else TOKENIZE)
    if fields.messages is not None:
        conversation = Conversation(
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt is not False and not fields.continue_final_message,
            continue_final_message=bool(fields.continue_final_message),
            tools=fields.tools,
            documents=fields.documents,
            chat_template=fields.chat_template,
            chat_template_kwargs=fields.chat_template_kwargs,
            media_options=fields.mm_processor_kwargs,
        )
        rendered = await render_conversation(state, conversation)
        token_ids = list(rendered.token_ids)
    elif fields.prompt is not None:
        add_special_tokens = fields.add_special_tokens is not False
        token_ids = await state.engine.tokenize(fields.prompt, add_special_tokens=add_special_tokens)
    else:
        raise missing_parameter("prompt")
    return {
        "count": len(token_ids),
        "max_model_len": state.engine.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": await _token_texts(state, token_ids) if fields.return_token_strs else None,
    }


async def _token_texts(state: ServerState, token_ids: list[int]) -> list[str]:
    """The vocabulary's string of each token, as transformers' `convert_ids_to_tokens` has it.

    In a thread, since there may be a million.
    """
    tokenizer = await state.engine.get_tokenizer("return_token_strs")
    return await in_thread(lambda: [tokenizer.name_of(token_id) for token_id in token_ids])


async def detokenize(state: ServerState, body: dict[str, object]) -> Detokenized:
    """`{prompt}` of token ids."""
    fields = parse(DetokenizeRequest, body)
    check_fields(state, body, fields, DETOKENIZE)
    if fields.tokens is None:
        raise missing_parameter("tokens")
    limits = state.engine.limits
    max_length = max(limits.max_request_tokens, MIN_LIMIT_OF_TOKENS)
    check_token_ids("tokens", fields.tokens, limits.vocab_size, max_length=max_length)
    return {"prompt": await state.engine.detokenize(fields.tokens)}


async def tokenizer_info(state: ServerState) -> dict[str, object]:
    """The content of `tokenizer_config.json`, with the names of its special tokens."""
    return dict((await state.engine.get_tokenizer()).config)
