"""The tensors have the layout that kernels expect."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest


def test_importing_the_package_does_not_import_torch():
    code = "import llmstack_kv_cache, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_storage_is_a_pair_of_zeroed_tensors_per_layer():
    torch = pytest.importorskip("torch")
    from llmstack_kv_cache.storage import allocate_kv_storage

    storage = allocate_kv_storage(2, 5, 3, 4, 8, torch.bfloat16, "cpu")
    assert len(storage) == 2
    for key_cache, value_cache in storage:
        assert key_cache.shape == value_cache.shape == (5, 3, 4, 8)
        assert key_cache.dtype is torch.bfloat16
        assert not key_cache.any()
        assert not value_cache.any()
        assert key_cache.data_ptr() != value_cache.data_ptr()
    num_bytes = sum(tensor.nbytes for pair in storage for tensor in pair)
    assert num_bytes == 2 * 2 * 5 * 3 * 4 * 8 * 2  # keys and values, layers, blocks, heads, slots, sizes, bytes


def test_a_block_of_all_layers_is_one_piece_of_memory():
    torch = pytest.importorskip("torch")
    from llmstack_kv_cache.storage import allocate_kv_storage

    storage = allocate_kv_storage(2, 5, 3, 4, 8, torch.bfloat16, "cpu")
    tensors = [tensor for pair in storage for tensor in pair]
    piece = 3 * 4 * 8 * 2
    for number in range(5):
        starts = [tensor[number].data_ptr() - tensors[0].data_ptr() for tensor in tensors]
        assert starts == [number * 4 * piece + index * piece for index in range(4)]
    assert all(tensor[0].is_contiguous() for tensor in tensors)


def test_blocks_that_were_never_used_take_no_memory():
    torch = pytest.importorskip("torch")
    from llmstack_kv_cache.storage import allocate_kv_storage

    storage = allocate_kv_storage(4, 4096, 8, 16, 64, torch.bfloat16, "cpu")  # 512 MiB
    before = resident_bytes()
    for keys, values in storage:
        keys[:3].fill_(1)
        values[:3].fill_(1)
    assert resident_bytes() - before < 8 << 20
    assert not any(tensor[3].any() or tensor[-1].any() for pair in storage for tensor in pair)


def resident_bytes() -> int:
    """Memory of this process; Linux alone says so."""
    path = Path("/proc/self/statm")
    if not path.exists():
        pytest.skip("the system does not tell what a process has in memory")
    return int(path.read_text().split()[1]) * mmap.PAGESIZE


def test_sizes_that_make_no_sense_are_refused_by_name():
    torch = pytest.importorskip("torch")
    from llmstack_kv_cache.storage import allocate_kv_storage

    with pytest.raises(ValueError, match="num_kv_heads"):
        allocate_kv_storage(2, 5, 0, 4, 8, torch.float32, "cpu")

    with pytest.raises(ValueError, match="num_layers must be at least 0, got -1"):
        allocate_kv_storage(-1, 5, 3, 4, 8, torch.float32, "cpu")
    assert allocate_kv_storage(0, 5, 3, 4, 8, torch.float32, "cpu") == []


def test_storage_of_a_device_is_made_there():
    torch = pytest.importorskip("torch")
    from llmstack_kv_cache.storage import allocate_kv_storage

    ((key_cache, value_cache),) = allocate_kv_storage(1, 5, 3, 4, 8, torch.float32, "meta")
    assert key_cache.device.type == value_cache.device.type == "meta"
    assert key_cache.shape == (5, 3, 4, 8)
