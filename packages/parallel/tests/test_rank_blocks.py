"""KV blocks of several ranks leave and enter them as one piece of memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from parallel_helpers.families import write_family
from parallel_helpers.schedules import NUM_BLOCKS, make_config
from parallel_helpers.thread_peers import ThreadPeers

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_parallel import rank_blocks
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.messages import Answer, BlockBytes
from llmstack_parallel.rank_blocks import RankParts, receive_part
from llmstack_parallel.runner import ParallelRunner
from llmstack_parallel.topology import Topology
from llmstack_types import SamplingParams

BLOCKS = [7, 2, 11]


def started(folder: Path, **sizes: int) -> ModelRunner | ParallelRunner:
    config = make_config(folder, **sizes)
    runner = ParallelRunner(config, ThreadPeers) if sizes else ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def read(runner: ModelRunner | ParallelRunner, block_ids: list[int]) -> bytearray:
    found = bytearray(len(block_ids) * runner.kv_block_form()[0])
    runner.read_kv_blocks(block_ids, memoryview(found))
    return found


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_blocks_that_enter_all_ranks_leave_them_unchanged(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_blocks, "PART_BYTES", 1000)  # several messages
    write_family(tmp_path, "llama")
    runner = started(tmp_path, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    try:
        num_bytes, state_bytes, form = runner.kv_block_form()
        assert state_bytes == 0
        assert form == ("parts of 2 ranks, 1 stages" if sizes[0] > 1 else "")
        data = bytearray(random.Random(0).randbytes(3 * num_bytes))
        runner.write_kv_blocks(BLOCKS, memoryview(data))
        assert read(runner, BLOCKS) == data
        runner.write_kv_blocks([4, 5], memoryview(data), first=1)
        assert read(runner, [7, 4, 5]) == data
        with pytest.raises(ValueError, match="3 KV blocks have"):
            runner.read_kv_blocks(BLOCKS, memoryview(bytearray(1)))
    finally:
        runner.shutdown()


def test_blocks_of_stages_are_those_of_one_process(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    found = []
    for sizes in ({}, {"pipeline_parallel_size": 2}):
        runner = started(tmp_path, **sizes)
        driver = StepDriver(runner, NUM_BLOCKS)  # type: ignore[arg-type]  # it calls what both have
        driver.add("request", [5, 9, 30, 2, 77, 12, 13, 14], SamplingParams(temperature=0.0))
        driver.run(2)
        found.append(read(runner, [0, 1]))  # whole blocks of the request
        runner.shutdown()
    assert found[0] == found[1]
    assert any(found[0])


@pytest.mark.parametrize("message", [Answer(), BlockBytes(b""), BlockBytes(bytes(9))])
def test_an_answer_without_the_part_of_a_rank_is_refused(message: Answer | BlockBytes) -> None:
    with (
        RankParts(Topology(2), [4, 4]).split(memoryview(bytearray(16)), 2) as parts,
        pytest.raises(LostRankError, match="in place of its KV blocks"),
    ):
        receive_part(parts[1], lambda: message)
