"""Whisper in `LLM.generate`: the tokens of transformers, however requests meet, and one encoding of each window."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_folders import model_folder
from speech_model import (
    END,
    ENGLISH,
    GERMAN,
    NO_TIMESTAMPS,
    NUM_STATES,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    WINDOW,
    SpeechReference,
    save_speech_model,
    sound,
    speech_prompt,
)

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.model.config import ModelConfigError
from llmstack_llm.offline.llm import LLM
from llmstack_llm.requests import GenerationRequest
from llmstack_media.sound.resample import Resampler
from llmstack_types import InvalidRequestError, PoolingParams, PoolingTask, SamplingParams, SchedulerOutput

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PLAIN, TIMED = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS], [START, GERMAN, TRANSLATE]
LONG = [PREVIOUS, *range(20, 45), *TIMED]
CASES = [(0, PLAIN), (1, TIMED), (2, LONG), (0, TIMED), (3, PLAIN), (4, TIMED), (1, PLAIN), (5, LONG)]
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks": {"max_num_batched_tokens": 8, "block_size": 8, "max_num_seqs": 4},
    "one item at a time": {"encoder_cache_tokens": 100, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "preempted": {"num_kv_blocks": 14, "block_size": 4, "max_model_len": 52},
}


folder = model_folder(save_speech_model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> SpeechReference:
    return SpeechReference(folder)


@pytest.fixture(scope="module")
def answers(reference: SpeechReference) -> list[list[int]]:
    found = [reference.answer(sound(seed), token_ids, NUM_TOKENS) for seed, token_ids in CASES]
    assert len({tuple(answer) for answer in found}) == len(CASES)  # each says something of its own
    return found


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder) as one:
        yield one


def tokens(outputs: Any) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def counter(llm: LLM, name: str) -> Any:
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)  # type: ignore[union-attr]


def prompts() -> list[dict[str, Any]]:
    return [speech_prompt(sound(seed), token_ids) for seed, token_ids in CASES]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name.startswith("two") else ()) for name in ENGINES]
)
def test_answers_are_those_of_transformers(folder: Path, answers: Any, name: str) -> None:
    with engine(folder, **ENGINES[name]) as one:
        assert tokens(one.generate(prompts(), GREEDY, use_tqdm=False)) == answers
        assert tokens(one.generate(prompts()[:2], GREEDY, use_tqdm=False)) == answers[:2]
        assert name != "preempted" or counter(one, "vllm:num_preemptions")


async def test_a_window_that_ends_behind_its_sound_costs_less_and_is_a_short_one(
    folder: Path, reference: SpeechReference
) -> None:
    args = EngineArgs(str(folder), dtype="float32", skip_tokenizer_init=True)
    engine = AsyncLLM.from_engine_args(args, multiprocess=False)
    try:
        await engine.wait_until_ready()
        speech, given = engine.speech, GivenSampling({"temperature": 0.0, "max_tokens": NUM_TOKENS})
        assert speech is not None
        answers, samples = dict[str, list[int]](), sound(0, 15_000)
        windows = [await speech.open(samples, silence_s=silence_s) for silence_s in (0, 1, None)]
        requests = [
            GenerationRequest(str(number), speech.prompt(window, language="en"), given)
            for number, window in enumerate(windows)
        ]
        stream = await engine.submit(*requests)
        async with stream:
            async for output in stream:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        prompt = [START, ENGLISH, TRANSCRIBE]
        expected = [reference.answer(samples, prompt, NUM_TOKENS, count) for count in (50, 100, 100)]
        assert [answers[str(number)] for number in range(3)] == expected
        assert expected[0] != expected[1]
        assert speech.stats.num_queries == 3
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_windows_of_a_server_survive_its_engine_core(folder: Path, answers: Any, is_killed: bool) -> None:
    args = EngineArgs(str(folder), dtype="float32", skip_tokenizer_init=True, max_engine_restarts=1)
    engine = AsyncLLM.from_engine_args(args, multiprocess=is_killed)
    try:
        await engine.wait_until_ready()
        speech = engine.speech
        assert speech is not None
        windows = [await speech.open(sound(seed)) for seed in range(3)]
        asked = [speech.prompt(windows[0], language="de", task="translate"),
                 speech.prompt(windows[1], language="en", timestamps=False)]  # fmt: skip
        streams = [
            await engine.submit(
                GenerationRequest(f"{index}", prompt, GivenSampling({"temperature": 0, "max_tokens": 20}))
            )
            for index, prompt in enumerate(asked)
        ]
        found: list[list[int]] = []
        for stream in streams:
            async with stream:
                async for output in stream:
                    if is_killed and not found and len(output.outputs[0].token_ids) > 3:
                        os.kill(engine._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                        is_killed = False
                found.append(list(output.outputs[0].token_ids))
        assert found == [answers[3], answers[6]]
        with pytest.raises(InvalidRequestError) as caught:
            await engine.submit(GenerationRequest("text", [1, 2], GivenSampling({})))
        assert caught.value.code == "audio_required"
    finally:
        await engine.shutdown()


def test_a_window_is_encoded_once_for_all_that_is_asked_of_it(folder: Path, answers: Any) -> None:
    encoded: list[int] = []

    class Listener:
        def on_scheduled(self, scheduled: SchedulerOutput) -> None:
            encoded.extend(work.media_id for work in scheduled.encoder_work if not work.first_layer)

    with engine(folder, event_hooks=[Listener()]) as one:
        many = SamplingParams(temperature=1.0, n=3, max_tokens=NUM_TOKENS, seed=1)
        asked = [speech_prompt(sound(1), ids) for ids in (TIMED, PLAIN, [START])]
        one.generate(asked, [many, GREEDY, GREEDY], use_tqdm=False)
        assert tokens(one.generate(asked[0], GREEDY, use_tqdm=False)) == [answers[1]]
    assert len(encoded) == 1


def test_a_language_that_is_not_given_is_the_most_likely_one(llm: LLM, reference: SpeechReference) -> None:
    for seed in range(3):
        first = reference.logits(sound(seed), [START])[-1]
        language = max((ENGLISH, GERMAN), key=lambda token: float(first[token]))
        expected = [language, TRANSCRIBE, *reference.answer(sound(seed), [START, language, TRANSCRIBE], NUM_TOKENS - 2)]
        assert tokens(llm.generate(speech_prompt(sound(seed), [START]), GREEDY, use_tqdm=False)) == [expected]


def test_one_step_tells_languages_and_silence(llm: LLM, reference: SpeechReference) -> None:
    speech = llm.llm_engine.input_processor.media.speech
    assert speech is not None
    asked = speech_prompt(sound(1), [START])
    (output,) = llm.generate(asked, SamplingParams(**speech.detection_sampling), use_tqdm=False)
    found = speech.read_detection(output.outputs[0])
    expected = reference.logits(sound(1), [START])[-1].softmax(-1)
    assert found.no_speech_prob == pytest.approx(float(expected[speech.tokens.no_speech]), rel=1e-4)
    total = float(expected[ENGLISH] + expected[GERMAN])
    assert found.languages["en"] == pytest.approx(float(expected[ENGLISH]) / total, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_tokens_are_aligned_as_those_of_transformers(folder: Path, reference: SpeechReference, num_ranks: int) -> None:
    """With two ranks each has one of the heads that follow the sound."""
    params = PoolingParams(task=PoolingTask.ALIGNMENT)
    with engine(folder, tensor_parallel_size=num_ranks) as one:
        for token_ids in ([*TIMED, 20, 40, 7], LONG):
            (output,) = one.encode(speech_prompt(sound(1), token_ids), params, use_tqdm=False)
            found = np.array(output.outputs.tolist()).reshape(len(token_ids), 2, NUM_STATES)
            assert np.abs(found - reference.alignment(sound(1), token_ids)).max() < 1e-5


@pytest.mark.full
def test_stages_refuse_to_align_before_a_window_is_encoded(folder: Path) -> None:
    params = PoolingParams(task=PoolingTask.ALIGNMENT)
    with engine(folder, pipeline_parallel_size=2) as one:
        with pytest.raises(InvalidRequestError) as caught:
            one.encode(speech_prompt(sound(1), TIMED), params, use_tqdm=False)
        assert caught.value.code == "unsupported_value"


def test_the_forms_of_a_prompt_and_of_sound_are_alike(llm: LLM, answers: Any) -> None:
    samples = sound(1)
    data = {"audio": (samples, 16_000)}
    forms = [
        {"encoder_prompt": {"prompt": "", "multi_modal_data": data}, "decoder_prompt": {"prompt_token_ids": TIMED}},
        {"encoder_prompt": {"multi_modal_data": {"audio": [samples]}}, "decoder_prompt": TIMED},
        {"prompt_token_ids": TIMED, "multi_modal_data": {"audio": samples.astype(np.float64)}},
    ]
    assert tokens(llm.generate(forms, GREEDY, use_tqdm=False)) == [answers[1]] * 3


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"prompt_token_ids": TIMED}, "audio_required"),
        (TIMED, "audio_required"),
        (speech_prompt(sound(0, WINDOW + 1), TIMED), "audio_too_long"),
        (speech_prompt(np.full(99, np.nan), TIMED), "invalid_audio"),
        ({"prompt_token_ids": TIMED, "multi_modal_data": {"audio": (sound(0), 8000)}}, "audio_too_long"),
        ({"prompt_token_ids": TIMED, "multi_modal_data": {"audio": (sound(0), 7)}}, "invalid_audio"),
        ({"prompt_token_ids": TIMED, "multi_modal_data": {"audio": (sound(0), 16_000.5)}}, "invalid_type"),
        ({"prompt_token_ids": TIMED, "multi_modal_data": {"image": b"x"}}, "invalid_type"),
        ({**speech_prompt(sound(0), TIMED), "cache_salt": "x"}, "unsupported_parameter"),
    ],
)
def test_what_is_no_prompt_with_sound_is_refused_by_name(llm: LLM, asked: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(asked, GREEDY, use_tqdm=False)
    assert caught.value.code == code


def test_sound_of_another_rate_is_converted_as_a_file_is(llm: LLM) -> None:
    given = sound(3, 44_100)
    resampler = Resampler(44_100, 16_000)
    converted = np.concatenate([resampler.feed(given), resampler.finish()])
    asked = [{"prompt_token_ids": TIMED, "multi_modal_data": {"audio": pair}}
             for pair in ((given, 44_100), (converted, 16_000), (given, 16_000.0 * 44_100 / 16_000))]  # fmt: skip
    first, *others = tokens(llm.generate(asked, GREEDY, use_tqdm=False))
    assert others == [first, first]


def test_a_model_that_transcribes_is_not_served_without_sound(folder: Path) -> None:
    for options in ({"language_model_only": True}, {"limit_mm_per_prompt": {"audio": 0}}):
        with pytest.raises(ModelConfigError, match="sound"):
            engine(folder, **options)


def test_float16_weights_are_computed_in_bfloat16(folder: Path) -> None:
    with engine(folder, dtype="bfloat16") as one:
        (answer,) = tokens(one.generate(speech_prompt(sound(0), PLAIN), GREEDY, use_tqdm=False))
        assert answer
        assert START not in answer
        assert END not in answer[:-1]
