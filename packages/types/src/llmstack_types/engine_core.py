"""The messages between a front end and the engine core: requests in, outputs back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from llmstack_types.events import BlockEviction, RequestEvent, StepPhases
from llmstack_types.media import MediaItem, MediaSpec
from llmstack_types.pooling_params import PoolingParams
from llmstack_types.sampling_params import SamplingParams
from llmstack_types.shadow import ShadowReport
from llmstack_types.stats import SchedulerStats


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


IMPLIED_DEADLINE_S = 30.0
"""Under the policy `deadline` a request without a deadline counts as wanted so long after its arrival."""


class KVTransferParams(NamedTuple):
    """The exports and imports of a request's KV blocks.

    Attributes:
        do_remote_decode: Another engine core goes on from the prompt: its blocks are exported at the end.
        do_remote_prefill: Another engine core has computed the prompt: its blocks are imported before it is scheduled.
        remote_engine_id: The engine core that exported them.
        transfer_id: Handle of the export, which no other client can guess.
        num_tokens: Leading tokens of the prompt that are exported, in whole blocks.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    transfer_id: str = ""
    num_tokens: int = 0


class TokenIds(list[int]):
    """Token ids from 0 on of which the largest is known, so that a check looks at none of them. Never changed.

    Attributes:
        largest: The largest of them; -1 where there is none.
    """

    __slots__ = ("largest",)

    def __init__(self, token_ids: Iterable[int] = (), largest: int = -1) -> None:
        super().__init__(token_ids)
        self.largest = largest


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One completion or one vector to compute: all is resolved, nothing below looks anything up or fills anything in.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt_token_ids: At least one, each in [0, logits width); `TokenIds` where they have been in a message.
        sampling_params: Checked; `n` is 1 (several completions are several requests), `seed` and `max_tokens` are set.
        eos_token_ids: The model's end-of-sequence ids; they stop the request unless `sampling_params.ignore_eos`.
        arrival_time_s: Monotonic seconds of the sender.
        priority: Lower goes first (policy `priority`).
        cache_salt: Requests with different salts never share cached blocks.
        lora_name: Identity of the adapter to use, the text of a `LoRAIdentity`; None is the base model.
        fork_of: Id of a request added just before, with the same prompt, salt and adapter, whose blocks this one may
            share; empty for none. It changes no output, except under `use_beam_search`: the `n` requests of a search
            name its first one, and each gets one of the beams.
        pooling_params: The request ends with its prompt and returns one vector: a completion of no tokens, whose
            `sampling_params` have `max_tokens` 0. None for a completion.
        output_token_ids: The tokens that an earlier engine core had generated for it. They count as its output, from
            which it goes on, and are not sent again.
        tenant: Opaque id of the client that it belongs to, such as an API key; empty where there is only one. Waiting
            requests of different tenants are scheduled in fair shares (policy `fair`).
        lora_path: Folder of the adapter, from which an engine core that has not loaded it reads it.
        deadline_s: When its client wants it, on the clock of `arrival_time_s`, which is the engine core's on one
            machine; None for no deadline. It decides the order of one tenant's requests (policy `deadline`).
        kv_transfer: The KV blocks to export or import; None for none.
        media: What the prompt has besides tokens, ascending and without overlap; the ids there are placeholders.
        session: What its client calls the session, by which that can be released; empty for nothing.
        is_session_final: Whether the session is given up when the request ends.
        disk_miss: What was in the way of its blocks on disk, one of `DISK_MISS_CAUSES`; the engine core says so.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time_s: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    lora_name: str | None = None
    fork_of: str = ""
    pooling_params: PoolingParams | None = None
    output_token_ids: Sequence[int] = ()
    tenant: str = ""
    lora_path: str = ""
    deadline_s: float | None = None
    kv_transfer: KVTransferParams | None = None
    media: tuple[MediaItem, ...] = ()
    session: str = ""
    is_session_final: bool = False
    disk_miss: str = ""


MIN_LOGPROB: Final = -9999.0
"""Of a token that is not allowed, or nearly impossible: minus infinity, which JSON does not have."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position; a named tuple, as `EngineCoreOutput` is.

    Attributes:
        token_ids: The chosen (or prompt) token first, then the most likely ones, best first; the chosen one may recur.
        logprobs: One per entry of `token_ids`.
        rank: Rank of the chosen token in the whole vocabulary; 1 is the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class EngineCoreOutput(NamedTuple):
    """Output of one step for one request.

    A named tuple, since every running request makes one per step: it costs a third of a frozen dataclass (0.36 against
    1.0 microseconds), and a list of them turns into columns and back in C.

    Attributes:
        new_token_ids: The tokens sampled; empty where only a part of the prompt was computed and the request goes on.
        logprobs: One entry per new token, if the request asked for logprobs.
        prompt_logprobs: One entry per prompt token, the first None; sent once, with the first token.
        finish_reason: None while the request goes on.
        stop_reason: The stop token id that ended it, None for end-of-sequence and for other reasons.
        num_cached_tokens: Prompt tokens found in the prefix cache; sent with the first token, -1 otherwise.
        error: A short description when `finish_reason` is ERROR.
        pooled: The vector or vectors of a pooling request, or its labels' numbers: float32, little-endian.
        kv_transfer: The field for the request that goes on elsewhere, of a finished one whose blocks are exported;
            without a handle, with the first token: the tokens that were imported.
        num_disk_tokens: How many of `num_cached_tokens` were read from disk for this request.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = -1
    error: str | None = None
    pooled: bytes | None = None
    kv_transfer: KVTransferParams | None = None
    num_disk_tokens: int = 0


class EngineCoreOutputs(NamedTuple):
    """The outputs of one step; a named tuple, since two are made per step.

    Attributes:
        timestamp_s: Monotonic seconds at the end of the step.
        scheduler_stats: The scheduler's state after the step; None where statistics are off.
        events: States that unfinished requests have entered since the last message; empty where statistics are off.
        phases: The times of the step's phases; None where statistics are off.
        engine_index: Which of several engine cores it was.
        evictions: Blocks of the sample that have lost what they held.
        shadow: The report of the shadow scheduler; None where it has nothing new.
        engine: The engine core that computed them, where a client can exchange it for another one; None elsewhere.
    """

    outputs: list[EngineCoreOutput]
    timestamp_s: float = 0.0
    scheduler_stats: SchedulerStats | None = None
    events: Sequence[RequestEvent] = ()
    phases: StepPhases | None = None
    engine_index: int = 0
    evictions: Sequence[BlockEviction] = ()
    shadow: ShadowReport | None = None
    engine: EngineReady | None = None


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine core's first message, once it can take requests.

    Attributes:
        num_blocks: Blocks of the KV cache that requests can use.
        block_size: Tokens per block.
        max_model_len: The longest request in tokens, prompt and output together.
        vocab_size: Width of the logits; every token id lies below it.
        dtype: The type in which the model computes, such as `float32`.
        kv_cache_dtype: The type of stored keys and values; empty where that is `dtype`.
        device: Where the model runs, such as `cpu`.
        kv_cache_bytes: Size of the KV cache.
        phases_s: Seconds of each phase of the start, in order.
        backends: Operation to the implementation that runs it, for logs and `/server_info`.
        versions: Distribution name to version, of the engine core's side.
        embedding_size: Width of pooled vectors; 0 where the model runner does not pool.
        is_generative: False for a model that only pools.
        is_causal: False where each token attends to the whole prompt.
        num_labels: The labels of the model; 0 for a model that is no classifier.
        model_path: The folder of the model.
        engine_index: Which of several engine cores it is.
        num_kv_tokens: Tokens of the longest request that the KV cache has room for; 0: all that its blocks hold.
        async_scheduling: Whether each step is scheduled before the last one's tokens are known.
        numeric_contract_id: Equal for engine cores that compute equal bits; empty where nothing is promised.
        weights_name: What it serves, by the name in the list that a reload chooses from.
        media: What the model takes besides tokens; None for tokens only.
        encoder_cache_tokens: Vectors that are kept of what was encoded; no item of a prompt has more.
        max_num_rows: Requests that can run at once; 0 where it is not said.
        num_state_blocks: Blocks of the states of layers that have one; 0 for a model without.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    kv_cache_bytes: int = 0
    pid: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    embedding_size: int = 0
    is_generative: bool = True
    is_causal: bool = True
    num_labels: int = 0
    model_path: str = ""
    engine_index: int = 0
    kv_cache_dtype: str = ""
    async_scheduling: bool = False
    num_kv_tokens: int = 0
    numeric_contract_id: str = ""
    weights_name: str = "start"
    media: MediaSpec | None = None
    encoder_cache_tokens: int = 0
    max_num_rows: int = 0
    num_state_blocks: int = 0
