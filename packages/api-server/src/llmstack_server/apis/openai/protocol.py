"""Fields of OpenAI's requests and their types, and those not available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field, create_model

from llmstack_server.web.fields import GenerationFields, RequestBody, sampling_fields
from llmstack_server.web.peer_fields import PEERS, PEERS_OF_CHATS, PEERS_OF_TOKENIZE
from llmstack_server.web.unsupported import COMMON, EFFORTS, MEDIA, VERBOSITIES, Predicate, one_of, word_of

if TYPE_CHECKING:

    class _OwnFields(GenerationFields):
        logprob_token_ids: list[int] | None
        thinking_token_budget: int | None

else:
    _OwnFields = create_model("_OwnFields", __base__=GenerationFields, **sampling_fields("answers"))


class AnswerFields(_OwnFields):
    """Fields of completions and chat about the form of the answer."""

    request_id: str | None = Field(None, description="what the answer's id ends in")
    return_tokens_as_token_ids: bool | None = Field(None, description="tokens of log-probabilities as token_id:N")
    kv_transfer_params: dict[str, object] | None = Field(None, description="hands the prompt to or from another server")


class CompletionRequest(AnswerFields):
    """Body of `POST /v1/completions`."""

    prompt: object = Field(None, description="a string, strings, token ids, or lists of token ids")
    prompt_embeds: object = Field(
        None, description="with --enable-prompt-embeds: a safetensors file in base64, or several"
    )
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = Field(None, description="text after what is generated, for fill-in-the-middle models")


class ChatCompletionRequest(AnswerFields):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, object]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, object]] | None = Field(None, description="functions that the model may call; at most 128")
    tool_choice: object = Field(None, description="'none', 'auto', 'required', or an object that names a function")
    parallel_tool_calls: bool | None = Field(None, description="whether one answer may call several times")
    documents: list[dict[str, object]] | None = Field(None, description="what the chat template may quote")
    chat_template: str | None = Field(None, description="in place of the model's, where requests are trusted")
    return_prompt_text: bool | None = Field(None, description="repeat the rendered prompt, in prompt_text")
    chat_template_kwargs: dict[str, object] | None = None
    mm_processor_kwargs: dict[str, object] | None = Field(
        None, description="options of the model's processor of pictures and videos; they may make them cheaper"
    )
    reasoning_effort: str | None = Field(None, description="for the chat template; 'none' asks for no reasoning")
    include_reasoning: bool | None = None


class BatchChatRequest(ChatCompletionRequest):
    """Body of `POST /v1/chat/completions/batch`."""

    messages: list[list[dict[str, object]]] | None = Field(None, description="conversations; at most 128")  # type: ignore[assignment]


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = Field(None, description="whether the answer has the tokens as texts too")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, object]] | None = None
    documents: list[dict[str, object]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    mm_processor_kwargs: dict[str, object] | None = Field(
        None, description="options of the model's processor of pictures and videos; they may make them cheaper"
    )


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: list[int] | None = None


_NEVER = one_of()


def _without(table: Mapping[str, Predicate], name: str) -> Mapping[str, Predicate]:
    """The table without a field that is taken."""
    return {field: test for field, test in table.items() if field != name}


# Field to the values that have no effect.
_ANSWERS: Mapping[str, Predicate] = {
    **_without(COMMON, "kv_transfer_params"),
    **PEERS,
}
COMPLETIONS: Mapping[str, Predicate] = {**_ANSWERS, "prompt_embeds": one_of([])}
COMPLETIONS_OF_VECTORS: Mapping[str, Predicate] = _ANSWERS
CHAT: Mapping[str, Predicate] = {
    **_without(_ANSWERS, "mm_processor_kwargs"),
    **PEERS_OF_CHATS,
    "add_special_tokens": one_of(False),
    "echo": one_of(False),
    "functions": _NEVER,
    "function_call": one_of("none", "auto"),
    "audio": _NEVER,
    "modalities": one_of(["text"]),
    "prediction": _NEVER,
    "web_search_options": _NEVER,
    "prompt_embeds": one_of([]),
    "reasoning_effort": word_of("reasoning_effort", *EFFORTS),
    "verbosity": word_of("verbosity", *VERBOSITIES),
}
BATCH: Mapping[str, Predicate] = {
    **CHAT,
    "n": one_of(1),
    "best_of": one_of(1),
    "stream": one_of(False),
    "tools": _NEVER,
    "tool_choice": one_of("none"),
    "use_beam_search": one_of(False),
    "prompt_logprobs": _NEVER,
    "kv_transfer_params": _NEVER,
}
TOKENIZE: Mapping[str, Predicate] = {**MEDIA, **PEERS_OF_TOKENIZE, "return_token_offsets": one_of(False)}
TOKENIZE_CHAT: Mapping[str, Predicate] = {
    **_without(TOKENIZE, "mm_processor_kwargs"),
    "add_special_tokens": one_of(False),
}
DETOKENIZE: Mapping[str, Predicate] = {"skip_special_tokens": one_of(False)}
