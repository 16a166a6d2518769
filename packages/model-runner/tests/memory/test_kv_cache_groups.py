"""Layers with equal windows share block tables, and all groups share one storage."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner import model_runner
from llmstack_model_runner.layers.mixer import StateTensor
from llmstack_model_runner.memory.kv_cache_groups import (
    allocate_storage,
    by_layer,
    describe_groups,
    group_layers,
    join_groups,
    max_positions,
    num_blocks_needed,
)
from llmstack_model_runner.memory.profile import MemoryState
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models.kv_spec import LayerKVSpec, keys_and_values, one_latent
from llmstack_types import KVCacheGroupSpec, KVCacheSpec, KVTensorSpec, ModelRunnerConfig

SIZES = {"block_size": 16, "dtype": "float32", "bytes_per_block": 1, "vocab_size": 9}


def one_state(shape):
    return LayerKVSpec(kind="state", states=(StateTensor("tail", shape, "float32"),))


def group(sliding_windows):
    layers = [keys_and_values(2, 16, window) for window in sliding_windows]
    return group_layers(layers, 1024, block_size=4, dtype="float32")


@pytest.mark.parametrize(
    ("sliding_windows", "sizes"),
    [
        ((), []),
        ((None, None), [2]),
        ((4096,) * 4, [4]),  # no request outgrows them
        ((32,) * 32, [32]),
        ((32, None) * 13, [13, 13]),
        (((32,) * 5 + (None,)) * 4 + (32, 32), [4, 4, 4, 4, 4, 2, 4]),
        ((None,) * 21 + (32,) * 7, [7, 7, 7, 7]),
        ((16, 32, None), [1, 1, 1]),
    ],
)
def test_groups_have_equal_sizes_and_windows(sliding_windows, sizes):
    groups = group(sliding_windows)
    assert [len(group.layers) for group in groups] == sizes
    for own in groups:
        windows = {sliding_windows[layer] for layer in own.layers}
        assert windows == {own.sliding_window} or min(windows) > 1024
        assert own.kind == ("window" if own.sliding_window else "full")


@given(st.lists(st.sampled_from([None, 8, 16, 5000]), min_size=1, max_size=80))
def test_every_layer_is_in_one_group_and_no_two_of_a_group_share_a_tensor(sliding_windows):
    groups = group(sliding_windows)
    assert 1 <= len(groups) <= 8
    assert len(groups) > 1 or len({8, 16} & set(sliding_windows)) < 2
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(sliding_windows)))
    spec = KVCacheSpec(num_layers=len(sliding_windows), groups=groups, **SIZES)
    storage = [(torch.tensor(place), torch.tensor(place)) for place in range(max(len(g.layers) for g in groups))]
    caches = by_layer(storage, spec)
    for own in groups:
        places = [int(caches[layer][0]) for layer in own.layers]
        assert places == list(range(len(own.layers)))


def test_a_model_with_one_group_has_tensors_for_each_layer():
    spec = KVCacheSpec(num_layers=2, groups=group((None, None)), **SIZES)
    storage = [(torch.tensor(place), torch.tensor(place)) for place in range(2)]
    assert by_layer(storage, spec) == storage
    assert num_blocks_needed(spec, 402, 64) == 26


def test_a_spec_of_one_group_has_tables_of_its_own_where_it_has_a_window():
    assert KVCacheSpec(num_layers=2, groups=group((None, None)), **SIZES).table_groups == ()
    windowed = group((32, 32))
    assert KVCacheSpec(num_layers=2, groups=windowed, **SIZES).table_groups == windowed
    assert join_groups(windowed) == group((None, None))
    assert join_groups(()) == ()


def test_the_storage_has_the_tensors_that_the_groups_name():
    layers = [one_latent(24)] * 3
    groups = group_layers(layers, 1024, block_size=4, dtype="bfloat16")
    (own,) = groups
    assert (own.kind, own.layers) == ("latent", (0, 1, 2))
    assert own.tensors == (KVTensorSpec("latent", (1, 4, 24), "bfloat16"),)
    assert own.bytes_per_block == 3 * 4 * 24 * 2
    storage = allocate_storage(KVCacheSpec(num_layers=3, groups=groups, **SIZES), 5, "cpu")
    assert [tuple(tensor.shape for tensor in layer) for layer in storage] == [((5, 1, 4, 24),)] * 3
    assert {tensor.dtype for (tensor,) in storage} == {torch.bfloat16}


def test_states_of_different_shapes_are_refused():
    states = [one_state((size,)) for size in (2, 3)]
    with pytest.raises(ValueError, match="states of different shapes"):
        group_layers([keys_and_values(1, 8), *states], 1024, 4, dtype="float32")


def spec_of(groups, **changes):
    num_layers = sum(len(own.layers) for own in groups)
    bytes_per_block = max(own.bytes_per_block for own in groups)
    return KVCacheSpec(num_layers=num_layers, groups=groups, **SIZES | {"bytes_per_block": bytes_per_block} | changes)


def test_layers_with_other_heads_have_groups_of_their_own_of_about_the_same_size():
    layers = [*[keys_and_values(16, 256, 32)] * 5, keys_and_values(4, 512)]  # the last ones have half the bytes
    groups = group_layers(layers * 10, 1024, block_size=4, dtype="float32")
    assert [len(own.layers) for own in groups] == [10] * 6
    groups_of_few = group_layers(layers[3:] * 4, 1024, block_size=4, dtype="float32")
    assert [len(own.layers) for own in groups_of_few] == [2, 2, 2, 2, 4]
    assert len({own.bytes_per_block for own in groups_of_few}) == 1
    assert join_groups(groups) == tuple(
        KVCacheGroupSpec(tuple(layers), tensors=own.tensors)
        for layers, own in (([n for n in range(60) if n % 6 != 5], groups[0]), (range(5, 60, 6), groups[-1]))
    )


LAYERS = st.builds(keys_and_values, st.sampled_from([1, 2]), st.sampled_from([8, 24]), st.sampled_from([None, 8]))


@given(st.lists(LAYERS, min_size=1, max_size=12), st.sampled_from(["float32", "bfloat16"]))
def test_layers_of_any_shapes_keep_what_is_written_in_their_blocks(layers, dtype):
    """Each group owns some blocks, and writes them whole; what it reads again is its own."""
    groups = group_layers(layers, 1024, block_size=2, dtype=dtype)
    spec = spec_of(groups)
    caches = by_layer(allocate_storage(spec, 2 * len(groups), "cpu"), spec)
    value = 0
    for number, own in enumerate(groups):
        for layer in own.layers:
            for tensor, expected in zip(caches[layer], layers[layer].block_tensors(2, dtype), strict=True):
                assert (tuple(tensor.shape[1:]), str(tensor.dtype)) == (expected.shape, f"torch.{dtype}")
                for block in (2 * number, 2 * number + 1):
                    tensor[block] = value = value + 1
    found = [
        int(tensor[block].unique())
        for number, own in enumerate(groups)
        for layer in own.layers
        for tensor in caches[layer]
        for block in (2 * number, 2 * number + 1)
    ]
    assert found == list(range(1, value + 1))


@pytest.fixture
def long_runner(tmp_path):
    """A model of ten million positions."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 10_000_000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = ModelRunner(
        ModelRunnerConfig(
            str(tmp_path), max_model_len=10_000_000, device="cpu", dtype="float32", load_format="dummy", block_size=4
        )
    )
    runner.load_model()
    return runner


def test_a_model_of_ten_million_positions_has_tables_for_what_the_cache_holds(long_runner):
    long_runner.initialize_kv_cache(20)
    assert long_runner._model._rotaries[0].table.shape[0] == 80
    windowed = KVCacheSpec(num_layers=2, groups=(KVCacheGroupSpec((0,), 8), KVCacheGroupSpec((1,), 32)), **SIZES)
    assert max_positions(long_runner._config, windowed, 20) == 10_000_000  # windows free what they have passed
    one_sees_all = replace(windowed, groups=(KVCacheGroupSpec((0,), 8), KVCacheGroupSpec((1,))))
    assert max_positions(long_runner._config, one_sees_all, 20) == 20 * 16


def test_measuring_a_device_makes_tables_for_what_it_could_hold(long_runner, monkeypatch):
    """The largest steps come before the KV cache has a size."""

    class Probe:
        def __init__(self, device):
            self.total_bytes = 40_000 * long_runner.kv_cache_spec().bytes_per_block

        def state(self):
            return MemoryState(free_bytes=self.total_bytes, reserved_bytes=0)

        def reset_peak(self):
            pass

        def peak_bytes(self):
            return 0

    monkeypatch.setattr(model_runner, "CudaMemoryProbe", Probe)
    long_runner._profile_memory(0.9)
    assert long_runner._model._rotaries[0].table.shape[0] == 40_000 * 4
    long_runner.initialize_kv_cache(20)
    assert long_runner._model._rotaries[0].table.shape[0] == 40_000 * 4


def test_needs_are_summed_over_the_groups():
    groups = (KVCacheGroupSpec((0,)), KVCacheGroupSpec((1,), 32))
    assert num_blocks_needed(KVCacheSpec(num_layers=2, groups=groups, **SIZES), 402, 1) == 26 + 3


def test_the_log_says_which_layers_free_blocks_and_if_not_why():
    groups = group((32, None, 32))
    expected = "layers: 2 with a window of 32, 1 with full attention; 3 block tables"
    assert describe_groups(groups, is_enabled=True) == expected
    assert describe_groups(groups, is_enabled=False).endswith("--disable-hybrid-kv-cache-manager")
    with_states = group_layers([keys_and_values(2, 4), one_state((2, 8))], 64, 16, "float32")
    assert describe_groups(with_states, is_enabled=True) == (
        "layers: 1 with a state, 1 with attention; 64 bytes per state, and prefix hits end at a block boundary where "
        "one is kept"
    )
    assert describe_groups((), is_enabled=True) == describe_groups(group((None,)), is_enabled=True) == ""
