"""Which requests get nowhere, and whether that is the engine core's doing."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.requests import AdmittedRequest
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import (
    EncoderStats,
    EngineCoreOutput,
    EngineCoreRequest,
    MediaItem,
    PoolingParams,
    RequestEvent,
    RequestStatus,
    SamplingParams,
)

PARAMS = SamplingParams(max_tokens=9, seed=0, detokenize=False)


def add(processor: OutputProcessor, request_id: str, arrival_s: float, *media: MediaItem) -> None:
    request = EngineCoreRequest(request_id, [1], PARAMS, arrival_time_s=arrival_s, media=media)
    collector = processor.new_collector(PARAMS.output_kind)
    processor.add_request(request_id, AdmittedRequest(None, [1], PARAMS), [request], collector)


def running(request_id: str, time_s: float) -> RequestEvent:
    return RequestEvent(request_id, RequestStatus.RUNNING, time_s)


def test_a_running_request_without_a_token_is_stalled_and_a_waiting_one_is_not() -> None:
    processor = OutputProcessor(None)
    for request_id in ("runs", "waits", "gets on"):
        add(processor, request_id, 0.0)
    processor.process_outputs([], 1.0, [running("runs", 1.0), running("gets on", 1.0)])
    processor.process_outputs([EngineCoreOutput("gets on", [7])], 50.0)
    assert processor.find_stalled(40.0, counts_waiting=False) == ["runs"]
    assert processor.find_stalled(40.0, counts_waiting=True) == ["runs", "waits"]
    assert processor.find_stalled(60.0, counts_waiting=False) == ["runs", "gets on"]


def test_a_request_that_pools_is_watched_too() -> None:
    processor = OutputProcessor(None)
    request = EngineCoreRequest("p", [1], PARAMS, arrival_time_s=0.0, pooling_params=PoolingParams())
    processor.add_pooling_request(None, request)
    assert processor.find_stalled(40.0, counts_waiting=False) == []
    processor.process_outputs([], 1.0, [running("p", 1.0)])
    assert processor.find_stalled(40.0, counts_waiting=False) == ["p"]
    vector = array("f", [1.0]).tobytes()
    processor.process_outputs([EngineCoreOutput("p", [], pooled=vector)], 2.0)
    assert processor.find_stalled(40.0, counts_waiting=True) == []


def test_a_picture_that_is_encoded_for_long_holds_up_no_request() -> None:
    processor, picture = OutputProcessor(None), MediaItem(bytes(32), "image", 0, 1)
    add(processor, "text", 0.0)
    add(processor, "picture", 0.0, picture)
    pools = EngineCoreRequest("pools", [1], PARAMS, pooling_params=PoolingParams(), media=(picture,))
    processor.add_pooling_request(None, pools)
    processor.process_outputs([], 1.0, [running(name, 1.0) for name in ("text", "picture", "pools")])
    for engine_index, num_parts, time_s in ((0, 1, 50.0), (0, 2, 60.0), (1, 0, 70.0), (0, 2, 70.0)):
        iteration = IterationStats(timestamp_s=time_s, engine_index=engine_index)
        processor.note_encoder(iteration, EncoderStats(num_parts=num_parts))
    assert processor.find_stalled(60.0, counts_waiting=False) == ["text"]
    assert processor.find_stalled(61.0, counts_waiting=False) == ["pools", "text", "picture"]


async def test_an_engine_core_that_stands_still_holds_up_all_requests(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    client = FakeEngineCoreClient()
    client.step_delay_s = 3600.0
    llm = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
    assert llm.find_stuck_requests(0.0) == ([], False)
    stream = llm.generate("a", SamplingParams(max_tokens=1), "r")
    waiting = asyncio.ensure_future(anext(stream))
    for _ in range(100):  # until it has reached the engine core
        await asyncio.sleep(0)
    assert client.added
    assert llm.find_stuck_requests(3600.0) == ([], False)
    assert llm.find_stuck_requests(-1.0) == (["r"], True)
    waiting.cancel()
    await llm.shutdown()
