"""The objects of the answers of all other routes, as types; see `answer_types`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ended early."""

    reason: str


class InputTokenDetails(TypedDict):
    """Tokens of the input by where they came from, and those that media replace, if there are any."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]
    audio_tokens: NotRequired[int]


class OutputTokenDetails(TypedDict):
    """Tokens of the output by what they are for."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class OutputItem(TypedDict):
    """A message, reasoning, or a call of a function or of a custom tool."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: str
    role: NotRequired[str]
    content: NotRequired[list[dict[str, object]]]
    summary: NotRequired[list[dict[str, object]]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ReasoningSettings(TypedDict):
    """The reasoning that was asked for."""

    effort: str | None
    summary: str | None


class TextSettings(TypedDict):
    """The form of the text."""

    format: dict[str, object]
    verbosity: str


class ResponseAnswer(TypedDict):
    """A response in any state, with the parameters of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    access_programs: None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, object]
    tools: list[dict[str, object]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: NotRequired[ResponseUsage]
    receipt: NotRequired[dict[str, object]]
    user: NotRequired[str]


class InputTokens(TypedDict):
    """The tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(TypedDict):
    """The id of an object that was deleted."""

    id: str
    object: str
    deleted: bool


class Page(TypedDict):
    """A page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemPage(Page):
    """Input items of a response."""

    data: list[dict[str, object]]


class File(TypedDict):
    """The facts of a file, without its content."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FilePage(Page):
    """Files of a key."""

    data: list[File]


class RequestCounts(TypedDict):
    """Requests of a batch by their ends."""

    total: int
    completed: int
    failed: int


class ErrorList(TypedDict):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[dict[str, object]]


class OutputExpiry(TypedDict):
    """When the files of a batch are removed."""

    anchor: str
    seconds: int | None


class Batch(TypedDict):
    """A batch in any state; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str | None
    model: str | None
    errors: ErrorList | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    output_expires_after: OutputExpiry | None


class BatchPage(Page):
    """Batches of a key."""

    data: list[Batch]


class MessageUsage(TypedDict):
    """Tokens of a message, without those of the prefix cache in `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]
    audio_tokens: NotRequired[int]


class ContentBlock(TypedDict):
    """A text, a thought or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, object]]


class Message(TypedDict):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    receipt: NotRequired[dict[str, object]]


class CountedTokens(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class Status(TypedDict):
    """A state in a word, and with `--idle-sleep` how deep the engine sleeps; 0 while it is awake."""

    status: str
    sleep_level: NotRequired[int]


class Version(TypedDict):
    """The version of the server package."""

    version: str


class Load(TypedDict):
    """The number of requests in flight."""

    server_load: int


class ServerInfo(TypedDict):
    """Configuration, state and versions; further keys tell how parts of the server were chosen."""

    version: str
    state: str
    python: str
    model: str
    served_model_names: list[str]
    config: dict[str, object]
    flags_without_effect: list[dict[str, object]]
    http: dict[str, object]
    processes: dict[str, object]
    engine: dict[str, object] | None
    engines: list[dict[str, object]]


class StepRow(TypedDict):
    """A request in a step; one of another key has its `id` alone."""

    id: str
    num_computed_tokens: NotRequired[int]
    num_scheduled_tokens: NotRequired[int]
    num_draft_tokens: NotRequired[int]
    new_block_ids: NotRequired[list[int]]


class Step(TypedDict):
    """A step of an engine core."""

    step: int
    time: float
    schedule_ms: float
    execute_ms: float
    update_ms: float
    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int | None
    num_preemptions: int
    requests: list[StepRow]


class StepEvent(TypedDict):
    """A state that a request entered."""

    time: float
    id: str
    status: str


class StepGap(TypedDict):
    """Steps that are missing after the one that was asked for."""

    reason: str
    after: int
    next: int | None


class Steps(TypedDict):
    """The last steps of an engine core."""

    now: float
    steps: list[Step]
    events: list[StepEvent]
    core: str
    gap: StepGap | None


class ExplainedRequest(TypedDict):
    """Explanation of the time of a request."""

    id: str
    sentences: list[str]
    facts: dict[str, object]


class ReleasedSession(TypedDict):
    """A session that was given up, and the tokens of its blocks that were not in use."""

    id: str
    object: str
    deleted: bool
    released_tokens: int


class Paused(TypedDict):
    """Whether new requests are refused."""

    is_paused: bool


class Aborted(TypedDict):
    """Requests that were ended."""

    status: str
    aborted: int


class Asleep(TypedDict):
    """Whether the engine sleeps."""

    is_sleeping: bool


class StoppedProfile(TypedDict):
    """Files that a profile has written."""

    status: str
    traces: list[str]


class Reloaded(TypedDict):
    """The weights and settings that answer from now on."""

    object: Literal["reload"]
    name: str
    weights: dict[str, object]
    num_finishing_requests: int
    num_moved_requests: int
