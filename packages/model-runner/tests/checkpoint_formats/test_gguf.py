"""GGUF files: numbers mean what the format's own library says, and models compute what transformers does with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.gguf_models import SIZES, TYPES, kv_heads, meaning, random_data, write_model
from model_runner_helpers.paged_harness import PagedHarness
from safetensors.torch import save_file

from llmstack_gguf import TENSOR_TYPES, Header, TensorInfo, read_header, target_of
from llmstack_kernels.embedding import can_look_up_blocks, embedding_of_blocks
from llmstack_kernels.linear import BLOCK_TYPES, INT4_DYNAMIC, BlockWeight, StoredWeight, pack_stored_linear
from llmstack_kernels.linear.segments import SegmentLinear
from llmstack_model_files import gguf_weights, resolve_model, weights_digest
from llmstack_model_runner.checkpoint_formats import gguf
from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.layers import embedding as embedding_layer
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.preflight import find_problems
from llmstack_model_runner.weights import load_weights
from llmstack_types import ModelRunnerConfig

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# As llama.cpp mixes them in Q4_K_M files.
MIXED = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "output.weight": "Q6_K", "token_embd.weight": "Q4_K"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mixed(name: str) -> str:
    return next((kind for suffix, kind in MIXED.items() if name.endswith(suffix)), "Q4_K")


def experts_in_mxfp4(name: str) -> str:
    return "MXFP4" if "_exps" in name else "Q8_0"


# As llama.cpp mixes them in Q2_K and IQ4_XS files.
FEW_BITS = {
    "llama in few bits": lambda name: "Q3_K" if name.endswith(("attn_v.weight", "ffn_down.weight")) else "Q2_K",
    "mixtral in few bits": lambda name: "IQ4_NL" if name.endswith("attn_v.weight") else "IQ4_XS",
}


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_mean_what_the_formats_library_says(kind: str) -> None:
    data = random_data(kind, (6, 512), seed=1)
    expected = meaning(data, kind)
    flat = torch.from_numpy(data.reshape(-1).copy())
    types = {entry.name: entry for entry in TENSOR_TYPES.values()}
    found = gguf._read(flat, "x", TensorInfo((6, 512), types[kind], 0, flat.numel()))
    if isinstance(found, BlockWeight):
        found = found.stored()
    if isinstance(found, StoredWeight) and not found.has_float_zeros:
        assert torch.equal(found.dequantize(torch.float32), expected)
    elif isinstance(found, StoredWeight):
        found = found.dequantize(torch.float64)
        assert (found - expected.double()).abs().max() <= 2e-7 * expected.abs().max() + 1e-9
    else:
        assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_that_is_widened_in_parts_is_that_of_all_rows_together(dtype: torch.dtype) -> None:
    shape = (5000, 512)  # more numbers than are widened together
    data = torch.from_numpy(random_data("Q4_0", shape, seed=3).reshape(-1).copy())
    types = {entry.name: entry for entry in TENSOR_TYPES.values()}
    found = gguf._read(data, "x", TensorInfo(shape, types["Q4_0"], 0, data.numel()))
    assert isinstance(found, BlockWeight)
    assert torch.equal(found.dequantize(dtype), found.dequantize(torch.float32).to(dtype))


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K", "Q4_1", "Q5_1"])
def test_a_group_whose_scale_is_zero_means_its_smallest_value(kind: str) -> None:
    data = random_data(kind, (3, 256), seed=2)
    start = 80 if kind == "Q2_K" else 0
    data[:, start : start + 2] = 0  # the scale of the first block
    expected = meaning(data, kind)
    types = {entry.name: entry for entry in TENSOR_TYPES.values()}
    flat = torch.from_numpy(data.reshape(-1).copy())
    found = gguf._read(flat, "x", TensorInfo((3, 256), types[kind], 0, flat.numel()))
    assert not isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_layers_with_rounded_inputs_are_packed_from_blocks_and_mean_the_same_numbers(kind: str) -> None:
    data = random_data(kind, (70, 512), seed=3)
    types = {entry.name: entry for entry in TENSOR_TYPES.values()}
    flat = torch.from_numpy(data.reshape(-1).copy())
    found = gguf._read(flat, "x", TensorInfo((70, 512), types[kind], 0, flat.numel()))
    assert isinstance(found, BlockWeight)
    x, own = torch.randn(5, 512), found.rows(torch.randperm(70))
    expected = SegmentLinear(own, None)(x)
    packed = pack_stored_linear(own, torch.float32, None, input_rounding=INT4_DYNAMIC)(x)
    assert (packed - expected).abs().max() <= 2e-6 * expected.abs().max()
    exact = pack_stored_linear(own, torch.float32, None)(x)
    assert 1e-4 < ((packed - exact).norm() / exact.norm()).item() < 0.02


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Rows of queries or keys as repositories have them, of those that llama.cpp writes for Llama."""
    head_dim = SIZES["hidden"] // SIZES["heads"]
    heads = weight.reshape(weight.shape[0] // head_dim, head_dim // 2, 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("architecture", "is_tied"),
    [
        ("llama", False),
        ("llama in few bits", False),
        ("mixtral", False),
        ("mixtral in few bits", False),
        ("gemma2", True),
        ("gpt2", True),
        ("falcon-40b", False),
        ("gpt-oss", False),
        *(
            pytest.param(architecture, architecture.startswith("gemma"), marks=pytest.mark.full)
            for architecture in (
                "qwen2", "qwen3", "qwen3moe", "gemma", "gemma3", "phi2", "phi3", "stablelm", "gptneox", "bloom",
                "falcon",
            )
        ),
    ],
)  # fmt: skip
def test_a_model_of_a_file_computes_what_transformers_does_with_the_weights_it_means(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    kind_of = FEW_BITS.get(architecture, experts_in_mxfp4 if architecture == "gpt-oss" else mixed)
    architecture = architecture.partition(" ")[0]
    meant = write_model(tmp_path / "model.gguf", architecture, kind_of, is_tied=is_tied)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = load_model_class(config["architectures"][0])(config, torch.float32, CPU)
    load_weights(model, folder, dtype=torch.float32, checkpoint_format=read_format(config))
    found = PagedHarness(model, torch.float32).step([("a", PROMPT)])  # type: ignore[arg-type]  # it is a decoder

    header = read_header(tmp_path / "model.gguf")
    repository = write_repository(tmp_path / "repository", header, architecture, config, meant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(repository, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
    assert expected.std() > 1e-3
    assert (found.reshape(-1, SIZES["vocab"])[-1] - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.skipif(not can_look_up_blocks(), reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # the latter has a scale and a tied head
def test_a_table_that_stays_in_blocks_gives_the_bits_of_a_widened_one(
    architecture: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    def look_up(*arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return embedding_of_blocks(*arguments)

    def logits() -> torch.Tensor:
        model = load_model_class(config["architectures"][0])(config, dtype, CPU)
        load_weights(model, folder, dtype=dtype, checkpoint_format=read_format(config))
        return PagedHarness(model, dtype).step([("a", PROMPT)])  # type: ignore[arg-type]  # it is a decoder

    write_model(tmp_path / "model.gguf", architecture, lambda name: "Q4_K", is_tied=architecture == "gemma2")
    folder = resolve_model(str(tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(embedding_layer, "embedding_of_blocks", look_up)
    found = logits()
    assert bool(num_calls) == (dtype != torch.float16)  # that of float16 is widened, to be checked
    monkeypatch.setattr(embedding_layer, "can_look_up_blocks", lambda: False)
    num_calls = 0
    assert torch.equal(found, logits())
    assert not num_calls


GROUPED = ("gptneox", "bloom", "falcon", "falcon-40b")


def grouped(rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Rows as repositories have them: each group's queries, key and value."""
    num_heads, head_dim = SIZES["heads"], SIZES["hidden"] // SIZES["heads"]
    heads = list(rows.split(head_dim))
    queries, others = heads[:num_heads], heads[num_heads:]
    size = num_heads // num_groups
    found = []
    for group in range(num_groups):
        found += [*queries[group * size : (group + 1) * size], others[group], others[num_groups + group]]
    return torch.cat(found)


def stacked(name: str, meant: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as repositories of gpt-oss have them: gates and ups in turns, matrices the other way around."""
    _, layer, part, kind = name.split(".")
    key = f"model.layers.{layer}.mlp.experts.{'down' if 'down' in part else 'gate_up'}_proj{'_bias' * (kind == 'bias')}"
    tensor = meant[name]
    if part != "ffn_down_exps":
        gates, ups = (meant[f"blk.{layer}.ffn_{which}_exps.{kind}"] for which in ("gate", "up"))
        tensor = torch.empty((gates.shape[0], 2 * gates.shape[1], *gates.shape[2:]))
        tensor[:, 0::2], tensor[:, 1::2] = gates, ups
    return {key: (tensor.transpose(1, 2) if kind == "weight" else tensor).contiguous()}


def write_repository(
    folder: Path, header: Header, architecture: str, config: dict[str, Any], meant: dict[str, torch.Tensor]
) -> Path:
    """What the file was converted from, by the rules of llama.cpp's converter."""
    state = {}
    for name, tensor in meant.items():
        placed = tensor
        if architecture in ("llama", "mixtral") and name.endswith(("attn_q.weight", "attn_k.weight")):
            placed = interleaved(tensor)
        if architecture.startswith("gemma") and "norm" in name:
            placed = tensor - 1
        if architecture == "gpt2" and name.startswith("blk.") and name.endswith("weight") and tensor.ndim == 2:
            placed = tensor.t()
        if name.endswith(("attn_qkv.weight", "attn_qkv.bias")) and architecture in GROUPED:
            placed = grouped(tensor, kv_heads(architecture))
        if "_exps." in name and architecture == "gpt-oss":
            state |= stacked(name, meant)
            continue
        target = target_of(header, name)
        parts = placed.unbind() if target.is_experts else (placed,)
        state |= {key: part.clone().contiguous() for key, part in zip(target.names, parts, strict=True)}
    if not state.keys() & {"lm_head.weight", "embed_out.weight"}:
        table = "transformer.wte.weight" if architecture == "gpt2" else "model.embed_tokens.weight"
        state["lm_head.weight"] = state[table].clone()
    folder.mkdir()
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_file_is_checked_before_torch_and_its_weights_are_counted_with_their_bits(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", mixed)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    config = ModelRunnerConfig(str(folder), max_model_len=32)
    assert find_problems(config) == []
    (message,) = find_problems(ModelRunnerConfig(str(folder), max_model_len=32, quantization="int4"))
    assert "quantized already (by gguf)" in message


def test_parts_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", "qwen2", mixed)
    write_model(tmp_path / "parts.gguf", "qwen2", mixed, tensors_per_file=9)
    parts = sorted(tmp_path.glob("parts-*-of-00003.gguf"))
    assert len(parts) == 3
    folder = resolve_model(str(parts[2]))
    assert resolve_model(str(parts[0])) == folder
    assert gguf_weights(folder) == parts
    whole, joined = (
        {name: weight.read() for name, weight in gguf.read_gguf(paths, 64)}
        for paths in ([tmp_path / "whole.gguf"], gguf_weights(folder))
    )
    assert joined.keys() == whole.keys()
    for name, tensor in whole.items():
        pair = [
            one.dequantize(torch.float32) if isinstance(one, StoredWeight | BlockWeight) else one
            for one in (tensor, joined[name])
        ]
        assert torch.equal(*pair)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    before = weights_digest(folder)
    os.utime(parts[1], ns=(0, 0))
    assert weights_digest(folder) != before  # of every part
    model = load_model_class(config["architectures"][0])(config, torch.float32, CPU)
    load_weights(model, folder, dtype=torch.float32, checkpoint_format=read_format(config))
    assert find_problems(ModelRunnerConfig(str(folder), max_model_len=32)) == []


def test_a_scale_that_is_no_number_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", mixed)
    header = read_header(tmp_path / "model.gguf")
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    start = header.tensors["blk.1.ffn_up.weight"].start
    content[start : start + 2] = b"\x00\x7e"  # NaN
    (tmp_path / "damaged.gguf").write_bytes(content)
    (damaged,) = (
        weight
        for name, weight in gguf.read_gguf([tmp_path / "damaged.gguf"], 64)
        if name.endswith("1.mlp.up_proj.weight")
    )
    with pytest.raises(ValueError, match=r"^blk\.1\.ffn_up\.weight cannot be read as Q4_K: a .* is NaN or infinite"):
        damaged.read()
