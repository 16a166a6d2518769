"""The asynchronous front end over an engine core that echoes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from llm_helpers.engines import collect, first_request, make

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.requests import GenerationRequest
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_types import (
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    InvalidRequestError,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
    ServerOverloadedError,
)


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


async def test_what_no_queue_has_room_for_is_the_callers_mistake(folder: Path, client: FakeEngineCoreClient):
    llm = make(folder, client, max_num_queued_reqs=2)
    assert (await collect(llm, "ab", "a", n=2, max_tokens=1))[-1].finished
    with pytest.raises(InvalidRequestError) as caught:
        await collect(llm, "ab", "b", n=3)
    assert (caught.value.param, caught.value.code) == ("n", "request_budget_exceeded")
    assert "at most 2" in caught.value.message
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
