"""Vectors through the front end: what is asked for, what the model's folder says, and the result."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import LLM, AsyncLLM, EmbeddingRequestOutput, LLMEngine, PoolingRequestOutput, SamplingParams
from llmstack_llm.admission.limits import AdmissionLimits, limits_of
from llmstack_llm.admission.sampling import check_sampling
from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.model.config import load_model_config
from llmstack_llm.model.pooling_config import PoolingConfig
from llmstack_llm.pooling.admission import MAX_NUMBERS_PER_PROMPT, admit_pooling, admit_pooling_params
from llmstack_llm.pooling.outputs import PoolingOutput
from llmstack_llm.testing import FakeEngineCoreClient, fake_vector, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    PoolingParams,
    PoolingTask,
    PoolingType,
    RequestFailedError,
    ServerOverloadedError,
)

ECHO: dict[str, Any] = {"runner": "llmstack_engine_core.testing:EchoModelRunner", "num_kv_blocks": 64}
LIMITS = AdmissionLimits(16, 257, embedding_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m")


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ECHO) as made:
        yield made


def test_vectors_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["abc", [7, 9, 8], {"prompt": "a" * 100}]
    outputs = llm.encode(prompts, use_tqdm=False)
    assert all(isinstance(output, PoolingRequestOutput) and output.finished for output in outputs)
    assert [output.prompt for output in outputs] == ["abc", None, "a" * 100]
    for output in outputs:
        assert output.outputs.to_bytes() == fake_vector(output.prompt_token_ids)
    assert outputs[1].outputs.data.tolist() == [3.0, 7.0, 9.0, 8.0]
    assert llm.encode([], use_tqdm=False) == []


def test_an_embedding_is_a_list_of_numbers(llm: LLM) -> None:
    (output,) = llm.embed([[7, 9, 8]], PoolingParams(dimensions=2), use_tqdm=False)
    assert isinstance(output, EmbeddingRequestOutput)
    assert output.outputs.embedding == [3.0, 7.0]
    assert output.outputs.hidden_size == 2


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [PoolingParams(dimensions=1), PoolingParams(dimensions=3)]
    outputs = llm.embed(["ab", "cd"], params, use_tqdm=False)
    assert [output.outputs.hidden_size for output in outputs] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 pooling parameters for 1 prompts"):
        llm.embed(["ab"], params, use_tqdm=False)


def test_a_prompt_may_fill_the_context_and_no_more(llm: LLM) -> None:
    assert len(llm.encode(["a" * 128], use_tqdm=False)) == 1
    with pytest.raises(InvalidRequestError) as caught:
        llm.encode(["good", "a" * 129], use_tqdm=False)
    assert (caught.value.param, caught.value.code) == ("prompts[1]", "context_length_exceeded")
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_prompt_that_fails_in_the_engine_is_named(folder: Path) -> None:
    with LLM(f"{folder}", **ECHO) as llm:
        original = llm.llm_engine.client.get_outputs

        def failing() -> EngineCoreOutputs:
            outputs = original()
            without_vector = EngineCoreOutput("1", [], finish_reason=FinishReason.STOP)
            rows = [without_vector if output.request_id == "1" else output for output in outputs.outputs]
            return outputs._replace(outputs=rows)

        llm.llm_engine.client.get_outputs = failing  # type: ignore[method-assign]
        with pytest.raises(RequestFailedError, match=r"prompts\[1\] gave no numbers: error"):
            llm.encode(["a", "b", "c"], use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()


def test_completions_and_vectors_share_the_steps_of_an_engine(folder: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), **ECHO))
    engine.add_request("c", "abc", SamplingParams(max_tokens=5))
    engine.add_pooling_request("p", "abc", PoolingParams())
    engine.add_pooling_request("aborted", "abc", PoolingParams())
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("p", "abc", SamplingParams())
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_pooling_request("c", "abc", PoolingParams())
    engine.abort_request("aborted")
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert outputs["c"].outputs[0].text == "abcab"
    assert outputs["p"].outputs.data.tolist() == [3.0, 64.0, 66.0, 66.0]
    assert (outputs["aborted"].finish_reason, outputs["aborted"].outputs.data.tolist()) == ("abort", [])
    engine.shutdown()


def test_a_model_that_only_computes_embeddings_completes_nothing(folder: Path) -> None:
    runner_options = {"model": f"{folder}"}
    with LLM(**runner_options, **ECHO) as llm:
        limits = replace(llm.llm_engine.input_processor.limits, is_generative=False)
        llm.llm_engine.input_processor.limits = limits
        with pytest.raises(InvalidRequestError, match="The model does not support Completions API") as caught:
            llm.generate("abc", use_tqdm=False)
        assert caught.value.param == "model"
        assert len(llm.embed("abc", use_tqdm=False)) == 1


@pytest.mark.parametrize("runner", ["auto", "generate", "pooling"])
def test_what_vllm_calls_a_runner_is_ours_by_default(folder: Path, runner: str) -> None:
    assert EngineArgs(str(folder), runner=runner).create_engine_config()[1].runner == "default"


# --- the asynchronous front end -----------------------------------------------------------------------------------


@pytest.fixture
async def client() -> FakeEngineCoreClient:
    return FakeEngineCoreClient()


@pytest.fixture
async def engine(folder: Path, client: FakeEngineCoreClient) -> AsyncIterator[AsyncLLM]:
    made = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder), max_num_queued_reqs=3)
    yield made
    await made.shutdown()


async def encode(engine: AsyncLLM, prompt: Any, request_id: str, **fields: Any) -> PoolingRequestOutput:
    (output,) = [output async for output in engine.encode(prompt, PoolingParams(**fields), request_id)]
    return output


async def until_added(client: FakeEngineCoreClient, num_requests: int) -> None:
    """Waits until the engine core has been sent that many."""
    for _ in range(10_000):
        if len(client.added) >= num_requests:
            return
        await asyncio.sleep(0)
    pytest.fail("nothing was sent")


async def test_callers_each_get_their_own_beside_a_stream(engine: AsyncLLM) -> None:
    stream = engine.generate("abc", SamplingParams(max_tokens=20), "c")
    await anext(stream)
    outputs = await asyncio.gather(encode(engine, "abc", "p1"), encode(engine, [5, 4], "p2", dimensions=1))
    assert [output.outputs.data.tolist() for output in outputs] == [[3.0, 64.0, 66.0, 66.0], [2.0]]
    assert (engine.num_requests_in_flight, engine.output_processor.num_unfinished_completions) == (1, 1)
    await stream.aclose()


async def test_a_cancelled_caller_aborts_the_request(engine: AsyncLLM, client: FakeEngineCoreClient) -> None:
    client.step_delay_s = 60.0
    task = asyncio.create_task(encode(engine, "abc", "p"))
    await until_added(client, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert client.aborted_request_ids == ["p"]
    assert engine.num_requests_in_flight == 0


async def test_an_aborted_request_ends_without_a_vector(engine: AsyncLLM, client: FakeEngineCoreClient) -> None:
    client.step_delay_s = 60.0
    task = asyncio.create_task(encode(engine, "abc", "p"))
    await until_added(client, 1)
    await engine.abort("p")
    assert (await task).finish_reason == "abort"


async def test_what_fails_in_the_engine_is_raised(engine: AsyncLLM, client: FakeEngineCoreClient) -> None:
    client.engine.failing_request_ids.add("p")
    with pytest.raises(RequestFailedError, match="made to fail"):
        await encode(engine, "abc", "p")
    with pytest.raises(InvalidRequestError):
        await encode(engine, "abc", "q", dimensions=5)


async def test_beyond_the_limit_requests_are_refused(engine: AsyncLLM, client: FakeEngineCoreClient) -> None:
    client.step_delay_s = 60.0
    tasks = [asyncio.create_task(encode(engine, "abc", f"p{index}")) for index in range(3)]
    await until_added(client, 3)
    with pytest.raises(ServerOverloadedError):
        await encode(engine, "abc", "one more")
    client.die()
    await engine.shutdown()
    assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {EngineDeadError}


# --- what may be asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "param", "code"),
    [
        (PoolingParams(dimensions=0), "dimensions", "integer_below_min_value"),
        (PoolingParams(dimensions=9), "dimensions", "integer_above_max_value"),
        (PoolingParams(dimensions=True), "dimensions", "invalid_type"),
        (PoolingParams(dimensions=2.0), "dimensions", "invalid_type"),  # type: ignore[arg-type]
        (PoolingParams(normalize=1), "normalize", "invalid_type"),  # type: ignore[arg-type]
        (PoolingParams("step"), "pooling_type", "invalid_value"),  # type: ignore[arg-type]
        (PoolingParams(task="mystery"), "task", "invalid_value"),  # type: ignore[arg-type]
        (PoolingParams(use_activation=1), "use_activation", "invalid_type"),  # type: ignore[arg-type]
        (PoolingParams("mean", task="token_embed"), "pooling_type", "invalid_value"),  # type: ignore[arg-type]
    ],
)
def test_values_out_of_range_are_refused_by_name(params: PoolingParams, param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit_pooling_params(params, LIMITS, PoolingConfig())
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("field", [{"dimensions": 2}, {"normalize": True}, {"pooling_type": PoolingType.MEAN}])
def test_labels_have_nothing_of_a_vector(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="labels are asked for") as caught:
        admit_pooling_params(PoolingParams(**field), replace(LIMITS, num_labels=2), PoolingConfig())
    assert caught.value.param == next(iter(field))


@pytest.mark.parametrize(
    ("num_labels", "asked", "expected"),
    [
        (0, None, PoolingTask.EMBED),
        (2, None, PoolingTask.CLASSIFY),
        (2, "embed", PoolingTask.EMBED),
        (2, "token_embed", PoolingTask.TOKEN_EMBED),
        (1, "score", PoolingTask.CLASSIFY),
        (2, "token_classify", PoolingTask.TOKEN_CLASSIFY),
        (0, "token_classify", "Classification API: it has no labels"),
        (0, "classify", "Classification API: it has no labels"),
        (0, "score", "Score API: a cross encoder has 1 label, and it has 0"),
        (3, "score", "Score API: a cross encoder has 1 label, and it has 3"),
    ],
)
def test_a_task_is_what_the_model_is_for_or_refused(num_labels: int, asked: Any, expected: Any) -> None:
    limits = replace(LIMITS, num_labels=num_labels)
    if isinstance(expected, PoolingTask):
        assert admit_pooling_params(PoolingParams(task=asked), limits, PoolingConfig()).task is expected
        return
    with pytest.raises(InvalidRequestError, match=expected) as caught:
        admit_pooling_params(PoolingParams(task=asked), limits, PoolingConfig())
    assert caught.value.param == "model"


def test_a_model_that_labels_tokens_labels_no_prompt() -> None:
    limits = replace(LIMITS, num_labels=3, labels_tokens=True)
    assert admit_pooling_params(PoolingParams(), limits, PoolingConfig()).task is PoolingTask.TOKEN_CLASSIFY
    for asked in ("classify", "score"):
        with pytest.raises(InvalidRequestError, match="it labels tokens"):
            admit_pooling_params(PoolingParams(task=asked), limits, PoolingConfig())  # type: ignore[arg-type]


def test_a_model_of_token_vectors_gives_no_other_ones() -> None:
    limits = replace(LIMITS, gives_token_vectors=True)
    assert admit_pooling_params(PoolingParams(), limits, PoolingConfig()).task is PoolingTask.TOKEN_EMBED
    with pytest.raises(InvalidRequestError, match="the task is token_embed"):
        admit_pooling_params(PoolingParams(task=PoolingTask.EMBED), limits, PoolingConfig())


def test_vectors_are_cut_to_the_sizes_that_the_configuration_lists() -> None:
    limits = replace(LIMITS, matryoshka_dimensions=(2, 4))
    assert admit_pooling_params(PoolingParams(dimensions=4), limits, PoolingConfig()).dimensions == 4
    with pytest.raises(InvalidRequestError, match="this model was trained for 2, 4"):
        admit_pooling_params(PoolingParams(dimensions=3), limits, PoolingConfig())


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}, (False, PoolingType.MEAN)),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "cls"}, (False, PoolingType.CLS)),
        ("BertForTokenClassification", {}, (True, PoolingType.CLS)),
    ],
)
def test_what_a_head_reads_is_in_the_configuration(
    tmp_path: Path, architecture: str, fields: dict[str, Any], expected: Any
) -> None:
    folder = write_model_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    limits = replace(limits_of(load_model_config(str(folder))), embedding_size=8, num_labels=3, is_causal=False)
    assert limits.labels_tokens is expected[0]
    if not limits.labels_tokens:
        assert admit_pooling_params(PoolingParams(), limits, PoolingConfig()).pooling_type is expected[1]


def test_a_head_reads_the_state_it_was_trained_on_whatever_the_folder_says_of_vectors() -> None:
    config = PoolingConfig(PoolingType.MEAN, False)
    for is_causal, kind in ((True, PoolingType.LAST), (False, PoolingType.CLS)):
        limits = replace(LIMITS, num_labels=2, is_causal=is_causal)
        assert admit_pooling_params(PoolingParams(), limits, config).pooling_type is kind


def test_the_activation_of_a_vector_is_its_length() -> None:
    for asked in (True, False):
        params = admit_pooling_params(PoolingParams(use_activation=asked), LIMITS, PoolingConfig())
        assert params.normalize is asked


def test_vectors_of_all_tokens_are_bounded() -> None:
    limits = AdmissionLimits(100_000, 257, embedding_size=MAX_NUMBERS_PER_PROMPT // 1000)
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED)
    admit_pooling(None, [1] * 1000, params, limits, PoolingConfig())
    with pytest.raises(InvalidRequestError, match="at most 1000 tokens"):
        admit_pooling(None, [1] * 1001, params, limits, PoolingConfig())


def test_a_second_text_begins_inside_the_prompt_of_a_model_that_knows_of_it() -> None:
    for limits, start in ((LIMITS, 1), (replace(LIMITS, num_token_types=2), 4)):
        with pytest.raises(InvalidRequestError) as caught:
            admit_pooling(None, [1, 2, 3], PoolingParams(second_text_start=start), limits, PoolingConfig())
        assert caught.value.param == "second_text_start"


def test_prompts_are_checked_as_those_of_completions_are() -> None:
    for token_ids, param, code in (([], "input", "empty_array"), ([1, 257], "input[1]", "invalid_value")):
        with pytest.raises(InvalidRequestError) as caught:
            admit_pooling(None, token_ids, PoolingParams(), LIMITS, PoolingConfig(), param="input")
        assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("is_causal", "config", "asked", "expected"),
    [
        (True, PoolingConfig(), PoolingParams(), (PoolingType.LAST, True)),
        (False, PoolingConfig(), PoolingParams(), (PoolingType.CLS, True)),
        (True, PoolingConfig(PoolingType.MEAN, False), PoolingParams(), (PoolingType.MEAN, False)),
        (False, PoolingConfig(PoolingType.MEAN, False), PoolingParams("cls", True), (PoolingType.CLS, True)),
    ],
)
def test_what_is_not_asked_for_is_as_the_model_was_trained(
    is_causal: bool, config: PoolingConfig, asked: PoolingParams, expected: tuple[PoolingType, bool]
) -> None:
    params = admit_pooling_params(asked, replace(LIMITS, is_causal=is_causal), config)
    assert (params.pooling_type, params.normalize) == expected
    assert type(params.pooling_type) is PoolingType


def test_a_model_without_vectors_and_one_without_completions_say_so() -> None:
    with pytest.raises(InvalidRequestError, match="computes no embeddings"):
        admit_pooling_params(PoolingParams(), replace(LIMITS, embedding_size=0), PoolingConfig())
    with pytest.raises(InvalidRequestError, match="only computes embeddings"):
        check_sampling({}, replace(LIMITS, is_generative=False))


def test_a_vector_keeps_its_bytes() -> None:
    vector = struct.pack("<3f", 1.5, -2.0, 0.1)
    assert PoolingOutput.from_bytes(vector).to_bytes() == vector


def test_vectors_of_all_tokens_are_a_list_each() -> None:
    numbers = struct.pack("<6f", *range(6))
    assert PoolingOutput.from_bytes(numbers, 3).tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert PoolingOutput.from_bytes(numbers).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


# --- what the folder says -----------------------------------------------------------------------------------------
