"""Every message between a client and an engine core, drawn by Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from llmstack_engine_core.messages import protocol
from llmstack_engine_core.messages.control import CALL, ControlResult
from llmstack_engine_core.messages.protocol import (
    AbortRequests,
    CacheUpdate,
    EngineFailed,
    FollowCache,
    Goodbye,
    Hello,
    StartFailed,
)
from llmstack_types import (
    BlockEviction,
    Control,
    DiskCacheStats,
    EncoderStats,
    EncoderWork,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    KVTransferParams,
    MediaItem,
    MediaMemory,
    MediaSpec,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RepetitionDetectionParams,
    RequestEvent,
    RequestNote,
    RequestOutputKind,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    SchedulerStats,
    SessionReturn,
    ShadowFigures,
    ShadowReport,
    StepPhases,
    StepRecord,
    StepRecording,
    StructuredOutputsParams,
    ThinkingTags,
    TokenLogprobs,
)
from llmstack_types.stats import COMPUTED_CAUSES
from llmstack_types.vocabulary import MediaKind, words_of


def encode(message: Any, epoch: int = 0) -> bytes:
    """The frame of a message of either direction."""
    is_client = type(message) in {row.cls for row in protocol.CLIENT_MESSAGES.rows.values()}
    return (protocol.CLIENT_MESSAGES if is_client else protocol.ENGINE_MESSAGES).encode(message, epoch)


def decode_client_message(frame: bytes) -> Any:
    return protocol.CLIENT_MESSAGES.decode(frame)[1]


def decode_engine_message(frame: bytes) -> Any:
    return protocol.ENGINE_MESSAGES.decode(frame)[1]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TOKEN_ID = st.integers(0, 2**32 - 1)
COUNT = st.integers(0, 2**31 - 1)
SHARE = st.floats(0, 1, exclude_min=True)
KV_TRANSFERS = st.builds(KVTransferParams, st.booleans(), st.booleans(), TEXT, TEXT, COUNT)
PENALTY = st.floats(-2, 2)

SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=4).map(tuple)


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.floats(0.01, 2),
    temperature=st.floats(0, 2),
    top_p=SHARE,
    top_k=st.integers(-1, 2**40),
    min_p=SHARE,
    seed=optional(st.integers(-(2**63), 2**63 - 1)),
    stop=optional(TEXT | tuples(TEXT)),
    stop_token_ids=optional(tuples(TOKEN_ID)),
    ignore_eos=st.booleans(),
    max_tokens=optional(COUNT),
    min_tokens=COUNT,
    logprobs=optional(st.integers(0, 20)),
    prompt_logprobs=optional(st.integers(0, 20)),
    detokenize=st.booleans(),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
    logit_bias=optional(st.dictionaries(TOKEN_ID, st.floats(-100, 100), max_size=4)),
    allowed_token_ids=optional(tuples(TOKEN_ID)),
    best_of=optional(st.integers(1, 20)),
    use_beam_search=st.booleans(),
    length_penalty=PENALTY,
    early_stopping=st.booleans() | st.just("never"),
    typical_p=SHARE,
    infill=st.booleans(),
    bad_words=optional(tuples(TEXT)),
    bad_words_token_ids=tuples(tuples(TOKEN_ID)),
    extra_args=optional(st.dictionaries(TEXT, SCALAR | st.lists(SCALAR, max_size=3), max_size=3)),
    structured_outputs=optional(
        st.builds(
            StructuredOutputsParams,
            json=optional(TEXT),
            regex=optional(TEXT),
            choice=optional(tuples(TEXT)),
            grammar=optional(TEXT),
            json_object=optional(st.booleans()),
            structural_tag=optional(TEXT),
            disable_any_whitespace=st.booleans(),
            whitespace_pattern=optional(TEXT),
            disable_additional_properties=optional(st.booleans()),
        )
    ),
    kept_special_tokens=tuples(TEXT),
    logprob_token_ids=optional(tuples(TOKEN_ID)),
    thinking_token_budget=optional(st.integers(0, 2**31 - 1)),
    thinking_tags=st.none()
    | st.builds(ThinkingTags, tuples(TOKEN_ID), st.lists(TOKEN_ID, min_size=1, max_size=4).map(tuple), st.booleans()),
    no_repeat_ngram_size=st.integers(0, 256),
    repetition_detection=st.none() | st.builds(RepetitionDetectionParams, *[st.integers(0, 256)] * 3),
)
RUNS = tuples(st.tuples(TOKEN_ID, TOKEN_ID))
MEDIA = st.builds(
    MediaItem,
    st.binary(min_size=32, max_size=32),
    st.sampled_from(words_of(MediaKind)),
    COUNT,
    COUNT,
    RUNS,
    tuples(TOKEN_ID),
    COUNT,
    optional(st.builds(MediaMemory, COUNT, TEXT, st.binary(max_size=8))),
)
KIND_COUNTS = st.dictionaries(st.sampled_from(words_of(MediaKind)), COUNT)
REQUESTS = st.builds(
    EngineCoreRequest,
    media=tuples(MEDIA),
    request_id=NAME,
    prompt_token_ids=st.lists(TOKEN_ID, min_size=1, max_size=40),
    output_token_ids=st.lists(TOKEN_ID, max_size=40).map(tuple),
    sampling_params=PARAMS,
    eos_token_ids=tuples(TOKEN_ID),
    arrival_time_s=st.floats(0, 1e9),
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_salt=TEXT,
    tenant=TEXT,
    fork_of=TEXT,
    session=TEXT,
    is_session_final=st.booleans(),
    lora_name=optional(TEXT),
    lora_path=TEXT,
    kv_transfer=optional(KV_TRANSFERS),
    pooling_params=optional(
        st.builds(
            PoolingParams,
            st.sampled_from(PoolingType),
            st.booleans(),
            optional(st.integers(1, 2**31 - 1)),
            st.sampled_from(
                [PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY]
            ),
            st.booleans(),
            second_text_start=optional(st.integers(0, 2**31 - 1)),
        )
    ),
)
CLIENT_MESSAGES = (
    REQUESTS
    | st.just(Hello())
    | st.just(Goodbye())
    | st.just(FollowCache())
    | st.builds(AbortRequests, tuples(NAME))
    | st.randoms(use_true_random=False).map(CALL.draw)
)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    token_ids = draw(st.lists(TOKEN_ID, min_size=1, max_size=4))
    logprobs = draw(st.lists(st.floats(max_value=0), min_size=len(token_ids), max_size=len(token_ids)))
    return TokenLogprobs(tuple(token_ids), tuple(logprobs), draw(st.integers(1, 2**31)))


LOGPROBS = token_logprobs()
OUTPUTS = st.builds(
    EngineCoreOutput,
    request_id=NAME,
    new_token_ids=st.lists(TOKEN_ID, max_size=3),
    logprobs=optional(st.lists(LOGPROBS, max_size=3)),
    prompt_logprobs=optional(st.lists(optional(LOGPROBS), max_size=3)),
    finish_reason=optional(st.sampled_from(FinishReason)),
    stop_reason=optional(TOKEN_ID),
    num_cached_tokens=st.just(-1) | COUNT,
    num_disk_tokens=COUNT,
    error=optional(TEXT),
    pooled=optional(st.binary(max_size=3).map(lambda chunk: 4 * chunk)),
    kv_transfer=optional(KV_TRANSFERS),
)
STATS = st.builds(
    SchedulerStats,
    **dict.fromkeys(SchedulerStats._fields, COUNT)
    | {
        "num_accepted_draft_tokens_per_place": st.lists(COUNT, max_size=5).map(tuple),
        "num_waiting_tokens_per_tenant": st.tuples(COUNT, COUNT),
        "num_computed_tokens_per_cause": st.lists(COUNT, max_size=5).map(tuple),
        "waiting_tenants": st.tuples(TEXT, TEXT),
        "encoder": optional(st.builds(EncoderStats, *[COUNT] * 9)),
        "disk": optional(st.builds(DiskCacheStats, *[COUNT] * 6, st.tuples(COUNT, COUNT))),
    },
)
READY = st.builds(
    EngineReady,
    *[st.integers(1, 2**40)] * 4,
    dtype=TEXT,
    device=TEXT,
    kv_cache_bytes=COUNT,
    pid=COUNT,
    embedding_size=COUNT,
    is_generative=st.booleans(),
    is_causal=st.booleans(),
    num_labels=COUNT,
    media=optional(st.builds(MediaSpec, COUNT, KIND_COUNTS, st.booleans(), KIND_COUNTS)),
    encoder_cache_tokens=COUNT,
    weights_name=NAME,
    phases_s=st.dictionaries(NAME, st.floats(0, 1e6), max_size=3),
    backends=st.dictionaries(NAME, TEXT, max_size=3),
    versions=st.dictionaries(NAME, TEXT, max_size=3),
)
TIME = st.floats(0, 1e9)
EVENTS = st.lists(st.builds(RequestEvent, NAME, st.sampled_from(RequestStatus), TIME), min_size=1, max_size=4).map(
    tuple
)
EVICTIONS = st.lists(st.builds(BlockEviction, TIME, TIME, tuples(TIME)), min_size=1, max_size=3).map(tuple)
PHASES = st.builds(StepPhases, TIME, TIME, TIME)
ROWS = st.builds(ScheduledRequest, NAME, COUNT, COUNT, st.lists(TOKEN_ID, max_size=3), st.lists(TOKEN_ID, max_size=3))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
WORK = st.builds(EncoderWork, COUNT, COUNT, COUNT, st.none() | MEDIA)
RECORDS = st.builds(
    StepRecord, TIME, PHASES, STATS, st.lists(ROWS, max_size=3), st.just(()) | st.lists(WORK, min_size=1, max_size=2),
    st.dictionaries(NAMES, tuples(st.tuples(COUNT, MEDIA)), max_size=2),
)  # fmt: skip
RETURNS = st.builds(SessionReturn, NAME, NAME, TIME, COUNT, COUNT, st.sampled_from(COMPUTED_CAUSES), TIME, NAME)
NOTES = st.builds(RequestNote, st.integers(0, 1 << 20), TEXT, TIME, TIME, st.none() | RETURNS)
RECENT_STEPS = st.builds(
    StepRecording, TIME, st.lists(RECORDS, max_size=3), st.just(()) | EVENTS,
    st.dictionaries(NAMES, TEXT, max_size=2), st.dictionaries(NAMES, NOTES, max_size=2),
)  # fmt: skip
RESULTS = {
    Control.RESET_PREFIX_CACHE: st.booleans(),
    Control.STATS: STATS,
    Control.SHUTDOWN: st.booleans(),
    Control.RECENT_STEPS: RECENT_STEPS,
    Control.RELEASE_SESSIONS: st.tuples(COUNT, COUNT),
    Control.SLEEP: st.booleans(),
    Control.WAKE_UP: st.booleans(),
    Control.SLEEP_LEVEL: st.integers(0, 2),
    Control.START_PROFILE: st.text(max_size=8),
    Control.STOP_PROFILE: st.text(max_size=8),
}
CONTROL_RESULTS = st.one_of(
    [st.builds(ControlResult, COUNT, st.just(operation), values) for operation, values in RESULTS.items()]
)
KEYS = st.binary(max_size=3).map(lambda chunk: 8 * chunk)
SUMS = st.builds(ShadowFigures, *[st.floats(0, 1e9)] * 3, st.integers(0, 2**40))
SHADOW_REPORTS = st.builds(
    ShadowReport, st.text(max_size=9), st.text(max_size=9), st.integers(0, 2**40), st.integers(0, 2**40),
    st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 256), *[SUMS] * 6,
)  # fmt: skip
ENGINE_MESSAGES = (
    st.builds(
        EngineCoreOutputs,
        st.lists(OUTPUTS, max_size=6),
        TIME,
        optional(STATS),
        st.just(()) | EVENTS,
        optional(PHASES),
        st.just(0),  # a client's own, which does not travel
        evictions=st.just(()) | EVICTIONS,
        shadow=optional(SHADOW_REPORTS),
        engine=st.none(),  # a client's own, too
    )
    | READY
    | st.builds(StartFailed, TEXT)
    | st.builds(CacheUpdate, COUNT, st.booleans(), KEYS, KEYS)
    | st.builds(EngineFailed, TEXT)
    | CONTROL_RESULTS
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=6,
)
REQUEST = EngineCoreRequest("r", [1, 2, 3], SamplingParams(seed=0))
