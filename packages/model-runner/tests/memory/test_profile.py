"""The KV cache gets the memory that nothing else was measured to need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_runner_helpers.cpu_stand_in import StandInModelRunner

from llmstack_kernels.testing import runs_native_kernels
from llmstack_model_runner.memory.profile import (
    GRAPH_BYTES_PER_SIZE,
    MemoryProfile,
    MemoryState,
    graph_bytes,
    profile_memory,
)
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.steps.largest_steps import largest_steps
from llmstack_model_runner.testing import write_gpt2_config
from llmstack_types import ModelRunnerConfig

GIB = 1 << 30


class FakeProbe:
    """A device of 100 bytes, of which others have 10 and PyTorch 30; steps are played by `take` and `leave`."""

    total_bytes = 100

    def __init__(self) -> None:
        self.others, self.reserved, self.peak = 10, 30, 0

    def state(self) -> MemoryState:
        return MemoryState(100 - self.others - self.reserved, self.reserved)

    def reset_peak(self) -> None:
        self.peak = self.reserved

    def peak_bytes(self) -> int:
        return self.peak

    def run(self, num_bytes: int, *, kept: int = 0, beside: int = 0) -> None:
        """PyTorch reserves `num_bytes`, keeps `kept` of them; something else takes `beside` for good."""
        self.peak = max(self.peak, self.reserved + num_bytes)
        self.reserved += kept
        self.others += beside


def profile(probe: FakeProbe, reserve: int = 0, kv_bytes: int = 0, **taken: int) -> MemoryProfile:
    def run() -> int:
        probe.run(**taken)  # type: ignore[arg-type]  # by name
        return kv_bytes

    return profile_memory(probe, run, reserve)


def test_a_steps_peak_and_what_stays_beside_pytorch_are_kept_free() -> None:
    found = profile(FakeProbe(), num_bytes=20, beside=3)
    assert (found.used_bytes, found.weight_bytes, found.step_bytes) == (40, 30, 23)
    assert found.kv_bytes(0.9) == 90 - 40 - 23
    assert found.kv_bytes(0.5) == 0


def test_the_storage_that_the_measurement_itself_took_is_not_counted() -> None:
    assert profile(FakeProbe(), num_bytes=20, kv_bytes=15).step_bytes == 5


def test_what_pytorch_goes_on_holding_is_counted_once() -> None:
    assert profile(FakeProbe(), num_bytes=20, kept=7).step_bytes == 20


def test_each_captured_size_has_a_reserve_and_all_share_one_table_of_logits() -> None:
    assert graph_bytes([1, 2, 8], vocab_size=1000) == 3 * GRAPH_BYTES_PER_SIZE + 8 * 1000 * 4
    assert graph_bytes([], vocab_size=1000) == 0
    assert profile(FakeProbe(), reserve=5, num_bytes=20).kv_bytes(0.9) == 90 - 40 - 20 - 5


def test_the_table_adds_up_and_says_how_many_requests_fit() -> None:
    found = MemoryProfile(100 * GIB, 20 * GIB, 15 * GIB, 8 * GIB, 2 * GIB)
    lines = list(found.table(0.9, bytes_per_block=GIB // 100, block_size=16, max_model_len=1000))
    sizes = [float(line[18:26]) for line in lines[1:]]
    assert sizes == [100.0, 90.0, 15.0, 5.0, 8.0, 2.0, 60.0]
    assert lines[-1].endswith("6000 blocks, 96000 tokens, 96.0 requests of 1000")


@given(
    max_num_batched_tokens=st.integers(1, 300),
    max_num_seqs=st.integers(1, 40),
    max_model_len=st.integers(1, 60),
    block_size=st.integers(1, 32),
)
def test_the_largest_steps_are_as_large_as_steps_may_be(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> None:
    decode, prefill, end = largest_steps(max_num_batched_tokens, max_num_seqs, max_model_len, block_size)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    assert prefill.total_num_scheduled_tokens == min(max_num_batched_tokens, num_rows * max_model_len)
    assert len(prefill.scheduled_requests) == len(decode.scheduled_requests) == num_rows
    for new, row in zip(
        prefill.new_requests + decode.new_requests, prefill.scheduled_requests + decode.scheduled_requests, strict=True
    ):
        assert row.num_computed_tokens + row.num_scheduled_tokens == len(new.token_ids) <= max_model_len
        assert len(row.new_block_ids) * block_size >= len(new.token_ids)
    # What the decode is recorded in takes its memory before the prefill does, as it is in service.
    assert prefill.removed_request_ids == [row.request_id for row in decode.scheduled_requests]
    assert end.removed_request_ids == [row.request_id for row in prefill.scheduled_requests]


@pytest.mark.parametrize("runner_class", [ModelRunner, StandInModelRunner])
def test_a_runner_computes_its_largest_steps_and_leaves_nothing_behind(
    tmp_path: Path, runner_class: type[ModelRunner]
) -> None:
    if runner_class is StandInModelRunner and not runs_native_kernels():
        pytest.skip("the CPU stand-in needs the native kernels, which are not built")
    runner = runner_class(
        ModelRunnerConfig(
            str(write_gpt2_config(tmp_path, n_embd=64)),
            load_format="dummy",
            max_model_len=64,
            max_num_seqs=5,
            max_num_batched_tokens=48,
            block_size=4,
            device="cpu",
            enforce_eager=True,
        )
    )
    runner.load_model()
    model = runner._model
    if model is None:
        raise AssertionError("the model is loaded")
    num_tokens = []
    forward = model.forward

    def counting(token_ids: torch.Tensor, *arguments: object) -> torch.Tensor:
        num_tokens.append(len(token_ids))
        return forward(token_ids, *arguments)  # type: ignore[arg-type]  # passed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", counting)
        kv_bytes = runner.run_largest_steps()
    assert num_tokens[-2:] == [5, 48]
    assert kv_bytes % runner.kv_cache_spec().bytes_per_block == 0
    assert runner._kv_caches == []
    runner.initialize_kv_cache(8)
