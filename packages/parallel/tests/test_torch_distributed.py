"""torch.distributed between ranks: sums that do not depend on the batch, waits that end, and what NCCL gets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmstack_kernels.collective import CollectiveError
from llmstack_parallel import rank as rank_module
from llmstack_parallel.collectives import torch_distributed
from llmstack_parallel.collectives.patience import Patience
from llmstack_parallel.collectives.torch_distributed import GlooCollectives, NcclCollectives
from llmstack_parallel.rank_order import RankOrder
from llmstack_parallel.segments import RankSegments
from llmstack_types import ModelRunnerConfig


class Group:
    """A group of torch.distributed that records its calls."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.calls: list[Any] = []
        self.was_aborted = threading.Event()

    def size(self) -> int:
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def abort(self) -> None:
        self.calls.append("abort")
        self.was_aborted.set()


class Done:
    """Work that has ended."""

    def wait(self, timeout: timedelta | None = None) -> None: ...


@pytest.mark.parametrize("kind", [GlooCollectives, lambda *of: NcclCollectives(*of, is_ordered=True)])
def test_a_sum_of_three_ranks_is_in_their_order_and_rounded_once(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(parts: torch.Tensor, own: torch.Tensor, **_: Any) -> Done:
        parts.copy_(torch.cat([own, own * 256, own]))
        return Done()

    monkeypatch.setattr(dist, "all_gather_single", gather)
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    assert kind(Group(3), Patience(1)).all_reduce(tensor) is tensor
    assert tensor.tolist() == [[258.0] * 3] * 2  # rounded after each sum, it would be 256


SUMS = """
import sys
import torch
from pathlib import Path
from llmstack_parallel.collectives.torch_distributed import TorchExchange
from llmstack_parallel.topology import Topology
size, rank = 3, int(sys.argv[1])
exchange = TorchExchange(Topology(size), rank, "gloo", Path(sys.argv[2]), 60)
group = exchange.sharding(is_expert_parallel=False).collectives
rows = torch.randn(32, 96, generator=torch.Generator().manual_seed(rank))
alone = torch.cat([group.all_reduce(row.clone()[None]) for row in rows])
assert torch.equal(group.all_reduce(rows), alone), "the bits of a row depend on the batch"
columns = torch.full((2, 1 + rank), float(rank))
assert group.all_gather(columns, [1, 2, 3]).tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
exchange.close()
"""


@pytest.mark.full
def test_a_row_has_the_same_bits_alone_and_in_a_batch_over_gloo(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", SUMS, str(rank), str(tmp_path)] for rank in range(3)]
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]


def test_waits_over_nccl_end_with_the_ranks_and_later_results_are_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    collectives = NcclCollectives(group, Patience(600), is_ordered=False)  # type: ignore[arg-type]
    collectives.set_timeout(60)
    collectives.check()
    collectives.abort()
    assert group.was_aborted.wait(30)
    assert group.calls == [timedelta(seconds=60), "abort"]
    with pytest.raises(CollectiveError, match="another rank has ended"):
        collectives.check()


def test_a_group_over_nccl_is_left_without_the_ranks_that_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: group.calls.append("destroy"))
    NcclCollectives(group, Patience(600), is_ordered=False).leave()  # type: ignore[arg-type]
    assert group.calls == ["abort", "destroy"]  # without the first, the second waits for all ranks


def test_a_group_over_gloo_ends_before_the_process_does() -> None:
    """What still has threads at the end of a process aborts it."""
    group = Group(2)
    reference = weakref.ref(group)
    collectives = GlooCollectives(group, Patience(600))  # type: ignore[arg-type]
    del group
    collectives.leave()
    assert reference() is None


def test_a_rank_over_nccl_connects_its_own_gpu_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options))
    torch_distributed.join("nccl", dist.HashStore(), 3, 4, 60)
    assert (given["rank"], given["world_size"], given["device_id"]) == (3, 4, torch.device("cuda", 3))
    assert given["timeout"] == timedelta(seconds=60)


def test_one_network_interface_is_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    torch_distributed.set_interface("gloo", "eth1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], "NCCL_IB_DISABLE" in os.environ) == ("eth1", False)
    torch_distributed.set_interface("nccl", "eth1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"  # `eth1` would also be eth10
    assert os.environ["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize(("device", "chosen"), [("cpu", []), ("cuda", [1])])
def test_a_rank_chooses_a_gpu_where_the_model_is_on_one(
    device: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    config = ModelRunnerConfig("model", device=device, tensor_parallel_size=2)
    segments = RankSegments(-1, -1, -1, 0)
    rank_module._choose_gpu(RankOrder(config, 1, 1, "", "", Path(), segments, "INFO", "text"))
    assert found == chosen
