"""The asynchronous front end over an engine core that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import input_processor
from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.outputs.stream import GenerationStream
from llmstack_llm.requests import ChatPrompt, GenerationRequest
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import (
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    InvalidRequestError,
    PoolingParams,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    ServerOverloadedError,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m")


@pytest.fixture
async def client() -> FakeEngineCoreClient:
    return FakeEngineCoreClient()


@pytest.fixture
async def llm(folder: Path, client: FakeEngineCoreClient) -> AsyncIterator[AsyncLLM]:
    made = make(folder, client)
    yield made
    await made.shutdown()


def make(folder: Path, client: FakeEngineCoreClient, **options: Any) -> AsyncLLM:
    return AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder), **options)


async def first_request(client: FakeEngineCoreClient) -> None:
    """Waits until the engine core has been sent something."""
    for _ in range(10_000):
        if client.added:
            return
        await asyncio.sleep(0)
    pytest.fail("nothing was sent")


async def collect(llm: AsyncLLM, prompt: Any, request_id: str, **fields: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, SamplingParams(**fields), request_id)]


async def test_a_request_streams_its_echo(llm: AsyncLLM):
    outputs = await collect(llm, "Hello", "r", max_tokens=7)
    assert outputs[-1].outputs[0].text == "HelloHe"
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 8))


async def test_many_callers_each_get_their_own(llm: AsyncLLM):
    texts = [f"prompt {index} " for index in range(20)]
    results = await asyncio.gather(
        *(
            collect(llm, text, str(index), max_tokens=9, output_kind=RequestOutputKind.DELTA)
            for index, text in enumerate(texts)
        )
    )
    for text, outputs in zip(texts, results, strict=True):
        assert "".join(output.outputs[0].text for output in outputs) == text[:9]
    assert llm.num_requests_in_flight == 0


async def test_several_completions_come_in_one_stream(llm: AsyncLLM, client: FakeEngineCoreClient):
    outputs = await collect(llm, "ab", "r", n=3, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [one.text for one in outputs[-1].outputs] == ["abab"] * 3
    assert len(outputs) == 1
    assert [request.request_id for request in client.added] == ["0_r", "1_r", "2_r"]


async def test_a_request_is_registered_before_the_engine_receives_it(llm: AsyncLLM, client: FakeEngineCoreClient):
    known = []
    original = client.add_request

    async def add_request(request: EngineCoreRequest) -> None:
        known.append(request.request_id in llm.output_processor.request_id_to_completion)
        await original(request)

    client.add_request = add_request  # type: ignore[method-assign]
    await collect(llm, "ab", "r", n=2, max_tokens=2)
    assert known == [True, True]


async def test_leaving_the_iteration_aborts_every_completion(llm: AsyncLLM, client: FakeEngineCoreClient):
    stream = llm.generate("ab", SamplingParams(n=2, max_tokens=100), "r")
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)
    assert client.aborted_request_ids == ["0_r", "1_r"]
    assert llm.num_requests_in_flight == 0
    assert not client.engine.request_id_to_state


async def test_cancelling_the_caller_aborts_the_request(llm: AsyncLLM, client: FakeEngineCoreClient):
    client.step_delay_s = 0.01
    task = asyncio.create_task(collect(llm, "ab", "r", max_tokens=100))
    await first_request(client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert client.aborted_request_ids == ["r"]
    assert llm.num_requests_in_flight == 0


async def test_cancelling_while_requests_are_being_sent_aborts_those_sent(llm: AsyncLLM, client: FakeEngineCoreClient):
    original = client.add_request

    async def add_request(request: EngineCoreRequest) -> None:
        if request.request_id == "1_r":
            await asyncio.sleep(60)
        await original(request)

    client.add_request = add_request  # type: ignore[method-assign]
    task = asyncio.create_task(collect(llm, "ab", "r", n=2, max_tokens=100))
    await first_request(client)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert client.aborted_request_ids == ["0_r", "1_r"]
    assert llm.num_requests_in_flight == 0


async def test_an_abort_from_outside_ends_the_stream(llm: AsyncLLM, client: FakeEngineCoreClient):
    outputs = []
    async for output in llm.generate("ab", SamplingParams(max_tokens=100), "r"):
        outputs.append(output)
        if len(outputs) == 1:
            await llm.abort("r")
            await llm.abort(["unknown"])
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert client.aborted_request_ids == ["r"]


async def test_a_second_request_under_the_same_id_is_refused_and_the_first_goes_on(llm: AsyncLLM):
    stream = llm.generate("ab", SamplingParams(max_tokens=3), "r")
    await anext(stream)
    with pytest.raises(InvalidRequestError):
        await collect(llm, "cd", "r")
    assert [output async for output in stream][-1].outputs[0].text == "aba"


async def test_a_stop_string_is_aborted_in_the_engine(llm: AsyncLLM, client: FakeEngineCoreClient):
    outputs = await collect(llm, "abc", "r", max_tokens=100, stop=["ca"])
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == ("ab", "ca")
    await asyncio.sleep(0)
    assert client.aborted_request_ids == ["r"]


async def test_the_death_of_the_engine_reaches_all_waiting_streams_and_later_callers(
    llm: AsyncLLM, client: FakeEngineCoreClient
):
    client.step_delay_s = 0.005
    tasks = [asyncio.create_task(collect(llm, "ab", str(index), max_tokens=100)) for index in range(3)]
    await asyncio.sleep(0.02)
    client.die()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert llm.state == "dead"
    with pytest.raises(EngineDeadError):
        await collect(llm, "ab", "late")
    with pytest.raises(EngineDeadError):
        await llm.check_health()


async def test_one_failing_request_does_not_end_the_loop(llm: AsyncLLM, client: FakeEngineCoreClient):
    client.engine.failing_request_ids.add("bad")
    good = asyncio.create_task(collect(llm, "ab", "good", max_tokens=5))
    with pytest.raises(RequestFailedError):
        await collect(llm, "ab", "bad")
    assert (await good)[-1].outputs[0].text == "ababa"


async def test_a_bug_in_the_loop_ends_waiting_streams_rather_than_leaving_them(
    llm: AsyncLLM, client: FakeEngineCoreClient
):
    async def get_outputs() -> None:
        raise KeyError("a bug")

    client.get_outputs = get_outputs  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDeadError):
        await collect(llm, "ab", "r")


async def test_the_states_go_from_starting_to_ready(folder: Path):
    client = FakeEngineCoreClient(is_ready=False)
    llm = make(folder, client)
    assert (llm.state, llm.is_ready) == ("starting", False)
    early = asyncio.create_task(collect(llm, "ab", "r", max_tokens=2))
    await asyncio.sleep(0.01)
    assert not client.added
    client.become_ready()
    await asyncio.gather(llm.wait_until_ready(), llm.wait_until_ready())
    assert (await early)[-1].outputs[0].text == "ab"
    assert (llm.state, llm.ready) == ("ready", client.ready)
    await llm.shutdown()
    await llm.shutdown()
    assert (llm.state, client.is_shut_down) == ("dead", True)


async def test_a_bounded_front_end_refuses_what_is_too_much(folder: Path, client: FakeEngineCoreClient):
    llm = make(folder, client, max_num_queued_reqs=2)
    first = llm.generate("ab", SamplingParams(n=2, max_tokens=50), "a")
    await anext(first)
    with pytest.raises(ServerOverloadedError):
        await collect(llm, "ab", "b")
    await first.aclose()
    assert (await collect(llm, "ab", "c", max_tokens=1))[-1].finished
    await llm.shutdown()


async def test_prompt_tokens_that_wait_may_be_bounded(folder: Path, client: FakeEngineCoreClient):
    client.step_delay_s = 0.05
    llm = make(folder, client, max_num_queued_tokens=8)
    first = asyncio.create_task(collect(llm, "longer than eight", "a", max_tokens=1))
    await first_request(client)
    with pytest.raises(ServerOverloadedError) as caught:
        await collect(llm, "ab", "b")
    assert caught.value.reason == "max_num_queued_tokens"
    assert (await first)[-1].finished
    assert (await collect(llm, "ab", "c", max_tokens=1))[-1].finished
    await llm.shutdown()


async def fill(llm: AsyncLLM, tenant: str, prompt: str = "ab") -> int:
    """Submits requests until one is refused; how many were accepted."""
    for number in range(20):
        sampling = GivenSampling({"max_tokens": 50})
        request = GenerationRequest(f"{tenant}-{number}", prompt, sampling, tenant=tenant)
        try:
            await llm.submit(request)
        except ServerOverloadedError:
            return number
    return 20


@pytest.mark.parametrize(
    ("limits", "prompt"), [({"max_num_queued_reqs": 10}, "ab"), ({"max_num_queued_tokens": 100}, "ten tokens")]
)
async def test_one_tenant_cannot_fill_the_queue_of_all(
    folder: Path, client: FakeEngineCoreClient, limits: dict[str, int], prompt: str
):
    client.step_delay_s = 60.0
    llm = make(folder, client, **limits)
    assert await fill(llm, "heavy", prompt) == 8
    assert await fill(llm, "light", prompt) == 2
    await llm.shutdown()


async def test_without_tenants_the_queue_may_be_filled(folder: Path, client: FakeEngineCoreClient):
    client.step_delay_s = 60.0
    llm = make(folder, client, max_num_queued_reqs=10)
    assert await fill(llm, "") == 10
    await llm.shutdown()


async def test_prompts_to_pool_are_waiting_tokens_too(folder: Path, client: FakeEngineCoreClient):
    client.step_delay_s = 60.0
    llm = make(folder, client, max_num_queued_tokens=8)
    first = asyncio.create_task(anext(llm.encode("longer than eight", None, "a")))
    await first_request(client)
    with pytest.raises(ServerOverloadedError):
        await collect(llm, "ab", "b")
    with pytest.raises(ServerOverloadedError):
        await anext(llm.encode("ab", None, "c"))
    # One of several prompts that were checked together.
    second = asyncio.create_task(anext(llm.encode("ab", None, "d", has_room=True)))
    for _ in range(10_000):
        if len(client.added) == 2:
            break
        await asyncio.sleep(0)
    assert len(client.added) == 2
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await llm.shutdown()


async def test_the_engine_cores_limits_are_those_of_admission(folder: Path):
    client = FakeEngineCoreClient(EngineReady(2, 16, 64, 257, "float32", "cpu"))
    llm = make(folder, client)
    with pytest.raises(InvalidRequestError) as caught:
        await collect(llm, "x" * 40, "r")
    assert caught.value.code == "context_length_exceeded"
    await llm.shutdown()


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


async def collected(stream: GenerationStream) -> list[RequestOutput]:
    async with stream:
        return [output async for output in stream]


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
    monkeypatch.setattr("llmstack_llm.input_processor.SamplingParams", Counted)
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
            pass

        def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
            raise ValueError("broken")

    class Keeper(Broken):
        def __init__(self) -> None:
            self.steps: list[IterationStats] = []

        def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
            self.steps.append(iteration_stats)

    keeper = Keeper()
    llm = make(folder, client, stat_loggers=[Broken(), keeper])
    await collect(llm, "ab", "r", max_tokens=4)
    await llm.shutdown()
    assert sum(step.num_generation_tokens for step in keeper.steps) == 4
    assert sum(len(step.finished_requests) for step in keeper.steps) == 1


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
