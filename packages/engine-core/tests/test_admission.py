"""What reaches an engine core is checked there again: a field out of its domain ends its own request only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from engine_core_helpers.messages import decode_client_message

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.adapter_gate import make_adapter_gate
from llmstack_engine_core.admission import MAX_BEAMS, MAX_POOLED_NUMBERS, check_request
from llmstack_engine_core.beams import BeamSearches
from llmstack_engine_core.build import make_stages
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.events import EventBus
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.structured_output import LazyBackend
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_kv_cache import KVCacheManager
from llmstack_types import (
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    LoRAIdentity,
    ModelRunnerConfig,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    StructuredOutputsParams,
    ThinkingTags,
)
from llmstack_types.engine_core import TokenIds

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
        sampling(logprob_token_ids=(VOCAB_SIZE,)),
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
        pooling(task=PoolingTask.TOKEN_CLASSIFY),
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


def check_as_the_engine_core(request: EngineCoreRequest, ready: EngineReady) -> None:
    """The checks of an engine core without adapters and transfers."""
    runner, scheduler = EchoModelRunner(ModelRunnerConfig("echo")), Scheduler(SchedulerConfig(), KVCacheManager(8, 4))
    stages = make_stages(scheduler, runner, EventBus((), time.monotonic), LazyBackend("", None, READY.vocab_size))
    for stage in stages.needed_by(request):
        stage.check(request)
    check_request(request, ready)


def test_an_abort_of_a_refused_request_does_not_end_the_beam_of_that_name(core: EngineCore) -> None:
    core.add_request(replace(sampling(use_beam_search=True, logprobs=0), request_id="search"))
    core.step()
    searches = core.stages.beams
    assert isinstance(searches, BeamSearches)
    beams = list(searches.row_id_to_search)
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


READY = EngineReady(
    num_blocks=8, block_size=8, max_model_len=64, vocab_size=VOCAB_SIZE, dtype="float32", device="cpu",
    embedding_size=4, num_labels=2,
)  # fmt: skip
BEAMS = sampling(use_beam_search=True, n=2)
NO_BEAMS = ("use_beam_search", "A beam search has at most 1024 beams, no constraint and no earlier tokens.")
TOO_LONG = ("prompt", "This model's maximum context length is 64 tokens.")
NO_TOKENS = ("max_tokens", "A pooling request generates no tokens.")


@pytest.mark.parametrize(
    ("bad", "ready", "param", "message"),
    [
        (replace(GOOD, lora_name="style"), {}, "model", "The model has no adapter of this name."),
        (replace(GOOD, kv_transfer=KVTransferParams(do_remote_decode=True)), {}, "kv_transfer_params",
         "The engine core exchanges no KV blocks."),
        (GOOD, {"is_generative": False}, "model", "The model only pools."),
        (sampling(allowed_token_ids=()), {}, "allowed_token_ids", "No token is allowed."),
        (sampling(bad_words_token_ids=((1,), ())), {}, "bad_words_token_ids", "A bad word has no tokens."),
        (sampling(logprobs=98), {}, "logprobs", "There are more logprobs than tokens in the vocabulary."),
        (sampling(prompt_logprobs=2**24 // 3), {}, "prompt_logprobs",
         "A request reports at most 16777216 log-probabilities of its prompt."),
        (replace(GOOD, prompt_token_ids=[97]), {}, "prompt_token_ids",
         "A token id in prompt_token_ids is out of vocabulary."),
        (replace(GOOD, prompt_token_ids=[5, -1]), {}, "prompt_token_ids",
         "A token id in prompt_token_ids is out of vocabulary."),
        (replace(GOOD, output_token_ids=(97,)), {}, "output_token_ids",
         "A token id in output_token_ids is out of vocabulary."),
        (replace(GOOD, eos_token_ids=(97,)), {}, "eos_token_ids", "A token id in eos_token_ids is out of vocabulary."),
        (sampling(stop_token_ids=(97,)), {}, "stop_token_ids", "A token id in stop_token_ids is out of vocabulary."),
        (sampling(allowed_token_ids=(97,)), {}, "allowed_token_ids",
         "A token id in allowed_token_ids is out of vocabulary."),
        (sampling(allowed_token_ids=(1,) * 98), {}, "allowed_token_ids", "More tokens are allowed than there are."),
        (sampling(logprob_token_ids=(97,)), {}, "logprob_token_ids",
         "A token id in logprob_token_ids is out of vocabulary."),
        (sampling(thinking_tags=ThinkingTags((1,), (97,))), {}, "thinking_tags",
         "A token id in thinking_tags is out of vocabulary."),
        (sampling(thinking_tags=ThinkingTags((1,), ())), {}, "thinking_tags", "Nothing ends the reasoning."),
        (sampling(logit_bias={97: 1.0}), {}, "logit_bias", "A token id in logit_bias is out of vocabulary."),
        (sampling(bad_words_token_ids=((1,), (97,))), {}, "bad_words_token_ids",
         "A token id in bad_words_token_ids is out of vocabulary."),
        (POOLED, {"embedding_size": 0}, "model", "The model runner does not pool."),
        (pooling(task=PoolingTask.CLASSIFY), {"num_labels": 0}, "model", "The model has no labels."),
        (replace(POOLED, sampling_params=SamplingParams(max_tokens=1)), {}, *NO_TOKENS),
        (replace(POOLED, output_token_ids=(1,)), {}, *NO_TOKENS),
        (replace(POOLED, sampling_params=SamplingParams(max_tokens=0, use_beam_search=True)), {}, *NO_TOKENS),
        (replace(POOLED, sampling_params=SamplingParams(
            max_tokens=0, structured_outputs=StructuredOutputsParams(regex="a"))), {}, *NO_TOKENS),
        (pooling(dimensions=5), {}, "dimensions", "The model's vectors have fewer dimensions."),
        (pooling(second_text_start=4), {}, "second_text_start", "The second text begins after the prompt."),
        (pooling(task=PoolingTask.TOKEN_EMBED), {"embedding_size": MAX_POOLED_NUMBERS // 3 + 1}, "prompt",
         "A request returns at most 33554432 numbers."),
        (sampling(use_beam_search=True, n=MAX_BEAMS + 1), {}, *NO_BEAMS),
        (sampling(use_beam_search=True, structured_outputs=StructuredOutputsParams(regex="a")), {}, *NO_BEAMS),
        (replace(BEAMS, output_token_ids=(1,)), {}, *NO_BEAMS),
        (sampling(use_beam_search=True, max_tokens=62), {}, *TOO_LONG),
        (replace(sampling(use_beam_search=True, max_tokens=None), prompt_token_ids=[1] * 64), {}, *TOO_LONG),
        (replace(sampling(use_beam_search=True, max_tokens=0), prompt_token_ids=[1] * 64), {}, *TOO_LONG),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_says_why(
    bad: EngineCoreRequest, ready: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_as_the_engine_core(bad, replace(READY, **ready))
    assert (caught.value.param, caught.value.message) == (param, message)
    codes = {"allowed_token_ids": "empty_array", "prompt": "context_length_exceeded"}
    is_coded = message in ("No token is allowed.", TOO_LONG[1])
    assert caught.value.code == (codes[param] if is_coded else InvalidRequestError("").code)


@pytest.mark.parametrize(
    ("good", "ready"),
    [
        (replace(GOOD, prompt_token_ids=[0, 96], output_token_ids=(96,), eos_token_ids=(0,)), {}),
        (sampling(allowed_token_ids=(0, 96), logprobs=97, bad_words_token_ids=((96,),), logit_bias={96: 1.0}), {}),
        (sampling(logprobs=0), {}),
        (replace(sampling(prompt_logprobs=2**24 // 4 - 1), prompt_token_ids=[1] * 4), {}),
        (sampling(use_beam_search=True, n=MAX_BEAMS, max_tokens=61), {}),
        (replace(sampling(use_beam_search=True, max_tokens=None), prompt_token_ids=[1] * 63), {}),
        (pooling(dimensions=4, second_text_start=3), {}),
        (pooling(task=PoolingTask.CLASSIFY), {"num_labels": 1, "is_generative": False}),
        (replace(pooling(task=PoolingTask.TOKEN_EMBED), prompt_token_ids=[1, 2]),
         {"embedding_size": MAX_POOLED_NUMBERS // 2}),
        (pooling(), {"embedding_size": MAX_POOLED_NUMBERS + 1}),
    ],
)  # fmt: skip
def test_the_largest_values_are_admitted(good: EngineCoreRequest, ready: dict[str, Any]) -> None:
    check_request(good, replace(READY, **ready))


@pytest.mark.parametrize("is_known", [False, True])
def test_the_largest_id_of_a_prompt_decides_where_it_is_known(is_known: bool) -> None:
    ids = [5, VOCAB_SIZE, 7]
    prompt = TokenIds(ids, VOCAB_SIZE) if is_known else ids
    with pytest.raises(InvalidRequestError, match="A token id in prompt_token_ids is out of vocabulary"):
        check_request(replace(GOOD, prompt_token_ids=prompt), READY)
    check_request(replace(GOOD, prompt_token_ids=TokenIds(ids, VOCAB_SIZE - 1)), READY)  # the ids are not looked at


def test_a_refused_request_gets_an_output_with_its_error_and_no_tokens(core: EngineCore) -> None:
    core.add_request(replace(GOOD, request_id="bad", lora_name="style"))
    (output,) = core.step().outputs
    assert (output.request_id, list(output.new_token_ids)) == ("bad", [])
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "The model has no adapter of this name.")


def test_a_name_of_an_adapter_is_its_identity() -> None:
    identity = str(LoRAIdentity("style", "0" * 16, 1))
    runner = EchoModelRunner(ModelRunnerConfig("echo"))
    with_adapters, without = (make_adapter_gate(runner, count, 1, lambda *state: None) for count in (1, 0))
    with_adapters.check(replace(GOOD, lora_name=identity))
    for name, stage in ((identity, without), ("style", with_adapters)):
        with pytest.raises(InvalidRequestError, match="no adapter of this name") as caught:
            stage.check(replace(GOOD, lora_name=name))
        assert caught.value.param == "model"
