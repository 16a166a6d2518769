"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admit import admit_sampling_params
from llmstack_server.http.errors import missing_parameter
from llmstack_server.openai.common import Generation, check_fields, new_id
from llmstack_server.openai.events import close
from llmstack_server.openai.logprobs import chat_logprobs, prompt_logprobs_object
from llmstack_server.openai.models import check_model
from llmstack_server.openai.protocol import ChatCompletionRequest, parse
from llmstack_server.openai.sampling import PARAM_NAMES, sampling_params
from llmstack_server.openai.unsupported import CHAT
from llmstack_server.protocols import Completion, PromptOutput
from llmstack_server.state import ServerState
from llmstack_types import SamplingParams


async def prepare_chat(state: ServerState, body: dict[str, Any]) -> ChatAnswer:
    """Checks a request, renders its conversation and tokenizes it.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    fields = parse(ChatCompletionRequest, body)
    if fields.messages is None:
        raise missing_parameter("messages")
    check_fields(state, body, fields, CHAT)
    param_names = PARAM_NAMES | {"logprobs": "top_logprobs"}
    if fields.max_completion_tokens is not None:
        param_names["max_tokens"] = "max_completion_tokens"
    params = admit_sampling_params(_params(state, fields), state.limits, param_names=param_names)
    rendered = await state.engine.render_chat(
        fields.messages,
        add_generation_prompt=_generation_prompt(fields),
        continue_final_message=bool(fields.continue_final_message),
        chat_template_kwargs=fields.chat_template_kwargs,
    )
    prompt = await state.engine.admit(rendered, params, param="messages", param_names=param_names)
    return ChatAnswer(Generation(state, fields, check_model(state, fields.model), [prompt], new_id("chatcmpl")), fields)


def _generation_prompt(fields: ChatCompletionRequest) -> bool:
    if not fields.continue_final_message:
        return fields.add_generation_prompt is not False
    if fields.add_generation_prompt:
        reason = "it cannot be set together with 'add_generation_prompt'"
        raise request_errors.invalid_value("continue_final_message", reason)
    return False


def _params(state: ServerState, fields: ChatCompletionRequest) -> SamplingParams:
    if fields.top_logprobs and not fields.logprobs:
        raise request_errors.invalid_value("top_logprobs", "it is only allowed together with 'logprobs': true")
    overrides = {"logprobs": None if not fields.logprobs else fields.top_logprobs or 0}
    if fields.max_completion_tokens is not None:
        overrides["max_tokens"] = fields.max_completion_tokens
    return sampling_params(fields, state.engine.default_sampling_params(), **overrides)


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(self, generation: Generation, fields: ChatCompletionRequest) -> None:
        self._generation = generation
        self._fields = fields

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self._generation.is_stream

    async def whole(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        generation, usage = self._generation, self._generation.new_usage()
        choices: list[dict[str, Any]] = []
        extra: dict[str, Any] = {}
        async for prompt_index, output in generation.outputs():
            usage.add(prompt_index, output)
            choices += [self._whole_choice(new) for new in output.outputs]
            extra |= self._prompt_extras(output)
        return generation.answer("chat.completion", choices, usage) | extra

    async def events(self) -> AsyncIterator[bytes]:
        """One chunk with the role per choice, then what is new; the last of a choice has its finish reason."""
        generation, usage = self._generation, self._generation.new_usage()
        encoder = generation.new_encoder("chat.completion.chunk")
        is_first = True
        outputs = generation.outputs()
        try:
            async for prompt_index, output in outputs:
                usage.add(prompt_index, output)
                extra = {"usage": usage.as_object()} if generation.includes_continuous_usage else {}
                if is_first:
                    is_first = False
                    prompt_extras = self._prompt_extras(output)
                    for index in range(generation.n):
                        yield encoder.encode([_role_choice(index)], extra | prompt_extras)
                for new in output.outputs:
                    if self._is_worth_sending(new):
                        yield encoder.encode([self._chunk_choice(new)], extra)
        finally:
            await close(outputs)
        if generation.includes_usage:
            yield encoder.encode([], {"usage": usage.as_object()})

    def _is_worth_sending(self, new: Completion) -> bool:
        wants_tokens = bool(self._fields.logprobs or self._fields.return_token_ids)
        return bool(new.text or new.finish_reason is not None or wants_tokens)

    def _chunk_choice(self, new: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": new.index,
            "delta": {"content": new.text} if new.text or new.finish_reason is None else {},
            "logprobs": self._logprobs(new),
            "finish_reason": new.finish_reason,
        }
        return choice | self._choice_extras(new)

    def _whole_choice(self, new: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": new.index,
            "message": {"role": "assistant", "content": new.text, "refusal": None},
            "logprobs": self._logprobs(new),
            "finish_reason": new.finish_reason,
        }
        return choice | self._choice_extras(new)

    def _choice_extras(self, new: Completion) -> dict[str, Any]:
        extras: dict[str, Any] = {} if new.finish_reason is None else {"stop_reason": new.stop_reason}
        if self._fields.return_token_ids:
            extras["token_ids"] = list(new.token_ids)
        return extras

    def _prompt_extras(self, output: PromptOutput) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._fields.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs_object(output.prompt_logprobs)
        if self._fields.return_token_ids:
            extras["prompt_token_ids"] = list(output.prompt_token_ids)
        return extras

    def _logprobs(self, new: Completion) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return chat_logprobs(new.token_ids, new.logprobs or (), self._fields.top_logprobs or 0)


def _role_choice(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
