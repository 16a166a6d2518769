"""The objects of the answers of these routes, as types; see `web.answer_types`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from llmstack_server.apis.ollama.names import Fields
from llmstack_server.web.answer_types import TokenLogprob


class OllamaCall(TypedDict):
    """A call of a function, whose arguments are an object."""

    id: str
    function: Fields


class OllamaMessage(TypedDict):
    """A message of the assistant, or its new part."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class _Answer(TypedDict):
    """The fields of answers that generate; counts and times, in nanoseconds, come with the last line of a stream."""

    model: str
    created_at: str
    logprobs: NotRequired[list[TokenLogprob]]
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaChat(_Answer):
    """The answer of `/api/chat`, or a line of it."""

    message: OllamaMessage


class OllamaGeneration(_Answer):
    """The answer of `/api/generate`, or a line of it."""

    response: str
    thinking: NotRequired[str]


class OllamaEmbeddings(TypedDict):
    """The answer of `/api/embed`."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaDetails(TypedDict):
    """The kind of a model."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Model(TypedDict):
    """The fields of a model in every list."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_Model):
    """A model in the list of all."""

    modified_at: str


class OllamaModels(TypedDict):
    """The answer of `/api/tags`."""

    models: list[OllamaModel]


class OllamaRunningModel(_Model):
    """A model that is loaded."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(TypedDict):
    """The answer of `/api/ps`."""

    models: list[OllamaRunningModel]


class OllamaShownModel(TypedDict):
    """The answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    license: str
    details: OllamaDetails
    model_info: Fields
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """The answer of `/api/version`."""

    version: str
