"""A captured computation is replayed on new inputs; work of PyTorch in it is refused."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmstack_kernels.embedding import embedding
from llmstack_kernels.linear import pack_linear
from llmstack_kernels.native import library
from llmstack_kernels.native.capture import Arena, CaptureError, capture
from llmstack_kernels.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_repetition_computes_what_the_calls_would(dtype: torch.dtype, quantization: str | None) -> None:
    table, weight = torch.randn(20, 16).to(dtype), torch.randn(16, 16).to(dtype)
    packed = pack_linear(weight, torch.randn(16).to(dtype), quantization)
    ids = torch.tensor([3, 1, 4])
    with torch.inference_mode(), capture() as captured:
        hidden = embedding(ids, table)
        out = packed(rms_norm(hidden, table[0], 1e-5), "silu", residual=hidden)
    assert len(captured) == 3
    for new_ids in ([1, 5, 9], [0, 0, 19]):
        ids.copy_(torch.tensor(new_ids))
        captured.replay()
        hidden = embedding(torch.tensor(new_ids), table)
        assert torch.equal(out, packed(rms_norm(hidden, table[0], 1e-5), "silu", residual=hidden))


def test_what_pytorch_computes_in_between_is_refused_and_the_capture_ends() -> None:
    table = torch.randn(20, 16)
    packed = pack_linear(torch.randn(16, 16))
    ids = torch.tensor([3])
    with pytest.raises(CaptureError, match="tanh"), capture():
        packed(embedding(ids, table)).tanh()
    native = library()
    assert native is not None
    assert native.captures.current is None


def test_memory_between_the_calls_outlives_them() -> None:
    table = torch.randn(20, 16)
    packed = pack_linear(torch.randn(16, 16))
    ids = torch.tensor([3, 7])
    with torch.inference_mode(), capture() as captured:
        out = packed(packed(packed(embedding(ids, table))))
    clutter = [torch.full((2, 16), 7.0) for _ in range(100)]
    ids.copy_(torch.tensor([5, 6]))
    captured.replay()
    assert torch.equal(out, packed(packed(packed(embedding(torch.tensor([5, 6]), table)))))
    assert all((tensor == 7).all() for tensor in clutter)


def test_captures_that_share_an_arena_take_no_more_memory_than_the_largest() -> None:
    table = torch.randn(20, 16)
    packed = pack_linear(torch.randn(16, 16))
    arena, results = Arena(), []
    for num_rows in (3, 1, 2):
        ids = torch.arange(num_rows)
        with torch.inference_mode(), capture(arena) as captured:
            out = packed(packed(embedding(ids, table)))
        results.append((ids, captured, out))
    size = arena.num_bytes
    for ids, captured, out in results:
        ids += 4
        captured.replay()
        assert torch.equal(out, packed(packed(embedding(ids, table))))
    assert arena.num_bytes == size == 1 << 22


def test_an_arena_grows_and_gives_no_memory_twice() -> None:
    arena = Arena()
    tensors = [arena.empty((300, 1000), torch.float32) for _ in range(9)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [int(tensor.min()) for tensor in tensors] == list(range(9))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_capture_does_not_import_the_compiler_of_pytorch() -> None:
    code = (
        "import sys, torch\n"
        "from llmstack_kernels.embedding import embedding\n"
        "from llmstack_kernels.native.capture import capture\n"
        "ids, table = torch.tensor([1]), torch.zeros(4, 16)\n"
        "with torch.inference_mode(), capture() as captured:\n"
        "    embedding(ids, table)\n"
        "print(len(captured), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_calls_of_other_threads_are_not_captured() -> None:
    ids, table = torch.tensor([3, 7]), torch.randn(20, 16)
    with torch.inference_mode(), capture() as captured, ThreadPoolExecutor(1) as pool:
        embedding(ids, table)
        assert pool.submit(embedding, ids, table).result().shape == (2, 16)
    assert len(captured) == 1
