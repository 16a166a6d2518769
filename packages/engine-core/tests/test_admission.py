"""What reaches an engine core is checked there again: a field out of its domain ends its own request only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.ipc.codec import decode_client_message
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_types import (
    EngineCoreRequest,
    FinishReason,
    ModelRunnerConfig,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    StructuredOutputsParams,
)

VOCAB_SIZE = 97
GOOD = EngineCoreRequest("good", [5, 6, 7], SamplingParams(max_tokens=4, seed=0))
POOLED = replace(
    GOOD, sampling_params=SamplingParams(max_tokens=0), pooling_params=PoolingParams(task=PoolingTask.EMBED)
)


@pytest.fixture
def core() -> EngineCore:
    return build_engine_core(EngineConfig(ModelRunnerConfig(f"echo?vocab_size={VOCAB_SIZE}"), runner="echo"))


def sampling(**changes: Any) -> EngineCoreRequest:
    return replace(GOOD, sampling_params=replace(GOOD.sampling_params, **changes))


def pooling(**changes: Any) -> EngineCoreRequest:
    return replace(POOLED, pooling_params=PoolingParams(**{"task": PoolingTask.EMBED, **changes}))


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, lora_name="style"),
        replace(GOOD, prompt_token_ids=[VOCAB_SIZE]),
        replace(GOOD, output_token_ids=(VOCAB_SIZE,)),
        replace(GOOD, eos_token_ids=(VOCAB_SIZE,)),
        sampling(stop_token_ids=(VOCAB_SIZE,)),
        sampling(allowed_token_ids=(VOCAB_SIZE,)),
        sampling(allowed_token_ids=()),
        sampling(logit_bias={VOCAB_SIZE: 1.0}),
        sampling(bad_words_token_ids=((1, VOCAB_SIZE),)),
        sampling(bad_words_token_ids=((1,), ())),
        sampling(logprobs=VOCAB_SIZE + 1),
        sampling(prompt_logprobs=2**24),
        sampling(use_beam_search=True, n=1025),
        sampling(use_beam_search=True, n=2, max_tokens=2**31 - 1),
        sampling(use_beam_search=True, structured_outputs=StructuredOutputsParams(regex="a")),
        replace(sampling(use_beam_search=True), output_token_ids=(1,)),
        replace(POOLED, sampling_params=SamplingParams(max_tokens=1)),
        replace(POOLED, output_token_ids=(1,)),
        pooling(dimensions=5),
        pooling(second_text_start=4),
        pooling(task=PoolingTask.CLASSIFY),
    ],
)
def test_a_request_out_of_the_domain_ends_with_an_error_and_another_does_not(
    core: EngineCore, bad: EngineCoreRequest
) -> None:
    core.add_request(replace(bad, request_id="bad"))
    core.add_request(GOOD)
    tokens: list[int] = []
    reasons: dict[str, FinishReason] = {}
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    assert reasons == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert tokens == [5, 6, 7, 5]


def test_an_abort_of_a_refused_request_does_not_end_the_beam_of_that_name(core: EngineCore) -> None:
    core.add_request(replace(sampling(use_beam_search=True, logprobs=0), request_id="search"))
    core.step()
    beams = list(core._beam_searches.row_id_to_search)
    for name in beams:
        core.add_request(replace(GOOD, request_id=name))
    core.abort_requests(beams)
    ended: set[str] = set()
    while core.has_unfinished_requests():
        ended.update(output.request_id for output in core.step().outputs if output.finish_reason)
    assert "search" in ended


def test_a_message_of_a_million_lists_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(CodecError, match="at most 131072 values"):
        decode_client_message(msgpack.packb([[[]] * 60_000] * 20))
