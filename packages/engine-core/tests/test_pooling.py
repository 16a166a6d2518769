"""Pooling requests through the engine core, its wire and its log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine_core_helpers.messages import decode_client_message, decode_engine_message, encode
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_engine_core.build import with_whole_prompts
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.testing import echo_vector
from llmstack_step_log import RecordedRun, read_step_log
from llmstack_step_log.replay import verify
from llmstack_step_log.request_fields import pack_request, unpack_request
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerConfig,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
)

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
INT32 = 2**31 - 1
PARAMS = st.builds(
    PoolingParams,
    st.sampled_from(PoolingType),
    st.booleans(),
    st.none() | st.integers(1, INT32),
    st.sampled_from([PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED]),
    st.booleans(),
    second_text_start=st.none() | st.integers(0, INT32),
) | st.builds(
    PoolingParams,
    st.none(),
    st.booleans(),
    task=st.just(PoolingTask.TOKEN_EMBED),
    use_activation=st.booleans(),
)


RESOLVED = PoolingParams(PoolingType.CLS, True, task=PoolingTask.EMBED, use_activation=True)


def build(options: str = "", num_blocks: int = 16, **changes: object) -> EngineCore:
    config = EngineConfig(
        ModelRunnerConfig(f"echo?{options}", block_size=8, **LIMITS),
        runner="echo",
        scheduler=SchedulerConfig(**LIMITS),
        num_blocks=num_blocks,
    )
    return build_engine_core(replace(config, **changes))


def pooling(request_id: str, prompt: list[int], kind: PoolingType = PoolingType.LAST) -> EngineCoreRequest:
    params = PoolingParams(kind, False, task=PoolingTask.EMBED)
    return EngineCoreRequest(request_id, prompt, NO_TOKENS, pooling_params=params)


def completion(request_id: str, prompt: list[int], max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0))


def run(core: EngineCore) -> dict[str, EngineCoreOutput]:
    last = {}
    while core.has_unfinished_requests():
        last |= {output.request_id: output for output in core.step().outputs}
    return last


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", PoolingType)
def test_vectors_come_from_beside_completions_whole_or_in_chunks(kind: PoolingType, async_scheduling: bool) -> None:
    core = build(async_scheduling=async_scheduling)
    prompts = {f"p{size}": [*range(3, 3 + size)] for size in (1, 9, 16, 40)}
    core.add_request(completion("c", [9, 8, 7], max_tokens=12))
    for request_id, prompt in prompts.items():
        core.add_request(pooling(request_id, prompt, kind))
    last = run(core)
    for request_id, prompt in prompts.items():
        assert last[request_id].pooled == echo_vector(prompt, PoolingParams())
        assert (last[request_id].new_token_ids, last[request_id].finish_reason) == ([], FinishReason.STOP)
    assert last["c"].finish_reason is FinishReason.LENGTH
    assert core.stats().num_free_blocks == 16


def test_a_model_that_only_pools_refuses_completions_one_by_one() -> None:
    core = build("is_generative=0")
    core.add_request(completion("c", [1, 2]))
    core.add_request(pooling("p", [1, 2]))
    last = run(core)
    assert last["c"].error == "The model only pools."
    assert last["p"].pooled is not None


def test_a_model_with_labels_reports_their_number() -> None:
    params = PoolingParams(PoolingType.LAST, False, task=PoolingTask.CLASSIFY, use_activation=True)
    request = EngineCoreRequest("p", [4, 5, 6], NO_TOKENS, pooling_params=params)
    labelling, other = build("num_labels=2"), build()
    for core in (labelling, other):
        core.add_request(request)
    assert (labelling.ready.num_labels, other.ready.num_labels) == (2, 0)
    assert run(labelling)["p"].pooled == echo_vector([4, 5, 6], PoolingParams(dimensions=2))
    assert run(other)["p"].error == "The model has no labels."


def test_a_row_that_fails_ends_alone() -> None:
    core = build("error_request_id=p1")
    for request_id in ("p1", "p2"):
        core.add_request(pooling(request_id, [4, 5]))
    last = run(core)
    assert (last["p1"].finish_reason, last["p1"].pooled) == (FinishReason.ERROR, None)
    assert last["p2"].pooled == echo_vector([4, 5], PoolingParams())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), PARAMS)
def test_a_request_goes_over_the_wire_and_into_the_log_unchanged(prompt: list[int], params: PoolingParams) -> None:
    request = EngineCoreRequest("p", prompt, NO_TOKENS, pooling_params=params)
    assert decode_client_message(encode(request)) == request
    assert unpack_request(pack_request(request)) == request
    arrived = decode_client_message(encode(request))
    assert isinstance(arrived, EngineCoreRequest)
    assert arrived.pooling_params is not None
    assert type(arrived.pooling_params.pooling_type) is type(params.pooling_type)
    assert type(arrived.pooling_params.task) is PoolingTask


@given(st.lists(st.none() | st.binary(max_size=10).map(lambda chunk: chunk * 4), max_size=5))
def test_vectors_go_over_the_wire_unchanged(vectors: list[bytes | None]) -> None:
    outputs = EngineCoreOutputs([EngineCoreOutput(str(i), [], pooled=vector) for i, vector in enumerate(vectors)])
    assert decode_engine_message(encode(outputs)) == outputs


@pytest.mark.parametrize("vector", [b"abc", "text", 5])
def test_what_is_no_vector_does_not_arrive(vector: object) -> None:
    outputs = EngineCoreOutputs([EngineCoreOutput("p", [], pooled=vector)])  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="pooled"):
        decode_engine_message(encode(outputs))


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(),
        replace(RESOLVED, pooling_type="step"),
        replace(RESOLVED, pooling_type=None),
        replace(RESOLVED, normalize=None),
        replace(RESOLVED, dimensions=0),
        replace(RESOLVED, task=PoolingTask.SCORE),
        replace(RESOLVED, task=None),
        replace(RESOLVED, use_activation=None),
        replace(RESOLVED, second_text_start=-1),
    ],
    ids=repr,
)
def test_params_that_admission_did_not_resolve_do_not_arrive(params: PoolingParams) -> None:
    request = EngineCoreRequest("p", [1], NO_TOKENS, pooling_params=params)
    with pytest.raises(CodecError):
        decode_client_message(encode(request))


def test_a_run_with_pooling_requests_is_derived_again(tmp_path: object) -> None:
    path = f"{tmp_path}/steps"
    core = build(num_blocks=12, record_steps=path)
    rng = random.Random(0)
    for index in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        make = completion if index % 3 == 0 else pooling
        core.add_request(make(f"r{index}", prompt))
        core.step()
        if index % 7 == 6:
            core.abort_requests([f"r{index - 1}"])
    run(core)
    core.shutdown()
    recorded: RecordedRun = read_step_log(path)
    assert recorded.is_closed
    assert verify(recorded).num_requests == 30


def test_a_model_that_sees_both_ways_gets_whole_prompts() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, long_prefill_token_threshold=9
    )
    changed = with_whole_prompts(config)
    assert (changed.max_num_batched_tokens, changed.enable_chunked_prefill) == (512, False)
    assert with_whole_prompts(replace(config, max_num_batched_tokens=600)).max_num_batched_tokens == 600
