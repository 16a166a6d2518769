"""Streamed copies give the blocks of sequential copies in any order that events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.device.streams import Lane
from llmstack_model_runner.memory.block_copies import DirectBlockCopies
from llmstack_model_runner.memory.streamed_copies import StreamedBlockCopies
from llmstack_types import SchedulerOutput

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 5
SHAPE = (2, 3, 4)  # of a block: heads, tokens, head_dim
BLOCK_BYTES = 2 * 2 * 24 * 4  # two layers, keys and values


class LazyStreams:
    """Lanes whose work waits until the test runs it, in any order that their events allow."""

    def __init__(self, seed: int) -> None:
        self.num_runs = dict.fromkeys(Lane, 0)
        self._random = random.Random(seed)
        self._lanes: dict[Lane, deque[tuple[str, object]]] = {lane: deque() for lane in Lane}
        self._over: set[int] = set()
        self._events: list[object] = []  # kept, so that no id is given out twice

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        self._lanes[lane].append(("run", work))

    def record(self, lane: Lane) -> object:
        event = object()
        self._events.append(event)
        self._lanes[lane].append(("record", event))
        return event

    def wait(self, lane: Lane, event: object) -> None:
        self._lanes[lane].append(("wait", event))

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64)

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), -99, dtype=dtype)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), -77, dtype=dtype)

    def close(self) -> None:
        self.work_off()

    def work_off(self, at_most: int = 10**9) -> None:
        """Takes up to so many entries, each from a lane whose next one may happen."""
        for _ in range(at_most):
            ready = [lane for lane, queue in self._lanes.items() if queue and self._is_ready(*queue[0])]
            if not ready:
                break
            lane = self._random.choice(ready)
            self._happen(lane, *self._lanes[lane].popleft())

    @property
    def is_idle(self) -> bool:
        return not any(self._lanes.values())

    def _is_ready(self, kind: str, payload: object) -> bool:
        return kind != "wait" or id(payload) in self._over

    def _happen(self, lane: Lane, kind: str, payload: object) -> None:
        if kind == "record":
            self._over.add(id(payload))
        elif kind == "run" and callable(payload):
            self.num_runs[lane] += 1
            payload()


def make_storage(num_blocks: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(num_blocks, *SHAPE).to(dtype), torch.randn(num_blocks, *SHAPE).to(dtype)) for _ in range(2)]


def clone(storage: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(keys.clone(), values.clone()) for keys, values in storage]


@st.composite
def steps(draw: st.DrawFn) -> list[SchedulerOutput]:
    """Steps whose swap-ins read host blocks that were written, as a scheduler's do."""
    made, on_host = [], set()
    for number in range(draw(st.integers(1, 8))):
        host_blocks = draw(st.lists(st.integers(0, NUM_HOST_BLOCKS - 1), unique=True, max_size=4))
        blocks = draw(st.permutations(range(NUM_BLOCKS)))
        swap_outs = list(zip(blocks, host_blocks, strict=False))
        on_host |= set(host_blocks)
        back = draw(st.lists(st.sampled_from(sorted(on_host)), unique=True, max_size=3)) if on_host else []
        swap_ins = list(zip(back, draw(st.permutations(range(NUM_BLOCKS))), strict=False))
        block = st.integers(0, NUM_BLOCKS - 1)
        copies = draw(st.lists(st.tuples(block, block), max_size=3))
        made.append(SchedulerOutput(number, swap_outs=swap_outs, swap_ins=swap_ins, block_copies=copies))
    return made


def play(
    copies: StreamedBlockCopies, streams: LazyStreams, storage: list[tuple[torch.Tensor, torch.Tensor]],
    scheduled: list[SchedulerOutput], lags: list[int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plays steps, each followed by a forward pass that writes a block; returns what plain copies give."""
    expected = clone(storage)
    direct = DirectBlockCopies(expected, make_storage(NUM_HOST_BLOCKS))
    for step, lag in zip(scheduled, lags, strict=False):
        copies.apply(step)
        direct.apply(step)
        block = step.step % NUM_BLOCKS

        def forward(block: int = block, number: float = float(step.step)) -> None:
            storage[0][0][block] = number

        streams.run(Lane.COMPUTE, forward)
        expected[0][0][block] = float(step.step)
        streams.work_off(lag)
    return expected


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(0, 2**32), st.lists(st.integers(0, 40), min_size=8, max_size=8), st.integers(1, 3))
def test_any_order_that_events_allow_gives_the_same_bytes(
    scheduled: list[SchedulerOutput], seed: int, lags: list[int], num_staged: int
) -> None:
    streams, storage = LazyStreams(seed), make_storage(NUM_BLOCKS)
    copies = StreamedBlockCopies(storage, NUM_HOST_BLOCKS, streams, num_staged * BLOCK_BYTES)
    expected = play(copies, streams, storage, scheduled, lags)
    copies.close()
    assert streams.is_idle
    for (keys, values), (expected_keys, expected_values) in zip(storage, expected, strict=True):
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)


@pytest.mark.parametrize("lane", Lane)
def test_without_its_waits_a_lane_gives_other_bytes(lane: Lane) -> None:
    """The test above would detect it."""
    scheduled = [
        SchedulerOutput(0, swap_outs=[(0, 0), (1, 1), (2, 2)]),
        SchedulerOutput(1, swap_outs=[(3, 3), (4, 4)], swap_ins=[(0, 5), (1, 0), (4, 1)]),
        SchedulerOutput(2, swap_outs=[(5, 0)], swap_ins=[(2, 2), (3, 4), (0, 3)]),
    ]
    differs = False
    for seed in range(200):
        streams, storage = LazyStreams(seed), make_storage(NUM_BLOCKS)
        wait = streams.wait
        streams.wait = lambda on, event, wait=wait: None if on is lane else wait(on, event)  # type: ignore[method-assign]  # the fault
        copies = StreamedBlockCopies(storage, NUM_HOST_BLOCKS, streams, BLOCK_BYTES)
        expected = play(copies, streams, storage, scheduled, [0, 0, 0])
        streams.work_off()
        differs |= any(
            not torch.equal(mine, theirs)
            for layer, other in zip(storage, expected, strict=True)
            for mine, theirs in zip(layer, other, strict=True)
        )
    assert differs


def test_neighbouring_host_blocks_go_in_one_copy_and_a_step_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, storage = LazyStreams(0), make_storage(NUM_BLOCKS)
    copies = StreamedBlockCopies(storage, NUM_HOST_BLOCKS, streams, 4 * BLOCK_BYTES)
    sizes = []
    copy_ = torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            sizes.append(len(self))
        return copy_(self, source, non_blocking)

    copies.apply(SchedulerOutput(0, swap_outs=[(5, 1), (0, 2), (3, 3), (4, 0)]))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", counting)
        streams.work_off()
    assert sizes == [3, 1]
    assert streams.num_runs == {Lane.COMPUTE: 1, Lane.TO_HOST: 1, Lane.FROM_HOST: 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_data_type_is_restored_bit_by_bit(dtype: torch.dtype) -> None:
    streams, storage = LazyStreams(0), make_storage(NUM_BLOCKS, dtype)
    storage[0][0][0] = torch.tensor(float("nan")).to(dtype)
    before = clone(storage)
    copies = StreamedBlockCopies(storage, NUM_HOST_BLOCKS, streams)
    copies.apply(SchedulerOutput(0, swap_outs=[(block, block) for block in range(5)]))
    copies.apply(SchedulerOutput(1, swap_ins=[(0, 5), (4, 1)]))
    copies.close()
    for (keys, values), (old_keys, old_values) in zip(storage, before, strict=True):
        for now, old in ((keys, old_keys), (values, old_values)):
            assert torch.equal(now[5].view(torch.uint8), old[0].view(torch.uint8))
            assert torch.equal(now[1].view(torch.uint8), old[4].view(torch.uint8))


def test_steps_without_copies_put_nothing_on_any_lane() -> None:
    streams = LazyStreams(0)
    StreamedBlockCopies(make_storage(NUM_BLOCKS), 0, streams).apply(SchedulerOutput(0))
    StreamedBlockCopies([], 0, streams).apply(SchedulerOutput(0))
    assert streams.is_idle


@pytest.mark.parametrize("name", ["swap_outs", "swap_ins", "block_copies"])
def test_a_block_that_does_not_exist_is_refused_and_nothing_is_started(name: str) -> None:
    streams = LazyStreams(0)
    copies = StreamedBlockCopies(make_storage(NUM_BLOCKS), NUM_HOST_BLOCKS, streams)
    lists = {"swap_outs": [(0, 0)]} | {name: [(0, 1), (0, 6)]}
    with pytest.raises(ValueError, match=name):
        copies.apply(SchedulerOutput(1, **lists))  # type: ignore[arg-type]  # test values
    assert streams.is_idle
