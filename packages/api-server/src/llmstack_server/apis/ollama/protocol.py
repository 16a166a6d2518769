"""Fields of Ollama's requests and their types, and those not available."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ConfigDict, Field

from llmstack_server.apis.ollama.names import Fields
from llmstack_server.web.fields import Decimal, RequestBody
from llmstack_server.web.unsupported import Predicate, one_of


class OptionFields(RequestBody):
    """The `options` object: sampling, and how a model is loaded there."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    temperature: Decimal | None = None
    top_k: int | None = None
    top_p: Decimal | None = None
    min_p: Decimal | None = None
    typical_p: Decimal | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Decimal | None = None
    frequency_penalty: Decimal | None = None
    repeat_penalty: Decimal | None = Field(None, description="other than 1 only together with `repeat_last_n` -1")
    repeat_last_n: int | None = Field(None, description="-1: the penalty counts the whole text")
    num_predict: int | None = Field(None, description="the most tokens of the answer; negative: all that fit")


class _Request(RequestBody):
    """Fields of all requests."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="a served name, with `:latest` or without")
    options: OptionFields | None = None
    keep_alive: object = Field(
        None, description="with `--idle-sleep`: how long the model stays awake after this request, such as `5m`"
    )


class AnswerRequest(_Request):
    """Fields of requests that generate."""

    stream: bool | None = Field(None, description="whether the answer comes in lines; true where it is left out")
    format: object = Field(None, description="`json`, or a JSON schema that the answer follows")
    logprobs: bool | None = Field(None, description="whether each token comes with its log-probability")
    top_logprobs: int | None = Field(None, description="likeliest tokens for each token, together with `logprobs`")
    think: object = Field(None, description="whether a reasoning model thinks first: a boolean, or an effort")


class ChatRequest(AnswerRequest):
    """Body of `POST /api/chat`."""

    messages: list[Fields] | None = None
    tools: list[Fields] | None = Field(None, description="functions that the model may call; at most 128")


class GenerateRequest(AnswerRequest):
    """Body of `POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = Field(None, description="text after what is generated, for fill-in-the-middle models")
    system: str | None = None
    images: list[str] | None = Field(None, description="pictures in base64")
    raw: bool | None = Field(None, description="whether the prompt is used as it is, without the chat template")


class EmbedRequest(_Request):
    """Body of `POST /api/embed`."""

    input: object = Field(None, description="a text or several")
    truncate: bool | None = Field(None, description="whether longer texts are cut at their end; true by default")
    dimensions: int | None = None


class OlderEmbedRequest(_Request):
    """Body of `POST /api/embeddings`."""

    prompt: str | None = None


class ShowRequest(_Request):
    """Body of `POST /api/show`."""

    name: str | None = Field(None, description="an older name of `model`")
    verbose: bool | None = None


_NEVER = one_of()

# Field to the values that have no effect.
FIELDS: Final[Mapping[str, Predicate]] = {
    "context": one_of([]),  # tokens of an earlier answer, which no answer here has
    "template": one_of(""),
    "width": one_of(0),
    "height": one_of(0),
    "steps": one_of(0),
}
OPTIONS: Final[Mapping[str, Predicate]] = {
    "mirostat": one_of(0),
    "tfs_z": one_of(1, 1.0),
    "penalize_newline": one_of(True),
    "draft_num_predict": _NEVER,
}
IGNORED_OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mirostat_eta", "mirostat_tau"), "they belong to `mirostat`, which is off"),
    **dict.fromkeys(("num_ctx", "num_keep"), "contexts are as long as the server allows, and never cut"),
    **dict.fromkeys(
        ("num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "low_vram", "f16_kv", "numa",
         "vocab_only", "logits_all"),
        "it is about the loading of a model, which the server has done",
    ),
}  # fmt: skip
"""Options without effect on an answer, whatever their value, and why."""
