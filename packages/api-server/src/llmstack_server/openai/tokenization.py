"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from llmstack_llm.admit_rules import check_token_ids
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.prepare import render_conversation
from llmstack_server.http.errors import missing_parameter
from llmstack_server.openai.common import check_fields
from llmstack_server.openai.protocol import DetokenizeRequest, TokenizeRequest, parse
from llmstack_server.openai.unsupported import CHAT
from llmstack_server.state import ServerState


async def tokenize(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """`{count, max_model_len, tokens}` of a prompt, or of messages under the chat template."""
    fields = parse(TokenizeRequest, body)
    check_fields(state, body, fields, CHAT if "messages" in body else {})
    if fields.messages is not None:
        conversation = Conversation(
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt is not False and not fields.continue_final_message,
            continue_final_message=bool(fields.continue_final_message),
            tools=fields.tools,
            documents=fields.documents,
            chat_template=fields.chat_template,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
        rendered = await render_conversation(state, conversation)
        token_ids = list(rendered["prompt_token_ids"])
    elif fields.prompt is not None:
        tokenizer = await state.engine.get_tokenizer()
        add_special_tokens = fields.add_special_tokens is not False
        # In a thread: a megabyte of text takes half a second.
        token_ids = await asyncio.to_thread(tokenizer.encode, fields.prompt, add_special_tokens=add_special_tokens)
    else:
        raise missing_parameter("prompt")
    return {"count": len(token_ids), "max_model_len": state.limits.max_model_len, "tokens": token_ids}


async def detokenize(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """`{prompt}` of token ids."""
    fields = parse(DetokenizeRequest, body)
    check_fields(state, body, fields, {})
    if fields.tokens is None:
        raise missing_parameter("tokens")
    check_token_ids("tokens", fields.tokens, state.limits.vocab_size)
    tokenizer = await state.engine.get_tokenizer("tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, fields.tokens, skip_special_tokens=False)}


async def tokenizer_info(state: ServerState) -> dict[str, Any]:
    """What `tokenizer_config.json` says, with the names of its special tokens."""
    return dict((await state.engine.get_tokenizer()).config)
