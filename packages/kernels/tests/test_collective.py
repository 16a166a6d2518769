"""Sums, gathers and messages over shared memory: exact, in order, and ended by a lost member."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import pytest
import torch

from llmstack_kernels.collective import CollectiveError, SharedGroup, SharedLink
from llmstack_kernels.native import is_available
from llmstack_kernels.native.capture import capture

pytestmark = pytest.mark.skipif(not is_available(), reason="the native kernels are not built")

SLOT_BYTES = 1 << 10


def make_groups(size: int, timeout_s: float = 60.0) -> list[SharedGroup]:
    memory = mmap.mmap(-1, SharedGroup.num_bytes(size, SLOT_BYTES))
    return [SharedGroup(memory, rank, size, slot_bytes=SLOT_BYTES, timeout_s=timeout_s) for rank in range(size)]


def in_threads(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except CollectiveError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def in_order(group: SharedGroup, num_calls: int) -> None:
    for _ in range(num_calls):
        group.all_gather(torch.ones(1, 4), [4, 4])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    groups = make_groups(size)
    parts = [torch.randn(37, 41).to(dtype) for _ in groups]  # more than a slot holds
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for _ in range(3):
        found = in_threads(*[lambda rank=rank: groups[rank].all_reduce(parts[rank].clone()) for rank in range(size)])
        for result in found:
            assert torch.equal(result, expected.to(dtype))  # type: ignore[arg-type]


def test_columns_of_uneven_widths_are_gathered_beside_each_other() -> None:
    groups, widths = make_groups(3), [5, 0, 60]
    whole = torch.randn(9, sum(widths))
    parts = [part.contiguous() for part in whole.split(widths, dim=1)]
    found = in_threads(*[lambda rank=rank: groups[rank].all_gather(parts[rank], widths) for rank in range(3)])
    for result in found:
        assert torch.equal(result, whole)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit"):
        groups[0].all_gather(torch.zeros(1, 400), [400, 400, 400])


def test_a_link_keeps_the_order_and_makes_the_sender_wait_while_it_is_full() -> None:
    memory = mmap.mmap(-1, SharedLink.num_bytes(3, SLOT_BYTES))
    sender, receiver = (
        SharedLink(memory, is_sender=is_sender, num_slots=3, slot_bytes=SLOT_BYTES) for is_sender in (True, False)
    )
    tensors = [torch.randn(size) for size in (1, 300, 2000, 256, 7)]

    def receive() -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for tensor in tensors]
        for tensor in found:
            receiver.receive(tensor)
        return found

    _, found = in_threads(lambda: [sender.send(tensor) for tensor in tensors], receive)
    assert all(map(torch.equal, found, tensors))  # type: ignore[call-overload]


def test_a_member_that_does_not_come_ends_the_wait_of_the_others_and_all_later_calls() -> None:
    first, second = make_groups(2, timeout_s=0.1)
    with pytest.raises(CollectiveError, match="did not reach the same point"):
        first.all_reduce(torch.ones(4))
    with pytest.raises(CollectiveError, match="ended or given up"):
        in_order(second, 2)
    with pytest.raises(CollectiveError):
        first.all_reduce(torch.ones(4))


def test_an_abort_ends_a_wait_under_way() -> None:
    first, second = make_groups(2)
    waiting, _ = in_threads(lambda: first.all_reduce(torch.ones(4)), second.abort)
    assert isinstance(waiting, CollectiveError)


def test_captured_calls_are_made_again_by_a_replay() -> None:
    groups = make_groups(2)
    inputs = [torch.tensor([float(rank)] * 8) for rank in range(2)]

    def capture_and_replay(rank: int) -> list[float]:
        with capture() as calls:
            gathered = groups[rank].all_gather(groups[rank].all_reduce(inputs[rank]).view(1, 8), [8, 8])
        inputs[rank].fill_(2.0 + rank)
        calls.replay()
        groups[rank].check()
        return gathered.flatten().tolist()

    assert in_threads(lambda: capture_and_replay(0), lambda: capture_and_replay(1)) == [[5.0] * 16] * 2
