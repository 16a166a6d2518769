"""Whatever may be sent arrives unchanged, and whatever may not is a `CodecError` and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.ipc import codec
from llmstack_engine_core.ipc.codec import decode_client_message, decode_engine_message, encode
from llmstack_engine_core.ipc.control_codec import SIGNATURES
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import (
    PROTOCOL_VERSION,
    AbortRequests,
    CacheUpdate,
    ControlCall,
    ControlResult,
    EngineFailed,
    FollowCache,
    Goodbye,
    Hello,
    StartFailed,
    Tag,
)
from llmstack_types import (
    BlockEviction,
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    Operation,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RepetitionDetectionParams,
    RequestEvent,
    RequestOutputKind,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    SchedulerStats,
    StepPhases,
    StepRecord,
    StepRecording,
    StructuredOutputsParams,
    ThinkingTags,
    TokenLogprobs,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TOKEN_ID = st.integers(0, 2**32 - 1)
COUNT = st.integers(0, 2**31 - 1)
SHARE = st.floats(0, 1, exclude_min=True)
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
        )
    ),
    kept_special_tokens=tuples(TEXT),
    logprob_token_ids=optional(tuples(TOKEN_ID)),
    thinking_token_budget=optional(st.integers(0, 2**31 - 1)),
    thinking_tags=st.none()
    | st.builds(ThinkingTags, tuples(TOKEN_ID), st.lists(TOKEN_ID, min_size=1, max_size=4).map(tuple), st.booleans()),
    repetition_detection=st.none() | st.builds(RepetitionDetectionParams, *[st.integers(0, 1024)] * 3),
)
REQUESTS = st.builds(
    EngineCoreRequest,
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
    lora_name=optional(TEXT),
    lora_path=TEXT,
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
CONTROL_CALLS = st.sampled_from([op for op, signature in SIGNATURES.items() if not signature.arguments]).map(
    lambda operation: (operation, ())
) | st.one_of(
    st.tuples(st.just(Control.RECENT_STEPS), st.tuples(COUNT)),
    st.tuples(st.just(Control.SLEEP), st.tuples(st.integers(1, 2))),
)
CLIENT_MESSAGES = (
    REQUESTS
    | st.just(Hello())
    | st.just(Goodbye())
    | st.just(FollowCache())
    | st.builds(AbortRequests, tuples(NAME))
    | st.builds(lambda call_id, call: ControlCall(call_id, *call), COUNT, CONTROL_CALLS)
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
    error=optional(TEXT),
    pooled=optional(st.binary(max_size=3).map(lambda chunk: 4 * chunk)),
)
STATS = st.builds(
    SchedulerStats,
    **dict.fromkeys(SchedulerStats._fields, COUNT)
    | {
        "num_accepted_draft_tokens_per_place": st.lists(COUNT, max_size=5).map(tuple),
        "num_waiting_tokens_per_tenant": st.tuples(COUNT, COUNT),
        "waiting_tenants": st.tuples(TEXT, TEXT),
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
    phases_s=st.dictionaries(NAME, st.floats(0, 1e6), max_size=3),
    backends=st.dictionaries(NAME, TEXT, max_size=3),
    versions=st.dictionaries(NAME, TEXT, max_size=3),
)
TIME = st.floats(0, 1e9)
EVENTS = st.lists(st.builds(RequestEvent, NAME, st.sampled_from(RequestStatus), TIME), min_size=1, max_size=4)
EVICTIONS = st.lists(st.builds(BlockEviction, TIME, TIME, tuples(TIME)), min_size=1, max_size=3)
PHASES = st.builds(StepPhases, TIME, TIME, TIME)
ROWS = st.builds(ScheduledRequest, NAME, COUNT, COUNT, st.lists(TOKEN_ID, max_size=3), st.lists(TOKEN_ID, max_size=3))
RECORDS = st.builds(StepRecord, TIME, PHASES, STATS, st.lists(ROWS, max_size=3))
RECENT_STEPS = st.builds(StepRecording, TIME, st.lists(RECORDS, max_size=3), st.just([]) | EVENTS)
RESULTS = {
    Control.RESET_PREFIX_CACHE: st.booleans(),
    Control.STATS: STATS,
    Control.SHUTDOWN: st.booleans(),
    Control.RECENT_STEPS: RECENT_STEPS,
    Control.SLEEP: st.booleans(),
    Control.WAKE_UP: st.booleans(),
    Control.SLEEP_LEVEL: st.integers(0, 2),
}
CONTROL_RESULTS = st.one_of(
    [st.builds(ControlResult, COUNT, st.just(operation), values) for operation, values in RESULTS.items()]
)
KEYS = st.binary(max_size=3).map(lambda chunk: 8 * chunk)
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


@given(CLIENT_MESSAGES)
def test_what_a_client_sends_arrives_unchanged(message: Any) -> None:
    assert decode_client_message(encode(message)) == message


@given(ENGINE_MESSAGES)
def test_what_an_engine_core_sends_arrives_unchanged(message: Any) -> None:
    assert decode_engine_message(encode(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        [1, 99, True],
        [1, Control.WAKE_UP.number, 1],
        [1, Control.SLEEP_LEVEL.number, 3],
        [1, Control.STATS.number, True],
        [1, Control.RECENT_STEPS.number, [0.0, [], None]],
        [-1, Control.WAKE_UP.number, True],
    ],
)
def test_a_control_result_of_another_type_is_refused(fields: list[Any]) -> None:
    with pytest.raises(CodecError):
        decode_engine_message(msgpack.packb([PROTOCOL_VERSION, Tag.CONTROL_RESULT, 0, *fields]))


def test_every_control_operation_can_be_carried_and_has_a_number_of_its_own() -> None:
    operations = {value for value in vars(Control).values() if isinstance(value, Operation)}
    assert operations == set(SIGNATURES)
    assert len({operation.number for operation in operations}) == len(operations)


def test_arguments_that_are_not_those_of_the_operation_are_not_sent() -> None:
    with pytest.raises(CodecError, match="sleep has 1 arguments"):
        encode(ControlCall(1, Control.SLEEP, ()))
    with pytest.raises(CodecError, match="sleep must be"):
        encode(ControlCall(1, Control.SLEEP, (3,)))


def test_arrived_outputs_have_their_own_types() -> None:
    output = EngineCoreOutput("r", [1], [TokenLogprobs((1,), (-0.5,), 1)], finish_reason=FinishReason.STOP)
    arrived = decode_engine_message(encode(EngineCoreOutputs([output])))
    assert isinstance(arrived, EngineCoreOutputs)
    assert type(arrived.outputs[0]) is EngineCoreOutput
    assert arrived.outputs[0].finish_reason is FinishReason.STOP
    assert type(arrived.outputs[0].logprobs[0]) is TokenLogprobs


def test_lists_in_sampling_params_arrive_as_tuples_and_whole_numbers_as_floats() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[4], allowed_token_ids=[5], temperature=0)
    arrived = decode_client_message(encode(replace(REQUEST, sampling_params=params)))
    assert isinstance(arrived, EngineCoreRequest)
    assert arrived.sampling_params == replace(params, stop=("a",), stop_token_ids=(4,), allowed_token_ids=(5,))
    assert type(arrived.sampling_params.temperature) is float


@given(st.binary(max_size=200))
def test_random_bytes_are_a_codec_error_or_a_message(frame: bytes) -> None:
    for decode in (decode_client_message, decode_engine_message):
        try:
            decode(frame)
        except CodecError:
            continue


@given(CLIENT_MESSAGES | ENGINE_MESSAGES, st.data())
def test_every_truncated_message_is_a_codec_error(message: Any, data: st.DataObject) -> None:
    frame = encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for decode in (decode_client_message, decode_engine_message):
        with pytest.raises(CodecError):
            decode(frame[:cut])


@given(CLIENT_MESSAGES | ENGINE_MESSAGES, st.data())
def test_a_message_with_one_field_exchanged_is_a_codec_error_or_a_message(message: Any, data: st.DataObject) -> None:
    values = msgpack.unpackb(encode(message))
    index = data.draw(st.integers(0, len(values) - 1))
    place = values
    if isinstance(values[index], list) and values[index] and data.draw(st.booleans()):
        place, index = values[index], data.draw(st.integers(0, len(values[index]) - 1))
    place[index] = data.draw(JUNK)
    for decode in (decode_client_message, decode_engine_message):
        try:
            decode(msgpack.packb(values))
        except CodecError:
            continue


@given(CLIENT_MESSAGES | ENGINE_MESSAGES, JUNK)
def test_a_field_too_many_or_too_few_is_refused(message: Any, extra: Any) -> None:
    values = msgpack.unpackb(encode(message))
    for decode in (decode_client_message, decode_engine_message):
        with pytest.raises(CodecError):
            decode(msgpack.packb([*values, extra]))
        with pytest.raises(CodecError):
            decode(msgpack.packb(values[:-1]))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [PROTOCOL_VERSION],
        [PROTOCOL_VERSION + 1, Tag.HELLO],
        [True, Tag.HELLO],
        [PROTOCOL_VERSION, 99],
        [PROTOCOL_VERSION, "hello"],
        [PROTOCOL_VERSION, Tag.READY],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, 99],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, 99, []],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, "reset_prefix_cache", []],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.WAKE_UP.number, [1]],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.WAKE_UP.number, None],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.SLEEP.number, []],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.SLEEP.number, [0]],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.SLEEP.number, [3]],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.SLEEP.number, [True]],
        [PROTOCOL_VERSION, Tag.CONTROL_CALL, 1, Control.RECENT_STEPS.number, [-1]],
        [PROTOCOL_VERSION, Tag.ABORT_REQUESTS, [""]],
        [PROTOCOL_VERSION, Tag.ABORT_REQUESTS, ["a", 1]],
        [PROTOCOL_VERSION, Tag.ABORT_REQUESTS, "abc"],
        {"version": PROTOCOL_VERSION},
    ],
)
def test_unknown_versions_tags_operations_and_types_are_refused(values: Any) -> None:
    with pytest.raises(CodecError):
        decode_client_message(msgpack.packb(values))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1.0},
        {"temperature": "1"},
        {"temperature": True},
        {"top_p": 1.5},
        {"top_k": -2},
        {"n": 0},
        {"seed": 1.0},
        {"seed": True},
        {"max_tokens": -1},
        {"ignore_eos": 1},
        {"output_kind": "everything"},
        {"stop": [1]},
        {"stop": ["x"] * 2000},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
        {"extra_args": {"a": float("nan")}},
        {"extra_args": {"a": [[1]]}},
        {"structured_outputs": StructuredOutputsParams(regex="x" * 70_000)},
        {"structured_outputs": StructuredOutputsParams(choice=("x",) * 5000)},
        {"bad_words": [1]},
        {"typical_p": 2.0},
    ],
)
def test_a_refused_request_is_named_in_the_error(changes: dict[str, Any]) -> None:
    request = replace(REQUEST, sampling_params=replace(REQUEST.sampling_params, **changes))
    with pytest.raises(CodecError) as caught:
        decode_client_message(encode(request))
    assert caught.value.request_id == "r"
    assert next(iter(changes)) in str(caught.value)


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"], [1.5], [None]])
def test_token_ids_that_are_none_cannot_be_sent(prompt: Any) -> None:
    with pytest.raises(CodecError, match="prompt_token_ids"):
        encode(replace(REQUEST, prompt_token_ids=prompt))


@pytest.mark.parametrize("name", ["json", "structural_tag"])
def test_a_schema_travels_as_a_text_only(name: str) -> None:
    params = replace(REQUEST.sampling_params, structured_outputs=StructuredOutputsParams(**{name: {}}))
    with pytest.raises(CodecError, match=f"structured_outputs.{name}"):
        encode(replace(REQUEST, sampling_params=params))


def test_an_empty_prompt_is_refused_on_arrival() -> None:
    with pytest.raises(CodecError, match="must not be empty"):
        decode_client_message(encode(replace(REQUEST, prompt_token_ids=[])))


def test_integers_above_64_bits_and_lone_surrogates_cannot_be_sent() -> None:
    with pytest.raises(CodecError):
        encode(replace(REQUEST, priority=2**70))
    with pytest.raises(CodecError):
        encode(replace(REQUEST, cache_salt="\ud800"))


def test_oversized_messages_are_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(REQUEST)
    monkeypatch.setattr(codec, "MAX_CLIENT_FRAME_BYTES", len(frame) - 1)
    with pytest.raises(CodecError, match="too large"):
        decode_client_message(frame)
    with pytest.raises(CodecError, match="too large"):
        encode(replace(REQUEST, prompt_token_ids=[1] * 2**22 * 2))


def test_nested_arrays_maps_and_extensions_are_refused() -> None:
    for frame in (b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x81\xa1a\x01", msgpack.packb(msgpack.ExtType(4, b"x"))):
        with pytest.raises(CodecError):
            decode_client_message(frame)


def test_a_logprobs_entry_without_tokens_cannot_be_sent() -> None:
    output = EngineCoreOutput("r", [1], logprobs=[TokenLogprobs((), (), 1)])
    with pytest.raises(CodecError):
        encode(EngineCoreOutputs([output]))
