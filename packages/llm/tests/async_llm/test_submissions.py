"""Prompts that are submitted apart or together, conversations, observers and loggers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llm_helpers.engines import collect, collected, make

from llmstack_llm import input_processor
from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.requests import AdmittedRequest, ChatPrompt, GenerationRequest
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_types import (
    EngineReady,
    InvalidRequestError,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
)


async def test_fields_are_checked_first_and_the_prompt_is_submitted_later(llm: AsyncLLM):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"temperature": 0})
    async with await llm.submit(GenerationRequest("r", "Hello", sampling, default_max_tokens=5)) as stream:
        outputs = [output async for output in stream]
    assert stream.prompts[0].sampling_params.max_tokens == 5
    assert outputs[-1].outputs[0].text == "Hello"
    with pytest.raises(InvalidRequestError) as caught:
        llm.check_sampling({"temperature": 3}, {"temperature": "warmth"})
    assert caught.value.param == "warmth"


async def test_prompts_that_are_submitted_together_share_a_stream(llm: AsyncLLM):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"max_tokens": 3, "output_kind": RequestOutputKind.DELTA})
    texts = {0: "", 1: ""}
    async with await llm.submit(*(GenerationRequest(f"r-{i}", "ab" * (i + 1), sampling) for i in range(2))) as stream:
        async for output in stream:
            texts[output.prompt_index] += output.outputs[0].text
    assert texts == {0: "aba", 1: "aba"}
    assert llm.num_requests_in_flight == 0


async def test_of_prompts_that_are_submitted_together_all_are_refused_or_none(
    llm: AsyncLLM, client: FakeEngineCoreClient
):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({})
    with pytest.raises(InvalidRequestError) as caught:
        await llm.submit(
            GenerationRequest("a", "ab", sampling, "prompt[0]"), GenerationRequest("b", [999], sampling, "prompt[1]")
        )
    assert caught.value.param == "prompt[1][0]"
    with pytest.raises(InvalidRequestError):
        await llm.submit(GenerationRequest("a", "ab", sampling), GenerationRequest("a", "ab", sampling))
    assert llm.num_requests_in_flight == 0


@pytest.mark.parametrize(("field", "values"), [
    ("request_id", ["", "x" * 501, 5, None, "\ud800"]), ("priority", [2**31, 1.5, None, True]),
    ("cache_salt", ["x" * 1025, 5, None, "\ud800"]), ("tenant", ["x" * 129, None]),
])  # fmt: skip
async def test_what_the_engine_core_would_refuse_never_gets_there(
    field: str, values: list[Any], llm: AsyncLLM, client: FakeEngineCoreClient
):
    for value in values:
        fields = {"request_id": "r", field: value}
        for outputs in (
            llm.generate("ab", SamplingParams(n=2, temperature=1.0), **fields),
            llm.encode("ab", PoolingParams(), **fields),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await anext(outputs)
            assert caught.value.param == field
    assert llm.num_requests_in_flight == 0
    assert not client.added


async def test_of_prompts_with_a_bad_id_among_them_none_is_submitted(llm: AsyncLLM, client: FakeEngineCoreClient):
    sampling = llm.check_sampling({})
    with pytest.raises(InvalidRequestError):
        await llm.submit(GenerationRequest("a", "ab", sampling), GenerationRequest("", "ab", sampling))
    assert llm.num_requests_in_flight == 0
    assert not client.added


async def test_parameters_of_another_type_are_refused(llm: AsyncLLM):
    with pytest.raises(InvalidRequestError) as caught:
        await anext(llm.generate("ab", {"temperature": 0}, "r"))  # type: ignore[arg-type]
    assert caught.value.param == "sampling_params"
    with pytest.raises(InvalidRequestError) as caught:
        await anext(llm.encode("ab", {"task": "embed"}, "r"))  # type: ignore[arg-type]
    assert caught.value.param == "pooling_params"


async def test_requests_with_sampling_fields_of_their_own_are_not_submitted_together(llm: AsyncLLM):
    requests = [GenerationRequest(name, "ab", GivenSampling({"max_tokens": 1})) for name in "ab"]
    with pytest.raises(ValueError, match="share their sampling fields"):
        await llm.submit(*requests)
    assert llm.num_requests_in_flight == 0


async def test_sampling_fields_are_checked_once_although_two_calls_take_them(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    await llm.wait_until_ready()
    checked: list[Any] = []
    check = input_processor.check_sampling

    def count(given: Any, *arguments: Any, **options: Any) -> Any:
        checked.append(given)
        return check(given, *arguments, **options)

    monkeypatch.setattr(input_processor, "check_sampling", count)
    given = GivenSampling({"max_tokens": 3})
    prompt = await llm.render(ChatPrompt([{"role": "user", "content": "Hello"}]), given)
    async with await llm.submit(GenerationRequest("r", prompt, prompt.sampling)) as stream:
        assert [output async for output in stream][-1].outputs[0].text == "Hel"
    assert checked == [given.values]


async def test_a_conversation_whose_tokens_are_cut_may_be_longer_than_the_context(llm: AsyncLLM):
    chat = ChatPrompt([{"role": "user", "content": "x" * 10_000}])
    with pytest.raises(InvalidRequestError):
        await llm.render(chat, GivenSampling({}))
    prompt = await llm.render(chat, GivenSampling({"truncate_prompt_tokens": 5}))
    assert len(prompt.token_ids) == 10_000


async def test_leaving_a_stream_aborts_all_its_prompts(llm: AsyncLLM):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"max_tokens": 100, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA})
    async with await llm.submit(*(GenerationRequest(f"r-{i}", "ab", sampling) for i in range(2))) as stream:
        await anext(stream)
        assert llm.num_requests_in_flight == 2
    assert llm.num_requests_in_flight == 0
    assert [output async for output in stream] == []


async def test_the_deadline_of_a_request_reaches_the_engine(llm: AsyncLLM, client: FakeEngineCoreClient):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"max_tokens": 2})
    async with await llm.submit(GenerationRequest("r", "ab", sampling, deadline_s=12.5)) as stream:
        await collected(stream)
    assert [request.deadline_s for request in client.added] == [12.5]


async def test_the_last_check_knows_the_prompt_and_learns_when_the_first_token_came(llm: AsyncLLM):
    await llm.wait_until_ready()
    seen: list[Any] = []

    def check(prompts: Sequence[AdmittedRequest], num_generated: int) -> Any:
        seen.append([(len(one.prompt_token_ids), one.sampling_params.max_tokens, num_generated) for one in prompts])
        return seen.append

    sampling = llm.check_sampling({"max_tokens": 3})
    async with await llm.submit(GenerationRequest("r", "ab", sampling, on_admitted=check)) as stream:
        await collected(stream)
    assert seen[0] == [(2, 3, 1)]
    assert len(seen) == 2
    assert seen[1] >= 0


async def test_a_request_that_fails_its_last_check_is_not_submitted(llm: AsyncLLM, client: FakeEngineCoreClient):
    def refuse(prompts: Sequence[AdmittedRequest], num_generated: int) -> None:
        raise TimeoutError("too late")

    await llm.wait_until_ready()
    with pytest.raises(TimeoutError, match="too late"):
        await llm.submit(GenerationRequest("r", "ab", llm.check_sampling({}), on_admitted=refuse))
    assert (client.added, llm.num_requests_in_flight) == ([], 0)


async def test_a_stream_ends_with_an_error_at_its_deadline(folder: Path):
    client = FakeEngineCoreClient()
    llm = make(folder, client)
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"max_tokens": 100, "ignore_eos": True})
    stream = await llm.submit(GenerationRequest("r", "ab", sampling))
    stream.fail_after(0.0, TimeoutError("late"))
    with pytest.raises(TimeoutError, match="late"):
        await collected(stream)
    assert llm.num_requests_in_flight == 0
    await llm.shutdown()


async def test_a_bad_field_is_refused_before_anything_is_tokenized(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("tokenized")

    await llm.wait_until_ready()
    monkeypatch.setattr(llm.input_processor.tokenizer, "encode", refuse)
    monkeypatch.setattr(llm.input_processor.tokenizer, "encode_plain", refuse)
    fields = {"temperature": 3, "n": 0, "stop": "", "bad_words": [""], "truncate_prompt_tokens": 0, "min_p": 2}
    for field, value in fields.items():
        with pytest.raises(InvalidRequestError) as caught:
            await collect(llm, "Hello", "r", **{field: value})
        assert caught.value.param == field


async def test_sampling_params_are_made_once_for_a_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    made: list[SamplingParams] = []

    class Counted(SamplingParams):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            made.append(self)

    await llm.wait_until_ready()
    for module in ("input_processor", "requests"):
        monkeypatch.setattr(f"llmstack_llm.{module}.SamplingParams", Counted)
    sampling = llm.check_sampling({"temperature": 0.5, "stop": ["x"], "max_tokens": 2})
    async with await llm.submit(GenerationRequest("r", "Hello", sampling)) as stream:
        assert [output async for output in stream]
    assert len(made) == 1


async def test_observers_are_called_at_submission_at_outputs_and_at_the_end(llm: AsyncLLM):
    seen: list[tuple[str, Any]] = []

    class Observer(RequestObserver):
        def on_submitted(self, request: SubmittedRequest) -> None:
            seen.append(("submitted", (request.request_id, request.prompt, request.num_completions)))

        def on_output(self, output: RequestOutput) -> None:
            seen.append(("output", output.outputs[0].text))

        def on_finished(self, request_id: str, error: Exception | None) -> None:
            seen.append(("finished", (request_id, error)))

    llm.add_observer(Observer())
    await collect(llm, "ab", "r", max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert seen == [("submitted", ("r", "ab", 1)), ("output", "ab"), ("finished", ("r", None))]
    seen.clear()
    async for _ in llm.generate("ab", SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA), "left"):
        break
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0.01)
    assert seen[-1] == ("finished", ("left", None))


@pytest.mark.parametrize("method", ["on_submitted", "on_engine_outputs", "on_output", "on_pooled", "on_finished"])
async def test_an_observer_that_fails_is_logged_and_ends_no_request(
    llm: AsyncLLM, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug of the observer")

    class Observer(RequestObserver):
        pass

    expected = await collect(llm, "abcd", "before", max_tokens=4)
    monkeypatch.setattr(Observer, method, fail)
    llm.add_observer(Observer())
    outputs = await collect(llm, "abcd", "r", max_tokens=4)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    async for _ in llm.encode("ab", PoolingParams(), "pooled"):
        pass
    assert "an observer of requests failed" in caplog.text
    assert not llm.output_processor.request_id_to_state


async def test_a_conversation_becomes_a_prompt(llm: AsyncLLM):
    prompt = await llm.render(ChatPrompt([{"role": "user", "content": "Hello"}]))
    assert prompt.text == "Hello"
    assert llm.chat_template.is_fallback
    outputs = await collect(llm, prompt, "r", max_tokens=5)
    assert outputs[-1].outputs[0].text == "Hello"


async def test_a_long_conversation_is_rendered_where_the_context_has_room(tmp_path: Path):
    llm = make(write_model_folder(tmp_path / "m", config={"n_positions": 1024}), FakeEngineCoreClient())
    long = await llm.render(ChatPrompt([{"role": "user", "content": "x" * 10_000}]))
    assert len(long.token_ids) == 10_000
    with pytest.raises(InvalidRequestError) as caught:
        await llm.render(ChatPrompt([{"role": "user", "content": "x" * 14_000}]))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    await llm.shutdown()


LONG = "x" * 10_000


@pytest.mark.parametrize(
    ("options", "num_threads"),
    [
        ({}, 0),
        ({"tools": [{"type": "function", "function": {"description": LONG}}]}, 1),
        ({"documents": [{"text": LONG}]}, 1),
        ({"documents": [{}] * 1025}, 1),
        ({"chat_template": "{{ messages[0].content }}"}, 1),
    ],
)
async def test_what_would_hold_up_the_loop_is_rendered_on_a_thread(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_threads: int
):
    calls: list[Any] = []
    to_thread = asyncio.to_thread

    async def count(function: Any, *arguments: Any) -> Any:
        calls.append(function)
        return await to_thread(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", count)
    with contextlib.suppress(InvalidRequestError):  # too many documents
        await llm.render(ChatPrompt([{"role": "user", "content": "Hello"}], **options))
    assert len(calls) == num_threads


async def test_a_stat_logger_receives_every_step_although_another_one_fails(folder: Path, client: FakeEngineCoreClient):
    class Broken:
        def log_engine_initialized(self, ready: EngineReady) -> None:
            raise ValueError("broken")

        def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
            raise ValueError("broken")

    class Keeper:
        def __init__(self) -> None:
            self.engines: list[EngineReady] = []
            self.steps: list[IterationStats] = []

        def log_engine_initialized(self, ready: EngineReady) -> None:
            self.engines.append(ready)

        def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
            self.steps.append(iteration_stats)

    keeper = Keeper()
    llm = make(folder, client, stat_loggers=[Broken(), keeper])
    await collect(llm, "ab", "r", max_tokens=4)
    await llm.shutdown()
    assert len(keeper.engines) == 1
    assert sum(step.num_generation_tokens for step in keeper.steps) == 4
    assert sum(len(step.finished_requests) for step in keeper.steps) == 1


def test_another_loop_than_that_of_the_first_call_is_refused(folder: Path):
    llm = make(folder, FakeEngineCoreClient())

    async def run(name: str) -> int:
        return len(await asyncio.wait_for(collect(llm, "ab", name, max_tokens=2), 5))

    with asyncio.Runner() as first, asyncio.Runner() as second:
        assert first.run(run("a")) > 0
        for call in (lambda: run("b"), llm.wait_until_ready, llm.shutdown):
            with pytest.raises(RuntimeError, match="event loop of its first call"):
                second.run(call())
        assert first.run(run("b")) > 0
        first.run(llm.shutdown())
        second.run(llm.shutdown())  # there is nothing left to do


def test_it_can_be_constructed_outside_of_a_loop(folder: Path):
    llm = make(folder, FakeEngineCoreClient())

    async def run() -> str:
        outputs = await collect(llm, "ab", "r", max_tokens=3)
        await llm.shutdown()
        return outputs[-1].outputs[0].text

    assert asyncio.run(run()) == "aba"


async def test_the_same_over_an_engine_core_in_a_process_of_its_own(folder: Path):
    from llmstack_llm.engine_args import EngineArgs

    args = EngineArgs(str(folder), runner="llmstack_engine_core.testing:EchoModelRunner", num_kv_blocks=32)
    llm = AsyncLLM.from_engine_args(args)
    try:
        outputs = await collect(llm, "Hello", "r", max_tokens=7)
        assert outputs[-1].outputs[0].text == "HelloHe"
        assert llm.is_ready
        assert await llm.reset_prefix_cache()
    finally:
        await llm.shutdown()
