"""Fields of Messages requests and their types, and those not available."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from llmstack_server.web.fields import GenerationFields, RequestBody
from llmstack_server.web.peer_fields import PEERS
from llmstack_server.web.unsupported import COMMON, Predicate, one_of, word_of


class OutputConfigFields(BaseModel):
    """The `output_config` object: effort and format."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None
    format: dict[str, object] | None = None


class PromptFields(RequestBody):
    """Fields of the prompt, in requests for messages and for token counts."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    messages: list[dict[str, object]] | None = None
    system: object = Field(None, description="a string, or an array of text blocks")
    tools: list[dict[str, object]] | None = None
    tool_choice: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    output_config: OutputConfigFields | None = None
    chat_template_kwargs: dict[str, object] | None = None


class MessagesRequest(PromptFields, GenerationFields):
    """Body of `POST /v1/messages`."""

    stop_sequences: list[str] | None = None
    metadata: dict[str, object] | None = None


class CountTokensRequest(PromptFields):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None


EFFORTS = ("low", "medium", "high", "xhigh", "max")


def _always(value: object) -> bool:
    return True


def _keeps_everything(value: object) -> bool:
    """True for edits that keep the whole context, which some clients send with every request."""
    edits = value.get("edits", []) if isinstance(value, dict) else value
    return edits is None or (
        isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)
    )


_NEVER = one_of()

# Field to the values that have no effect.
KNOWN: Mapping[str, Predicate] = {
    **COMMON,
    **PEERS,
    "repetition_detection": _NEVER,
    "logprob_token_ids": one_of([]),
    "thinking_token_budget": _NEVER,
    "add_special_tokens": one_of(False),
    "response_format": _NEVER,
    "betas": _always,
    "cache_control": _always,
    "diagnostics": _always,
    "inference_geo": _always,
    "service_tier": word_of("service_tier", "auto", "standard_only"),
    "user_profile_id": _always,
    "workspace_id": _always,
    "container": _NEVER,
    "context_management": _keeps_everything,
    "mcp_servers": one_of([]),
    "output_format": _NEVER,
    "speed": one_of("standard"),
    "stop": one_of([]),
    "stream_options": _NEVER,
    "n": one_of(1),
    "best_of": one_of(1),
    "use_beam_search": one_of(False),
    "prompt_logprobs": _NEVER,
    "return_token_ids": one_of(False),
    "prompt_embeds": one_of([]),
    "chat_template": _NEVER,
}
