"""Whatever may be sent arrives unchanged, and whatever may not is a `CodecError` and nothing else."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from engine_core_helpers.messages import (
    CLIENT_MESSAGES,
    ENGINE_MESSAGES,
    JUNK,
    REQUEST,
    decode_client_message,
    decode_engine_message,
    encode,
)
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core.messages import protocol
from llmstack_engine_core.messages.control import SIGNATURES, ControlCall, ControlResult
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import PROTOCOL_VERSION, AbortRequests, Hello
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    Operation,
    SamplingParams,
    ShadowReport,
    StructuredOutputsParams,
    TokenLogprobs,
)
from llmstack_types.engine_core import TokenIds

TAGS = {row.cls: tag for one in (protocol.CLIENT_MESSAGES, protocol.ENGINE_MESSAGES) for tag, row in one.rows.items()}


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
        decode_engine_message(msgpack.packb([PROTOCOL_VERSION, TAGS[ControlResult], 0, *fields]))


@pytest.mark.parametrize("change", [{"lag_s": -1.0}, {"cpu_s": float("nan")}, {"num_shed": True}, {"real": [1.0]}])
def test_a_shadow_report_with_other_values_is_refused(change: dict[str, Any]) -> None:
    message = encode(EngineCoreOutputs([], shadow=ShadowReport("fair")._replace(**change)))
    with pytest.raises(CodecError):
        decode_engine_message(message)


def test_every_control_operation_can_be_carried_and_has_a_number_of_its_own() -> None:
    operations = {value for value in vars(Control).values() if isinstance(value, Operation)}
    assert operations == set(SIGNATURES)
    assert len({operation.number for operation in operations}) == len(operations)


def test_arguments_that_are_not_those_of_the_operation_are_not_sent() -> None:
    with pytest.raises(CodecError, match="sleep must be a list of 1 items"):
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


@pytest.mark.parametrize("num_tokens", [1, 16_384, 40_000])
def test_a_prompt_arrives_with_its_largest_id(num_tokens: int) -> None:
    prompt = [number * 7919 % 50_257 for number in range(num_tokens)]
    arrived = decode_client_message(encode(replace(REQUEST, prompt_token_ids=prompt)))
    assert isinstance(arrived, EngineCoreRequest)
    assert isinstance(arrived.prompt_token_ids, TokenIds)
    assert arrived.prompt_token_ids == prompt
    assert arrived.prompt_token_ids.largest == max(prompt)


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
        [PROTOCOL_VERSION + 1, TAGS[Hello]],
        [True, TAGS[Hello]],
        [PROTOCOL_VERSION, 99],
        [PROTOCOL_VERSION, "hello"],
        [PROTOCOL_VERSION, TAGS[EngineReady]],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, 99],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, 99, []],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, "reset_prefix_cache", []],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.WAKE_UP.number, [1]],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.WAKE_UP.number, None],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.SLEEP.number, []],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.SLEEP.number, [0]],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.SLEEP.number, [3]],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.SLEEP.number, [True]],
        [PROTOCOL_VERSION, TAGS[ControlCall], 1, Control.RECENT_STEPS.number, [-1]],
        [PROTOCOL_VERSION, TAGS[AbortRequests], [""]],
        [PROTOCOL_VERSION, TAGS[AbortRequests], ["a", 1]],
        [PROTOCOL_VERSION, TAGS[AbortRequests], "abc"],
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
        {"no_repeat_ngram_size": 1025},
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
    monkeypatch.setattr(protocol.CLIENT_MESSAGES, "max_bytes", len(frame) - 1)
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


@pytest.mark.parametrize(
    ("column", "entries"),
    [
        ("logprobs", [[2, 1], [2, 2]]),
        ("logprobs", [[2, 0], [2, 0]]),
        ("prompt_logprobs", [[2, 1], [1, 2]]),
        ("prompt_logprobs", [[0, 2], [1, 1]]),
    ],
)
def test_log_probabilities_of_other_lengths_than_their_ids_are_refused(column: str, entries: list[list[int]]) -> None:
    entry = TokenLogprobs((1, 2), (-0.5, -1.5), 1)
    output = EngineCoreOutput("r", [1, 2], **{column: [entry, entry]})
    values = msgpack.unpackb(encode(EngineCoreOutputs([output])))
    packed = values[3][EngineCoreOutput._fields.index(column)][1][1]
    assert decode_engine_message(msgpack.packb(values)).outputs == [output]
    (token_lengths, logprob_lengths), (token_ids, logprobs) = entries, packed[:2]
    packed[:2] = [
        [array("I", token_lengths).tobytes(), token_ids[1][: 4 * sum(token_lengths)]],
        [array("I", logprob_lengths).tobytes(), logprobs[1][: 8 * sum(logprob_lengths)]],
    ]
    with pytest.raises(CodecError, match=column):
        decode_engine_message(msgpack.packb(values))


def test_prompt_log_probabilities_may_have_gaps_and_others_not() -> None:
    entry = TokenLogprobs((1,), (-0.5,), 1)
    outputs = [EngineCoreOutput("r", [1], prompt_logprobs=[None, entry, None])]
    assert decode_engine_message(encode(EngineCoreOutputs(outputs))).outputs == outputs
    with pytest.raises(CodecError, match="logprobs"):
        decode_engine_message(encode(EngineCoreOutputs([EngineCoreOutput("r", [1], logprobs=[None, entry])])))
