"""Prompts in every form, to requests."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from llm_helpers.pictures import FakeOpened, FakePictures

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.admission.seeds import draw_seeds_from
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.requests import AdmittedRequest, GenerationRequest, RenderedPrompt
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import EngineReady, InvalidRequestError, PoolingParams, SamplingParams

CONFIG = ModelConfig("m", Path(), "GPT2LMHeadModel", "gpt2", 128, 257, eos_token_ids=(256,))


def processor(**options: Any) -> InputProcessor:
    return InputProcessor(CONFIG, Tokenizer(byte_tokenizer(), {"eos_token": "<|endoftext|>"}), **options)


def admit(inputs: InputProcessor, prompt: Any, params: SamplingParams, *, is_echo: bool = False) -> AdmittedRequest:
    return inputs.admit(prompt, inputs.check_params(params, is_echo=is_echo))


def refusal(prompt: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        admit(processor(), prompt, SamplingParams(**fields))
    return caught.value


def test_text_ids_and_dicts_mean_the_same():
    ids = processor().tokenizer.encode("Hi")
    for prompt in (
        "Hi",
        ids,
        tuple(ids),
        {"prompt": "Hi"},
        {"prompt_token_ids": ids},
        {"prompt": "Hi", "prompt_token_ids": ids},
    ):
        assert admit(processor(), prompt, SamplingParams()).prompt_token_ids == ids
    assert admit(processor(), "Hi", SamplingParams()).prompt == "Hi"
    assert admit(processor(), ids, SamplingParams()).prompt is None


@pytest.mark.parametrize(("fields", "kept"), [
    ({"truncate_prompt_tokens": 3}, "hij"), ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
    ({"truncate_prompt_tokens": 99}, "abcdefghij"), ({"truncate_prompt_tokens": -1}, "abcdefghij"),
    ({"truncate_prompt_tokens": -1, "max_tokens": 124}, "ghij"),
    ({"truncate_prompt_tokens": -1, "max_tokens": None}, "abcdefghij"),
])  # fmt: skip
@pytest.mark.parametrize("is_text", [True, False])
def test_a_prompt_is_cut_where_that_is_asked_for(is_text: bool, fields: dict[str, Any], kept: str):
    inputs = processor()
    prompt = "abcdefghij" if is_text else inputs.tokenizer.encode("abcdefghij")
    admitted = admit(inputs, prompt, SamplingParams(**fields))
    assert admitted.prompt_token_ids == inputs.tokenizer.encode(kept)
    assert admitted.prompt == kept
    [request] = inputs.process_inputs("r", admitted)
    params = request.sampling_params
    assert (params.truncate_prompt_tokens, params.truncation_side, params.stream_interval) == (None, "left", 1)


def test_a_cut_prompt_may_be_longer_than_the_context():
    admitted = admit(processor(), "x" * 100_000, SamplingParams(truncate_prompt_tokens=-1, max_tokens=8))
    assert len(admitted.prompt_token_ids) == 120


@pytest.mark.parametrize(("fields", "param", "code"), [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
    ({"truncate_prompt_tokens": 129}, "truncate_prompt_tokens", "integer_above_max_value"),
    ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"truncate_prompt_tokens": -1, "max_tokens": "many"}, "max_tokens", "invalid_type"),
    ({"stream_interval": 0}, "stream_interval", "integer_below_min_value"),
    ({"stream_interval": 2**40}, "stream_interval", "integer_above_max_value"),
    ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
])  # fmt: skip
def test_fields_of_the_front_end_have_ranges(fields: dict[str, Any], param: str, code: str):
    error = refusal("Hi", **fields)
    assert (error.param, error.code) == (param, code)


def test_more_logprobs_may_be_allowed():
    inputs = InputProcessor(dataclasses.replace(CONFIG, max_logprobs=50), None)
    assert admit(inputs, [1], SamplingParams(logprobs=50)).sampling_params.logprobs == 50
    with pytest.raises(InvalidRequestError):
        admit(inputs, [1], SamplingParams(prompt_logprobs=51))


def test_an_empty_text_starts_with_the_end_of_text_as_at_openai():
    assert admit(processor(), "", SamplingParams()).prompt_token_ids == [256]


@pytest.mark.parametrize(("prompt", "param", "code"), [
    (5, "prompt", "invalid_type"), (None, "prompt", "invalid_type"), ([], "prompt", "empty_array"),
    ({}, "prompt", "invalid_type"), ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt_token_ids": "x"}, "prompt", "invalid_type"),
    ({"prompt_embeds": []}, "prompt_embeds", "unsupported_parameter"), ([1, 257], "prompt[1]", "invalid_value"),
    ("\ud800", "prompt", "invalid_value"), ("x" * 200, "prompt", "context_length_exceeded"),
    ("x" * 100_000, "prompt", "context_length_exceeded"),
])  # fmt: skip
def test_other_prompts_are_refused(prompt: object, param: str, code: str):
    error = refusal(prompt)
    assert (error.param, error.code) == (param, code)


def test_without_a_tokenizer_ids_work_and_text_is_refused():
    bare = InputProcessor(CONFIG, None)
    assert admit(bare, [1, 2], SamplingParams()).prompt_token_ids == [1, 2]
    for prompt, params in (("Hi", SamplingParams()), ([1], SamplingParams(stop="x"))):
        with pytest.raises(InvalidRequestError) as caught:
            admit(bare, prompt, params)
        assert caught.value.code == "unsupported_value"


def test_a_long_text_is_not_tokenized_on_the_loop():
    async def run() -> int:
        num_ticks = 0

        async def tick() -> None:
            nonlocal num_ticks
            while True:
                num_ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        long = InputProcessor(ModelConfig("m", Path(), "A", "a", 2**21, 257), Tokenizer(byte_tokenizer()))
        sampling = long.check_sampling(GivenSampling({}))
        await long.admit_async(GenerationRequest("r", "hello " * 50_000, sampling), sampling)
        ticking.cancel()
        return num_ticks

    assert asyncio.run(run()) > 10


def test_the_engine_cores_limits_hold_once_it_is_ready():
    ours = processor()
    ours.set_ready(EngineReady(2, 16, 64, 200, "float32", "cpu"))
    assert (ours.limits.max_model_len, ours.limits.vocab_size, ours.limits.max_request_tokens) == (64, 200, 32)


def test_one_completion_keeps_the_id_and_the_seed_of_its_request():
    ours = processor(clock=lambda: 5.0)
    (request,) = ours.process_inputs("r", admit(ours, "Hi", SamplingParams(seed=9)), priority=2, cache_salt="s")
    assert (request.request_id, request.sampling_params.seed, request.sampling_params.n) == ("r", 9, 1)
    assert (request.eos_token_ids, request.arrival_time_s, request.priority, request.cache_salt) == (
        (256,),
        5.0,
        2,
        "s",
    )


def test_every_engine_request_of_a_request_carries_its_tenant():
    ours = processor()
    requests = ours.process_inputs("r", admit(ours, "Hi", SamplingParams(n=2)), tenant="t")
    pooled = ours.process_pooling("p", AdmittedPooling("Hi", [1], PoolingParams()), tenant="t")
    assert [request.tenant for request in (*requests, pooled)] == ["t", "t", "t"]


def test_several_completions_have_seeds_of_their_own_that_repeat():
    ours = processor()
    params = SamplingParams(n=3, seed=42, prompt_logprobs=1)
    first = ours.process_inputs("r", admit(ours, "Hi", params))
    again = ours.process_inputs("q", admit(ours, "Hi", params))
    seeds = [request.sampling_params.seed for request in first]
    assert [request.request_id for request in first] == ["0_r", "1_r", "2_r"]
    assert [request.fork_of for request in first] == ["", "0_r", "0_r"]
    assert len(set(seeds)) == 3
    assert seeds == [request.sampling_params.seed for request in again]
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert [request.sampling_params.prompt_logprobs for request in first] == [1, None, None]


def test_a_seed_is_drawn_where_none_is_given():
    ours = processor()
    seeds = {ours.process_inputs("r", admit(ours, "Hi", SamplingParams()))[0].sampling_params.seed for _ in range(8)}
    assert len(seeds) == 8


def test_drawn_seeds_are_repeatable_in_a_task_that_asks_for_it():
    def drawn() -> list[int | None]:
        draw_seeds_from(7)
        ours = processor()
        return [ours.process_inputs("r", admit(ours, "Hi", SamplingParams()))[0].sampling_params.seed for _ in range(4)]

    first, second = contextvars.copy_context().run(drawn), contextvars.copy_context().run(drawn)
    assert first == second
    assert len(set(first)) == 4


def test_a_request_for_no_output_takes_one_step():
    ours = processor()
    (request,) = ours.process_inputs("r", admit(ours, "Hi", SamplingParams(max_tokens=0), is_echo=True))
    assert request.sampling_params.max_tokens == 1


def test_a_token_that_stands_for_a_picture_is_refused_without_one() -> None:
    inputs = InputProcessor(CONFIG, Tokenizer(byte_tokenizer(("<image>",))))
    inputs.media.processor = FakePictures()
    inputs.set_ready(EngineReady(8, 16, 64, 300, "float32", "cpu", embedding_size=4))
    (token_id,) = inputs.tokenizer.encode("<image>")
    assert dict(inputs.limits.placeholders) == {token_id: "<image>"}
    works = [lambda prompt=prompt: admit(inputs, prompt, SamplingParams()) for prompt in ("a<image>", [97, token_id])]
    works += [lambda: inputs.admit_pooling("a<image>", PoolingParams())]
    for work in works:
        with pytest.raises(InvalidRequestError, match="token 1 is '<image>'") as caught:
            work()
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    place = PlacedMedia(FakeOpened(inputs.media.processor, "1"), "image", 0, 1, ((0, 1),))
    rendered = RenderedPrompt("<image>", [token_id], media=(place,))
    assert admit(inputs, rendered, SamplingParams()).placed == (place,)
