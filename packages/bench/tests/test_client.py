"""The load generator against servers that behave, and that do not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from llmstack_bench.arrivals import arrival_times
from llmstack_bench.client import CompletionClient, RequestOptions
from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult, run_load
from llmstack_bench.metrics import summarise
from llmstack_bench.result import RequestResult
from llmstack_bench.testing import Behaviour, FakeServer
from llmstack_bench.workload import BenchRequest, RandomWorkload

CHAT = RequestOptions(endpoint="/v1/chat/completions")


async def load(
    server: FakeServer, num_requests: int = 4, options: RequestOptions | None = None, **limits: Any
) -> LoadResult:
    options = options or RequestOptions()
    requests = RandomWorkload(num_requests, 6, 5).requests()
    if options.is_chat:
        requests = [BenchRequest("a b c", 5) for _ in requests]
    bodies = [options.encode(request, "m") for request in requests]
    async with CompletionClient(server.url, options) as client:
        return await run_load(client, bodies, arrival_times(num_requests), **limits)


async def only_result(behaviour: Behaviour, options: RequestOptions | None = None) -> RequestResult:
    with FakeServer(behaviour) as server:
        return (await load(server, 1, options)).results[0]


async def test_every_token_is_counted_and_timed():
    result = await only_result(Behaviour(token_delay_s=0.01))
    assert result.error is None
    assert (result.num_prompt_tokens, result.num_output_tokens, result.has_usage) == (6, 5, True)
    assert result.num_chunks == 5
    assert 0.01 <= (result.ttft_s or 0) < result.e2e_s
    assert result.ttft_s + sum(result.token_gaps_s) == pytest.approx(result.e2e_s)


@pytest.mark.parametrize(("header", "expected"), [("250.5", 0.2505), (None, None), ("soon", None)])
async def test_a_promised_first_token_is_kept_with_the_real_one(header: str | None, expected: float | None):
    assert (await only_result(Behaviour(predicted_ttft_ms=header))).predicted_ttft_s == expected


async def test_a_server_without_usage_is_counted_by_its_chunks():
    result = await only_result(Behaviour(has_usage=False, tokens_per_chunk=2))
    assert (result.num_output_tokens, result.num_prompt_tokens, result.has_usage) == (3, None, False)


async def test_usage_counts_the_tokens_of_large_chunks():
    result = await only_result(Behaviour(tokens_per_chunk=2))
    assert (result.num_output_tokens, result.num_chunks, len(result.token_gaps_s)) == (5, 3, 2)
    result = await only_result(Behaviour(tokens_per_chunk=2, has_continuous_usage=True))
    assert (result.num_output_tokens, result.num_chunks, len(result.token_gaps_s)) == (5, 3, 3)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(status=503), "HTTP 503: configured to refuse"),
        (Behaviour(breaks_after=2), "the stream ended early"),
        (Behaviour(error_after=2), "error in the stream: configured to fail"),
    ],
)
async def test_a_failure_is_counted_with_its_reason(behaviour: Behaviour, reason: str):
    with FakeServer(behaviour) as server:
        summary = summarise(await load(server, 3))
    assert summary.failures == {reason: 3}
    assert (summary.values["completed"], summary.values["failed"]) == (0, 3)


async def test_a_failed_request_keeps_what_it_had_received():
    result = await only_result(Behaviour(breaks_after=2))
    assert result.num_chunks == 2
    assert result.ttft_s is not None


async def test_a_slow_server_runs_out_of_its_time():
    result = await only_result(Behaviour(token_delay_s=0.5), RequestOptions(timeout_s=0.1))
    assert result.error == "no answer within 0.1 s"


async def test_a_server_that_is_not_there_is_a_failure_of_every_request():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = FakeServer(url=f"http://127.0.0.1:{probe.getsockname()[1]}")
        results = (await load(server, 2)).results
    assert all(result.error is not None and result.error.startswith("connection: ") for result in results)


async def test_no_more_requests_are_in_flight_than_allowed():
    with FakeServer(Behaviour(token_delay_s=0.002)) as server:
        limited = await load(server, 9, max_concurrency=3)
        free = await load(server, 9)
    assert limited.max_in_flight == 3
    assert free.max_in_flight == 9
    starts = sorted(result.start_s for result in limited.results)
    ends = sorted(result.start_s + result.e2e_s for result in limited.results)
    assert starts[3] >= ends[0]


async def test_requests_are_sent_at_their_times_and_results_keep_their_order():
    with FakeServer() as server:
        options = RequestOptions()
        bodies = [options.encode(BenchRequest([5] * (n + 1), 2), "m") for n in range(3)]
        seen: list[RequestResult] = []
        async with CompletionClient(server.url, options) as client:
            done = await run_load(client, bodies, [0.0, 0.05, 0.1], on_result=seen.append)
    assert [result.num_prompt_tokens for result in done.results] == [1, 2, 3]
    assert all(r.start_s >= planned for r, planned in zip(done.results, [0.0, 0.05, 0.1], strict=True))
    assert len(seen) == 3
    assert done.duration_s >= 0.1


async def test_a_cancelled_run_closes_its_requests():
    with FakeServer(Behaviour(token_delay_s=0.05)) as server:
        task = asyncio.create_task(load(server, 2))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_bodies_say_what_the_options_say():
    with FakeServer() as server:
        await load(server, 1, RequestOptions(extra_body={"top_k": 3}, temperature=0.5))
        await load(server, 1, RequestOptions(endpoint="/v1/chat/completions", ignore_eos=False, temperature=None))
    first, second = server.bodies
    assert first.pop("prompt") == RandomWorkload(1, 6, 5).requests()[0].prompt
    assert first == {
        "model": "m", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5,
        "ignore_eos": True, "top_k": 3,
    }  # fmt: skip
    assert second["messages"] == [{"role": "user", "content": "a b c"}]
    assert not {"ignore_eos", "temperature", "prompt"} & set(second)


async def test_a_chat_route_is_measured_from_its_first_content():
    result = await only_result(Behaviour(), CHAT)
    assert (result.num_chunks, result.num_output_tokens, result.error) == (5, 5, None)


@pytest.mark.parametrize(
    ("options", "prompt"), [(CHAT, [1, 2]), (RequestOptions(), [{"role": "user", "content": "hi"}])]
)
def test_a_prompt_of_the_wrong_kind_for_its_route_is_an_error(options: RequestOptions, prompt: Any):
    with pytest.raises(BenchError, match="--endpoint"):
        options.encode(BenchRequest(prompt, 5), "m")


async def test_models_are_listed_and_a_server_without_a_list_is_an_error():
    with FakeServer() as server:
        async with CompletionClient(server.url, RequestOptions()) as client:
            assert [model["id"] for model in await client.models()] == ["fake"]
    with FakeServer(Behaviour(lists_models=False)) as server:
        async with CompletionClient(server.url, RequestOptions()) as client:
            with pytest.raises(BenchError, match="/v1/models returns no list of models"):
                await client.models()
