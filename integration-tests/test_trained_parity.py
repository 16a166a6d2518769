"""Whisper with trained weights: the tokens of transformers for real speech, however requests meet."""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import pytest
import torch
from trained_speech import MAX_TOKENS, RATE, Clip, TrainedReference, clips, folder_of

from llmstack_kernels.linear.quantization import quantize
from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.offline.llm import LLM
from llmstack_llm.requests import GenerationRequest
from llmstack_llm.speech.served import Speech
from llmstack_types import SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
LANGUAGES = {"whisper-tiny.en": ("en",), "whisper-base": ()}
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 8, "block_size": 8, "max_num_seqs": 4},
    "preempted": {"num_kv_blocks": 12, "max_model_len": 176, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


class Case(NamedTuple):
    """A clip with times or without, and what transformers says."""

    clip: Clip
    has_times: bool
    answer: list[int]


@pytest.fixture(scope="module", params=LANGUAGES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt_of(speech: Speech, clip: Clip, *, has_times: bool) -> list[int]:
    language = clip.language if speech.tokens.is_multilingual else None
    return speech.start_ids(language, timestamps=has_times)


def speech_of(llm: LLM) -> Speech:
    speech = llm.llm_engine.input_processor.media.speech
    assert speech is not None
    return speech


def asked(speech: Speech, clip: Clip, *, has_times: bool) -> dict[str, Any]:
    prompt = prompt_of(speech, clip, has_times=has_times)
    return {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip.samples, RATE)}}


def expected(reference: TrainedReference, speech: Speech, some: list[Clip]) -> list[Case]:
    found = []
    for clip in some:
        for has_times in (False, True):
            prompt = prompt_of(speech, clip, has_times=has_times)
            found.append(Case(clip, has_times, reference.answer(clip, prompt, has_times=has_times)))
    return found


@pytest.fixture(scope="module")
def cases(name: str) -> list[Case]:
    folder, some = folder_of(name), clips(*LANGUAGES[name])
    with LLM(folder, dtype="float32") as llm:
        return expected(TrainedReference(folder), speech_of(llm), some)


def differences(llm: LLM, cases: list[Case]) -> list[str]:
    """Names of the cases whose tokens are others."""
    speech = speech_of(llm)
    prompts = [asked(speech, one.clip, has_times=one.has_times) for one in cases]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    answers = [[token for token in one.outputs[0].token_ids if token != speech.tokens.end] for one in outputs]
    return [
        f"{one.clip.name}, {one.has_times}" for one, found in zip(cases, answers, strict=True) if one.answer != found
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_transformers(name: str, cases: list[Case], engine: str) -> None:
    assert len({one.clip.language for one in cases}) == (1 if name.endswith(".en") else 9)
    with LLM(folder_of(name), dtype="float32", **ENGINES[engine]) as llm:
        assert differences(llm, cases) == []
        counters = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
        assert engine != "preempted" or counters["vllm:num_preemptions"]


def test_languages_are_those_of_transformers() -> None:
    folder, some = folder_of("whisper-base"), clips()
    reference = TrainedReference(folder)
    with LLM(folder, dtype="float32") as llm:
        speech = speech_of(llm)
        params = SamplingParams(**speech.detection_sampling)
        asked = [
            {"prompt_token_ids": [speech.tokens.start], "multi_modal_data": {"audio": (clip.samples, RATE)}}
            for clip in some
        ]
        outputs = llm.generate(asked, params, use_tqdm=False)
        found = [speech.read_detection(one.outputs[0]).language for one in outputs]
        assert [speech.tokens.languages[str(one)] for one in found] == [reference.language(clip) for clip in some]
    assert sum(one == clip.language for one, clip in zip(found, some, strict=True)) > 0.8 * len(some)


def rounded(model: Any) -> None:
    """Rounds what `--quantization int8` rounds: the linear layers of the decoder, and the output head."""
    head = torch.nn.Linear(*model.proj_out.weight.shape[::-1], bias=False)
    head.weight = torch.nn.Parameter(model.proj_out.weight.detach().clone())
    model.proj_out = head
    layers = [one for one in model.model.decoder.layers.modules() if isinstance(one, torch.nn.Linear)]
    for layer in (head, *layers):
        layer.weight.data = quantize(layer.weight.data, "int8").dequantize(torch.float32)


def test_rounded_weights_give_the_tokens_of_what_they_represent(name: str) -> None:
    folder, some = folder_of(name), clips("en", "fr", "ja")
    if name.endswith(".en"):
        some = [one for one in some if one.language == "en"]
    with LLM(folder, dtype="float32", quantization="int8") as llm:
        cases = expected(TrainedReference(folder, rounded), speech_of(llm), some)
        assert differences(llm, cases) == []


async def test_tokens_survive_the_engine_core(name: str, cases: list[Case]) -> None:
    args = EngineArgs(folder_of(name), dtype="float32", max_engine_restarts=1)
    engine, is_killed, found = AsyncLLM.from_engine_args(args, multiprocess=True), False, []
    try:
        await engine.wait_until_ready()
        speech = engine.speech
        assert speech is not None
        some = [one for one in cases if one.clip.name.startswith(("jfk", "two"))]
        streams = []
        for number, one in enumerate(some):
            window = await speech.open(one.clip.samples)
            language = one.clip.language if speech.tokens.is_multilingual else None
            prompt = speech.prompt(window, language=language, timestamps=one.has_times)
            given = GivenSampling({"temperature": 0, "max_tokens": MAX_TOKENS})
            streams.append(await engine.submit(GenerationRequest(f"{number}", prompt, given)))
        for stream in streams:
            async with stream:
                async for output in stream:
                    if not is_killed and len(output.outputs[0].token_ids) > 3:
                        os.kill(engine._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                        is_killed = True
                ids = output.outputs[0].token_ids
                found.append([token for token in ids if token != speech.tokens.end])
        assert found == [one.answer for one in some]
        assert is_killed
    finally:
        await engine.shutdown()
