"""Requests of the engine front ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from llmstack_llm import request_errors
from llmstack_llm.admission.sampling import NO_SAMPLING, CheckedSampling, GivenSampling
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.media.processor import MediaRequest
from llmstack_llm.media.source import num_source_tokens
from llmstack_types import KVTransferParams, MediaItem, SamplingParams
from llmstack_types.json_values import JSONValue
from llmstack_types.vocabulary import MediaKind


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to render.

    Attributes:
        add_generation_prompt: Whether the prompt ends where an assistant's message begins.
        continue_final_message: Whether the answer continues the last message instead.
        chat_template: Text of a template that replaces the model's.
        template_kwargs: Further variables of the template.
        is_cut: Whether the prompt's tokens are cut afterwards, so that it may be longer than the context.
        tenant: Opaque id of the client, whose pictures no other client finds.
        media_options: Options of the model's processor of media.
        media_request: Shared by the conversations of one request; None for a conversation that is one by itself.
    """

    messages: Sequence[Mapping[str, JSONValue]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, JSONValue]] | None = None
    documents: Sequence[Mapping[str, JSONValue]] | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, JSONValue] | None = None
    is_cut: bool = False
    tenant: str = ""
    media_options: Mapping[str, JSONValue] | None = None
    media_request: MediaRequest | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation, as text and as token ids.

    Attributes:
        sampling: The checked fields that were given with the conversation.
        media: What the prompt has besides tokens, counted and not decoded.
    """

    text: str
    token_ids: list[int]
    sampling: CheckedSampling = NO_SAMPLING
    media: tuple[PlacedMedia, ...] = ()


class TextPrompt(TypedDict):
    """A prompt as text, in vLLM's form."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in vLLM's form; the text is only shown."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptInput = str | Sequence[int] | Mapping[str, Any] | RenderedPrompt
"""Text, token ids, a rendered conversation, or vLLM's dict with `prompt`, `prompt_token_ids` or `prompt_embeds`.

With both of the first two keys the token ids count, and the text is only shown. With the last one see
`read_prompt_embeds`.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests can name.

    Attributes:
        identity: The text of its `LoRAIdentity`.
        path: Its folder.
        base_model_name: The model that it was trained on, as far as that is known.
    """

    name: str
    identity: str
    path: str
    base_model_name: str | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of an `EngineCoreRequest` that name the adapter."""
        return {"lora_name": self.identity, "lora_path": self.path}


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A prompt and its parameters after every check; `InputProcessor.admit` makes them.

    Attributes:
        prompt: The text, or None where token ids were given.
        sampling_params: With `max_tokens` and `seed`; `max_tokens` 0 means that nothing is generated.
        param: The request's name of the prompt.
        adapter: The LoRA adapter to use, if any.
        media: What the prompt has besides tokens, as the engine core gets it.
        placed: Pictures and the like that are counted and not decoded; they become items of `media`.
        release: Called once when the request has ended; None for no call.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    param: str = field(default="prompt", compare=False)
    adapter: Adapter | None = None
    media: tuple[MediaItem, ...] = ()
    placed: tuple[PlacedMedia, ...] = ()
    release: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, those that go to an encoder included."""
        num_tokens = len(self.prompt_token_ids)
        return num_tokens + num_source_tokens(self.media) if self.media else num_tokens

    def num_media_tokens(self, kind: MediaKind) -> int:
        """Tokens of the prompt that pictures, or items of another kind, replace."""
        return sum(one.num_vectors for one in self.placed if one.kind == kind)


@dataclass(slots=True)
class RequestDraft:
    """An admitted request before its `SamplingParams` are made."""

    param: str
    prompt: str | None
    token_ids: list[int]
    values: dict[str, Any]
    media: tuple[MediaItem, ...] = ()
    placed: tuple[PlacedMedia, ...] = ()

    def finish(self) -> AdmittedRequest:
        """The request with its parameters."""
        return AdmittedRequest(
            self.prompt, self.token_ids, SamplingParams(**self.values), self.param,
            media=self.media, placed=self.placed,
        )  # fmt: skip


OnAdmitted = Callable[[Sequence[AdmittedRequest], int], Callable[[float], None] | None]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete, with its sampling fields.

    Attributes:
        request_id: Unique among the requests in flight.
        sampling: The fields as given, or checked already; requests that are submitted together share them.
        param: The request's name of the prompt, for errors.
        priority: Lower ones run first, under the scheduling policy `priority`.
        cache_salt: Only requests with the same salt share cached prefixes.
        tenant: Opaque id of the client; requests of different tenants wait in fair shares.
        default_max_tokens: Used, cut to what fits, where `max_tokens` is None; None means all that fits.
        add_special_tokens: Whether the tokenizer adds the model's special tokens to a text.
        adapter: The LoRA adapter to use, if any.
        kv_transfer: The KV blocks to export or import, where the engine exchanges them.
        deadline_s: When the client wants it, in monotonic seconds; it decides under the scheduling policy `deadline`.
        on_admitted: Called with all prompts of the submission, and the completions of each, when all is checked and
            nothing is submitted; it may raise what `submit` then raises. What it returns is called with the seconds
            from the submission to the first token. Of prompts that are submitted together that of the first one counts.
        session: What the client calls the session, by which it can be released; empty for nothing.
        is_session_final: Whether the session is given up when the request ends.
        is_split: Whether each token comes as an output of its own. That of the first prompt counts, too.
    """

    request_id: str
    prompt: PromptInput
    sampling: GivenSampling | CheckedSampling
    param: str = "prompt"
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    default_max_tokens: int | None = None
    add_special_tokens: bool = True
    adapter: Adapter | None = None
    deadline_s: float | None = None
    on_admitted: OnAdmitted | None = None
    kv_transfer: KVTransferParams | None = None
    is_split: bool = False
    session: str = ""
    is_session_final: bool = False


def text_and_ids_of(prompt: Mapping[str, object], param: str) -> tuple[str | None, list[int] | None]:
    """The text and the token ids of a prompt in vLLM's form, each None where it is not given.

    Raises:
        InvalidRequestError: A key or a type is wrong.
    """
    for key, value in prompt.items():
        if key not in ("prompt", "prompt_token_ids") and value is not None:
            raise request_errors.unsupported_parameter(request_errors.echo(key), f"'{request_errors.echo(key)}'")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise request_errors.invalid_type(param, "a string", text)
    if token_ids is None and text is None:
        raise request_errors.invalid_type(param, "a string or an array of token ids", None)
    if token_ids is not None and not isinstance(token_ids, list | tuple):
        raise request_errors.invalid_type(param, "an array of token ids", token_ids)
    return text, None if token_ids is None else list(token_ids)
