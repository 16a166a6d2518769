"""The objects of OpenAI's and pooling answers, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class TokenDetails(TypedDict):
    """Tokens of a prompt that the prefix cache had, and those that items replace, if there are any."""

    cached_tokens: int
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]
    audio_tokens: NotRequired[int]


class ReasoningDetails(TypedDict):
    """Completion tokens by what they are for."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails | None
    completion_tokens_details: NotRequired[ReasoningDetails]


class PromptUsage(TypedDict):
    """Tokens of a request that generates none."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: NotRequired[int]
    prompt_tokens_details: NotRequired[TokenDetails | None]


class TopLogprob(TypedDict):
    """One of the likeliest tokens of a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token and the likeliest ones of its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's choice."""

    content: list[TokenLogprob] | None
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion's choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CalledFunction(TypedDict):
    """A function and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The message of one choice; reasoning has both names."""

    role: str
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of `n` messages."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None


class CompletionChoice(TypedDict):
    """One of the texts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, object] | None] | None


class GeneratedAnswer(TypedDict):
    """The keys that answers to completions and chats share."""

    id: str
    created: int
    model: str
    usage: Usage
    service_tier: str | None
    system_fingerprint: str | None
    kv_transfer_params: NotRequired[dict[str, object] | None]
    metrics: NotRequired[dict[str, float | None]]
    receipt: NotRequired[dict[str, object]]


class Completion(GeneratedAnswer):
    """The answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(GeneratedAnswer):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, object] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: NotRequired[str | None]


class Rendered(TypedDict):
    """A prompt as the model would read it."""

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, object]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class Estimate(TypedDict):
    """When the first token of a request would come."""

    object: Literal["estimate"]
    prompt_tokens: int
    predicted_wait_ms: int
    predicted_ttft_ms: int
    deadline_ms: int | None
    can_meet_deadline: bool | None


class Permission(TypedDict):
    """A permission, which older clients look for."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class Weights(TypedDict):
    """The weights that answer."""

    name: str
    digest: str | None
    numeric_contract_id: str | None
    system_fingerprint: str | None
    since: NotRequired[int]


class PictureLimits(TypedDict):
    """Limits of pictures in requests."""

    max_items: int
    max_bytes: int
    max_pixels: int


class SoundLimits(TypedDict):
    """Limits of sounds in requests."""

    max_items: int
    max_bytes: int


class ChatFacts(TypedDict):
    """Facts about a model for a page with chats."""

    has_template: bool
    has_system_prompt: bool
    default_max_tokens: int | None
    pictures: PictureLimits | None
    sounds: SoundLimits | None


class SpeechFacts(TypedDict):
    """The ways to send sound to a model that transcribes; `realtime`: whether `/v1/realtime` can be opened."""

    realtime: bool


class Model(TypedDict):
    """A name that requests may use, and the model behind it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    chat: ChatFacts | None
    speech: SpeechFacts | None
    permission: list[Permission]
    weights: NotRequired[Weights]
    previous_weights: NotRequired[list[dict[str, object]]]
    status: NotRequired[dict[str, str]]


class ModelList(TypedDict):
    """The served names, and then the adapters."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


class Embedding(TypedDict):
    """The vector of an input, as numbers or as base64."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class PooledInput(TypedDict):
    """The numbers of an input: a vector, several vectors, or base64."""

    index: int
    object: str
    data: list[float] | list[list[float]] | str


class Classified(TypedDict):
    """The labels of an input."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Score(TypedDict):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class PooledList(TypedDict):
    """The keys that the lists of pooling routes share."""

    object: Literal["list"]
    model: str
    usage: PromptUsage


class Embeddings(PooledList):
    """The answer of `/v1/embeddings`."""

    id: NotRequired[str]
    created: NotRequired[int]
    data: list[Embedding]


class PooledInputs(PooledList):
    """The answer of `/pooling`."""

    id: str
    created: int
    data: list[PooledInput]


class Classification(PooledList):
    """The answer of `/classify`."""

    id: str
    created: int
    data: list[Classified]


class Scores(PooledList):
    """The answer of `/score`."""

    id: str
    created: int
    data: list[Score]


class RankedDocument(TypedDict):
    """The text of a document, or its content of texts and pictures."""

    text: NotRequired[object]
    multi_modal: NotRequired[list[object]]


class Ranked(TypedDict):
    """A document and its score."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class Ranking(TypedDict):
    """The answer of `/rerank`."""

    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]


class CohereVersion(TypedDict):
    """The version of Cohere's API."""

    version: str


class CohereUnits(TypedDict):
    """The units that Cohere would charge for."""

    input_tokens: int


class CohereMeta(TypedDict):
    """Facts of an answer."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbeddings(TypedDict):
    """The answer of `/v2/embed`; `embeddings` has a list for each type that was asked for."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[str, list[object]]
    texts: list[str]
    meta: CohereMeta
