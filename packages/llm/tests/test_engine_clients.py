"""The front end over engine cores of every kind: in a thread, several, or of another process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_llm import AsyncLLM, EngineArgs
from llmstack_llm.model.config import load_model_config
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_types import (
    EngineReady,
    EngineStartError,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
)

RUNNER = "llmstack_engine_core.testing:EchoModelRunner"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m")


async def collect(llm: AsyncLLM, prompt: str, request_id: str) -> str:
    """The prompt again, as the echo says it."""
    params = SamplingParams(max_tokens=len(prompt), temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
    return [output.outputs[0].text async for output in llm.generate(prompt, params, request_id)][-1]


async def test_the_same_over_an_engine_core_in_a_thread_and_over_several(folder: Path):
    for multiprocess, num_engines in ((False, 1), (True, 2)):
        args = EngineArgs(str(folder), runner=RUNNER, data_parallel_size=num_engines)
        async with AsyncLLM.from_engine_args(args, multiprocess=multiprocess) as llm:
            await llm.wait_until_ready()
            assert [engine.engine_index for engine in llm.engines] == list(range(num_engines))
            texts = await asyncio.gather(*(collect(llm, f"prompt {index}", f"r{index}") for index in range(8)))
            assert texts == [f"prompt {index}" for index in range(8)]
            for level in (0, 3, -1, True, "1"):
                with pytest.raises(InvalidRequestError, match="level must be 1 or 2"):
                    await llm.sleep(level)
            for token_ids in ([-1], [1 << 40], [1.5]):
                with pytest.raises(InvalidRequestError) as refused:
                    await llm.detokenize(token_ids)
                assert refused.value.param == "tokens[0]"
            assert await llm.sleep(2)
            assert llm.sleep_level == 2
            await llm.wake_up()
            assert llm.sleep_level == 0
        assert llm.state == "dead"


async def test_two_front_ends_share_one_engine_core_and_one_with_another_model_is_refused(folder: Path, tmp_path: Path):
    _, config = EngineArgs(str(folder), runner=RUNNER).create_engine_config()
    process = launch_engine_process(config)
    addresses = [process.address]
    args = EngineArgs(str(folder), runner=RUNNER)
    first = AsyncLLM.from_engine_args(args, client_addresses=addresses)
    second = AsyncLLM.from_engine_args(args, client_addresses=addresses, client_index=1)
    await asyncio.gather(first.wait_until_ready(), second.wait_until_ready())
    texts = await asyncio.gather(collect(first, "one", "r"), collect(second, "two", "s"))
    assert texts == ["one", "two"]
    other = AsyncLLM.from_engine_args(
        EngineArgs(str(write_model_folder(tmp_path / "other")), runner=RUNNER), client_addresses=addresses
    )
    with pytest.raises(EngineStartError, match="but this front end was given"):
        await other.wait_until_ready()
    for llm in (first, second, other):
        await llm.shutdown()
    assert process.is_alive
    process.stop()


async def test_figures_of_steps_name_their_engine_core(folder: Path):
    seen: list[int] = []

    class Logger:
        def log_engine_initialized(self, ready: EngineReady) -> None:
            seen.append(ready.engine_index)

        def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
            seen.append(iteration_stats.engine_index)

    client: Any = FakeEngineCoreClient()
    client.ready = replace(client.ready, engine_index=3)
    llm = AsyncLLM(load_model_config(str(folder)), client, None, stat_loggers=[Logger()])
    await llm.wait_until_ready()
    assert seen == [3]
    await llm.shutdown()
